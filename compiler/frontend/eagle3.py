"""EAGLE-3 draft models: one decoder layer on features of three layers of the model.

    hidden       fc([h_low | h_mid | h_high]), hidden states after three layers
    x            [input_layernorm(embedding of the next token) | hidden_norm(hidden)]
    hidden_out   hidden + attention(x), then + MLP
    logits       lm_head(norm(hidden_out)), of the draft model's vocabulary

Checkpoints are in the layout of SpecForge (`midlayer.…`) or of vLLM's speculators (`layers.0.…`,
with a `transformer_layer_config`). With `norm_before_residual`, hidden_norm(hidden) is also the
residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import torch
from accelerate import init_empty_weights
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from llmc.compiler.frontend.bind import attach_weights, equal
from llmc.compiler.frontend.checkpoint import open_checkpoint, read_json
from llmc.compiler.frontend.draft import (
    add_features,
    hidden_states,
    input_table,
    mark_weights,
    refuse_unused,
)
from llmc.compiler.frontend.huggingface import find_directory
from llmc.compiler.frontend.parts import ATTENTION
from llmc.compiler.frontend.raw import RawDraft, RawModel, config_digest
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.sizes import check_sizes
from llmc.compiler.frontend.trace import alone, to_graph, trace_draft
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, reason_of, shown

_FC, _HEAD, _TABLE, _EMBEDDING = "fc.weight", "lm_head.weight", "d2t", "embed_tokens.weight"
_UNREAD = frozenset({_FC, _TABLE, "t2d"})  # not parameters of the exported module


@dataclass(frozen=True)
class _Head:
    """A checkpoint of a draft model.

    Args:
        origin: its directory.
        config: contents of config.json.
        layer: config of its decoder layer.
        tensors: by the names of `_Eagle3`'s parameters.
    """

    origin: Path
    config: dict[str, Any]
    layer: LlamaConfig
    tensors: Mapping[str, Weight]

    @property
    def layer_ids(self) -> Sequence[int] | None:
        """Layers after which hidden states are read, counted from 1; None: the default."""
        given = self.config.get("eagle_aux_hidden_state_layer_ids")
        if given:
            return list(given)
        # Here they are indices of layers.
        given = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return [layer + 1 if isinstance(layer, int) else layer for layer in given] \
            if isinstance(given, list) and given else None

    @property
    def norm_before_residual(self) -> bool:
        """Whether the residual is normalized; the default depends on the layout."""
        return bool(self.config.get("norm_before_residual", _is_speculators(self.config)))

    @property
    def architectures(self) -> Sequence[str]:
        """Architectures of the model that it was trained for; empty if they are not given."""
        verifier = (self.config.get("speculators_config") or {}).get("verifier")
        given = verifier.get("architectures") if isinstance(verifier, dict) else None
        return [str(name) for name in given] if isinstance(given, list) else []

    @property
    def num_speculative_tokens(self) -> int | None:
        """Drafts that it was trained for, if given."""
        methods = (self.config.get("speculators_config") or {}).get("proposal_methods")
        number = methods[0].get("speculative_tokens") if isinstance(methods, list) and methods \
            and isinstance(methods[0], dict) else None
        return number if isinstance(number, int) and number > 0 else None


def attach_eagle3(raw: RawModel, directory: Path, allow_pickle: bool) -> RawModel:
    """Return a model with the EAGLE-3 draft model in a directory.

    Raises:
        LlmcError: the checkpoint is missing, broken or unsupported, or it is of another model.
    """
    table, states = input_table(raw.graph), hidden_states(raw)
    head = _read(find_directory(directory), allow_pickle)
    head.layer.max_position_embeddings = _positions(raw, head)
    _check_model(head, raw, table, states)
    token_ids = _token_ids(head, table._values.shape[0])
    count = len(states)
    chosen = [states[layer - 1] for layer in head.layer_ids or (2, count // 2, count - 3)]
    add_features(raw.graph, chosen, head.tensors.get(_FC), _FC, str(head.origin),
                 head.layer.hidden_size)
    graph = _export(head, table)
    return replace(raw, draft=RawDraft((graph,), "eagle3", config_digest(head.config), token_ids,
                                       head.num_speculative_tokens))


def _read(directory: Path, allow_pickle: bool) -> _Head:
    """Read a checkpoint."""
    path = directory / "config.json"
    config = read_json(path)
    check_sizes(config, path)
    _check_types(config, path)
    names = [*(config.get("architectures") or []), config.get("speculators_model_type", "")]
    if not any("eagle3" in str(name).lower() for name in names):
        raise LlmcError(f"'{path}' has architecture '{names[0] or 'unknown'}', expected that of "
                        f"an EAGLE-3 draft model, such as LlamaForCausalLMEagle3")
    plain = config["transformer_layer_config"] if _is_speculators(config) else config
    unsupported = [name for name, value, expected in (
        ("num_hidden_layers", plain.get("num_hidden_layers", 1), 1),
        ("model_type", plain.get("model_type", "llama"), "llama"),
        ("use_aux_hidden_state",
         (config.get("eagle_config") or {}).get("use_aux_hidden_state", True), True))
        if value != expected]
    if unsupported:
        raise LlmcError(f"'{path}' has a {unsupported[0]} that llmc does not support for EAGLE-3; "
                        f"give a draft model of one Llama layer on features of three layers")
    try:
        layer = LlamaConfig.from_dict({key: value for key, value in plain.items()
                                       if key not in ("architectures", "dtype", "torch_dtype")})
    except Exception as error:  # transformers raises errors of many types
        raise LlmcError(f"'{path}' is rejected by transformers ({reason_of(error)}); correct it") \
            from error
    layer._attn_implementation, layer.dtype = ATTENTION, torch.float32
    tensors = {name.replace("midlayer.", "layers.0.", 1): weight
               for name, weight in open_checkpoint(directory, allow_pickle).items()}
    return _Head(directory, config, layer, tensors)


def _check_types(config: Mapping[str, Any], path: Path) -> None:
    """Check the types of the keys that only draft models have."""
    kinds: dict[str, tuple[type, str]] = {
        "architectures": (list, "a list"), "eagle_aux_hidden_state_layer_ids": (list, "a list"),
        "draft_vocab_size": (int, "a whole number"), "target_hidden_size": (int, "a whole number"),
        "eagle_config": (dict, "an object"), "speculators_config": (dict, "an object")}
    for key, (kind, words) in kinds.items():
        value = config.get(key)
        if value is not None and (not isinstance(value, kind) or (
                isinstance(value, int) and value < 1)):
            raise LlmcError(f"'{path}' has {key} {shown(value)}, expected {words}; correct it")


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("transformer_layer_config"), dict)


def _positions(raw: RawModel, head: _Head) -> int:
    """Positions of the draft model: the model's, as rotary embeddings have no limit."""
    text = raw.config.get("text_config") or raw.config
    return int(text.get("max_position_embeddings") or head.layer.max_position_embeddings)


