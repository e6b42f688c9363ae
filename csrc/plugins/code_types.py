"""Code types of quantized weights.

A code type defines the bits of a code and the value that it stands for. A `weight_dtype` names
one, in an op's attributes and in model_info.json. `llmc.plugins.quantization` defines the layout
of codes, scales and zero points; a target's kernels declare the code types that they read. NVFP4,
NF4 and GGUF's blocks are not code types: their readers convert them to these, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Values of FP4 (e2m1): sign, 2 bits of exponent, 1 of mantissa.
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0,
                -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Values of FP8 (e4m3fn): sign, 4 bits of exponent, 3 of mantissa; 0 in place of NaN.
E4M3_NUMBERS = tuple(
    (-1.0) ** (bits >> 7) * ((bits & 7) / 512 if not bits & 0x78 else
                             (8 + (bits & 7)) * 2.0 ** ((bits >> 3 & 15) - 10))
    if bits & 0x7F != 0x7F else 0.0 for bits in range(256))
# Scales of 8 bits (e8m0): an exponent, 127 for 1; 255 is NaN and excluded.
E8M0_NUMBERS = tuple(2.0 ** (bits - 127) for bits in range(255))


@dataclass(frozen=True, kw_only=True)
class CodeType:
    """Encoding of a quantized weight's values.

    Args:
        bits: of a code, 4 or 8; two 4-bit codes share a byte.
        zero_point: of all codes; None: each group has a zero point or a minimum.
        numbers: the value of each code, before its scale; empty: the code less the zero point.
        int8_factor: the values times this are 8-bit integers; 0: they are not.
        scale_dtype: of scales; a float8_e8m0fnu is stored as uint8.
        group_size: the only allowed one; None: any.
        linear_layers: kernels of linear layers support it, not only those of experts.
        rounding: `--quantize` produces it; otherwise only checkpoints have it.
    """

    bits: int
    zero_point: int | None
    numbers: tuple[float, ...] = ()
    int8_factor: int = 0
    scale_dtype: str = "float32"
    group_size: int | None = None
    linear_layers: bool = True
    rounding: bool = True

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def precision(self) -> int:
        """Effective bits for quantization loss: 8 for lossless code types."""
        return self.bits if self.rounding else 8


CODE_TYPES: Mapping[str, CodeType] = {
    "int4": CodeType(bits=4, zero_point=8),
    "uint4": CodeType(bits=4, zero_point=None),
    "int8": CodeType(bits=8, zero_point=128),
    "uint8": CodeType(bits=8, zero_point=None, rounding=False),
    "float8_e4m3fn": CodeType(bits=8, zero_point=0, numbers=E4M3_NUMBERS),
    "mxfp4": CodeType(bits=4, zero_point=0, numbers=E2M1_NUMBERS, int8_factor=2,
                      scale_dtype="float8_e8m0fnu", group_size=32, linear_layers=False,
                      rounding=False),
}
LINEAR_CODE_TYPES = tuple(name for name, own in CODE_TYPES.items() if own.linear_layers)
