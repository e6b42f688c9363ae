"""Processors that resize every image to one size: CLIP, SigLIP, ViT, BLIP, LLaVA, DeepSeek-VL.

    image → (pad to a square) → resize → (center crop) → normalize → pixel_values [1, 3, H, W]
"""

from __future__ import annotations

from typing import ClassVar, Literal

from llmc.runtime.multimodal import resampling
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
    pad_to_square,
)
from llmc.runtime.multimodal.resampling import Pixels


class FixedSizeImageProcessor(ImageProcessor):
    """The steps of transformers' base class."""

    default_to_square: ClassVar[bool] = False

    size: Size
    do_center_crop: bool = False
    crop_size: Size | None = None

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_resize:
            image = self.resize(image, self.size.fit(dims_of(image)))
        if self.do_center_crop and self.crop_size is not None:
            image = center_crop(image, self.crop_size.dims())
        return {"pixel_values": self.normalize(image)[None]}


class SiglipImageProcessor(FixedSizeImageProcessor):
    image_processor_type: Literal["SiglipImageProcessor"]
    size: Size = Size(height=224, width=224)
    image_seq_length: Positive | None = None  # tokens of an image, of PaliGemma


class ViTImageProcessor(FixedSizeImageProcessor):
    default_to_square: ClassVar[bool] = True

    image_processor_type: Literal["ViTImageProcessor"]
    resample: int = resampling.BILINEAR
    size: Size = Size(height=224, width=224)


class BlipImageProcessor(FixedSizeImageProcessor):
    default_to_square: ClassVar[bool] = True

    image_processor_type: Literal["BlipImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(height=384, width=384)


class CLIPImageProcessor(FixedSizeImageProcessor):
    image_processor_type: Literal["CLIPImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(shortest_edge=224)
    do_center_crop: bool = True
    crop_size: Size | None = Size(height=224, width=224)


class LlavaImageProcessor(FixedSizeImageProcessor):
    image_processor_type: Literal["LlavaImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(shortest_edge=224)
    do_center_crop: bool = True
    crop_size: Size | None = Size(height=224, width=224)
    do_pad: bool = False

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_pad:
            image = pad_to_square(image, [int(level * 255) for level in self.image_mean])
        return super().process(image, num_images)


class DeepseekVLImageProcessor(ImageProcessor):
    """Resize the longer side to `size`, then pad to a square."""

    image_processor_type: Literal["DeepseekVLImageProcessor", "JanusImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(height=384, width=384)
    min_size: Positive = 14
    do_pad: bool = True

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_resize:
            scale = self.size.dims().height / max(dims_of(image))
            image = self.resize(image, Dims(*(max(round(side * scale), self.min_size)
                                              for side in dims_of(image))))
        if self.do_pad:
            image = pad_to_square(image, [int(level * 255) for level in self.image_mean])
        return {"pixel_values": self.normalize(image)[None]}
