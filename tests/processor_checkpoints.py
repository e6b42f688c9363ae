"""Processor files of model families, as published, and the media of their tests."""

import json
from dataclasses import dataclass, field

import numpy as np
from tiny_tokenizers import byte_level
from tokenizers import AddedToken

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@dataclass(frozen=True)
class Family:
    """Files of a checkpoint; `tokens` are special tokens by name, `others` without a name."""

    processor_class: str
    image: dict = field(default_factory=dict)
    audio: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)
    others: tuple = ()
    row: str = ""  # special token of config.json's image_token_id


GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
         "image_token": "<image_soft_token>"}
WHISPER = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
FAMILIES = {
    "qwen2_vl": Family(
        "Qwen2VLProcessor", {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136,
                             "max_pixels": 200_000, "patch_size": 14, "temporal_patch_size": 2,
                             "merge_size": 2, **CLIP},
        others=("<|image_pad|>", "<|video_pad|>"), row="<|image_pad|>"),
    "qwen3_vl": Family(
        "Qwen3VLProcessor", {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {
            "longest_edge": 300_000, "shortest_edge": 65_536}, "patch_size": 16,
            "temporal_patch_size": 2, "merge_size": 2, **HALF},
        others=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        row="<|image_pad|>"),
    "glm4v": Family(
        "Glm4vProcessor", {"image_processor_type": "Glm4vImageProcessor", "size": {
            "longest_edge": 300_000, "shortest_edge": 12_544}, "patch_size": 14,
            "temporal_patch_size": 2, "merge_size": 2, **CLIP},
        others=("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
                "<|begin_of_video|>", "<|end_of_video|>"), row="<|image|>"),
    "exaone4_5": Family(
        "Exaone4_5_Processor", {"image_processor_type": "Qwen2VLImageProcessor", "size": {
            "longest_edge": 200_000, "shortest_edge": 3136}, "patch_size": 14,
            "temporal_patch_size": 2, "merge_size": 2, **CLIP},
        others=("<|image_pad|>", "<|video_pad|>"), row="<|image_pad|>"),
    "gemma3": Family(
        "Gemma3Processor", {"image_processor_type": "Gemma3ImageProcessor", "size": {
            "height": 224, "width": 224}, "do_pan_and_scan": True, "resample": 2, **HALF},
        settings={"image_seq_length": 16}, tokens=GEMMA, row="<image_soft_token>"),
    "gemma3n": Family(
        "Gemma3nProcessor", {"image_processor_type": "SiglipImageProcessorFast", "size": {
            "height": 256, "width": 256}, "resample": 2, "do_normalize": False},
        {"feature_extractor_type": "Gemma3nAudioFeatureExtractor"},
        {"image_seq_length": 16, "audio_seq_length": 12},
        {**GEMMA, "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>",
         "audio_token": "<audio_soft_token>"}, row="<image_soft_token>"),
    "gemma4": Family(
        "Gemma4Processor", {"image_processor_type": "Gemma4ImageProcessor",
                            "max_soft_tokens": 70},
        {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}, {},
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
         "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
        ("<|video|>",), "<|image|>"),
    "paligemma": Family(
        "PaliGemmaProcessor", {"image_processor_type": "SiglipImageProcessor", "size": {
            "height": 56, "width": 56}, "image_seq_length": 16, **HALF},
        others=("<image>", *(f"<loc{i:0>4}>" for i in range(1024)),
                *(f"<seg{i:0>3}>" for i in range(128))), row="<image>"),
    "pixtral": Family(
        "PixtralProcessor", {"image_processor_type": "PixtralImageProcessor", "size": {
            "longest_edge": 400}, "patch_size": {"height": 16, "width": 16}, **CLIP},
        settings={"patch_size": 14, "spatial_merge_size": 2},
        others=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), row="[IMG]"),
    "lighton_ocr": Family(
        "LightOnOcrProcessor", {"image_processor_type": "PixtralImageProcessor", "size": {
            "longest_edge": 400}, "patch_size": {"height": 28, "width": 28}, **CLIP},
        settings={"patch_size": 14, "spatial_merge_size": 2},
        tokens={"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>",
                "image_end_token": "<|vision_end|>"}, row="<|image_pad|>"),
    "llava": Family(
        "LlavaProcessor", {"image_processor_type": "CLIPImageProcessor", "size": {
            "shortest_edge": 112}, "crop_size": {"height": 112, "width": 112}, **CLIP},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default",
                  "num_additional_image_tokens": 1, "image_token": "<image>"},
        others=("<image>",), row="<image>"),
    "llava_siglip": Family(
        "LlavaProcessor", {"image_processor_type": "SiglipImageProcessor", "size": {
            "height": 98, "width": 98}, **HALF},
        settings={"patch_size": 14, "vision_feature_select_strategy": "full"},
        others=("<image>",), row="<image>"),
    "deepseek_vl": Family(
        "DeepseekVLProcessor", {"image_processor_type": "DeepseekVLImageProcessor", "size": {
            "height": 96, "width": 96}, **HALF},
        settings={"num_image_tokens": 36}, tokens={"image_token": "<image_placeholder>"},
        row="<image_placeholder>"),
    "janus": Family(
        "JanusProcessor", {"image_processor_type": "JanusImageProcessor", "size": {
            "height": 96, "width": 96}, **HALF},
        settings={"num_image_tokens": 36}, tokens={
            "image_token": "<image_placeholder>", "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>"}, row="<image_placeholder>"),
    "llava_next": Family(
        "LlavaNextProcessor", {"image_processor_type": "LlavaNextImageProcessor", "size": {
            "shortest_edge": 112}, "crop_size": {"height": 112, "width": 112},
            "image_grid_pinpoints": [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]],
            **CLIP},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default",
                  "num_additional_image_tokens": 1},
        others=("<image>",), row="<image>"),
    "llava_onevision": Family(
        "LlavaOnevisionProcessor", {
            "image_processor_type": "LlavaOnevisionImageProcessor", "size": {
                "height": 96, "width": 96}, "image_grid_pinpoints": [
                [96 * row, 96 * column] for row in range(1, 5) for column in range(1, 5)], **HALF},
        settings={"num_image_tokens": 36, "vision_feature_select_strategy": "full",
                  "vision_aspect_ratio": "anyres_max_4"},
        others=("<image>", "<video>"), row="<image>"),
    "internvl": Family(
        "InternVLProcessor", {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {
            "height": 112, "width": 112}, "crop_to_patches": False, "max_patches": 6, **CLIP},
        settings={"image_seq_length": 16},
        tokens={"start_image_token": "<img>", "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
        row="<IMG_CONTEXT>"),
    "qianfan_ocr": Family(
        "QianfanOCRProcessor", {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {
            "height": 112, "width": 112}, "max_patches": 6, **CLIP},
        settings={"image_seq_length": 16},
        tokens={"start_image_token": "<img>", "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>"},
        others=("<image>",), row="<IMG_CONTEXT>"),
    "got_ocr2": Family(
        "GotOcr2Processor", {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {
            "height": 256, "width": 256}, **CLIP},
        others=("<imgpad>", "<img>", "</img>"), row="<imgpad>"),
    "aya_vision": Family(
        "AyaVisionProcessor", {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {
            "height": 112, "width": 112}, "max_patches": 6, **HALF},
        settings={"patch_size": 14, "img_size": 112, "downsample_factor": 2},
        others=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
                "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL",
                *(f"TILE_{index}" for index in range(1, 7))), row="<|IMG_PATCH|>"),
    "cohere2_vision": Family(
        "Cohere2VisionProcessor", {"image_processor_type": "Cohere2VisionImageProcessor", "size": {
            "height": 112, "width": 112}, "patch_size": 4, "max_patches": 6, **HALF},
        tokens={"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
                "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"},
        row="<|IMG_PATCH|>"),
    "idefics3": Family(
        "Idefics3Processor", {"image_processor_type": "Idefics3ImageProcessor", "size": {
            "longest_edge": 364}, "max_image_size": {"longest_edge": 91}, "resample": 1, **HALF},
        settings={"image_seq_len": 9},
        others=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))),
        row="<image>"),
    "smolvlm": Family(
        "SmolVLMProcessor", {"image_processor_type": "SmolVLMImageProcessor", "size": {
            "longest_edge": 512}, "max_image_size": {"longest_edge": 128}, "resample": 1, **HALF},
        settings={"image_seq_len": 4},
        others=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
                "<video>",
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))),
        row="<image>"),
    "llama4": Family(
        "Llama4Processor", {"image_processor_type": "Llama4ImageProcessorFast", "size": {
            "height": 112, "width": 112}, "max_patches": 8, "resample": 2, **HALF},
        settings={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        others=("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>",
                "<|tile_x_separator|>", "<|tile_y_separator|>"), row="<|patch|>"),
    "mllama": Family(
        "MllamaProcessor", {"image_processor_type": "MllamaImageProcessor", "size": {
            "height": 112, "width": 112}, "max_image_tiles": 4, "resample": 2, **CLIP},
        others=("<|image|>", "<|python_tag|>"), row="<|image|>"),
    "qwen2_5_omni": Family(
        "Qwen2_5OmniProcessor", {"image_processor_type": "Qwen2VLImageProcessor",
                                 "min_pixels": 3136, "max_pixels": 100_000, **CLIP},
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
        tokens={"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
                "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
                "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}),
    "qwen3_omni": Family(
        "Qwen3OmniMoeProcessor", {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16,
                                  "min_pixels": 4096, "max_pixels": 100_000, **HALF},
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
        tokens={"image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>",
                "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
                "vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>",
                "audio_eos_token": "<|audio_end|>"}),
    "qwen2_audio": Family(
        "Qwen2AudioProcessor", {}, {"feature_extractor_type": "WhisperFeatureExtractor",
                                    "feature_size": 128},
        others=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")),
    "audioflamingo3": Family("AudioFlamingo3Processor", {}, WHISPER, {
        "max_audio_len": 65}, others=("<sound>",)),
    "glmasr": Family("GlmAsrProcessor", {}, WHISPER, {
        "audio_token": "<|pad|>", "max_audio_len": 65}, others=("<|pad|>",)),
    "voxtral": Family("VoxtralProcessor", {}, WHISPER, {
        "audio_token": "[AUDIO]"}, others=("[AUDIO]", "[BEGIN_AUDIO]")),
    "whisper": Family("WhisperProcessor", {}, {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}),
}
# Widths and heights of prompts' images: small, wide, tall, large, a single row, two images.
PROMPTS = (((40, 30),), ((301, 97),), ((83, 350),), ((640, 479),), ((120, 1),),
           ((301, 97), (61, 47)))
SECONDS = (0.5, 3.21)


def image_of(size):
    """A picture with smooth and with noisy parts: uint8 of [height, width, 3]."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width))
    return np.stack([columns * 255 // max(width - 1, 1), (rows * 7 + columns * 3) % 256,
                     np.where((rows // 8 + columns // 8) % 2, noise, 255 - rows % 256)],
                    axis=-1).astype(np.uint8)


def speech_of(seconds, rate=16_000):
    """A chirp with noise: float32 of [samples]."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(len(time)).standard_normal(len(time))
    return (0.4 * np.sin(2 * np.pi * (200 + 300 * time) * time) + 0.02 * noise).astype(np.float32)


def tokenizer_of(family):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (
        "<s>", "</s>", *dict.fromkeys((*family.tokens.values(), *family.others)))])
    return tokenizer


def write_checkpoint(family, folder):
    """Write the files that a repository of the family has beside its weights."""
    tokenizer = tokenizer_of(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "pad_token": "</s>", "extra_special_tokens": family.tokens},
        "processor_config.json": {"processor_class": family.processor_class, **family.settings},
        "preprocessor_config.json": {"processor_class": family.processor_class, **family.image,
                                     **family.audio},
        "config.json": {"image_token_id": tokenizer.token_to_id(family.row)} if family.row else {},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return tokenizer
