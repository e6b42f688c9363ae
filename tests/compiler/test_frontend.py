"""Exporting few layers and repeating them; weights that stay on disk; GGUF."""

import shutil
import subprocess
import sys

import families
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

import llmc
from llmc.artifacts.manifest import hash_file, read_manifest
from llmc.compiler.check.execute import run_graph
from llmc.compiler.frontend import load, origin, trace
from llmc.compiler.frontend.repeat import CannotRepeat, _check_places, _shorten


@pytest.mark.parametrize(("family", "layers"), [("llama", 6), ("gemma3_text", 14), ("gpt2", 5)])
def test_repeated_layers_equal_a_full_export(family, layers, tmp_path):
    depth = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    model = families.tiny_model(family, **depth)
    raw = load(families.save(model, tmp_path))
    assert raw.notes == ()
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 20)
    names = [f"hidden_states.{i}" for i in range(layers)]
    got = run_graph(raw.graph, {"input_ids": tokens[None], "position_ids": np.arange(20)[None]},
                    ["logits", *names])
    families.assert_close(got["logits"][0], families.reference_logits(model, tokens.tolist()))


def test_few_layers_are_exported_to_prove_the_structure(tmp_path, monkeypatch):
    exported = []
    real = trace._run_exporter

    def spy(config, *others):
        exported.append(config.num_hidden_layers)
        return real(config, *others)

    monkeypatch.setattr(trace, "_run_exporter", spy)
    load(families.save(families.tiny_model("llama", num_hidden_layers=12), tmp_path / "l"))
    load(families.save(families.tiny_model("gemma3_text", num_hidden_layers=12), tmp_path / "g"))
    assert exported == [2, 4]  # gemma3: two with a window, two without


@pytest.mark.parametrize("attending", [[9], [3, 6, 9]])
def test_per_layer_config_lists_are_truncated_for_the_export(attending, tmp_path):
    model = families.tiny_model("bamba", num_hidden_layers=12, attn_layer_indices=attending)
    raw = load(families.save(model, tmp_path / "hf"))
    assert raw.notes == ()
    families.assert_exports(raw, model)


def test_unrelated_config_lists_of_num_layers_entries_are_kept(tmp_path):
    """Falcon-H1 has five factors for any number of layers."""
    model = families.tiny_model("falcon_h1", num_hidden_layers=5)
    raw = load(families.save(model, tmp_path))
    assert raw.notes == ()
    families.assert_exports(raw, model)


def test_training_outputs_are_not_exported(tmp_path):
    model = families.tiny_model("mixtral", output_router_logits=True, output_hidden_states=True)
    raw = load(families.save(model, tmp_path))
    assert raw.notes == ()
    families.assert_exports(raw, model)


def test_layer_dependent_configs_are_exported_whole():
    class Config:
        @property
        def layer_kinds(self):
            return ["conv", "conv", "attention", "conv"]

    _check_places(Config(), 4, [0, 1, 2])
    with pytest.raises(CannotRepeat, match="config's layer_kinds cannot be set for a few layers"):
        _check_places(Config(), 4, [0, 2])


def test_an_error_in_model_code_is_reported_with_its_type(tmp_path, monkeypatch):
    def forward(self, hidden_states):
        return {}[2]

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    hf = families.save(families.tiny_model("llama", rms_norm_eps=3e-5), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="'llama' cannot be exported: its code raises KeyError "
                                             "2$"):
        load(hf)


def test_layers_with_different_settings_are_not_deduplicated(tmp_path):
    model = families.tiny_model("gpt2", n_layer=4, scale_attn_by_inverse_layer_idx=True)
    raw = load(families.save(model, tmp_path))
    scales = [node.attrs["scale"] for node in raw.graph.nodes if node.op == "Sdpa"]
    np.testing.assert_allclose(scales, [0.25 / (i + 1) for i in range(4)], rtol=1e-6)


