"""Formats whose arguments are tagged texts, converted to the types of the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from llmc.server.text_reader import Delta, Reading, emitted, parsed_json
from llmc.server.tool_parsers.base import Schema, ToolParser, json_text

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
          dict: "object", type(None): "null"}
_MAX_REFERENCES = 16  # maximum length of a chain of $ref


class XmlParser(ToolParser):
    """Parser of calls whose arguments are separate texts."""

    def __init__(self, tools: Mapping[str, Schema | None]) -> None:
        super().__init__(tools)
        self._in_object = False  # whether the object of arguments is unfinished

    def _argument(self, tool: str, name: str, *ends: str, types: set[str] | None = None) -> \
            Reading[str]:
        """Emit an argument: strings as they arrive, other types when they are complete.

        Args:
            tool: name of the tool.
            name: name of the argument.
            ends: marks that end the text.
            types: allowed JSON types. None: those of the tool's schema.

        Returns:
            The mark, which is consumed.
        """
        if types is None:
            types = argument_types(self._tools[tool] or {}, name)
        if types == {"string"}:
            yield self._member(name, '"')
            mark = yield from emitted(self._pieces_until(*ends), self._string_piece)
            yield self._arguments('"')
            return mark
        yield self._member(name, "")
        text, mark = yield from self._until(*ends)
        yield self._arguments(typed(text, types))
        return mark

    def _member(self, name: str, value: str) -> Delta:
        """Begin the object of arguments, or continue it, with a member."""
        return self._members(f"{json_text(name)}: {value}")

    def _members(self, text: str) -> Delta:
        """Begin the object of arguments, or continue it, with several members."""
        separator, self._in_object = ", " if self._in_object else "{", True
        return self._arguments(separator + text)

    def _string_piece(self, text: str) -> Delta:
        return self._arguments(json_text(text)[1:-1])

    def _closed(self) -> Reading[None]:
        if self._in_object:
            self._in_object = False
            yield self._arguments("}")
        yield from super()._closed()


def argument_types(parameters: Schema, name: str) -> set[str]:
    """Return the JSON types that a tool's schema allows for an argument; empty: any."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, _MAX_REFERENCES)


def _types(schema: Any, root: Schema, references: int) -> set[str]:
    if not isinstance(schema, Mapping) or not references:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_target(root, reference), root, references - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_KINDS[type(value)] for value in values}
    if "const" in schema:
        return {_KINDS[type(schema["const"])]}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(alternatives := schema.get(key), list) and alternatives:
            found = [_types(option, root, references - 1) for option in alternatives]
            known = [types for types in found if types]
            return set().union(*known) if len(known) == len(found) or key == "allOf" else set()
    return set()


def _target(root: Any, reference: str) -> Any:
    """Resolve a JSON pointer such as `#/$defs/a`; None if it has no target."""
    if not reference.startswith("#"):
        return None
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def typed(text: str, types: set[str]) -> str:
    """Convert an argument's text to JSON of an allowed type, or to a string if none fits.

    Args:
        text: the argument.
        types: allowed JSON types; empty: any.
    """
    encoded = text.strip()
    try:
        value = parsed_json(encoded)
    except ValueError:
        value = _python_value(encoded)
        encoded = "" if value is _NO_VALUE else json.dumps(value, ensure_ascii=False)
    if value is _NO_VALUE:
        return json_text(text)
    kind = _KINDS[type(value)]
    if kind == "string" and types:
        return json_text(text)
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return encoded if fits else json_text(text)


_NO_VALUE = object()


def _python_value(text: str) -> Any:
    """Evaluate a Python literal that stands for JSON; `_NO_VALUE` for other texts."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    if not text.startswith(("[", "{")):
        return _NO_VALUE
    try:
        value = ast.literal_eval(text)
        return parsed_json(json.dumps(value))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NO_VALUE
