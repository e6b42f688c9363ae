"""Codes packed in 32-bit words, the first in the lowest bits, and signed codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmc.compiler.graph.weights import Weight


def map_rows(weight: Weight, shape: Sequence[int], dtype: np.dtype | type,
             function: Callable[[np.ndarray], np.ndarray]) -> Weight:
    """A weight with a function applied to each block of rows when it is read."""
    return Weight(shape, dtype, lambda start, stop: function(weight.rows(start, stop)), weight.name)


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [rows, n · 32 / bits] from words int32 [rows, n]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2 ** bits - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def int8_codes(signed: Weight) -> Weight:
    """Codes uint8 of signed int8 values, offset by 128."""
    return map_rows(signed, signed.shape, np.uint8,
                    lambda values: (values.astype(np.int16) + 128).astype(np.uint8))
