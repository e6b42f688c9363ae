"""Chat templates of a case directory, rendered in a sandboxed child process.

A template is a Jinja program. Jinja's sandbox keeps it from Python's internals, but bounds neither
time nor memory (`'a' * 10**10`, macros that call each other, string products). The child process
does.

Globals, filters, tags and the selection of a template are those of transformers'
`apply_chat_template`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from llmc.errors import LlmcError, shortened
from llmc.runtime.message_forms import ContentFormat, MessageForms
from llmc.runtime.sandbox import JobLimits, Lane, Sandbox

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as in transformers
_MAX_CHARACTERS = 2**24  # of a rendered prompt: longer than any context
_MAX_PROBE_CHARACTERS = 2**20
_LIMITS = JobLimits(cpu_seconds=2, memory_mib=256)  # real templates take milliseconds
_WORKERS = 2


class ChatTemplate:
    """The chat templates of a model, and the workers that render them.

    Args:
        paths: template files by name: `tool_use` for conversations with tools, `default` for
            others.
        config: tokenizer_config.json, which names the special tokens.
    """

    def __init__(self, paths: Mapping[str, Path], config: Path, sandbox: Sandbox) -> None:
        self._paths, self._config, self._sandbox = dict(paths), config, sandbox
        self._lane = Lane(_LIMITS, workers=_WORKERS, reuse=True)

    def render(self, messages: Sequence[Mapping[str, object]],
               tools: Sequence[Mapping[str, object]] | None = None,
               variables: Mapping[str, object] | None = None,
               content_format: ContentFormat = "auto",
               placeholders: Mapping[str, str] | None = None) -> str:
        """Render a conversation to a prompt for the next answer.

        Args:
            messages: in any format of OpenAI's API; see `MessageForms`.
            tools: schemas of functions that the model may call.
            variables: further variables of the template (chat_template_kwargs).
            content_format: `auto`, `string` or `openai`; see `MessageForms.fit`.
            placeholders: the token that stands for an item in a prompt, by the type of its part.

        Raises:
            LlmcError: the template cannot render the messages, or exceeds a limit.
        """
        path = self._select(tools is not None)
        try:
            rendered: dict[str, str] = self._sandbox.run(
                self._lane, _render, path, self._config, list(messages), content_format,
                dict(placeholders or {}), {
                    **(variables or {}), "documents": None,
                    "tools": None if tools is None else list(tools), "add_generation_prompt": True})
        except LlmcError as error:
            raise LlmcError(f"the chat template '{path}' cannot be used "
                            f"({shortened(str(error), 300)}); give the prompt as plain text, in "
                            f"the format that the model expects") from error
        if "refused" in rendered:
            raise LlmcError(rendered["refused"])
        return rendered["text"]

    def _select(self, with_tools: bool) -> Path:
        if with_tools and TOOL_USE in self._paths:
            return self._paths[TOOL_USE]
        if DEFAULT not in self._paths:
            raise LlmcError(f"this model has chat templates for {', '.join(sorted(self._paths))} "
                            f"only; give tools, or the prompt as plain text")
        return self._paths[DEFAULT]


def _render(path: Path, config: Path, messages: Sequence[Mapping[str, object]],
            content_format: ContentFormat, placeholders: Mapping[str, str],
            variables: Mapping[str, object]) -> dict[str, str]:
    """Render in this process, which is a child process.

    Returns:
        `text`, or `refused`: why the messages cannot be rendered.

    Raises:
        LlmcError: the template is invalid, or refuses the messages.
    """
    try:
        tokens = tuple(sorted(_special_tokens(config).items()))
        template = _template(path.read_text(encoding="utf-8"), tokens)
        try:
            fitted = template.forms.fit(messages, content_format, placeholders)
        except ValueError as error:
            return {"refused": str(error)}
        return {"text": template.render({**variables, "messages": fitted})}
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, jinja2.TemplateError):
            reason = f"{type(error).__name__}: {reason}"
        raise LlmcError(reason) from error


class _Template:
    """A compiled template, and the formats of messages that it reads."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        self._compiled, self._tokens = _environment().from_string(text), tokens
        self.forms = MessageForms(self._probe)

    def render(self, variables: Mapping[str, object], most: int = _MAX_CHARACTERS) -> str:
        parts, size = [], 0
        for part in self._compiled.generate({**self._tokens, **variables}):
            parts.append(part)
            size += len(part)
            if size > most:
                raise jinja2.TemplateError(f"it writes more than {most} characters")
        return "".join(parts)

    def _probe(self, messages: Sequence[Mapping[str, object]]) -> str:
        try:
            return self.render({"messages": messages, "documents": None, "tools": None,
                                "add_generation_prompt": True}, _MAX_PROBE_CHARACTERS)
        except MemoryError:
            raise
        except Exception:  # a template is a program, and may raise anything
            return ""


@lru_cache(maxsize=4)
def _template(text: str, tokens: tuple[tuple[str, str], ...]) -> _Template:
    """Compile once per template: a long one takes 20 ms."""
    return _Template(text, dict(tokens))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime,
                            "dict": _Dict(), "namespace": _Namespace}
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's tokens for training; a scope."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Dict:
    """The function `dict` without the class's attributes."""

    def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The function `namespace` without names that could reach Python's internals."""

    def __init__(*args: Any, **given: Any) -> None:  # a template may set the name `self`
        self, *positional = args
        attributes = dict(*positional, **given)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's `tojson` without its HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _special_tokens(path: Path) -> dict[str, str]:
    """Read `bos_token`, `eos_token` and so on as texts from tokenizer_config.json."""
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    texts = {name: value["content"] if isinstance(value, dict) else value
             for name, value in config.items() if name.endswith("_token") and value}
    return {"bos_token": "", "eos_token": "",
            **{name: text for name, text in texts.items() if isinstance(text, str)}}
