"""Where the rows and columns of a compiled matrix come from.

Fusion and partition select, reorder and concatenate rows and columns of the checkpoint's matrices.
An adapter's matrices, which belong to those of the checkpoint, have to follow. So they do where
rows and columns are multiplied by scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Origin:
    """The origin of a matrix [out, in], or of its transpose.

    Args:
        names: the parameters whose elements it has.
        source: int32 [rows], the index in `names` of each row's parameter; -1: a row of zeros.
        row: int32 [rows], the row of that parameter; of zeros a running number.
        column: int32 [columns], the column of all parameters.
        row_scale: float32 [rows], by which rows are multiplied; None: by 1.
        column_scale: float32 [columns], likewise.
    """

    names: tuple[str, ...]
    source: np.ndarray
    row: np.ndarray
    column: np.ndarray
    row_scale: np.ndarray | None = None
    column_scale: np.ndarray | None = None

    @staticmethod
    def of(name: str, shape: Sequence[int]) -> Origin:
        """The origin of a whole parameter."""
        rows, columns = shape
        return Origin((name,), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32),
                      np.arange(columns, dtype=np.int32))

    @property
    def is_scaled(self) -> bool:
        return self.row_scale is not None or self.column_scale is not None

    @property
    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Scales of rows and of columns, float32."""
        return _whole(self.row_scale, self.row), _whole(self.column_scale, self.column)

    def transpose(self) -> Origin | None:
        """The origin of the transpose; None if rows are of several parameters."""
        if len(self.names) > 1 or (self.source < 0).any():
            return None
        return Origin(self.names, np.zeros(len(self.column), np.int32), self.column, self.row,
                      self.column_scale, self.row_scale)

    def take_rows(self, index: np.ndarray) -> Origin:
        scale = None if self.row_scale is None else self.row_scale[index]
        return replace(self, source=self.source[index], row=self.row[index], row_scale=scale)

    def take_columns(self, index: np.ndarray) -> Origin:
        scale = None if self.column_scale is None else self.column_scale[index]
        return replace(self, column=self.column[index], column_scale=scale)

    def scale_rows(self, factors: np.ndarray) -> Origin:
        """The origin with rows multiplied by `factors`, float32 [rows]."""
        own = 1.0 if self.row_scale is None else self.row_scale
        return replace(self, row_scale=(own * factors).astype(np.float32))

    def scale_columns(self, factors: np.ndarray) -> Origin:
        """The origin with columns multiplied by `factors`, float32 [columns]."""
        own = 1.0 if self.column_scale is None else self.column_scale
        return replace(self, column_scale=(own * factors).astype(np.float32))

    def pad_rows(self, count: int) -> Origin:
        """The origin with zero rows up to `count`."""
        more = count - len(self.row)
        scale = None if self.row_scale is None else \
            np.append(self.row_scale, np.ones(more, np.float32))
        return replace(self, source=np.append(self.source, np.full(more, -1, np.int32)),
                       row=np.append(self.row, np.arange(more, dtype=np.int32)), row_scale=scale)

    @staticmethod
    def concat(origins: Sequence[Origin]) -> Origin | None:
        """The origin of concatenated rows; None if their columns differ."""
        first = origins[0]
        if any(not np.array_equal(own.column, first.column)
               or not np.array_equal(_whole(own.column_scale, own.column),
                                     _whole(first.column_scale, first.column)) for own in origins):
            return None
        names = tuple(dict.fromkeys(name for own in origins for name in own.names))
        sources = [np.where(own.source < 0, -1, np.array(
            [names.index(name) for name in own.names], np.int32)[own.source])
            for own in origins]
        scale = None if all(own.row_scale is None for own in origins) else np.concatenate(
            [_whole(own.row_scale, own.row) for own in origins])
        return Origin(names, np.concatenate(sources).astype(np.int32),
                      np.concatenate([own.row for own in origins]), first.column, scale,
                      first.column_scale)


@dataclass(frozen=True)
class StackOrigin:
    """The origin of a stack of matrices [num_experts, out, in], or of their transposes.

    Args:
        experts: int32 [num_experts], the index of each matrix in the parameter's stack.
        matrix: the origin of every matrix, without scales; its one name is the parameter's.
    """

    experts: np.ndarray
    matrix: Origin

    @staticmethod
    def of(name: str, shape: Sequence[int]) -> StackOrigin:
        """The origin of a whole parameter."""
        return StackOrigin(np.arange(shape[0], dtype=np.int32), Origin.of(name, shape[1:]))

    def transpose(self) -> StackOrigin | None:
        """The origin of the transposes."""
        matrix = self.matrix.transpose()
        return None if matrix is None else replace(self, matrix=matrix)

    def take(self, index: np.ndarray, axis: int) -> StackOrigin:
        """The origin of slices `index` of an axis."""
        if axis == 0:
            return replace(self, experts=self.experts[index])
        return replace(self, matrix=self.matrix.take_rows(index) if axis == 1 else
                       self.matrix.take_columns(index))


def _whole(scale: np.ndarray | None, index: np.ndarray) -> np.ndarray:
    """The scales of an index; absent ones are 1."""
    return np.ones(len(index), np.float32) if scale is None else scale
