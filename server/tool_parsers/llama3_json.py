"""Llama 3: an answer that is `{"name": …, "parameters": …}`, several of them, or their list."""

from __future__ import annotations

from llmc.server.text_reader import BLANKS, Reading
from llmc.server.tool_parsers.base import ToolParser

_TAG = "<|python_tag|>"


class Llama3Json(ToolParser):
    """An answer that does not begin with a call is content."""

    SIGNS = MARKS = (_TAG,)

    def _read(self) -> Reading[None]:
        yield from self._skip_blanks(BLANKS + "[")
        yield from self._starts_with(_TAG)
        yield from self._skip_blanks(BLANKS + "[")
        yield from self._calls()

    def _calls(self) -> Reading[None]:
        """Calls one after the other, and then content."""
        while (yield from self._peek()) == "{" and (yield from self._json_call()):
            while (yield from self._peek()) in BLANKS + "];,":
                self._take(1)
                self._raw = ""
        yield from self._all_content()
