"""Tensors and files of a checkpoint: each is used or has a reason not to be.
"""

import json
import shutil
import struct

import families
import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import llmc
from llmc.compiler.frontend import bind
from llmc.compiler.frontend.checkpoint import INDEX, open_checkpoint
from llmc.compiler.frontend.paths import named_file
from llmc.compiler.graph.weights import Weight


def build(family, **changes):
    """Build a tiny model with empty parameters, as the compiler does."""
    known = {**families.FAMILIES, **families.UNPLANNED}.get(family)
    auto = AutoModelForCausalLM if known else AutoModelForSeq2SeqLM
    known = known or {**families.ENCODER_DECODERS, **families.UNPLANNED_ENCODER_DECODERS}[family][1]
    config = AutoConfig.for_model(family, **{**known, **changes})
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config)
    model.tie_weights()
    return model


def check(family, leftover, renamed=lambda name: name, **changes):
    """Check that the graph uses all tensors of the model and these extra ones."""
    model = build(family, **changes)
    saved = {**model.state_dict()}
    tensors = {renamed(name): Weight.of(np.ones(tensor.shape, np.float32), name)
               for name, tensor in saved.items()}
    names = {id(tensor): tensor.name for tensor in tensors.values()}
    checkpoint = bind.Checkpoint(model, {**tensors, **leftover})
    bind.check_all_used(model, checkpoint, names, "hf", lambda: model)


def zeros(*shape, dtype=np.float32):
    return Weight.of(np.zeros(shape, dtype), "leftover")


MASK, ONE = zeros(1, 1, 64, 64, dtype=np.uint8), zeros()
COMPUTED = [
    ("gpt2", "transformer.h.0.attn.bias", MASK), ("gpt2", "h.1.attn.bias", MASK),
    ("gpt2", "h.0.attn.masked_bias", ONE),
    ("gpt_neox", "gpt_neox.layers.0.attention.bias", MASK),
    ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", ONE),
    ("gpt_neox", "gpt_neox.layers.0.attention.rotary_emb.inv_freq", zeros(8)),
    ("gptj", "transformer.h.0.attn.bias", MASK), ("gptj", "transformer.h.0.attn.masked_bias", ONE),
    ("codegen", "transformer.h.2.attn.causal_mask", MASK),
    ("gpt_neo", "transformer.h.0.attn.attention.bias", MASK),
    ("gpt_neo", "transformer.h.0.attn.attention.masked_bias", ONE),
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", zeros(8)),
    ("llama", "model.rotary_emb.inv_freq", zeros(8)),
    ("bart", "model.encoder.version", zeros(1)),
    ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", zeros(8, 4)),
    ("m2m_100", "model.encoder.embed_positions.weights", zeros(66, 64)),
    ("bart", "final_logits_bias", zeros(1, families.VOCAB)),
]


@pytest.mark.parametrize(("family", "name", "tensor"), COMPUTED,
                         ids=[f"{family}-{name}" for family, name, _ in COMPUTED])
def test_computed_buffers_in_a_checkpoint_are_ignored(family, name, tensor):
    check(family, {name: tensor})


UNKNOWN = [
    ("llama", "model.layers.3.mlp.up_proj.weight", zeros(100, 64)),  # it has three layers
    ("llama", "model.layers.0.self_attn.q_proj.bias", zeros(64)),
    ("llama", "score.weight", zeros(2, 64)),
    ("llama", "model.layers.0.self_attn.q_proj.weight_scale_2", zeros(1)),
    ("llama", "model.mtp.layers.0.mlp.up_proj.weight", zeros(100, 64)),
    ("gptj", "transformer.h.0.attn.bias", zeros(64)),  # learned, not a mask
    ("bart", "final_logits_bias", zeros(1, 7)),
]


@pytest.mark.parametrize(("family", "name", "tensor"), UNKNOWN,
                         ids=[f"{family}-{name}" for family, name, _ in UNKNOWN])
def test_an_unexpected_tensor_is_named(family, name, tensor):
    with pytest.raises(llmc.LlmcError, match=rf"'hf' has a tensor '{name}' \[.*\] float32, which"):
        check(family, {name: tensor})


