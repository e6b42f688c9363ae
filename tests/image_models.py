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
    # Tokens of an image, or of the whole prompt, see each other.
    "gemma3": ("gemma3", {"image_size": 224, "patch_size": 14}),
    "paligemma": ("paligemma", {"image_size": 56, "patch_size": 14}),
    "paligemma2": ("paligemma", {"image_size": 56, "patch_size": 14}),
    "mistral3": ("pixtral", {"image_size": 400, "patch_size": 14}),
    # Positions by axis, with deep rows or recurrent layers.
    "qwen2_5_vl": ("qwen2_vl", {}),
    "qwen3_vl": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": ("qwen3_vl", {"patch_size": 16}),
}
# Fields of the whole config.
WHOLES = {"gemma3": {"mm_tokens_per_image": 16},
          **dict.fromkeys(("paligemma", "paligemma2"), {"projection_dim": 64, "hidden_size": 64})}
# Widths and heights of three images.
SIZES = ((131, 77), (64, 200), (301, 97))


def write_model(name: str, directory: Path, **text: Any) -> torch.nn.Module:
    """Write a model's directory; return the model of transformers.

    Args:
        text: fields of the text config.
    """
    processor, vision = MODELS[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_checkpoint(FAMILIES[processor], directory)
    row = tokenizer.token_to_id(FAMILIES[processor].row)
    known = json.loads((directory / "config.json").read_text())
    model = tiny_model(name, row, {"vocab_size": tokenizer.get_vocab_size(),
                                   "max_position_embeddings": 2048, **text},
                       WHOLES.get(name, {}), **vision)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config.get("image_token_id", config.get("image_token_index")) == row, known
    return model


def images(count: int = 3) -> list[Image.Image]:
    return [Image.fromarray(image_of(size)) for size in SIZES[:count]]
