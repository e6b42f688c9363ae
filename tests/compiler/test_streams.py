"""Models with several residual streams: packed in one row at any depth, or refused by name."""

import families
import pytest
import torch
from transformers.models.hy_v4 import modeling_hy_v4

import llmc
from llmc.compiler import lower
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import load, trace
from llmc.compiler.options import CompileOptions


def test_residual_streams_are_packed_in_one_row(tmp_path, monkeypatch):
    counts = families.count_exported(monkeypatch, "Sdpa")
    for depth in (6, 9):
        hf = families.save(families.tiny_model("hy_v4", num_hidden_layers=depth),
                           tmp_path / f"hf{depth}")
        raw = load(hf)
        assert not raw.notes
        graph = lower.fuse(raw, CompileOptions()).graphs[0]
        names = {tensor.name: tensor.shape for tensor in graph.tensors().values()}
        assert all(names[f"hidden_states.{layer}"][1:] == (3 * 64,) for layer in range(depth))
        assert not {"Reshape", "Unsqueeze", "Expand", "ReduceSum", "ReduceMean"} & {
            node.op for node in graph.nodes}
    assert len({*counts}) <= 1


def test_diff_compares_residual_streams(tmp_path):
    hf = families.save(families.tiny_model("hy_v4"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", tp_size=2)
    assert diff(tmp_path / "case", hf, bisect=True, tokens=2).verdict is None
    families.plant(tmp_path / "case", 0, "model.layers.1.mlp.shared_experts.down_proj.weight", 3.0)
    report = diff(tmp_path / "case", hf, bisect=True, tokens=2)
    assert report.first_layer == "hidden_states.1"


def test_ops_that_mix_tokens_between_streams_are_refused(tmp_path, monkeypatch):
    real = modeling_hy_v4.HYV4HyperHead.forward
    monkeypatch.setattr(modeling_hy_v4.HYV4HyperHead, "forward",
                        lambda self, x: real(self, x * torch.softmax(x, dim=1)))
    exporter = trace._run_exporter
    monkeypatch.setattr(trace, "_run_exporter", lambda *args: exporter(*args))  # not a cached one
    hf = families.save(families.tiny_model("hy_v4"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=r"parallel hidden states were not recognized: "
                                             r"this op is not row-wise: Softmax ") as caught:
        llmc.compile(hf, tmp_path / "case")
    assert "\n" not in str(caught.value)
