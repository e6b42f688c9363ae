"""The conditions on heads, rotary embedding and bias, and the rewrite of Sdpa."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import (
    BIDIRECTIONAL_RANGES,
    HIDDEN,
    INPUT_FEATURES,
    MEMORY_STEPS,
    ROTARY_POSITIONS,
)
from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    LAYOUT,
    ROTARY,
    cone,
    data_tensors,
    token_feeds,
)
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    graph_input,
    is_op,
    operands,
    producer,
    replace,
    values_of,
    weight,
)
from llmc.compiler.graph.sdpa import MODEL_CACHE, SDPA, WINDOWED
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.attention.bias import Bias, score_bias
from llmc.compiler.passes.attention.gates import join_before_gates
from llmc.compiler.passes.attention.heads import Branch, HeadNorm, Heads, trace
from llmc.compiler.passes.attention.latent import Latent, find_latent, rewrite_latent
from llmc.compiler.passes.attention.projections import gathered, merged_projection, projection
from llmc.compiler.passes.attention.rotary import Rotary
from llmc.plugins.attention.op import AXES
from llmc.plugins.attention.op import OP as CAUSAL_ATTENTION
from llmc.plugins.bidirectional_attention.op import OP as BIDIRECTIONAL_ATTENTION
from llmc.plugins.block_attention.op import OP as BLOCK_ATTENTION
from llmc.plugins.cached_attention.op import OP as CACHED_ATTENTION
from llmc.plugins.group_rms_norm.op import OP as GROUP_RMS_NORM


@dataclass(frozen=True)
class _Attention:
    node: gs.Node
    query: Branch
    key: Branch
    value: Branch
    num_kv_heads: int
    value_dim: int  # of a head's output; the rest of head_dim is padding
    output: gs.Tensor
    bias: Bias | None
    latent: Latent | None = None

    @property
    def branches(self) -> tuple[Branch, ...]:
        return self.query, self.key, self.value


@dataclass(frozen=True)
class _CrossAttention(_Attention):
    """Cross-attention: keys and values come from the encoder."""


@dataclass(frozen=True)
class _ModelAttention(_Attention):
    """Attention of a draft model to the keys and values of a layer of the model."""


def attention(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    join_before_gates(graph)
    data = data_tensors(graph)
    rows = _bounded_rows(graph, data)
    tokens = data_tensors(graph, ("input_ids", INPUT_FEATURES))
    shared: dict[bytes, tuple[gs.Constant, ...]] = {}
    written: dict[tuple[int, int], _Cached] = {}
    biases: dict[int, Bias | NoMatch | None] = {}
    tables: dict[bytes, Bias] = {}  # shared by layers
    in_blocks = any(tensor.name == HIDDEN for tensor in graph.inputs)  # a draft model

    def check(node: gs.Node, settings: Settings) -> _Attention | NoMatch:
        if is_op(producer(node.inputs[1]), MODEL_CACHE):
            return _check_model_cache(graph, node, data, settings, rows)
        cross = not {id(tensor) for tensor in node.inputs[1:3]} & tokens
        match = _check(graph, node, data, settings, biases, cross, rows)
        if isinstance(match, NoMatch):
            return match
        if _cache_of(node) in written and {"sinks", "bias"} & operands(node).keys():
            return NoMatch("a bias or sinks in attention to another layer's KV cache", node)
        if _cache_of(node) in written and node.attrs.get("bidirectional"):
            return NoMatch("bidirectional attention within images to another layer's KV cache",
                           node)
        if _cache_of(node) in written and _has_axes(match):
            return NoMatch("a rotary embedding by several positions of each token in attention to "
                           "another layer's KV cache", node)
        if match.bias is not None:
            table = values_of(match.bias.table).load().tobytes()
            match = dataclasses.replace(match, bias=tables.setdefault(table, match.bias))
        if node.attrs["causal"] and not cross:
            return match
        return _check_block(match) if in_blocks and not cross else _check_bidirectional(match)

    def rewrite(graph: gs.Graph, match: _Attention, settings: Settings) -> None:
        if isinstance(match, _ModelAttention):
            _rewrite_cached(graph, match, shared, _model_caches(graph, match, settings), settings)
        elif match.node.attrs["causal"] and not isinstance(match, _CrossAttention):
            key = _cache_of(match.node)
            if key in written:
                _rewrite_cached(graph, match, shared, written[key], settings)
            elif match.latent is not None:
                latent = match.latent
                attrs, inputs = _common(graph, dataclasses.replace(match, query=latent.query),
                                        shared, (), settings)
                inputs["sinks"] = operands(match.node).get("sinks")
                rewrite_latent(graph, latent, match.output, attrs, inputs,
                               match.node.attrs["layer"], settings)
            else:
                written[key] = _rewrite(graph, match, settings, shared)
        elif in_blocks and not isinstance(match, _CrossAttention):
            _rewrite_block(graph, match, settings, shared)
        else:
            _rewrite_bidirectional(graph, match, shared, settings)

    apply_rules(graph, [Rule("attention", frozenset({SDPA.name}), check, rewrite)], settings,
                report)


def _has_axes(match: _Attention) -> bool:
    """Whether its rotary embedding uses several positions of each token."""
    rotary = match.query.heads.rotary
    return rotary is not None and rotary.axes is not None


def _bounded_rows(graph: gs.Graph, data: set[int]) -> set[int]:
    """Ids of elementwise results [batch, seq, width], such as clipped queries and keys.

    These count as projections: attention ignores how they are computed.
    """
    return {id(node.outputs[0]) for node in graph.nodes
            if node.op in ELEMENTWISE - ROTARY and id(node.outputs[0]) in data
            and len(node.outputs[0].shape or ()) == 3
            and isinstance(node.outputs[0].shape[-1], int)}


def _cache_of(node: gs.Node) -> tuple[int, int]:
    """The keys and values that a node reads; equal for layers that share a cache."""
    return id(node.inputs[1]), id(node.inputs[2])


def _check(graph: gs.Graph, node: gs.Node, data: set[int], settings: Settings,
           biases: dict[int, Bias | NoMatch | None], cross: bool, rows: set[int]) -> \
        _Attention | NoMatch:
    branches = []
    for tensor in node.inputs[:3]:
        branch = trace(tensor, data, settings, rows)
        if isinstance(branch, NoMatch):
            return branch
        branches.append(branch)
    query, key, value = branches
    if value.heads.rotary or (value.heads.gain != 1.0 and (cross or not node.attrs["causal"])):
        return NoMatch("the values are rotated or scaled", node)
    if key.heads.scale is not None or value.heads.scale is not None:
        return NoMatch("the keys or values are scaled by position", node)
    rotaries = query.heads.rotary, key.heads.rotary
    if (rotaries[0] is None) != (rotaries[1] is None) or (
            rotaries[0] and rotaries[1] and not rotaries[0].equals(rotaries[1])):
        return NoMatch("queries and keys are rotated differently", node)
    if len({branch.norm.epsilon for branch in branches if branch.norm is not None}) > 1:
        return NoMatch("the norms of queries, keys and values have different epsilons", node)
    if query.norm is not None and key.norm is not None \
            and query.norm.after_rotary != key.norm.after_rotary:
        return NoMatch("only one of queries and keys is normalized after the rotary embedding",
                       node)
    by_axis = rotaries[0] is not None and rotaries[0].axes is not None
    if by_axis and (cross or not node.attrs["causal"]):
        return NoMatch("a rotary embedding by several positions of each token in attention that "
                       "is not causal", node)
    if query.heads.order != key.heads.order:
        return NoMatch("different elements of queries and keys are rotated", node)
    num_heads, head_dim = len(query.heads.columns), key.heads.columns.shape[1]
    value_dim = value.heads.columns.shape[1]
    if value_dim < head_dim and value.norm is None and not cross and node.attrs["causal"]:
        value = dataclasses.replace(value, heads=_padded(value.heads, head_dim))
    if query.heads.columns.shape[1] != head_dim or key.heads.columns.shape != \
            value.heads.columns.shape:
        return NoMatch("queries, keys and values differ in head_dim or heads", node)
    repeated = len(key.heads.columns)
    num_kv_heads = len(key.heads.distinct)
    if num_kv_heads != len(value.heads.distinct) or num_heads % num_kv_heads:
        return NoMatch("the key and value heads cannot be grouped", node)
    for branch in (key, value):
        if not np.array_equal(branch.heads.columns, np.repeat(
                branch.heads.distinct, repeated // num_kv_heads, axis=0)):
            return NoMatch("the key and value heads are not repeated in groups", node)
    output = _output(graph, node, num_heads, value_dim, data)
    if isinstance(output, NoMatch):
        return output
    bias: Bias | NoMatch | None = None
    given = operands(node)
    if "sinks" in given and weight(given["sinks"]) is None:
        return NoMatch("the sinks are not a weight", given["sinks"])
    if "bias" in given:
        tensor = given["bias"]
        if id(tensor) not in biases:
            biases[id(tensor)] = score_bias(tensor, num_heads, data, settings,
                                            bool(node.attrs["causal"]), cross)
        bias = biases[id(tensor)]
    if isinstance(bias, NoMatch):
        return bias
    if cross:
        return _CrossAttention(node, query, key, value, num_kv_heads, value_dim, output, bias)
    # Other readers of the same keys would miss them in a latent cache.
    plain = node.attrs["causal"] and query.heads.scale is None and not by_axis \
        and not any(node.attrs.get(field) for field in ("window", "chunk", "softcap",
                                                        "bidirectional")) \
        and not given.keys() - {"query", "key", "value", "sinks"} \
        and len(consumers(graph, node.inputs[1])) == 1
    return _Attention(node, query, key, value, num_kv_heads, value_dim, output, bias,
                      find_latent(query, key, value, value_dim) if plain else None)


def _check_model_cache(graph: gs.Graph, node: gs.Node, data: set[int], settings: Settings,
                       rows: set[int]) -> _ModelAttention | NoMatch:
    """Match attention to a cache of the model: only its queries are computed here."""
    query = trace(node.inputs[0], data, settings, rows)
    if isinstance(query, NoMatch):
        return query
    kv_heads, dim = int(node.inputs[1].shape[1]), int(node.inputs[1].shape[3])
    num_heads, head_dim = query.heads.columns.shape
    if head_dim != dim or num_heads % kv_heads:
        return NoMatch(f"{num_heads} query heads of {head_dim} elements do not fit {kv_heads} key "
                       f"heads of {dim} in the model's cache", node)
    if operands(node).keys() - {"query", "key", "value"}:
        return NoMatch("a bias or sinks in attention to the model's KV cache", node)
    output = _output(graph, node, num_heads, dim, data)
    if isinstance(output, NoMatch):
        return output
    stored = Branch((), Heads(np.arange(kv_heads * dim).reshape(kv_heads, dim), 1.0, None), None)
    return _ModelAttention(node, query, stored, stored, kv_heads, dim, output, None)


def _model_caches(graph: gs.Graph, match: _ModelAttention, settings: Settings) -> _Cached:
    """The model's caches as inputs of the draft model's graph."""
    source = producer(match.node.inputs[1])
    assert source is not None
    match.node.attrs["window"] = source.attrs["window"]
    shape = ("batch", match.num_kv_heads, settings.max_seq_len, match.value_dim)
    found = []
    for kind in ("key", "value"):
        name = f"{kind}_cache_{source.attrs['layer']}_out"
        there = next((tensor for tensor in graph.inputs if tensor.name == name), None)
        found.append(there or gs.Variable(name, np.float32, shape))
        graph.inputs.extend([found[-1]] if there is None else [])
    return _Cached(*found)


def _padded(heads: Heads, dim: int) -> Heads:
    """Heads padded to `dim` elements with columns whose results are not read."""
    more = np.repeat(heads.columns[:, :1], dim - heads.columns.shape[1], axis=1)
    return dataclasses.replace(heads, columns=np.concatenate([heads.columns, more], axis=1))


def _check_bidirectional(match: _Attention) -> _Attention | NoMatch:
    """Refuse features that llmc::BidirectionalAttention lacks."""
    attrs = match.node.attrs
    cross = isinstance(match, _CrossAttention)
    for what, there in (("a rotary embedding", cross and match.query.heads.rotary is not None),
                        ("normalized values", match.value.norm is not None),
                        ("queries scaled by position", match.query.heads.scale is not None),
                        ("sinks", "sinks" in operands(match.node)), ("chunks", attrs["chunk"]),
                        ("a sliding window", cross and attrs["window"]),
                        ("a soft-cap", cross and attrs["softcap"])):
        if there:
            return NoMatch(f"attention in or to an encoder with {what}: unsupported by "
                           f"llmc::BidirectionalAttention", match.node)
    return match


def _check_block(match: _Attention) -> _Attention | NoMatch:
    """Refuse features that llmc::BlockAttention lacks."""
    attrs = match.node.attrs
    for what, there in (("norms of its values", match.value.norm is not None),
                        ("queries scaled by position", match.query.heads.scale is not None),
                        ("sinks", "sinks" in operands(match.node)), ("chunks", attrs["chunk"]),
                        ("a soft-cap", attrs["softcap"]), ("a bias", match.bias is not None)):
        if there:
            return NoMatch(f"attention in blocks with {what}: unsupported by "
                           f"llmc::BlockAttention", match.node)
    return match


def _output(graph: gs.Graph, node: gs.Node, num_heads: int, head_dim: int, data: set[int]) -> \
        gs.Tensor | NoMatch:
    """The `[batch, seq, num_heads * head_dim]` tensor after Sdpa, past layout nodes."""
    result = node.outputs[0]
    while True:
        users = consumers(graph, result)
        if len(users) != 1 or users[0] is None or users[0].op not in LAYOUT:
            break
        result = users[0].outputs[0]
    if result is node.outputs[0]:
        return NoMatch("the heads are not joined after attention", node)
    piece = cone(result, data, LAYOUT)
    if isinstance(piece, NoMatch):
        return piece
    seq = 3
    numbers = np.arange(num_heads * seq * head_dim, dtype=np.float32)
    x = numbers.reshape(1, num_heads, seq, head_dim)
    joined = piece.run({**token_feeds(1, seq), node.outputs[0].name: x})
    if not np.array_equal(joined.reshape(-1), x.transpose(0, 2, 1, 3).reshape(-1)) \
            or joined.shape[-1] != num_heads * head_dim:
        return NoMatch("the heads are not joined in order after attention", result)
    return result


@dataclass(frozen=True)
class _Cached:
    """The caches that a layer writes."""

    key: gs.Variable
    value: gs.Variable


def _rewrite(graph: gs.Graph, match: _Attention, settings: Settings,
             shared: dict[bytes, tuple[gs.Constant, ...]]) -> _Cached:
    attrs, inputs = _common(graph, match, shared, ("v_norm", "q_norm", "k_norm"), settings)
    caches, updated = _caches(graph, match, settings)
    inputs |= {**_bias(match), **caches, "sinks": operands(match.node).get("sinks"),
               "qkv": merged_projection(graph, match.branches, match.output)}
    if kind := match.node.attrs.get("bidirectional"):
        attrs["windowed_ranges"] = int(kind == WINDOWED)
        inputs[BIDIRECTIONAL_RANGES] = graph_input(
            graph, BIDIRECTIONAL_RANGES, (*_tokens_of(match.output.shape), 2))
    replace(graph, CAUSAL_ATTENTION, inputs, [_whole_heads(graph, match), *updated], attrs)
    return _Cached(*updated)


def _rewrite_block(graph: gs.Graph, match: _Attention, settings: Settings,
                   shared: dict[bytes, tuple[gs.Constant, ...]]) -> None:
    attrs, inputs = _common(graph, match, shared, ("q_norm", "k_norm"), settings)
    caches, updated = _caches(graph, match, settings)
    inputs |= {**caches, "qkv": merged_projection(graph, match.branches, match.output)}
    replace(graph, BLOCK_ATTENTION, inputs, [_whole_heads(graph, match), *updated],
            {name: value for name, value in attrs.items() if name in BLOCK_ATTENTION.fields})


def _caches(graph: gs.Graph, match: _Attention, settings: Settings) -> \
        tuple[dict[str, gs.Variable], list[gs.Variable]]:
    """A layer's caches by the names of inputs, and updated; both are added to the graph."""
    shape = ("batch", match.num_kv_heads, settings.max_seq_len, match.query.heads.columns.shape[1])
    caches = {f"{kind}_cache": gs.Variable(f"{kind}_cache_{match.node.attrs['layer']}", np.float32,
                                           shape) for kind in ("key", "value")}
    updated = [gs.Variable(f"{cache.name}_out", np.float32, shape) for cache in caches.values()]
    graph.inputs.extend(caches.values())
    graph.outputs.extend(updated)
    return caches, updated


