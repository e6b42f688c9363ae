"""Calls that structured output forces: `tool_choice` is "required" or names a tool."""

from __future__ import annotations

from collections.abc import Iterator

from llmc.server.text_reader import Delta, Reading, emitted
from llmc.server.tool_parsers.base import ToolParser
from llmc.server.tool_parsers.llama3_json import Llama3Json


class RequiredCalls(Llama3Json):
    """A list of `{"name": …, "parameters": …}`, possibly incomplete, without content."""

    def _content(self, text: str) -> Iterator[Delta]:
        return iter(())

    def _all_content(self) -> Reading[None]:
        yield from self._until()


class NamedCall(ToolParser):
    """The arguments of the only tool."""

    def _read(self) -> Reading[None]:
        name, = self._tools
        yield self._opened(name)
        yield from emitted(self._pieces_until(), self._arguments)
