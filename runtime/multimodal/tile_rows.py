"""Rows of an image that is cut into tiles: transformers' `pack_image_features`.

    tiles        overview, then the canvas row by row: side x side rows of features each
    canvas       the tiles joined, without the rows and columns that are padding
    resized      to at most `max_num_patches` tiles, by bilinear interpolation; 0: never
    rows         the overview, then each line of the canvas and a separator

Each row of the prompt is a weighted sum of rows of features. The separator is the last of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.multimodal.image_processors.anyres import best_canvas
from llmc.runtime.multimodal.image_processors.base import Dims

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float32]


def tile_rows(arrays: Mapping[str, np.ndarray], *, tile: int, side: int, max_num_patches: int,
              pinpoints: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """Compute which rows of features become rows of the prompt.

    Args:
        arrays: `pixel_values` [1, tiles, ...] and `image_sizes` [1, 2], before preprocessing.
        tile: side of a tile in pixels.
        side: side of a tile in rows of features.
        max_num_patches: see above.
        pinpoints: heights and widths of canvases.

    Returns:
        indices int64 [num_rows, 1]; with `max_num_patches` indices [num_rows, 4] and weights
        float32 [num_rows, 4].
    """
    separator = arrays["pixel_values"].shape[1] * side ** 2
    overview = np.arange(side ** 2)[:, None]
    if separator == len(overview):
        indices = np.append(overview, [[separator]], 0)
        return _padded(indices, np.ones(indices.shape, np.float32), max_num_patches)
    image = Dims(*(int(own) for own in arrays["image_sizes"][0]))
    canvas = best_canvas(image, tuple((high, wide) for high, wide in pinpoints))
    grid = _grid(canvas.height // tile, canvas.width // tile, side)
    top, left = unpadded(image, Dims(*grid.shape))
    lines: NDArray[Any] = grid[top:grid.shape[0] - top, left:grid.shape[1] - left, None]
    weights: NDArray[Any] = np.ones(lines.shape, np.float32)
    ratio = math.sqrt(lines.size / (max_num_patches * side ** 2)) if max_num_patches else 0
    if ratio > 1.1:
        lines, weights = _resized(lines[..., 0], ratio)
    ends = np.full((len(lines), 1, lines.shape[-1]), separator)
    first = np.zeros(ends.shape, np.float32)
    first[..., 0] = 1
    lines, weights = (np.concatenate(each, 1).reshape(-1, lines.shape[-1])
                      for each in ((lines, ends), (weights, first)))
    own, ones = (np.pad(each, ((0, 0), (0, lines.shape[1] - 1))) for each in (
        overview, np.ones(overview.shape, np.float32)))
    return _padded(np.concatenate([own, lines]), np.concatenate([ones, weights]), max_num_patches)


def unpadded(image: Dims, grid: Dims) -> tuple[int, int]:
    """Rows at the top and columns on the left of a canvas that are padding.

    Args:
        image: its height and width.
        grid: the canvas's.
    """
    if image.width / image.height > grid.width / grid.height:
        return (grid.height - int(round(image.height * (grid.width / image.width), 7))) // 2, 0
    return 0, (grid.width - int(round(image.width * (grid.height / image.height), 7))) // 2


def _grid(high: int, wide: int, side: int) -> _Ints:
    """Row of features of each place on a canvas of `high` x `wide` tiles."""
    rows, columns = np.indices((high * side, wide * side))
    tiles = 1 + rows // side * wide + columns // side
    return np.asarray((tiles * side + rows % side) * side + columns % side)


def _resized(grid: _Ints, ratio: float) -> tuple[_Ints, _Floats]:
    """Bilinear interpolation to smaller sides: indices and weights [height, width, 4]."""
    (low, high, down), (left, right, across) = (_sources(size, int(size // ratio))
                                                for size in grid.shape)
    indices = np.stack([grid[own][:, other] for own in (low, high) for other in (left, right)], -1)
    weights = np.stack([own[:, None] * other for own in (1 - down, down)
                        for other in (1 - across, across)], -1)
    return indices, weights.astype(np.float32)


def _sources(size: int, target: int) -> tuple[_Ints, _Ints, _Floats]:
    """The places before and after each of `target` places on an axis, and the latter's weight."""
    scale = np.float32(size) / np.float32(target)
    places = np.maximum(scale * (np.arange(target, dtype=np.float32) + np.float32(0.5))
                        - np.float32(0.5), 0)
    first = places.astype(np.int64)
    return first, np.minimum(first + 1, size - 1), (places - first).astype(np.float32)


def _padded(indices: Any, weights: Any, max_num_patches: int) -> tuple[np.ndarray, ...]:
    """Pad to four rows of features with weight 0, or leave out weights that are all 1."""
    if not max_num_patches:
        return (np.asarray(indices, np.int64),)
    missing = ((0, 0), (0, 4 - indices.shape[1]))
    return np.pad(indices, missing).astype(np.int64), np.pad(weights, missing).astype(np.float32)
