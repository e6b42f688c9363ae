"""What moves the numbers of a token about, as columns: which of them a tensor holds, in any layout.

A layout is known by running it. Its borders are given numbers that say which token's which column
they are; where these come out is the layout.
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
_EXACT = 2**24  # whole numbers that float32 has


@dataclass(frozen=True)
class Placed:
    """A tensor in some layout, and what it has in rows.

    Args:
        rows: [batch, seq, width], the same numbers.
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
    """What a tensor holds.

    Args:
        rows: tensors [batch, seq, width].
        token: int [...], of the tensor's shape: whose each element is.
        source: int [...], which of `rows` it is from.
        column: int [...], and its column there.
    """

    rows: tuple[gs.Tensor, ...]
    token: np.ndarray
    source: np.ndarray
    column: np.ndarray


def layout_of(tensor: gs.Tensor, data: set[int], known: Mapping[int, Placed]) -> Layout | NoMatch:
    """The layout of a tensor of activations; `known` has tensors above it of which there are
    rows.
    """
    if id(tensor) in known:
        own = known[id(tensor)]
        return _decoded([own.rows], [0], own.place)
    piece = cone(tensor, data, LAYOUT, borders_at=known)
    if isinstance(piece, NoMatch):
        return piece
    feeds, rows, starts, end = token_feeds(BATCH, SEQ), list[gs.Tensor](), list[int](), 0
    for border in piece.inputs:
        if border.name in feeds and id(border) not in known:
            continue  # for its shape
        if id(border) not in known and (len(border.shape or ()) != 3
                                        or not isinstance(border.shape[-1], int)):
            return NoMatch("it is not of tokens' rows", border)
        own = known.get(id(border)) or Placed.of(border)
        feeds[border.name] = (own.place + end).astype(np.float32)
        rows.append(own.rows)
        starts.append(end)
        end += own.place.size
    if end > _EXACT:
        return NoMatch(f"{end // TOKENS} columns are too many to be followed", tensor)
    if not rows:
        return NoMatch("it holds nothing of tokens", tensor)
    return _decoded(rows, starts, piece.run(feeds).astype(np.int64))


def _decoded(rows: Sequence[gs.Tensor], starts: Sequence[int], numbers: np.ndarray) -> Layout:
    source = np.searchsorted(starts, numbers, side="right") - 1
    widths = np.array([tensor.shape[-1] for tensor in rows])[source]
    own = numbers - np.array(starts)[source]
    return Layout(tuple(rows), own // widths, source, own % widths)


@dataclass(frozen=True)
class Columns:
    """A row for each token, of columns of others: `column[i]` of `rows[source[i]]`."""

    rows: tuple[gs.Tensor, ...]
    source: np.ndarray
    column: np.ndarray


@dataclass(frozen=True)
class Joined:
    """Tensors of one layout, or that are broadcast to one, brought into rows.

    Args:
        operands: of each the columns.
        place: the layout's, see `Placed`.
        order: elements of the layout, by token.
    """

    operands: list[Columns]
    place: np.ndarray
    order: np.ndarray

    @property
    def in_order(self) -> bool:
        """Whether tokens lie one after the other."""
        return np.array_equal(self.place.reshape(-1), np.arange(self.place.size))

    @property
    def is_rows(self) -> bool:
        """Whether the layout is [batch, seq, width]."""
        return self.in_order and self.place.shape[:-1] == (BATCH, SEQ)

    def of_constant(self, shape: Sequence[int]) -> np.ndarray | NoMatch:
        """For each column, which element of a constant of this shape meets it."""
        grid = np.broadcast_to(np.arange(np.prod(shape, dtype=int)).reshape(shape),
                               self.place.shape).reshape(-1)[self.order]
        return grid[0] if (grid == grid[0]).all() else \
            NoMatch("a constant is not the same for all tokens")


def join(layouts: Sequence[Layout], *constants: Sequence[int]) -> Joined | NoMatch:
    """Bring tensors, which a node takes element by element with constants of these shapes, into
    rows: of each token, its elements in their order in the layout.
    """
    try:
        shape = np.broadcast_shapes(*(own.token.shape for own in layouts), *constants)
    except ValueError:
        return NoMatch("these shapes do not go together")
    tokens = [np.broadcast_to(own.token, shape).reshape(-1) for own in layouts]
    counts = np.bincount(tokens[0], minlength=TOKENS)
    if any(not np.array_equal(token, tokens[0]) for token in tokens) or \
            len(counts) != TOKENS or (counts != counts[0]).any():
        return NoMatch("it does not work on each token by itself")
    order = np.argsort(tokens[0], kind="stable").reshape(TOKENS, -1)
    operands = []
    for own in layouts:
        source, column = (np.broadcast_to(part, shape).reshape(-1)[order]
                          for part in (own.source, own.column))
        if (source != source[0]).any() or (column != column[0]).any():
            return NoMatch("it is not the same for all tokens")
        operands.append(Columns(own.rows, source[0], column[0]))
    place = np.empty(order.size, np.int64)
    place[order.reshape(-1)] = np.arange(order.size)
    return Joined(operands, place.reshape(shape), order)
