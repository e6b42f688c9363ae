"""Train an EAGLE-3 head for SmolLM2-135M-Instruct on one GPU, on text of the model's own.

    python bench/train_eagle.py WORK_DIR --model MODEL --stage prompts      no GPU needed
    python bench/train_eagle.py WORK_DIR --model MODEL --stage generate train evaluate
    python bench/train_eagle.py WORK_DIR --scale smoke     all stages on a CPU, a random tiny Llama

MODEL is a GGUF file (F32, F16, Q4_1, Q8_0) or a Hugging Face directory (config.json,
model.safetensors) of a Llama. Only `prompts` needs more than torch and safetensors: transformers,
for a GGUF also gguf, and the packages whose docstrings it reads.

| stage | reads | writes in WORK_DIR |
| --- | --- | --- |
| prompts | docs of llmc, docstrings of installed packages | prompts.jsonl |
| generate | prompts.jsonl | tokens.safetensors: half greedy, half at temperature 0.8 |
| train | tokens.safetensors | head/, in the published layout; training.json |
| evaluate | prompts.jsonl, head/ | report.json |

The head is the published one (SpecForge; vLLM's llama_eagle3.py). Row p has the embedding of token
p + 1 and the hidden states of position p, and predicts token p + 2. Step i of training-time test
feeds the head's output of step i - 1 back, at position p + i. Its row p attends to rows 0 to p of
step 0 and to row p of each later step, as a chain of drafts does. The loss is the cross entropy
against the target's distribution over the draft vocabulary.

`evaluate` runs the target in float32, greedily, on held-out prompts, whose source files are not
those of the training prompts. The head is read from head/. Acceptance at a position: the fraction
of chains whose drafts up to that position equal the target's tokens. Mean acceptance length: tokens
per verification, the target's own token included.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
import struct
import sysconfig
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STAGES = ("prompts", "generate", "train", "evaluate")
ROOT = Path(__file__).resolve().parent.parent
DRAFTS = 7  # steps of training-time test, and drafts of a chain
STEP_WEIGHT = 0.8  # of a step's loss, relative to the step before


@dataclass(frozen=True)
class Scale:
    """Sizes and time limits of a run."""

    prompts: int  # for training
    heldout: int
    files: int  # source files of one package
    prompt_tokens: int  # of one prompt at most
    max_new_tokens: int
    batch: int  # sequences generated together
    generated_tokens: int
    generate_seconds: float
    draft_vocab: int
    batch_tokens: int  # of a training step, padding included
    steps: int
    train_seconds: float
    learning_rate: float = 1e-3
    seed: int = 0


SCALES = {
    "full": Scale(prompts=8000, heldout=400, files=150, prompt_tokens=160, max_new_tokens=256,
                  batch=2048, generated_tokens=10_000_000, generate_seconds=150, draft_vocab=4096,
                  batch_tokens=24576, steps=6000, train_seconds=270),
    "smoke": Scale(prompts=20, heldout=4, files=1, prompt_tokens=200, max_new_tokens=16, batch=20,
                   generated_tokens=900, generate_seconds=20, draft_vocab=128, batch_tokens=512,
                   steps=10, train_seconds=30),
}


def say(text: str) -> None:
    print(text, flush=True)


# The target.

@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers before which the head takes hidden states, in vLLM's numbering."""
        return 2, self.num_layers // 2, self.num_layers - 3


def read_directory(directory: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Read config.json and model.safetensors of a Llama."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if config["model_type"] != "llama" or kind != "default" or config.get("attention_bias"):
        raise SystemExit(f"{directory} is a {config['model_type']} with rope_type {kind}, expected "
                         "a llama with rope_type default and no attention_bias.")
    heads = config["num_attention_heads"]
    shape = Shape(
        config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], heads,
        config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads,
        config["vocab_size"], config["rms_norm_eps"],
        rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        config["max_position_embeddings"], config["bos_token_id"], config["eos_token_id"])
    return shape, load_file(directory / "model.safetensors")


def _unpack(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_unpack(file, "Q")).decode("utf-8", "replace")


_METADATA_KINDS = "BbHhIif?sAQqd"  # as `struct` spells them; s: string, A: array


def _metadata_value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        element, count = _unpack(file, "I"), _unpack(file, "Q")
        return [_metadata_value(file, element) for _ in range(count)]
    return _unpack(file, _METADATA_KINDS[kind])


def _dequantize(raw: np.ndarray, kind: int) -> np.ndarray:
    """Dequantize the bytes of one GGUF tensor, [bytes], to float32 [elements]."""
    if kind == 0:
        return np.asarray(raw.view(np.float32))
    if kind == 1:
        return raw.view(np.float16).astype(np.float32)
    if kind == 3:  # Q4_1: scale, minimum, 32 nibbles; low nibbles are the first 16 elements
        blocks = raw.reshape(-1, 20)
        scale, minimum = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
        values = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).astype(np.float32)
        return np.asarray(values * scale[:, None] + minimum[:, None]).reshape(-1)
    blocks = raw.reshape(-1, 34)  # Q8_0: scale, 32 int8
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (blocks[:, 2:].copy().view(np.int8).astype(np.float32) * scale).reshape(-1)


_BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}  # elements and bytes by GGUF type
_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "token_embd": "model.embed_tokens",
    "output_norm": "model.norm", "output": "lm_head"}


def read_gguf(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Read the shape and the dequantized weights of a Llama, by Hugging Face's names."""
    with path.open("rb") as file:
        magic, version = file.read(4), _unpack(file, "I")
        if magic != b"GGUF" or version < 2:
            raise SystemExit(f"{path} is no GGUF file of version 2 or later.")
        count, pairs = _unpack(file, "Q"), _unpack(file, "Q")
        metadata = {}
        for _ in range(pairs):
            key, kind = _string(file), _unpack(file, "I")
            metadata[key] = _metadata_value(file, kind)
        tensors = []
        for _ in range(count):
            name, dims = _string(file), _unpack(file, "I")
            sizes = [_unpack(file, "Q") for _ in range(dims)][::-1]
            tensors.append((name, sizes, _unpack(file, "I"), _unpack(file, "Q")))
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
    if metadata["general.architecture"] != "llama":
        raise SystemExit(f"{path} is a {metadata['general.architecture']}, expected a llama.")
    of = {key.removeprefix("llama."): value for key, value in metadata.items()}
    heads = of["attention.head_count"]
    shape = Shape(
        of["embedding_length"], of["feed_forward_length"], of["block_count"], heads,
        of["attention.head_count_kv"], of["embedding_length"] // heads, of["vocab_size"],
        of["attention.layer_norm_rms_epsilon"], of["rope.freq_base"], of["context_length"],
        of["tokenizer.ggml.bos_token_id"], of["tokenizer.ggml.eos_token_id"])
    data = np.memmap(path, np.uint8, "r", start)
    weights = {}
    for name, sizes, kind, offset in tensors:
        if kind not in _BLOCKS:
            raise SystemExit(f"{name} has GGUF type {kind}, expected F32, F16, Q4_1 or Q8_0.")
        elements, size = _BLOCKS[kind]
        stored = data[offset:offset + math.prod(sizes) // elements * size]
        weight = torch.from_numpy(_dequantize(np.array(stored), kind).reshape(sizes))
        *layer, own, _ = name.split(".")
        if own in ("attn_q", "attn_k"):  # a head's two halves are interleaved in the file
            weight = weight.view(-1, shape.head_dim // 2, 2, sizes[-1]).transpose(1, 2) \
                .reshape(sizes)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{_GGUF_NAMES[own]}.weight"] = weight
    return shape, weights


def read_target(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    return read_directory(path) if path.is_dir() else read_gguf(path)


def random_target(seed: int) -> tuple[Shape, dict[str, Tensor]]:
    """Return a tiny Llama with random weights, whose tokens are bytes."""
    shape = Shape(32, 64, 6, 4, 2, 8, 320, 1e-5, 10000.0, 1024, 1, 2)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32),
             "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
             "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)}
    weights = {f"model.layers.{layer}.{name}.weight": torch.randn(size, generator=generator) * 0.2
               for layer in range(shape.num_layers) for name, size in sizes.items()}
    for layer in range(shape.num_layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(32)
    weights["model.norm.weight"] = torch.ones(32)
    weights["model.embed_tokens.weight"] = torch.randn(320, 32, generator=generator)
    return shape, weights


class Rope:
    """Rotary position embedding."""

    def __init__(self, shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self._cos, self._sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def __call__(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads [batch, num_heads, length, head_dim] to positions [batch or 1, length]."""
        first, second = heads.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return heads * self._cos[positions][:, None] + turned * self._sin[positions][:, None]


@dataclass(frozen=True)
class Layer:
    """Weights of a decoder layer, with those of one input concatenated."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # of a layer's query, key and value


class Target:
    """The target model.

    Args:
        length: longest sequence, in tokens.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor], device: torch.device,
                 dtype: torch.dtype, length: int) -> None:
        def weight(*names: str) -> Tensor:
            return torch.cat([weights[f"{name}.weight"] for name in names]).to(device, dtype)

        self.shape, self.device, self.dtype, self.length = shape, device, dtype, length
        self.embedding, self.norm = weight("model.embed_tokens"), weight("model.norm")
        self.lm_head = weight("lm_head") if "lm_head.weight" in weights else self.embedding
        self.rope = Rope(shape, length, device, dtype)
        self.layers = []
        for number in range(shape.num_layers):
            own = f"model.layers.{number}."
            self.layers.append(Layer(
                weight(f"{own}input_layernorm"),
                weight(*(f"{own}self_attn.{name}_proj" for name in "qkv")),
                weight(f"{own}self_attn.o_proj"), weight(f"{own}post_attention_layernorm"),
                weight(f"{own}mlp.gate_proj", f"{own}mlp.up_proj"),
                weight(f"{own}mlp.down_proj")))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.shape.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run all layers on ids [batch, length].

        Returns:
            The final normed hidden states [batch, length, hidden_size], and those of the three
            auxiliary layers, concatenated [batch, length, 3 * hidden_size].
        """
        shape = self.shape
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        hidden = F.embedding(ids, self.embedding)
        taken = {}
        for number, layer in enumerate(self.layers):
            if number in shape.aux_layers:
                taken[number] = hidden
            qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv)
            query, key, value = qkv.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) \
                .split(sizes, 1)
            found = attend(number, self.rope(query, positions), self.rope(key, positions), value)
            hidden = hidden + F.linear(found.transpose(1, 2).flatten(2), layer.output)
            gate, up = F.linear(self._norm(hidden, layer.post_norm), layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return self._norm(hidden, self.norm), torch.cat([taken[n] for n in shape.aux_layers], -1)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run `forward` on whole sequences, padded on the right."""
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        return self.forward(ids, positions, lambda _, query, key, value: _causal(query, key, value))


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return ids [rows, longest row], padded on the right with 0."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


@torch.inference_mode()
def generate(target: Target, prompts: Sequence[Sequence[int]], temperatures: Sequence[float],
             max_new_tokens: int, opening: int = 0) -> list[list[int]]:
    """Generate from a batch of prompts with a static KV cache.

    Args:
        temperatures: one per prompt; 0 is greedy.
        opening: number of first tokens that greedy sequences sample at temperature 1.

    Returns:
        New tokens per prompt, up to the EOS token and including it.
    """
    shape, device, batch = target.shape, target.device, len(prompts)
    ids, rows = padded(prompts, device), torch.arange(batch, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest, group = ids.shape[1], shape.num_heads // shape.num_kv_heads
    # One size for all batches, so that the allocator reuses the memory.
    size = (batch, shape.num_kv_heads, _multiple(target.length, 16), shape.head_dim)
    keys, values = ([torch.zeros(size, dtype=target.dtype, device=device) for _ in target.layers]
                    for _ in range(2))

    def prefill(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys[layer][:, :, :longest], values[layer][:, :, :longest] = key, value
        return _causal(query, key, value)

    def decode(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys[layer][rows, :, at], values[layer][rows, :, at] = key[:, :, 0], value[:, :, 0]
        # The query heads of one KV head are rows of one attention, so that no KV is repeated.
        grouped = query.reshape(batch, shape.num_kv_heads, group, shape.head_dim)
        return F.scaled_dot_product_attention(
            grouped, keys[layer][:, :, :end], values[layer][:, :, :end],
            attn_mask=bias.expand(batch, shape.num_kv_heads, group, end)).reshape(query.shape)

    own = torch.tensor(temperatures, device=device)
    new = torch.full((batch, max_new_tokens), shape.eos_token_id, device=device)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    hidden, _ = target.forward(ids, torch.arange(longest, device=device)[None], prefill)
    hidden = hidden[rows, lengths - 1]
    for step in range(max_new_tokens):
        logits = F.linear(hidden, target.lm_head).float()
        now = own if step >= opening else own.where(own > 0, 1.0)
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()
        tokens = (logits - now[:, None] * noise).argmax(-1)  # the Gumbel-max trick
        new[:, step] = tokens.where(~done, shape.eos_token_id)
        done |= tokens == shape.eos_token_id
        if step + 1 == max_new_tokens or (step % 16 == 15 and bool(done.all())):
            break
        at, end = lengths + step, _multiple(longest + step + 1, 16)
        seen = torch.arange(end, device=device) <= at[:, None]
        bias = torch.zeros(seen.shape, dtype=target.dtype, device=device) \
            .masked_fill_(~seen, -math.inf)[:, None, None]
        hidden = target.forward(new[:, step:step + 1], at[:, None], decode)[0][:, 0]
    found = new.tolist()
    return [row[:row.index(shape.eos_token_id) + 1] if shape.eos_token_id in row else row
            for row in found]


# The head.

class _Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(shape.hidden_size)), shape.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape, double = shape, 2 * shape.hidden_size
        width, kv_width = (heads * shape.head_dim for heads in (shape.num_heads,
                                                                shape.num_kv_heads))
        self.q_proj = nn.Linear(double, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(double, kv_width, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rope: Rope, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend to the rows of step 0 before and to the row's own of later steps.

        Args:
            hidden: [batch, length, 2 * hidden_size].
            past: key and value of each earlier step; this step's are appended.
        """
        shape, length = self._shape, hidden.shape[1]
        positions = torch.arange(len(past), len(past) + length, device=hidden.device)[None]
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj))
        query = rope(query, positions).unflatten(1, (shape.num_kv_heads, -1)) \
            / math.sqrt(shape.head_dim)
        past.append((rope(key, positions)[:, :, None], value[:, :, None]))
        first_key, first_value = past[0]
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        scores = [(query @ first_key.transpose(-1, -2)).masked_fill(later, -math.inf)]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in past[1:]]
        weights = torch.cat(scores, -1).float().softmax(-1).to(value.dtype)
        found = weights[..., :length] @ first_value
        for step, (_, own) in enumerate(past[1:]):
            found = found + weights[..., length + step, None] * own
        return self.o_proj(found.flatten(1, 2).transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        sizes = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(*sizes, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape), _MLP(shape)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            _Norm(shape) for _ in range(3))

    def forward(self, embedded: Tensor, hidden: Tensor, rope: Rope,
                past: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, rope, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """An EAGLE-3 head; names of parameters and buffers are those of published checkpoints.

    Args:
        tokens: the draft vocabulary, int64 [draft_vocab_size], ascending.
    """

    def __init__(self, shape: Shape, tokens: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer, self.norm = _Layer(shape), _Norm(shape)
        self.lm_head = nn.Linear(shape.hidden_size, len(tokens), bias=False)
        mask = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        self.register_buffer("t2d", mask)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    @property
    def tokens(self) -> Tensor:
        """Target token id per draft token id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Initialize from the target's last layer, final norm and LM head.

        The last auxiliary layer's hidden state passes through `fc`. Weights of the embedding are
        small and random.
        """
        shape, layer, last = target.shape, target.layers[-1], self.midlayer
        width = shape.hidden_size
        nn.init.normal_(self.fc.weight, std=0.002)
        self.fc.weight[:, 2 * width:] += torch.eye(width)
        attention = last.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        parts = layer.qkv.split([len(own.weight) for own in projections])
        for own, part in zip(projections, parts, strict=True):
            nn.init.normal_(own.weight, std=0.01)
            own.weight[:, width:] = part
        last.mlp.gate_proj.weight[:], last.mlp.up_proj.weight[:] = layer.gate_up.chunk(2)
        for own, value in ((attention.o_proj, layer.output), (last.mlp.down_proj, layer.down),
                           (last.hidden_norm, layer.input_norm), (self.norm, target.norm),
                           (last.post_attention_layernorm, layer.post_norm),
                           (self.lm_head, target.lm_head[self.tokens.to(target.device)])):
            own.weight[:] = value


def save_head(head: Head, shape: Shape, directory: Path) -> int:
    """Write config.json and model.safetensors; return the latter's size in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "bos_token_id": shape.bos_token_id, "eos_token_id": shape.eos_token_id,
        "vocab_size": shape.vocab_size, "draft_vocab_size": len(head.d2t),
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta, "rope_scaling": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: (value.bfloat16() if value.is_floating_point() else value).cpu().contiguous()
               for name, value in head.state_dict().items()}
    path = directory / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    return path.stat().st_size


def load_head(directory: Path, shape: Shape) -> Head:
    tensors = load_file(directory / "model.safetensors")
    head = Head(shape, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    head.load_state_dict(tensors)
    return head


# Prompts.

PACKAGES = ("_pytest", "click", "huggingface_hub", "hypothesis", "jinja2", "numpy", "onnx",
            "pydantic", "rich", "scipy", "sphinx", "starlette", "sympy", "torch", "uvicorn")
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese")
TEMPLATES = {
    "explain": ("Explain in simple terms: {text}", "What does this mean? {text}",
                "Explain what `{title}` does, with an example. {text}"),
    "summarize": ("Summarize: {text}", "Summarize in ten words: {text}"),
    "rewrite": ("Rewrite in other words: {text}", "Rewrite this for a beginner: {text}",
                "Rewrite as a list of points: {text}"),
    "code": ("Write a Python function that does this: {text}",
             "Write a Python function named {title}. {text}"),
    "extract": ("Extract the key terms as a list: {text}",
                "Extract the important facts as JSON: {text}"),
    "translate": ("Translate to {language}: {text}",),
    "continue": ("{text}",),  # without the chat template
    "topic": ("Tell me three facts about this: {topic}", "Write a short story about this: {topic}",
              "Write a poem about this: {topic}", "Explain to a child what this is: {topic}",
              "Give me five tips about this: {topic}", "What is the history of this: {topic}?"),
}


@dataclass(frozen=True)
class Snippet:
    """A piece of documentation."""

    source: str  # the file it is from
    title: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """A request; `input_ids` include the chat template."""

    source: str
    kind: str
    split: str  # train or heldout
    text: str
    input_ids: list[int]


_MARKUP = re.compile(r":\w+:`~?([^`]*)`|`+([^`]*)`+|\[([^\]]*)\]\([^)]*\)")


def _prose(text: str) -> str | None:
    """Return a paragraph on one line without markup; None if it is too short, long or no prose."""
    clean = " ".join(_MARKUP.sub(lambda found: found[found.lastindex or 0], text).split())
    letters = sum(character.isalpha() or character == " " for character in clean)
    good = clean.isascii() and 40 <= len(clean) <= 360 and letters > 0.85 * len(clean) \
        and not re.search(r">>>|::|---|\.\. |^[|#<@!+*-]", clean)
    return clean if good else None


def _paragraphs(source: str, title: str, text: str) -> Iterator[Snippet]:
    for paragraph in re.split(r"\n\s*\n", text):
        clean = _prose(paragraph)
        if clean:
            yield Snippet(source, title, clean)


def _docstrings(path: Path, source: str) -> Iterator[Snippet]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a template of a package, say
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            title, text = getattr(node, "name", path.stem), ast.get_docstring(node) or ""
            yield from itertools.islice(_paragraphs(source, title, text), 2)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path, count: int) -> list[Path]:
    """Return up to `count` Python files of a package, tests excluded, picked by hash."""
    found = [path for path in folder.rglob("*.py")
             if not {"tests", "test", "testing", "_vendor", "site-packages", "idlelib"}
             & {*path.relative_to(folder).parts}]
    return sorted(found, key=lambda path: _hash(path.relative_to(folder).as_posix()))[:count]


def read_snippets(files: int) -> Iterator[Snippet]:
    """Yield snippets of llmc's docs, the standard library and installed packages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        yield from _paragraphs(f"docs/{page.name}", page.stem, text)
    folders = {"stdlib": Path(sysconfig.get_path("stdlib"))}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec and spec.origin:
            folders[name] = Path(spec.origin).parent
    for name, folder in folders.items():
        for path in _files(folder, 4 * files if name == "stdlib" else files):
            yield from _docstrings(path, f"{name}/{path.relative_to(folder).as_posix()}")


def read_topics() -> list[str]:
    """Return names of things, of Unicode's pictographs."""
    names = (unicodedata.name(chr(code), "") for code in range(0x1F300, 0x1FB00))
    skipped = re.compile(r"FACE|SIGN|SYMBOL|WITH|BUTTON|EMOJI|SQUARED?|ARROW|ALCHEM|WHITE|BLACK|"
                         r"HEAVY|NEGATIVE|CIRCLED|\d|CLOCK|SHADE|BALLOT|MODIFIER|CROSS|-|ORNAMENT")
    return [name.lower() for name in names if name and not skipped.search(name)]


def make_prompts(scale: Scale, encode: Callable[[str, bool], list[int]]) -> list[Prompt]:
    """Make requests of all kinds in turn; held-out ones have separate sources.

    Args:
        encode: token ids of a text, with the chat template or without.
    """
    chance = random.Random(scale.seed)
    topics = [Snippet(f"topic/{name}", name, name) for name in read_topics()]
    snippets = list({found.text: found for found in read_snippets(scale.files)}.values())
    made: list[Prompt] = []
    for split, count in (("heldout", scale.heldout), ("train", scale.prompts)):
        # A tenth of the sources is held out.
        pools = [[own for own in pool if (int(_hash(own.source), 16) % 10 == 0)
                  == (split == "heldout")] for pool in (snippets, topics)]
        for pool in pools:
            chance.shuffle(pool)
        texts, things = (itertools.cycle(pool) for pool in pools)
        seen = set[str]()
        kinds = itertools.cycle([*TEMPLATES, "topic"])  # most of the other texts are technical
        for _ in range(20 * count):  # prompts that are too long, or repeated, are dropped
            kind = next(kinds)
            own = next(things if kind == "topic" else texts)
            half = own.text[:own.text.rfind(" ", 0, len(own.text) // 2 + 20)]
            text = chance.choice(TEMPLATES[kind]).format(
                text=half if kind == "continue" else own.text, title=own.title, topic=own.text,
                language=chance.choice(LANGUAGES))
            ids = encode(text, kind != "continue")
            if text not in seen and len(ids) <= scale.prompt_tokens:
                seen.add(text)
                made.append(Prompt(own.source, kind, split, text, ids))
            if len(seen) == count:
                break
    return made


def _encoder(model: Path | None) -> Callable[[str, bool], list[int]]:
    """Return the model's encoder; the tiny model's tokens are bytes."""
    if model is None:
        return lambda text, _: [3 + byte for byte in text.encode()]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model) if model.is_dir() else \
        AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)

    def encode(text: str, chat: bool) -> list[int]:
        if chat:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}],
                                                 tokenize=False, add_generation_prompt=True)
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    return encode


def read_prompts(work: Path, split: str) -> list[Prompt]:
    with (work / "prompts.jsonl").open(encoding="utf-8") as lines:
        found = [Prompt(**json.loads(line)) for line in lines]
    return [prompt for prompt in found if prompt.split == split]


def write_prompts(work: Path, scale: Scale, model: Path | None) -> None:
    made = make_prompts(scale, _encoder(model))
    path = work / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(dataclasses.asdict(own))}\n" for own in made),
                    encoding="utf-8")
    kinds = collections.Counter(own.kind for own in made if own.split == "train")
    say(f"{len(made):,} prompts, {path.stat().st_size / 1e6:.1f} MB; to train: {dict(kinds)}")


