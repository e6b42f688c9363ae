"""Processors of Idefics3 and SmolVLM: tiles of one size, and the whole image after them.

    image → resize, the longer side to `longest_edge` → resize to whole tiles → tiles
    the same → resize to a tile: the global image, which comes last
    → normalize → pixel_values [1, tiles + 1, 3, H, W], pixel_attention_mask [1, tiles + 1, H, W],
    rows [1, 1], cols [1, 1]

transformers pads the images of a batch to one number of tiles; here each has its own, and the mask
is 1 everywhere.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.multimodal import resampling
from llmc.runtime.multimodal.image_processors.base import (
    Arrays,
    Dims,
    ImageProcessor,
    Size,
    dims_of,
    split_to_tiles,
)
from llmc.runtime.multimodal.resampling import Pixels

_MAX_SIDE = 4096  # of the resized image, in both classes


class Idefics3ImageProcessor(ImageProcessor):
    image_processor_type: Literal["Idefics3ImageProcessor", "SmolVLMImageProcessor"]
    resample: int = resampling.LANCZOS
    size: Size = Size(longest_edge=4 * 364)
    max_image_size: Size = Size(longest_edge=364)
    do_image_splitting: bool = True

    @property
    def _tile(self) -> Dims:
        edge = self.max_image_size.longest_edge
        if edge is None:
            raise LlmcError(f"max_image_size of the image processor is "
                            f"{self.max_image_size.model_dump(exclude_none=True)}; "
                            f"a longest_edge is expected")
        return Dims(edge, edge)

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_resize:
            edge = self.size.longest_edge
            image = self.resize(image, self.size.dims() if edge is None else
                                _fit_longest(dims_of(image), edge))
        images, rows, columns = self._split(image) if self.do_image_splitting else \
            (self.resize(image, self._tile)[None], 0, 0)
        values = self.normalize(images)
        mask = np.ones((*values.shape[:1], *values.shape[2:]), np.int64)
        return {"pixel_values": values[None], "pixel_attention_mask": mask[None],
                "rows": np.array([[rows]], np.int64), "cols": np.array([[columns]], np.int64)}

    def _split(self, image: Pixels) -> tuple[Pixels, int, int]:
        """Cut into tiles.

        Returns:
            The tiles and the global image, and the numbers of rows and columns; 0 for one tile.
        """
        tile = self._tile
        fitted = self._whole_tiles(dims_of(image))
        image = self.resize(image, fitted)
        if fitted == tile:
            return image[None], 0, 0
        rows, columns = fitted.height // tile.height, fitted.width // tile.width
        tiles = split_to_tiles(image, rows, columns)
        return np.concatenate([tiles, self.resize(image, tile)[None]]), rows, columns

    def _whole_tiles(self, dims: Dims) -> Dims:
        """Round the longer side up to whole tiles, then the other side of that aspect ratio."""
        edge = self._tile.height
        ratio = dims.width / dims.height
        if dims.width >= dims.height:
            width = math.ceil(dims.width / edge) * edge
            return Dims(math.ceil(int(width / ratio) / edge) * edge, width)
        height = math.ceil(dims.height / edge) * edge
        return Dims(height, math.ceil(int(height * ratio) / edge) * edge)


def _fit_longest(dims: Dims, edge: int) -> Dims:
    """Set the longer side to `edge`, at most `_MAX_SIDE`; the other is even."""
    ratio = dims.width / dims.height
    if dims.width >= dims.height:
        height = int(edge / ratio)
        dims = Dims(max(height + height % 2, 1), edge)
    else:
        width = int(edge * ratio)
        dims = Dims(edge, max(width + width % 2, 1))
    ratio = dims.width / dims.height
    if dims.width >= dims.height and dims.width > _MAX_SIDE:
        return Dims(max(int(_MAX_SIDE / ratio), 1), _MAX_SIDE)
    if dims.height > dims.width and dims.height > _MAX_SIDE:
        return Dims(_MAX_SIDE, max(int(_MAX_SIDE * ratio), 1))
    return dims
