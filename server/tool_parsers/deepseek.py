"""DeepSeek V3 and V3.1, with different call headers.

    V3    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
          ```json
          {…}
          ```<｜tool▁call▁end｜>
    V3.1  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
"""

from __future__ import annotations

from typing import ClassVar

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.sections import SectionParser

_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV31(SectionParser):
    SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL = "<｜tool▁call▁begin｜>"
    CALL_END: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁end｜>",)
    SIGNS: ClassVar[tuple[str, ...]] = (SECTION, _SEPARATOR)
    MARKS = (SECTION, SECTION_END, CALL, *CALL_END, _SEPARATOR)

    def _header(self) -> Reading[tuple[str, str | None]]:
        name, _ = yield from self._until(_SEPARATOR)
        return name.strip(), None


class DeepSeekV3(DeepSeekV31):
    CALL_END = (_FENCE, *DeepSeekV31.CALL_END)
    SIGNS = (*DeepSeekV31.SIGNS, _FENCE + "json")

    def _header(self) -> Reading[tuple[str, str | None]]:
        yield from self._until(_SEPARATOR)
        name, _ = yield from self._until(_FENCE + "json")
        return name.strip(), None
