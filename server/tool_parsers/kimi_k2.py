"""Kimi K2: calls in a section, with ids.

    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>

A call's id is the one that the model writes, because the chat template renders ids.
"""

from __future__ import annotations

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.sections import SectionParser

_ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2(SectionParser):
    SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", ("<|tool_call_end|>",)
    SIGNS = (SECTION, CALL)
    MARKS = (SECTION, SECTION_END, CALL, *CALL_END, _ARGUMENTS)

    def _header(self) -> Reading[tuple[str, str | None]]:
        text, _ = yield from self._until(_ARGUMENTS)
        id_ = text.strip()
        return id_.removeprefix("functions.").rpartition(":")[0] or id_, id_
