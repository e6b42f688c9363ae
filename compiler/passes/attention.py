"""Give attention its projections' merged output, its rotary embedding and its per-head norms.

Given:   q = GemmBiasAct(x, Wq) → Reshape → (RMSNorm) → Transpose → rotary
         k = GemmBiasAct(x, Wk) → Reshape → (RMSNorm) → Transpose → rotary
         v = GemmBiasAct(x, Wv) → Reshape → Transpose
         Sdpa(q, k, v) → Transpose → Reshape
Result:  CausalAttention(GemmBiasAct(x, [Wq; Wk; Wv]), key_cache, value_cache, cu_seqlens,
         past_lens, cos, sin, q_norm, k_norm), and the graph takes and returns the KV cache;
         with cache_indirection where beams are to share it

Given:   Sdpa of an encoder, or of a decoder with keys and values made from the encoder's output
Result:  BidirectionalAttention(q, k, v, cu_seqlens); the decoder's also takes memory_starts and
         encoder_sequence_length, which say where in k and v a sequence's are

A bias of the scores must depend on the distance of key and query alone: it becomes a table.

What lies between a projection and Sdpa is run, not compared with a drawing. Running it on ones and
on column numbers tells which column of the projection each element of each head comes from, so
fused, interleaved and repeated layouts all become a choice of rows of the weight. Running it on
unit vectors gives the rotation at a position; its pattern of zeros tells the rotary layout, and cos
and sin are read from it for every position, whatever scaling the model's rope uses. Random inputs
then prove the whole.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import (
    LAYOUT,
    ROTARY,
    Piece,
    close,
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
    constant,
    consumers,
    is_llmc,
    merge_constants,
    producer,
    replace,
    weight,
)
from llmc.compiler.graph.weights import Weight

_CHUNK = 512
_BIAS_LENGTH = 512  # at which a bias is evaluated


@dataclass(frozen=True)
class Rotary:
    """A rotation of the first `dim` elements of each head.

    `cos` and `sin` are `[max_seq_len, dim / 2]` float32; `interleaved` pairs elements 2i and 2i + 1
    instead of i and i + dim / 2.
    """

    dim: int
    interleaved: bool
    cos: np.ndarray
    sin: np.ndarray

    def equals(self, other: Rotary) -> bool:
        return (self.dim, self.interleaved) == (other.dim, other.interleaved) \
            and close(self.cos, other.cos, 1e-6) and close(self.sin, other.sin, 1e-6)


@dataclass(frozen=True)
class Heads:
    """What lies between a projection and one input of Sdpa.

    `columns [heads, head_dim]` are the projection's columns; `gain` a constant factor.
    """

    columns: np.ndarray
    gain: float
    rotary: Rotary | None


@dataclass(frozen=True)
class _Branch:
    projected: gs.Tensor
    heads: Heads
    norm: gs.Node | None


@dataclass(frozen=True)
class _Attention:
    node: gs.Node
    query: _Branch
    key: _Branch
    value: _Branch
    num_kv_heads: int
    output: gs.Tensor
    bias: gs.Constant | None


@dataclass(frozen=True)
class _CrossAttention(_Attention):
    """Keys and values come from the encoder."""


def attention(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    tokens = data_tensors(graph, ("input_ids",))
    shared: dict[bytes, tuple[gs.Constant, gs.Constant]] = {}
    biases: dict[int, gs.Constant | NoMatch | None] = {}

    def check(node: gs.Node, settings: Settings) -> _Attention | NoMatch:
        cross = not {id(tensor) for tensor in node.inputs[1:3]} & tokens
        match = _check(graph, node, data, settings, biases, cross)
        plain = isinstance(match, NoMatch) or (node.attrs["causal"] and not cross)
        return match if plain else _check_bidirectional(match)

    def rewrite(graph: gs.Graph, match: _Attention, settings: Settings) -> None:
        if match.node.attrs["causal"] and not isinstance(match, _CrossAttention):
            _rewrite(graph, match, settings, shared)
        else:
            _rewrite_bidirectional(graph, match)

    apply_rules(graph, [Rule("attention", frozenset({"Sdpa"}), check, rewrite)], settings, report)


def _check(graph: gs.Graph, node: gs.Node, data: set[int], settings: Settings,
           biases: dict[int, gs.Constant | NoMatch | None], cross: bool) -> _Attention | NoMatch:
    branches = []
    for tensor in node.inputs[:3]:
        branch = _trace(tensor, data, settings)
        if isinstance(branch, NoMatch):
            return branch
        branches.append(branch)
    query, key, value = branches
    if value.heads.rotary or value.norm or value.heads.gain != 1.0:
        return NoMatch("the values are rotated, scaled or normalised", node)
    rotaries = query.heads.rotary, key.heads.rotary
    if (rotaries[0] is None) != (rotaries[1] is None) or (
            rotaries[0] and rotaries[1] and not rotaries[0].equals(rotaries[1])):
        return NoMatch("queries and keys are rotated differently", node)
    if query.norm is not None and key.norm is not None and \
            query.norm.attrs["epsilon"] != key.norm.attrs["epsilon"]:
        return NoMatch("the norms of queries and keys have different epsilons", node)
    if query.heads.columns.shape[1] != key.heads.columns.shape[1] or \
            key.heads.columns.shape != value.heads.columns.shape:
        return NoMatch("queries, keys and values differ in head_dim or heads", node)
    num_heads, repeated = len(query.heads.columns), len(key.heads.columns)
    kv_heads = [_unique(branch.heads.columns) for branch in (key, value)]
    if len(kv_heads[0]) != len(kv_heads[1]) or num_heads % len(kv_heads[0]):
        return NoMatch("the key and value heads cannot be grouped", node)
    num_kv_heads = len(kv_heads[0])
    for branch, unique in zip((key, value), kv_heads, strict=True):
        if not np.array_equal(branch.heads.columns,
                              np.repeat(unique, repeated // num_kv_heads, axis=0)):
            return NoMatch("the key and value heads are not repeated in groups", node)
    output = _output(graph, node, num_heads, key.heads.columns.shape[1], data)
    if isinstance(output, NoMatch):
        return output
    bias = None
    if len(node.inputs) > 3:
        tensor = node.inputs[3]
        if id(tensor) not in biases:
            biases[id(tensor)] = _distance_bias(tensor, num_heads, data, settings,
                                                bool(node.attrs["causal"]), cross)
        bias = biases[id(tensor)]
        if isinstance(bias, NoMatch):
            return bias
    return (_CrossAttention if cross else _Attention)(node, query, key, value, num_kv_heads, output,
                                                      bias)


def _check_bidirectional(match: _Attention) -> _Attention | NoMatch:
    """Refuse what llmc::BidirectionalAttention does not have."""
    attrs = match.node.attrs
    for what, there in (("a rotary embedding", match.query.heads.rotary is not None),
                        ("norms of its heads", match.query.norm or match.key.norm),
                        ("a sliding window", attrs["window"]), ("a soft-cap", attrs["softcap"])):
        if there:
            return NoMatch(f"attention in or to an encoder with {what}, which "
                           f"llmc::BidirectionalAttention does not have", match.node)
    return match


def _distance_bias(tensor: gs.Tensor, num_heads: int, data: set[int], settings: Settings,
                   causal: bool, cross: bool) -> gs.Constant | NoMatch | None:
    """What is added to the scores as a table by distance, see the attention ops; None for zeros.

    It is evaluated at one length. Beyond, it must have stopped changing by half of that.
    """
    piece = cone(tensor, data, frozenset()) if id(tensor) not in data else \
        NoMatch("the bias of the scores depends on the tokens", tensor)
    if isinstance(piece, NoMatch):
        return piece
    length = min(_BIAS_LENGTH, settings.max_seq_len)
    weights = {t.name: weight(t).load() for t in piece.inputs if isinstance(t, gs.Constant)}
    try:
        bias = piece.run({**token_feeds(1, length), **weights})
    except RuntimeError as error:
        return NoMatch(f"the bias of the scores cannot be evaluated ({str(error)[:120]})", tensor)
    if not bias.any():
        return None
    if cross or bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[1] not in (1, num_heads) \
            or bias.shape[2:] != (length, length):
        return NoMatch(f"the bias of the scores has shape {list(bias.shape)}, not [1, {num_heads}, "
                       f"{length}, {length}] of self-attention", tensor)
    last = length - 1
    ahead = bias[0, :, 0, 1:] if not causal else bias[0, :, 0, :0]  # of keys after the query
    table = np.concatenate([bias[0, :, last], ahead], axis=1)  # by key - query, from -last on
    distance = np.arange(length) - np.arange(length)[:, None]
    seen = distance <= 0 if causal else np.full(distance.shape, True)
    if not np.array_equal(bias[0, :, seen], table[:, last + distance[seen]].T):
        return NoMatch("the bias of the scores is not one by the distance of key and query", tensor)
    reach = max((d for d in range(1, length) for edge, sign in ((0, -1), (-1, 1))
                 if (sign < 0 or not causal)
                 and (table[:, last + sign * (d - 1)] != table[:, edge]).any()), default=0)
    if settings.max_seq_len > length and reach > length // 2:
        return NoMatch(f"the bias of the scores still changes at distance {reach}; compile with "
                       f"--{'' if causal else 'mem_'}max_seq_len of at most {length}", tensor)
    table = np.broadcast_to(table, (num_heads, table.shape[1]))
    table = table[:, last - reach:last + 1][:, ::-1] if causal \
        else table[:, last - reach:last + reach + 1]
    return gs.Constant(f"distance_bias.{tensor.name}", Weight.of(np.ascontiguousarray(table)))


def _unique(columns: np.ndarray) -> np.ndarray:
    _, first = np.unique(columns[:, 0], return_index=True)
    return columns[np.sort(first)]


def _per_head_norm(node: gs.Node) -> bool:
    shape = node.inputs[0].shape
    return is_llmc(node, "RMSNorm") and shape is not None and len(shape) == 4


def _trace(tensor: gs.Tensor, data: set[int], settings: Settings) -> _Branch | NoMatch:
    """From one input of Sdpa up to the projection that it comes from."""
    piece = cone(tensor, data, ROTARY, _per_head_norm)
    if isinstance(piece, NoMatch):
        return piece
    sources = [t for t in piece.inputs if id(t) in data and producer(t) is not None]
    norms = [node for node in piece.nodes if is_llmc(node)]
    if len(sources) != 1 or len(norms) > 1:
        return NoMatch(f"it comes from {len(sources)} projections through {len(norms)} norms",
                       tensor)
    width = sources[0].shape[-1] if sources[0].shape else None
    if not isinstance(width, int):
        return NoMatch("the projection's width is not known", sources[0])
    linear = Piece(piece.nodes, tuple(t for t in piece.inputs if not isinstance(t, gs.Constant)),
                   piece.outputs).without(norms)
    heads = _identify(_Linear(linear, sources[0].name, width), settings.max_seq_len)
    if isinstance(heads, NoMatch):
        return NoMatch(heads.reason, tensor)
    norm = norms[0] if norms else None
    if norm is not None:
        dim = heads.columns.shape[1]
        if weight(norm.inputs[1]).shape != (dim,) or norm.inputs[0].shape[-1] != dim:
            return NoMatch("the norm is not over one head", norm)
        if not _norm_is_inside(piece, sources[0], width, norm, heads):
            return NoMatch("it is not a per-head norm followed by a rotary embedding", norm)
    return _Branch(sources[0], heads, norm)


def _norm_is_inside(piece: Piece, source: gs.Tensor, width: int, norm: gs.Node, heads: Heads) -> \
        bool:
    """Whether the piece, norm and all, is: choose columns, norm each head, rotate and scale."""
    rng = np.random.default_rng(1)
    seq, dim = 4, heads.columns.shape[1]
    x = rng.standard_normal((1, seq, width)).astype(np.float32)
    gain = constant(norm.inputs[1])
    if gain is None:
        gain = rng.standard_normal((dim,)).astype(np.float32)
    actual = piece.run({**token_feeds(1, seq), source.name: x, norm.inputs[1].name: gain})
    chosen = x[..., heads.columns].astype(np.float64)  # [batch, seq, heads, head_dim]
    scale = np.sqrt((chosen**2).mean(-1, keepdims=True) + norm.attrs["epsilon"])
    plain = Heads(np.arange(heads.columns.size).reshape(heads.columns.shape), heads.gain,
                  heads.rotary)
    return close(actual, _apply(plain, (chosen / scale * gain).reshape(1, seq, -1),
                                np.arange(seq)), 1e-4)


@dataclass(frozen=True)
class _Linear:
    """A piece that is linear in its one data input `[batch, seq, width]`. Equal when it computes
    the same function, so that what was found out for one layer serves all."""

    piece: Piece
    source: str
    width: int

    def __hash__(self) -> int:
        return hash(self.piece.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Linear) and (self.piece.key, self.width) == \
            (other.piece.key, other.width)

    @property
    def takes_positions(self) -> bool:
        return any(tensor.name == "position_ids" for tensor in self.piece.inputs)

    def __call__(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`[batch, heads, seq, head_dim]` for x `[batch, seq, width]`, positions `[seq]`."""
        return self.piece.run({**token_feeds(*x.shape[:2], positions),
                               self.source: x.astype(np.float32)})


