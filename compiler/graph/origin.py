"""Where the rows and columns of a compiled matrix come from.

Fusion and partition select, reorder and concatenate rows and columns of the checkpoint's matrices.
An adapter's matrices, which belong to those of the checkpoint, have to follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Origin:
    """The origin of a matrix [out, in], or of its transpose.

    Args:
        names: the parameters whose elements it has.
        source: int32 [rows], the index in `names` of each row's parameter; -1: a row of zeros.
        row: int32 [rows], the row of that parameter; of zeros a running number.
        column: int32 [columns], the column of all parameters.
    """

    names: tuple[str, ...]
    source: np.ndarray
    row: np.ndarray
    column: np.ndarray

    @staticmethod
    def of(name: str, shape: Sequence[int]) -> Origin:
        """The origin of a whole parameter."""
        rows, columns = shape
        return Origin((name,), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32),
                      np.arange(columns, dtype=np.int32))

    def transpose(self) -> Origin | None:
        """The origin of the transpose; None if rows are of several parameters."""
        if len(self.names) > 1 or (self.source < 0).any():
            return None
        return Origin(self.names, np.zeros(len(self.column), np.int32), self.column, self.row)

    def take_rows(self, index: np.ndarray) -> Origin:
        return Origin(self.names, self.source[index], self.row[index], self.column)

    def take_columns(self, index: np.ndarray) -> Origin:
        return Origin(self.names, self.source, self.row, self.column[index])

    def pad_rows(self, count: int) -> Origin:
        """The origin with zero rows up to `count`."""
        more = count - len(self.row)
        return Origin(self.names, np.append(self.source, np.full(more, -1, np.int32)),
                      np.append(self.row, np.arange(more, dtype=np.int32)), self.column)

    @staticmethod
    def concat(origins: Sequence[Origin]) -> Origin | None:
        """The origin of concatenated rows; None if their columns differ."""
        first = origins[0]
        if any(not np.array_equal(own.column, first.column) for own in origins):
            return None
        names = tuple(dict.fromkeys(name for own in origins for name in own.names))
        sources = [np.where(own.source < 0, -1, np.array(
            [names.index(name) for name in own.names], np.int32)[own.source])
            for own in origins]
        return Origin(names, np.concatenate(sources).astype(np.int32),
                      np.concatenate([own.row for own in origins]), first.column)
