"""Hermes and Qwen 2.5 to 3: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

from __future__ import annotations

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.base import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    SIGNS = (OPEN,)
    MARKS = (OPEN, CLOSE)

    @classmethod
    def recognizes(cls, chat_template: str) -> bool:
        """Whether a chat template has JSON calls: these tags without other formats' tags."""
        others = ("<function=", "<arg_key>", "<parameter", "<invoke")
        return super().recognizes(chat_template) and not any(
            other in chat_template for other in others)

    def _read(self) -> Reading[None]:
        while True:
            yield from self._content_until(OPEN)
            if (yield from self._json_call()):
                yield from self._skip_mark(CLOSE)
            else:
                yield from self._is_content()
