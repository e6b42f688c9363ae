"""Formats with a section of calls, each between marks."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.base import ToolParser


class SectionParser(ToolParser):
    """Parser of calls with a header and JSON arguments.

    Attributes:
        SECTION, SECTION_END: marks of the start and the end of a section.
        CALL: mark of the start of a call.
        CALL_END: marks after a call's arguments, in order.
    """

    SECTION: ClassVar[str]
    SECTION_END: ClassVar[str]
    CALL: ClassVar[str]
    CALL_END: ClassVar[tuple[str, ...]]

    @abstractmethod
    def _header(self) -> Reading[tuple[str, str | None]]:
        """Consume a call's header; return the tool's name, and the call's id, if any."""

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
