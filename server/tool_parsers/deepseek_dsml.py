"""DeepSeek V3.2 and V4, with different section names.

    <｜DSML｜function_calls>           V4: <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Models may write the object of all arguments instead of the parameters: bare, or as the only
parameter `arguments`, as DeepSeek's encoder does for arguments that it cannot split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from llmc.server.text_reader import Delta, Reading, parsed_json
from llmc.server.tool_parsers.invoke import InvokeParser
from llmc.server.tool_parsers.xml import typed

_WRAPPERS = ("arguments", "input")  # names of a parameter with all arguments
_TOKEN = "｜DSML｜"


class DeepSeekV32(InvokeParser):
    OPEN: ClassVar[str] = f"<{_TOKEN}function_calls>"
    CLOSE: ClassVar[str] = f"</{_TOKEN}function_calls>"
    INVOKE, INVOKE_END = f"<{_TOKEN}invoke", f"</{_TOKEN}invoke>"
    PARAMETER, PARAMETER_END = f"<{_TOKEN}parameter", f"</{_TOKEN}parameter>"
    SIGNS: ClassVar[tuple[str, ...]] = (OPEN, INVOKE)
    MARKS = (_TOKEN,)

    def _parameters(self, tool: str) -> Reading[None]:
        if (yield from self._skip_blanks()) != "{":
            yield from super()._parameters(tool)
            return
        yield from self._json_arguments()
        yield from self._skip_mark(self.INVOKE_END)

    def _parameter(self, tool: str, attributes: dict[str, str]) -> Reading[None]:
        name, names = attributes.get("name", ""), self._names_of(tool)
        if name in _WRAPPERS and names and name not in names and not self._arguments_emitted:
            text, _ = yield from self._until(self.PARAMETER_END)
            yield from self._wrapped(tool, name, text)
        else:
            types = {"string"} if attributes.get("string") == "true" else None
            yield from self._argument(tool, name, self.PARAMETER_END, types=types)

    def _wrapped(self, tool: str, name: str, text: str) -> Iterator[Delta]:
        """Emit the object of all arguments, or else the text as a parameter's value."""
        try:
            value = parsed_json(text)
        except ValueError:
            value = None
        if not isinstance(value, dict) or not value.keys() <= self._names_of(tool):
            yield self._member(name, typed(text, set()))
        elif value:
            yield self._members(text.strip()[1:-1].strip())

    def _names_of(self, tool: str) -> set[str]:
        """Return the names of the arguments in a tool's schema."""
        properties = (self._tools[tool] or {}).get("properties")
        return set(properties) if isinstance(properties, dict) else set()


class DeepSeekV4(DeepSeekV32):
    OPEN, CLOSE = f"<{_TOKEN}tool_calls>", f"</{_TOKEN}tool_calls>"
    SIGNS = (OPEN, DeepSeekV32.INVOKE)