def test_multi_token_prediction_layers_are_skipped():
    extra = {f"model.layers.{i}.mlp.up_proj.weight": zeros(100, 64) for i in (3, 4)}
    check("llama", extra, num_nextn_predict_layers=2)
    with pytest.raises(llmc.LlmcError, match=r"'model.layers.4.mlp.up_proj.weight'"):
        check("llama", extra, num_nextn_predict_layers=1)


def test_config_values_stored_as_tensors_must_agree():
    name = "model.layers.1.mlp.act_fn.beta"
    check("apertus", {name: Weight.of(np.array(0.5), name)})
    with pytest.raises(llmc.LlmcError, match=name):
        check("apertus", {name: Weight.of(np.array(0.7), name)})


def test_tensor_names_without_the_base_model_prefix_are_found():
    check("gpt2", {}, renamed=lambda name: name.removeprefix("transformer."))
    check("llama", {}, renamed=lambda name: name.removeprefix("model."))


def test_a_tied_tensor_stored_twice_must_be_equal():
    for values, fits in ((np.ones((families.VOCAB, 64), np.float32), True),
                         (np.zeros((families.VOCAB, 64), np.float32), False)):
        model = build("gemma")
        tensors = {name: Weight.of(np.ones(tensor.shape, np.float32), name)
                   for name, tensor in model.state_dict().items()}
        names = {id(tensor): name for name, tensor in tensors.items() if name != "lm_head.weight"}
        tensors["lm_head.weight"] = Weight.of(values, "lm_head.weight")
        checkpoint = bind.Checkpoint(model, tensors)
        if fits:
            bind.check_all_used(model, checkpoint, names, "hf", pytest.fail)
        else:
            with pytest.raises(llmc.LlmcError, match="'lm_head.weight'"):
                bind.check_all_used(model, checkpoint, names, "hf", pytest.fail)


def test_a_stored_lm_head_overrides_tied_embeddings(tmp_path):
    """Like transformers, which does not tie different stored weights."""
    model = families.tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False)
    directory = families.save(model, tmp_path / "hf")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    llmc.compile(directory, tmp_path / "case")
    tokens = [5, 9, 17, 40, 3]
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(tokens), families.reference_logits(theirs, tokens))


@pytest.fixture
def hf(tiny_hf, tmp_path):
    return shutil.copytree(tiny_hf, tmp_path / "hf")


