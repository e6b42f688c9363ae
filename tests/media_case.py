"""A tiny model that takes images, and pictures for it."""

import base64
import dataclasses
from io import BytesIO

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
