"""Tiny random models of audio and text in directories as published."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import families
import numpy as np
import soundfile
import torch
from processor_checkpoints import FAMILIES, speech_of, write_checkpoint
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

MODELS = ("qwen2_audio", "voxtral", "glmasr")
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
