"""Lazy weights, read a block of rows at a time.

A graph constant holds a `Weight` instead of an array, so a model of any size can be rewritten and
partitioned without loading it: each rewrite wraps the weight in a further transformation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx
from onnx_graphsurgeon.ir.tensor import LazyValues

from llmc.compiler.graph.origin import Origin, StackOrigin
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.compiler.quant.stored import Stored

BLOCK_BYTES = 16 << 20  # of a weight in memory at once
_FLOATING = frozenset(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))


class Weight(LazyValues):
    """A lazy array that onnx-graphsurgeon accepts as a constant's values.

    Args:
        shape: dimensions.
        dtype: NumPy dtype (or ml_dtypes'): that on disk for a checkpoint's weight, the constant's
            in a graph.
        rows: reads rows `start` to `stop` of axis 0 as an array of `dtype`.
        name: its origin, for messages.
        stored: the quantized values as stored, if any; for a stack of matrices, those of all,
            concatenated by rows. Slices, stacks and casts keep it; operations that change values
            drop it.

    Attributes:
        dequantized: whether its checkpoint has it quantized and `stored` was dropped.
        divided: whether it is one rank's share of the rows.
        unrounded: a dropped storage format, its own or a part's, that declares activation
            quantization.
        origin: the parameters that its rows and columns belong to; None: unknown, or their values
            were changed.
        stack_origin: the same for the matrices of a stack.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype | type,
                 rows: Callable[[int, int], np.ndarray], name: str,
                 stored: Stored | None = None) -> None:
        self.shape = tuple(int(dim) for dim in shape)
        self.dtype = np.dtype(dtype)
        self.name = name
        self.stored = stored
        self.dequantized = False
        self.divided = False
        self.unrounded: Stored | None = None
        self.origin: Origin | None = None
        self.stack_origin: StackOrigin | None = None
        self._rows = rows
        self._transposed: Weight | None = None
        self._padded: dict[int, Weight] = {}
        self._cast: dict[np.dtype, Weight] = {}

    def _derived(self, shape: Sequence[int], dtype: np.dtype | type,
                 rows: Callable[[int, int], np.ndarray], stored: Stored | None = None,
                 origin: Origin | None = None,
                 stack_origin: StackOrigin | None = None) -> Weight:
        """A weight computed from this one."""
        result = Weight(shape, dtype, rows, self.name, stored)
        result._inherit([self])
        result.origin, result.stack_origin = origin, stack_origin
        return result

    def _inherit(self, sources: Sequence[Weight]) -> None:
        """Record what this weight has lost of its sources' storage formats."""
        self.dequantized = self.stored is None and any(
            source.dequantized or source.stored is not None for source in sources)
        self.divided = any(source.divided for source in sources)
        if self.stored is None or not self.stored.activation_dtype:
            self.unrounded = next((form for source in sources
                                   for form in (source.stored, source.unrounded)
                                   if form is not None and form.activation_dtype), None)

    def set_origin(self, origin: Origin | StackOrigin) -> None:
        """Set the origin, also of the transpose; other weights computed before do not have it."""
        field = "stack_origin" if isinstance(origin, StackOrigin) else "origin"
        own: list[tuple[Weight, Origin | StackOrigin | None]] = [(self, origin)]
        if self._transposed is not None:  # this one may be computed from it
            own.append((self._transposed, origin.transpose()))
        for weight, value in own:
            setattr(weight, field, value)
            weight._padded, weight._cast = {}, {}

    def without_form(self) -> Weight:
        """The same values without the storage format."""
        return self._derived(self.shape, self.dtype, self._rows, origin=self.origin,
                             stack_origin=self.stack_origin)

    def as_unquantized(self) -> Weight:
        """The same values without any record of quantization."""
        result = Weight(self.shape, self.dtype, self._rows, self.name)
        result.origin, result.stack_origin = self.origin, self.stack_origin
        return result

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def tensor(self) -> onnx.TensorProto:
        """The TensorProto of the weight in an exported graph; the writer adds the offset."""
        proto = onnx.TensorProto(dims=self.shape,
                                 data_type=onnx.helper.np_dtype_to_tensor_dtype(self.dtype))
        proto.data_location = onnx.TensorProto.EXTERNAL
        proto.external_data.add(key="location", value="weights.safetensors")
        return proto

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` (exclusive) of axis 0."""
        block = self._rows(start, stop)
        expected = (stop - start, *self.shape[1:]) if self.shape else ()
        assert block.shape == expected, f"{self.name}: read {block.shape}, expected {expected}"
        return np.asarray(block, dtype=self.dtype, order="C")  # ascontiguousarray makes () a (1,)

    def require_finite(self, allow_minus_inf: bool = False) -> None:
        """Check rows on their first read, through this weight or one derived from it.

        Args:
            allow_minus_inf: the weight may be a mask.

        Raises:
            LlmcError: on reading rows with NaN or infinities; the counts are the whole weight's.
        """
        read, checked = self._rows, np.zeros(max(1, *self.shape[:1]), np.bool_)

        def rows(start: int, stop: int) -> np.ndarray:
            block = read(start, stop)
            if not checked[start:stop].all():
                if not _is_finite(block):
                    self._refuse_nonfinite(read, allow_minus_inf)
                checked[start:stop] = True
            return block

        self._rows = rows

    def _refuse_nonfinite(self, read: Callable[[int, int], np.ndarray],
                           allow_minus_inf: bool) -> None:
        counts = np.zeros(3, np.int64)
        for start, stop in self._steps() if self.shape else [(0, 1)]:
            block = read(start, stop).astype(np.float64)
            counts += [np.isnan(block).sum(), np.isposinf(block).sum(), np.isneginf(block).sum()]
        nans, positive, negative = counts.tolist()
        if nans or positive or (negative and not allow_minus_inf):
            raise LlmcError(
                f"tensor '{self.name}' {list(self.shape)} has {nans} NaN and {positive + negative} "
                f"infinite values; get the checkpoint again, or compile with --allow_nan")

    def load(self) -> np.ndarray:
        """The whole array."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def blocks(self, max_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
        """Consecutive blocks of rows of at most `max_bytes` (at least one row)."""
        for start, stop in self._steps(max_bytes):
            yield self.rows(start, stop)

    def _steps(self, max_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        row_bytes = max(1, self.nbytes // max(1, self.shape[0]))
        step = max(1, max_bytes // row_bytes)
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])

    @property
    def is_floating(self) -> bool:
        """Whether it has a floating-point dtype of at least 16 bits."""
        return self.dtype in _FLOATING

    @staticmethod
    def of(array: np.ndarray, name: str = "constant") -> Weight:
        """A weight of an array in memory."""
        return Weight(array.shape, array.dtype,
                      lambda start, stop: array[start:stop] if array.ndim else array, name)

    def transpose(self) -> Weight:
        """The transpose of a matrix, or of each matrix of a stack.

        The transpose of a transpose is the original. Reads a whole matrix for each block of its
        rows, but holds only one block of it.
        """
        if self._transposed is None and len(self.shape) == 3:
            count, height, width = self.shape
            self._transposed = self._derived(
                (count, width, height), self.dtype,
                lambda start, stop: self.rows(start, stop).swapaxes(1, 2),
                stack_origin=self.stack_origin and self.stack_origin.transpose())
            self._transposed._transposed = self
        assert len(self.shape) in (2, 3)
        if self._transposed is None:

            def rows(start: int, stop: int) -> np.ndarray:
                block = np.empty((stop - start, self.shape[0]), self.dtype)
                for low, high in self._steps():
                    block[:, low:high] = self.rows(low, high)[:, start:stop].T
                return block

            self._transposed = self._derived(self.shape[::-1], self.dtype, rows,
                                             origin=self.origin and self.origin.transpose())
            self._transposed._transposed = self
        return self._transposed

    def reshape(self, shape: Sequence[int]) -> Weight:
        """The same values in another shape.

        Each block reads the whole weight, unless axis 0 stays, or a stack of matrices is joined
        or split by rows.
        """
        shape = tuple(int(dim) for dim in shape)
        if shape == self.shape:
            return self
        if {len(shape), len(self.shape)} == {2, 3} and shape[-1] == self.shape[-1]:
            height = shape[1] if len(shape) == 3 else self.shape[1]

            def rows(start: int, stop: int) -> np.ndarray:
                if len(shape) == 3:
                    return self.rows(start * height, stop * height).reshape(-1, *shape[1:])
                first = start // height
                block = self.rows(first, -(-stop // height)).reshape(-1, shape[1])
                return block[start - first * height:stop - first * height]

            return self._derived(shape, self.dtype, rows, self.stored)
        if shape[:1] == self.shape[:1]:
            return self._derived(shape, self.dtype, lambda start, stop: self.rows(
                start, stop).reshape(stop - start, *shape[1:]))
        return self._derived(shape, self.dtype,
                             lambda start, stop: self.load().reshape(shape)[start:stop]
                             if shape else self.load().reshape(shape))

    def take_rows(self, index: Sequence[int] | np.ndarray) -> Weight:
        """Rows `index`, in that order; consecutive rows are read as one."""
        index = np.asarray(index, dtype=np.int64)
        if np.array_equal(index, np.arange(self.shape[0])):
            return self

        def rows(start: int, stop: int) -> np.ndarray:
            requested = index[start:stop]
            breaks = np.flatnonzero(np.diff(requested) != 1) + 1
            if len(breaks) + 1 > len(requested) // 4:
                low = int(requested.min())
                taken: np.ndarray = self.rows(low, int(requested.max()) + 1)[requested - low]
                return taken
            runs = np.split(requested, breaks)
            return np.concatenate([self.rows(int(r[0]), int(r[-1]) + 1) for r in runs])

        stored_rows = _rows_of(index, self.shape[1]) if len(self.shape) == 3 else index
        return self._derived((len(index), *self.shape[1:]), self.dtype, rows,
                             self.stored and self.stored.take_rows(stored_rows),
                             self.origin and self.origin.take_rows(index),
                             self.stack_origin and self.stack_origin.take(index, 0))

    def take_columns(self, index: Sequence[int] | np.ndarray) -> Weight:
        """Columns `index` of a matrix, in that order; whole groups keep the storage format."""
        index = np.asarray(index, dtype=np.int64)
        if np.array_equal(index, np.arange(self.shape[1])):
            return self
        return self._derived((self.shape[0], len(index)), self.dtype,
                             lambda start, stop: self.rows(start, stop)[:, index],
                             self.stored and self.stored.take_columns(index),
                             self.origin and self.origin.take_columns(index))

    def take(self, index: Sequence[int] | np.ndarray, axis: int) -> Weight:
        """Slices `index` of an axis, in that order."""
        if axis == 0:
            return self.take_rows(index)
        if len(self.shape) == 2:
            return self.take_columns(index)
        index = np.asarray(index, dtype=np.int64)
        if np.array_equal(index, np.arange(self.shape[axis])):
            return self
        shape = (*self.shape[:axis], len(index), *self.shape[axis + 1:])
        stored = self.stored
        if stored is not None:
            starts = np.arange(self.shape[0])[:, None] * self.shape[1]
            stored = stored.take_rows((starts + index).reshape(-1)) if axis == 1 else \
                stored.take_columns(index)
        return self._derived(shape, self.dtype,
                             lambda start, stop: self.rows(start, stop).take(index, axis), stored,
                             stack_origin=self.stack_origin and
                             self.stack_origin.take(index, axis))

    def pad_rows(self, count: int) -> Weight:
        """The weight padded with zero rows to `count` rows; cached."""
        have = self.shape[0]
        if count == have:
            return self
        if count in self._padded:
            return self._padded[count]

        def rows(start: int, stop: int) -> np.ndarray:
            block = np.zeros((stop - start, *self.shape[1:]), self.dtype)
            if start < have:
                filled = self.rows(start, min(stop, have))
                block[:len(filled)] = filled
            return block

        self._padded[count] = self._derived((count, *self.shape[1:]), self.dtype, rows,
                                            self.stored and self.stored.pad_rows(count),
                                            self.origin and self.origin.pad_rows(count))
        return self._padded[count]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Weight:
        """An elementwise function of the weight, computed in float32 for narrower dtypes."""

        def rows(start: int, stop: int) -> np.ndarray:
            block = self.rows(start, stop)
            return function(block.astype(np.float32, copy=False)).astype(self.dtype)

        return self._derived(self.shape, self.dtype, rows)

    def scale_columns(self, factors: np.ndarray) -> Weight:
        """A matrix with column j multiplied by `factors[j]`, in float32."""
        return self._derived(
            self.shape, np.float32,
            lambda start, stop: self.rows(start, stop).astype(np.float32) * factors,
            origin=self.origin and self.origin.scale_columns(factors))

    def plus_product(self, left: Weight, right: Weight) -> Weight:
        """The matrix, or each of a stack, plus `left` · `right`, in float64.

        Of a matrix, `right` is read whole with every block of rows.
        """
        def rows(start: int, stop: int) -> np.ndarray:
            block, thin, wide = (array.astype(np.float64) for array in (
                self.rows(start, stop), left.rows(start, stop),
                right.load() if len(right.shape) == 2 else right.rows(start, stop)))
            return np.asarray(block + thin @ wide).astype(self.dtype)

        result = self._derived(self.shape, self.dtype, rows)
        result._inherit([self, left, right])
        return result

    def with_row_norms(self, norms: np.ndarray) -> Weight:
        """The matrix with each row scaled to a Euclidean norm, in float64."""
        def rows(start: int, stop: int) -> np.ndarray:
            block = self.rows(start, stop).astype(np.float64)
            lengths = np.sqrt(_sum_rows(block * block))
            factors = norms[start:stop] / np.where(lengths > 0, lengths, 1)
            return np.asarray(block * factors[:, None]).astype(self.dtype)

        return self._derived(self.shape, self.dtype, rows)

    def dot(self, vector: np.ndarray) -> np.ndarray:
        """A matrix times a vector, float32. Reads the matrix once, a block at a time.

        Summed in float64 in a fixed order, so the result is bit-identical on every processor.
        """
        return np.concatenate([_sum_rows(block.astype(np.float64) * vector).astype(np.float32)
                               for block in self.blocks()])

    def cast(self, dtype: np.dtype | type) -> Weight:
        """The weight in another dtype; cached."""
        dtype = np.dtype(dtype)
        if dtype == self.dtype:
            return self
        if dtype not in self._cast:
            self._cast[dtype] = self._derived(
                self.shape, dtype, lambda start, stop: self.rows(start, stop).astype(dtype),
                self.stored, self.origin, self.stack_origin)
        return self._cast[dtype]

    @staticmethod
    def stack(weights: Sequence[Weight]) -> Weight:
        """Weights of equal shape and dtype along a new axis 0. Reads one at a time."""
        first = weights[0]
        assert all(w.shape == first.shape and w.dtype == first.dtype for w in weights)
        forms = [w.stored for w in weights if w.stored is not None]
        result = Weight((len(weights), *first.shape), first.dtype, lambda start, stop: np.stack(
            [weight.load() for weight in weights[start:stop]]), first.name,
            forms[0].above(forms[1:]) if len(forms) == len(weights) and len(first.shape) == 2
            else None)
        result._inherit(weights)
        return result

    @staticmethod
    def concat(weights: Sequence[Weight]) -> Weight:
        """Weights concatenated along axis 0."""
        if len(weights) == 1:
            return weights[0]
        first = weights[0]
        assert all(w.shape[1:] == first.shape[1:] and w.dtype == first.dtype for w in weights)
        offsets = np.cumsum([0, *[w.shape[0] for w in weights]])

        def rows(start: int, stop: int) -> np.ndarray:
            parts = []
            for weight, offset in zip(weights, offsets, strict=False):
                low, high = max(start, offset), min(stop, offset + weight.shape[0])
                if low < high:
                    parts.append(weight.rows(int(low - offset), int(high - offset)))
            return np.concatenate(parts)

        forms = [w.stored for w in weights if w.stored is not None]
        result = Weight((int(offsets[-1]), *first.shape[1:]), first.dtype, rows,
                        "+".join(w.name for w in weights),
                        forms[0].above(forms[1:]) if len(forms) == len(weights) else None)
        result._inherit(weights)
        origins = [w.origin for w in weights if w.origin is not None]
        result.origin = Origin.concat(origins) if len(origins) == len(weights) else None
        return result


class HeadMatrices(Weight):
    """One matrix per head of a quantized or floating-point matrix, which is kept as stored.

    [heads, rows, columns], or each transposed.
    """

    def __init__(self, matrix: Weight, heads: int, transposed: bool = False) -> None:
        each, width = matrix.shape[0] // heads, matrix.shape[1]

        def rows(start: int, stop: int) -> np.ndarray:
            block = matrix.rows(start * each, stop * each).reshape(stop - start, each, width)
            return block.swapaxes(1, 2) if transposed else block

        super().__init__((heads, width, each) if transposed else (heads, each, width),
                         matrix.dtype, rows, matrix.name)
        self.matrix, self.transposed = matrix, transposed
        self.dequantized = matrix.dequantized or matrix.stored is not None

    def take_rows(self, index: Sequence[int] | np.ndarray) -> Weight:
        """Heads `index`, in that order."""
        each = self.matrix.shape[0] // self.shape[0]
        rows = _rows_of(np.asarray(index), each)
        return HeadMatrices(self.matrix.take_rows(rows), len(index), self.transposed)


def _is_finite(block: np.ndarray) -> bool:
    """Whether all are finite; 16-bit values are tested by their exponent, which is faster."""
    if block.dtype.itemsize != 2:
        return bool(np.isfinite(block).all())
    exponent = np.uint16(0x7F80 if block.dtype == ml_dtypes.bfloat16 else 0x7C00)
    bits = np.ascontiguousarray(block).view(np.uint16) & np.uint16(0x7FFF)
    return bool(bits.max(initial=0) < exponent)


def _rows_of(matrices: np.ndarray, height: int) -> np.ndarray:
    """Row indices of these matrices of `height` in their concatenation."""
    rows: np.ndarray = (matrices[:, None] * height + np.arange(height)).reshape(-1)
    return rows


def _sum_rows(matrix: np.ndarray) -> np.ndarray:
    """The sum of each row, by adding the row's halves until one column is left.

    The order of NumPy's sum depends on its version and possibly on the processor; an elementwise
    sum does not.
    """
    while matrix.shape[1] > 1:
        half = matrix.shape[1] // 2
        rest = matrix[:, 2 * half:]
        matrix = matrix[:, :half] + matrix[:, half:2 * half]
        matrix = np.concatenate([matrix, rest], axis=1) if rest.size else matrix
    return matrix[:, 0]


def unread(start: int, stop: int) -> np.ndarray:
    """The reader of a placeholder weight."""
    raise AssertionError("a placeholder weight was read")
