"""Tiny random models of audio and text in directories as published."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import soundfile
import torch
from processor_checkpoints import FAMILIES, speech_of, write_checkpoint
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

import llmc
from llmc.compiler.check.diff import diff

MODELS = ("qwen2_audio", "voxtral", "glmasr", "audioflamingo3")
WINDOW = 2  # seconds, of 30 in published checkpoints
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 128, "d_model": 32, "hidden_size": 32, "encoder_layers": 2,
    "num_hidden_layers": 2, "encoder_attention_heads": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "encoder_ffn_dim": 48, "intermediate_size": 128,
    "max_source_positions": 100, "max_position_embeddings": 100}
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2}
# Renders clips as their placeholder.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ 'AUDIO' if part.type == 'audio' else part.text }}"
    "{% endfor %}{% endif %}{% endfor %}[assistant]")
SECONDS = (1.37, 0.61, 1.994)  # of three clips
GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)


def tiny_model(name: str, row: int, vocab_size: int) -> torch.nn.Module:
    """A random model whose every parameter affects the output.

    Args:
        row: token id of rows.
    """
    base = CONFIG_MAPPING[name]()

    def sized(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        known = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
        return {**known, **{key: value for key, value in sizes.items() if key in known}}

    config = type(base)(
        audio_config=sized(base.audio_config, _AUDIO),
        text_config=sized(base.get_text_config(), {**_TEXT, "vocab_size": vocab_size}),
        audio_token_id=row)
    # transformers lists this decoder there.
    auto = AutoModelForSeq2SeqLM if name == "audioflamingo3" else AutoModelForMultimodalLM
    return families.randomized(auto.from_config(config, attn_implementation="eager"))


def write_model(name: str, directory: Path) -> torch.nn.Module:
    """Write a model's directory; return the model of transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[name]
    tokenizer = write_checkpoint(dataclasses.replace(
        family, audio={**family.audio, "chunk_length": WINDOW}), directory)
    row = tokenizer.token_to_id(family.settings.get("audio_token", family.others[0]))
    model = tiny_model(name, row, tokenizer.get_vocab_size())
    model.save_pretrained(directory)
    placeholder = tokenizer.id_to_token(row)
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("AUDIO", placeholder))
    config = json.loads((directory / "config.json").read_text())
    assert config.get("audio_token_id", config.get("audio_token_index")) == row
    return model


def clips(count: int = 3, longer: float = 0.0) -> list[np.ndarray]:
    """Clips of odd lengths.

    Args:
        longer: seconds that each is longer.
    """
    return [speech_of(seconds + longer) for seconds in SECONDS[:count]]


def hours() -> bytes:
    """A small file of three hours of silence."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(3 * 3600 * 1000, np.int16), 1000, format="FLAC")
    return file.getvalue()


def expected(model: Any, prompt: Any, count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities by transformers."""
    arrays = [own.item.arrays for own in prompt.ranges]
    given = {name: torch.from_numpy(np.concatenate([own[name] for own in arrays]))
             for name in (arrays[0] if arrays else ())}
    ids = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        made = model.generate(ids, **given, attention_mask=torch.ones_like(ids),
                              max_new_tokens=count, do_sample=False, eos_token_id=None,
                              pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    return made.sequences[0, ids.shape[1]:].tolist(), \
        [float(logits[0].double().log_softmax(-1).max()) for logits in made.logits]


def assert_generates(model: Any, llm: llmc.LLM, prompt: dict[str, Any], completion: Any) -> None:
    """As transformers does."""
    read = llm.media_prompt(prompt["prompt"], audio=prompt["audio"])
    tokens, logprobs = expected(model, read, len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)


def prompts_of(llm: llmc.LLM) -> list[dict[str, Any]]:
    """Prompts with 0, 1 and 3 clips of odd lengths."""
    own = llm.processor.placeholders["audio"]
    return [{"prompt": "hello there", "audio": []},
            {"prompt": f"hear {own} now", "audio": clips(1)},
            {"prompt": f"a {own} b {own} d {own} c", "audio": clips(3)}]


def assert_audio_diff(case, directory, images=()):
    """`llmc diff --audio` of a model whose original is beside its case, with images or without."""
    paths = [directory / f"{index}.wav" for index in range(2)]
    for path, clip in zip(paths, clips(2), strict=True):
        soundfile.write(path, clip, 16_000, subtype="FLOAT")
    report = diff(case, case.parent / "hf", audio=paths, images=images, tokens=0)
    assert report.verdict is None, report
    kinds = "images and audio clips" if images else "audio clips"
    assert {f"{name} ({kinds})" for name in (
        *(f"rows of image {index}" for index in range(len(images))), "rows of audio 0",
        "rows of audio 1", "hidden_states.0", "logits")} <= {own.name for own in report.layers}
