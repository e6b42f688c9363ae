"""Trace an input of Sdpa to its projection.

Probing with ones and with column numbers determines the projection's column of each element of each
head. Random inputs then verify the whole: columns, gain, norm, rotation.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.names import POSITION_IDS
from llmc.compiler.graph.probe import (
    LAYOUT,
    ROTARY,
    Piece,
    WithPositions,
    close,
    cone,
    token_feeds,
    with_positions,
)
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Settings,
    constant,
    fields_of,
    op_of,
    operands,
    producer,
    values_of,
)
from llmc.compiler.passes.attention.rotary import Rotary, find_axes, find_layout, read_table

_NEAR = (64, 2048)  # lengths at which explicit positions are compared with computed ones


@dataclass(frozen=True)
class Heads:
    """The mapping from a projection to one input of Sdpa.

    Args:
        columns: int [heads, head_dim], columns of the projection.
        gain: a constant factor.
        rotary: the rotary embedding, if any.
        order: the order of a head's elements, rotated ones first, if others than the first are
            rotated. Scores do not change if queries and keys have the same order.
        scale: a factor by position, [max_seq_len].
    """

    columns: np.ndarray
    gain: float
    rotary: Rotary | None
    order: tuple[int, ...] = ()
    scale: np.ndarray | None = None

    @property
    def distinct(self) -> np.ndarray:
        """`columns` without repeated heads, in order of first use."""
        _, first = np.unique(self.columns, axis=0, return_index=True)
        return self.columns[np.sort(first)]

    def apply(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Heads of a projection x `[batch, seq, width]`.

        Returns:
            float64 `[batch, heads, seq, head_dim]`, a head's elements in `order`.
        """
        result = x[..., self.columns].transpose(0, 2, 1, 3).astype(np.float64)
        if self.rotary is not None:
            result = self.rotary.rotate(result, positions)
        if self.scale is not None:
            result = result * self.scale[positions][:, None]
        return np.asarray(result * self.gain)


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm over each head, before or after its rotary embedding: `gain [head_dim]`."""

    gain: gs.Tensor
    epsilon: float
    after_rotary: bool = False


@dataclass(frozen=True)
class Branch:
    """One input of Sdpa: its projection (or several, concatenated) and the ops applied to it."""

    sources: tuple[gs.Tensor, ...]
    heads: Heads
    norm: HeadNorm | None

    @property
    def projected(self) -> gs.Tensor:
        """The only source."""
        projected, = self.sources
        return projected


def trace(tensor: gs.Tensor, data: set[int], settings: Settings, rows: Container[int] = ()) -> \
        Branch | NoMatch:
    """Trace one input of Sdpa.

    Args:
        tensor: the input.
        data: ids of tensors that depend on token values, see `data_tensors`.
        settings: of the compilation.
        rows: ids of tensors that are treated as projections, whatever computes them.

    Raises:
        CannotEvaluate: ONNX Runtime cannot run the subgraph above it.
    """
    piece = cone(tensor, data, ROTARY, _per_head_norm, rows)
    if isinstance(piece, NoMatch):
        return piece
    sources = [t for t in piece.inputs if id(t) in data and producer(t) is not None]
    norms = [node for node in piece.nodes if _per_head_norm(node)]
    for source in sources:
        op = op_of(producer(source))
        if op is not None and op.norm is not None and op.norm.centred \
                and len(source.shape or ()) == 4:
            return NoMatch("heads are normalized by LayerNorm; only RMSNorm of heads is supported",
                           source)
    if not sources or len(norms) > (len(sources) == 1):
        return NoMatch(f"it comes from {len(sources)} projections through {len(norms)} norms",
                       tensor)
    widths: list[int] = []
    for source in sources:
        width = source.shape[-1] if source.shape else None
        if not isinstance(width, int):
            return NoMatch("the projection's width is unknown", source)
        widths.append(width)
    linear = Piece(piece.nodes, tuple(t for t in piece.inputs if not isinstance(t, gs.Constant)),
                   piece.outputs).without(norms)
    heads = _identify(_Linear(linear, tuple(source.name for source in sources), tuple(widths)),
                      settings.max_seq_len)
    if isinstance(heads, NoMatch):
        return NoMatch(heads.reason, tensor)
    if not norms:
        return Branch(tuple(sources), heads, None)
    norm = _head_norm(norms[0], heads)
    if isinstance(norm, NoMatch):
        return norm
    if heads.order:
        return NoMatch("a per-head norm together with a rotary embedding of a head's last "
                       "elements", norms[0])
    after = replace(norm, after_rotary=True)
    # A factor of cos and sin, as in YaRN, is normalized away, except for its effect on epsilon.
    scaled = replace(after, epsilon=norm.epsilon / heads.gain**2), replace(heads, gain=1.0)
    for head_norm, inner in ((norm, heads), (after, heads), scaled):
        if _norm_is_inside(piece, sources[0], widths[0], head_norm, inner):
            return Branch(tuple(sources), inner, head_norm)
    return NoMatch("it is not a per-head norm before or after a rotary embedding", norms[0])


def _per_head_norm(node: gs.Node) -> bool:
    op = op_of(node)
    return op is not None and op.norm is not None and not op.norm.centred \
        and len(node.inputs[0].shape or ()) == 4


def _head_norm(node: gs.Node, heads: Heads) -> HeadNorm | NoMatch:
    op = op_of(node)
    assert op is not None and op.norm is not None
    inputs, dim = operands(node), heads.columns.shape[1]
    if values_of(inputs[op.norm.gain]).shape != (dim,) or inputs[op.norm.x].shape[-1] != dim:
        return NoMatch("the norm is not over a single head", node)
    return HeadNorm(inputs[op.norm.gain], fields_of(node)[op.norm.epsilon])


def _norm_is_inside(piece: Piece, source: gs.Tensor, width: int, norm: HeadNorm, heads: Heads) -> \
        bool:
    """Whether the subgraph is: select columns, normalize heads, rotate and scale.

    Or, for `norm.after_rotary`: select, rotate, normalize and scale.
    """
    rng = np.random.default_rng(1)
    # A scale by position may differ from 1 only at far positions.
    changes = np.abs((1.0 if heads.scale is None else heads.scale) - np.ones(1))
    seq = max(4, int((changes >= changes.max() / 2).argmax()) + 1)
    positions, dim = np.arange(seq), heads.columns.shape[1]
    x = rng.standard_normal((1, seq, width)).astype(np.float32)
    gain = constant(norm.gain)
    if gain is None:
        gain = rng.standard_normal((dim,)).astype(np.float32)
    actual = piece.run({**token_feeds(1, seq), source.name: x, norm.gain.name: gain})

    def normed(chosen: np.ndarray) -> np.ndarray:
        return np.asarray(chosen / np.sqrt((chosen**2).mean(-1, keepdims=True) + norm.epsilon)
                          * gain)

    if norm.after_rotary:
        rotated = replace(heads, gain=1.0, scale=None).apply(x, positions)
        scale = 1.0 if heads.scale is None else heads.scale[positions][:, None]
        return close(actual, normed(rotated) * scale * heads.gain, 1e-4)
    chosen = x[..., heads.columns].astype(np.float64)  # [batch, seq, heads, head_dim]
    plain = replace(heads, columns=np.arange(heads.columns.size).reshape(heads.columns.shape))
    return close(actual, plain.apply(normed(chosen).reshape(1, seq, -1), positions), 1e-4)


@dataclass(frozen=True)
class _Linear:
    """A subgraph that is linear in its concatenated data inputs `[batch, seq, width]`.

    Instances are equal if they compute the same function, so that results are shared by layers.
    """

    piece: Piece
    sources: tuple[str, ...]
    widths: tuple[int, ...]
    far: WithPositions | None = None  # with positions as inputs

    def __hash__(self) -> int:
        return hash(self.piece.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Linear) and (self.piece.key, self.widths) == \
            (other.piece.key, other.widths)

    @property
    def width(self) -> int:
        return sum(self.widths)

    def with_given_positions(self, max_seq_len: int) -> _Linear:
        """The same with positions as inputs, if positions matter and that is equivalent."""
        if not self.computes_with_positions:
            return self
        far = with_positions(self.piece, lambda length: {
            **token_feeds(1, length), **self._parts(np.zeros((1, length, self.width)))})
        try:
            holds = all(close(self._run(x[:, positions], positions, far),
                              self._run(x, np.arange(length))[:, :, positions], 1e-6)
                        for length in {min(max_seq_len, near) for near in _NEAR}
                        for positions in [np.unique([0, length // 3, length - 1])[::-1]]
                        for x in [np.random.default_rng(0).standard_normal(
                            (1, length, self.width))])
        except CannotEvaluate:
            holds = False
        return replace(self, far=far) if holds else self

    def _parts(self, x: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(x.astype(np.float32), np.cumsum(self.widths)[:-1], axis=-1)
        return dict(zip(self.sources, parts, strict=True))

    def _run(self, x: np.ndarray, positions: np.ndarray,
             far: WithPositions | None = None) -> np.ndarray:
        piece, places = (self.piece, {}) if far is None else (far.piece, far.feeds(positions))
        return piece.run({**token_feeds(len(x), x.shape[1], positions), **self._parts(x), **places})

    @property
    def computes_with_positions(self) -> bool:
        """Whether data is combined with position-dependent values, not only moved."""
        data = {tensor.name for tensor in self.piece.inputs if tensor.name in self.sources}
        for node in self.piece.nodes:
            if any(tensor.name in data for tensor in node.inputs):
                data.update(tensor.name for tensor in node.outputs)
                if node.op not in LAYOUT and any(
                        tensor.name not in data and not isinstance(tensor, gs.Constant)
                        for tensor in node.inputs):
                    return True
        return False

    def __call__(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Run on x `[batch, seq, width]`, positions `[seq]`, or by axis `[seq, axes]`.

        Returns:
            `[batch, heads, seq, head_dim]`.
        """
        return self._run(x, positions, self.far)

    @property
    def has_axes(self) -> bool:
        """Whether it takes a position of each token by several axes."""
        return any(tensor.name in POSITION_IDS[1:] for tensor in self.piece.inputs)


