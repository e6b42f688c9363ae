"""Inputs of an image encoder that are computed from the arrays of a processor.

| function of transformers' `vision_utils`, of the grids of images' patches | results |
| --- | --- |
| get_vision_cu_seqlens | starts and ends of the frames, between which attention does not look |
| get_vision_position_ids | rows and columns of patches, for a rotary embedding |
| get_vision_window_index | order of patches by window, and the windows' starts and ends |
| get_vision_interpolation_indices_and_weights | rows of a learned position table, and weights |

`pack_image_features` is a method of models that cut an image into tiles; see `tile_rows`.

All are equal to transformers'; weights of interpolation within rounding of float32. Patches are in
blocks of `spatial_merge_size` x `spatial_merge_size`, which become one row of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.vision_input import GRID, PACK, VisionInput
from llmc.runtime.multimodal.tile_rows import tile_rows

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float32]


def of_arrays(given: VisionInput, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute inputs from what a processor gives for one image.

    Args:
        given: their function and names.
        arrays: see `MediaItem`.
    """
    if given.function == PACK:
        results = tile_rows(arrays, **dict[str, Any](given.arguments))
        return dict(zip(given.names, results, strict=True))
    return compute(given, arrays[GRID])


def compute(given: VisionInput, grid_thw: _Ints) -> dict[str, np.ndarray]:
    """Compute inputs.

    Args:
        given: their function and names.
        grid_thw: int64 [num_images, 3], frames, rows and columns of patches.
    """
    results = _FUNCTIONS[given.function](grid_thw, **dict[str, Any](given.arguments))
    return dict(zip(given.names, results, strict=True))


def _cu_seqlens(grid_thw: _Ints, merge_temporal: bool = False) -> Sequence[np.ndarray]:
    lengths = grid_thw.prod(1) if merge_temporal else \
        np.repeat(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
    return (np.cumsum([0, *lengths], dtype=np.int32),)


def _blocks(grid: _Ints, merge: int) -> tuple[_Ints, _Ints, _Ints]:
    """Frame, row and column of each patch of an image, [num_patches] each, in block order."""
    frames, rows, columns = grid.tolist()
    shape = frames, rows // merge, columns // merge, merge, merge
    t, i, j, k, m = (axis.reshape(-1) for axis in np.indices(shape))
    return t, i * merge + k, j * merge + m


def _position_ids(grid_thw: _Ints, spatial_merge_size: int, include_temporal: bool = False) -> \
        Sequence[np.ndarray]:
    places = [np.stack(_blocks(grid, spatial_merge_size)[0 if include_temporal else 1:], -1)
              for grid in grid_thw]
    return (np.concatenate(places),)


def _window_index(grid_thw: _Ints, spatial_merge_size: int, window_size: int, patch_size: int) -> \
        Sequence[np.ndarray]:
    side = window_size // spatial_merge_size // patch_size
    order, lengths, first = list[np.ndarray](), list[np.ndarray](), 0
    for frames, rows, columns in grid_thw.tolist():
        shape = frames, rows // spatial_merge_size, columns // spatial_merge_size
        t, i, j = (axis.reshape(-1) for axis in np.indices(shape))
        per_row = shape[2] // side + 1
        window = (t * (shape[1] // side + 1) + i // side) * per_row + j // side
        order.append(np.argsort(window, kind="stable") + first)
        lengths.append(np.unique(window, return_counts=True)[1])
        first += window.size
    ends = np.cumsum(np.concatenate(lengths)) * spatial_merge_size**2
    return np.concatenate(order), np.array([0, *ends], np.int32)


def _sources(index: _Ints, size: int, side: int, mode: str, align_corners: bool, padding: str) -> \
        tuple[_Ints, _Floats]:
    """Source rows of positions on an axis of `side` rows, and weights, both [n, 2 or 4]."""
    places = index.astype(np.float32)
    if align_corners:
        source = places * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        source = (places + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    floor = np.floor(source)
    offsets = np.arange(0, 2) if mode == "bilinear" else np.arange(-1, 3)
    raw = floor.astype(np.int64)[:, None] + offsets
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    if mode == "bilinear":
        weights = np.maximum(1 - distance, 0)
    else:
        near = (np.float32(1.25) * distance - np.float32(2.25)) * distance * distance + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weights = np.where(distance <= 1, near, far)
    if padding == "zeros":
        weights = weights * ((raw >= 0) & (raw < side))
    return raw.clip(0, side - 1), weights.astype(np.float32)


def _interpolation(grid_thw: _Ints, num_grid_per_side: int, mode: str = "bilinear",
                   align_corners: bool = False, spatial_merge_size: int = 1,
                   padding: str = "border") -> Sequence[np.ndarray]:
    indices, weights = list[np.ndarray](), list[np.ndarray]()
    for grid in grid_thw:
        _, rows, columns = _blocks(grid, spatial_merge_size)
        (high, high_weights), (wide, wide_weights) = (
            _sources(places, int(size), num_grid_per_side, mode, align_corners, padding)
            for places, size in ((rows, grid[1]), (columns, grid[2])))
        count = high.shape[1] ** 2
        indices.append((high[:, :, None] * num_grid_per_side + wide[:, None]).reshape(-1, count))
        weights.append((high_weights[:, :, None] * wide_weights[:, None]).reshape(-1, count))
    return np.concatenate(indices), np.concatenate(weights)


_FUNCTIONS: Mapping[str, Callable[..., Sequence[np.ndarray]]] = {
    "get_vision_cu_seqlens": _cu_seqlens, "get_vision_position_ids": _position_ids,
    "get_vision_window_index": _window_index,
    "get_vision_interpolation_indices_and_weights": _interpolation}
