"""The formats of messages that a chat template can read, determined with rendered probes.

OpenAI's API allows several formats of a message. A template reads some of them. Others make it
raise, write Python's representation of a value, or omit the text silently.

| part of a message | formats |
| --- | --- |
| content | a text; a list of parts `{"type": "text", "text": …}` |
| image or audio in content | a part `{"type": "image"}`; its placeholder token in the text |
| content with tool_calls | a text; absent; None |
| arguments of a tool call | JSON text; an object |
| role of instructions | `developer`; `system` |

`MessageForms` keeps a message's format if the template can read it, as transformers does, and
converts it otherwise. vLLM determines the format of contents from the template's syntax tree, which
does not see through macros, and writes all arguments as objects. A rendered probe shows what the
template does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

ContentFormat = Literal["auto", "string", "openai"]
CONTENT_FORMATS: tuple[ContentFormat, ...] = get_args(ContentFormat)

Message = dict[str, Any]
_MARK, _KEY = "llmcprobe", "llmckey"  # texts that no template contains
_MAX_PROBES = 64  # cache size: clients choose the names of roles
_ARGUMENTS = {_KEY: _MARK}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms, as in transformers
# The mark inside a container's representation in Python or JSON, possibly escaped.
_PART_SHOWN = re.compile(rf"""text\\?['"]: *\\?['"]{_MARK}""")
_REPR_SHOWN = re.compile(rf"'{_KEY}': *'{_MARK}'")


