"""Invalid models: one clear error with a remedy, and no leftover files."""

import errno
import json
import os
import re
import shutil
import tempfile

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import llmc
from llmc.compiler.frontend import huggingface
from llmc.compiler.scratch import temporary_files


@pytest.fixture
def hf(tiny_hf, tmp_path):
    return shutil.copytree(tiny_hf, tmp_path / "hf")


def refused(model, tmp_path, match, **options):
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.compile(model, tmp_path / "out" / "case", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", tmp_path, "does not exist; give a directory")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path / "model.safetensors", tmp_path, "give the directory that has the model's")


def test_a_model_type_without_a_causal_lm(hf, tmp_path):
    (hf / "config.json").write_text('{"model_type": "clip"}')
    refused(hf, tmp_path, "cannot build 'clip' as a causal LM: it has no such class")


def test_hf_dir_beside_a_model_that_is_no_onnx_file(hf, tmp_path):
    refused(hf, tmp_path, "hf_dir '.*' is given, but '.*' is not an .onnx file", hf_dir=hf)


def test_an_empty_directory(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "has no config.json")


def test_a_config_without_weights(hf, tmp_path):
    (hf / "model.safetensors").unlink()
    refused(hf, tmp_path, "no \\*.safetensors weights")


def test_a_config_that_is_not_json(hf, tmp_path):
    (hf / "config.json").write_text("{")
    refused(hf, tmp_path, "cannot be read as JSON")


def test_an_unknown_architecture(hf, tmp_path):
    (hf / "config.json").write_text('{"model_type": "quantum_llm"}')
    refused(hf, tmp_path, "does not support architecture 'quantum_llm'")


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_a_config_without_max_position_embeddings_is_refused(hf, tmp_path, number):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "max_position_embeddings": number}))
    refused(hf, tmp_path, f"has max_position_embeddings {number}, expected")


@pytest.mark.parametrize(("key", "value"), [
    ("num_hidden_layers", 10**9), ("max_position_embeddings", 10**12), ("vocab_size", 10**12),
    ("hidden_size", 10**12), ("num_attention_heads", 10**9), ("intermediate_size", 10**15)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_config_with_an_implausible_size_is_refused(hf, tmp_path, monkeypatch, key, value,
                                                      inside):
    config = json.loads((hf / "config.json").read_text())
    config.update({"text_config": {key: value}} if inside else {key: value})
    (hf / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(huggingface, "read_config", None)  # nothing is written
    refused(hf, tmp_path, f"config.json' has {key} {value}, expected at most")


def test_an_oversized_config_file_is_refused(hf, tmp_path):
    with open(hf / "config.json", "r+b") as file:
        file.truncate(10**9)  # sparse
    refused(hf, tmp_path, "1000000000 bytes exceed the limit of")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json",
                                  "tokenizer_config.json"])
def test_an_irregular_model_file_is_refused_without_opening_it(hf, tmp_path, name, make):
    (hf / name).unlink(missing_ok=True)
    make(hf / name)
    refused(hf, tmp_path, f"{name}' is not a regular file")


def test_a_fifo_as_weights_is_refused_without_opening_it(hf, tmp_path):
    (hf / "model.safetensors").unlink()
    os.mkfifo(hf / "model.safetensors")
    refused(hf, tmp_path, "model.safetensors' is not a regular file")


@pytest.mark.parametrize("options", [{"tp_size": 10**9}, {"max_seq_len": 10**12},
                                     {"max_batch_size": 10**12}])
def test_options_beyond_any_machine_s_memory_are_refused(hf, tmp_path, options):
    refused(hf, tmp_path, "is above", **options)


def test_a_missing_tensor(hf, tmp_path):
    tensors = load_file(hf / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, hf / "model.safetensors")
    refused(hf, tmp_path, "no tensor 'model.layers.2.mlp.up_proj.weight'")


def test_a_tensor_of_the_wrong_shape(hf, tmp_path):
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    save_file(tensors, hf / "model.safetensors")
    refused(hf, tmp_path, r"has shape \[3, 5\], its config expects \[100, 64\]")


def test_truncated_safetensors(hf, tmp_path):
    data = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(data[:len(data) // 2])
    refused(hf, tmp_path, "not a readable safetensors file")


def test_a_listed_shard_is_missing(hf, tmp_path):
    (hf / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    refused(hf, tmp_path, "lists 'model-00001-of-00002.safetensors', which is missing")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json",
                                  "pytorch_model.bin", "m.gguf", "m.onnx"])
def test_a_git_lfs_pointer_in_place_of_a_file(name, hf, tmp_path):
    if name == "pytorch_model.bin":
        (hf / "model.safetensors").unlink()
    (hf / name).write_text(POINTER)
    model = hf / name if name.startswith("m.") else hf
    refused(model, tmp_path, f"/{re.escape(name)}' is a Git LFS pointer.*; run 'git lfs pull' in",
            allow_pickle=True, hf_dir=hf if name.endswith(".onnx") else None)


def test_a_git_lfs_pointer_that_an_index_lists(hf, tmp_path):
    (hf / "model.safetensors").unlink()
    (hf / "a.safetensors").write_text(POINTER)
    (hf / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    refused(hf, tmp_path, "/a.safetensors' is a Git LFS pointer")


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"),
    Exception("No space left on device (os error 28)")])  # raised in a Rust library
def test_an_unwritable_temporary_file_is_an_error(error, hf, tmp_path, monkeypatch):
    def full(directory, target):
        raise error

    monkeypatch.setattr(huggingface, "copy_tokenizer", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused(hf, tmp_path, f"cannot be written to '{tmp_path}' .*No space.*; free .* set TMPDIR")


def test_a_missing_temporary_directory_is_an_error(hf, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    refused(hf, tmp_path, f"cannot be written to '{tmp_path}/none' .No usable temporary dir")


def test_other_os_errors_are_not_attributed_to_temporary_files():
    with pytest.raises(FileNotFoundError), temporary_files():
        raise FileNotFoundError


def test_pickled_weights_need_a_flag(hf, tmp_path):
    tensors = {name: torch.from_numpy(array)
               for name, array in load_file(hf / "model.safetensors").items()}
    (hf / "model.safetensors").unlink()
    torch.save(tensors, hf / "pytorch_model.bin")
    refused(hf, tmp_path, "--allow_pickle")
    llmc.compile(hf, tmp_path / "case", allow_pickle=True)
    assert (tmp_path / "case" / "model_info.json").is_file()


def test_remote_code_needs_a_flag(hf, tmp_path):
    config = json.loads((hf / "config.json").read_text())
    config.update(model_type="homemade", auto_map={"AutoConfig": "configuration.Config"})
    (hf / "config.json").write_text(json.dumps(config))
    refused(hf, tmp_path, "--trust_remote_code")


def test_a_hub_id_that_cannot_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("nobody/no-such-model", tmp_path, "could not be downloaded from the hub")


def test_an_invalid_gguf_file_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    refused(tmp_path / "x.gguf", tmp_path, "cannot be read as GGUF")


def test_an_onnx_file_needs_hf_dir_and_must_be_onnx(hf, tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"not onnx")
    refused(tmp_path / "x.onnx", tmp_path, "--hf_dir")
    refused(tmp_path / "x.onnx", tmp_path, "is not an ONNX file", hf_dir=hf)
    (tmp_path / "x.onnx").write_bytes(b"xx" * 100)  # is a protobuf, with unknown fields only
    refused(tmp_path / "x.onnx", tmp_path, "it names no opset", hf_dir=hf)