def _whole_heads(graph: gs.Graph, match: _Attention) -> gs.Tensor:
    """Attention's output with padded heads.

    match.output becomes its unpadded part times the gain.
    """
    (num_heads, dim), gain = match.query.heads.columns.shape, match.value.heads.gain
    output, name = match.output, match.output.name
    batch_and_seq = output.shape[:-1] if output.shape else None
    if gain != 1.0:
        plain = gs.Variable(f"{name}.plain", np.float32, output.shape)
        factor = gs.Constant(f"{name}.factor", np.array(gain, np.float32))
        output.inputs.clear()
        graph.nodes.append(gs.Node(op="Mul", name=f"{name}.scaled", inputs=[plain, factor],
                                   outputs=[output]))
        output = plain
    if match.value_dim == dim:
        return output
    whole = gs.Variable(f"{name}.heads", np.float32,
                        None if batch_and_seq is None else [*batch_and_seq, num_heads * dim])
    columns = np.arange(num_heads * dim).reshape(num_heads, dim)[:, :match.value_dim]
    gathered(graph, whole, columns.reshape(-1), output)
    return whole


def _rewrite_cached(graph: gs.Graph, match: _Attention,
                    shared: dict[bytes, tuple[gs.Constant, ...]], cached: _Cached,
                    settings: Settings) -> None:
    attrs, inputs = _common(graph, match, shared, ("q_norm",), settings)
    inputs |= {"key_cache": cached.key, "value_cache": cached.value,
               "query": projection(graph, match.query, match.query.heads.columns, match.output)}
    replace(graph, CACHED_ATTENTION, inputs, [_whole_heads(graph, match)], attrs)