# Training data.

@dataclass(frozen=True)
class Sample:
    """A prompt with the target's continuation."""

    ids: list[int]
    prompt: int  # tokens of the prompt


def write_tokens(work: Path, scale: Scale, target: Target) -> None:
    """Generate from the training prompts, up to a number of tokens or a time.

    A pass has all prompts. Half of them are greedy; in the next pass, the other half. From the
    third pass on, greedy sequences have 8 sampled tokens first, as they would repeat otherwise.
    """
    prompts = sorted((own.input_ids for own in read_prompts(work, "train")), key=len)
    start, count = time.perf_counter(), 0
    ids, lengths, prompt_lengths = list[int](), list[int](), list[int]()
    batches = [prompts[first:first + scale.batch] for first in range(0, len(prompts), scale.batch)]
    for number, batch in ((number, batch) for number in itertools.count() for batch in batches):
        temperatures = [0.8 * ((row + number) % 2) for row in range(len(batch))]
        found = generate(target, batch, temperatures, scale.max_new_tokens, 8 * (number > 1))
        for prompt, own in zip(batch, found, strict=True):
            ids += [*prompt, *own]
            lengths.append(len(prompt) + len(own))
            prompt_lengths.append(len(prompt))
        count += sum(map(len, found))
        seconds = time.perf_counter() - start
        say(f"pass {number}: {count:,} tokens, {count / seconds:,.0f} tokens/s, {seconds:.0f} s")
        if count >= scale.generated_tokens or seconds > scale.generate_seconds:
            break
    save_file({"ids": torch.tensor(ids, dtype=torch.int32),
               "lengths": torch.tensor(lengths, dtype=torch.int32),
               "prompt_lengths": torch.tensor(prompt_lengths, dtype=torch.int32)},
              work / "tokens.safetensors")


