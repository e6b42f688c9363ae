"""Qwen3-Coder, Qwen3.5 and Seed-OSS, with different outer tags.

    <tool_call>                         Seed-OSS: <seed:tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Seed-OSS writes values without the line breaks around them.
"""

from __future__ import annotations

from typing import ClassVar

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.xml import XmlParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3Coder(XmlParser):
    OPEN: ClassVar[str] = "<tool_call>"
    CLOSE: ClassVar[str] = "</tool_call>"
    SIGNS: ClassVar[tuple[str, ...]] = (OPEN, _FUNCTION)
    MARKS: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def _read(self) -> Reading[None]:
        while True:
            # Models sometimes omit <tool_call>.
            if (yield from self._content_until(self.OPEN, _FUNCTION)) == self.OPEN:
                called = yield from self._skip_mark(_FUNCTION)
            else:
                called = _FUNCTION
            name, _ = (yield from self._until(">")) if called else ("", "")
            if name not in self._tools:
                yield from self._is_content()
                continue
            yield self._opened(name)
            yield from self._parameters(name)
            yield from self._closed()
            yield from self._skip_mark(self.CLOSE)

    def _parameters(self, tool: str) -> Reading[None]:
        """Emit the arguments of a call up to its end."""
        # Models sometimes omit </parameter>.
        ends = ("\n" + _PARAMETER_END, _PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END,
                "\n" + self.CLOSE)
        mark = yield from self._skip_mark(_PARAMETER, _FUNCTION_END)
        while mark.endswith(_PARAMETER):
            name, _ = yield from self._until(">")
            yield from self._starts_with("\n")
            mark = yield from self._argument(tool, name, *ends)
            if mark.endswith(_PARAMETER_END):
                mark = yield from self._skip_mark(_PARAMETER, _FUNCTION_END)


class SeedOss(Qwen3Coder):
    OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
    SIGNS = (OPEN, _FUNCTION)
    MARKS = (OPEN, CLOSE)
