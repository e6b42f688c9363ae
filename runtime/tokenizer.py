"""The tokenizer of a case directory and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from llmc.errors import LlmcError
from llmc.runtime.manifest import Manifest


def load_tokenizer(manifest: Manifest, case_dir: Path) -> Tokenizer | None:
    """The tokenizer; None where the model came without one.

    Raises:
        LlmcError: tokenizer.json is broken.
    """
    if manifest.tokenizer.path is None:
        return None
    path = case_dir / manifest.tokenizer.path / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise LlmcError(f"'{path}' is not a tokenizer ({error}); compile the model again") from error


def render_chat(manifest: Manifest, case_dir: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as the model's chat template writes them, ready for its answer.

    Raises:
        LlmcError: the model has no chat template, or the template refuses the messages.
    """
    if manifest.tokenizer.chat_template is None:
        raise LlmcError(f"'{manifest.source.architecture}' has no chat template; give the prompt "
                        f"as the model expects it, without --chat")
    template = (case_dir / manifest.tokenizer.chat_template).read_text(encoding="utf-8")

    def refuse(message: str) -> None:
        raise LlmcError(f"the chat template refuses the messages: {message}")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    tokens = _special_tokens(case_dir / manifest.tokenizer.chat_template)
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **tokens)
    except jinja2.TemplateError as error:
        raise LlmcError(f"the chat template cannot be rendered ({error})") from error


def _special_tokens(template: Path) -> dict[str, str]:
    """bos_token and eos_token as texts, from tokenizer_config.json beside the template."""
    path = template.with_name("tokenizer_config.json")
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokens = {}
    for name in ("bos_token", "eos_token"):
        value = config.get(name, "")
        tokens[name] = value.get("content", "") if isinstance(value, dict) else value or ""
    return tokens
