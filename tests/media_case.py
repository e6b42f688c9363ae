"""A tiny model that takes images, and pictures for it."""

import base64
import dataclasses
from io import BytesIO

import numpy as np
from multimodal_models import tiny_model
from PIL import Image
from processor_checkpoints import FAMILIES, write_checkpoint

import llmc

# Renders images as their placeholder.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{% endfor %}[assistant]")
LLAVA = dataclasses.replace(FAMILIES["llava"], image={
    **FAMILIES["llava"].image, "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28}})
ROWS = 4  # of each image: 2 x 2 patches


def write_case(root, template=TEMPLATE):
    """Write the Hugging Face directory `hf` and the case directory `case`; return the latter."""
    (root / "hf").mkdir(parents=True)
    tokenizer = write_checkpoint(LLAVA, root / "hf")
    tiny_model("llava", tokenizer.token_to_id(LLAVA.row), {
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}).save_pretrained(
            root / "hf")
    (root / "hf" / "chat_template.jinja").write_text(template)
    llmc.compile(root / "hf", root / "case")
    return root / "case"


def encoded(image, form="PNG", **options):
    """Return a picture's file."""
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture(color="red", size=(40, 30)):
    return encoded(Image.new("RGB", size, color))


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def header(width, height):
    """Return a PNG file whose header claims this size."""
    data = bytearray(picture())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return bytes(data)


def _turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


_RED = Image.new("RGB", (40, 30), "red")
# Files by name, with a part of the error.
BAD_PICTURES = {
    "none": (b"no picture", "10 bytes are no image"), "empty": (b"", "0 bytes are no image"),
    "truncated": (picture(size=(90, 90))[:100], "the image cannot be decoded"),
    "0 pixels": (header(0, 5), ""),
    "100,000 a side": (encoded(Image.new("1", (100_000, 1))), "the image has 100000 x 1 pixels"),
    "a bomb": (encoded(Image.new("1", (9000, 9000))), "the image has 9000 x 9000 pixels"),
    "claims": (header(1 << 20, 1 << 20), "")}
UNUSUAL_PICTURES = {
    "turned by EXIF": encoded(_RED, "JPEG", exif=_turned()),
    "alpha": encoded(Image.new("RGBA", (40, 30), (9, 9, 9, 0))),
    "CMYK": encoded(Image.new("CMYK", (40, 30)), "TIFF"),
    "16 bits": encoded(Image.fromarray(np.full((3, 2), 0x80FF, np.uint16))),
    "animated": encoded(_RED, "GIF", save_all=True, append_images=[_RED]),
    "WebP": encoded(_RED, "WEBP")}
