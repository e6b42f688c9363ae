"""DFlash draft models: a block of tokens, denoised in one pass.

    hidden       fc([h_1 | h_2 | …]), hidden states after some layers of the model; 0 in the block
    context      hidden_norm(hidden), of the tokens before the block; 0 in the block
    x            embedding of the last token, then of masks
    layer        keys and values of context and of input_layernorm(x); attention is bidirectional
    logits       the model's LM head on norm(x), after each mask

The exported module has context and block in one sequence: rows of the context have features, those
of the block have none. What its queries compute in rows of the context is not read.

Checkpoints are in the layout of z-lab (`fc`, `hidden_norm`, a `dflash_config`) or of transformers
(`encoder.fc`, `encoder.output_norm_enc`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs
import torch
from accelerate import init_empty_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from llmc.compiler.frontend.bind import attach_weights
from llmc.compiler.frontend.checkpoint import open_checkpoint, read_json
from llmc.compiler.frontend.draft import (
    add_features,
    embedding_of,
    head_of,
    hidden_states,
    mark_weights,
    refuse_unused,
)
from llmc.compiler.frontend.huggingface import find_directory, read_config
from llmc.compiler.frontend.parts import ATTENTION, ENCODER
from llmc.compiler.frontend.raw import RawDraft, RawModel, config_digest
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import alone, to_graph, trace_draft
from llmc.compiler.graph.rewrite import is_op
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, reason_of, shown

_FC = "fc.weight"
_RENAMED = {"encoder.fc.weight": _FC, "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_LARGE = 1e30  # times the square of any feature is more than 1


@dataclass(frozen=True)
class _Drafter:
    """A checkpoint of a draft model.

    Args:
        origin: its directory.
        config: of transformers.
        block_size: tokens of a block, the last known one included.
        mask_token_id: of the tokens after it.
        layer_ids: layers whose hidden states are read, counted from 0.
        tensors: by the names of `_DFlash`'s parameters.
    """

    origin: Path
    config: Any
    block_size: int
    mask_token_id: int
    layer_ids: Sequence[int]
    tensors: Mapping[str, Weight]


def attach_dflash(raw: RawModel, directory: Path, allow_pickle: bool) -> RawModel:
    """Return a model with the DFlash draft model in a directory.

    Raises:
        LlmcError: the checkpoint is missing, broken or unsupported, or it is of another model.
    """
    directory = find_directory(directory)
    states, (table, factor), head = hidden_states(raw), embedding_of(raw.graph), head_of(raw.graph)
    drafter = _read(directory, allow_pickle)
    _check_model(drafter, raw, table, states)
    add_features(raw.graph, [states[layer] for layer in drafter.layer_ids],
                 drafter.tensors.get(_FC), _FC, str(directory), drafter.config.hidden_size)
    with alone():
        graph = _export(drafter, table, factor, head)
    return replace(raw, draft=RawDraft(
        (graph,), "dflash", config_digest(read_json(directory / "config.json")), chain="block",
        num_speculative_tokens=drafter.block_size - 1, mask_token_id=drafter.mask_token_id))


def _read(directory: Path, allow_pickle: bool) -> _Drafter:
    """Read a checkpoint."""
    path = directory / "config.json"
    plain = read_json(path)
    own = plain.get("dflash_config") or {}
    if not isinstance(own, dict):
        raise LlmcError(f"'{path}' has dflash_config {shown(own)}, expected an object; correct it")
    config = read_config(directory)  # with the defaults of its class
    values: dict[str, Any] = {key: own.get(key, getattr(config, key, None)) for key in (
        "block_size", "mask_token_id", "target_layer_ids")}
    for key, value in values.items():
        items, least = (value, 0) if key == "target_layer_ids" else ([value], 2)
        least = 0 if key == "mask_token_id" else least
        if not isinstance(items, list) or not items or not all(
                isinstance(item, int) and item >= least for item in items):
            raise LlmcError(f"'{path}' has {key} {shown(value)}, expected "
                            f"{'a list of layers' if items is value else f'{least} or more'}, as "
                            f"of a DFlash draft model; give the directory of one")
    missing = next((key for key in ("hidden_size", "num_attention_heads", "num_key_value_heads",
                                    "intermediate_size", "rms_norm_eps", "rope_parameters")
                    if getattr(config, key, None) is None), None)
    if missing is not None:
        raise LlmcError(f"'{path}' has no {missing}, expected the config of a DFlash draft model "
                        f"with layers as Qwen3's; give another kind of draft model")
    tensors = {_RENAMED.get(name, name): weight
               for name, weight in open_checkpoint(directory, allow_pickle).items()}
    return _Drafter(directory, config, values["block_size"], values["mask_token_id"],
                    values["target_layer_ids"], tensors)


def _check_model(drafter: _Drafter, raw: RawModel, table: gs.Constant,
                 states: Sequence[gs.Tensor]) -> None:
    """Check that a draft model is of this model.

    Raises:
        LlmcError: names the sizes that differ.
    """
    config, (vocab_size, embedding_size) = drafter.config, table._values.shape
    layers = getattr(config, "num_target_layers", None) or len(states)
    for what, given, expected in (
            ("vocab_size", getattr(config, "vocab_size", vocab_size), vocab_size),
            ("hidden_size", config.hidden_size, embedding_size),
            ("num_hidden_layers", layers, len(states)),
            ("layers up to", max(max(drafter.layer_ids), len(states) - 1), len(states) - 1)):
        if given != expected:
            raise LlmcError(f"'{drafter.origin}' is a draft model of a model with {what} {given}, "
                            f"'{raw.architecture}' has {expected}; give one that was trained for "
                            f"it")
    if drafter.mask_token_id >= vocab_size:
        raise LlmcError(f"'{drafter.origin}' has mask_token_id {drafter.mask_token_id}, expected "
                        f"less than the vocab_size {vocab_size} of '{raw.architecture}'; correct "
                        f"its config")


class _Attention(torch.nn.Module):
    """Attention of all rows of a sequence to each other."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.layer_idx, self.is_causal, self.scaling = layer, False, self.head_dim**-0.5
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = torch.nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = torch.nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = torch.nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.o_proj = torch.nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = (*rows.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(rows).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(rows).view(shape)).transpose(1, 2)
        value = self.v_proj(rows).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        joined = attend(self, query, key, value, None, scaling=self.scaling)[0]
        result: torch.Tensor = self.o_proj(joined.reshape(*rows.shape[:-1], -1))
        return result