def _check_model(head: _Head, raw: RawModel, table: gs.Constant,
                 states: Sequence[gs.Tensor]) -> None:
    """Check that a draft model is of this model.

    Raises:
        LlmcError: names the sizes that differ.
    """
    def refuse(what: str, given: object, expected: object) -> None:
        raise LlmcError(f"'{head.origin}' is a draft model of a model with {what} {given}, "
                        f"'{raw.architecture}' has {expected}; give one that was trained for it")

    known = head.architectures
    if known and raw.architecture not in known:
        raise LlmcError(f"'{head.origin}' is a draft model of {' or '.join(known)}, the model is "
                        f"'{raw.architecture}'; give one that was trained for it")
    (vocab_size, embedding_size), hidden_size = table._values.shape, int(states[0].shape[-1])
    if head.layer.vocab_size != vocab_size:
        refuse("vocab_size", head.layer.vocab_size, vocab_size)
    width = head.config.get("target_hidden_size") or head.layer.hidden_size
    if width != hidden_size:
        refuse("hidden_size", width, hidden_size)
    if _EMBEDDING not in head.tensors and head.layer.hidden_size != embedding_size:
        raise LlmcError(f"'{head.origin}' has hidden_size {head.layer.hidden_size} and no "
                        f"'{_EMBEDDING}', and the embedding of '{raw.architecture}' has "
                        f"{embedding_size} columns; give a complete draft model")
    layer_ids = head.layer_ids
    if layer_ids is not None and (len(layer_ids) != 3 or not all(
            isinstance(layer, int) and 1 <= layer <= len(states) for layer in layer_ids)):
        refuse("layers", list(layer_ids), f"{len(states)}, expected three from 1 to {len(states)}")
    if layer_ids is None and len(states) < 4:
        refuse("layers", "4 or more", len(states))


