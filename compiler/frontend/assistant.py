"""Assistants (Gemma 4): draft models that attend to the model's keys and values.

    x            pre_projection([embedding of the last token | hidden])
    h            decoder layers on x, whose queries attend to the model's caches
    hidden_out   post_projection(h)
    logits       lm_head(h)

`hidden` is the model's last hidden state, after its final norm. Each layer reads the cache of the
model's last layer of its type that has one. All drafts of a step have the position of the last
token, whose keys and values are not in the caches yet.

The checkpoints' `use_ordered_embeddings` restricts the LM head to the tokens of a few clusters,
which is faster on some devices. Here all tokens are compared, so that a draft is the most likely
token of all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs
import torch
from accelerate import init_empty_weights

from llmc.compiler.frontend.bind import Checkpoint, attach_weights
from llmc.compiler.frontend.checkpoint import open_checkpoint, read_json
from llmc.compiler.frontend.draft import add_hidden, embedding_of, mark_weights
from llmc.compiler.frontend.huggingface import find_directory, read_config
from llmc.compiler.frontend.parts import ATTENTION, CAUSAL_LM, build, text_config
from llmc.compiler.frontend.raw import RawDraft, RawModel, config_digest
from llmc.compiler.frontend.reproducible import Reproducible
from llmc.compiler.frontend.trace import alone, to_graph, trace_draft
from llmc.compiler.graph.rewrite import is_op
from llmc.compiler.graph.sdpa import MODEL_CACHE, SDPA
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

_UNREAD = re.compile(r"masked_embedding\.")  # clusters of tokens, see above


@dataclass(frozen=True)
class _Cache:
    """A KV cache of the model that layers of an assistant read.

    Args:
        layer: number of the model's layer.
        num_kv_heads, head_dim: its sizes.
    """

    layer: int
    num_kv_heads: int
    head_dim: int


def attach_assistant(raw: RawModel, directory: Path, allow_pickle: bool) -> RawModel:
    """Return a model with the assistant in a directory.

    Raises:
        LlmcError: the checkpoint is missing, broken or no assistant, or it is of another model.
    """
    directory = find_directory(directory)
    path = directory / "config.json"
    plain = read_json(path)
    width = plain.get("backbone_hidden_size")
    if not isinstance(width, int) or width < 1:
        raise LlmcError(f"'{path}' has no backbone_hidden_size, so it is not the config of an "
                        f"assistant that reads the model's KV caches, such as that of "
                        f"Gemma4AssistantForCausalLM; give the directory of one")
    config = read_config(directory)
    table, factor = embedding_of(raw.graph)
    caches = _caches(raw)
    _check_model(directory, config, raw, table, caches)
    tensors = open_checkpoint(directory, allow_pickle)
    with alone():
        graph = _export(directory, config, tensors, table, factor, caches)
    add_hidden(raw.graph, raw.architecture)
    return replace(raw, draft=RawDraft((graph,), "assistant", config_digest(plain),
                                       chain="position"))


def _caches(raw: RawModel) -> dict[str, _Cache]:
    """The caches of the model's last layers of each type.

    Raises:
        LlmcError: the types of the layers, or their caches, are unknown.
    """
    types = (raw.config.get("text_config") or raw.config).get("layer_types")
    layers = sorted((node for node in raw.graph.nodes if is_op(node, SDPA)),
                    key=lambda node: int(node.attrs["layer"]))
    if not isinstance(types, list) or len(types) != len(layers):
        raise LlmcError(f"'{raw.architecture}' has {len(layers)} layers with attention and "
                        f"layer_types of {len(types) if isinstance(types, list) else 'no'} layers, "
                        f"by which an assistant finds the KV caches that it reads; give another "
                        f"kind of draft model, or leave out --draft")
    owners: dict[int, int] = {}
    for layer, node in enumerate(layers):
        owners.setdefault(id(node.inputs[1]), layer)
    found = {}
    for kind, node in zip(types, layers, strict=True):
        keys = node.inputs[1]
        found[str(kind)] = _Cache(owners[id(keys)], int(keys.shape[1]), int(keys.shape[3]))
    return found


def _check_model(directory: Path, config: Any, raw: RawModel, table: gs.Constant,
                 caches: Mapping[str, _Cache]) -> None:
    """Check that an assistant is of this model.

    Raises:
        LlmcError: names the sizes that differ.
    """
    text = text_config(config)
    (vocab_size, hidden_size), number = table._values.shape, text.num_hidden_layers
    expected: list[tuple[str, object, object]] = [
        ("vocab_size", text.vocab_size, vocab_size),
        ("hidden_size", config.backbone_hidden_size, hidden_size)]
    for layer, kind in enumerate(text.layer_types):
        own = text.per_layer_config[layer] if text.is_heterogeneous else text
        cache = caches.get(kind)
        expected += [(f"layers of type {kind}", "some", "none")] if cache is None else [
            (f"head_dim of {kind}", own.head_dim, cache.head_dim),
            (f"num_key_value_heads of {kind}", own.num_key_value_heads, cache.num_kv_heads)]
    for what, given, there in expected:
        if given != there:
            raise LlmcError(f"'{directory}' is an assistant of a model with {what} {given}, "
                            f"'{raw.architecture}' has {there}; give one that was trained for it")
    if getattr(text, "num_kv_shared_layers", number) != number:
        raise LlmcError(f"'{directory}' has num_kv_shared_layers {text.num_kv_shared_layers}, "
                        f"expected all of its {number} layers; correct its config")


class _Assistant(torch.nn.Module):
    """An assistant with the model's embedding; parameters are named as in transformers."""

    def __init__(self, assistant: Any, table: tuple[int, ...], factor: float,
                 caches: Mapping[str, _Cache]) -> None:
        super().__init__()
        self.assistant = assistant
        self.embedding = torch.nn.Embedding(*table)
        self._factor, self._caches = factor, caches
        self._windows = {}
        for layer in assistant.model.layers:
            attention = layer.self_attn
            # transformers' mask has as many positions before the last key, and that one.
            self._windows[attention.layer_type] = 1 + (attention.sliding_window or -1)
            attention.sliding_window = None

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor,
                position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embedding(input_ids) * self._factor
        rows = self.assistant.pre_projection(torch.cat([embedded, hidden], -1))
        result = self.assistant.model(
            inputs_embeds=rows, position_ids=position_ids, use_cache=False, logits_to_keep=None,
            attention_mask=dict.fromkeys(self._windows),
            shared_kv_states={kind: tuple(self._cache(kind, index, rows) for index in (0, 1))
                              for kind in self._windows}).last_hidden_state
        return self.assistant.lm_head(result), self.assistant.post_projection(result)

    def _cache(self, kind: str, index: int, rows: torch.Tensor) -> torch.Tensor:
        """A symbolic node for the keys (0) or values (1) of the model's last layer of a type."""
        cache = self._caches[kind]
        result: torch.Tensor = torch.onnx.ops.symbolic(
            f"llmc::{MODEL_CACHE.name}", (), {
                "layer": cache.layer, "index": index, "window": self._windows[kind]},
            dtype=rows.dtype, version=1, shape=(rows.shape[0], cache.num_kv_heads, rows.shape[1],
                                                cache.head_dim))
        return result


