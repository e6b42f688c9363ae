"""Formats with `invoke` and `parameter` elements in a section."""

from __future__ import annotations

import re
from typing import ClassVar

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.xml import XmlParser

_ATTRIBUTE = re.compile(r"""(\w+) *= *(?:"([^"]*)"|'([^']*)'|([^"'\s]+))""")


class InvokeParser(XmlParser):
    """Parser of calls with `invoke` and `parameter` elements.

    Attributes:
        OPEN, CLOSE: marks of the start and the end of a section.
        INVOKE, INVOKE_END: start of a call's tag, and its end tag.
        PARAMETER, PARAMETER_END: start of an argument's tag, and its end tag.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str]
    INVOKE: ClassVar[str]
    INVOKE_END: ClassVar[str]
    PARAMETER: ClassVar[str]
    PARAMETER_END: ClassVar[str]

    def _read(self) -> Reading[None]:
        while True:
            yield from self._content_until(self.OPEN)
            mark = yield from self._skip_mark(self.INVOKE, self.CLOSE)
            if not mark:
                yield from self._is_content()
            while mark == self.INVOKE:
                name = (yield from self._attributes()).get("name", "")
                if name not in self._tools:
                    yield from self._is_content()
                    break
                yield self._opened(name)
                yield from self._parameters(name)
                yield from self._closed()
                mark = yield from self._skip_mark(self.INVOKE, self.CLOSE)

    def _parameters(self, tool: str) -> Reading[None]:
        """Emit a call's arguments and consume its end tag."""
        while (yield from self._skip_mark(self.PARAMETER, self.INVOKE_END)) == self.PARAMETER:
            yield from self._parameter(tool, (yield from self._attributes()))

    def _parameter(self, tool: str, attributes: dict[str, str]) -> Reading[None]:
        """Emit an argument and consume its end tag."""
        yield from self._argument(tool, attributes.get("name", ""), self.PARAMETER_END)

    def _attributes(self) -> Reading[dict[str, str]]:
        """Consume the rest of a tag; return its attributes."""
        text, _ = yield from self._until(">")
        return {name: "".join(values) for name, *values in _ATTRIBUTE.findall(text)}
