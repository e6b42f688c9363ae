"""The chat template of a case directory: a Jinja program, rendered in a sandboxed child process.

Jinja's sandbox keeps a template from Python's internals, but bounds neither time nor memory
(`'a' * 10**10`, macros that call each other, string products). The child process does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from llmc.errors import LlmcError, shortened
from llmc.runtime.sandbox import JobLimits, Lane, Sandbox

_MAX_CHARACTERS = 2**24  # of a rendered prompt: more than any model reads
_LIMITS = JobLimits(cpu_seconds=2, memory_mib=256)  # real templates take milliseconds
_WORKERS = 2


class ChatTemplate:
    """A chat template, and the workers that render it.

    Args:
        path: of the template's file. Special tokens are read from tokenizer_config.json beside it.
    """

    def __init__(self, path: Path, sandbox: Sandbox) -> None:
        self._path, self._sandbox = path, sandbox
        self._lane = Lane(_LIMITS, workers=_WORKERS, reuse=True)

    def render(self, messages: Sequence[Mapping[str, object]],
               tools: Sequence[Mapping[str, object]] | None = None,
               variables: Mapping[str, object] | None = None) -> str:
        """Render a conversation into a prompt that ends where the model's answer begins.

        Args:
            tools: schemas of functions that the model may call.
            variables: further variables of the template (chat_template_kwargs).

        Raises:
            LlmcError: the template cannot render the messages, or exceeds a limit.
        """
        try:
            text: str = self._sandbox.run(self._lane, _render, self._path, {
                **(variables or {}), "messages": list(messages), "documents": None,
                "tools": None if tools is None else list(tools), "add_generation_prompt": True})
        except LlmcError as error:
            raise LlmcError(f"the chat template '{self._path}' cannot be used "
                            f"({shortened(str(error), 300)}); give the prompt as plain text, in "
                            f"the form that the model expects") from error
        return text


def _render(path: Path, variables: Mapping[str, object]) -> str:
    """Render in this process, which a template may end.

    Raises:
        LlmcError: the template is broken, or refuses the messages.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
    try:
        template = environment.from_string(path.read_text(encoding="utf-8"))
        parts, size = [], 0
        for part in template.generate({**_special_tokens(path), **variables}):
            parts.append(part)
            size += len(part)
            if size > _MAX_CHARACTERS:
                raise jinja2.TemplateError(f"it writes more than {_MAX_CHARACTERS} characters")
        return "".join(parts)
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, jinja2.TemplateError):
            reason = f"{type(error).__name__}: {reason}"
        raise LlmcError(reason) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training. Its body is rendered as is."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, **options: Any) -> str:
    """Unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _special_tokens(template: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on as texts, from tokenizer_config.json beside it."""
    path = template.with_name("tokenizer_config.json")
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    texts = {name: value["content"] if isinstance(value, dict) else value
             for name, value in config.items() if name.endswith("_token") and value}
    return {"bos_token": "", "eos_token": "",
            **{name: text for name, text in texts.items() if isinstance(text, str)}}
