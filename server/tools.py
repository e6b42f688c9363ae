"""Calls of tools in a model's text: read as it comes, told as OpenAI's interface has them."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

Delta = dict[str, Any]
ToolCallParser = Literal["hermes", "llama3_json", "harmony"]
_BLANK = " \t\r\n"


class _Call:
    """A call as JSON, `{"name": …, "arguments": …}`, of which the arguments are told at once.

    Attributes:
        text: all that was read.
        name: once it is known.
        done: the object has ended.
        broken: it is no such object.
    """

    def __init__(self) -> None:
        self.text, self.name, self.done, self.broken = "", "", False, False
        self._depth, self._quoted, self._escaped = 0, False, False
        self._key: str | None = None
        self._part = ""  # of a key or a value, so far
        self._arguments = ""  # that are not told yet

    def push(self, text: str) -> str:
        """Read on; what follows the object, if it has ended."""
        for index, character in enumerate(text):
            if self.done or self.broken:
                return text[index:]
            self.text += character
            self._read(character)
        return ""

    def arguments(self) -> str:
        """As far as they are known and were not told before; nothing before the name is known."""
        if not self.name:
            return ""
        told, self._arguments = self._arguments, ""
        return told

    def _read(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
            self._take(character)
            return
        if self._depth == 0 and character in _BLANK:
            pass
        elif self._depth == 0:
            self._depth, self.broken = 1, character != "{"
        elif character == '"':
            self._quoted = True
            self._take(character)
        elif self._depth == 1 and character in ":,}":
            self._end(character)
        elif self._depth == 1 and character in _BLANK and not self._part:
            pass
        else:
            self._depth += (character in "{[") - (character in "}]")
            self._take(character)

    def _take(self, character: str) -> None:
        self._part += character
        if self._key in ("arguments", "parameters"):
            self._arguments += character

    def _end(self, character: str) -> None:
        """Of a key, a value, or the object."""
        try:
            if character == ":" and self._key is None:
                self._key = str(json.loads(self._part))
            elif self._key == "name":
                self.name = str(json.loads(self._part))
        except ValueError:
            self.broken = True
        self._part = ""
        if character != ":":
            self._key, self.done = None, character == "}"


class ToolText(ABC):
    """The text of one answer, which may call tools.

    Args:
        names: of tools; what calls another is text.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {*names}
        self.calls = 0

    @abstractmethod
    def push(self, text: str) -> Iterator[Delta]:
        """What becomes of more text: `content`, `reasoning_content` or `tool_calls`."""

    def finish(self) -> Iterator[Delta]:
        """What becomes of the rest, at the end."""
        return iter(())

    def _opened(self, name: str) -> Delta:
        self.calls += 1
        return self._delta({"name": name, "arguments": ""},
                           id=f"call_{secrets.token_hex(12)}", type="function")

    def _delta(self, function: dict[str, str], **others: str) -> Delta:
        return {"tool_calls": [{"index": self.calls - 1, **others, "function": function}]}


class _Objects(ToolText):
    """Calls that are JSON objects in the text."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._call: _Call | None = None
        self._told = False  # the name of the call under way

    def push(self, text: str) -> Iterator[Delta]:
        while text:
            if self._call is None:
                content, text = self._outside(text)
                if content:
                    yield {"content": content}
                continue
            text = self._call.push(text)
            yield from self._tell(self._call)

    def finish(self) -> Iterator[Delta]:
        content = self._held()
        if self._call is not None and not self._told:
            content += self._opening() + self._call.text
        if content:
            yield {"content": content}

    def _tell(self, call: _Call) -> Iterator[Delta]:
        over = call.done or call.broken
        if not self._told:
            if call.name in self._names:
                self._told = True
                yield self._opened(call.name)
            elif call.name or over:
                yield {"content": self._opening() + call.text}
                self._call = None
                self._is_text(call)
                return
        if self._told and (arguments := call.arguments()):
            yield self._delta({"arguments": arguments})
        if over:
            self._call, self._told = None, False

    def _begin(self) -> None:
        self._call, self._told = _Call(), False

    def _opening(self) -> str:
        """What stood before a call that turned out to be text."""
        return ""

    def _held(self) -> str:
        """Text that waited for what follows."""
        return ""

    def _is_text(self, call: _Call) -> None:
        """What seemed to be a call is text."""
        return

    @abstractmethod
    def _outside(self, text: str) -> tuple[str, str]:
        """Content at the beginning of a text that is in no call, and the rest."""


class Hermes(_Objects):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, also Qwen's."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._waiting, self._before, self._awaited = "", "", self._OPEN

    def _outside(self, text: str) -> tuple[str, str]:
        text, self._waiting = self._waiting + text, ""
        before, tag, rest = text.partition(self._awaited)
        if tag:
            if self._awaited == self._CLOSE:
                self._awaited = self._OPEN
                return "", rest
            self._awaited = self._CLOSE
            self._begin()
            content = before.rstrip(_BLANK)
            self._before = before[len(content):] + tag
            return content, rest
        if self._awaited == self._CLOSE:  # of a call: nothing but blanks is before the tag
            self._waiting = text
            return "", ""
        # Blanks before a call are none of the answer's.
        cut = len(text[:len(text) - _overlap(text, self._OPEN)].rstrip(_BLANK))
        self._waiting = text[cut:]
        return text[:cut], ""

    def _held(self) -> str:
        return "" if self._awaited == self._CLOSE and self._call is None else self._waiting

    def _opening(self) -> str:
        return self._before

    def _is_text(self, call: _Call) -> None:
        self._awaited = self._OPEN


class Plain(_Objects):
    """Calls one after the other, and nothing else: Llama 3's `{"name": …, "parameters": …}`, or a
    list of them. An answer that does not begin so is text.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._waiting, self._before, self._text = "", "", False

    def _outside(self, text: str) -> tuple[str, str]:
        if self._text:
            return text, ""
        text, self._waiting = self._waiting + text, ""
        rest = text.lstrip(_BLANK + ("[];," if self.calls else "["))
        if not rest or (self._TAG.startswith(rest) and rest != self._TAG):
            self._waiting = text
            return "", ""
        rest = rest.removeprefix(self._TAG)
        if rest.startswith("{"):
            self._before = text[:len(text) - len(rest)]
            self._begin()
            return "", rest
        if not rest:
            return "", ""
        self._text = True
        return text, ""

    def _opening(self) -> str:
        return self._before

    def _held(self) -> str:
        return "" if self.calls else self._waiting

    def _is_text(self, call: _Call) -> None:
        self._text = True


class Arguments(ToolText):
    """Arguments of one tool, as `tool_choice` names it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._name, = names

    def push(self, text: str) -> Iterator[Delta]:
        if not self.calls:
            yield self._opened(self._name)
        if text:
            yield self._delta({"arguments": text})


def parser_of(chat_template: str) -> ToolCallParser | None:
    """How a model with this chat template calls tools; None where llmc does not know."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return "harmony"
    if "<tool_call>" in chat_template:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in chat_template else None


def merged(deltas: Iterable[Delta]) -> tuple[str, list[dict[str, Any]], str]:
    """All content, all calls, and all reasoning, whole."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function",
                              "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls, reasoning


def _overlap(text: str, tag: str) -> int:
    """How many characters at a text's end may be the beginning of a tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1)
                 if text.endswith(tag[:size])), 0)