def read_sequences(work: Path) -> list[Sample]:
    with safe_open(work / "tokens.safetensors", "pt") as file:
        ids, lengths, prompts = (file.get_tensor(name).tolist()
                                 for name in ("ids", "lengths", "prompt_lengths"))
    ends = itertools.accumulate(lengths)
    return [Sample(ids[end - length:end], prompt)
            for end, length, prompt in zip(ends, lengths, prompts, strict=True)]


def draft_vocabulary(sequences: Iterable[Sample], shape: Shape, size: int) -> \
        tuple[Tensor, float]:
    """Return the most frequent generated tokens, ascending, and the fraction that they cover."""
    counts = torch.bincount(torch.tensor([token for own in sequences
                                          for token in own.ids[own.prompt:]]),
                            minlength=shape.vocab_size)
    tokens = counts.topk(min(size, shape.vocab_size)).indices
    return tokens.sort().values, float(counts[tokens].sum() / counts.sum())


def batches_of(sequences: list[Sample], batch_tokens: int, chance: random.Random) -> \
        list[list[Sample]]:
    """Group sequences of similar length; the order and the groups are random."""
    order = sorted(sequences, key=lambda own: len(own.ids) + chance.random() * 16)
    batches, batch, longest = list[list[Sample]](), list[Sample](), 0
    for own in order:
        longest = max(longest, len(own.ids))
        if batch and (len(batch) + 1) * longest > batch_tokens:
            batches.append(batch)
            batch, longest = [], len(own.ids)
        batch.append(own)
    batches.append(batch)
    chance.shuffle(batches)
    return batches


