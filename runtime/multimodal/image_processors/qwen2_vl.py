"""Processors of Qwen2-VL, which Qwen2.5-VL, Qwen3-VL, Qwen3.5 and others use, and of GLM-4V.

    image → resize to multiples of patch_size * merge_size → normalize → patches in merge order,
    each frame twice → pixel_values [patches, 3 * temporal_patch_size * patch_size²],
    image_grid_thw [1, 3]

GLM-4V's bounds of the area count all frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from llmc.errors import LlmcError
from llmc.runtime.multimodal.image_processors.base import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    Arrays,
    Dims,
    Floats,
    ImageProcessor,
    Positive,
    Size,
    dims_of,
)
from llmc.runtime.multimodal.resampling import Pixels

_MAX_ASPECT_RATIO = 200


class Qwen2VLImageProcessor(ImageProcessor):
    default_to_square: ClassVar[bool] = False
    legacy_settings: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels")

    image_processor_type: Literal["Qwen2VLImageProcessor"]
    image_mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    image_std: tuple[float, float, float] = OPENAI_CLIP_STD
    size: Size = Size(shortest_edge=56 * 56, longest_edge=28 * 28 * 1280)  # in pixels of the area
    patch_size: Positive = 14
    temporal_patch_size: Positive = 2
    merge_size: Positive = 2

    @model_validator(mode="before")
    @classmethod
    def _read_pixels(cls, values: Any) -> Any:
        """Read min_pixels and max_pixels of checkpoints before transformers 5."""
        if not isinstance(values, Mapping):
            return values
        read = dict(values)
        size = dict(read.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            own = size.pop(name, None)
            pixels = read.pop(name, None) or own
            if pixels is not None:
                size[edge] = pixels
        return {**read, "size": size}

    def process(self, image: Pixels, num_images: int) -> Arrays:
        if self.do_resize:
            image = self.resize(image, self._fit(dims_of(image)))
        patches, rows, columns = self._patchify(self.normalize(image))
        return {"pixel_values": patches,
                "image_grid_thw": np.array([[1, rows, columns]], np.int64)}

    def _fit(self, dims: Dims) -> Dims:
        """Round the sides to whole merged patches, within the bounds of the area."""
        smallest, largest = self.size.shortest_edge, self.size.longest_edge
        if smallest is None or largest is None:
            raise LlmcError(f"the size of the image processor is "
                            f"{self.size.model_dump(exclude_none=True)}, which has no "
                            f"shortest_edge and longest_edge; both are expected")
        height, width = dims = self._grow(dims)
        frames = self._frames
        if max(dims) / min(dims) > _MAX_ASPECT_RATIO:
            raise LlmcError(f"an image of {width} x {height} pixels has an aspect ratio over "
                            f"{_MAX_ASPECT_RATIO}, the limit of this model; crop the image")
        unit = self.patch_size * self.merge_size
        fitted = Dims(round(height / unit) * unit, round(width / unit) * unit)
        if frames * fitted.height * fitted.width > largest:
            scale = math.sqrt(frames * height * width / largest)
            fitted = Dims(*(max(unit, math.floor(side / scale / unit) * unit) for side in dims))
        elif frames * fitted.height * fitted.width < smallest:
            scale = math.sqrt(smallest / (frames * height * width))
            fitted = Dims(*(math.ceil(side * scale / unit) * unit for side in dims))
        return fitted

    @property
    def _frames(self) -> int:
        """Number of frames whose area is bounded."""
        return 1

    def _grow(self, dims: Dims) -> Dims:
        """Grow an image before its sides are rounded."""
        return dims

    def _patchify(self, image: Floats) -> tuple[Floats, int, int]:
        patch, merge = self.patch_size, self.merge_size
        channels, height, width = image.shape
        rows, columns = height // patch, width // patch
        if height % (patch * merge) or width % (patch * merge):
            raise LlmcError(f"an image of {width} x {height} pixels has no whole number of patches "
                            f"of {patch * merge} pixels, and this model's processor does not "
                            f"resize; give an image whose sides are multiples of {patch * merge}")
        patches = image.reshape(channels, rows // merge, merge, patch, columns // merge, merge,
                                patch).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.broadcast_to(patches[:, :, :, :, :, None], (
            *patches.shape[:5], self.temporal_patch_size, patch, patch))
        return frames.reshape(rows * columns, -1), rows, columns


class Glm4vImageProcessor(Qwen2VLImageProcessor):
    legacy_settings: ClassVar[tuple[str, ...]] = ()

    image_processor_type: Literal[  # type: ignore[assignment]
        "Glm4vImageProcessor", "Glm46VImageProcessor"]
    size: Size = Size(shortest_edge=112 * 112, longest_edge=28 * 28 * 15000)

    @property
    def _frames(self) -> int:
        return self.temporal_patch_size

    def _grow(self, dims: Dims) -> Dims:
        unit = self.patch_size * self.merge_size
        if min(dims) >= unit:
            return dims
        scale = max(unit / dims.height, unit / dims.width)
        return Dims(int(dims.height * scale), int(dims.width * scale))