def _token_ids(head: _Head, vocab_size: int) -> np.ndarray | None:
    """Token id of each row of the draft model's logits; None if the rows are token ids."""
    rows, offsets = int(head.config.get("draft_vocab_size") or vocab_size), head.tensors.get(_TABLE)
    if offsets is None:
        if rows == vocab_size:
            return None
        raise LlmcError(f"'{head.origin}' has draft_vocab_size {rows} and no tensor '{_TABLE}' "
                        f"with its token ids; give a complete draft model")
    ids: np.ndarray = np.arange(rows) + offsets.load().astype(np.int64) \
        if offsets.shape == (rows,) else np.array([-1])
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise LlmcError(f"tensor '{_TABLE}' {list(offsets.shape)} in '{head.origin}' does not give "
                        f"{rows} token ids below {vocab_size}; give a complete draft model")
    return None if np.array_equal(ids, np.arange(vocab_size)) else ids


class _Layer(torch.nn.Module):
    """The decoder layer; its attention reads two concatenated rows."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = LlamaAttention(config, 0)
        for projection in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj):
            projection.in_features *= 2
            projection.weight = torch.nn.Parameter(
                torch.empty(projection.out_features, projection.in_features))
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor,
                position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        rows = torch.cat([self.input_layernorm(embedded), normed], -1)
        hidden = residual + self.self_attn(rows, position_embeddings=position_embeddings)[0]
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class _Eagle3(torch.nn.Module):
    """The draft model without fc; parameters are named as in speculators' checkpoints."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool, rows: int) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList([_Layer(config, norm_before_residual)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(config.hidden_size, rows, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor,
                position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed_tokens(input_ids)
        hidden_out = self.layers[0](embedded, hidden, self.rotary_emb(embedded, position_ids))
        return self.lm_head(self.norm(hidden_out)), hidden_out


def _bound(head: _Head, table: gs.Constant) -> dict[str, Weight]:
    """Tensors of a draft model, the model's embedding among them where they share it."""
    own = head.tensors.get(_EMBEDDING)
    if own is None or equal(own.cast(np.float32), table._values):
        return {**head.tensors, _EMBEDDING: table._values}
    return {**head.tensors}


def _export(head: _Head, table: gs.Constant) -> gs.Graph:
    """Export the draft model and bind its weights."""
    rows = int(head.config.get("draft_vocab_size") or head.layer.vocab_size)
    bound = _bound(head, table)
    with alone():
        try:
            with init_empty_weights(include_buffers=False), Reproducible():
                model = _Eagle3(head.layer, head.norm_before_residual, rows).eval()
        except Exception as error:  # transformers raises errors of many types
            raise LlmcError(f"transformers rejects the config of '{head.origin}' "
                            f"({reason_of(error)}); correct it") from error
        refuse_unused(head.tensors, {*model.state_dict(), *_UNREAD}, head.origin, "EAGLE-3",
                      "of one Llama layer")
        graph = to_graph(trace_draft(model, head.layer.hidden_size,
                                     head.layer.max_position_embeddings), set())
        attach_weights(graph, model, bound, str(head.origin), {id(table._values): table.name})
    mark_weights(graph, {id(table._values)})
    return graph