class _Layer(torch.nn.Module):
    """A decoder layer, whose keys and values are of context and block."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config, layer), Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor, in_block: torch.Tensor,
                cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(context + in_block * self.input_layernorm(x), cos, sin)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _DFlash(torch.nn.Module):
    """The draft model without fc, with the model's embedding and LM head."""

    def __init__(self, config: Any, table: gs.Constant, factor: float, head: gs.Constant) -> None:
        super().__init__()
        self._factor = factor
        self.embed_tokens = torch.nn.Embedding(*table._values.shape)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = torch.nn.ModuleList(
            _Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(*head._values.shape[::-1], bias=False)
        if head._values is table._values:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor,
                position_ids: torch.Tensor) -> tuple[torch.Tensor]:
        x, context = self.embed_tokens(input_ids) * self._factor, self.hidden_norm(hidden)
        in_block = 1.0 - torch.clamp(hidden * hidden * _LARGE, max=1.0)  # 1 without features
        cos, sin = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, context, in_block, cos, sin)
        return self.lm_head(self.norm(x)),


def _export(drafter: _Drafter, table: gs.Constant, factor: float, head: gs.Constant) -> gs.Graph:
    """Export the draft model and bind its weights."""
    config = drafter.config
    config._attn_implementation, config.dtype = ATTENTION, torch.float32
    try:
        with init_empty_weights(include_buffers=False), Reproducible():
            model = _DFlash(config, table, factor, head).eval()
    except Exception as error:  # transformers raises errors of many types
        raise LlmcError(f"transformers rejects the config of '{drafter.origin}' "
                        f"({reason_of(error)}); correct it") from error
    refuse_unused(drafter.tensors, {*model.state_dict(), _FC}, drafter.origin, "DFlash",
                  "with layers as Qwen3's")
    graph = to_graph(trace_draft(model, config.hidden_size, config.max_position_embeddings,
                                 ENCODER, ("logits",)), set())
    windows = [config.sliding_window if kind == "sliding_attention" else 0
               for kind in getattr(config, "layer_types", None) or ()]
    for node, window in zip((node for node in graph.nodes if is_op(node, SDPA)), windows,
                            strict=False):
        node.attrs["window"] = int(window or 0)
    shared = {"embed_tokens.weight": table._values, "lm_head.weight": head._values}
    attach_weights(graph, model, {**drafter.tensors, **shared}, str(drafter.origin),
                   {id(each._values): each.name for each in (head, table)})
    mark_weights(graph, {id(each._values) for each in (head, table)})
    return graph