class MessageForms:
    """The formats that one chat template can read.

    Args:
        render: renders messages with the template; returns "" if the template raises.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._reads = lru_cache(_MAX_PROBES)(self._probe_content)
        self._writes = lru_cache(_MAX_PROBES)(self._probe_media)
        self._shows = lru_cache(_MAX_PROBES)(self._probe_call)

    def fit(self, messages: Sequence[Mapping[str, Any]], content_format: ContentFormat,
            placeholders: Mapping[str, str] | None = None) -> list[Message]:
        """Convert messages to formats that the template can read.

        Args:
            content_format: `auto`, or the format of all contents: `string` (a text) or `openai` (a
                list of parts).
            placeholders: the token that stands for an item in a prompt, by the type of its part.

        Raises:
            ValueError: arguments of a tool call are not JSON, and the template needs an object.
        """
        return [self._fit(index, message, content_format, placeholders or {})
                for index, message in enumerate(messages)]

    def _fit(self, index: int, message: Mapping[str, Any], content_format: ContentFormat,
             placeholders: Mapping[str, str]) -> Message:
        fitted = {key: value for key, value in message.items() if value is not None}
        if not fitted.get("tool_calls", True):
            del fitted["tool_calls"]
        reasoning = next((fitted[key] for key in _REASONING if key in fitted), None)
        if reasoning is not None:
            fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
        if fitted["role"] == "developer" and not self._reads_any("developer") \
                and self._reads_any("system"):
            fitted["role"] = "system"
        if fitted.get("content"):
            content = self._fit_media(fitted["role"], fitted["content"], content_format,
                                      placeholders)
            fitted["content"] = self._fit_content(fitted["role"], content, content_format)
        if "tool_calls" in fitted:
            self._fit_calls(index, fitted)
        elif not fitted.get("content"):
            fitted["content"] = self._fit_content(fitted["role"], "", content_format)
        return fitted

    def _fit_media(self, role: str, content: str | list[Message], content_format: ContentFormat,
                   placeholders: Mapping[str, str]) -> str | list[Message]:
        """Write items as placeholder tokens if the template does not."""
        types = set() if isinstance(content, str) else {part["type"] for part in content} - {"text"}
        if isinstance(content, str) or content_format == "openai" or (
                content_format == "auto" and all(
                    self._writes(role, own, placeholders[own]) for own in types)):
            return content
        return [part if part["type"] == "text" else
                {"type": "text", "text": placeholders[part["type"]]} for part in content]

    def _fit_content(self, role: str, content: str | list[Message],
                     content_format: ContentFormat) -> str | list[Message]:
        text = isinstance(content, str)
        if content_format == "auto":
            to_text = self._reads(role, "text") or not self._reads(role, "parts") if text else \
                not self._reads(role, "parts")
        else:
            to_text = content_format == "string"
        if isinstance(content, str):
            return content if to_text else [{"type": "text", "text": content}]
        return "\n".join(part["text"] for part in content) if to_text else content

    def _fit_calls(self, index: int, message: Message) -> None:
        """Select the formats of empty content and of arguments, preferring the given ones."""
        calls = message["tool_calls"]
        given = "text" if all(isinstance(_function(call).get("arguments"), str)
                              for call in calls) else "object"
        arguments = (given, "object" if given == "text" else "text")
        if message.get("content"):
            contents: tuple[str, ...] = ("text",)
        else:
            contents = ("empty", "absent", "none") if "content" in message \
                else ("absent", "none", "empty")
        content, form = next(
            ((content, form) for form in arguments for content in contents
             if self._shows(content, form)), ("empty" if len(contents) > 1 else "text", "object"))
        if content != "text":
            message.pop("content", None)
            if content != "absent":
                message["content"] = None if content == "none" else ""
        message["tool_calls"] = [_with_arguments(index, call, form) for call in calls]

    def _reads_any(self, role: str) -> bool:
        return self._reads(role, "text") or self._reads(role, "parts")

    def _probe_content(self, role: str, form: str) -> bool:
        """Whether the template renders the content of a role in a format."""
        content = _MARK if form == "text" else [{"type": "text", "text": _MARK}]
        return any(map(_shows_content, self._render_probes({"role": role, "content": content})))

    def _probe_media(self, role: str, kind: str, placeholder: str) -> bool:
        """Whether the template renders a part of this type as its placeholder, once."""
        content = [{"type": kind}, {"type": "text", "text": _MARK}]
        return any(_shows_content(text) and text.count(placeholder) == 1
                   for text in self._render_probes({"role": role, "content": content}))

    def _render_probes(self, message: Message) -> Iterator[str]:
        """Render a message in conversations in which a template may accept its role."""
        role = message["role"]
        if role == "user":
            yield self._render([message])
            return
        user = {"role": "user", "content": self._fit_content("user", "a", "auto")}
        if role in ("system", "developer"):
            yield self._render([message, user])
            return
        if role == "assistant":
            yield self._render([user, message, user])
            return
        before: list[Message] = [
            {"role": "assistant", "content": "", "tool_calls": [_call({})]},
            {"role": "assistant", "content": "", "tool_calls": [_call("{}")]},
            {"role": "assistant", "content": self._fit_content("assistant", "a", "auto")}]
        for previous in before:
            yield self._render([user, previous, message])

    def _probe_call(self, content: str, form: str) -> bool:
        """Whether the template renders a tool call with content and arguments in these formats."""
        user = {"role": "user", "content": self._fit_content("user", "a", "auto")}
        message: Message = {"role": "assistant", "tool_calls": [
            _call(json.dumps(_ARGUMENTS) if form == "text" else _ARGUMENTS)]}
        if content != "absent":
            message["content"] = {"none": None, "empty": ""}.get(
                content, self._fit_content("assistant", "a", "auto"))
        shown = self._render([user, message])
        return json.dumps(_ARGUMENTS) in shown if form == "text" else \
            _MARK in shown and not _REPR_SHOWN.search(shown)


def _shows_content(text: str) -> bool:
    return _MARK in text and not _PART_SHOWN.search(text)


def _call(arguments: object) -> Message:
    # Mistral's templates require an id of nine characters.
    return {"id": "call00000", "type": "function",
            "function": {"name": "probe", "arguments": arguments}}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name and arguments of a tool call; transformers accepts calls without `function`."""
    function: Mapping[str, Any] = call.get("function", call)
    return function


def _with_arguments(index: int, call: Mapping[str, Any], form: str) -> Message:
    """Convert a tool call's arguments to a format.

    Raises:
        ValueError: they are not JSON, and an object is required.
    """
    arguments = _function(call).get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str) and form == "object":
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of a tool call in message {index} are not JSON; give "
                             f"a JSON object") from None
    elif not isinstance(arguments, str) and form == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {**_function(call), "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
