"""Base class of tool call parsers, and calls that are JSON objects."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from llmc.server.text_reader import (
    BLANKS,
    Delta,
    Reading,
    TextReader,
    emitted,
    parsed_json,
)

Schema = Mapping[str, Any]


class ToolParser(TextReader):
    """Parser of the content and the tool calls of one answer.

    Args:
        tools: JSON schema of each tool's parameters, by the tool's name. A call of an unknown tool
            is content.

    Attributes:
        SIGNS: strings that all chat templates of the family contain.
        MARKS: marks of the format that may be special tokens.
        calls: number of calls so far.
    """

    SIGNS: ClassVar[tuple[str, ...]] = ()
    MARKS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Schema | None]) -> None:
        super().__init__()
        self._tools = tools
        self.calls = 0
        self._in_call = False  # whether a call is unfinished
        self._arguments_emitted = False  # of the latest call
        self._blanks = ""  # emitted only if more content follows

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        return all(sign in chat_template for sign in cls.SIGNS)

    def _at_end(self) -> Iterator[Delta]:
        """Emit an invalid call as content, but no blanks after calls and no unfinished call."""
        if self._in_call:
            return
        content = self._raw if self.calls else self._blanks + self._raw
        if content.strip(BLANKS) or not self.calls:
            yield from self._content(content)

    def _content(self, text: str) -> Iterator[Delta]:
        self._raw = ""
        if text:
            yield self._as_content(text)

    # Content between calls.

    def _content_until(self, *marks: str) -> Reading[str]:
        """Emit content up to a mark, without the blanks before it.

        Returns:
            The mark, which is consumed. `_raw` has the blanks and the mark.
        """
        while True:
            size, mark = self._before(marks)
            text = self._blanks + self._take(size)
            content = text.rstrip(BLANKS)
            self._blanks = text[len(content):]
            yield from self._content(content)
            self._raw = ""
            if mark is not None:
                self._raw, self._blanks = self._blanks, ""
                return self._take(len(mark))
            yield from self._more()

    def _is_content(self) -> Reading[None]:
        """Emit the text since a mark as content, because it is not a call."""
        yield from self._content(self._raw)

    def _all_content(self) -> Reading[None]:
        """Emit the consumed text and all further text as content."""
        yield from self._is_content()
        yield from emitted(self._pieces_until(), self._as_content)

    def _as_content(self, text: str) -> Delta:
        self._raw = ""
        return {"content": text}

    # Calls.

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _opened(self, name: str, id_: str | None = None) -> Delta:
        """Begin a call; return its first delta."""
        self.calls += 1
        self._raw, self._in_call, self._arguments_emitted = "", True, False
        return self._delta({"name": name, "arguments": ""}, id=id_ or self._new_id(),
                           type="function")

    def _arguments(self, text: str) -> Delta:
        self._raw, self._arguments_emitted = "", True
        return self._delta({"arguments": text})

    def _delta(self, function: dict[str, str], **others: str) -> Delta:
        return {"tool_calls": [{"index": self.calls - 1, **others, "function": function}]}

    def _json_arguments(self) -> Reading[bool]:
        """Emit a JSON value as a call's arguments.

        It is an object, or a string that contains one. `null` and an empty string become `{}`.

        Returns:
            Whether the value is complete.
        """
        if (yield from self._skip_blanks()) in "{[":
            return (yield from emitted(self._json_pieces(), self._arguments))
        value, whole = yield from self._json_value()
        yield self._arguments(_object_text(value))
        return whole

    def _json_call(self) -> Reading[bool]:
        """Emit a call in the format `{"name": …, "arguments": …}`.

        Returns:
            Whether the text is a call of a tool. Otherwise nothing is emitted, and `_raw` has it.
        """
        name = early = None
        if (yield from self._skip_blanks()) != "{":
            return False
        self._take(1)
        while (yield from self._skip_blanks(BLANKS + ",")) == '"':
            key, _ = yield from self._json_value()
            if (yield from self._skip_blanks()) != ":":
                break
            self._take(1)
            yield from self._skip_blanks()
            if key in ('"arguments"', '"parameters"') and name is not None:
                if not (yield from self._json_arguments()):
                    break
                continue
            value, whole = yield from self._json_value()
            if key == '"name"' and name is None:
                name = _text(value)
                if name is None or name not in self._tools:
                    return False
                yield self._opened(name)
                if early is not None:
                    yield self._arguments(_object_text(early))
            elif key in ('"arguments"', '"parameters"'):
                early = value
            if not whole:
                break
        if name is None:
            return False
        yield from self._skip_if("}")
        yield from self._closed()
        return True

    def _closed(self) -> Reading[None]:
        """End the call; the arguments default to `{}`."""
        if not self._arguments_emitted:
            yield self._arguments("{}")
        self._raw, self._in_call = "", False

    def _skip_if(self, character: str) -> Reading[None]:
        """Consume a character if it is next."""
        if (yield from self._peek()) == character:
            self._take(1)


def merged(deltas: Iterable[Delta]) -> tuple[str, list[dict[str, Any]], str]:
    """Merge deltas; return the content, the calls and the reasoning."""
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


def _text(value: str) -> str | None:
    """Return the value of a JSON string; None for any other JSON."""
    try:
        text = parsed_json(value)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _object_text(value: str) -> str:
    """Return arguments as the JSON of an object."""
    if value.startswith('"'):
        text = _text(value)
        if text is None:
            return value
        if text.strip() in ("", "null"):
            return "{}"
        try:
            parsed_json(text)
        except ValueError:
            return value
        return text
    return "{}" if value in ("", "null") else value


def json_text(value: Any) -> str:
    """Encode a value as JSON."""
    return json.dumps(value, ensure_ascii=False)
