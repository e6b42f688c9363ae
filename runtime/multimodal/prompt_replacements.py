"""Texts that replace an item's placeholder in a prompt: transformers' processor classes.

| processor class | placeholder | rows of the encoder are at |
| --- | --- | --- |
| Qwen2VL, Qwen2_5_VL, Qwen3VL, Qwen2_5Omni, Qwen3OmniMoe | image_token | image_token |
| Exaone4_5, Glm4v, Glm46V | image_token | image_token |
| Gemma3 | boi_token | image_token |
| Gemma3n, Gemma4 | image_token, audio_token | the same |
| PaliGemma | image_token | image_token; the text's BOS token comes after the images |
| Pixtral, LightOnOcr, Llava, LlavaNext, LlavaOnevision | image_token | image_token |
| DeepseekVL, Janus | image_token | image_token |
| InternVL | context_image_token | context_image_token |
| QianfanOCR | image_placeholder_token | context_image_token |
| AyaVision | image_token | img_patch_token |
| Cohere2Vision, GotOcr2 | image_token | image_token |
| Idefics3, SmolVLM | image_token | image_token |
| Llama4 | image_token | patch_token |
| Mllama | image_token | none: cross-attention |
| Qwen2Audio, Qwen2_5Omni, Qwen3OmniMoe | audio_token | audio_token |
| AudioFlamingo3, GlmAsr, Voxtral | audio_token | audio_token |

Fields have the names of processor_config.json, and of the tokenizer's special tokens.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from llmc.errors import LlmcError
from llmc.runtime.multimodal.audio import MAX_SECONDS
from llmc.runtime.multimodal.image_processors.anyres import AnyresImageProcessor, best_canvas
from llmc.runtime.multimodal.image_processors.base import Arrays, Dims, Positive
from llmc.runtime.multimodal.tile_rows import unpadded

Strategy = Literal["default", "full"]
# What the feature extractor reads of a clip: one window, padded; the same, whose frames of padding
# are left out; the clip as it is; each of its windows on their own; or all of them at once, cut
# into windows afterwards.
Windows = Literal["one", "cut", "none", "several", "joined"]


class PromptReplacement(BaseModel):
    """Base of all replacements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Settings that transformers' processor gives its image processor with each call.
    image_settings: ClassVar[dict[str, Any]] = {}
    # Whether the tokenizer adds its special tokens to a prompt.
    adds_special_tokens: ClassVar[bool] = True

    @property
    def placeholder(self) -> str:
        """The token that stands for one item in a prompt."""
        raise NotImplementedError

    @property
    def row_token(self) -> str | None:
        """The token whose embedding is replaced by a row of the encoder; None if no one's is."""
        return self.placeholder

    def text(self, arrays: Arrays, processor: Any) -> str:
        """The text of one item.

        Args:
            arrays: what the image processor or the feature extractor returned.
            processor: it, with its settings.
        """
        raise NotImplementedError

    def complete(self, text: str) -> str:
        """The text of a prompt with items, with what the model expects around them."""
        return text

    def unused_inputs(self) -> tuple[str, ...]:
        """Names of arrays that only `text` needs."""
        return ()

    def settings_of_images(self) -> dict[str, Any]:
        """Settings of the image processor that this class overrides."""
        return self.image_settings


class ImageTokenReplacement(PromptReplacement):
    """Base of classes whose placeholder is `image_token`."""

    image_token: str = "<image>"

    @property
    def placeholder(self) -> str:
        return self.image_token


class Qwen2VLReplacement(ImageTokenReplacement):
    processor_class: Literal["Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor",
                             "Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor",
                             "Exaone4_5_Processor"]
    image_token: str = "<|image_pad|>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        count: int = int(arrays["image_grid_thw"].prod()) // processor.merge_size ** 2
        return self.image_token * count


class Glm4vReplacement(Qwen2VLReplacement):
    processor_class: Literal["Glm4vProcessor", "Glm46VProcessor"]  # type: ignore[assignment]
    image_token: str = "<|image|>"


