"""Settings and steps that image processors share.

A processor maps one image, uint8 of [3, height, width], to the arrays that transformers' class of
the same name gives for it. Settings have the names and the defaults of that class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from llmc.errors import LlmcError, shown
from llmc.runtime.multimodal import resampling
from llmc.runtime.multimodal.resampling import Pixels

Arrays = dict[str, NDArray[Any]]
Floats = NDArray[np.float32]
Positive = Annotated[int, Field(gt=0, lt=1 << 31)]
MAX_SIDE = 1 << 15  # pixels of a resized image
_FILTERS = {resampling.LANCZOS: "lanczos", resampling.BILINEAR: "bilinear",
            resampling.BICUBIC: "bicubic"}

OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class Dims(NamedTuple):
    """Height and width of an image in pixels."""

    height: int
    width: int


class Size(BaseModel):
    """A target size of `resize` or `center_crop`: the keys that preprocessor_config.json has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    height: Positive | None = None
    width: Positive | None = None
    shortest_edge: Positive | None = None
    longest_edge: Positive | None = None

    def fit(self, dims: Dims) -> Dims:
        """Compute the dims of an image of `dims` after `resize`.

        Raises:
            LlmcError: the keys are those of no resize.
        """
        if self.shortest_edge and self.longest_edge:
            return _fit_edges(dims, self.shortest_edge, self.longest_edge)
        if self.shortest_edge:
            short, long = min(dims), max(dims)
            other = int(self.shortest_edge * long / short)
            return Dims(other, self.shortest_edge) if dims.width <= dims.height else \
                Dims(self.shortest_edge, other)
        return self.dims()

    def dims(self) -> Dims:
        """Height and width.

        Raises:
            LlmcError: one of them is absent.
        """
        if self.height is None or self.width is None:
            raise LlmcError(f"the size {self.model_dump(exclude_none=True)} of the image processor "
                            f"has no height and width; both are expected")
        return Dims(self.height, self.width)


def _fit_edges(dims: Dims, shortest: int, longest: int) -> Dims:
    height, width = dims
    exact = None
    if max(dims) / min(dims) * shortest > longest:
        exact = longest * min(dims) / max(dims)
        shortest = round(exact)
    if shortest == min(dims):
        return dims
    scaled = shortest if exact is None else exact
    if width < height:
        return Dims(int(scaled * height / width), shortest)
    return Dims(shortest, int(scaled * width / height))


