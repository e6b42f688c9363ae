"""Tiny random image-text models as published, and what transformers generates with them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from multimodal_models import TEXTS, tiny_model
from PIL import Image
from processor_checkpoints import FAMILIES, image_of, write_checkpoint
from transformers.models.mllama import processing_mllama

import llmc
from llmc.compiler.check.diff import diff

# By model: the processor, fields of the vision config, and of the whole config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {"image_size": 112}),
    "internvl": ("internvl", {"image_size": [112, 112], "patch_size": [14, 14]}),
    "llama4": ("llama4", {"image_size": 112, "intermediate_size": 128, "projector_input_dim": 40,
                          "projector_output_dim": 40, "vision_output_dim": 40}),
    "idefics3": ("idefics3", {"image_size": 91, "patch_size": 15}),
    "smolvlm": ("smolvlm", {"image_size": 128, "patch_size": 32}),
    # With bidirectional attention within an image or the whole prompt.
    "gemma3": ("gemma3", {"image_size": 224, "patch_size": 14}),
    "gemma4": ("gemma4", {"patch_size": 16, "position_embedding_size": 64}),
    # Activations are clipped to bounds of the checkpoint, and rows standardized.
    "gemma4_large": ("gemma4", {"patch_size": 16, "position_embedding_size": 64,
                                "use_clipped_linears": True, "standardize": True}),
    "paligemma": ("paligemma", {"image_size": 56, "patch_size": 14}),
    "paligemma2": ("paligemma", {"image_size": 56, "patch_size": 14}),
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
    # Layers of the language model attend to images.
    "mllama": ("mllama", {"image_size": 112, "patch_size": 28, "attention_heads": 2,
                          "num_global_layers": 1, "intermediate_layers_indices": [0, 2],
                          "vision_output_dim": 96}),
    # Positions by axis, with deep rows or recurrent layers.
    "qwen2_vl": ("qwen2_vl", {"hidden_size": 64}),
    "qwen2_5_vl": ("qwen2_vl", {}),
    "glm4v": ("glm4v", {}),
    "glm46v": ("glm4v", {}),
    "glm_ocr": ("glm4v", {}),
    "qwen3_vl": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1]}),
    # A deep layer for each of the language model's.
    "qwen3_vl_moe": ("qwen3_vl", {"patch_size": 16, "deepstack_visual_indexes": [0, 1, 2]}),
    "qwen3_5": ("qwen3_vl", {"patch_size": 16}),
    "qwen3_5_moe": ("qwen3_vl", {"patch_size": 16}),
}
# Fields of the whole config.
WHOLES = {"gemma3": {"mm_tokens_per_image": 16},
          **{name: {"projection_dim": 64, "hidden_size": 64}
             for name in ("paligemma", "paligemma2")}}
GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
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
    whole = dict(WHOLES.get(name, {}))
    if "audio_token" in FAMILIES[processor].tokens:
        whole["audio_token_id"] = tokenizer.token_to_id(FAMILIES[processor].tokens["audio_token"])
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    if TEXTS[name].get("hidden_size_per_layer_input"):
        sizes["vocab_size_per_layer_input"] = tokenizer.get_vocab_size()
    model = tiny_model(name, row, {**sizes, **text},
                       whole, **vision)
    for own, buffer in model.named_buffers():
        if own.endswith(("put_min", "put_max", "std_bias")):
            buffer.fill_(-0.7 if own.endswith("min") else 0.6)
        elif own.endswith("std_scale"):
            buffer.fill_(1.3)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config.get("image_token_id", config.get("image_token_index")) == row, known
    return model


def images(count: int = 3) -> list[Image.Image]:
    return [Image.fromarray(image_of(size)) for size in SIZES[:count]]


def joined(arrays, stacked):
    """Arrays of several images as transformers' processors join them: padded to one size.

    Tiles of all images are in one row, unless they are stacked by image.
    """
    shape = np.max([own.shape[1:] for own in arrays], 0)
    axis = 0
    if len(shape) == 4 and not stacked:  # images of several tiles
        axis, shape = 1, shape[1:]
        arrays = [own[0] for own in arrays]
    padded = [np.pad(own, [(0, 0), *((0, size - had) for size, had in zip(
        shape, own.shape[1:], strict=True))]) for own in arrays]
    whole = np.concatenate(padded)
    return whole[None] if axis else whole


def attended(arrays, ids, token):
    """Arguments for images that layers attend to, with the masks of transformers' processor."""
    if not arrays:
        return {}
    given = {name: torch.from_numpy(np.concatenate([own[name] for own in arrays], 1))
             for name in arrays[0]}
    tiles = given["aspect_ratio_mask"]
    mask = processing_mllama.convert_sparse_cross_attention_mask_to_dense(
        [processing_mllama.get_cross_attention_token_mask(list(ids), token)],
        tiles.sum(-1).tolist(), tiles.shape[-1], len(ids))
    return {**given, "cross_attention_mask": torch.from_numpy(mask)}


