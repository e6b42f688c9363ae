"""Layouts of activations: which token and column each element of a tensor holds.

A layout is determined by running its subgraph. Its inputs are filled with numbers that encode token
and column; the positions of these numbers in the output are the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import LAYOUT, cone, token_feeds
from llmc.compiler.graph.rewrite import NoMatch

BATCH, SEQ = 2, 3
TOKENS = BATCH * SEQ
_EXACT = 2**24  # integers up to here are exact in float32


@dataclass(frozen=True)
class Placed:
    """A tensor in some layout, and the equivalent tensor of rows.

    Args:
        rows: [batch, seq, width], the same values.
        place: for each element of the tensor, token · width + column, for `TOKENS` tokens.
    """

    rows: gs.Tensor
    place: np.ndarray

    @staticmethod
    def of(rows: gs.Tensor) -> Placed:
        shape = (BATCH, SEQ, rows.shape[-1])
        return Placed(rows, np.arange(np.prod(shape)).reshape(shape))


@dataclass(frozen=True)
class Layout:
    """The origin of each element of a tensor.

    Args:
        rows: tensors [batch, seq, width].
        token: int [...], of the tensor's shape: the element's token.
        source: int [...], the index in `rows` of the element's tensor.
        column: int [...], the element's column in that tensor.
    """

    rows: tuple[gs.Tensor, ...]
    token: np.ndarray
    source: np.ndarray
    column: np.ndarray


def layout_of(tensor: gs.Tensor, data: set[int], known: Mapping[int, Placed]) -> Layout | NoMatch:
    """Determine the layout of a tensor of activations.

    Args:
        tensor: to trace.
        data: ids of tensors that depend on token values, see `data_tensors`.
        known: tensors with an equivalent tensor of rows, by id; tracing stops at these.
    """
    if id(tensor) in known:
        placed = known[id(tensor)]
        return _decoded([placed.rows], [0], placed.place)
    piece = cone(tensor, data, LAYOUT, borders_at=known)
    if isinstance(piece, NoMatch):
        return piece
    feeds, rows, starts, end = token_feeds(BATCH, SEQ), list[gs.Tensor](), list[int](), 0
    for border in piece.inputs:
        if border.name in feeds and id(border) not in known:
            continue  # only its shape is read
        if id(border) not in known and (len(border.shape or ()) != 3
                                        or not isinstance(border.shape[-1], int)):
            return NoMatch("this tensor is not [batch, seq, width] with a fixed width", border)
        placed = known.get(id(border)) or Placed.of(border)
        feeds[border.name] = (placed.place + end).astype(np.float32)
        rows.append(placed.rows)
        starts.append(end)
        end += placed.place.size
    if end > _EXACT:
        return NoMatch(f"{end // TOKENS} columns are too many to trace", tensor)
    if not rows:
        return NoMatch("this tensor depends on no tokens' activations", tensor)
    return _decoded(rows, starts, piece.run(feeds).astype(np.int64))


def _decoded(rows: Sequence[gs.Tensor], starts: Sequence[int], numbers: np.ndarray) -> Layout:
    source = np.searchsorted(starts, numbers, side="right") - 1
    widths = np.array([tensor.shape[-1] for tensor in rows])[source]
    local = numbers - np.array(starts)[source]
    return Layout(tuple(rows), local // widths, source, local % widths)


@dataclass(frozen=True)
class Columns:
    """A tensor with one row per token, of others' columns: `column[i]` of `rows[source[i]]`."""

    rows: tuple[gs.Tensor, ...]
    source: np.ndarray
    column: np.ndarray


@dataclass(frozen=True)
class Joined:
    """Operands of an elementwise node, converted to rows.

    Args:
        operands: the columns of each operand.
        place: of the common layout, see `Placed`.
        order: int [tokens, width], the elements of the layout grouped by token.
    """

    operands: list[Columns]
    place: np.ndarray
    order: np.ndarray

    @property
    def in_order(self) -> bool:
        """Whether the elements are in token order."""
        return np.array_equal(self.place.reshape(-1), np.arange(self.place.size))

    @property
    def is_rows(self) -> bool:
        """Whether the layout is [batch, seq, width]."""
        return self.in_order and self.place.shape[:-1] == (BATCH, SEQ)

    def of_constant(self, shape: Sequence[int]) -> np.ndarray | NoMatch:
        """For each column, the index of the element of a constant of this shape that it meets."""
        grid = np.broadcast_to(np.arange(np.prod(shape, dtype=int)).reshape(shape),
                               self.place.shape).reshape(-1)[self.order]
        return grid[0] if (grid == grid[0]).all() else \
            NoMatch("a constant differs between tokens")


def join(layouts: Sequence[Layout], *constants: Sequence[int]) -> Joined | NoMatch:
    """Convert the operands of an elementwise node to rows.

    Args:
        layouts: of the computed operands.
        constants: shapes of the constant operands.

    Returns:
        The operands with each token's elements in layout order.
    """
    try:
        shape = np.broadcast_shapes(*(layout.token.shape for layout in layouts), *constants)
    except ValueError:
        return NoMatch("these shapes do not broadcast")
    tokens = [np.broadcast_to(layout.token, shape).reshape(-1) for layout in layouts]
    counts = np.bincount(tokens[0], minlength=TOKENS)
    if any(not np.array_equal(token, tokens[0]) for token in tokens) or \
            len(counts) != TOKENS or (counts != counts[0]).any():
        return NoMatch("the node combines elements of different tokens")
    order = np.argsort(tokens[0], kind="stable").reshape(TOKENS, -1)
    operands = []
    for layout in layouts:
        source, column = (np.broadcast_to(part, shape).reshape(-1)[order]
                          for part in (layout.source, layout.column))
        if (source != source[0]).any() or (column != column[0]).any():
            return NoMatch("the columns differ between tokens")
        operands.append(Columns(layout.rows, source[0], column[0]))
    place = np.empty(order.size, np.int64)
    place[order.reshape(-1)] = np.arange(order.size)
    return Joined(operands, place.reshape(shape), order)
