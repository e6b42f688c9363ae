"""GOT-OCR2's processor, which InternVL uses: tiles of one size, and a thumbnail after them.

    image → resize to the grid of tiles whose aspect ratio is nearest → tiles
    image → resize to a tile, if there are several tiles: the thumbnail, which comes last
    → normalize → pixel_values [tiles (+ 1), 3, H, W]
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