def shards(directory, **extra):
    """Split the checkpoint into two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "sub/b.safetensors": names[1::2]}
    (directory / "sub").mkdir()
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part} | extra}
    (directory / INDEX).write_text(json.dumps(index))
    return tensors


def test_tensors_keep_the_dtypes_of_the_file(hf):
    kept = {name: tensor.astype(dtype) for dtype, (name, tensor) in zip(
        ("float16", "float32", "float64", "int8", "int64", "bool"),
        load_file(hf / "model.safetensors").items(), strict=False)}
    save_file(kept, hf / "model.safetensors")
    found = open_checkpoint(hf, allow_pickle=False)
    assert {name: weight.dtype for name, weight in found.items()} == \
        {name: tensor.dtype for name, tensor in kept.items()}
    for name, tensor in kept.items():
        np.testing.assert_array_equal(found[name].load(), tensor)
        if len(tensor) > 4:
            np.testing.assert_array_equal(found[name].rows(1, 4), tensor[1:4])


def test_pickled_tensors_keep_their_dtypes_too(hf):
    (hf / "model.safetensors").unlink()
    kept = {"a": torch.randn(3, 4).bfloat16().T, "b": torch.randn(5).to(torch.float8_e4m3fn),
            "c": torch.tensor(3), "d": torch.randn(2, 2).half()}
    torch.save(kept, hf / "pytorch_model.bin")
    found = open_checkpoint(hf, allow_pickle=True)
    assert [str(weight.dtype) for weight in found.values()] == \
        ["bfloat16", "float8_e4m3fn", "int64", "float16"]
    for name, tensor in kept.items():
        np.testing.assert_array_equal(found[name].load().astype(np.float32), tensor.float().numpy())


def test_shards_are_read_through_the_index_and_links(hf, tmp_path):
    """The Hugging Face cache has links to files outside the folder."""
    tensors = shards(hf)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate([*hf.glob("*.safetensors"), *hf.glob("sub/*.safetensors")]):
        path.rename(blobs / str(number))
        path.symlink_to(f"{'../' if path.parent == hf else '../../'}blobs/{number}")
    found = open_checkpoint(hf, allow_pickle=False)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name].load(), tensor)


@pytest.mark.parametrize(("name", "reason"), [
    ("../secret.safetensors", "leads outside of its folder"),
    ("sub/../../secret.safetensors", "leads outside of its folder"),
    ("/etc/passwd", "is an absolute path"), ("C:\\secret", "is an absolute path"),
    ("sub\\b.safetensors", "contains a back"), ("a\0", "contains a back"), ("", "is empty"),
    (".", "is empty"), ("sub", "which is missing"), ("x" * 300, "which is missing"),
    ("nowhere.safetensors", "lists 'nowhere.safetensors', which is missing"),
])
def test_an_index_may_not_name_files_elsewhere(hf, tmp_path, name, reason):
    (tmp_path / "secret.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    shards(hf, extra=name)
    with pytest.raises(llmc.LlmcError, match=reason) as caught:
        open_checkpoint(hf, allow_pickle=False)
    assert "\n" not in str(caught.value)


@given(st.lists(st.sampled_from(["..", ".", "a", "", "\\", "~", "C:", "sub"]), max_size=5))
@settings(max_examples=200, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_file_names_cannot_escape_the_folder(tmp_path, parts):
    for place in (tmp_path, tmp_path / "in", tmp_path / "in" / "sub"):
        place.mkdir(exist_ok=True)
        (place / "a").touch()
    source, name = tmp_path / "in" / INDEX, "/".join(parts)
    try:
        path = named_file(source, name)
    except llmc.LlmcError:
        return
    assert path.resolve().is_relative_to((tmp_path / "in").resolve())


@pytest.mark.parametrize("index", [
    {}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}},
    {"weight_map": "model.safetensors"}])
def test_an_index_without_a_map_of_names_is_refused(hf, index):
    (hf / INDEX).write_text(json.dumps(index))
    with pytest.raises(llmc.LlmcError, match="no weight_map from tensor names to file names"):
        open_checkpoint(hf, allow_pickle=False)


def test_tensors_missing_from_or_duplicated_between_shards_are_refused(hf):
    tensors = shards(hf, more="a.safetensors")
    with pytest.raises(llmc.LlmcError, match="lists tensor 'more' in 'a.safetensors', which"):
        open_checkpoint(hf, allow_pickle=False)
    save_file(tensors | {"more": np.ones(1, np.float32)}, hf / "a.safetensors")
    with pytest.raises(llmc.LlmcError, match=r"is in both '.*/a.safetensors' and '.*b.safetenso"):
        open_checkpoint(hf, allow_pickle=False)


def test_a_single_weight_file_beside_an_index_is_refused(hf):
    whole = (hf / "model.safetensors").read_bytes()
    shards(hf)
    (hf / "model.safetensors").write_bytes(whole)
    with pytest.raises(llmc.LlmcError, match="exists but is not listed"):
        open_checkpoint(hf, allow_pickle=False)


def test_an_adapter_checkpoint_is_refused(hf):
    (hf / "adapter_config.json").write_text("{}")
    with pytest.raises(llmc.LlmcError, match="contains an adapter"):
        open_checkpoint(hf, allow_pickle=False)


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[:100], lambda data: data[:7], lambda data: b"",
    lambda data: data + b"\0", lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    lambda data: data.replace(b'"F32"', b'"F99"', 1),
    lambda data: data.replace(b'"shape":[', b'"shape":[9', 1),
])
def test_a_damaged_safetensors_file_is_refused(hf, damage):
    path = hf / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(llmc.LlmcError, match="is not a readable safetensors file") as caught:
        open_checkpoint(hf, allow_pickle=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "match"), [
    ([torch.zeros(1)], "contains a list, expected a dict of tensors"),
    ({"model": {"a": torch.zeros(1)}}, "has a dict under 'model', not a tensor"),
])
def test_a_pickled_file_without_tensors_is_refused(hf, content, match):
    (hf / "model.safetensors").unlink()
    torch.save(content, hf / "pytorch_model.bin")
    with pytest.raises(llmc.LlmcError, match=match):
        open_checkpoint(hf, allow_pickle=True)
    (hf / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(llmc.LlmcError, match="cannot be read as a pickled checkpoint"):
        open_checkpoint(hf, allow_pickle=True)
