"""`llmc diff`: equal models are equal, and a planted error is found, with its layer and chip."""

import json

import families
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open
from schedule_interpreter import Interpreters

import llmc
from llmc.cli import main
from llmc.compiler.check import diff as diff_module
from llmc.compiler.check.diff import compare, diff
from llmc.runtime.manifest import read_manifest


@pytest.mark.parametrize("case", ["case_tp1", "case_tp2"])
def test_a_faithful_model_is_within_tolerance(case, tiny_hf, request):
    report = diff(request.getfixturevalue(case), tiny_hf, bisect=True)
    assert report.verdict is None and report.first_op is None
    assert report.tokens == report.reference_tokens
    names = {d.name for d in report.layers}
    assert names == {*(f"hidden_states.{i}" for i in range(4)), "logits"}
    assert {d.pair for d in report.layers} == {
        "compiled vs export", "export vs transformers", "compiled vs transformers"}
    assert max(d.relative for d in report.layers) < 1e-5
    assert min(d.cosine for d in report.layers) > 0.999999


def test_a_planted_error_names_its_layer_and_chip(broken_case, tiny_hf, tmp_path):
    families.plant(broken_case, 1, "model.layers.2.mlp.gate_up_proj.weight", 3.0)
    report = diff(broken_case, tiny_hf, bisect=True)
    assert report.first_layer == "hidden_states.2"
    weight, = report.weights
    assert (weight.chip, weight.layer, weight.elements) == (1, 2, 1)
    assert report.first_op.startswith("GatedMLP") and "on chip 1" in report.first_op
    assert report.changed_files == ("chip1/weights.safetensors",)
    result = CliRunner().invoke(main, ["diff", "--case_dir", str(broken_case), "--reference",
                                       str(tiny_hf), "--html", str(tmp_path / "r.html")])
    assert result.exit_code == 1
    assert "chip 1's weight 'model.layers.2.mlp.gate_up_proj.weight' of layer 2" in result.stderr
    page = (tmp_path / "r.html").read_text()
    assert "<svg" in page and "hidden_states.2" in page


def test_json_output(case_tp1, tiny_hf):
    result = CliRunner().invoke(main, ["diff", "--case_dir", str(case_tp1), "--reference",
                                       str(tiny_hf), "--json", "--prompt", "the quick fox"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["verdict"] is None and len(report["layers"]) == 15


def test_differences_are_measured_against_the_range():
    found = compare("x", "a vs b", np.array([1.0, 2.0, 3.1]), np.array([1.0, 2.0, 3.0]), 0.1)
    assert found.max_abs == pytest.approx(0.1, rel=1e-5)
    assert found.relative == pytest.approx(0.05, rel=1e-5) and found.passed
    assert not compare("x", "a vs b", np.array([1.0, 2.6]), np.array([1.0, 2.0]), 0.1).passed


def test_the_weight_file_names_match_the_graph(case_tp2):
    with safe_open(case_tp2 / "chip0" / "weights.safetensors", framework="np") as file:
        assert "model.layers.0.self_attn.qkv_proj.weight" in file.keys()  # noqa: SIM118


@pytest.fixture
def interpreted(monkeypatch):
    """Interpreters in the place of CUDA engines."""
    monkeypatch.setattr(diff_module, "device_count", lambda: 8)
    monkeypatch.setattr(diff_module, "Replica",
                        lambda manifest, case, placements, batch, tokens: Interpreters(case))
    monkeypatch.setattr(diff_module, "_greedy",
                        lambda root, ids, count: Interpreters(root).greedy(ids.tolist(), count))


def test_float8_caches_have_a_tolerance_of_their_own(interpreted, tmp_path):
    hf = families.save(families.tiny_model("llama"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", kv_dtype="float8_e4m3fn")
    assert read_manifest(tmp_path / "case").kv_dtype == "float8_e4m3fn"
    report = diff(tmp_path / "case", hf)
    assert report.verdict is None and report.tolerance == 0.1
    worst = max(d.relative for d in report.layers if d.pair == "compiled vs export")
    assert 1e-3 < worst < 0.03


@pytest.mark.parametrize(("family", "dtype", "tp_size"), [
    ("llama", "float32", 1), ("gpt2", "float32", 1), ("gemma2", "float16", 1),
    ("gpt2", "bfloat16", 1), ("llama", "float32", 2)])
def test_a_faithful_schedule_is_within_tolerance(family, dtype, tp_size, interpreted, tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", dtype=dtype, tp_size=tp_size)
    report = diff(tmp_path / "case", hf, bisect=True)
    assert report.verdict is None and report.first_op is None
    assert report.tolerance == {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.16}[dtype]
    drift = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    ours = [d for d in report.layers if d.pair == "compiled vs export"]
    depth = len(Interpreters(tmp_path / "case").ranks[0].caches) // 2
    assert [d.name for d in ours] == [*(f"hidden_states.{i}" for i in range(depth)), "logits"]
    assert max(d.relative for d in ours) < drift
    assert dtype != "float32" or report.tokens == report.reference_tokens


def test_a_long_prompt_is_traced_in_steps(interpreted, tiny_hf, tmp_path, monkeypatch):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    monkeypatch.setattr(diff_module, "MAX_LOGITS", 5)
    assert diff(tmp_path / "case", tiny_hf, bisect=True).verdict is None
    with pytest.raises(llmc.LlmcError, match=r"has \d+ tokens, more than max_seq_len 64; shorten"):
        diff(tmp_path / "case", tiny_hf, prompt="the quick brown fox " * 60)


@pytest.mark.parametrize(("family", "weight", "op"), [
    ("llama", "model.layers.1.mlp.gate_up_proj.weight.normed", "NormGemm"),
    ("gpt2", "transformer.h.1.attn.c_proj.weight", "GemmBiasRes")])
def test_a_planted_error_in_a_schedule_s_weights_names_its_node(family, weight, op, interpreted,
                                                                tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda")
    families.plant(tmp_path / "case", 0, weight, 3.0)
    report = diff(tmp_path / "case", hf, bisect=True)
    assert report.first_layer == "hidden_states.1" and report.first_op.startswith(op)
    bad, = report.weights
    assert (bad.name, bad.layer, bad.elements) == (weight, 1, 1)
    assert "hidden_states.1" in report.verdict and weight in report.verdict


def test_what_is_compiled_for_a_gpu_needs_one(tiny_hf, tmp_path, monkeypatch):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="bfloat16")
    monkeypatch.setattr("llmc.runtime.engines.cuda.find_spec", lambda name: None)
    with pytest.raises(llmc.LlmcError, match="has no CUDA engine; install it"):
        diff(tmp_path / "case", tiny_hf)