# Training.

def chain_loss(head: Head, target: Target, batch: list[Sample]) -> tuple[Tensor, Tensor]:
    """Return the loss of training-time test, and the accuracy of each step [DRAFTS].

    A label is the target's distribution after a generated token. At step i, the row i + 1 before
    the label predicts it, if that row is not before the prompt's last. As published, labels whose
    most likely token is outside the draft vocabulary have no loss.
    """
    device = target.device
    ids = padded([own.ids for own in batch], device)
    column = torch.arange(ids.shape[1])
    starts, ends = (torch.tensor(own)[:, None] for own in
                    zip(*((own.prompt, len(own.ids) - 1) for own in batch), strict=True))
    generated = (column >= starts) & (column < ends)
    labels = generated.flatten().nonzero()[:, 0].to(device)
    offsets = (column - starts)[generated].to(device)
    with torch.no_grad():
        final, hidden = target.read(ids)
        logits = F.linear(final.flatten(0, 1)[labels], target.lm_head)
        kept = head.t2d[logits.argmax(-1)]
        probabilities = logits[:, head.tokens].float().softmax(-1)
        likely = probabilities.argmax(-1)
    hidden, past = head.fc(hidden), list[tuple[Tensor, Tensor]]()
    losses, accuracies = [], []
    for step in range(DRAFTS):
        embedded = F.embedding(ids.roll(-1 - step, 1), target.embedding)
        hidden = head.midlayer(embedded, hidden, target.rope, past)
        logits = head.logits(hidden.flatten(0, 1)[(labels - 1 - step).clamp_min(0)]).float()
        used = offsets >= step
        count = used.sum().clamp_min(1)
        each = F.cross_entropy(logits, probabilities, reduction="none")
        losses.append(STEP_WEIGHT ** step * (each * (used & kept)).sum() / count)
        accuracies.append(((logits.argmax(-1) == likely) & used & kept).sum() / count)
    return torch.stack(losses).sum(), torch.stack(accuracies).detach()