@pytest.mark.thorough
def test_compiling_takes_far_less_memory_than_the_model(tmp_path):
    """A 1 GB float32 model compiles in a process that grows by less than half of that."""
    script = """
import resource, sys, torch, transformers
from transformers import AutoConfig
sys.path.insert(0, sys.argv[2])
from llmc.compiler import api
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
import bench_model
bench_model.write(sys.argv[1], hidden=1024, layers=12, vocab=32000, intermediate=4096, heads=16,
                  kv_heads=4)
api.load  # imports are done
before = peak()
api.compile(sys.argv[1], sys.argv[1] + "/case", tp_size=4, max_seq_len=128)
print(before, peak())
"""
    import bench_model
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m"),
                             str(families.Path(bench_model.__file__).parent)],
                            capture_output=True, text=True, check=True)
    before, after = map(float, result.stdout.split()[-2:])
    size = (tmp_path / "m" / "model-00001-of-00001.safetensors").stat().st_size / 2**20
    assert 2 * size > 900  # bf16 on disk, float32 in the case directory
    assert after - before < size


@pytest.mark.thorough
def test_gguf_weights_equal_those_of_transformers(tmp_path):
    path = families.smollm2()
    raw = load(path)
    assert raw.architecture == "LlamaForCausalLM"
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    with torch.device("meta"):
        dummy = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    truth = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=dummy)["tensors"]
    seen = 0
    for tensor in raw.graph.tensors().values():
        if tensor.name in truth and seen < 40:
            np.testing.assert_array_equal(tensor._values.load(), truth[tensor.name].numpy())
            seen += 1
    assert seen == 40


def test_a_config_without_num_hidden_layers_is_exported_whole():
    """ProphetNet's raises NotImplementedError, which users must not see."""
    config = transformers.ProphetNetConfig()
    with pytest.raises(CannotRepeat, match="num_hidden_layers cannot be set"):
        _shorten(config, "num_hidden_layers", [0])


def test_a_hub_id_is_recorded_with_its_commit_and_the_digests_of_its_files(tiny_hf, tmp_path,
                                                                           monkeypatch):
    commit, asked = "0123456789abcdef0123456789abcdef01234567", []
    snapshot = tmp_path / "cache" / "snapshots" / commit
    (tmp_path / "cache" / "blobs").mkdir(parents=True)
    shutil.copytree(tiny_hf, snapshot)
    weights = snapshot / "model.safetensors"
    digest = hash_file(weights)
    shutil.move(weights, tmp_path / "cache" / "blobs" / digest)  # in the layout of the hub's cache
    weights.symlink_to(tmp_path / "cache" / "blobs" / digest)

    def download(name, revision=None, allow_patterns=None):
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(origin, "_MOST_HASHED", 10_000)
    llmc.compile("org/name", tmp_path / "case", revision="v1.0")
    assert asked == [("org/name", "v1.0")]
    source = read_manifest(tmp_path / "case").source
    assert (source.repo_id, source.commit) == ("org/name", commit)
    files = {file.name: file for file in source.files}
    assert files.keys() == {path.name for path in tiny_hf.iterdir()}
    assert files["model.safetensors"].sha256 == digest
    assert files["config.json"].sha256 == hash_file(tiny_hf / "config.json")
    assert files["model.safetensors"].size == (tiny_hf / "model.safetensors").stat().st_size

    local = llmc.compile(tiny_hf, tmp_path / "case").source
    files = {file.name: file.sha256 for file in local.files}
    assert local.repo_id is None and local.commit is None
    assert files["model.safetensors"] is None  # too large to hash
    assert files["config.json"] == hash_file(tiny_hf / "config.json")


def test_a_revision_of_a_local_path_is_refused(tiny_hf, tmp_path):
    with pytest.raises(llmc.LlmcError, match="revision 'v1.0' is given, but '.*' is a local path"):
        llmc.compile(tiny_hf, tmp_path / "case", revision="v1.0")
