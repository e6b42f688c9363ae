"""`llmc diff` on the CUDA engine: traced values equal those of the reference."""

import families
import numpy as np
import pytest
from schedule_interpreter import Interpreter
from stepping import load

import llmc
from llmc.compiler.check.diff import diff
from llmc.runtime.core.step import Step

# Relative to a tensor's range, after all layers of a tiny model.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_an_unmodified_model_is_within_tolerance(extension, family, dtype, tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", dtype=dtype)
    report = diff(tmp_path / "case", hf, bisect=True)
    assert report.verdict is None and report.first_op is None
    assert len(report.tokens) == 16 and all(token.passed for token in report.tokens)
    assert max(d.relative for d in report.layers) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_value_is_traced_before_its_memory_is_used_again(extension, dtype, tmp_path):
    """Prompt, continuation and a single token; tracing does not change the engine."""
    hf = families.save(families.tiny_model("gpt2"), tmp_path / "hf")
    manifest = llmc.compile(hf, tmp_path / "case", target="cuda", dtype=dtype)
    assert manifest.dtype == dtype
    engine = load(tmp_path / "case", max_batch_size=1, max_tokens=16, block_size=4)
    interpreter = Interpreter(tmp_path / "case")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 14).tolist()
    for start, end in ((0, 9), (9, 13), (13, 14)):
        step = Step.of([tokens[start:end]], [start], [[9, 2, 5, 0]], [0], logits="all")
        traced, expected = engine.trace(step), interpreter.trace(step)
        assert list(traced) == list(expected)
        for name, value in expected.items():
            families.assert_close(traced[name], value, TOLERANCE[dtype])
        families.assert_close(engine.collect(engine.submit(step)).logits,
                              traced["logits"][:, :families.VOCAB], TOLERANCE[dtype])


def test_a_planted_error_names_its_node(extension, tmp_path):
    hf = families.save(families.tiny_model("llama"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda")
    weight = "model.layers.1.mlp.gate_up_proj.weight.normed"
    families.plant(tmp_path / "case", 0, weight, 3.0)
    report = diff(tmp_path / "case", hf, bisect=True)
    assert report.first_layer == "hidden_states.1" and report.first_op.startswith("NormGemm")
    assert [bad.name for bad in report.weights] == [weight]
