"""MiniMax M2.

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>
"""

from __future__ import annotations

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.xml import XmlParser

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_END = "<parameter name=", "</parameter>"


class MiniMaxM2(XmlParser):
    SIGNS = (_OPEN, "<invoke")
    MARKS = (_OPEN, _CLOSE)

    def _read(self) -> Reading[None]:
        while True:
            yield from self._content_until(_OPEN)
            mark = yield from self._skip_mark(_INVOKE, _CLOSE)
            if not mark:
                yield from self._is_content()
            while mark == _INVOKE:
                name = yield from self._name()
                if name not in self._tools:
                    yield from self._is_content()
                    break
                yield self._opened(name)
                while (yield from self._skip_mark(_PARAMETER, _INVOKE_END)) == _PARAMETER:
                    key = yield from self._name()
                    yield from self._argument(name, key, _PARAMETER_END)
                yield from self._closed()
                mark = yield from self._skip_mark(_INVOKE, _CLOSE)

    def _name(self) -> Reading[str]:
        """Consume the rest of a tag; the name in it."""
        text, _ = yield from self._until(">")
        return text.strip("\"' ")
