"""Pixtral's processor, which Mistral 3 uses: any resolution.

    image → resize to whole patches, the longer side at most `longest_edge` → normalize
    → pixel_values [1, 3, H, W], image_sizes [1, 2]

transformers pads the images of a batch to one size; here each has its own.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from llmc.runtime.multimodal.image_processors.base import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    Arrays,
    Dims,
    ImageProcessor,
    Size,
    center_crop,
    dims_of,
)
from llmc.runtime.multimodal.resampling import Pixels


class PixtralImageProcessor(ImageProcessor):
    square_settings = ("crop_size", "patch_size")

    image_processor_type: Literal["PixtralImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(longest_edge=1024)
    patch_size: Size = Size(height=16, width=16)
    do_center_crop: bool = False
    crop_size: Size | None = None

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_resize:
            image = self.resize(image, self._fit(dims_of(image)))
        sizes = np.array([dims_of(image)], np.int64)
        if self.do_center_crop and self.crop_size is not None:
            image = center_crop(image, self.crop_size.dims())
        return {"pixel_values": self.normalize(image)[None], "image_sizes": sizes}

    def _fit(self, dims: Dims) -> Dims:
        edge = self.size.longest_edge
        largest = Dims(edge, edge) if edge is not None else self.size.dims()
        ratio = max(dims.height / largest.height, dims.width / largest.width)
        sides = [math.floor(side / ratio) for side in dims] if ratio > 1 else dims
        return Dims(*(((side - 1) // patch + 1) * patch
                      for side, patch in zip(sides, self.patch_size.dims(), strict=True)))
