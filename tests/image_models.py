"""Tiny random image-text models as published, and what transformers generates with them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal_models import tiny_model
from PIL import Image
from processor_checkpoints import FAMILIES, image_of, write_checkpoint

import llmc
from llmc.compiler.check.diff import diff

# By model: the processor, fields of the vision config, and of the whole config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {"image_size": 112}),
    "internvl": ("internvl", {"image_size": [112, 112], "patch_size": [14, 14]}),
    "mistral3": ("pixtral", {"image_size": 400, "patch_size": 14}),
    # Positions by axis, with deep rows or recurrent layers.
    "qwen2_5_vl": ("qwen2_vl", {}),
    "qwen3_vl": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": ("qwen3_vl", {"patch_size": 16}),
}
REFUSED = {"gemma3": ("gemma3", {"image_size": 224, "patch_size": 14})}
GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
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


def joined(arrays):
    """Arrays of several images as transformers' processors join them: padded to one size."""
    shape = np.max([own.shape[1:] for own in arrays], 0)
    axis = 0
    if len(shape) == 4:  # images of several tiles
        axis, shape = 1, shape[1:]
        arrays = [own[0] for own in arrays]
    padded = [np.pad(own, [(0, 0), *((0, size - had) for size, had in zip(
        shape, own.shape[1:], strict=True))]) for own in arrays]
    whole = np.concatenate(padded)
    return whole[None] if axis else whole


def expected(model, prompt, token, count=10):
    """Greedy tokens and their log-probabilities by transformers; `token` is that of rows."""
    arrays = [own.item.arrays for own in prompt.ranges]
    given = {name: torch.from_numpy(joined([own[name] for own in arrays]))
             for name in (arrays[0] if arrays else ())}
    ids = torch.tensor([prompt.token_ids])
    kinds = {name: (ids == token).int() for name in ("mm_token_type_ids", "token_type_ids")
             if given and name in inspect.signature(model.forward).parameters}
    with torch.no_grad():
        made = model.generate(ids, **given, **kinds, max_new_tokens=count, do_sample=False,
                              eos_token_id=None, pad_token_id=0, output_logits=True,
                              return_dict_in_generate=True)
    return made.sequences[0, ids.shape[1]:].tolist(), \
        [float(logits[0].double().log_softmax(-1).max()) for logits in made.logits]


def assert_generates(model, llm, prompt, completion, tolerance=1e-4):
    """As transformers does; `prompt` has `prompt` and `images`."""
    inputs = llm.processor.description.image
    token = inputs.placeholder_id if inputs.row_token_id is None else inputs.row_token_id
    read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
    tokens, logprobs = expected(model, read, token, len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=tolerance)


def prompts_of(llm):
    """Prompts with 0, 1 and 3 images of odd sizes."""
    own = llm.processor.placeholders["image"]
    return [{"prompt": "hello there", "images": []},
            {"prompt": f"see {own} now", "images": images(1)},
            {"prompt": f"a {own} b {own} d {own} c", "images": images(3)}]


def assert_image_diff(case, directory):
    """`llmc diff --image` of a model with two deep layers, whose original is beside its case."""
    pictures = [directory / f"{index}.png" for index in range(2)]
    for picture, image in zip(pictures, images(2), strict=True):
        image.save(picture)
    report = diff(case, case.parent / "hf", images=pictures, tokens=0)  # one in a line
    assert report.verdict is None, report
    names = {own.name for own in report.layers if own.name.endswith("(images)")}
    assert {"rows of image 0 (images)", "rows of image 1, deep layer 1 (images)",
            "hidden_states.0 (images)", "logits (images)"} <= names