class Gemma3Replacement(PromptReplacement):
    # Pan and scan is off unless a call asks for it, whatever preprocessor_config.json says.
    image_settings: ClassVar[dict[str, Any]] = {"do_pan_and_scan": False}

    processor_class: Literal["Gemma3Processor"]
    image_seq_length: Positive = 256
    boi_token: str = "<start_of_image>"
    eoi_token: str = "<end_of_image>"
    image_token: str = "<image_soft_token>"

    @property
    def placeholder(self) -> str:
        return self.boi_token

    @property
    def row_token(self) -> str:
        return self.image_token

    def text(self, arrays: Arrays, processor: Any) -> str:
        whole = f"\n\n{self.boi_token}{self.image_token * self.image_seq_length}" \
                f"{self.eoi_token}\n\n"
        num_crops = len(arrays["pixel_values"]) - 1
        if not num_crops:
            return whole
        return f"Here is the original image {whole} and here are some crops to help you see " \
               f"better {' '.join([whole] * num_crops)}"


class Gemma3nReplacement(ImageTokenReplacement):
    processor_class: Literal["Gemma3nProcessor"]
    image_seq_length: Positive = 256
    boi_token: str = "<start_of_image>"
    eoi_token: str = "<end_of_image>"
    image_token: str = "<image_soft_token>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        return f"\n\n{self.boi_token}{self.image_token * self.image_seq_length}" \
               f"{self.eoi_token}\n\n"


class Gemma4Replacement(ImageTokenReplacement):
    processor_class: Literal["Gemma4Processor"]
    boi_token: str = "<|image>"
    eoi_token: str = "<image|>"
    image_token: str = "<|image|>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        num_patches = int((arrays["image_position_ids"][..., 0] >= 0).sum())
        count = num_patches // processor.pooling_kernel_size ** 2
        return f"{self.boi_token}{self.image_token * count}{self.eoi_token}"


class PaliGemmaReplacement(ImageTokenReplacement):
    adds_special_tokens: ClassVar[bool] = False

    processor_class: Literal["PaliGemmaProcessor"]
    bos_token: str = "<bos>"

    def complete(self, text: str) -> str:
        images = text.rfind(self.image_token) + len(self.image_token)
        return f"{text[:images]}{self.bos_token}{text[images:]}\n"

    def text(self, arrays: Arrays, processor: Any) -> str:
        count = getattr(processor, "image_seq_length", None)
        if count is None:
            raise LlmcError("preprocessor_config.json has no image_seq_length, the number of "
                            "tokens of an image; add it")
        return self.image_token * int(count)


