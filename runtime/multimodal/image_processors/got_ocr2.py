"""Processors of GOT-OCR2, which InternVL and Aya Vision use, and of Command A Vision (Cohere 2).

    image → resize to a grid of tiles → tiles of one size
    image → resize to a tile, if there are several tiles: the thumbnail, which follows them
    → normalize → pixel_values [tiles (+ 1), 3, H, W]

GOT-OCR2 has the grid whose aspect ratio is nearest, Cohere 2 that of the least upscaling.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from llmc.runtime.multimodal.image_processors.base import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    Arrays,
    Dims,
    ImageProcessor,
    Positive,
    Size,
    dims_of,
    split_to_tiles,
)
from llmc.runtime.multimodal.resampling import Pixels


class GotOcr2ImageProcessor(ImageProcessor):
    default_to_square: ClassVar[bool] = True

    image_processor_type: Literal["GotOcr2ImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(height=384, width=384)
    crop_to_patches: bool = False
    min_patches: Positive = 1
    max_patches: Positive = 12

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.crop_to_patches:
            return {"pixel_values": self.normalize(self._tiles(image))}
        if self.do_resize:
            image = self.resize(image, self.size.fit(dims_of(image)))
        return {"pixel_values": self.normalize(image)[None]}

    def _tiles(self, image: Pixels) -> Pixels:
        size = self.size.dims()
        columns, rows = self._grid(dims_of(image), size)
        resized = self.resize(image, Dims(size.height * rows, size.width * columns))
        tiles = split_to_tiles(resized, rows, columns)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, self.resize(image, size)[None]])

    def _grid(self, dims: Dims, tile: Dims) -> tuple[int, int]:
        """Columns and rows of the nearest aspect ratio, with more tiles for a large image."""
        most = self.max_patches
        grids = sorted(((columns, rows) for columns in range(1, most + 1)
                        for rows in range(1, most // columns + 1)
                        if columns * rows >= self.min_patches), key=math.prod)
        best, nearest = (1, 1), math.inf
        for grid in grids:
            distance = abs(dims.width / dims.height - grid[0] / grid[1])
            large = dims.width * dims.height > 0.5 * tile.height * tile.width * math.prod(grid)
            if distance < nearest:
                best, nearest = grid, distance
            elif distance == nearest and large:
                best = grid
        return best


class Cohere2VisionImageProcessor(GotOcr2ImageProcessor):
    image_processor_type: Literal["Cohere2VisionImageProcessor"]  # type: ignore[assignment]
    size: Size = Size(height=512, width=512)
    crop_to_patches: bool = True
    patch_size: Positive = 16  # rows and columns of a tile in the prompt

    def _grid(self, dims: Dims, tile: Dims) -> tuple[int, int]:
        """Columns and rows of the least upscaling, else of the least downscaling."""
        most = self.max_patches
        grids = sorted(((columns, rows) for columns in range(1, most + 1)
                        for rows in range(1, most // columns + 1)), key=math.prod)
        scales = (np.array(grids) * tile.height / np.array([dims.width, dims.height])).min(1)
        return grids[int(np.argmax(scales))] if np.all(scales < 1) else \
            grids[int(np.argmin(np.where(scales < 1, 1e10, scales)))]