@lru_cache(maxsize=256)
def _identify(linear: _Linear, max_seq_len: int) -> Heads | NoMatch:
    """Determine columns, gain, rotary embedding and scale by position, by probing."""
    rng = np.random.default_rng(0)
    # Without a position input, positions are 0, 1, …: far ones need a long sequence.
    last = max_seq_len - 1
    linear = linear.with_given_positions(max_seq_len)
    sample = np.array([0, 1, last // 2, last]) if linear.far is not None \
        else np.arange(min(max_seq_len, 64))
    at_zero = linear(np.ones((1, len(sample), linear.width)), sample)[0, :, 0]
    numbers = np.broadcast_to(np.arange(1, linear.width + 1), (1, len(sample), linear.width))
    columns = linear(numbers, sample)[0, :, 0] / np.where(at_zero, at_zero, np.nan) - 1
    if columns.ndim != 2 or not np.isfinite(columns).all() or \
            np.abs(columns - np.rint(columns)).max() > 0.05:
        return NoMatch("it is not a selection of the projection's columns at position 0")
    columns = np.rint(columns).astype(np.int64)
    head_dim = columns.shape[1]
    basis = np.zeros((head_dim, len(sample), linear.width), np.float32)
    basis[np.arange(head_dim), :, columns[0]] = 1.0
    rotation = linear(basis, sample)[:, 0].transpose(1, 2, 0)  # [position, out, in]
    gain, order, rotary = float(at_zero[0, -1]), np.arange(head_dim), None
    dim, interleaved, scale = 0, False, None
    rotation /= _lengths(rotation)
    if not close(rotation, np.broadcast_to(gain * np.eye(head_dim), rotation.shape), 1e-6):
        layout = find_layout(rotation / gain)
        if layout is None:
            order = _turning_first(rotation)
            gain = float(at_zero[0, order[-1]])
            layout = find_layout(rotation[:, order][:, :, order] / gain)
        if layout is None:
            return NoMatch("it is neither the identity nor a rotary embedding")
        (dim, interleaved), columns = layout, columns[:, order]
    if dim or linear.computes_with_positions:

        def rotated(elements: np.ndarray, positions: np.ndarray) -> np.ndarray:
            x = np.zeros((1, len(positions), linear.width), np.float32)
            x[..., columns[0][elements]] = 1.0
            return np.asarray(linear(x, positions)[0, 0][:, order] / gain)

        found = read_table(rotated, linear.far is not None, dim, interleaved, head_dim,
                           max_seq_len)
        if isinstance(found, NoMatch):
            return found
        rotary, scale = found
        if rotary is not None and linear.has_axes:
            axes = find_axes(rotated, rotary, len(POSITION_IDS))
            if isinstance(axes, NoMatch):
                return axes
            rotary = replace(rotary, axes=axes)
    changed = tuple(order.tolist()) if (order != np.arange(head_dim)).any() else ()
    heads = Heads(columns, 1.0 if abs(gain - 1.0) < 1e-6 else gain, rotary, changed, scale)
    x = rng.standard_normal((2, len(sample), linear.width)).astype(np.float32)
    if not close(linear(x, sample)[..., order], heads.apply(x, sample), 1e-4):
        return NoMatch("the rotary embedding differs between heads")
    if rotary is not None and rotary.axes is not None:
        by_axis = np.stack([rng.permutation(sample) for _ in POSITION_IDS], axis=1)
        if scale is not None or not close(linear(x, by_axis)[..., order],
                                          heads.apply(x, by_axis), 1e-4):
            return NoMatch("the rotary embedding of positions by axis differs between heads, or "
                           "also scales them by position")
    return heads


def _lengths(rotation: np.ndarray) -> np.ndarray:
    """Lengths of rotated vectors relative to the first position, `[position, 1, 1]`.

    Ones if they differ between elements. rotation `[position, out, in]`.
    """
    squares = (rotation.astype(np.float64)**2).sum(1)
    lengths = np.sqrt(squares / np.where(squares[:1], squares[:1], np.nan))
    if not np.isfinite(lengths).all() or not close(lengths, lengths[:, :1] + 0 * lengths, 1e-5):
        return np.ones((len(rotation), 1, 1))
    return np.asarray(lengths[:, :1, None])


def _turning_first(rotation: np.ndarray) -> np.ndarray:
    """Indices of a head's elements `[head_dim]`, position-dependent ones first.

    rotation `[position, out, in]`.
    """
    differs = np.abs(rotation - rotation[:1]) > 1e-6 * np.abs(rotation).max()
    turning = differs.any((0, 1)) | differs.any((0, 2))
    return np.concatenate([np.flatnonzero(turning), np.flatnonzero(~turning)])
