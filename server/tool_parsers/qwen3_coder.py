"""Qwen3-Coder and Qwen3.5.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.xml import XmlParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# Models leave </parameter> out at times.
_VALUE_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END,
               "\n" + _CLOSE)


class Qwen3Coder(XmlParser):
    SIGNS = (_OPEN, _FUNCTION)
    MARKS = (_OPEN, _CLOSE)

    def _read(self) -> Reading[None]:
        while True:
            # Models leave <tool_call> out at times.
            if (yield from self._content_until(_OPEN, _FUNCTION)) == _OPEN:
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
            yield from self._skip_mark(_CLOSE)

    def _parameters(self, tool: str) -> Reading[None]:
        """Emit arguments up to the call's end."""
        mark = yield from self._skip_mark(_PARAMETER, _FUNCTION_END)
        while mark.endswith(_PARAMETER):
            name, _ = yield from self._until(">")
            yield from self._starts_with("\n")
            mark = yield from self._argument(tool, name, *_VALUE_ENDS)
            if mark.endswith(_PARAMETER_END):
                mark = yield from self._skip_mark(_PARAMETER, _FUNCTION_END)
