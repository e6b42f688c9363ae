"""Image processors by their class in transformers."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from llmc.runtime.multimodal.image_processors.anyres import (
    LlavaNextImageProcessor,
    LlavaOnevisionImageProcessor,
)
from llmc.runtime.multimodal.image_processors.base import ImageProcessor
from llmc.runtime.multimodal.image_processors.fixed_size import (
    BlipImageProcessor,
    CLIPImageProcessor,
    DeepseekVLImageProcessor,
    LlavaImageProcessor,
    SiglipImageProcessor,
    ViTImageProcessor,
)
from llmc.runtime.multimodal.image_processors.gemma import (
    Gemma3ImageProcessor,
    Gemma4ImageProcessor,
)
from llmc.runtime.multimodal.image_processors.got_ocr2 import (
    Cohere2VisionImageProcessor,
    GotOcr2ImageProcessor,
)
from llmc.runtime.multimodal.image_processors.idefics3 import Idefics3ImageProcessor
from llmc.runtime.multimodal.image_processors.llama import (
    Llama4ImageProcessor,
    MllamaImageProcessor,
)
from llmc.runtime.multimodal.image_processors.pixtral import PixtralImageProcessor
from llmc.runtime.multimodal.image_processors.qwen2_vl import (
    Glm4vImageProcessor,
    Qwen2VLImageProcessor,
)

AnyImageProcessor = Annotated[
    BlipImageProcessor | CLIPImageProcessor | Cohere2VisionImageProcessor
    | DeepseekVLImageProcessor | Gemma3ImageProcessor | Gemma4ImageProcessor | Glm4vImageProcessor
    | GotOcr2ImageProcessor | Idefics3ImageProcessor | Llama4ImageProcessor | LlavaImageProcessor
    | LlavaNextImageProcessor | LlavaOnevisionImageProcessor | MllamaImageProcessor
    | PixtralImageProcessor | Qwen2VLImageProcessor | SiglipImageProcessor | ViTImageProcessor,
    Field(discriminator="image_processor_type")]

IMAGE_PROCESSORS: dict[str, type[ImageProcessor]] = {
    name: own for own in get_args(get_args(AnyImageProcessor)[0])
    for name in get_args(own.model_fields["image_processor_type"].annotation)}
