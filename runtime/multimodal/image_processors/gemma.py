"""Gemma's processors.

    Gemma 3: image (and crops of it, with pan and scan) → resize → normalize
             → pixel_values [1 + crops, 3, H, W]
    Gemma 4: image → resize, keeping the aspect ratio → rescale → patches, channels last
             → pixel_values [max_patches, 3 * patch_size²], image_position_ids [max_patches, 2]

Gemma 4's arrays are padded to `max_patches`; the positions of padding are -1.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from llmc.errors import LlmcError
from llmc.runtime.multimodal import resampling
from llmc.runtime.multimodal.image_processors.base import (
    Arrays,
    Dims,
    ImageProcessor,
    Positive,
    Size,
    dims_of,
)
from llmc.runtime.multimodal.resampling import Pixels


class Gemma3ImageProcessor(ImageProcessor):
    image_processor_type: Literal["Gemma3ImageProcessor"]
    resample: int = resampling.BILINEAR
    size: Size = Size(height=224, width=224)
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: Positive = 256
    pan_and_scan_max_num_crops: Positive = 4
    pan_and_scan_min_ratio_to_activate: float = Field(1.2, gt=0)

    def process(self, image: Pixels, num_images: int) -> Arrays:
        crops = self._crops(image) if self.do_pan_and_scan else []
        images = [image, *crops]
        if self.do_resize or self.do_pan_and_scan:
            images = [self.resize(own, self.size.fit(dims_of(own))) for own in images]
        return {"pixel_values": self.normalize(np.stack(images))}

    def _crops(self, image: Pixels) -> list[Pixels]:
        """Cut a long image into parts along its longer side."""
        height, width = dims_of(image)
        short, long = min(height, width), max(height, width)
        if long / short < self.pan_and_scan_min_ratio_to_activate:
            return []
        least = self.pan_and_scan_min_crop_size
        count = min(math.floor(long / least), math.floor(long / short + 0.5))
        count = min(self.pan_and_scan_max_num_crops, max(2, count))
        step = math.ceil(long / count)
        if min(step, short) < least:
            return []
        starts = range(0, step * count, step)
        if width >= height:
            return [image[:, :, start:start + step] for start in starts]
        return [image[:, start:start + step] for start in starts]


class Gemma4ImageProcessor(ImageProcessor):
    image_processor_type: Literal["Gemma4ImageProcessor"]
    image_mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    image_std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    do_normalize: bool = False
    patch_size: Positive = 16
    max_soft_tokens: Literal[70, 140, 280, 560, 1120] = 280
    pooling_kernel_size: Positive = 3

    @property
    def _max_patches(self) -> int:
        return self.max_soft_tokens * self.pooling_kernel_size ** 2

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_resize:
            image = self.resize(image, self._fit(dims_of(image)))
        patch = self.patch_size
        height, width = dims_of(image)
        rows, columns = height // patch, width // patch
        if (height % patch, width % patch) != (0, 0) or rows * columns > self._max_patches:
            raise LlmcError(f"an image of {width} x {height} pixels is not at most "
                            f"{self._max_patches} whole patches of {patch} pixels, and this "
                            f"model's processor does not resize; give a smaller one")
        patches = self.normalize(image).reshape(3, rows, patch, columns, patch)
        values = np.zeros((self._max_patches, 3 * patch * patch), np.float32)
        values[:rows * columns] = patches.transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        positions = np.full((self._max_patches, 2), -1, np.int64)
        positions[:rows * columns, 0] = np.tile(np.arange(columns), rows)
        positions[:rows * columns, 1] = np.repeat(np.arange(rows), columns)
        return {"pixel_values": values[None], "image_position_ids": positions[None]}

    def _fit(self, dims: Dims) -> Dims:
        """The largest whole number of pooled patches of this aspect ratio."""
        height, width = dims
        factor = math.sqrt(self._max_patches * self.patch_size ** 2 / (height * width))
        unit = self.pooling_kernel_size * self.patch_size
        fitted = Dims(*(math.floor(factor * side / unit) * unit for side in dims))
        longest = self._max_patches // self.pooling_kernel_size ** 2 * unit
        if fitted.height == 0:
            fitted = Dims(unit, min(width // height * unit, longest))
        elif fitted.width == 0:
            fitted = Dims(min(height // width * unit, longest), unit)
        return fitted
