"""Tiny random models of text, images and audio, in directories as published."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import families
import multimodal_models
import numpy as np
import pytest
import torch
from audio_models import clips
from image_models import images
from processor_checkpoints import FAMILIES, write_checkpoint
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import llmc

THINKERS = ("qwen2_5_omni", "qwen3_omni_moe")
MODELS = (*THINKERS, "gemma4")
_PROCESSORS = {"qwen3_omni_moe": "qwen3_omni"}
WINDOW = 3  # seconds that the feature extractor reads, of 300 in published checkpoints
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 128, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "output_dim": 64, "max_source_positions": 100,
    "downsample_hidden_size": 8}
# Chunks of 20 frames, so that clips have several; Qwen3's rows of 100 frames are in its formula.
_OWN_AUDIO = {"qwen2_5_omni": {"n_window": 10}, "qwen3_omni_moe": {
    "n_window": 50, "n_window_infer": 200}}
_CONFORMER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
    "subsampling_conv_channels": [128, 4]}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
_TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": families.FAMILIES["qwen2"], "qwen3_omni_moe": families.MIXTURES["qwen3_moe"]}
_TOKENS = {"image_token_id": "image_token", "audio_token_id": "audio_token",
           "video_token_id": "video_token", "vision_start_token_id": "vision_bos_token",
           "vision_end_token_id": "vision_eos_token", "audio_start_token_id": "audio_bos_token",
           "audio_end_token_id": "audio_eos_token"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'audio' %}AUDIO{% elif part.type == 'image' %}"
    "IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]")
GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)


def tiny_model(name: str, tokens: dict[str, int], vocab_size: int) -> torch.nn.Module:
    """A random thinker whose every parameter affects the output.

    Args:
        tokens: token ids by the config's names.
    """
    base = CONFIG_MAPPING[f"{name}_thinker"]()
    text = {**_TEXTS[name], "vocab_size": vocab_size, "max_position_embeddings": 2048,
            **families.rope("default", mrope_section=[4, 2, 2])}
    sizes = {"audio_config": {**_AUDIO, **_OWN_AUDIO[name]}, "vision_config": _VISION}
    kinds = {key: {own: value for own, value in given.items()
                   if own in getattr(base, key).to_dict()} for key, given in sizes.items()}
    config = type(base)(text_config={
        **text, "model_type": base.text_config.model_type}, **tokens, **kinds)
    return families.randomized(
        AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


def tiny_gemma4(tokens: dict[str, int], vocab_size: int) -> torch.nn.Module:
    """The same for Gemma 4, whose linear layers clip activations to ranges of the checkpoint."""
    model = multimodal_models.tiny_model(
        "gemma4", tokens["image_token_id"],
        {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size,
         "max_position_embeddings": 2048},
        {"audio_config": _CONFORMER, "audio_token_id": tokens["audio_token_id"]},
        patch_size=16, position_embedding_size=64)
    for name, buffer in model.named_buffers():
        if name.endswith(("put_min", "put_max")) and "audio" in name:
            buffer.fill_(-1.5 if name.endswith("min") else 1.0)
    return model


def write_model(name: str, directory: Path) -> torch.nn.Module:
    """Write a model's directory; return the model of transformers, of an omni model the thinker."""
    directory.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[_PROCESSORS.get(name, name)]
    if name in THINKERS:
        family = dataclasses.replace(family, audio={**family.audio, "chunk_length": WINDOW})
    tokenizer = write_checkpoint(family, directory)
    tokens = {key: tokenizer.token_to_id(family.tokens[own]) for key, own in _TOKENS.items()
              if own in family.tokens}
    make = tiny_gemma4 if name == "gemma4" else functools.partial(tiny_model, name)
    model: Any = make(tokens, tokenizer.get_vocab_size())
    model.save_pretrained(directory)
    audio, image = marks_of(name)
    (directory / "chat_template.jinja").write_text(
        TEMPLATE.replace("AUDIO", audio).replace("IMAGE", image))
    if name in THINKERS:
        _add_speaker(name, directory)
    return model


def _add_speaker(name: str, directory: Path) -> None:
    """Make a thinker's directory that of a whole model, with another that speaks."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["OmniForConditionalGeneration"], "model_type": name,
        "thinker_config": config, "talker_config": {"model_type": f"{name}_talker"}}))
    weights = load_file(directory / "model.safetensors")
    weights = {f"thinker.{key}": value for key, value in weights.items()}
    save_file({**weights, "talker.codec_head.weight": np.zeros((2, 2), np.float32)},
              directory / "model.safetensors", {"format": "pt"})


def marks_of(name: str) -> tuple[str, str]:
    """The placeholders of a clip and of an image, with the tokens that stand around them."""
    tokens = FAMILIES[_PROCESSORS.get(name, name)].tokens
    return tuple("".join(tokens.get(key, "") for key in (
        f"{around}_bos_token", f"{kind}_token", f"{around}_eos_token"))
        for kind, around in (("audio", "audio"), ("image", "vision")))


def joined(arrays: list[np.ndarray]) -> torch.Tensor:
    """Arrays of several items, padded to one size."""
    shape = np.max([own.shape[1:] for own in arrays], 0)
    return torch.from_numpy(np.concatenate([np.pad(own, [(0, 0), *(
        (0, size - had) for size, had in zip(shape, own.shape[1:], strict=True))])
        for own in arrays]))


def expected(model: Any, prompt: Any, count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities by transformers."""
    arrays = {kind: [own.item.arrays for own in prompt.ranges if own.item.modality == kind]
              for kind in ("image", "audio")}
    given = {name: joined([own[name] for own in several]) for several in arrays.values()
             for name in (several[0] if several else ())}
    ids = torch.tensor([prompt.token_ids])
    if arrays["image"] and "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        made = model.generate(
            ids, **given, attention_mask=torch.ones_like(ids), max_new_tokens=count,
            do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True)
    return made.sequences[0, ids.shape[1]:].tolist(), \
        [float(logits[0].double().log_softmax(-1).max()) for logits in made.logits]


def assert_generates(model: Any, llm: llmc.LLM, prompt: dict[str, Any], completion: Any) -> None:
    """As transformers does."""
    read = llm.media_prompt(prompt["prompt"], images=prompt.get("images", ()),
                            audio=prompt.get("audio", ()))
    tokens, logprobs = expected(model, read, len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)


def prompts_of(name: str, longer: float = 0.0) -> list[dict[str, Any]]:
    """Prompts with 0, 1 and 3 clips of odd lengths, with images, and with both in turn.

    Args:
        longer: seconds that clips are longer.
    """
    audio, image = marks_of(name)
    return [{"prompt": "hello there"},
            {"prompt": f"hear {audio} now", "audio": clips(1, longer)},
            {"prompt": f"a {audio} b {audio}{audio} c", "audio": clips(3, longer)},
            {"prompt": f"see {image} now", "images": images(1)},
            {"prompt": f"{image} says {audio}, {audio}{image} what?", "images": images(2),
             "audio": clips(2, longer)}]
