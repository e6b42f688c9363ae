"""Incremental parsing of generated text: a grammar as a generator that is fed chunks."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

Delta = dict[str, Any]  # of a chat message: content, reasoning_content, tool_calls
_T = TypeVar("_T")
Reading = Generator[Delta | None, None, _T]  # yields deltas, and None if it needs more text
Pieces = Generator[str | None, None, _T]  # the same with pieces of text
BLANKS = " \t\r\n"

_STRING_RUN = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_PLAIN_RUN = re.compile(r"[\s,:+\-.0-9A-Za-z]*")
_SCALAR_RUN = re.compile(r"[+\-.0-9A-Za-z]*")
_CLOSING = {"{": "}", "[": "]"}


class EndOfText(Exception):
    """Raised in a reading generator that needs more text after the end."""


class TextReader(ABC):
    """Parser of text as it arrives, which emits deltas.

    A subclass implements the format's grammar as a generator, `_read`, from the primitives below.
    The concatenated deltas do not depend on how the text is divided into chunks.
    """

    def __init__(self) -> None:
        self._buffer, self._at = "", 0
        self._ended = False
        self._raw = ""  # text consumed since `_raw` was last cleared
        self._reading = self._run()

    def push(self, text: str) -> Iterator[Delta]:
        """Yield the deltas of more text."""
        self._buffer, self._at = self._buffer[self._at:] + text, 0
        yield from self._advance()

    def finish(self) -> Iterator[Delta]:
        """Yield the deltas of the rest at the end of the text."""
        self._ended = True
        yield from self._advance()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Parse the text: the grammar of the format."""

    def _at_end(self) -> Iterator[Delta]:
        """Yield the deltas of pending text at the end."""
        return iter(())

    def _run(self) -> Reading[None]:
        try:
            yield from self._read()
        except EndOfText:
            yield from self._at_end()

    def _advance(self) -> Iterator[Delta]:
        for delta in self._reading:
            if delta is None:
                return
            yield delta

    # Primitives.

    def _more(self) -> Generator[None, None, None]:
        """Wait for more text.

        Raises:
            EndOfText: the text has ended.
        """
        if self._ended:
            raise EndOfText
        yield None

    def _rest(self) -> str:
        return self._buffer[self._at:]

    def _take(self, size: int) -> str:
        """Consume `size` characters."""
        text = self._buffer[self._at:self._at + size]
        self._at += size
        self._raw += text
        return text

    def _peek(self) -> Generator[None, None, str]:
        """Return the next character without consuming it."""
        while self._at == len(self._buffer):
            yield from self._more()
        return self._buffer[self._at]

    def _skip_blanks(self, blanks: str = BLANKS) -> Generator[None, None, str]:
        """Consume blanks; return the character after them without consuming it."""
        while (character := (yield from self._peek())) in blanks:
            self._take(1)
        return character

    def _starts_with(self, *marks: str) -> Generator[None, None, str]:
        """Consume one of the marks if it is next; return it, or ""."""
        while True:
            rest = self._rest()
            for mark in marks:
                if rest.startswith(mark):
                    return self._take(len(mark))
            if self._ended or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield from self._more()

    def _skip_mark(self, *marks: str) -> Generator[None, None, str]:
        """Consume blanks and a mark if one follows; return it, or "" and consume nothing."""
        while True:
            rest = self._rest()
            after = rest.lstrip(BLANKS)
            for mark in marks:
                if after.startswith(mark):
                    self._take(len(rest) - len(after) + len(mark))
                    return mark
            if self._ended or not any(mark.startswith(after) for mark in marks):
                return ""
            yield from self._more()

    def _pieces_until(self, *marks: str) -> Pieces[str]:
        """Yield text up to the first of the marks, which is consumed; all text without marks.

        Returns:
            The mark.

        Raises:
            EndOfText: the text has no mark; all text has been yielded.
        """
        while True:
            size, mark = self._before(marks)
            if size:
                yield self._take(size)
            if mark is not None:
                return self._take(len(mark))
            yield from self._more()

    def _before(self, marks: tuple[str, ...]) -> tuple[int, str | None]:
        """Return the number of characters before the first mark, and the mark.

        Without a mark, characters at the end that may begin one are not counted.
        """
        rest = self._rest()
        found = min(((place, -len(mark), mark) for mark in marks
                     if (place := rest.find(mark)) >= 0), default=None)
        if found is not None:
            return found[0], found[2]
        return len(rest) - (0 if self._ended else overlap(rest, marks)), None

    def _until(self, *marks: str) -> Generator[None, None, tuple[str, str]]:
        """Return the text up to the first of the marks, and the mark, which is consumed."""
        text, mark = yield from collected(self._pieces_until(*marks))
        return text, mark

    def _json_pieces(self) -> Pieces[bool]:
        """Yield the pieces of one JSON value as they arrive.

        Returns:
            Whether the value is complete. An invalid character ends it early.

        Raises:
            EndOfText: the text ends inside the value; all text has been yielded.
        """
        open_, quoted, piece = "", False, ""
        scalar = False
        while True:
            if self._at == len(self._buffer):
                if piece:
                    yield piece
                    piece = ""
                if scalar and self._ended:
                    return True
                yield from self._more()
                continue
            character = self._buffer[self._at]
            if quoted:
                found = _STRING_RUN.match(self._buffer, self._at)
                assert found is not None
                piece += self._take(found.end() - self._at)
                if self._buffer.startswith('"', self._at):
                    piece += self._take(1)
                    quoted = False
                    if not open_:
                        break
                elif self._at < len(self._buffer):  # a backslash before an escaped character
                    if piece:
                        yield piece
                        piece = ""
                    if self._ended:
                        yield self._take(1)
                    yield from self._more()
            elif scalar:
                run = _SCALAR_RUN.match(self._buffer, self._at)
                assert run is not None
                if run.end() == self._at:
                    break
                piece += self._take(run.end() - self._at)
            elif character == '"':
                quoted = True
                piece += self._take(1)
            elif character in "{[":
                open_ += character
                piece += self._take(1)
            elif open_ and character == _CLOSING[open_[-1]]:
                open_ = open_[:-1]
                piece += self._take(1)
                if not open_:
                    break
            else:
                run = (_PLAIN_RUN if open_ else _SCALAR_RUN).match(self._buffer, self._at)
                assert run is not None
                if run.end() == self._at:
                    if piece:
                        yield piece
                    return False
                scalar = not open_
                piece += self._take(run.end() - self._at)
        if piece:
            yield piece
        return True

    def _json_value(self) -> Generator[None, None, tuple[str, bool]]:
        """Return the text of one JSON value, and whether it is complete."""
        value = yield from collected(self._json_pieces())
        return value


def emitted(pieces: Pieces[_T], emit: Callable[[str], Delta]) -> Reading[_T]:
    """Convert pieces of text to deltas."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        yield None if piece is None else emit(piece)


def collected(pieces: Pieces[_T]) -> Generator[None, None, tuple[str, _T]]:
    """Join pieces of text; return the text and the generator's result."""
    text = ""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return text, end.value
        if piece is None:
            yield None
        else:
            text += piece


def overlap(text: str, marks: tuple[str, ...]) -> int:
    """Return the number of characters at the text's end that may begin a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1)
                 if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def parsed_json(text: str) -> Any:
    """Parse a JSON value.

    Raises:
        ValueError: the text is not JSON.
    """
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("the JSON value is nested too deeply") from None
