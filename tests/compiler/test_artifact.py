"""Case directories: deterministic, atomic, hashed, and readable without llmc."""

import errno
import hashlib
import json
import shutil
import subprocess
import sys

import families
import numpy as np
import onnx
import pytest
from safetensors import safe_open

import llmc
from llmc.artifacts.manifest import json_schema, read_manifest
from llmc.compiler.targets import cpu


def digests(directory):
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.rglob("*")) if path.is_file()}


def test_compiling_twice_gives_the_same_bytes(tiny_hf, case_tp2, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "again", tp_size=2)
    assert digests(tmp_path / "again") == digests(case_tp2)


def test_the_manifest_lists_every_file_with_its_size_and_hash(case_tp2):
    listed = {entry.path: entry.sha256 for entry in read_manifest(case_tp2).files}
    found = digests(case_tp2)
    del found["model_info.json"]
    assert listed == found


def test_the_published_schema_matches_the_manifest_model(request):
    published = request.config.rootpath / "artifacts" / "model_info.schema.json"
    assert json.loads(published.read_text()) == json_schema()


def test_the_weight_file_is_safetensors(case_tp1, tiny_model):
    with safe_open(case_tp1 / "chip0" / "weights.safetensors", framework="np") as file:
        embedding = file.get_tensor("lm_head.weight")
        norm = file.get_tensor("model.norm.weight")
    rows = tiny_model.config.vocab_size
    assert np.array_equal(embedding[:rows], tiny_model.lm_head.weight.detach().numpy())
    assert not embedding[rows:].any()
    assert np.array_equal(norm, tiny_model.model.norm.weight.detach().numpy())


RUN_WITHOUT_LLMC = """
import sys, json
sys.modules["llmc"] = None
import numpy as np, onnxruntime as ort
path, feeds, out = sys.argv[1:4]
session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
results = session.run(None, dict(np.load(feeds)))
np.savez(out, **{o.name: r for o, r in zip(session.get_outputs(), results)})
"""


def run_without_llmc(path, feeds, tmp_path):
    np.savez(tmp_path / "feeds.npz", **feeds)
    subprocess.run([sys.executable, "-c", RUN_WITHOUT_LLMC, path, tmp_path / "feeds.npz",
                    tmp_path / "out.npz"], check=True, cwd=tmp_path)
    return dict(np.load(tmp_path / "out.npz"))


def engine_inputs(manifest, chip, tokens):
    feeds = {"input_ids": np.array(tokens), "cu_seqlens": np.array([0, len(tokens)], np.int32),
             "past_lens": np.zeros(1, np.int32), "logits_indices": np.arange(len(tokens))}
    for layer, cache in enumerate(chip.cache):
        for kind in ("key", "value"):
            feeds[f"{kind}_cache_{layer}"] = np.zeros(
                (1, cache.num_kv_heads, manifest.dims.max_seq_len, cache.head_dim), np.float32)
    return feeds


def test_graph_onnx_gives_logits_in_onnxruntime_without_llmc(case_tp1, tiny_model, tmp_path):
    manifest = read_manifest(case_tp1)
    tokens = [5, 9, 17, 40, 3]
    got = run_without_llmc(case_tp1 / "chip0" / "graph.onnx",
                           engine_inputs(manifest, manifest.chips[0], tokens), tmp_path)
    families.assert_close(got["logits"][:, :manifest.dims.vocab_size],
                          families.reference_logits(tiny_model, tokens))


def test_a_rank_s_segment_runs_in_onnxruntime_without_llmc(case_tp2, tiny_model, tmp_path):
    manifest = read_manifest(case_tp2)
    tokens, parts = [5, 9, 299, 40, 3], []
    for chip in manifest.chips:
        step = chip.steps[0]
        feeds = {name: array for name, array in engine_inputs(manifest, chip, tokens).items()
                 if name in step.inputs}
        out = run_without_llmc(case_tp2 / step.path, feeds, tmp_path)
        parts.append(out[chip.steps[1].input])
    embedding = tiny_model.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(parts[0] + parts[1], embedding[tokens])


def test_graph_onnx_contains_every_op_body(case_tp2):
    model = onnx.load(case_tp2 / "chip1" / "graph.onnx", load_external_data=False)
    bodies = {(f.name, f.overload) for f in model.functions}
    used = {(n.op_type, n.overload) for n in model.graph.node if n.domain == "llmc"}
    assert {use for use in used if use[0] not in ("AllReduce", "AllGather")} == bodies


def test_a_full_disk_leaves_the_old_case_directory_intact(tiny_hf, case_tp1, tmp_path, monkeypatch):
    target = shutil.copytree(case_tp1, tmp_path / "case")
    before = digests(target)
    real = cpu.emit

    def full(graph, rank, directory, dtype):
        real(graph, rank, directory, dtype)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cpu, "emit", full)
    with pytest.raises(llmc.LlmcError, match="No space left.*nothing was changed"):
        llmc.compile(tiny_hf, target)
    assert digests(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_a_new_compile_replaces_the_old_directory(tiny_hf, case_tp2, tmp_path):
    shutil.copytree(case_tp2, tmp_path / "case")
    llmc.compile(tiny_hf, tmp_path / "case", tp_size=1)
    assert read_manifest(tmp_path / "case").tp_size == 1
    assert not (tmp_path / "case" / "chip1").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_a_directory_without_a_manifest_is_not_replaced(tiny_hf, tmp_path):
    (tmp_path / "precious").write_text("keep me")
    with pytest.raises(llmc.LlmcError, match="is not a case directory"):
        llmc.compile(tiny_hf, tmp_path)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_an_output_with_a_user_s_file_is_refused_before_the_export(case_tp1, tmp_path):
    target = shutil.copytree(case_tp1, tmp_path / "case")
    (target / "notes.txt").write_text("mine")
    with pytest.raises(llmc.LlmcError, match="would delete: 'notes.txt'"):
        llmc.compile(tmp_path / "no such model", target)
    assert (target / "notes.txt").read_text() == "mine"
