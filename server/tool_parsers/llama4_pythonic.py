"""Llama 4: `[NAME(key="value", …), …]`.

The list may be between `<|python_start|>` and `<|python_end|>`. The chat template asks for
JSON instead, so `{"name": …, "parameters": …}` is accepted, too.
"""

from __future__ import annotations

import ast
from typing import Any

from llmc.server.text_reader import Reading
from llmc.server.tool_parsers.base import ToolParser, json_text

_START, _END = "<|python_start|>", "<|python_end|>"
_NAMES = {"true": True, "false": False, "null": None}  # JSON's names in Python literals


class Llama4Pythonic(ToolParser):
    """Parser of answers with calls at the start or after `<|python_start|>`."""

    SIGNS = ("<|header_start|>", "tool_calls")
    MARKS = (_START, _END)

    def _read(self) -> Reading[None]:
        if (yield from self._skip_blanks()) == "[" or (yield from self._peek()) == "{":
            yield from self._calls()
        while True:
            yield from self._content_until(_START)
            yield from self._calls()

    def _calls(self) -> Reading[None]:
        """Emit calls; an invalid call is content."""
        in_list = (yield from self._skip_blanks()) == "["
        if in_list:
            self._take(1)
        while True:
            character = yield from self._skip_blanks()
            if not (yield from self._json_call() if character == "{" else self._python_call()):
                yield from self._is_content()
                return
            if (yield from self._skip_mark(",", ";")) == "":
                break
            self._raw = ""
        if in_list:
            yield from self._skip_mark("]")
        yield from self._skip_mark(_END)

    def _python_call(self) -> Reading[bool]:
        """Emit one complete call with keyword arguments that are literals."""
        text = yield from self._call_text()
        call = _parsed(text)
        if call is None or call[0] not in self._tools:
            return False
        yield self._opened(call[0])
        yield self._arguments(json_text(call[1]))
        yield from self._closed()
        return True

    def _call_text(self) -> Reading[str]:
        """Consume `NAME(…)`, or the start of a text that is not a call."""
        name, mark = yield from self._name()
        if not name or mark != "(":
            return ""
        text, depth, quote = name + self._take(1), 1, ""
        while depth:
            character = yield from self._peek()
            text += self._take(1)
            if quote and character == "\\":
                yield from self._peek()
                text += self._take(1)
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            else:
                depth += (character in "([{") - (character in ")]}")
        return text

    def _name(self) -> Reading[tuple[str, str]]:
        """Consume a dotted name; return it and the character after it, which is not consumed."""
        name = ""
        while (character := (yield from self._peek())).isalnum() or character in "_.-":
            name += self._take(1)
        return name, character


def _parsed(text: str) -> tuple[str, dict[str, Any]] | None:
    """Parse a call's name and arguments; None if the text is not a call."""
    name, _, arguments = text.partition("(")
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return name, {arg.arg: _value(arg.value) for arg in call.keywords if arg.arg is not None}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Evaluate a literal.

    Raises:
        ValueError: it is not a literal, or JSON has no such value.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in
                zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    raise ValueError("not a literal")
