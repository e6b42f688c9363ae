"""Quantization of arrays: scales and zero points, encoding, decoding."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from llmc.errors import LlmcError
from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.quantization import FLOAT8, FLOAT8_MOST

_PIECE = 1 << 20  # elements computed at once
NUMBERS = {name: np.array(own.numbers, np.float32)
           for name, own in CODE_TYPES.items() if own.numbers}


def scales_of(groups: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points of groups, for which codes use their whole range.

    Args:
        groups: float32 [..., group_size].
        dtype: a code type.

    Returns:
        Both float32 [...].
    """
    code_type = CODE_TYPES[dtype]
    bits, fixed = code_type.bits, code_type.zero_point
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
    return _nonzero(extreme / np.float32(-8)), zeros  # -8 has no positive counterpart: the extreme


def _nonzero(scales: np.ndarray) -> np.ndarray:
    """Scales with 1 in place of 0, the scale of all-zero groups."""
    return np.where(scales == 0, np.float32(1), scales)


def encode(groups: np.ndarray, scales: np.ndarray, zeros: np.ndarray, dtype: str) -> np.ndarray:
    """Round groups [..., group_size] to the nearest codes, uint8."""
    scaled = groups / scales[..., None]
    if dtype == FLOAT8:
        clipped = np.clip(scaled, -FLOAT8_MOST, FLOAT8_MOST)
        codes: np.ndarray = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return codes
    codes = np.clip(np.rint(scaled) + zeros[..., None], 0, 2 ** CODE_TYPES[dtype].bits - 1)
    return codes.astype(np.uint8)


def decode(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, dtype: str) -> np.ndarray:
    """Dequantize codes [..., group_size] to float32."""
    numbers = NUMBERS[dtype][codes] if dtype in NUMBERS else \
        codes.astype(np.float32) - zeros[..., None]
    scaled: np.ndarray = numbers * scales[..., None]
    return scaled


def check_finite(groups: np.ndarray, dtype: str, name: str) -> None:
    """Check that groups [..., group_size] of a weight have scales in float32.

    Raises:
        LlmcError: there are NaN or infinities, or the range of a group exceeds float32.
    """
    if not np.isfinite(groups).all():
        raise LlmcError(f"'{name}' has NaN or infinities, which cannot be quantized")
    if CODE_TYPES[dtype].zero_point is None:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        wide = high.astype(np.float64) - low > np.finfo(np.float32).max
        if wide.any():
            raise LlmcError(f"'{name}' has values in one group from {low[wide][0]:.2g} to "
                            f"{high[wide][0]:.2g}, too far apart for zeros; give int4 or int8")


def in_pieces(rows: Callable[[int, int], np.ndarray], width: int) -> \
        Callable[[int, int], np.ndarray]:
    """Call `rows` for a few rows of a matrix at a time, to bound its memory.

    Args:
        rows: computes rows from start to stop.
        width: of the matrix.
    """
    step = max(1, _PIECE // width)
    return lambda start, stop: np.concatenate(
        [rows(low, min(low + step, stop)) for low in range(start, stop, step)])
