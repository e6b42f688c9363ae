"""Harmony, in which gpt-oss answers: messages in channels.

    <|channel|>analysis<|message|>…<|end|>                          reasoning
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>        the answer

The chat template ends with `<|start|>assistant`, so an answer begins with a header. Deltas are
named as vLLM names them: `reasoning_content`, `content`, `tool_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from llmc.server.tools import Delta, ToolText

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_RECIPIENT = re.compile(r"to=functions\.(\S+)")


class Harmony(ToolText):
    """The text of one answer, with its marks.

    Args:
        names: of tools; a call of another is content.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._waiting = ""
        self._header: str | None = ""  # of a message that begins; None inside one
        self._channel = "final"

    def push(self, text: str) -> Iterator[Delta]:
        text = self._waiting + text
        while (found := _MARK.search(text)) is not None:
            yield from self._say(text[:found.start()])
            yield from self._mark(found[0])
            text = text[found.end():]
        cut = len(text) - max((size for mark in MARKS for size in range(1, len(mark))
                               if text.endswith(mark[:size])), default=0)
        self._waiting = text[cut:]
        yield from self._say(text[:cut])

    def finish(self) -> Iterator[Delta]:
        text, self._waiting = self._waiting, ""
        yield from self._say(text)

    def _say(self, text: str) -> Iterator[Delta]:
        if self._header is not None:
            self._header += text
        elif text and self._channel == "call":
            yield self._delta({"arguments": text})
        elif text:
            yield {"reasoning_content" if self._channel == "analysis" else "content": text}

    def _mark(self, mark: str) -> Iterator[Delta]:
        if mark != MESSAGE:
            # A header goes on behind <|channel|> and <|constrain|>.
            self._header = (self._header or "") + mark if mark in (CHANNEL, CONSTRAIN) else ""
            return
        header, self._header = self._header or "", None
        kind = header.rpartition(CHANNEL)[2].split()
        self._channel = kind[0] if kind and CHANNEL in header else "final"
        # The recipient is before the channel or behind it.
        called = _RECIPIENT.search(header.replace(CONSTRAIN, " ").replace(CHANNEL, " "))
        if called is not None and called[1] in self._names:
            self._channel = "call"
            yield self._opened(called[1])
