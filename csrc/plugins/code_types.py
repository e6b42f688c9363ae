"""Code types: the one table of what the codes of quantized weights are.

A code type says how many bits a code has and which number it stands for. A `weight_dtype` names
one, in an op's fields and in model_info.json. `llmc.plugins.quantization` says how codes, scales
and zero points lie in memory; a target's kernels say which code types they read. NVFP4, NF4 and
GGUF's blocks are no code types: their readers make them ones of these, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Numbers of FP4 (e2m1): sign, 2 bits of exponent, 1 of mantissa.
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0,
                -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Numbers of FP8 (e4m3fn): sign, 4 bits of exponent, 3 of mantissa; 0 in place of NaN.
E4M3_NUMBERS = tuple(
    (-1.0) ** (bits >> 7) * ((bits & 7) / 512 if not bits & 0x78 else
                             (8 + (bits & 7)) * 2.0 ** ((bits >> 3 & 15) - 10))
    if bits & 0x7F != 0x7F else 0.0 for bits in range(256))
# Scales of 8 bits (e8m0): an exponent, 127 for 1; 255 is NaN and not among them.
E8M0_NUMBERS = tuple(2.0 ** (bits - 127) for bits in range(255))


@dataclass(frozen=True, kw_only=True)
class CodeType:
    """A type of codes.

    Args:
        bits: of a code, 4 or 8; two codes of 4 share a byte.
        zero_point: of all codes; None: each group has a zero point, or a minimum, of its own.
        numbers: the number of each code, before its scale; empty: the code less the zero point.
        int8_factor: the numbers times this are integers of 8 bits; 0: they are not.
        scale_dtype: of scales; a float8_e8m0fnu is stored as uint8.
        group_size: the only one; None: any.
        linear_layers: kernels of linear layers read it, not only those of experts.
        rounding: `--quantize` rounds to it; else checkpoints bring it, and nothing is lost.
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
        """The bits that the loss of quantization goes by: 8 where nothing is rounded."""
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
