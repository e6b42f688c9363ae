"""Llama's processors: tiles of a canvas.

    Llama 4: image → resize into the best canvas → pad → tiles; several tiles are followed by the
             image resized to one → normalize in bfloat16
             → pixel_values [tiles (+ 1), 3, H, W], aspect_ratios [1, 2]
    mllama:  image → resize into the best canvas → pad → tiles → normalize, padded with zeros
             → pixel_values [1, 1, max_image_tiles, 3, H, W], aspect_ratio_ids [1, 1],
             aspect_ratio_mask [1, 1, max_image_tiles], num_tiles [1, 1]

Llama 4's values are float32 here; each is a bfloat16.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError
from llmc.runtime.multimodal import resampling
from llmc.runtime.multimodal.image_processors.base import (
    Arrays,
    Dims,
    Floats,
    ImageProcessor,
    Positive,
    Size,
    dims_of,
    pad,
    split_to_tiles,
    unsupported,
)
from llmc.runtime.multimodal.resampling import Pixels


class Llama4ImageProcessor(ImageProcessor):
    image_processor_type: Literal["Llama4ImageProcessor"]
    resample: int = resampling.BILINEAR
    size: Size = Size(height=336, width=336)
    max_patches: Positive = 16
    resize_to_max_canvas: bool = False

    def process(self, image: Pixels, num_images: int) -> Arrays:
        tile, dims = _square(self.size), dims_of(image)
        if not self.do_resize:
            raise unsupported("do_resize", False, "the class always resizes")
        canvas = self._canvas(dims, tile.height)
        target = canvas if self.resize_to_max_canvas else Dims(
            *(min(max(own, tile.height), side) for own, side in zip(dims, canvas, strict=True)))
        fitted = _fit_inside(dims, target)
        image_on_canvas = pad(self.resize(image, fitted), 0, canvas.height - fitted.height,
                              0, canvas.width - fitted.width)
        rows, columns = canvas.height // tile.height, canvas.width // tile.width
        tiles = split_to_tiles(image_on_canvas, rows, columns)
        if rows * columns > 1:
            tiles = np.concatenate([tiles, self.resize(image, tile)[None]])
        return {"pixel_values": self.normalize(tiles),
                "aspect_ratios": np.array([[rows, columns]], np.int64)}

    def levels(self) -> Floats:
        if not self.do_rescale or not self.do_normalize:
            return super().levels()
        values = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(self.rescale_factor))
        mean, std = (_bfloat16(np.array(own, np.float32))[:, None]
                     for own in (self.image_mean, self.image_std))
        return _bfloat16(_bfloat16(values - mean) / std)

    def _canvas(self, dims: Dims, side: int) -> Dims:
        """The canvas of the smallest upscaling, else of the least downscaling; then the smallest.
        """
        canvases = np.array(_canvases_of_tiles(self.max_patches)) * side
        # As torch does: int64 / int is float32.
        high, wide = ((canvases[:, axis].astype(np.float32) / np.float32(own))
                      for axis, own in enumerate(dims))
        scales = np.where(high > wide, wide, high)
        larger = scales[scales >= 1]
        if len(larger):
            best = larger.max() if self.resize_to_max_canvas else larger.min()
        else:
            best = scales.max()
        return _smallest(canvases[scales == best])


class MllamaImageProcessor(ImageProcessor):
    image_processor_type: Literal["MllamaImageProcessor"]
    resample: int = resampling.BILINEAR
    size: Size = Size(height=224, width=224)
    max_image_tiles: Positive = 4

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if not self.do_resize:
            raise unsupported("do_resize", False, "the class always resizes")
        tile, dims, most = _square(self.size), dims_of(image), self.max_image_tiles
        arrangements = [(rows, columns) for rows in range(1, most + 1)
                        for columns in range(1, most // rows + 1)]
        canvas = _best_scale(dims, np.array(arrangements) * tile.height)
        fitted = self._fit(dims, canvas, tile.height)
        padded = pad(self.resize(image, fitted), 0, canvas.height - fitted.height,
                     0, canvas.width - fitted.width)
        grid = canvas.height // tile.height, canvas.width // tile.width
        tiles = self.normalize(split_to_tiles(padded, *grid))
        values = np.zeros((most, *tiles.shape[1:]), np.float32)
        values[:len(tiles)] = tiles
        mask = (np.arange(most) < len(tiles)).astype(np.int64)
        return {"pixel_values": values[None, None], "aspect_ratio_mask": mask[None, None],
                "aspect_ratio_ids": np.array([[arrangements.index(grid) + 1]], np.int64),
                "num_tiles": np.array([[len(tiles)]], np.int64)}

    def _fit(self, dims: Dims, canvas: Dims, tile: int) -> Dims:
        """Fit into the canvas; an image smaller than a tile grows to it."""
        target = Dims(*(min(max(own, tile), side) for own, side in zip(dims, canvas, strict=True)))
        return _fit_inside(dims, target)


def _square(size: Size) -> Dims:
    dims = size.dims()
    if dims.height != dims.width:
        raise LlmcError(f"the size of the image processor is {dims.height} x {dims.width}; a "
                        f"square is expected")
    return dims


def _fit_inside(dims: Dims, target: Dims) -> Dims:
    """The largest dims of this aspect ratio within `target`, at least 1."""
    wide, high = target.width / dims.width, target.height / dims.height
    if wide < high:
        return Dims(max(min(math.floor(dims.height * wide), target.height), 1), target.width)
    return Dims(target.height, max(min(math.floor(dims.width * high), target.width), 1))


def _canvases_of_tiles(most: int) -> list[tuple[int, int]]:
    """Rows and columns of 1 to `most` tiles, in transformers' order: by ratio, as first met."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return [own for each in by_ratio.values() for own in each]


def _best_scale(dims: Dims, canvases: NDArray[np.int64]) -> Dims:
    """The canvas of the smallest upscaling, else of the least downscaling; then the smallest."""
    high, wide = canvases[:, 0] / dims.height, canvases[:, 1] / dims.width
    scales = np.where(wide > high, high, wide)
    larger = scales[scales >= 1]
    best = larger.min() if len(larger) else scales.max()
    return _smallest(canvases[scales == best])


def _smallest(canvases: NDArray[np.int64]) -> Dims:
    height, width = canvases[np.argmin(canvases[:, 0] * canvases[:, 1])]
    return Dims(int(height), int(width))


def _bfloat16(values: Floats) -> Floats:
    """Round to bfloat16, ties to even; the values are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    return (rounded & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
