"""Weights in fewer bits as the compiler handles them: made from a weight, or come in a checkpoint.

Codes stay one to a byte, and everything is read when it is written, a block of rows at a time, as
all weights are. `llmc.plugins.quantization` says what codes, scales and zeros mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import ml_dtypes
import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError
from llmc.plugins.code_types import CODE_TYPES, E8M0_NUMBERS, CodeType
from llmc.plugins.quantization import (
    BLOCK,
    FLOAT8,
    FLOAT8_MOST,
    blocks_shape,
    pack,
)

# Where --quantize is given for weights that are quantized already.
QUANTIZED_WAYS_OUT = "leave out --quantize to keep its quantized weights, give --quantize none " \
    "to dequantize them, or add --requantize to dequantize and quantize them again, which loses " \
    "more than quantizing the original model"
SMALLEST_GROUP = 16  # that kernels have
_GROUP_SIZES = (128, 64, 32, 16)
_PIECE = 1 << 20  # numbers that are computed with at once
_NUMBERS = {name: np.array(own.numbers, np.float32)
            for name, own in CODE_TYPES.items() if own.numbers}
_POWERS = np.array([*E8M0_NUMBERS, np.nan], np.float32)
_ONE = 127  # as the bits of an exponent


@dataclass(frozen=True)
class Scheme:
    """How weights are to be stored.

    Args:
        dtype: a `weight_dtype` of llmc.plugins.quantization.
        group_size: numbers along a row that share a scale; 0: the largest of 128, 64, 32 and 16
            that the row is whole groups of, or the row; in FP8 the row.
        activation_dtype: of llmc.plugins.quantization, what they multiply is rounded to; "": to
            nothing.
    """

    dtype: str
    group_size: int = 0
    activation_dtype: str = ""

    def group_size_for(self, width: int) -> int | None:
        """Of a row of `width` numbers; None where it is no whole groups."""
        if self.group_size:
            return self.group_size if width % self.group_size == 0 else None
        if CODE_TYPES[self.dtype].numbers:
            return width
        return next((size for size in _GROUP_SIZES if width % size == 0), width)


@dataclass(frozen=True)
class Stored:
    """A matrix [out, in] as groups of codes.

    Args:
        dtype: a `weight_dtype`.
        codes: uint8 [out, in], one to a byte; of FP8 none is NaN, which whoever reads them sees to.
        scales: float32 [out, in / group_size]; of MXFP4 uint8, exponents.
        zeros: uint8 [out, in / group_size] where the dtype has them.
        minima: float32 [out, in / group_size] in place of zeros. Only GGUF has them, whose codes
            and scales have at most 24 bits together, so that a zero times a scale is exact.
        order: int64 [in], which column of the matrix each column of `codes` is; None: the same.
        activation_dtype: what the activations that it multiplies are rounded to, if that is said.
        activation_scale: of all of these; 0: of each token its own.
        rounds_groups: whether each group of a token has one instead, and only whoever asks for it
            has activations rounded.
    """

    dtype: str
    codes: Weight
    scales: Weight
    zeros: Weight | None = None
    minima: Weight | None = None
    order: np.ndarray | None = None
    activation_dtype: str = ""
    activation_scale: float = 0.0
    rounds_groups: bool = False

    @property
    def code_type(self) -> CodeType:
        return CODE_TYPES[self.dtype]

    @property
    def bits(self) -> int:
        return self.code_type.bits

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def _each(self, change: Callable[[Weight], Weight],
              change_groups: Callable[[Weight], Weight]) -> Stored:
        return replace(self, codes=change(self.codes), scales=change_groups(self.scales),
                       zeros=self.zeros and change_groups(self.zeros),
                       minima=self.minima and change_groups(self.minima))

    def weight(self, name: str) -> Weight:
        """The numbers, float32 [out, in], that carry this form along."""
        return Weight(self.codes.shape, np.float32, self._numbers, name, self)

    def _numbers(self, start: int, stop: int) -> np.ndarray:
        codes = self.codes.rows(start, stop)
        scales = self.scales.rows(start, stop)
        if self.code_type.scale_dtype != "float32":
            scales = _POWERS[scales]
        zeros = np.full(scales.shape, self.code_type.zero_point or 0, np.float32) \
            if self.zeros is None else self.zeros.rows(start, stop).astype(np.float32)
        numbers = decode(codes.reshape(*scales.shape, -1), scales, zeros, self.dtype)
        if self.minima is not None:
            numbers += self.minima.rows(start, stop)[:, :, None]
        numbers = numbers.reshape(codes.shape)
        if self.order is not None:
            numbers[:, self.order] = numbers.copy()
        return numbers

    def block_scales(self) -> np.ndarray | None:
        """The scales of blocks of BLOCK × BLOCK, as llmc.plugins.quantization has weight_blocks;
        None where there are none.
        """
        if self.dtype != FLOAT8 or self.group_size != BLOCK:
            return None
        scales = self.scales.load()
        firsts = scales[::BLOCK]
        if not np.array_equal(firsts.repeat(BLOCK, 0)[:len(scales)], scales):
            return None
        made = np.zeros(blocks_shape(*scales.shape), np.float32)
        made[:, :scales.shape[1]] = firsts
        return made

    def take_rows(self, index: np.ndarray) -> Stored:
        """Rows `index`, in that order."""
        return self._each(lambda codes: codes.take_rows(index),
                          lambda groups: groups.take_rows(index))

    def pad_rows(self, count: int) -> Stored:
        """With rows of zero appended up to `count`."""
        missing = count - self.codes.shape[0]

        def padded(weight: Weight, value: float) -> Weight:
            rows = Weight((missing, weight.shape[1]), weight.dtype, lambda start, stop: np.full(
                (stop - start, weight.shape[1]), value, weight.dtype), "padding")
            return Weight.concat([weight, rows])

        made = self._each(lambda codes: padded(codes, self.code_type.zero_point or 0),
                          lambda groups: padded(groups, 0))
        one = 1 if self.code_type.scale_dtype == "float32" else _ONE
        return replace(made, scales=padded(self.scales, one))

    def take_columns(self, index: np.ndarray) -> Stored | None:
        """Columns `index`, in that order, in groups as large as that leaves; None where they are
        no groups of a size that kernels have.
        """
        if self.order is not None:
            return None
        size = math.gcd(self.group_size, len(index))
        while size >= SMALLEST_GROUP:
            runs = index.reshape(-1, size)
            if (runs[:, 0] % size == 0).all() and (np.diff(runs, axis=1) == 1).all():
                fine = self.regrouped(size)
                return fine._each(partial(Weight.take_columns, index=index),
                                  partial(Weight.take_columns, index=runs[:, 0] // size))
            size = size // 2 if size % 2 == 0 else 0
        return None

    def regrouped(self, group_size: int) -> Stored:
        """The same numbers in smaller groups, each scale and zero repeated."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0, f"groups of {self.group_size} are no groups of {group_size}"
        if times == 1:
            return self

        def repeated(weight: Weight) -> Weight:
            return Weight((weight.shape[0], weight.shape[1] * times), weight.dtype,
                          lambda start, stop: weight.rows(start, stop).repeat(times, 1),
                          weight.name)

        return self._each(lambda codes: codes, repeated)

    def as_int8(self) -> Stored:
        """The same numbers in int8, of a code type that has an int8_factor: that times a number is
        an integer, whose scale is as much smaller.
        """
        factor = self.code_type.int8_factor
        integers = (factor * _NUMBERS[self.dtype] + 128).astype(np.uint8)
        codes, scales = self.codes, self.scales
        return replace(
            self, dtype="int8",
            codes=Weight(codes.shape, np.uint8,
                         lambda start, stop: integers[codes.rows(start, stop)], codes.name),
            scales=Weight(scales.shape, np.float32,
                          lambda start, stop: _POWERS[scales.rows(start, stop)] / factor,
                          scales.name))

    def in_bytes(self) -> Stored:
        """The same numbers of int4 and uint4 in codes of 8 bits."""
        if self.zeros is not None or self.minima is not None:
            return replace(self, dtype="uint8")
        codes, zero_points = self.codes, (CODE_TYPES["int8"].zero_point, self.code_type.zero_point)
        more = np.uint8((zero_points[0] or 0) - (zero_points[1] or 0))
        return replace(self, dtype="int8", codes=Weight(
            codes.shape, np.uint8, lambda start, stop: codes.rows(start, stop) + more, codes.name))

    def above(self, others: Sequence[Stored]) -> Stored | None:
        """This matrix with `others` below it: in the smallest of their groups, in 8 bits if one is,
        with zeros or minima if one has them; None where that is no form.
        """
        parts = [self, *others]
        if len({part.dtype if part.code_type.int8_factor else "" for part in parts}) > 1:
            parts = [part.as_int8() if part.code_type.int8_factor else part for part in parts]
        if len({None if part.order is None else part.order.tobytes() for part in parts}) > 1:
            return None
        size = math.gcd(*(part.group_size for part in parts))
        if len({part.dtype if part.code_type.numbers else "" for part in parts}) > 1 or (
                size < SMALLEST_GROUP and len({part.group_size for part in parts}) > 1):
            return None
        parts = [part.regrouped(size) for part in parts]
        if len({(part.dtype, part.minima is None) for part in parts}) > 1:
            bits, minima = max(part.bits for part in parts), any(part.minima for part in parts)
            parts = [part._widened(bits, minima) for part in parts]

        def stacked(weights: Sequence[Weight | None]) -> Weight | None:
            found = [weight for weight in weights if weight is not None]
            return Weight.concat(found) if found else None

        rounded = {(part.activation_dtype, part.activation_scale, part.rounds_groups)
                   for part in parts}
        return Stored(parts[0].dtype, Weight.concat([part.codes for part in parts]),
                      Weight.concat([part.scales for part in parts]),
                      stacked([part.zeros for part in parts]),
                      stacked([part.minima for part in parts]), self.order,
                      *(rounded.pop() if len(rounded) == 1 else ()))

    def _widened(self, bits: int, minima: bool) -> Stored:
        """The same numbers in codes of so many bits without a fixed zero."""
        fixed, zeros = self.code_type.zero_point, self.zeros
        if fixed is not None:
            zeros = Weight(self.scales.shape, np.uint8, lambda start, stop: np.full(
                (stop - start, self.scales.shape[1]), fixed, np.uint8), "zeros")
        made = replace(self, dtype=f"uint{bits}", zeros=zeros)
        if not minima or zeros is None:
            return made
        known = zeros
        return replace(made, zeros=None, minima=Weight(
            self.scales.shape, np.float32, lambda start, stop: -self.scales.rows(
                start, stop) * known.rows(start, stop).astype(np.float32), "minima"))

    def packed(self) -> tuple[Weight, Weight | None]:
        """Weight and zeros as they lie in memory; scales and minima lie as they are."""
        return self._packed(self.codes), self.zeros and self._packed(self.zeros)

    def _packed(self, codes: Weight) -> Weight:
        return Weight((codes.shape[0], -(-codes.shape[1] * self.bits // 8)), np.uint8,
                      lambda start, stop: pack(codes.rows(start, stop), self.bits), codes.name)


def quantize(weight: Weight, scheme: Scheme, name: str) -> Stored:
    """A matrix rounded to nearest. Every block is read once for its codes, once for its scales and
    once for its zeros; the same input gives the same bytes on any processor.

    Raises:
        LlmcError: a row of it is no whole groups; when it is read, see `check_finite`.
    """
    rows, width = weight.shape
    size = scheme.group_size_for(width)
    if size is None:
        raise LlmcError(f"group_size {scheme.group_size} does not divide the rows of '{name}', of "
                        f"which a chip has {width} numbers; give another --group_size")
    if width % 2:
        raise LlmcError(f"'{name}' has rows of {width} numbers, and llmc quantises even ones only")
    shape = (rows, width // size)

    def grouped(start: int, stop: int) -> np.ndarray:
        block = weight.rows(start, stop).astype(np.float32).reshape(stop - start, shape[1], size)
        check_finite(block, scheme.dtype, name)
        return block

    def codes(start: int, stop: int) -> np.ndarray:
        block = grouped(start, stop)
        scales, zeros = scales_of(block, scheme.dtype)
        return encode(block, scales, zeros, scheme.dtype).reshape(stop - start, width)

    def scales(start: int, stop: int) -> np.ndarray:
        return scales_of(grouped(start, stop), scheme.dtype)[0]

    def zeros(start: int, stop: int) -> np.ndarray:
        return scales_of(grouped(start, stop), scheme.dtype)[1].astype(np.uint8)

    return Stored(
        scheme.dtype, Weight((rows, width), np.uint8, in_pieces(codes, width), name),
        Weight(shape, np.float32, in_pieces(scales, width), name),
        Weight(shape, np.uint8, in_pieces(zeros, width), name)
        if CODE_TYPES[scheme.dtype].zero_point is None else None,
        activation_dtype=scheme.activation_dtype)


def check_finite(groups: np.ndarray, dtype: str, name: str) -> None:
    """See that float32 has the scales of groups [..., group_size] of a weight.

    Raises:
        LlmcError: there are NaN or infinities, or numbers too far apart.
    """
    if not np.isfinite(groups).all():
        raise LlmcError(f"'{name}' has NaN or infinities, which cannot be quantised")
    if CODE_TYPES[dtype].zero_point is None:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        wide = high.astype(np.float64) - low > np.finfo(np.float32).max
        if wide.any():
            raise LlmcError(f"'{name}' has numbers in one group from {low[wide][0]:.2g} to "
                            f"{high[wide][0]:.2g}, too far apart for zeros; give int4 or int8")


def in_pieces(rows: Callable[[int, int], np.ndarray], width: int) -> \
        Callable[[int, int], np.ndarray]:
    """`rows` called for few rows at a time of a matrix `width` wide, from which it computes: a
    block of scales stands for many times as many numbers.
    """
    step = max(1, _PIECE // width)
    return lambda start, stop: np.concatenate(
        [rows(low, min(low + step, stop)) for low in range(start, stop, step)])


def scales_of(groups: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zeros, both float32 [...], of groups float32 [..., group_size]: those that take
    the whole range of codes.
    """
    own = CODE_TYPES[dtype]
    bits, fixed = own.bits, own.zero_point
    low, high = groups.min(-1), groups.max(-1)
    if fixed is None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = _nonzero((high - low) / np.float32(2 ** bits - 1))
        return scales, np.rint(-low / scales)
    zeros = np.full(low.shape, fixed, np.float32)
    extreme = np.where(-low > high, low, high)
    if dtype == FLOAT8:
        return _nonzero(np.abs(extreme) / np.float32(FLOAT8_MOST)), zeros
    if bits == 8:
        return _nonzero(np.abs(extreme) / np.float32(127)), zeros
    return _nonzero(extreme / np.float32(-8)), zeros  # code 0, -8, has no opposite: the extreme's


def _nonzero(scales: np.ndarray) -> np.ndarray:
    """With 1 in place of 0, of groups that are zero all over."""
    return np.where(scales == 0, np.float32(1), scales)


def decode(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers float32 of codes [..., group_size]."""
    numbers = _NUMBERS[dtype][codes] if dtype in _NUMBERS else \
        codes.astype(np.float32) - zeros[..., None]
    scaled: np.ndarray = numbers * scales[..., None]
    return scaled


def encode(groups: np.ndarray, scales: np.ndarray, zeros: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest codes uint8 of groups [..., group_size]."""
    scaled = groups / scales[..., None]
    if dtype == FLOAT8:
        clipped = np.clip(scaled, -FLOAT8_MOST, FLOAT8_MOST)
        codes: np.ndarray = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return codes
    codes = np.clip(np.rint(scaled) + zeros[..., None], 0, 2 ** CODE_TYPES[dtype].bits - 1)
    return codes.astype(np.uint8)