def _common(graph: gs.Graph, match: _Attention,
            shared: dict[bytes, tuple[gs.Constant, ...]], norms: Sequence[str],
            settings: Settings) -> tuple[dict[str, Any], dict[str, gs.Tensor | None]]:
    """Attributes and inputs common to the causal attention ops, with these norms."""
    sdpa, heads = match.node, match.query.heads
    attrs = dict(num_heads=len(heads.columns), num_kv_heads=match.num_kv_heads,
                 head_dim=heads.columns.shape[1],
                 scale=sdpa.attrs["scale"] * heads.gain * match.key.heads.gain,
                 softcap=sdpa.attrs["softcap"], window=sdpa.attrs["window"],
                 chunk=sdpa.attrs["chunk"] if sdpa.attrs["chunk"] < settings.max_seq_len else 0)
    inputs: dict[str, gs.Tensor | None] = {
        "cu_seqlens": graph_input(graph, "cu_seqlens", ("batch_plus_1",)),
        "past_lens": graph_input(graph, "past_lens", ("batch",))}
    _add_rotary(heads.rotary, shared, attrs, inputs)
    if heads.rotary is not None and heads.rotary.axes is not None:
        _add_axes(graph, match.output.shape, heads.rotary.axes, shared, inputs)
    if heads.scale is not None:
        key = heads.scale.tobytes()
        if key not in shared:
            shared[key] = gs.Constant(f"query_scale.{len(shared)}", Weight.of(heads.scale)),
        inputs["query_scale"], = shared[key]
    _add_norms(match, norms, attrs, inputs)
    return attrs, inputs