def train(work: Path, scale: Scale, target: Target) -> None:
    """Train the head on the generated tokens and save it.

    The learning rate follows a cosine over the larger fraction: of the steps or of the time.
    """
    start, chance = time.perf_counter(), random.Random(scale.seed)
    sequences, device = read_sequences(work), target.device
    tokens, coverage = draft_vocabulary(sequences, target.shape, scale.draft_vocab)
    say(f"{len(sequences):,} sequences; {len(tokens):,} draft tokens cover {coverage:.2%}")
    torch.manual_seed(scale.seed)
    head = Head(target.shape, tokens)
    head.start_from(target)
    head.to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=scale.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=0.01, fused=device.type == "cuda")
    begin, step, log = time.perf_counter(), 0, list[dict[str, Any]]()
    order: list[list[Sample]] = []

    def record() -> None:
        log.append({"step": step, "seconds": round(seconds, 1), "loss": float(loss.detach()),
                    "accuracy": [round(own, 4) for own in accuracies.tolist()]})
        say(f"step {step}, {seconds:.0f} s: loss {log[-1]['loss']:.3f}, "
            f"accuracy {log[-1]['accuracy']}")

    while True:
        seconds = time.perf_counter() - begin
        over = max(step / scale.steps, seconds / scale.train_seconds)
        if over >= 1:
            break
        order = order or batches_of(sequences, scale.batch_tokens, chance)
        for group in optimizer.param_groups:
            group["lr"] = scale.learning_rate * min(1, over / 0.03 + 0.01) \
                * (0.5 + 0.5 * math.cos(math.pi * over))
        with torch.autocast(device.type, target.dtype, enabled=device.type == "cuda"):
            loss, accuracies = chain_loss(head, target, order.pop())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            record()
        step += 1
    record()
    size = save_head(head, target.shape, work / "head")
    say(f"{step:,} steps in {seconds:.0f} s; head/model.safetensors has {size / 1e6:.1f} MB")
    generated = sum(len(own.ids) - own.prompt for own in sequences)
    training = {"sequences": len(sequences), "generated_tokens": generated, "steps": step,
                "coverage": coverage, "bytes": size, "log": log,
                "seconds": round(time.perf_counter() - start, 1)}
    (work / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")


# Evaluation.

@torch.inference_mode()
def draft_chains(head: Head, target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's greedy tokens, and the head's chain of drafts at each row.

    Args:
        ids: [batch, length]. Row p's chain starts with the embedding of token p + 1.

    Returns:
        Tokens after each position [batch, length], and drafts [DRAFTS, batch, length], the first
        of them for position p + 2.
    """
    final, hidden = target.read(ids)
    greedy = F.linear(final, target.lm_head).argmax(-1)
    hidden, newest, past = head.fc(hidden), ids.roll(-1, 1), list[tuple[Tensor, Tensor]]()
    drafts = []
    for _ in range(DRAFTS):
        hidden = head.midlayer(F.embedding(newest, target.embedding), hidden, target.rope, past)
        newest = head.tokens[head.logits(hidden).argmax(-1)]
        drafts.append(newest)
    return greedy, torch.stack(drafts)


@dataclass
class Acceptance:
    """Counts of verifications."""

    verifications: int = 0
    tokens: int = 0
    # By position of a draft: all, those after an accepted one, and accepted ones.
    drafted: list[int] = dataclasses.field(default_factory=lambda: [0] * DRAFTS)
    reached: list[int] = dataclasses.field(default_factory=lambda: [0] * DRAFTS)
    accepted: list[int] = dataclasses.field(default_factory=lambda: [0] * DRAFTS)

    def walk(self, ids: list[int], prompt: int, chains: list[list[int]]) -> None:
        """Decode one sequence: verify a chain, accept its first equal drafts, add a token.

        Args:
            ids: the prompt and the target's greedy tokens.
            chains: drafts by row [length][DRAFTS].
        """
        row = prompt - 1  # the prefill gives the first token
        while (left := len(ids) - 2 - row) > 0:
            count = min(DRAFTS, left)
            equal = [draft == token
                     for draft, token in zip(chains[row][:count], ids[row + 2:], strict=False)]
            accepted = (*equal, False).index(False)
            for place in range(count):
                self.drafted[place] += 1
                self.reached[place] += place <= accepted
                self.accepted[place] += place < accepted
            self.verifications += 1
            self.tokens += min(accepted + 1, left)
            row += min(accepted + 1, left)

    @property
    def mean_length(self) -> float:
        return self.tokens / max(1, self.verifications)

    def rates(self, of: list[int]) -> list[float]:
        """Acceptance rate by position, of `drafted` or of `reached`."""
        return [accepted / max(1, count) for accepted, count in zip(self.accepted, of, strict=True)]


def evaluate(work: Path, scale: Scale, target: Target) -> None:
    """Print and write acceptance on held-out prompts.

    A sequence ends before the first token that differs between `generate` and the verifier's
    forward pass.
    """
    head = load_head(work / "head", target.shape).to(target.device, target.dtype)
    prompts = sorted(read_prompts(work, "heldout"), key=lambda own: len(own.input_ids))
    counts = collections.defaultdict[str, Acceptance](Acceptance)
    known = head.t2d.tolist()
    cut = covered = generated = 0
    start = time.perf_counter()
    for first in range(0, len(prompts), 50):
        batch = prompts[first:first + 50]
        found = generate(target, [own.input_ids for own in batch], [0.0] * len(batch),
                         scale.max_new_tokens)
        rows = [[*own.input_ids, *new] for own, new in zip(batch, found, strict=True)]
        greedy, drafts = (value.tolist() for value in
                          draft_chains(head, target, padded(rows, target.device)))
        for number, (own, ids) in enumerate(zip(batch, rows, strict=True)):
            prompt = len(own.input_ids)
            end = next((row + 1 for row in range(prompt - 1, len(ids) - 1)
                        if greedy[number][row] != ids[row + 1]), len(ids))
            cut += end < len(ids)
            generated += end - prompt
            covered += sum(known[token] for token in ids[prompt:end])
            chains = [list(chain) for chain in zip(*(step[number] for step in drafts), strict=True)]
            for name in ("all", own.kind):
                counts[name].walk(ids[:end], prompt, chains)
    report: dict[str, Any] = {
        "prompts": len(prompts), "tokens": generated, "cut_sequences": cut,
        "coverage": covered / max(1, generated),
        "mean_acceptance_length": counts["all"].mean_length,
        "acceptance_by_position": counts["all"].rates(counts["all"].drafted),
        "acceptance_after_accepted": counts["all"].rates(counts["all"].reached),
        "mean_acceptance_length_by_kind": {name: own.mean_length for name, own in counts.items()},
        "seconds": round(time.perf_counter() - start, 1)}
    training = work / "training.json"
    report["training"] = json.loads(training.read_text(encoding="utf-8"))
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    say(f"\n{len(prompts)} held-out prompts, {generated:,} greedy tokens, {cut} sequences cut; the "
        f"draft vocabulary covers {report['coverage']:.2%}\n\n| draft | accepted | given that the "
        "one before is |\n| --- | --- | --- |")
    for place, rates in enumerate(zip(report["acceptance_by_position"],
                                      report["acceptance_after_accepted"], strict=True), 1):
        say(f"| {place} | {rates[0]:.3f} | {rates[1]:.3f} |")
    say("\n| prompts | mean acceptance length |\n| --- | --- |")
    for name, length in sorted(report["mean_acceptance_length_by_kind"].items()):
        say(f"| {name} | {length:.2f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face directory")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--scale", choices=SCALES, default="full")
    for name in ("draft_vocab", "generate_seconds", "train_seconds", "learning_rate"):
        kind = type(getattr(SCALES["full"], name))
        parser.add_argument(f"--{name}", type=kind, help="default: the scale's")
    options = parser.parse_args(arguments)
    if (options.model is None) != (options.scale == "smoke"):
        parser.error("give --model MODEL with --scale full, and none with --scale smoke")
    work, scale = options.work, SCALES[options.scale]
    given = {name: value for name, value in vars(options).items()
             if value is not None and name in scale.__dataclass_fields__}
    scale = dataclasses.replace(scale, **given)
    work.mkdir(parents=True, exist_ok=True)
    if "prompts" in options.stage:
        write_prompts(work, scale, options.model)
    if {*options.stage} == {"prompts"}:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, weights = read_target(options.model) if options.model else random_target(scale.seed)
    # cuDNN's attention would build a plan for each of many lengths.
    torch.backends.cuda.enable_cudnn_sdp(False)
    longest = scale.prompt_tokens + scale.max_new_tokens + DRAFTS
    torch.manual_seed(scale.seed)
    for stage, run, dtype in (("generate", write_tokens, half), ("train", train, half),
                              ("evaluate", evaluate, torch.float32)):
        if stage not in options.stage:
            continue
        start = time.perf_counter()
        run(work, scale, Target(shape, weights, device, dtype, longest))
        taken = f"{stage}: {time.perf_counter() - start:.0f} s"
        if device.type == "cuda":
            taken += f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most"
            torch.cuda.reset_peak_memory_stats()
        say(taken)


if __name__ == "__main__":
    main()
