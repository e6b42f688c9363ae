"""GLM-4.5 to 4.7, with or without the line breaks.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>
"""

from __future__ import annotations

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.xml import XmlParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(XmlParser):
    SIGNS = (_OPEN, _KEY)
    MARKS = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def _read(self) -> Reading[None]:
        while True:
            yield from self._content_until(_OPEN)
            text, mark = yield from self._until("\n", _KEY, _CLOSE)
            while mark == "\n" and not text.strip():  # a line break before the name
                text, mark = yield from self._until("\n", _KEY, _CLOSE)
            name = text.strip()
            if name not in self._tools:
                yield from self._is_content()
                continue
            yield self._opened(name)
            if mark == "\n":
                mark = yield from self._skip_mark(_KEY, _CLOSE)
            while mark == _KEY:
                key, _ = yield from self._until(_KEY_END)
                if not (yield from self._skip_mark(_VALUE)):
                    break
                yield from self._argument(name, key.strip(), _VALUE_END)
                mark = yield from self._skip_mark(_KEY, _CLOSE)
            yield from self._closed()