def inputs_of(model, prompt, token):
    """Inputs of transformers' model; `token` is that of rows."""
    arrays = [own.item.arrays for own in prompt.ranges]
    ids = torch.tensor([prompt.token_ids])
    if "cross_attention_mask" in inspect.signature(model.forward).parameters:
        given = attended(arrays, prompt.token_ids, token)
    else:
        given = {name: torch.from_numpy(joined([own[name] for own in arrays],
                                               "image_sizes" in own))
                 for own in arrays[:1] for name in own}
    if len(arrays) > 1 and "batch_num_images" in inspect.signature(model.forward).parameters:
        given["batch_num_images"] = torch.tensor([len(arrays)])
    kinds = {name: (ids == token).int() for name in ("mm_token_type_ids", "token_type_ids")
             if given and name in inspect.signature(model.forward).parameters}
    if model.config.model_type == "paligemma":  # types of the prompt and of a suffix
        kinds = {name: torch.zeros_like(types) for name, types in kinds.items()}
    return {"input_ids": ids, **given, **kinds}


def expected(model, prompt, token, count=10):
    """Greedy tokens and their log-probabilities by transformers; `token` is that of rows."""
    with torch.no_grad():
        made = model.generate(**inputs_of(model, prompt, token), max_new_tokens=count,
                              do_sample=False, eos_token_id=None, pad_token_id=0,
                              output_logits=True, return_dict_in_generate=True)
    return made.sequences[0, len(prompt.token_ids):].tolist(), \
        [float(logits[0].double().log_softmax(-1).max()) for logits in made.logits]


def row_token(llm):
    """Token id of an image's rows."""
    inputs = llm.processor.description.image
    return inputs.placeholder_id if inputs.row_token_id is None else inputs.row_token_id


def assert_scores(model, llm, prompt, completion):
    """The log-probabilities of a prompt's tokens are transformers'; its rows have none."""
    read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
    with torch.no_grad():
        logits = model(**inputs_of(model, read, row_token(llm))).logits[0].double()
    rows = {int(at) for own in read.ranges for at in own.positions}
    scores = logits.log_softmax(-1)
    assert len(completion.prompt_logprobs) == len(read.token_ids)
    for at, own in enumerate(completion.prompt_logprobs):
        assert (own is None) == (at == 0 or at in rows)
        assert own is None or abs(own.chosen - scores[at - 1, read.token_ids[at]]) < 1e-4


def assert_generates(model, llm, prompt, completion, tolerance=1e-4):
    """As transformers does; `prompt` has `prompt` and `images`."""
    read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
    tokens, logprobs = expected(model, read, row_token(llm), len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=tolerance)


def prompts_of(llm):
    """Prompts with 0, 1 and 3 images of odd sizes."""
    own = llm.processor.placeholders["image"]
    return [{"prompt": "hello there", "images": []},
            {"prompt": f"see {own} now", "images": images(1)},
            {"prompt": f"a {own} b {own} d {own} c", "images": images(3)}]


def assert_image_diff(case, directory, rows="rows of image 1, deep layer 1"):
    """`llmc diff --image` of a model whose original is beside its case; `rows` are compared, too.
    """
    pictures = [directory / f"{index}.png" for index in range(2)]
    for picture, image in zip(pictures, images(2), strict=True):
        image.save(picture)
    report = diff(case, case.parent / "hf", images=pictures, tokens=0)  # one in a line
    assert report.verdict is None, report
    names = {own.name for own in report.layers if own.name.endswith("(images)")}
    assert {"rows of image 0 (images)", f"{rows} (images)",
            "hidden_states.0 (images)", "logits (images)"} <= names
