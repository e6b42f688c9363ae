"""Processors of LLaVA-NeXT and LLaVA-OneVision: an overview and tiles of one of several canvases.

    image → resize to the best canvas, keeping the aspect ratio → pad → tiles
    image → resize to the tile's size: the overview, which comes first
    → normalize → pixel_values [1, 1 + tiles, 3, H, W], image_sizes [1, 2]

LLaVA-OneVision makes an overview only, of the image padded to a square, where a prompt has several
images. transformers pads the images of a batch to one number of tiles; here each has its own.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from llmc.runtime.multimodal.image_processors.base import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    Arrays,
    Dims,
    ImageProcessor,
    Positive,
    Size,
    center_crop,
    dims_of,
    pad,
    pad_to_square,
    split_to_tiles,
)
from llmc.runtime.multimodal.resampling import Pixels

Canvases = tuple[tuple[Positive, Positive], ...]  # heights and widths


class AnyresImageProcessor(ImageProcessor):
    """The steps of both."""

    default_to_square: ClassVar[bool] = False

    size: Size
    do_center_crop: bool = False
    crop_size: Size | None = None
    image_grid_pinpoints: Canvases

    @model_validator(mode="after")
    def _check_tiles(self) -> Self:
        """Refuse canvases of parts of tiles."""
        tile = self._tile()
        if any(height % tile or width % tile for height, width in self.image_grid_pinpoints):
            raise ValueError(f"image_grid_pinpoints has sides that are no multiples of {tile}, the "
                             f"side of a tile; only such are supported")
        return self

    def _tile(self) -> int:
        """Side of a tile."""
        if self.crop_size is not None and self.crop_size.height is not None:
            return self.crop_size.height
        return self._overview().height

    def _overview(self) -> Dims:
        edge = self.size.shortest_edge
        return self.size.dims() if edge is None else Dims(edge, edge)

    def process(self, image: Pixels, num_images: int) -> Arrays:
        images = [self._finish(own) for own in self._images(image, num_images)]
        return {"pixel_values": self.normalize(np.stack(images))[None],
                "image_sizes": np.array([dims_of(image)], np.int64)}

    def _images(self, image: Pixels, num_images: int) -> list[Pixels]:
        """The overview and the tiles."""
        side = self._tile()
        canvas = best_canvas(dims_of(image), self.image_grid_pinpoints)
        fitted = self.resize(image, _fit(dims_of(image), canvas))
        above, left = (canvas.height - fitted.shape[1]) // 2, (canvas.width - fitted.shape[2]) // 2
        padded = pad(fitted, above, canvas.height - fitted.shape[1] - above,
                     left, canvas.width - fitted.shape[2] - left)
        tiles = split_to_tiles(padded, canvas.height // side, canvas.width // side)
        return [self.resize(image, self._overview()), *tiles]

    def _finish(self, image: Pixels) -> Pixels:
        if self.do_resize:
            image = self.resize(image, self.size.fit(dims_of(image)))
        if self.do_center_crop and self.crop_size is not None:
            image = center_crop(image, self.crop_size.dims())
        return image


class LlavaNextImageProcessor(AnyresImageProcessor):
    image_processor_type: Literal["LlavaNextImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(shortest_edge=224)
    do_center_crop: bool = True
    crop_size: Size | None = Size(height=224, width=224)
    image_grid_pinpoints: Canvases = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class LlavaOnevisionImageProcessor(AnyresImageProcessor):
    image_processor_type: Literal["LlavaOnevisionImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(height=384, width=384)
    image_grid_pinpoints: Canvases = tuple(
        (384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))

    def _images(self, image: Pixels, num_images: int) -> list[Pixels]:
        if num_images == 1:
            return super()._images(image, num_images)
        return [pad_to_square(image, [int(level * 255) for level in self.image_mean])]


def best_canvas(dims: Dims, canvases: Canvases) -> Dims:
    """The canvas that keeps most pixels of the image, then the one that wastes fewest."""
    best, most, fewest = Dims(*canvases[0]), 0, math.inf
    for height, width in canvases:
        scale = min(width / dims.width, height / dims.height)
        kept = min(int(dims.width * scale) * int(dims.height * scale), dims.width * dims.height)
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < fewest):
            best, most, fewest = Dims(height, width), kept, wasted
    return best


def _fit(dims: Dims, canvas: Dims) -> Dims:
    wide, high = canvas.width / dims.width, canvas.height / dims.height
    if wide < high:
        return Dims(min(math.ceil(dims.height * wide), canvas.height), canvas.width)
    return Dims(canvas.height, min(math.ceil(dims.width * high), canvas.width))
