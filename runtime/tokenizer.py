"""The tokenizer of a case directory and its chat template."""

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
from tokenizers import Tokenizer

from llmc.errors import LlmcError, shortened
from llmc.runtime.manifest import MANIFEST_NAME, Manifest

_MAX_CHARACTERS = 2**24  # that a chat template may write: more than any model reads
_MAX_SECONDS = 2.0  # of a core, that it may take; what real ones take is milliseconds


def load_tokenizer(manifest: Manifest, case_dir: Path) -> Tokenizer | None:
    """The tokenizer; None where the model came without one.

    Raises:
        LlmcError: tokenizer.json is broken, or names an end token and the manifest none.
    """
    if manifest.tokenizer.path is None:
        return None
    directory = case_dir / manifest.tokenizer.path
    tokenizer = read_tokenizer(directory)
    end = named_end(directory, tokenizer, manifest.dims.vocab_size)
    if end is not None and not manifest.tokenizer.eos_token_ids:
        raise LlmcError(f"the tokenizer in '{directory}' ends texts with token {end}, "
                        f"{MANIFEST_NAME} lists no eos_token_ids; compile the model again")
    return tokenizer


def read_tokenizer(directory: Path) -> Tokenizer:
    """Raises LlmcError where tokenizer.json is broken."""
    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise LlmcError(f"'{path}' is not a tokenizer ({error}); compile the model again") \
            from error


def named_end(directory: Path, tokenizer: Tokenizer, vocab_size: int) -> int | None:
    """The token that tokenizer_config.json beside the tokenizer names as the end of a text, if
    there is one, and a model of this vocabulary has it.
    """
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error
    named = config.get("eos_token") if isinstance(config, dict) else None
    text = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return token if token is not None and token < vocab_size else None


def render_chat(manifest: Manifest, case_dir: Path, messages: Sequence[Mapping[str, object]],
                tools: Sequence[Mapping[str, object]] | None = None,
                variables: Mapping[str, object] | None = None) -> str:
    """Messages as the model's chat template writes them, ready for its answer.

    Args:
        tools: that the model may call.
        variables: of the template, beside those that it always has.

    Raises:
        LlmcError: the model has no chat template, or the template cannot write the messages.
    """
    if manifest.tokenizer.chat_template is None:
        raise LlmcError(f"'{manifest.source.architecture}' has no chat template; give the prompt "
                        f"as plain text, in the form that the model expects")
    path = case_dir / manifest.tokenizer.chat_template
    try:
        return _render(path, {**(variables or {}), "messages": list(messages), "documents": None,
                              "tools": None if tools is None else list(tools),
                              "add_generation_prompt": True})
    except Exception as error:  # a template is a program, and may raise what it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, jinja2.TemplateError):
            reason = f"{type(error).__name__}: {reason}"
        raise LlmcError(f"the chat template '{path}' cannot be used ({shortened(reason, 300)}); "
                        f"give the prompt as plain text, in the form that the model expects") \
            from error


def _render(path: Path, variables: Mapping[str, object]) -> str:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
    template = environment.from_string(path.read_text(encoding="utf-8"))
    parts, size = [], 0
    for part in template.generate({**_special_tokens(path), **variables}):
        parts.append(part)
        size += len(part)
        if size > _MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {_MAX_CHARACTERS} characters")
    return "".join(parts)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox for one rendering, whose loops end: each `range` has bounds, but loops in loops
    would keep a thread for days, and no thread can be ended from without.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._end = time.thread_time() + _MAX_SECONDS

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            turn = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("turn"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(turn).set_lineno(loop.lineno))
        return template

    def turn(self) -> None:
        """A loop begins a turn."""
        if time.thread_time() > self._end:
            raise jinja2.TemplateError(f"its loops take more than {_MAX_SECONDS:g} s")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body stands as it is."""

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
