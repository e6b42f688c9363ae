"""`llmc diff`: equal models are equal, and a planted error is found, with its layer and chip."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from llmc.cli import main
from llmc.compiler.diff import compare, diff


def plant(case, chip, name, scale):
    """Change one element of one weight in place; return nothing."""
    path = case / f"chip{chip}" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]
    value = np.frombuffer(data[start:start + 4], np.float32)[0]
    data[start:start + 4] = np.float32(value + scale).tobytes()
    path.write_bytes(data)


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
    plant(broken_case, 1, "model.layers.2.mlp.gate_up_proj.weight", 3.0)
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