class PixtralReplacement(ImageTokenReplacement):
    processor_class: Literal["PixtralProcessor"]
    patch_size: Positive = 16
    spatial_merge_size: Positive = 1
    image_token: str = "[IMG]"
    image_break_token: str = "[IMG_BREAK]"
    image_end_token: str = "[IMG_END]"

    def settings_of_images(self) -> dict[str, Any]:
        return {"patch_size": self.patch_size * self.spatial_merge_size}

    def text(self, arrays: Arrays, processor: Any) -> str:
        side = self.patch_size * self.spatial_merge_size
        rows, columns = (int(own) // side for own in arrays["image_sizes"][0])
        row = self.image_token * columns
        return self.image_break_token.join([row] * rows) + self.image_end_token


class LightOnOcrReplacement(ImageTokenReplacement):
    processor_class: Literal["LightOnOcrProcessor"]
    patch_size: Positive = 14
    spatial_merge_size: Positive = 2
    image_token: str = "<|image_pad|>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        side = self.patch_size * self.spatial_merge_size
        rows, columns = (int(own) // side for own in arrays["image_sizes"][0])
        return self.image_token * (rows * columns)


class LlavaReplacement(ImageTokenReplacement):
    processor_class: Literal["LlavaProcessor"]
    patch_size: Positive
    vision_feature_select_strategy: Strategy
    num_additional_image_tokens: int = 0

    def text(self, arrays: Arrays, processor: Any) -> str:
        height, width = arrays["pixel_values"].shape[-2:]
        count: int = height // self.patch_size * (width // self.patch_size) \
            + self.num_additional_image_tokens
        return self.image_token * (count - (self.vision_feature_select_strategy == "default"))


class DeepseekVLReplacement(ImageTokenReplacement):
    processor_class: Literal["DeepseekVLProcessor"]
    num_image_tokens: Positive = 576
    image_token: str = "<image_placeholder>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        return self.image_token * self.num_image_tokens


class JanusReplacement(ImageTokenReplacement):
    processor_class: Literal["JanusProcessor"]
    num_image_tokens: Positive = 576
    use_default_system_prompt: Literal[False] = False
    image_token: str = "<image_placeholder>"
    boi_token: str = "<begin_of_image>"
    eoi_token: str = "<end_of_image>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        return f"{self.boi_token}{self.image_token * self.num_image_tokens}{self.eoi_token}"


class LlavaNextReplacement(ImageTokenReplacement):
    processor_class: Literal["LlavaNextProcessor"]
    patch_size: Positive
    vision_feature_select_strategy: Strategy
    num_additional_image_tokens: int = 0

    def text(self, arrays: Arrays, processor: Any) -> str:
        tile = Dims(*arrays["pixel_values"].shape[-2:])
        grid = Dims(*(side // self.patch_size for side in tile))
        rows, columns = _unpadded(arrays, processor, tile, grid)
        count = rows * columns + rows + grid.height * grid.width + self.num_additional_image_tokens
        return self.image_token * (count - (self.vision_feature_select_strategy == "default"))


class LlavaOnevisionReplacement(ImageTokenReplacement):
    processor_class: Literal["LlavaOnevisionProcessor"]
    num_image_tokens: Positive
    vision_feature_select_strategy: Strategy
    vision_aspect_ratio: str = Field("anyres_max_9", pattern=r"^anyres_max_[1-9][0-9]*$")

    def text(self, arrays: Arrays, processor: Any) -> str:
        if arrays["pixel_values"].shape[1] == 1:  # one of several images; 1 more starts a line
            count = self.num_image_tokens + 1
        else:
            side = math.isqrt(self.num_image_tokens)
            tile = Dims(*arrays["pixel_values"].shape[-2:])
            rows, columns = _unpadded(arrays, processor, tile, Dims(side, side))
            most = int(self.vision_aspect_ratio.removeprefix("anyres_max_"))
            ratio = math.sqrt(rows * columns / (most * side ** 2))
            if ratio > 1.1:
                rows, columns = int(rows // ratio), int(columns // ratio)
            count = rows * columns + rows + self.num_image_tokens
        return self.image_token * (count - (self.vision_feature_select_strategy == "default"))


def _unpadded(arrays: Arrays, processor: AnyresImageProcessor, tile: Dims, grid: Dims) -> \
        tuple[int, int]:
    """Rows and columns of patches on the canvas, without those that are padding.

    Args:
        tile: dims of a tile in pixels.
        grid: its patches.
    """
    image = Dims(*(int(side) for side in arrays["image_sizes"][0]))
    canvas = best_canvas(image, processor.image_grid_pinpoints)
    rows = grid.height * (canvas.height // tile.height)
    columns = grid.width * (canvas.width // tile.width)
    top, left = unpadded(image, Dims(rows, columns))
    rows, columns = rows - 2 * top, columns - 2 * left
    return rows, columns


class InternVLReplacement(PromptReplacement):
    image_settings: ClassVar[dict[str, Any]] = {"crop_to_patches": True}

    processor_class: Literal["InternVLProcessor"]
    image_seq_length: Positive = 256
    start_image_token: str = "<img>"
    end_image_token: str = "</img>"
    context_image_token: str = "<IMG_CONTEXT>"

    @property
    def placeholder(self) -> str:
        return self.context_image_token

    def text(self, arrays: Arrays, processor: Any) -> str:
        rows = self.context_image_token * (self.image_seq_length * len(arrays["pixel_values"]))
        return f"{self.start_image_token}{rows}{self.end_image_token}"


class QianfanOCRReplacement(InternVLReplacement):
    processor_class: Literal["QianfanOCRProcessor"]  # type: ignore[assignment]
    image_placeholder_token: str = "<image>"

    @property
    def placeholder(self) -> str:
        return self.image_placeholder_token

    @property
    def row_token(self) -> str:
        return self.context_image_token


class GotOcr2Replacement(ImageTokenReplacement):
    # A call's defaults, whatever preprocessor_config.json says.
    image_settings: ClassVar[dict[str, Any]] = {
        "crop_to_patches": False, "min_patches": 1, "max_patches": 12}
    rows_of_tile: ClassVar[int] = 256

    processor_class: Literal["GotOcr2Processor"]
    image_token: str = "<imgpad>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        return self.image_token * (self.rows_of_tile * len(arrays["pixel_values"]))


class AyaVisionReplacement(ImageTokenReplacement):
    image_settings: ClassVar[dict[str, Any]] = {"crop_to_patches": True}

    processor_class: Literal["AyaVisionProcessor"]
    patch_size: Positive = 28
    img_size: Positive = 364
    downsample_factor: Positive = 1
    start_of_img_token: str = "<|START_OF_IMG|>"
    end_of_img_token: str = "<|END_OF_IMG|>"
    img_patch_token: str = "<|IMG_PATCH|>"
    tile_token: str = "TILE"
    tile_global_token: str = "TILE_GLOBAL"

    @property
    def row_token(self) -> str:
        return self.img_patch_token

    def text(self, arrays: Arrays, processor: Any) -> str:
        tile = self.img_patch_token * (
            self.img_size // (self.patch_size * self.downsample_factor)) ** 2
        tiles = "".join(f"{self.tile_token}_{index}{tile}"
                        for index in range(1, len(arrays["pixel_values"])))
        return f"{self.start_of_img_token}{tiles}{self.tile_global_token}{tile}" \
               f"{self.end_of_img_token}"


class Cohere2VisionReplacement(ImageTokenReplacement):
    processor_class: Literal["Cohere2VisionProcessor"]
    image_token: str = "<|IMG_PATCH|>"
    boi_token: str = "<|START_OF_IMG|>"
    eoi_token: str = "<|END_OF_IMG|>"
    img_line_break_token: str = "<|IMG_LINE_BREAK|>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        tile = self.image_token * processor.patch_size ** 2 + self.img_line_break_token
        return f"{self.boi_token}{tile * len(arrays['pixel_values'])}{self.eoi_token}"


class Idefics3Replacement(ImageTokenReplacement):
    processor_class: Literal["Idefics3Processor", "SmolVLMProcessor"]
    image_seq_len: Positive = 169
    fake_image_token: str = "<fake_token_around_image>"
    global_image_token: str = "<global-img>"

    def unused_inputs(self) -> tuple[str, ...]:
        return "rows", "cols", "pixel_attention_mask"  # the mask is 1 everywhere

    def text(self, arrays: Arrays, processor: Any) -> str:
        rows, columns = int(arrays["rows"][0, 0]), int(arrays["cols"][0, 0])
        image = self.image_token * self.image_seq_len
        whole = f"{self.fake_image_token}{self.global_image_token}{image}{self.fake_image_token}"
        if not rows:
            return whole
        tiles = ("".join(f"{self.fake_image_token}<row_{row}_col_{column}>{image}"
                         for column in range(1, columns + 1)) + "\n"
                 for row in range(1, rows + 1))
        return "".join(tiles) + "\n" + whole


class Llama4Replacement(ImageTokenReplacement):
    processor_class: Literal["Llama4Processor"]
    patch_size: Positive = 14
    pixel_shuffle_ratio: float = Field(0.5, gt=0)
    image_token: str = "<|image|>"
    start_of_image_token: str = "<|image_start|>"
    end_of_image_token: str = "<|image_end|>"
    patch_token: str = "<|patch|>"
    tile_x_separator_token: str = "<|tile_x_separator|>"
    tile_y_separator_token: str = "<|tile_y_separator|>"

    @property
    def row_token(self) -> str:
        return self.patch_token

    def unused_inputs(self) -> tuple[str, ...]:
        return ("aspect_ratios",)

    def text(self, arrays: Arrays, processor: Any) -> str:
        height, width = arrays["pixel_values"].shape[-2:]
        count = height // self.patch_size * (width // self.patch_size) \
            // round(1.0 / self.pixel_shuffle_ratio ** 2)
        rows, columns = (int(own) for own in arrays["aspect_ratios"][0])
        tile = self.patch_token * count
        row = self.tile_x_separator_token.join([tile] * columns) + self.tile_y_separator_token
        tiles = row * rows if rows * columns > 1 else ""
        return f"{self.start_of_image_token}{tiles}{self.image_token}{tile}" \
               f"{self.end_of_image_token}"


class MllamaReplacement(ImageTokenReplacement):
    processor_class: Literal["MllamaProcessor"]
    image_token: str = "<|image|>"

    @property
    def row_token(self) -> None:
        return None

    def unused_inputs(self) -> tuple[str, ...]:
        return ("num_tiles",)

    def text(self, arrays: Arrays, processor: Any) -> str:
        return self.image_token


class AudioTokenReplacement(PromptReplacement):
    """Base of classes whose placeholder is `audio_token`."""

    # How the extractor is used, see `Windows`; and the name of Whisper's mask of frames, if any.
    windows: ClassVar[Windows] = "one"
    mask: ClassVar[str | None] = "feature_attention_mask"

    audio_token: str

    def max_seconds(self, window: float) -> float:
        """Length of the longest clip that transformers does not truncate.

        Args:
            window: length of the extractor's window in seconds.
        """
        return window

    @property
    def placeholder(self) -> str:
        return self.audio_token


class Qwen2AudioReplacement(AudioTokenReplacement):
    processor_class: Literal["Qwen2AudioProcessor"]
    audio_token: str = "<|AUDIO|>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        frames = int(arrays["feature_attention_mask"].sum())
        return self.audio_token * (((frames - 1) // 2 + 1 - 2) // 2 + 1)


class Qwen2_5OmniReplacement(Qwen2AudioReplacement):
    windows: ClassVar[Windows] = "cut"  # as the encoder reads

    processor_class: Literal["Qwen2_5OmniProcessor"]  # type: ignore[assignment]


class Qwen3OmniReplacement(AudioTokenReplacement):
    windows: ClassVar[Windows] = "none"

    processor_class: Literal["Qwen3OmniMoeProcessor"]
    n_window: Positive = 50
    audio_token: str = "<|audio_pad|>"

    def max_seconds(self, window: float) -> float:
        return MAX_SECONDS

    def text(self, arrays: Arrays, processor: Any) -> str:
        frames = int(arrays["feature_attention_mask"].sum())
        whole, rest = divmod(frames, self.n_window * 2)
        rest = (rest - 1) // 2 + 1
        return self.audio_token * (((rest - 1) // 2 + 1 - 1) // 2 + 1 + whole * 13)


class _WindowsReplacement(AudioTokenReplacement):
    """Base of classes whose encoder reads windows on their own."""

    windows: ClassVar[Windows] = "several"
    mask: ClassVar[str | None] = "input_features_mask"

    max_audio_len: float = Field(600, gt=0)  # seconds

    def max_seconds(self, window: float) -> float:
        return self.max_audio_len // window * window


class AudioFlamingo3Replacement(_WindowsReplacement):
    processor_class: Literal["AudioFlamingo3Processor"]
    audio_token: str = "<sound>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        frames = int(arrays["input_features_mask"].sum())
        return self.audio_token * (((frames - 1) // 2 + 1 - 2) // 2 + 1)


class GlmAsrReplacement(_WindowsReplacement):
    processor_class: Literal["GlmAsrProcessor"]
    audio_token: str = "<|pad|>"
    max_audio_len: float = Field(655, gt=0)

    def text(self, arrays: Arrays, processor: Any) -> str:
        frames = int(arrays["input_features_mask"].sum())
        return self.audio_token * (((frames - 1) // 2 + 1 - 4) // 4 + 1)


class VoxtralReplacement(AudioTokenReplacement):
    """Each window has a row for 8 frames, also where it is padded."""

    windows: ClassVar[Windows] = "joined"
    mask: ClassVar[str | None] = None

    processor_class: Literal["VoxtralProcessor"]
    audio_token: str = "[AUDIO]"
    begin_audio_token: str = "[BEGIN_AUDIO]"

    def max_seconds(self, window: float) -> float:
        return MAX_SECONDS

    def text(self, arrays: Arrays, processor: Any) -> str:
        windows, _, frames = arrays["input_features"].shape
        count: int = windows * frames // 8
        return self.begin_audio_token + self.audio_token * count


class Gemma3nAudioReplacement(AudioTokenReplacement):
    processor_class: Literal["Gemma3nProcessor"]
    audio_seq_length: Positive = 188
    boa_token: str = "<start_of_audio>"
    eoa_token: str = "<end_of_audio>"
    audio_token: str = "<audio_soft_token>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        return f"\n\n{self.boa_token}{self.audio_token * self.audio_seq_length}" \
               f"{self.eoa_token}\n\n"


class Gemma4AudioReplacement(AudioTokenReplacement):
    windows: ClassVar[Windows] = "cut"  # the encoder multiplies the other frames by 0

    processor_class: Literal["Gemma4Processor"]
    boa_token: str = "<|audio>"
    eoa_token: str = "<audio|>"
    audio_token: str = "<|audio|>"

    def text(self, arrays: Arrays, processor: Any) -> str:
        mask = arrays["input_features_mask"][0]
        for _ in range(2):  # convolutions of stride 2
            mask = mask[::2]
        return f"{self.boa_token}{self.audio_token * int(mask.sum())}{self.eoa_token}"


AnyImageReplacement = Annotated[
    Qwen2VLReplacement | Glm4vReplacement | Gemma3Replacement | Gemma3nReplacement
    | Gemma4Replacement | PaliGemmaReplacement | PixtralReplacement | LightOnOcrReplacement
    | LlavaReplacement | DeepseekVLReplacement | JanusReplacement | LlavaNextReplacement
    | LlavaOnevisionReplacement | InternVLReplacement | QianfanOCRReplacement | GotOcr2Replacement
    | AyaVisionReplacement | Cohere2VisionReplacement | Idefics3Replacement | Llama4Replacement
    | MllamaReplacement,
    Field(discriminator="processor_class")]
AnyAudioReplacement = Annotated[
    Qwen2AudioReplacement | Qwen2_5OmniReplacement | Qwen3OmniReplacement
    | AudioFlamingo3Replacement | GlmAsrReplacement | VoxtralReplacement
    | Gemma3nAudioReplacement | Gemma4AudioReplacement,
    Field(discriminator="processor_class")]


def _by_class(union: Any) -> dict[str, type[PromptReplacement]]:
    return {name: own for own in get_args(get_args(union)[0])
            for name in get_args(own.model_fields["processor_class"].annotation)}


IMAGE_REPLACEMENTS = _by_class(AnyImageReplacement)
AUDIO_REPLACEMENTS = _by_class(AnyAudioReplacement)
