"""Formats whose calls stand in a section, each between marks of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.base import ToolParser


class SectionParser(ToolParser):
    """Calls with JSON arguments behind a header.

    Attributes:
        SECTION, SECTION_END, CALL: marks of a section's begin and end, and of a call's begin.
        CALL_END: marks after a call's arguments, in their order.
    """

    SECTION: ClassVar[str]
    SECTION_END: ClassVar[str]
    CALL: ClassVar[str]
    CALL_END: ClassVar[tuple[str, ...]]

    @abstractmethod
    def _header(self) -> Reading[tuple[str, str | None]]:
        """Consume a call's header; its tool's name, and its id where it has one."""

    def _read(self) -> Reading[None]:
        while True:
            yield from self._content_until(self.SECTION)
            while (yield from self._skip_mark(self.CALL, self.SECTION_END)) == self.CALL:
                name, id_ = yield from self._header()
                if name not in self._tools:
                    break
                yield self._opened(name, id_)
                yield from self._json_arguments()
                yield from self._closed()
                for mark in self.CALL_END:
                    yield from self._skip_mark(mark)
                self._raw = ""
            else:
                self._raw = ""
                continue
            yield from self._is_content()