class _Tensors:
    """Tensors of an assistant, and the model's embedding."""

    def __init__(self, own: Checkpoint, table: Weight) -> None:
        self._own, self._table = own, table

    def get(self, name: str) -> Weight | None:
        return self._table if name == "embedding.weight" else \
            self._own.get(name.removeprefix("assistant."))


@contextlib.contextmanager
def _all_layers_share(config: Any) -> Iterator[None]:
    """Let a config say that all of its layers read caches, which transformers 5.23 rejects."""
    known = getattr(type(config), "kv_sharing_modes", None)
    if not isinstance(known, property) or known.fget is None:
        yield
        return
    type(config).kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    try:
        yield
    finally:
        type(config).kv_sharing_modes = known


def _export(directory: Path, config: Any, tensors: Mapping[str, Weight], table: gs.Constant,
            factor: float, caches: Mapping[str, _Cache]) -> gs.Graph:
    """Export the assistant and bind its weights."""
    config._attn_implementation, config.dtype = ATTENTION, torch.float32
    text_config(config)._attn_implementation = ATTENTION
    with init_empty_weights(include_buffers=False), Reproducible(), \
            _all_layers_share(text_config(config)):
        assistant: Any = build(config, CAUSAL_LM, trust_remote_code=False)
        absent = next((name for name in ("pre_projection", "post_projection", "lm_head", "model")
                       if not hasattr(assistant, name)), None)
        if absent is not None:
            raise LlmcError(f"'{directory}' is a {type(assistant).__name__} without "
                            f"{absent}, which llmc does not support as an assistant; give another "
                            f"kind of draft model")
        module = _Assistant(assistant, table._values.shape, factor, caches).eval()
    assistant.tie_weights()  # init_empty_weights has untied them
    own = Checkpoint(assistant, tensors)
    known = {spelling for name in assistant.state_dict() for spelling in own.spellings(name)}
    unused = next((name for name in own.names if name not in known and not _UNREAD.match(name)),
                  None)
    if unused is not None:
        raise LlmcError(f"'{directory}' has a tensor '{own.names[unused]}', which its config does "
                        f"not require; give the config that belongs to the weights")
    bound = {f"assistant.{name}" for name in own.spelled & assistant.state_dict().keys()}
    graph = to_graph(trace_draft(module, table._values.shape[1],
                                 text_config(config).max_position_embeddings), bound)
    attach_weights(graph, module, _Tensors(own, table._values), str(directory),
                   {id(table._values): table.name})
    mark_weights(graph, {id(table._values)})
    return graph
