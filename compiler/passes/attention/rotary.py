"""Determine the rotary embedding of a subgraph by probing.

Unit vectors give the rotation at a position. Its pattern of zeros determines the layout; cos and
sin are read from it at every position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmc.compiler.graph.probe import close
from llmc.compiler.graph.rewrite import NoMatch

_CHUNK = 512


@dataclass(frozen=True)
class Rotary:
    """A rotation of the first `dim` elements of each head.

    Args:
        dim: rotated elements.
        interleaved: pairs are elements 2i and 2i + 1 instead of i and i + dim / 2.
        cos, sin: float32 `[max_seq_len, dim / 2]`.
        axes: the axis of each pair's position, of tokens with several; None: they have one.
    """

    dim: int
    interleaved: bool
    cos: np.ndarray
    sin: np.ndarray
    axes: tuple[int, ...] | None = None

    def equals(self, other: Rotary) -> bool:
        return (self.dim, self.interleaved, self.axes) == \
            (other.dim, other.interleaved, other.axes) \
            and close(self.cos, other.cos, 1e-6) and close(self.sin, other.sin, 1e-6)

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotate x `[batch, heads, seq, head_dim]` at positions `[seq]`, or by axis `[seq, axes]`.
        """
        first, second = _pairs(self.dim, self.interleaved)
        if positions.ndim > 1:
            assert self.axes is not None
            positions = positions[:, self.axes]
            cos, sin = (table[positions, np.arange(len(first))] for table in (self.cos, self.sin))
        else:
            cos, sin = self.cos[positions], self.sin[positions]
        result = x.copy()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., second] * cos + x[..., first] * sin
        return result

    def turned(self) -> tuple[np.ndarray, Rotary | None]:
        """The elements that are rotated at some position, and their rotation.

        Returns:
            Their indices in the layout's order, and a rotation of these alone, or None.
        """
        turns = (np.abs(self.cos - 1.0) > 1e-6).any(0) | (np.abs(self.sin) > 1e-6).any(0)
        pairs = np.stack([half[turns] for half in _pairs(self.dim, self.interleaved)])
        elements = pairs.T if self.interleaved else pairs
        return elements.reshape(-1), Rotary(
            elements.size, self.interleaved, np.ascontiguousarray(self.cos[:, turns]),
            np.ascontiguousarray(self.sin[:, turns]),
            None if self.axes is None else tuple(np.array(self.axes)[turns].tolist())) \
            if turns.any() else None


def _pairs(dim: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """The two elements of each pair, `[dim / 2]` each."""
    first = np.arange(0, dim, 2) if interleaved else np.arange(dim // 2)
    return first, first + (1 if interleaved else dim // 2)


def find_layout(rotation: np.ndarray) -> tuple[int, bool] | None:
    """`(dim, interleaved)` of rotation matrices `[position, out, in]`, or None."""
    head_dim = rotation.shape[-1]
    for dim in range(2, head_dim + 1, 2):
        for interleaved in (False, True):
            first, second = _pairs(dim, interleaved)
            expected = np.zeros_like(rotation)
            rest = np.arange(dim, head_dim)
            expected[:, rest, rest] = 1.0
            cos, sin = rotation[:, first, first], rotation[:, second, first]
            expected[:, first, first] = expected[:, second, second] = cos
            expected[:, second, first], expected[:, first, second] = sin, -sin
            if close(rotation, expected, 1e-5):
                return dim, interleaved
    return None


def read_table(rotated: Callable[[np.ndarray, np.ndarray], np.ndarray], takes_positions: bool,
               dim: int, interleaved: bool, head_dim: int, max_seq_len: int) -> \
        tuple[Rotary | None, np.ndarray | None] | NoMatch:
    """Read cos and sin at every position from the rotation of the first element of each pair.

    Args:
        rotated: (elements of a head that are 1, positions [seq]) to the head, [seq, head_dim].
        takes_positions: whether `rotated` uses given positions; else they are 0, 1, ….
        dim: rotated elements; 0: none.
        interleaved: see `Rotary`.
        head_dim: elements of a head.
        max_seq_len: positions to read.

    Returns:
        The rotary embedding (None if `dim` is 0), and a factor `[max_seq_len]` of all elements, or
        None.
    """
    first, second = _pairs(dim, interleaved)
    rest = np.arange(dim, head_dim)
    elements = np.concatenate([first, rest])
    size = _CHUNK if takes_positions else max_seq_len
    chunks = [rotated(elements, np.arange(start, min(start + size, max_seq_len)))
              for start in range(0, max_seq_len, size)]
    table = np.concatenate(chunks)
    if takes_positions and max_seq_len > 2:
        alone = rotated(elements, np.arange(2))

        def changes(length: int) -> bool:
            together = rotated(elements, np.array([0, 1, length - 1]))
            return not close(together[:2], alone, 1e-6)

        if changes(max_seq_len):
            limit = bisect_left(range(max_seq_len), True, lo=3, key=changes) - 1
            return NoMatch(f"the rotary embedding changes in sequences of more than {limit} "
                           f"tokens; compile with --max_seq_len of at most {limit}")
    factors = np.concatenate([np.hypot(table[:, first], table[:, second]), table[:, rest]], axis=1)
    factors = factors.astype(np.float64) / factors[0]
    scale = factors[:, -1]
    if not close(factors, scale[:, None] + 0 * factors, 1e-5):
        scale = np.ones(max_seq_len)  # e.g. pairs with separate scales
    if len(rest) and not close(factors[:, len(first):], scale[:, None] + np.zeros(len(rest)), 1e-5):
        return NoMatch("only some elements of a head are scaled by position")
    is_scaled = not close(scale, np.ones(max_seq_len), 1e-6)
    if is_scaled:
        table = table / scale[:, None]
    table = table.astype(np.float32)
    return (Rotary(dim, interleaved, np.ascontiguousarray(table[:, first]),
                   np.ascontiguousarray(table[:, second])) if dim else None,
            scale.astype(np.float32) if is_scaled else None)


def find_axes(rotated: Callable[[np.ndarray, np.ndarray], np.ndarray], rotary: Rotary,
              num_axes: int) -> tuple[int, ...] | NoMatch:
    """Determine the axis of each pair's position, for tokens with several positions.

    Args:
        rotated: (elements of a head that are 1, positions [seq, num_axes]) to the head,
            [seq, head_dim].
        rotary: its rotation at positions that are equal on all axes.
        num_axes: positions of a token.
    """
    first, second = _pairs(rotary.dim, rotary.interleaved)
    last = len(rotary.cos) - 1
    far = np.unique([1, max(last // 3, 1), last])
    axes = np.full(len(first), -1)
    for axis in reversed(range(num_axes)):  # pairs that never turn get the first
        positions = np.zeros((len(far), num_axes), np.int64)
        positions[:, axis] = far
        table = rotated(first, positions)
        follows = np.abs(table[:, first] - rotary.cos[far]).max(0) <= 1e-5
        follows &= np.abs(table[:, second] - rotary.sin[far]).max(0) <= 1e-5
        axes[follows] = axis
    if axes.min() < 0:
        pair = int(axes.argmin())
        return NoMatch(f"pair {pair} of the rotary embedding follows the position on none of "
                       f"{num_axes} axes")
    return tuple(axes.tolist())
