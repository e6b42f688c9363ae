"""Dimensions of a model, and the encoder's entry of the manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import (
    POOLED,
    Dims,
    DraftInfo,
    EncoderInfo,
    PoolingInfo,
    SpeechInfo,
)
from llmc.compiler.frontend.pooling import Normalize
from llmc.compiler.frontend.raw import RawDraft, RawModel
from llmc.compiler.graph.names import HIDDEN_STATE
from llmc.compiler.graph.rewrite import (
    attends,
    attends_causally,
    caches,
    pools,
    state_of,
    values_of,
)
from llmc.compiler.passes.packing import head_weight, token_table
from llmc.errors import LlmcError


def describe_pooled(raw: RawModel, max_seq_len: int) -> tuple[Dims, PoolingInfo]:
    """Return the dimensions of a model whose outputs are pooled, and its task.

    Args:
        raw: the model, with its fused, unpartitioned graph.
        max_seq_len: maximum number of positions of a text.

    Raises:
        LlmcError: it has no attention, or as a classifier another number of columns than labels.
    """
    plan, graph = raw.pooling, raw.graph
    assert plan is not None and graph.outputs[0].name == POOLED
    layers = [node for node in graph.nodes if attends(node) or state_of(node) is not None]
    attention = next((node for node in layers if attends(node)), None)
    if attention is None and not layers:
        raise LlmcError(f"'{raw.architecture}' has neither attention nor a recurrent state; give a "
                        f"transformer model")
    fields = {} if attention is None else attention.attrs
    vocab_size, hidden_size = values_of(token_table(graph)).shape
    pooling = next(filter(pools, graph.nodes), None)
    normalized = any(isinstance(layer, Normalize) for layer in plan.layers[-1:])
    width = int(graph.outputs[0].shape[-1])
    if plan.labels and len(plan.labels) != width:
        raise LlmcError(f"'{raw.architecture}' has {len(plan.labels)} labels in its config's "
                        f"id2label and {width} in its classifier; correct the config")
    dims = Dims(num_layers=len(layers), hidden_size=hidden_size,
                num_heads=fields.get("num_heads", 0), num_kv_heads=fields.get("num_kv_heads", 0),
                head_dim=fields.get("head_dim", 0), vocab_size=vocab_size,
                padded_vocab_size=vocab_size, max_seq_len=max_seq_len)
    return dims, PoolingInfo(
        task=plan.task, kind=pooling.attrs["kind"] if pooling else None, width=width,
        normalized=normalized, labels=plan.labels, activation=plan.activation,
        prompts=dict(plan.prompts), default_prompt=plan.default_prompt,
        pair_template=plan.pair_template)


def describe_model(graph: gs.Graph, architecture: str, vocab_size: int, max_seq_len: int) -> Dims:
    """Return the dimensions of a fused, unpartitioned graph.

    Args:
        graph: the decoder's graph.
        architecture: its name in errors.
        vocab_size: vocabulary size before padding.
        max_seq_len: maximum number of positions of a sequence.

    Raises:
        LlmcError: the graph has neither causal self-attention nor a recurrent state.
    """
    attention = [node for node in graph.nodes if caches(node)]
    states = sum(state_of(node) is not None for node in graph.nodes)
    if not attention and not states:
        raise LlmcError(f"the decoder of '{architecture}' has neither causal self-attention nor a "
                        f"recurrent state; give a causal LM or an encoder-decoder model")
    fields = attention[0].attrs if attention else {}
    attending = sum(map(attends_causally, graph.nodes))
    # A layer of a hybrid has a KV cache, one or two recurrent states, or both.
    layers = sum(re.fullmatch(HIDDEN_STATE.format(r"\d+"), tensor.name) is not None
                 for tensor in graph.tensors().values()) if states else 0
    head = head_weight(graph)
    return Dims(num_layers=max(layers, attending, 1),
                hidden_size=token_table(graph).shape[1], num_heads=fields.get("num_heads", 0),
                num_kv_heads=fields.get("num_kv_heads", 0), head_dim=fields.get("head_dim", 0),
                vocab_size=vocab_size, padded_vocab_size=values_of(head).shape[0],
                max_seq_len=max_seq_len)


def describe_draft(draft: RawDraft, vocab_size: int) -> DraftInfo:
    """Return the manifest's entry of a draft model, from its fused graphs.

    Args:
        draft: the draft model.
        vocab_size: rows of its logits before padding.
    """
    return DraftInfo(
        kind=draft.kind, chain=draft.chain,
        num_layers=sum(attends_causally(node) for graph in draft.graphs for node in graph.nodes),
        vocab_size=vocab_size, padded_vocab_size=values_of(head_weight(draft.graphs[0])).shape[0],
        reduced=draft.token_ids is not None, mask_token_id=draft.mask_token_id,
        num_speculative_tokens=draft.num_speculative_tokens, config_sha256=draft.config_sha256)


def describe_encoder(raw: RawModel, encoder: gs.Graph, vocab_size: int | None, max_seq_len: int,
                     decoder_vocab_size: int) -> EncoderInfo:
    """Return the manifest's entry of an encoder, from its fused graph.

    Args:
        raw: the model.
        encoder: the encoder's graph.
        vocab_size: the encoder's vocabulary size before padding; None: it reads features.
        max_seq_len: maximum number of tokens, or the number of rows, that the encoder reads.
        decoder_vocab_size: the decoder's vocabulary size before padding.

    Raises:
        LlmcError: the model names no decoder start token.
    """
    def ids(key: str) -> tuple[int, ...]:  # generation_config.json only, as in transformers
        return replace(raw, config={}).token_ids(key, decoder_vocab_size)

    start = raw.token_ids("decoder_start_token_id", decoder_vocab_size) or \
        raw.token_ids("bos_token_id", decoder_vocab_size)
    if not start:
        raise LlmcError(f"'{raw.architecture}' has no decoder_start_token_id; add it to "
                        f"generation_config.json")
    return EncoderInfo(
        num_layers=sum(attends(node) for node in encoder.nodes), max_seq_len=max_seq_len,
        vocab_size=vocab_size,
        decoder_start_token_id=start[0],
        forced_bos_token_ids=ids("forced_bos_token_id"),
        forced_eos_token_ids=ids("forced_eos_token_id"),
        bad_words=tuple(tuple(word) for word in raw.generation.get("bad_words_ids") or ()
                        if word and max(word) < decoder_vocab_size),
        features=raw.features,
        speech=None if raw.features is None else _speech(raw.generation, decoder_vocab_size))


def _speech(generation: Mapping[str, Any], vocab_size: int) -> SpeechInfo:
    """Return special tokens of a decoder of speech, those of the vocabulary.

    Raises:
        LlmcError: a multilingual model's tokens of languages are unknown.
    """
    def tokens(key: str) -> dict[str, int]:
        given = generation.get(key) if generation.get("is_multilingual", True) else None
        return {str(name).strip("<|>"): token for name, token in
                (given if isinstance(given, Mapping) else {}).items()
                if type(token) is int and 0 <= token < vocab_size}

    def tokens_of(given: Sequence[Any]) -> tuple[int, ...]:
        return tuple(each for each in given if type(each) is int and 0 <= each < vocab_size)

    def token(key: str) -> int | None:
        return next(iter(tokens_of([generation.get(key)])), None)

    languages, forced = tokens("lang_to_id"), generation.get("forced_decoder_ids") or ()
    if not languages and (generation.get("is_multilingual") or len(forced) > 1):
        raise LlmcError("generation_config.json has no lang_to_id, without which the decoder of a "
                        "multilingual model cannot start; copy the current one from the model's "
                        "repository")
    initial = generation.get("max_initial_timestamp_index")
    return SpeechInfo(
        languages=languages, tasks=tokens("task_to_id"),
        no_timestamps_token_id=token("no_timestamps_token_id"),
        prev_sot_token_id=token("prev_sot_token_id"),
        max_initial_timestamp_index=initial if type(initial) is int and initial >= 0 else None,
        begin_suppress_tokens=tokens_of(generation.get("begin_suppress_tokens") or ()))