def _add_rotary(rotary: Rotary | None, shared: dict[bytes, tuple[gs.Constant, ...]],
                attrs: dict[str, Any], inputs: dict[str, gs.Tensor | None]) -> None:
    """Add a rotary embedding's attributes and tables, which layers share."""
    if rotary is None:
        return
    attrs.update(rotary_dim=rotary.dim, interleaved=int(rotary.interleaved))
    key = rotary.cos.tobytes() + rotary.sin.tobytes()
    if key not in shared:
        suffix = f".{len(shared)}" if shared else ""
        shared[key] = (gs.Constant(f"rotary.cos{suffix}", Weight.of(rotary.cos)),
                       gs.Constant(f"rotary.sin{suffix}", Weight.of(rotary.sin)))
    inputs["cos"], inputs["sin"] = shared[key]


def _add_axes(graph: gs.Graph, shape: Sequence[str | int] | None, axes: tuple[int, ...],
              shared: dict[bytes, tuple[gs.Constant, ...]],
              inputs: dict[str, gs.Tensor | None]) -> None:
    """Add the positions by axis, and the axis of each pair, which layers share.

    `shape` is that of attention's output.
    """
    inputs["rotary_positions"] = graph_input(graph, ROTARY_POSITIONS, (*_tokens_of(shape), AXES))
    values = np.array(axes, np.int32)
    key = b"axes" + values.tobytes()
    if key not in shared:
        suffix = f".{len(shared)}" if any(key.startswith(b"axes") for key in shared) else ""
        shared[key] = gs.Constant(f"rotary.axes{suffix}", Weight.of(values)),
    inputs["rotary_axes"], = shared[key]


