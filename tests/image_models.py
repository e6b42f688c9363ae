"""Tiny random image-text models in directories as published: weights, processor and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from multimodal_models import tiny_model
from PIL import Image
from processor_checkpoints import FAMILIES, image_of, write_checkpoint

# By model: the processor, fields of the vision config, and of the whole config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {"image_size": 112}),
    "internvl": ("internvl", {"image_size": [112, 112], "patch_size": [14, 14]}),
    "llama4": ("llama4", {"image_size": 112, "intermediate_size": 128, "projector_input_dim": 40,
                          "projector_output_dim": 40, "vision_output_dim": 40}),
    "idefics3": ("idefics3", {"image_size": 91, "patch_size": 15}),
    "smolvlm": ("smolvlm", {"image_size": 128, "patch_size": 32}),
    "mistral3": ("pixtral", {"image_size": 400, "patch_size": 14}),
    "vipllava": ("llava", {"image_size": 112}),
    "deepseek_vl": ("deepseek_vl", {"image_size": 96, "patch_size": 16}),
    "janus": ("janus", {"image_size": 96, "patch_size": 16, "projection_dim": 64, "depth": 2,
                        "num_image_tokens": 36}),
    "llava_next": ("llava_next", {"image_size": 112}),
    "llava_onevision": ("llava_onevision", {"image_size": 96, "patch_size": 16}),
    "lighton_ocr": ("lighton_ocr", {"image_size": 400, "patch_size": 14}),
    "qianfan_ocr": ("qianfan_ocr", {"image_size": 112, "patch_size": 14}),
    "got_ocr2": ("got_ocr2", {"image_size": 256, "patch_size": 4, "output_channels": 16,
                              "mlp_dim": 48, "global_attn_indexes": [2]}),
    "aya_vision": ("aya_vision", {"image_size": 112, "patch_size": 14}),
    "cohere2_vision": ("cohere2_vision", {"image_size": 112, "patch_size": 14}),
    "exaone4_5": ("exaone4_5", {"num_heads": 4, "num_key_value_heads": 2}),
    # Positions by axis, with deep rows or recurrent layers.
    "qwen2_vl": ("qwen2_vl", {"hidden_size": 64}),
    "qwen2_5_vl": ("qwen2_vl", {}),
    "glm4v": ("glm4v", {}),
    "glm46v": ("glm4v", {}),
    "glm_ocr": ("glm4v", {}),
    "qwen3_vl": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": ("qwen3_vl", {"patch_size": 16}),
    "qwen3_5_moe": ("qwen3_vl", {"patch_size": 16}),
}
REFUSED = {"gemma3": ("gemma3", {"image_size": 224, "patch_size": 14})}
# Widths and heights of three images.
SIZES = ((131, 77), (64, 200), (301, 97))


def write_model(name: str, directory: Path) -> torch.nn.Module:
    """Write a model's directory; return the model of transformers."""
    processor, vision = {**MODELS, **REFUSED}[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_checkpoint(FAMILIES[processor], directory)
    row = tokenizer.token_to_id(FAMILIES[processor].row)
    known = json.loads((directory / "config.json").read_text())
    model = tiny_model(name, row, {"vocab_size": tokenizer.get_vocab_size(),
                                   "max_position_embeddings": 2048}, **vision)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config.get("image_token_id", config.get("image_token_index")) == row, known
    return model


def images(count: int = 3) -> list[Image.Image]:
    return [Image.fromarray(image_of(size)) for size in SIZES[:count]]
