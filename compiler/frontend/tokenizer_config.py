"""Chat templates and special tokens of a checkpoint, for a runtime without transformers.

    tokenizer/chat_template.jinja                        the default template
    tokenizer/additional_chat_templates/tool_use.jinja   a named template
    tokenizer/tokenizer_config.json                      all special tokens: bos_token, …

transformers has used this layout since 2025, so it can also read the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.compiler.frontend.checkpoint import read_json
from llmc.errors import LlmcError, shown

TEMPLATE, FOLDER = "chat_template.jinja", "additional_chat_templates"
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
# Files with a key `chat_template`. Processors' files are the last, as transformers' tokenizers do
# not read them.
_SOURCES = (_CONFIG, "chat_template.json", "processor_config.json")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Read the chat templates of a Hugging Face directory by name.

    The unnamed template is `default`.

    Raises:
        LlmcError: a template is not a string.
    """
    files = {path.stem: path for path in sorted((directory / FOLDER).glob("*.jinja"))}
    if (directory / TEMPLATE).is_file():
        files["default"] = directory / TEMPLATE
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    for source in _SOURCES:
        path = directory / source
        value = read_json(path).get("chat_template") if path.is_file() else None
        if value is not None:
            return _named(value, path)
    return {}


def write_chat_templates(templates: Mapping[str, str], target: Path) -> None:
    """Write chat templates into a tokenizer's folder.

    Raises:
        LlmcError: a name is not valid for a file.
    """
    for name, text in templates.items():
        if not _NAME.fullmatch(name):
            raise LlmcError(f"a chat template has the name {shown(name)}; rename it to letters, "
                            f"digits, - and _")
        path = target / TEMPLATE if name == "default" else target / FOLDER / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_special_tokens(directory: Path, target: Path) -> None:
    """Write all special tokens to `target`'s tokenizer_config.json, without a chat template.

    A checkpoint has them in tokenizer_config.json, in special_tokens_map.json, or only in its
    tokenizer class.
    """
    path = target / _CONFIG
    before = read_json(path) if path.is_file() else {}
    config = {key: value for key, value in before.items() if key != "chat_template"}
    for name, text in _special_tokens(directory, config).items():
        if _content(config.get(name)) != text:
            config[name] = text
    if config != before:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LlmcError(f"the chat template '{path}' cannot be read ({error}); give a UTF-8 file") \
            from error


def _named(value: Any, path: Path) -> dict[str, str]:
    """Return templates by name, from a string, a list of `{"name", "template"}`, or an object."""
    templates = {"default": value} if isinstance(value, str) else value
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    if not isinstance(templates, dict) or not all(
            isinstance(name, str) and isinstance(text, str)
            for name, text in templates.items()):
        raise LlmcError(f"chat_template in '{path}' is neither a string nor named strings; "
                        f'write it like [{{"name": "default", "template": "…"}}]')
    return templates


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of transformers' tokenizer by name."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return dict(tokenizer.special_tokens_map)
    except Exception:  # an unknown tokenizer class: fall back to the files
        path = directory / _MAP
        named = read_json(path) if path.is_file() else {}
        return {name: text for name, value in named.items()
                if not config.get(name) and (text := _content(value)) is not None}


def _content(token: Any) -> str | None:
    """Return the text of a special token, a string or a serialized AddedToken."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
