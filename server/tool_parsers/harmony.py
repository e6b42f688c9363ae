"""Harmony, the format of gpt-oss: messages in channels.

    <|channel|>analysis<|message|>…<|end|>                          reasoning
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>        the answer

The chat template ends with `<|start|>assistant`, so an answer starts with a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llmc.server.text_reader import Delta, Reading, emitted
from llmc.server.tool_parsers.base import Schema, ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=functions\.(\S+)")


class Harmony(ToolParser):
    """Parser of the reasoning, the content and the calls of an answer in channels."""

    SIGNS = (CHANNEL, MESSAGE)
    MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def __init__(self, tools: Mapping[str, Schema | None]) -> None:
        super().__init__(tools)
        self._channel = ""  # of the current message

    @property
    def is_reasoning(self) -> bool:
        """Whether the latest text is reasoning."""
        return self._channel == "analysis"

    def _at_end(self) -> Iterator[Delta]:
        """Drop a header without a message."""
        return iter(())

    def _read(self) -> Reading[None]:
        while True:
            name = yield from self._header()
            if name:
                yield self._opened(name)
            mark = yield from emitted(self._pieces_until(*self.MARKS),
                                      self._arguments if name else self._said)
            if name:
                yield from self._closed()
            if mark == CHANNEL:  # the message has no end mark before the next header
                self._at -= len(CHANNEL)

    def _header(self) -> Reading[str]:
        """Consume a message's header; return the called tool, or ""."""
        header = ""
        while True:
            text, mark = yield from self._until(*self.MARKS)
            if mark == MESSAGE:
                break
            # The header continues after <|channel|> and <|constrain|>.
            header = header + text + mark if mark in (CHANNEL, CONSTRAIN) else ""
        header += text
        kind = header.rpartition(CHANNEL)[2].split()
        self._channel = kind[0] if kind and CHANNEL in header else "final"
        # The recipient may be before or after the channel.
        called = _RECIPIENT.search(header.replace(CONSTRAIN, " ").replace(CHANNEL, " "))
        return called[1] if called is not None and called[1] in self._tools else ""

    def _said(self, text: str) -> Delta:
        return {"reasoning_content" if self.is_reasoning else "content": text}
