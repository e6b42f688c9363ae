"""GGUF's blocks as codes, scales and zeros or minima, bit-identical to gguf.quants.

    Q4_0 Q5_0 Q8_0   32 values: a float16 scale, codes with zero point 8, 16, 0
    Q4_1 Q5_1        32 values: a float16 scale and minimum, unsigned codes
    Q4_K Q5_K        256 values, eight groups: a float16 scale and minimum, each times 6 bits
    Q6_K             256 values, sixteen groups: a float16 scale times 8 bits; zero point 32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.codes import in_pieces
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError

Rows = Callable[[int, int], np.ndarray]  # reads rows start to stop as uint8 [rows, nbytes]


@dataclass(frozen=True)
class _Parts:
    """Decoded blocks [n, nbytes]: codes [n, numbers], scales and minima [n, groups]."""

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None


@dataclass(frozen=True)
class _Form:
    """A block type.

    Args:
        dtype: of the codes that `parts` returns.
        numbers: values in a block.
        nbytes: bytes of a block.
        groups: in a block.
        parts: decodes blocks.
        zero: zero point of all codes, if the dtype has no fixed one.
    """

    dtype: str
    numbers: int
    nbytes: int
    groups: int
    parts: Callable[[np.ndarray], _Parts]
    zero: int | None = None


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at an offset of each block, float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at:at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """Codes [n, 2 · bytes]: the low nibbles of each run of bytes, then the high ones."""
    runs = packed.reshape(len(packed), -1, run)
    return np.concatenate([runs & 15, runs >> 4], -1).reshape(len(packed), -1)


def _fifth(bits: np.ndarray) -> np.ndarray:
    """The fifth bits of codes, from 4 bytes: 16 or 0, uint8 [n, 32]."""
    return np.unpackbits(bits, axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth(blocks[:, 2:6])
    return _Parts(codes + np.uint8(128 - 16), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth(blocks[:, 4:8])
    return _Parts(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> _Parts:
    return _Parts(blocks[:, 2:] ^ np.uint8(128), _halves(blocks, 0))


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and minima of Q4_K and Q5_K."""
    low, other, high = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], 1)
    minima = np.concatenate([other & 63, (high >> 4) | (other >> 2 & 48)], 1)
    return (_halves(blocks, 0) * scales.astype(np.float32),
            -(_halves(blocks, 2) * minima.astype(np.float32)))


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _Parts(_nibbles(blocks[:, 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> _Parts:
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _nibbles(blocks[:, 48:], 32) | (fifth << 4).reshape(len(blocks), -1)
    return _Parts(codes, *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _Parts(low | ((pairs & 3) << 4).reshape(len(blocks), -1), _halves(blocks, 208) * scales)


_FORMS: Mapping[str, _Form] = {
    "Q4_0": _Form("int4", 32, 18, 1, _q4_0), "Q4_1": _Form("uint4", 32, 20, 1, _q4_1),
    "Q5_0": _Form("int8", 32, 22, 1, _q5_0), "Q5_1": _Form("uint8", 32, 24, 1, _q5_1),
    "Q8_0": _Form("int8", 32, 34, 1, _q8_0), "Q4_K": _Form("uint4", 256, 144, 8, _q4_k),
    "Q5_K": _Form("uint8", 256, 176, 8, _q5_k), "Q6_K": _Form("uint8", 256, 210, 16, _q6_k, 32)}


def form_of(kind: str, shape: tuple[int, int], name: str, rows: Rows) -> Stored | None:
    """A matrix stored in blocks of a type; None if llmc has no storage format for the type.

    Raises:
        LlmcError: on reading a scale or minimum that is NaN or infinite.
    """
    form = _FORMS.get(kind)
    if form is None:
        return None
    per_row = shape[1] // form.numbers
    grouped = (shape[0], per_row * form.groups)

    def parts(start: int, stop: int) -> _Parts:
        return form.parts(rows(start, stop).reshape(-1, form.nbytes))

    def codes(start: int, stop: int) -> np.ndarray:
        return parts(start, stop).codes.reshape(stop - start, shape[1])

    def checked(values: np.ndarray, start: int, stop: int) -> np.ndarray:
        if not np.isfinite(values).all():
            raise LlmcError(f"tensor '{name}' has scales that are NaN or infinite; the file is "
                            f"damaged")
        return values.reshape(stop - start, grouped[1])

    def scales(start: int, stop: int) -> np.ndarray:
        return checked(parts(start, stop).scales, start, stop)

    def minima(start: int, stop: int) -> np.ndarray:
        values = parts(start, stop).minima
        assert values is not None
        return checked(values, start, stop)

    has_minima = form.parts(np.zeros((1, form.nbytes), np.uint8)).minima is not None
    zero = form.zero
    return Stored(
        form.dtype, Weight(shape, np.uint8, in_pieces(codes, shape[1]), name),
        Weight(grouped, np.float32, in_pieces(scales, shape[1]), name),
        None if zero is None else Weight(grouped, np.uint8, lambda start, stop: np.full(
            (stop - start, grouped[1]), zero, np.uint8), name),
        Weight(grouped, np.float32, in_pieces(minima, shape[1]), name) if has_minima else None)
