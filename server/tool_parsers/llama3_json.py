"""Llama 3: an answer of one or more `{"name": …, "parameters": …}`, or of a list of them."""

from __future__ import annotations

from llmc.server.text_reader import BLANKS, Reading
from llmc.server.tool_parsers.base import ToolParser

_TAG = "<|python_tag|>"


class Llama3Json(ToolParser):
    """Parser of answers that start with a call; all other answers are content."""

    SIGNS = MARKS = (_TAG,)

    def _read(self) -> Reading[None]:
        yield from self._skip_blanks(BLANKS + "[")
        yield from self._starts_with(_TAG)
        yield from self._skip_blanks(BLANKS + "[")
        yield from self._calls()

    def _calls(self) -> Reading[None]:
        """Emit consecutive calls, then content."""
        while (yield from self._peek()) == "{" and (yield from self._json_call()):
            while (yield from self._peek()) in BLANKS + "];,":
                self._take(1)
                self._raw = ""
        yield from self._all_content()
