"""Chat templates, EOS tokens and sampling defaults from a GGUF file's metadata.

| key | result |
| --- | --- |
| tokenizer.chat_template, tokenizer.chat_template.NAME | chat templates by name |
| tokenizer.ggml.eot_token_id, .eom_token_id | EOS tokens |
| tokenizer.ggml.add_space_prefix false | a tokenizer without a space prefix |
| general.sampling.* | keys of generation_config.json |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmc.compiler.frontend.checkpoint import read_json
from llmc.compiler.frontend.gguf_header import GgufHeader
from llmc.compiler.frontend.tokenizer_config import write_chat_templates
from llmc.errors import LlmcError

_TEMPLATE = "tokenizer.chat_template"
_END_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Tokens that end a turn in some chat format. llama.cpp treats them as EOS tokens in every file.
# `</s>` is not among them: in Gemma's vocabulary it is HTML.
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
              "<|flush|>", "<|calls|>", "<end_of_turn>", "<turn|>", "<|tool_response>",
              "<|endoftext|>", "<|end_of_text|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
              "<end_of_utterance>")
# In a vocabulary with both tokens of a pair, `<|end|>` ends a message, not the turn.
_MESSAGE_END, _CHANNELS = "<|end|>", (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
_SENTENCEPIECE = "llama"  # a tokenizer.ggml.model; others have no space prefix
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}


def end_tokens(header: GgufHeader, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the EOS tokens other than `eos_token_id`."""
    named = [int(token) for key in _END_KEYS
             if (token := header.optional_number(key)) is not None]
    texts = {text: token for text in _END_TEXTS
             if (token := tokenizer.token_to_id(text)) is not None}
    if any(first in texts and second in texts for first, second in _CHANNELS):
        texts.pop(_MESSAGE_END, None)
    return (*named, *texts.values())


def sampling(header: GgufHeader) -> dict[str, Any]:
    """Return sampling parameters by their keys in generation_config.json."""
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value  # stored as float32
            for key, name in _SAMPLING.items()
            if (value := header.optional_number(f"general.sampling.{key}")) is not None}


def complete_tokenizer(header: GgufHeader, target: Path) -> None:
    """Add chat templates and the space prefix, as transformers does not read them from GGUF.

    Raises:
        LlmcError: a chat template is not UTF-8, or its name is not valid for a file.
    """
    try:
        templates = {key.removeprefix(f"{_TEMPLATE}."): header.text(key)
                     for key in sorted(header.fields) if key.startswith(f"{_TEMPLATE}.")}
    except UnicodeDecodeError as error:
        raise LlmcError(f"a chat template of the GGUF file is not UTF-8 ({error}); give another "
                        f"file") from error
    write_chat_templates(templates, target)
    if header.text("tokenizer.ggml.model") == _SENTENCEPIECE \
            and header.optional_number("tokenizer.ggml.add_space_prefix") is False:
        _drop_space_prefix(target)


def _drop_space_prefix(target: Path) -> None:
    """Remove the space prefix of a SentencePiece tokenizer, in encoding and decoding."""
    config = read_json(target / "tokenizer_config.json")
    _write_json(target / "tokenizer_config.json", {**config, "add_prefix_space": False})
    data = read_json(target / "tokenizer.json")
    _write_json(target / "tokenizer.json", data | {
        kind: _without_prefix(data.get(kind))
        for kind in ("normalizer", "pre_tokenizer", "decoder")})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")


def _without_prefix(component: Any) -> Any:
    """Remove the space prefix from a normalizer, pre-tokenizer or decoder of tokenizer.json."""
    if not component:
        return component
    for parts in ("normalizers", "pretokenizers", "decoders"):
        if parts in component:
            kept = [cleaned for part in component[parts]
                    if (cleaned := _without_prefix(part)) is not None]
            return {**component, parts: kept} if kept else None
    if component["type"] == "Metaspace":
        return {**component, "prepend_scheme": "never"}
    if component["type"] in ("Prepend", "Strip"):
        return None
    return component