class ImageProcessor(BaseModel):
    """Base of all image processors: settings that every class has.

    An image is always converted to RGB; without `do_convert_rgb`, transformers fails on others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    default_to_square: ClassVar[bool] = True
    square_settings: ClassVar[tuple[str, ...]] = ("crop_size",)  # an int means a square
    legacy_settings: ClassVar[tuple[str, ...]] = ()  # that a validator translates

    do_resize: bool = True
    resample: int = resampling.BICUBIC
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, float, float] = HALF
    image_std: tuple[float, float, float] = HALF

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: Any) -> Any:
        """Read sizes that are an int or a pair."""
        if not isinstance(values, Mapping):
            return values
        read = dict(values)
        for name in ("size", *cls.square_settings):
            value = read.get(name)
            if isinstance(value, int):
                square = name != "size" or cls.default_to_square
                read[name] = {"height": value, "width": value} if square else \
                    {"shortest_edge": value}
            elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
                read[name] = {"height": value[0], "width": value[1]}
        return read

    @field_validator("image_mean", "image_std", mode="before")
    @classmethod
    def _read_scalar(cls, value: Any) -> Any:
        return (value, value, value) if isinstance(value, int | float) else value

    @field_validator("image_std")
    @classmethod
    def _check_nonzero(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(value):
            raise ValueError("image_std has a 0; give positive numbers")
        return value

    @field_validator("resample")
    @classmethod
    def _check_filter(cls, value: int) -> int:
        if value not in _FILTERS:
            names = ", ".join(f"{key} ({name})" for key, name in _FILTERS.items())
            raise ValueError(f"resample is {value}; supported: {names}")
        return value

    def process(self, image: Pixels, num_images: int) -> Arrays:
        """Compute the encoder's inputs for one image.

        Args:
            image: [3, height, width].
            num_images: number of images in the prompt.

        Raises:
            LlmcError: the processor cannot represent an image of these sides.
        """
        raise NotImplementedError

    def resize(self, image: Pixels, dims: Dims) -> Pixels:
        """Resize to exactly `dims`.

        Raises:
            LlmcError: a side exceeds `MAX_SIDE`.
        """
        if max(dims) > MAX_SIDE:
            raise LlmcError(f"an image of {image.shape[2]} x {image.shape[1]} pixels becomes one "
                            f"of {dims.width} x {dims.height} for this model, the limit is "
                            f"{MAX_SIDE} pixels a side; crop the image")
        return resampling.resize(image, dims.height, dims.width, self.resample)

    @cached_property
    def _levels(self) -> Floats:
        """The value of each of 256 levels of a channel: [3, 256]."""
        return self.levels()

    def levels(self) -> Floats:
        """Rescale and normalize all levels of a channel as transformers does: [3, 256]."""
        values = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
        if not self.do_normalize:
            return values * np.float32(self.rescale_factor) if self.do_rescale else values.copy()
        factor = np.float32(1.0 / self.rescale_factor if self.do_rescale else 1.0)
        mean, std = (np.array(value, np.float32)[:, None] * factor
                     for value in (self.image_mean, self.image_std))
        normalized: NDArray[np.float32] = (values - mean) / std
        return normalized

    def normalize(self, image: Pixels) -> Floats:
        """Rescale and normalize an image of [..., 3, height, width]."""
        result = np.empty(image.shape, np.float32)
        for channel in range(3):
            np.take(self._levels[channel], image[..., channel, :, :],
                    out=result[..., channel, :, :], mode="clip")  # without a buffer
        return result


def dims_of(image: Pixels) -> Dims:
    """Height and width of [channels, height, width]."""
    return Dims(*image.shape[-2:])


def pad(image: Pixels, top: int, bottom: int, left: int, right: int,
        fill: Sequence[int] = (0, 0, 0)) -> Pixels:
    """Add rows and columns of one color."""
    channels, height, width = image.shape
    result = np.empty((channels, height + top + bottom, width + left + right), np.uint8)
    result[:] = np.array(fill, np.uint8)[:, None, None]
    result[:, top:top + height, left:left + width] = image
    return result


def center_crop(image: Pixels, size: Dims) -> Pixels:
    """Cut the center out; an image that is smaller is padded with zeros first."""
    height, width = dims_of(image)
    above, left = max(size.height - height, 0), max(size.width - width, 0)
    if above or left:
        image = pad(image, above // 2, (above + 1) // 2, left // 2, (left + 1) // 2)
        height, width = dims_of(image)
    top, start = int((height - size.height) / 2.0), int((width - size.width) / 2.0)
    return image[:, top:top + size.height, start:start + size.width]


def pad_to_square(image: Pixels, color: Sequence[int]) -> Pixels:
    """Center an image on a square of its longer side."""
    height, width = dims_of(image)
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    return pad(image, top, side - height - top, left, side - width - left, color)


def split_to_tiles(image: Pixels, rows: int, columns: int) -> Pixels:
    """Cut into tiles, row by row: [rows * columns, 3, height / rows, width / columns]."""
    channels, height, width = image.shape
    tiles = image.reshape(channels, rows, height // rows, columns, width // columns)
    return tiles.transpose(1, 3, 0, 2, 4).reshape(rows * columns, channels, height // rows,
                                                  width // columns)


def unsupported(name: str, value: object, way_out: str) -> LlmcError:
    """The error for a setting that no known checkpoint has."""
    return LlmcError(f"the image processor's {name} is {shown(value)}, which is unsupported; "
                     f"{way_out}")
