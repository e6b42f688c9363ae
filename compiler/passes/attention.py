"""Give attention its projections' merged output, its rotary embedding and its per-head norms.

Given:   q = GemmBiasAct(x, Wq) → Reshape → (RMSNorm) → Transpose → rotary
         k = GemmBiasAct(x, Wk) → Reshape → (RMSNorm) → Transpose → rotary
         v = GemmBiasAct(x, Wv) → Reshape → Transpose
         Sdpa(q, k, v) → Transpose → Reshape
Result:  CausalAttention(GemmBiasAct(x, [Wq; Wk; Wv]), key_cache, value_cache, cu_seqlens,
         past_lens, cos, sin, q_norm, k_norm), and the graph takes and returns the KV cache;
         with cache_indirection where beams are to share it

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

from llmc.compiler.probe import LAYOUT, ROTARY, Piece, close, cone, data_tensors
from llmc.compiler.rewrite import (
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
from llmc.compiler.weights import Weight

_CHUNK = 512


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


def attention(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    shared: dict[bytes, tuple[gs.Constant, gs.Constant]] = {}
    rule = Rule("attention", frozenset({"Sdpa"}),
                lambda node, settings: _check(graph, node, data, settings),
                lambda graph, match, settings: _rewrite(graph, match, settings, shared))
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node, data: set[int], settings: Settings) -> \
        _Attention | NoMatch:
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
    return _Attention(node, query, key, value, num_kv_heads, output)


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
    sources = [t for t in piece.inputs if id(t) in data and t.name != "input_ids"]
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
    actual = piece.run({source.name: x, norm.inputs[1].name: gain,
                        "input_ids": np.zeros((1, seq), np.int64),
                        "position_ids": np.arange(seq)[None]})
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
        batch = len(x)
        return self.piece.run({
            self.source: x.astype(np.float32),
            "input_ids": np.zeros(x.shape[:2], np.int64),
            "position_ids": np.tile(positions.astype(np.int64), (batch, 1))})


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
    feeds = {node.outputs[0].name: x, "input_ids": np.zeros((1, seq), np.int64),
             "position_ids": np.arange(seq)[None]}
    try:
        joined = piece.run(feeds)
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
             None, indirection],
            [match.output, *updated], attrs)


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
