"""TensorRT-RTX's parser and builder accept every artifact, and its graph is correct."""

import families
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check.diff import diff
from llmc.compiler.targets import tensorrt_rtx

pytest.importorskip("tensorrt_rtx")
NEW = 6


def run(session, caches, tokens, past):
    """Run one step of sequences with equal lengths; return the logits of the last tokens."""
    batch, count = len(tokens), len(tokens[0])
    feeds = {"input_ids": np.concatenate(tokens),
             "position_ids": np.tile(np.arange(past, past + count), batch),
             "cu_seqlens": np.arange(batch + 1, dtype=np.int32) * count,
             "past_lens": np.full(batch, past, np.int32),
             "logits_indices": np.arange(1, batch + 1) * count - 1, **caches}
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    results = dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in wanted}),
                       strict=True))
    caches.update({name: results[f"{name}_out"] for name in caches})
    return results["logits"]


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=[pytest.mark.thorough] * (name != "gpt2"))
    for name in (*families.FAMILIES, "ministral3", "gemma4_unified_text")])
def test_an_engine_of_every_family(family, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="tensorrt_rtx")
    manifest = read_manifest(tmp_path / "case")
    assert manifest.target.versions.keys() == {"tensorrt_rtx"}
    assert {entry.path for entry in manifest.files} >= {"chip0/engine.plan", "chip0/graph.onnx"}
    path = tmp_path / "case" / "chip0" / "graph.onnx"
    graph = onnx.load(path, load_external_data=False)
    assert not graph.functions and {entry.domain for entry in graph.opset_import} == {""}

    session = ort.InferenceSession(str(path))
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, families.VOCAB, (2, NEW + 3))
    caches = {value.name: np.zeros((2, *value.shape[1:]), np.float32)
              for value in session.get_inputs() if "_cache_" in value.name}
    logits = [run(session, caches, list(tokens[:, :NEW]), 0)]
    for past in range(NEW, NEW + 3):
        logits.append(run(session, caches, list(tokens[:, past:past + 1]), past))
    for sequence in range(2):
        expected = families.reference_logits(model, tokens[sequence].tolist())[NEW - 1:]
        actual = np.stack([step[sequence] for step in logits])
        families.assert_close(actual[:, :expected.shape[1]], expected)


@pytest.mark.thorough
def test_an_engine_of_smollm2(tmp_path):
    manifest = llmc.compile(families.smollm2(), tmp_path / "case", target="tensorrt_rtx",
                            max_seq_len=256)
    sizes = {entry.path: entry.size for entry in manifest.files}
    assert sizes["chip0/engine.plan"] > sizes["chip0/weights.safetensors"] > 500e6


def test_running_a_tensorrt_rtx_case_is_refused(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="tensorrt_rtx")
    with pytest.raises(llmc.LlmcError, match="for target tensorrt_rtx and does not run them"):
        llmc.LLM(tmp_path / "case")
    with pytest.raises(llmc.LlmcError, match="diff does not support target tensorrt_rtx"):
        diff(tmp_path / "case", tiny_hf)


def test_unsupported_models_raise_an_llmc_error(tiny_hf, tmp_path, monkeypatch):
    with pytest.raises(llmc.LlmcError, match="has no collectives"):
        llmc.compile(tiny_hf, tmp_path / "case", target="tensorrt_rtx", tp_size=2)
    experts = families.save(families.tiny_model("mixtral"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="no kernel for llmc::Experts .Experts '.*'"):
        llmc.compile(experts, tmp_path / "case", target="tensorrt_rtx")
    with pytest.raises(llmc.LlmcError, match=r"cannot parse 'broken.onnx'"):
        (tmp_path / "broken.onnx").write_bytes(b"no model")
        tensorrt_rtx._build(tmp_path / "broken.onnx", [])
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    with pytest.raises(llmc.LlmcError, match=r"pip install '\.\[tensorrt-rtx\]'"):
        llmc.compile(tiny_hf, tmp_path / "case", target="tensorrt_rtx")
    assert not (tmp_path / "case").exists()
