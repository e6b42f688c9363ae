"""Quantization schemes of `--quantize`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.quantization import INT8

# For errors about --quantize with weights that are quantized already.
QUANTIZED_WAYS_OUT = "leave out --quantize to keep its quantized weights, give --quantize none " \
    "to dequantize them, or add --requantize to dequantize and quantize them again, which loses " \
    "more than quantizing the original model"
SMALLEST_GROUP = 16  # that kernels support
_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme.

    Args:
        dtype: a code type.
        group_size: columns with a common scale; 0: for FP8 and with int8 activations the row;
            else the largest of 128, 64, 32 and 16 that divides the row, else the row.
        activation_dtype: dtype that activations are quantized to; "": they are not quantized.
    """

    dtype: str
    group_size: int = 0
    activation_dtype: str = ""

    def without_int8_activations(self) -> Scheme:
        """The scheme of weights whose kernels do not multiply integers: of experts, for example."""
        return replace(self, activation_dtype="") if self.activation_dtype == INT8 else self

    def group_size_for(self, width: int) -> int | None:
        """The group size for rows of `width` columns; None if it does not divide them."""
        if self.group_size:
            return self.group_size if width % self.group_size == 0 else None
        if CODE_TYPES[self.dtype].numbers or self.activation_dtype:
            return width
        return next((size for size in _GROUP_SIZES if width % size == 0), width)
