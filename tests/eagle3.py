"""The published EAGLE-3 draft model in PyTorch, as a reference, and its checkpoint layouts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

EPSILON = 1e-5


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def rotate(x, positions, theta):
    """Rotary embedding of x [seq, heads, dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].float() for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Eagle3:
    """A random draft model.

    Args:
        hidden_size: of the model and of the draft model.
        vocab_size: of the model.
        rows: of the draft model's logits.
        embedding: the model's, unless the draft model has its own.
        norm_before_residual: see compiler/frontend/eagle3.py.
    """

    def __init__(self, hidden_size, vocab_size, rows, embedding, *, own_embedding=False,
                 norm_before_residual=False, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim, self.theta = 4, 2, 16, 10000.0
        self.norm_before_residual = norm_before_residual
        q, kv, inner = self.heads * self.dim, self.kv_heads * self.dim, 96
        shapes = {
            "fc.weight": (hidden_size, 3 * hidden_size),
            "midlayer.self_attn.q_proj.weight": (q, 2 * hidden_size),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden_size),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden_size),
            "midlayer.self_attn.o_proj.weight": (hidden_size, q),
            "midlayer.mlp.gate_proj.weight": (inner, hidden_size),
            "midlayer.mlp.up_proj.weight": (inner, hidden_size),
            "midlayer.mlp.down_proj.weight": (hidden_size, inner),
            "midlayer.hidden_norm.weight": (hidden_size,),
            "midlayer.input_layernorm.weight": (hidden_size,),
            "midlayer.post_attention_layernorm.weight": (hidden_size,),
            "norm.weight": (hidden_size,), "lm_head.weight": (rows, hidden_size)}
        self.tensors = {name: torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1)
                        for name, shape in shapes.items()}
        if own_embedding:
            embedding = torch.randn(embedding.shape, generator=generator) * 0.15
            self.tensors["embed_tokens.weight"] = embedding
        self.embedding = embedding
        ids = torch.randperm(vocab_size, generator=generator)[:rows].sort().values \
            if rows < vocab_size else torch.arange(vocab_size)
        self.token_ids = ids
        if rows < vocab_size:
            self.tensors["d2t"] = ids - torch.arange(rows)
            self.tensors["t2d"] = torch.isin(torch.arange(vocab_size), ids)
        self.config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
            "hidden_size": hidden_size, "intermediate_size": inner, "num_hidden_layers": 1,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim, "rms_norm_eps": EPSILON, "rope_theta": self.theta,
            "vocab_size": vocab_size, "draft_vocab_size": rows, "hidden_act": "silu",
            "max_position_embeddings": 32, "attention_bias": False,
            "tie_word_embeddings": False}

    def save(self, directory: Path, **changes) -> Path:
        """Save in SpecForge's layout."""
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({**self.config, **changes}))
        save_file(self.tensors, directory / "model.safetensors")
        return directory

    def save_speculators(self, directory: Path, **changes) -> Path:
        """Save in the layout of vLLM's speculators."""
        directory.mkdir(parents=True)
        layer = {key: value for key, value in self.config.items()
                 if key not in ("architectures", "draft_vocab_size")}
        (directory / "config.json").write_text(json.dumps({
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
            "draft_vocab_size": self.config["draft_vocab_size"],
            "norm_before_residual": self.norm_before_residual, "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3}]}, **changes}))
        save_file({name.replace("midlayer.", "layers.0."): tensor
                   for name, tensor in self.tensors.items()}, directory / "model.safetensors")
        return directory

    def features(self, states):
        """`hidden` [seq, hidden_size] of three hidden states."""
        return torch.cat(states, -1) @ self.tensors["fc.weight"].T

    def __call__(self, tokens, hidden):
        """Logits and `hidden_out` of all rows; row p has token p + 1 and `hidden` of row p."""
        def linear(x, name):
            return x @ self.tensors[f"midlayer.{name}.weight"].T

        def gain(name):
            return self.tensors[f"midlayer.{name}.weight"]

        count, positions = len(tokens), torch.arange(len(tokens))
        normed = norm(hidden, gain("hidden_norm"))
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([norm(self.embedding[tokens], gain("input_layernorm")), normed], -1)
        q, k, v = (linear(x, f"self_attn.{kind}_proj").reshape(count, -1, self.dim)
                   for kind in "qkv")
        q, k = (rotate(each, positions, self.theta) for each in (q, k))
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim ** -0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        out = residual + linear(seen, "self_attn.o_proj")
        y = norm(out, gain("post_attention_layernorm"))
        out = out + linear(torch.nn.functional.silu(linear(y, "mlp.gate_proj"))
                           * linear(y, "mlp.up_proj"), "mlp.down_proj")
        return norm(out, self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T, out

    @torch.no_grad()
    def drafts(self, model, tokens, count, layers=None):
        """Drafts after the last token: the argmax chain."""
        number = model.config.num_hidden_layers
        states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = self.features([states[layer][0] for layer in
                                layers or (2, number // 2, number - 3)])
        shifted, drafts = torch.tensor(tokens[1:]), []
        for _ in range(count):
            logits, out = self(shifted, hidden)
            drafts.append(int(self.token_ids[logits[-1].argmax()]))
            shifted = torch.cat([shifted, torch.tensor(drafts[-1:])])
            hidden = torch.cat([hidden, out[-1:]])
        return drafts
