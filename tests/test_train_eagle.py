"""bench/train_eagle.py at its smallest scale, and its arithmetic against transformers'."""

import json

import families
import numpy as np
import pytest
import torch
import train_eagle
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, silu
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from llmc.compiler.frontend import gguf_file
from llmc.compiler.frontend.gguf_header import read_header

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE, WEIGHTS = train_eagle.random_target(0)
NEW = train_eagle.SCALES["smoke"].max_new_tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    work = tmp_path_factory.mktemp("eagle")
    train_eagle.main([str(work), "--scale", "smoke"])
    return work


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        vocab_size=SHAPE.vocab_size, hidden_size=SHAPE.hidden_size, head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.intermediate_size, num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads, num_key_value_heads=SHAPE.num_kv_heads,
        rms_norm_eps=SHAPE.rms_norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(WEIGHTS, strict=False)
    return model


@pytest.fixture(scope="module")
def target():
    return train_eagle.Target(SHAPE, WEIGHTS, torch.device("cpu"), torch.float32, 512)


def chain(llama, tensors, ids, row, count):
    """Draft after row `row` as the published head does, recomputing all its rows per draft."""
    weight = {name.removesuffix(".weight"): value.float() for name, value in tensors.items()}
    weight |= {name.removeprefix("midlayer."): value for name, value in weight.items()}

    def norm(name, value):
        return rms_norm(value, (SHAPE.hidden_size,), weight[name], SHAPE.rms_norm_eps)

    states = llama(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0, :row + 1] for layer in (2, 3, 3)], -1)
    hidden, tokens = linear(features, weight["fc"]), list(ids[1:row + 2])
    for _ in range(count):
        embedded = llama.model.embed_tokens(torch.tensor(tokens))
        both = torch.cat([norm("input_layernorm", embedded), norm("hidden_norm", hidden)], -1)
        query, key, value = (
            linear(both, weight[f"self_attn.{name}_proj"]).view(len(tokens), -1, SHAPE.head_dim)
            .transpose(0, 1)[None] for name in "qkv")
        rotation = llama.model.rotary_emb(both, torch.arange(len(tokens))[None])
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        output = hidden + linear(found, weight["self_attn.o_proj"])
        normed = norm("post_attention_layernorm", output)
        gate, up = (linear(normed, weight[f"mlp.{name}_proj"]) for name in ("gate", "up"))
        output = output[-1:] + linear(silu(gate) * up, weight["mlp.down_proj"])[-1:]
        draft = int(linear(norm("norm", output), weight["lm_head"]).argmax())
        tokens.append(draft + int(tensors["d2t"][draft]))
        hidden = torch.cat([hidden, output])
    return tokens[row + 1:]


def test_a_head_is_trained_and_saved_in_the_published_layout(trained):
    config = json.loads((trained / "head" / "config.json").read_text())
    tensors = load_file(trained / "head" / "model.safetensors")
    hidden, drafts = SHAPE.hidden_size, config["draft_vocab_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 2 * hidden)
    assert tensors["lm_head.weight"].shape == (drafts, hidden)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    chosen = tensors["d2t"] + torch.arange(drafts)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == chosen.tolist()
    assert tensors.keys() == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"midlayer.{name}.weight" for name in (
            "hidden_norm", "input_layernorm", "post_attention_layernorm", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj", *(f"self_attn.{own}_proj" for own in "qkvo")))}


def test_prompts_of_the_two_splits_have_no_source_in_common(trained):
    heldout, training = ({prompt.source for prompt in train_eagle.read_prompts(trained, split)}
                         for split in ("heldout", "train"))
    assert heldout and training and not heldout & training


def test_the_report_follows_from_the_chains(trained, llama):
    report = json.loads((trained / "report.json").read_text())
    tensors = load_file(trained / "head" / "model.safetensors")
    steps = tokens = 0
    with torch.inference_mode():
        for prompt in train_eagle.read_prompts(trained, "heldout"):
            ids, first = list(prompt.input_ids), len(prompt.input_ids)
            ids += families.greedy(llama, ids, NEW)
            while (left := len(ids) - 1 - first) > 0:
                drafts = chain(llama, tensors, ids, first - 1, train_eagle.DRAFTS)
                equal = [*(draft == own for draft, own in zip(drafts, ids[first + 1:],
                                                              strict=False)), False]
                steps += 1
                tokens += min(equal.index(False) + 1, left)
                first += min(equal.index(False) + 1, left)
    assert report["tokens"] == NEW * report["prompts"] and not report["cut_sequences"]
    assert report["mean_acceptance_length"] == pytest.approx(tokens / steps)


def test_chains_are_those_of_the_published_head(llama, target):
    torch.manual_seed(1)
    head = train_eagle.Head(SHAPE, torch.arange(0, 320, 3))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 320, (2, 20))
    _, drafts = train_eagle.draft_chains(head, target, ids)
    with torch.inference_mode():
        for sequence, row in ((0, 0), (0, 11), (1, 5), (1, 18)):
            wanted = chain(llama, head.state_dict(), ids[sequence].tolist(), row, 7)
            assert drafts[:, sequence, row].tolist() == wanted


def test_greedy_generation_equals_transformers(llama, target):
    prompts = [[5, 9, 200], [7] * 12, [30, 31, 32, 33, 34]]
    found = train_eagle.generate(target, prompts, [0.0] * 3, 40)
    assert found == [list(families.greedy(llama, prompt, 40)) for prompt in prompts]


@pytest.mark.thorough
def test_the_gguf_file_is_read_as_by_llmc():
    path = families.smollm2()
    shape, weights = train_eagle.read_gguf(path)
    header = read_header(path)
    config = gguf_file._read_config(path, header)
    tensors = gguf_file._tensors(path, header, config)
    assert (shape.hidden_size, shape.num_layers, shape.num_kv_heads) == (576, 30, 3)
    assert weights.keys() == tensors.keys()
    for name in ("embed_tokens", "layers.0.self_attn.q_proj", "layers.29.self_attn.k_proj",
                 "layers.7.mlp.down_proj", "norm"):
        own = f"model.{name}.weight"
        wanted = np.concatenate(list(tensors[own].cast(np.float32).blocks(1 << 30)))
        assert np.array_equal(weights[own].numpy(), wanted), own
