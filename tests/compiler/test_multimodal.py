"""The language model compiles from checkpoints of multimodal models.
"""

import families
import numpy as np
import pytest
import torch
from multimodal_models import TEXTS, tiny_model
from safetensors.torch import load_file, save_file

import llmc
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import load

COMMON = ("mistral3", "qwen3_vl")
ROW = np.random.default_rng(3).integers(3, families.VOCAB - 3, 24).tolist()


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.thorough] * (family not in COMMON))
    for family in TEXTS])
def test_the_language_model_compiles_from_the_whole_checkpoint(family, tmp_path):
    model = tiny_model(family)
    cases = families.compile_sizes(families.save(model, tmp_path / "hf"), tmp_path, [1, 2])
    expected = families.reference_logits(model, ROW)
    for case in cases.values():
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(ROW), expected)
            session = llm.session(1)
            families.assert_close(session.extend([ROW[:9]])[0], expected[8])
            families.assert_close(session.extend([[ROW[9]]])[0], expected[9])


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl"])
def test_diff_compares_the_language_model(family, tmp_path):
    hf_dir = families.save(tiny_model(family), tmp_path / "hf")
    llmc.compile(hf_dir, tmp_path / "case", tp_size=2)
    compared = diff(tmp_path / "case", hf_dir, tokens=16)
    assert compared.verdict is None, compared


def test_a_note_reports_that_images_are_unsupported(tmp_path):
    hf_dir = families.save(tiny_model("mistral3"), tmp_path / "hf")
    sentence = ("input of images is not supported: only the language model of 'mistral3' is "
                "compiled")
    assert sentence in load(hf_dir).notes
    told = []
    llmc.compile(hf_dir, tmp_path / "case", progress=told.append)
    assert sentence in told


def test_an_unassigned_tensor_is_named(tmp_path):
    hf_dir = families.save(tiny_model("mistral3"), tmp_path / "hf")
    tensors = load_file(hf_dir / "model.safetensors")
    save_file({**tensors, "model.language_model.layers.0.mlp.more.weight": torch.ones(2, 2)},
              hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(llmc.LlmcError, match=r"has a tensor '[\w.]*layers.0.mlp.more.weight'"):
        llmc.compile(hf_dir, tmp_path / "case")
    (name,) = [name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight")
               and "language_model" in name]
    save_file({key: tensor for key, tensor in tensors.items() if key != name},
              hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(llmc.LlmcError, match=r"has no tensor '[\w.]*layers.1.mlp.up_proj.weight'"):
        llmc.compile(hf_dir, tmp_path / "case")
