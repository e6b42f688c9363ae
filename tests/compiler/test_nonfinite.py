"""NaN and infinities in weights: a compile refuses them unless --allow_nan is set."""

import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import llmc
from llmc.cli import main
from llmc.compiler.graph.weights import Weight

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def damaged(tiny_hf, tmp_path):
    """Factory by dtype and tensor values: a copy of the model with them."""
    def make(name, dtype, values):
        hf = shutil.copytree(tiny_hf, tmp_path / "hf")
        tensors = {key: own.to(dtype) for key, own in load_file(hf / "model.safetensors").items()}
        tensors[name].view(-1)[5:5 + len(values)] = torch.tensor(values, dtype=dtype)
        save_file(tensors, hf / "model.safetensors")
        return hf
    return make


@pytest.mark.parametrize(("name", "dtype", "values", "options", "match"), [
    (NAME, torch.float32, [np.nan, np.nan, np.inf], {}, r"\[100, 64\] has 2 NaN and 1 infinite"),
    (NAME, torch.bfloat16, [-np.inf], {"tp_size": 2}, "has 0 NaN and 1 infinite values"),
    ("model.norm.weight", torch.float16, [np.nan], {"target": "cuda", "dtype": "bfloat16"},
     r"\[64\] has 1 NaN and 0 infinite"),
    ("model.embed_tokens.weight", torch.float32, [np.nan], {"quantize": "int8"}, "has 1 NaN"),
])
def test_a_compile_names_the_tensor_and_counts_nonfinite_values(damaged, tmp_path, name, dtype,
                                                                values, options, match):
    hf = damaged(name, dtype, values)
    with pytest.raises(llmc.LlmcError, match=f"^tensor '{name}' .*{match}.*; get the "
                                             "checkpoint again, or compile with --allow_nan$"):
        llmc.compile(hf, tmp_path / "case", **options)
    assert not (tmp_path / "case").exists()


def test_allow_nan_keeps_nonfinite_values(damaged, tmp_path):
    hf = damaged(NAME, torch.float32, [np.nan])
    result = CliRunner().invoke(main, ["compile", str(hf), "-o", str(tmp_path / "case"),
                                       "--allow_nan"])
    assert result.exit_code == 0, result.output
    with llmc.LLM(tmp_path / "case") as model:
        assert np.isnan(model.logits([1, 2])).any()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_values_are_finite_and_rows_are_checked_once(dtype):
    largest = ml_dtypes.finfo(dtype).max
    array = np.array([[0.0, largest], [-largest, 1.0], [np.nan, 2.0], [-np.inf, 3.0]]).astype(dtype)
    reads = []
    weight = Weight(array.shape, dtype, lambda start, stop: reads.append(start) or
                    array[start:stop], "w")
    taken = weight.transpose()  # created before
    weight.require_finite()
    assert np.array_equal(weight.rows(0, 2), array[:2])
    for broken in (lambda: weight.rows(2, 3), lambda: weight.rows(3, 4), taken.load):
        with pytest.raises(llmc.LlmcError, match=r"'w' \[4, 2\] has 1 NaN and 1 infinite values"):
            broken()


def test_minus_infinity_may_be_a_mask(tmp_path):
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    weight = Weight.of(mask, "mask")
    weight.require_finite(allow_minus_inf=True)
    assert np.array_equal(weight.load(), mask)
    weight = Weight.of(-mask, "mask")
    weight.require_finite(allow_minus_inf=True)
    with pytest.raises(llmc.LlmcError, match="has 0 NaN and 6 infinite"):
        weight.load()