@lru_cache(maxsize=256)
def _identify(linear: _Linear, max_seq_len: int) -> Heads | NoMatch:
    """Find out which columns, gain and rotary embedding a piece is, by running it."""
    rng = np.random.default_rng(0)
    # Without a position input positions are 0, 1, …: far ones need a long sequence.
    last = max_seq_len - 1
    sample = np.array([0, 1, last // 2, last]) if linear.takes_positions \
        else np.arange(min(max_seq_len, 64))
    try:
        at_zero = linear(np.ones((1, len(sample), linear.width)), sample)[0, :, 0]
        numbers = np.broadcast_to(np.arange(1, linear.width + 1), (1, len(sample), linear.width))
        columns = linear(numbers, sample)[0, :, 0] / np.where(at_zero, at_zero, np.nan) - 1
    except RuntimeError as error:
        return NoMatch(f"it cannot be evaluated ({str(error)[:160]})")
    if columns.ndim != 2 or not np.isfinite(columns).all() or \
            np.abs(columns - np.rint(columns)).max() > 0.05:
        return NoMatch("it is not a choice of the projection's columns at position 0")
    columns = np.rint(columns).astype(np.int64)
    gain = float(at_zero[0, -1])
    head_dim = columns.shape[1]
    basis = np.zeros((head_dim, len(sample), linear.width), np.float32)
    basis[np.arange(head_dim), :, columns[0]] = 1.0
    rotation = linear(basis, sample)[:, 0].transpose(1, 2, 0) / gain  # [position, out, in]
    rotary: Rotary | NoMatch | None = None
    if not close(rotation, np.broadcast_to(np.eye(head_dim), rotation.shape), 1e-6):
        layout = _layout(rotation)
        if layout is None:
            return NoMatch("it is neither the identity nor a rotary embedding")
        rotary = _table(linear, columns[0], gain, *layout, max_seq_len)
        if isinstance(rotary, NoMatch):
            return rotary
    heads = Heads(columns, 1.0 if abs(gain - 1.0) < 1e-6 else gain, rotary)
    x = rng.standard_normal((2, len(sample), linear.width)).astype(np.float32)
    if not close(linear(x, sample), _apply(heads, x, sample), 1e-4):
        return NoMatch("it is not the same rotary embedding for every head")
    return heads


def _layout(rotation: np.ndarray) -> tuple[int, bool] | None:
    """`(rotary dim, interleaved)` from rotation matrices `[position, out, in]`."""
    head_dim = rotation.shape[-1]
    for dim in range(2, head_dim + 1, 2):
        for interleaved in (False, True):
            first = np.arange(0, dim, 2) if interleaved else np.arange(dim // 2)
            second = first + (1 if interleaved else dim // 2)
            expected = np.zeros_like(rotation)
            rest = np.arange(dim, head_dim)
            expected[:, rest, rest] = 1.0
            cos, sin = rotation[:, first, first], rotation[:, second, first]
            expected[:, first, first] = expected[:, second, second] = cos
            expected[:, second, first], expected[:, first, second] = sin, -sin
            if close(rotation, expected, 1e-5):
                return dim, interleaved
    return None


def _table(linear: _Linear, columns: np.ndarray, gain: float, dim: int, interleaved: bool,
           max_seq_len: int) -> Rotary | NoMatch:
    """cos and sin at every position, read from the rotation of the first of each pair."""
    first = np.arange(0, dim, 2) if interleaved else np.arange(dim // 2)
    second = first + (1 if interleaved else dim // 2)

    def evaluate(positions: np.ndarray) -> np.ndarray:
        x = np.zeros((1, len(positions), linear.width), np.float32)
        x[..., columns[first]] = 1.0
        return linear(x, positions)[0, 0] / gain

    size = _CHUNK if linear.takes_positions else max_seq_len
    chunks = [evaluate(np.arange(start, min(start + size, max_seq_len)))
              for start in range(0, max_seq_len, size)]
    table = np.concatenate(chunks)
    if linear.takes_positions and max_seq_len > 2:
        alone = evaluate(np.arange(2))

        def changes(length: int) -> bool:
            return not close(evaluate(np.array([0, 1, length - 1]))[:2], alone, 1e-6)

        if changes(max_seq_len):
            limit = bisect_left(range(max_seq_len), True, lo=3, key=changes) - 1
            return NoMatch(f"the rotary embedding is another one in sequences of more than {limit} "
                           f"tokens; compile with --max_seq_len of at most {limit}")
    return Rotary(dim, interleaved, np.ascontiguousarray(table[:, first]),
                  np.ascontiguousarray(table[:, second]))


def _apply(heads: Heads, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What `heads` says the piece computes: `[batch, heads, seq, head_dim]`."""
    result = x[..., heads.columns].transpose(0, 2, 1, 3).astype(np.float64)
    if heads.rotary is not None:
        dim, step = heads.rotary.dim, 1 if heads.rotary.interleaved else heads.rotary.dim // 2
        first = np.arange(0, dim, 2) if heads.rotary.interleaved else np.arange(dim // 2)
        cos, sin = heads.rotary.cos[positions], heads.rotary.sin[positions]
        left, right = result[..., first].copy(), result[..., first + step].copy()
        result[..., first] = left * cos - right * sin
        result[..., first + step] = right * cos + left * sin
    return result * heads.gain


def _output(graph: gs.Graph, node: gs.Node, num_heads: int, head_dim: int, data: set[int]) -> \
        gs.Tensor | NoMatch:
    """The `[batch, seq, num_heads * head_dim]` tensor below Sdpa, past layout nodes."""
    result = node.outputs[0]
    while True:
        users = consumers(graph, result)
        if len(users) != 1 or users[0] is None or users[0].op not in LAYOUT:
            break
        result = users[0].outputs[0]
    if result is node.outputs[0]:
        return NoMatch("nothing joins the heads after attention", node)
    piece = cone(result, data, LAYOUT)
    if isinstance(piece, NoMatch):
        return piece
    seq = 3
    numbers = np.arange(num_heads * seq * head_dim, dtype=np.float32)
    x = numbers.reshape(1, num_heads, seq, head_dim)
    try:
        joined = piece.run({**token_feeds(1, seq), node.outputs[0].name: x})
    except RuntimeError as error:
        return NoMatch(f"it cannot be evaluated ({str(error)[:160]})", result)
    if not np.array_equal(joined.reshape(-1), x.transpose(0, 2, 1, 3).reshape(-1)) \
            or joined.shape[-1] != num_heads * head_dim:
        return NoMatch("the heads are not joined in order after attention", result)
    return result


def _rewrite(graph: gs.Graph, match: _Attention, settings: Settings,
             shared: dict[bytes, tuple[gs.Constant, gs.Constant]]) -> None:
    sdpa, heads = match.node, match.query.heads
    dim = heads.columns.shape[1]
    attrs = dict(num_heads=len(heads.columns), num_kv_heads=match.num_kv_heads, head_dim=dim,
                 scale=sdpa.attrs["scale"] * heads.gain * match.key.heads.gain,
                 softcap=sdpa.attrs["softcap"], window=sdpa.attrs["window"])
    tables: tuple[gs.Constant | None, gs.Constant | None] = (None, None)
    if heads.rotary is not None:
        attrs.update(rotary_dim=heads.rotary.dim, interleaved=int(heads.rotary.interleaved))
        key = heads.rotary.cos.tobytes() + heads.rotary.sin.tobytes()
        if key not in shared:
            suffix = f".{len(shared)}" if shared else ""
            shared[key] = (
                gs.Constant(f"rotary.cos{suffix}", Weight.of(heads.rotary.cos)),
                gs.Constant(f"rotary.sin{suffix}", Weight.of(heads.rotary.sin)))
        tables = shared[key]
    norms = [branch.norm for branch in (match.query, match.key)]
    for norm in norms:
        if norm is not None:
            attrs["norm_epsilon"] = norm.attrs["epsilon"]
    layer = sdpa.attrs["layer"]
    cache_shape = ("batch", match.num_kv_heads, settings.max_seq_len, dim)
    caches = [gs.Variable(f"{kind}_cache_{layer}", np.float32, cache_shape)
              for kind in ("key", "value")]
    updated = [gs.Variable(f"{cache.name}_out", np.float32, cache_shape) for cache in caches]
    graph.inputs.extend(caches)
    graph.outputs.extend(updated)
    indirection = _input(graph, "cache_indirection", ("batch", settings.max_seq_len)) \
        if settings.max_beam_width > 1 else None
    replace(graph, "CausalAttention",
            [_merged_projection(graph, match), *caches,
             _input(graph, "cu_seqlens", ("batch_plus_1",)), _input(graph, "past_lens", ("batch",)),
             *tables, *(norm.inputs[1] if norm is not None else None for norm in norms),
             None, indirection, match.bias],
            [match.output, *updated], attrs)


def _rewrite_bidirectional(graph: gs.Graph, match: _Attention) -> None:
    query, key, value = match.query, match.key, match.value
    where = [_input(graph, name, ("batch",)) if isinstance(match, _CrossAttention) else None
             for name in ("memory_starts", "encoder_sequence_length")]
    replace(graph, "BidirectionalAttention",
            [_projection(graph, query, query.heads.columns, match.output),
             *(_projection(graph, branch, _unique(branch.heads.columns), match.output)
               for branch in (key, value)),
             _input(graph, "cu_seqlens", ("batch_plus_1",)), *where, match.bias], [match.output],
            dict(num_heads=len(query.heads.columns), num_kv_heads=match.num_kv_heads,
                 head_dim=query.heads.columns.shape[1],
                 scale=match.node.attrs["scale"] * query.heads.gain * key.heads.gain))


def _projection(graph: gs.Graph, branch: _Branch, columns: np.ndarray, output: gs.Tensor) -> \
        gs.Tensor:
    """Columns of a projection, by another GEMM where they are not all of one, in order."""
    rows, gemm = columns.reshape(-1), producer(branch.projected)
    if np.array_equal(rows, np.arange(branch.projected.shape[-1])):
        return branch.projected
    shape = [*branch.projected.shape[:-1], len(rows)]
    part = gs.Variable(f"{branch.projected.name}.{int(rows[0])}.{output.name}", np.float32, shape)
    if is_llmc(gemm, "GemmBiasAct") and gemm.attrs.get("activation", "none") == "none":
        inputs = [gemm.inputs[0], *(
            gs.Constant(f"{tensor.name}.{part.name}", weight(tensor).take_rows(rows))
            for tensor in gemm.inputs[1:])]
        replace(graph, "GemmBiasAct", inputs, [part])
    else:
        graph.nodes.append(gs.Node(
            op="Gather", name=part.name, attrs={"axis": -1}, outputs=[part],
            inputs=[branch.projected, gs.Constant(f"{part.name}.index", rows)]))
    return part


def _input(graph: gs.Graph, name: str, shape: tuple[str | int, ...]) -> gs.Variable:
    """The graph's int32 input of this name, made on first use."""
    found = next((tensor for tensor in graph.inputs if tensor.name == name), None)
    if found is None:
        found = gs.Variable(name, np.int32, shape)
        graph.inputs.append(found)
    return found


def _merged_projection(graph: gs.Graph, match: _Attention) -> gs.Tensor:
    """One GEMM for queries, keys and values; where that cannot be, their concatenation."""
    branches = (match.query, match.key, match.value)
    rows = [match.query.heads.columns.reshape(-1),
            *(_unique(branch.heads.columns).reshape(-1) for branch in branches[1:])]
    gemms = [producer(branch.projected) for branch in branches]
    width = sum(map(len, rows))
    name = f"{match.output.name}.qkv"
    shape = [*match.output.shape[:-1], width] if match.output.shape else None
    qkv = gs.Variable(name, dtype=np.float32, shape=shape)
    first = gemms[0]
    mergeable = all(is_llmc(gemm, "GemmBiasAct") and gemm.inputs[0] is first.inputs[0]
                    and gemm.attrs.get("activation", "none") == "none"
                    and len(gemm.inputs) == len(first.inputs) for gemm in gemms)
    if not mergeable:
        parts: list[gs.Variable] = []
        for branch, index in zip(branches, rows, strict=True):
            part = gs.Variable(f"{branch.projected.name}.{len(parts)}.{name}", dtype=np.float32)
            graph.nodes.append(gs.Node(
                op="Gather", name=part.name, attrs={"axis": -1}, outputs=[part],
                inputs=[branch.projected, gs.Constant(f"{part.name}.index", index)]))
            parts.append(part)
        graph.nodes.append(gs.Node(op="Concat", name=name, attrs={"axis": -1}, inputs=parts,
                                   outputs=[qkv]))
        return qkv

    def stack(position: int) -> gs.Constant:
        values = Weight.concat([weight(gemm.inputs[position]).take_rows(index)
                                for gemm, index in zip(gemms, rows, strict=True)])
        return merge_constants(gemms, position, values, "qkv_proj", match.output)

    inputs = [first.inputs[0], *(stack(position) for position in range(1, len(first.inputs)))]
    replace(graph, "GemmBiasAct", inputs, [qkv])
    return qkv
