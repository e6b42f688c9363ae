"""Images from untrusted bytes, as 8-bit RGB.

| input | result |
| --- | --- |
| alpha, palette with transparency | composited on white, as transformers' `convert_to_rgb` does |
| grayscale, palette, CMYK, YCbCr, Lab | converted by Pillow, as transformers does |
| grayscale of 16 bits | the upper 8 bits; transformers saturates to white |
| EXIF orientation | applied, as transformers' `load_image` does |
| animation, several pages | the first frame |
| no image, truncated, 0 pixels, too many pixels | `LlmcError` |

Pillow is imported on first use: text needs none.
"""

from __future__ import annotations

from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from llmc.errors import LlmcError, reason_of, shown
from llmc.installation import install_command
from llmc.runtime.multimodal.resampling import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26  # 8192 x 8192: 201 MB as RGB
MAX_SIDE = 1 << 16  # a longer side is no picture
# Others of Pillow's decoders are rare; some start programs (EPS) or follow paths.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")


def load_image(image: bytes | Image, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode an image.

    Args:
        image: an encoded image, or one that Pillow has opened or made.
        max_pixels: limit of its area; checked before it is decoded.

    Returns:
        uint8 of [3, height, width].

    Raises:
        LlmcError: it is no image, is damaged, or exceeds a limit; or Pillow is not installed.
    """
    pillow = import_pillow()
    if isinstance(image, bytes | bytearray | memoryview):
        opened = _open(pillow, bytes(image))
    elif isinstance(image, pillow.Image.Image):
        opened = image
    else:
        raise LlmcError(f"the image is {shown(image)}; give the bytes of a file, or a PIL image")
    _check_size(opened.size, max_pixels)
    try:
        upright = pillow.ImageOps.exif_transpose(opened)
        pixels = np.asarray(_to_rgb(pillow, upright))
    except (LlmcError, MemoryError):
        raise
    except Exception as error:  # a decoder may raise anything
        raise LlmcError(f"the image cannot be decoded ({reason_of(error)}); give a whole one in "
                        f"one of the formats {', '.join(FORMATS)}") from error
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _open(pillow: ModuleType, data: bytes) -> Image:
    try:
        opened: Image = pillow.Image.open(BytesIO(data), formats=FORMATS)
    except pillow.Image.DecompressionBombError as error:
        raise LlmcError(f"the image is too large ({reason_of(error)}); resize it") from error
    except MemoryError:
        raise
    except Exception as error:  # a decoder may raise anything
        raise LlmcError(f"{len(data)} bytes are no image; give one in one of the formats "
                        f"{', '.join(FORMATS)}") from error
    return opened


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise LlmcError(f"the image has {width} x {height} pixels; give one that has any")
    if max(size) > MAX_SIDE or width * height > max_pixels:
        raise LlmcError(f"the image has {width} x {height} pixels, the limit is {max_pixels} "
                        f"pixels and {MAX_SIDE} a side; resize it")


def _to_rgb(pillow: ModuleType, image: Image) -> Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_gray(pillow, image)
    if "A" in image.getbands() or "a" in image.getbands() \
            or image.info.get("transparency") is not None:
        white = pillow.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = pillow.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _to_gray(pillow: ModuleType, image: Image) -> Image:
    """Reduce 16-bit levels to 8 bits; Pillow's own conversion saturates."""
    levels = np.asarray(image)
    if levels.dtype.kind not in "iu" or levels.min() < 0 or levels.max() > 0xFFFF:
        raise LlmcError(f"the image has pixels of mode {image.mode} beyond 16 bits; convert it to "
                        f"8 bits")
    gray: Image = pillow.Image.fromarray((levels >> 8).astype(np.uint8))
    return gray


def import_pillow() -> ModuleType:
    """Return the package PIL.

    Raises:
        LlmcError: it is not installed.
    """
    try:
        import PIL.Image
        import PIL.ImageOps
    except ModuleNotFoundError as error:
        raise LlmcError(f"images need Pillow; install it with: "
                        f"{install_command('multimodal')}") from error
    return PIL
