"""Storage formats of quantized weights: quantized by llmc, or from a checkpoint.

Codes are one to a byte. As with all weights, everything is read when it is written, a block of rows
at a time. `llmc.plugins.quantization` defines codes, scales and zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.codes import NUMBERS, decode
from llmc.compiler.quant.scheme import SMALLEST_GROUP
from llmc.plugins.code_types import CODE_TYPES, E8M0_NUMBERS, CodeType
from llmc.plugins.quantization import BLOCK, FLOAT8, blocks_shape, pack

_POWERS = np.array([*E8M0_NUMBERS, np.nan], np.float32)
_ONE = 127  # 1.0 in e8m0


@dataclass(frozen=True)
class Stored:
    """A matrix [out, in] quantized in groups.

    Args:
        dtype: a `weight_dtype`.
        codes: uint8 [out, in], one to a byte; the creator ensures that FP8 codes are not NaN.
        scales: float32 [out, in / group_size]; for MXFP4 uint8, exponents.
        zeros: uint8 [out, in / group_size] if the dtype has zero points.
        minima: float32 [out, in / group_size] in place of zeros. Only GGUF has them. Its codes and
            scales have at most 24 bits together, so that a zero times a scale is exact.
        order: int64 [in], the matrix's column of each column of `codes` (act-order); None: the
            same.
        activation_dtype: dtype that activations are quantized to; "": not quantized.
        activation_scale: static scale of all activations; 0: dynamic scales per token.
        rounds_groups: whether scales are per group of a token, applied only with
            `--quantize_activations`.
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
        """The dequantized weight, float32 [out, in], with this storage format attached."""
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
        """The scales as `weight_blocks` of `llmc.plugins.quantization`, one per BLOCK × BLOCK.

        None if the scales are not of such blocks.
        """
        if self.dtype != FLOAT8 or self.group_size != BLOCK:
            return None
        scales = self.scales.load()
        firsts = scales[::BLOCK]
        if not np.array_equal(firsts.repeat(BLOCK, 0)[:len(scales)], scales):
            return None
        result = np.zeros(blocks_shape(*scales.shape), np.float32)
        result[:, :scales.shape[1]] = firsts
        return result

    def take_rows(self, index: np.ndarray) -> Stored:
        """Rows `index`, in that order."""
        return self._each(lambda codes: codes.take_rows(index),
                          lambda groups: groups.take_rows(index))

    def pad_rows(self, count: int) -> Stored:
        """The matrix padded with zero rows to `count`."""
        missing = count - self.codes.shape[0]

        def padded(weight: Weight, value: float) -> Weight:
            rows = Weight((missing, weight.shape[1]), weight.dtype, lambda start, stop: np.full(
                (stop - start, weight.shape[1]), value, weight.dtype), "padding")
            return Weight.concat([weight, rows])

        result = self._each(lambda codes: padded(codes, self.code_type.zero_point or 0),
                            lambda groups: padded(groups, 0))
        one = 1 if self.code_type.scale_dtype == "float32" else _ONE
        return replace(result, scales=padded(self.scales, one))

    def take_columns(self, index: np.ndarray) -> Stored | None:
        """Columns `index`, in that order, in the largest groups that this leaves whole.

        None if these are smaller than kernels support.
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
        """The same values in smaller groups, with repeated scales and zeros."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0, f"group_size {self.group_size} is not divisible by {group_size}"
        if times == 1:
            return self

        def repeated(weight: Weight) -> Weight:
            return Weight((weight.shape[0], weight.shape[1] * times), weight.dtype,
                          lambda start, stop: weight.rows(start, stop).repeat(times, 1),
                          weight.name)

        return self._each(lambda codes: codes, repeated)

    def as_int8(self) -> Stored:
        """The same values in int8.

        The code type must have an int8_factor, which makes its values integers; scales are divided
        by it.
        """
        factor = self.code_type.int8_factor
        integers = (factor * NUMBERS[self.dtype] + 128).astype(np.uint8)
        codes, scales = self.codes, self.scales
        return replace(
            self, dtype="int8",
            codes=Weight(codes.shape, np.uint8,
                         lambda start, stop: integers[codes.rows(start, stop)], codes.name),
            scales=Weight(scales.shape, np.float32,
                          lambda start, stop: _POWERS[scales.rows(start, stop)] / factor,
                          scales.name))

    def in_bytes(self) -> Stored:
        """The same values of int4 or uint4 in 8-bit codes."""
        if self.zeros is not None or self.minima is not None:
            return replace(self, dtype="uint8")
        codes, zero_points = self.codes, (CODE_TYPES["int8"].zero_point, self.code_type.zero_point)
        more = np.uint8((zero_points[0] or 0) - (zero_points[1] or 0))
        return replace(self, dtype="int8", codes=Weight(
            codes.shape, np.uint8, lambda start, stop: codes.rows(start, stop) + more, codes.name))

    def above(self, others: Sequence[Stored]) -> Stored | None:
        """This matrix concatenated with `others` by rows, in a common format.

        The group size is the smallest. Codes have 8 bits if a part's have, and zeros or minima if
        a part has them. None if the parts have no common format.
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
        """The same values in codes of `bits` bits without a fixed zero point."""
        fixed, zeros = self.code_type.zero_point, self.zeros
        if fixed is not None:
            zeros = Weight(self.scales.shape, np.uint8, lambda start, stop: np.full(
                (stop - start, self.scales.shape[1]), fixed, np.uint8), "zeros")
        result = replace(self, dtype=f"uint{bits}", zeros=zeros)
        if not minima or zeros is None:
            return result
        known = zeros
        return replace(result, zeros=None, minima=Weight(
            self.scales.shape, np.float32, lambda start, stop: -self.scales.rows(
                start, stop) * known.rows(start, stop).astype(np.float32), "minima"))

    def packed(self) -> tuple[Weight, Weight | None]:
        """Packed weight and zeros; scales and minima need no packing."""
        return self._packed(self.codes), self.zeros and self._packed(self.zeros)

    def _packed(self, codes: Weight) -> Weight:
        return Weight((codes.shape[0], -(-codes.shape[1] * self.bits // 8)), np.uint8,
                      lambda start, stop: pack(codes.rows(start, stop), self.bits), codes.name)
