"""Combination of the JSON schemas of several tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.runtime.sampling.json_schema import Schema, map_subschemas

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def calls_schema(parameters: Mapping[str, Schema], max_calls: int) -> Schema:
    """Return the schema of a list of calls, `[{"name": …, "parameters": …}]`.

    Args:
        parameters: schema of each tool's parameters, by the tool's name.
        max_calls: maximum number of calls.
    """
    definitions: Schema = {}
    options: Schema = {}
    calls = []
    for index, (name, schema) in enumerate(parameters.items()):
        place = f"tool{index}"
        definitions[place] = _moved(schema, f"#/$defs/{place}")
        options |= schema.get("x-guidance", {}) \
            if isinstance(schema.get("x-guidance"), dict) else {}
        calls.append({"type": "object", "properties": {
            "name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"], "additionalProperties": False})
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": max_calls,
            "$defs": definitions, **({"x-guidance": options} if options else {})}


def _moved(schema: Schema, place: str) -> Schema:
    """Rewrite a schema's references for a new root, given as a JSON pointer."""
    if "$id" in schema:  # its pointers are relative to the $id
        return schema

    def rewrite(part: Schema) -> Schema:
        return {key: _moved_pointer(value, place) if key in _REFERENCES else value
                for key, value in part.items()}

    root = {key: value for key, value in schema.items() if key not in ("$schema", "x-guidance")}
    moved: Schema = map_subschemas(root, rewrite)
    return moved


def _moved_pointer(reference: Any, place: str) -> Any:
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        return place + reference[1:]
    return reference