def _tokens_of(shape: Sequence[str | int] | None) -> Sequence[str | int]:
    """The axes of tokens of a result of this shape."""
    return ("batch", "seq") if shape is None else shape[:-1]


def _add_norms(match: _Attention, names: Sequence[str], attrs: dict[str, Any],
               inputs: dict[str, gs.Tensor | None]) -> None:
    """Add the norms of heads of these names."""
    branches = {"q_norm": match.query, "k_norm": match.key, "v_norm": match.value}
    for name in names:
        norm = branches[name].norm
        if norm is not None:
            attrs.update(norm_epsilon=norm.epsilon, norm_after_rotary=int(norm.after_rotary))
            inputs[name] = norm.gain


def _rewrite_bidirectional(graph: gs.Graph, match: _Attention,
                           shared: dict[bytes, tuple[gs.Constant, ...]],
                           settings: Settings) -> None:
    query, key, value = match.query, match.key, match.value
    attrs: dict[str, Any] = {name: match.node.attrs[name] for name in ("softcap", "window")
                             if match.node.attrs[name]}
    inputs: dict[str, gs.Tensor | None] = _bias(match)
    if isinstance(match, _CrossAttention):
        inputs |= {"key_starts": graph_input(graph, "memory_starts", ("batch",)),
                   "key_lens": graph_input(graph, "encoder_sequence_length", ("batch",))}
        if settings.target.key_steps:
            inputs["key_steps"] = graph_input(graph, MEMORY_STEPS, ("batch",))
    inputs |= {"query": projection(graph, query, query.heads.columns, match.output),
               "key": projection(graph, key, key.heads.distinct, match.output),
               "value": projection(graph, value, value.heads.distinct, match.output),
               "cu_seqlens": graph_input(graph, "cu_seqlens", ("batch_plus_1",))}
    _add_rotary(query.heads.rotary, shared, attrs, inputs)
    if isinstance(match, _CrossAttention):  # the encoder's results are normalized keys
        for name, norm in (("query", query.norm), ("key", key.norm)):
            if norm is not None:
                inputs[name] = _normed(graph, inputs[name], norm, f"{match.output.name}.{name}")
    else:
        _add_norms(match, ("q_norm", "k_norm"), attrs, inputs)
    replace(graph, BIDIRECTIONAL_ATTENTION, inputs, [match.output],
            dict(attrs, num_heads=len(query.heads.columns), num_kv_heads=match.num_kv_heads,
                 head_dim=query.heads.columns.shape[1],
                 scale=match.node.attrs["scale"] * query.heads.gain * key.heads.gain))


def _normed(graph: gs.Graph, x: gs.Tensor | None, norm: HeadNorm, name: str) -> gs.Variable:
    """`x` with each head normalized, as a tensor of this name."""
    assert x is not None
    gain = values_of(norm.gain)
    width, total = gain.shape[0], int(x.shape[-1])
    weight = gs.Constant(f"{name}.gain",
                         gain.take_rows(np.tile(np.arange(width), total // width)))
    normed = gs.Variable(f"{name}.normed", np.float32, x.shape)
    replace(graph, GROUP_RMS_NORM, {"x": x, "weight": weight}, [normed],
            {"groups": total // width, "epsilon": norm.epsilon})
    return normed


def _bias(match: _Attention) -> dict[str, gs.Tensor | None]:
    return {} if match.bias is None else {match.bias.name: match.bias.table}
