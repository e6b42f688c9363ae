"""Antialiased resampling of 8-bit images, equal to torchvision's on CPUs.

transformers' image processors resize uint8 tensors with `torch.nn.functional.interpolate(...,
antialias=True)`. On CPUs with AVX2, and on Arm, its weights are 16-bit fixed-point numbers.
Pillow's filters are the same with weights of 22 bits, so that pixels differ by 1 of 255. This
module computes with torch's weights and rounding:

| filter | support | pixels that differ from torch's |
| --- | --- | --- |
| bilinear | 1 | none |
| bicubic (a = -0.5) | 2 | none |
| lanczos | 3 | none |

A pass over one axis is a product with a banded matrix. It is done in floating point by blocks of
columns, without rounding: the sums are integers that the type represents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Values of PIL.Image.Resampling, as in preprocessor_config.json.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
_MAX_WEIGHT = 1 << 15  # of a 16-bit weight
_MAX_PRECISION = 22  # bits, if all weights are small
_BLOCK = 128  # output columns per product; wider bands multiply more zeros
_EXACT_FLOAT32 = 1 << 24  # integers up to it are float32


def _bilinear(x: Floats) -> Floats:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: Floats) -> Floats:
    a = -0.5
    x = np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = ((x - 5.0) * x + 8.0) * x * a - 4.0 * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), np.sinc(x) * np.sinc(x / 3.0), 0.0)


_FILTERS: dict[int, tuple[float, Callable[[Floats], Floats]]] = {
    BILINEAR: (1.0, _bilinear), BICUBIC: (2.0, _bicubic), LANCZOS: (3.0, _lanczos)}


class _Block(NamedTuple):
    """A product that computes output columns from a range of input columns."""

    inputs: slice
    outputs: slice
    weights: NDArray[np.floating]  # [inputs, outputs], integers


class _Axis(NamedTuple):
    """The passes over one axis; sums are weighted by 2**precision."""

    blocks: tuple[_Block, ...]
    precision: int


def resize(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Resize an image.

    Args:
        image: [channels, height, width].
        resample: filter, a value of `PIL.Image.Resampling`.
    """
    if width != image.shape[2]:
        image = _resample(image, width, resample)
    if height != image.shape[1]:
        image = _resample(image.swapaxes(1, 2), height, resample).swapaxes(1, 2)
    return np.ascontiguousarray(image)


def _resample(image: Pixels, size: int, resample: int) -> Pixels:
    """Resize the last axis."""
    channels, rows, own = image.shape
    axis = _axis(own, size, resample)
    result = np.empty((channels, rows, size), np.uint8)
    for block in axis.blocks:
        sums = image[:, :, block.inputs].astype(block.weights.dtype) @ block.weights
        sums *= 0.5 ** axis.precision
        sums += 0.5
        np.floor(sums, out=sums)
        np.clip(sums, 0, 255, out=sums)
        result[:, :, block.outputs] = sums
    return result


@lru_cache(maxsize=64)
def _axis(own: int, size: int, resample: int) -> _Axis:
    """Compute the fixed-point weights of one axis."""
    support, function = _FILTERS[resample]
    scale = own / size
    support, inverse = (support * scale, 1.0 / scale) if scale >= 1.0 else (support, 1.0)
    centers = scale * (np.arange(size) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centers + support + 0.5).astype(np.int64), own) - first
    taps = int(count.max())
    weights = np.zeros((size, taps))
    total = np.zeros(size)
    for tap in range(taps):  # in torch's order of additions
        weights[:, tap] = np.where(
            tap < count, function((tap + first - centers + 0.5) * inverse), 0.0)
        total += weights[:, tap]
    weights /= np.where(total == 0.0, 1.0, total)[:, None]
    largest, precision = float(weights.max()), 0
    while precision < _MAX_PRECISION and \
            int(0.5 + largest * (1 << (precision + 1))) < _MAX_WEIGHT:
        precision += 1
    scaled = weights * (1 << precision)
    rounded = np.trunc(np.where(scaled < 0, scaled - 0.5, scaled + 0.5))
    exact = 255 * float(np.abs(rounded).sum(axis=1).max()) + (1 << precision) < _EXACT_FLOAT32
    dtype = np.float32 if exact else np.float64
    return _Axis(tuple(_block(first, count, rounded, start, min(start + _BLOCK, size), dtype)
                       for start in range(0, size, _BLOCK)), precision)


def _block(first: NDArray[np.int64], count: NDArray[np.int64], rounded: Floats, start: int,
           end: int, dtype: type[np.floating]) -> _Block:
    low = int(first[start:end].min())
    high = int((first[start:end] + count[start:end]).max())
    weights = np.zeros((high - low, end - start), dtype)
    for column in range(start, end):
        offset = int(first[column]) - low
        taps = int(count[column])
        weights[offset:offset + taps, column - start] = rounded[column, :taps]
    return _Block(slice(low, high), slice(start, end), weights)
