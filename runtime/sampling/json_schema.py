"""JSON schemas, rewritten to what the grammar engine (llguidance) represents exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeGuard

from llmc.errors import LlmcError

Schema = dict[str, Any]
# Keywords whose value maps names to subschemas, and keywords whose value is data.
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("const", "enum", "default", "example", "examples", "required", "x-guidance")
# Formats that llguidance enforces. JSON Schema makes every other one an annotation.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
            "uri")
_EXACT = 2**53  # llguidance reads numbers as float64, which holds every integer up to here
_MAX_INT = 2**63 - 2**10  # the largest float64 that is an int64


def map_subschemas(schema: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    """Apply `rewrite` to a schema and to each of its subschemas, innermost first."""
    if isinstance(schema, list):
        return [map_subschemas(subschema, rewrite) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    return rewrite({key: _map_keyword(key, value, rewrite) for key, value in schema.items()})


def _map_keyword(key: str, value: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    if key in _DATA:
        return value
    if key in _MAPS and isinstance(value, dict):
        return {name: map_subschemas(subschema, rewrite) for name, subschema in value.items()}
    return map_subschemas(value, rewrite)


def exact_schema(text: str) -> str:
    """Rewrite a schema, as JSON, to one that llguidance enforces exactly.

    Unknown formats are dropped. Integer bounds that float64 cannot represent move inward.

    Raises:
        LlmcError: an integer of the schema cannot be represented.
    """
    return json.dumps(map_subschemas(json.loads(text), _exact), ensure_ascii=False)


def _exact(schema: Schema) -> Schema:
    schema = {key: value for key, value in schema.items()
              if key != "format" or not isinstance(value, str) or value in _FORMATS}
    _check_value([schema.get("enum"), schema.get("const")])
    integers = "integer" in schema.get("type", ())
    bounds: dict[str, float] = {}
    for key, exclusive, is_lower in (("minimum", "exclusiveMinimum", True),
                                     ("maximum", "exclusiveMaximum", False)):
        inclusive, beyond = schema.get(key), schema.get(exclusive)
        limits = [inclusive] if isinstance(inclusive, int | float) else []
        if _is_large(inclusive):
            limits = [_bound(inclusive, is_lower, integers)]
        if _is_large(beyond):
            limits.append(_bound(beyond + (1 if is_lower else -1), is_lower, integers))
            del schema[exclusive]
        if _is_large(inclusive) or _is_large(beyond):
            bounds[key] = max(limits) if is_lower else min(limits)
    low, high = bounds.get("minimum", -math.inf), bounds.get("maximum", math.inf)
    if low > high:
        raise LlmcError("no integer within the bounds can be represented; structured output holds "
                        "integers up to 2^53 exactly, use a string with a pattern instead")
    return schema | bounds


def _is_large(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) > _EXACT


def _bound(value: int, is_lower: bool, integers: bool) -> int:
    """The float64 nearest to a bound that lies within the range.

    Args:
        integers: the values are integers, which llguidance stores in 64 bits.
    """
    if not is_lower:
        return -_bound(-value, True, integers)
    try:
        rounded = float(value)
    except OverflowError:
        rounded = math.inf if value > 0 else -math.inf
    if rounded < value:
        rounded = math.nextafter(rounded, math.inf)
    if integers:
        rounded = max(rounded, -_MAX_INT)
    if abs(rounded) > (_MAX_INT if integers else 2**1000):
        raise LlmcError(f"the bound {value} is beyond what structured output can represent "
                        f"({'int64' if integers else 'float64'}); leave it out")
    return int(rounded)


def _check_value(value: Any) -> None:
    """Raise LlmcError if `enum` or `const` has an integer that llguidance cannot represent."""
    if _is_large(value) and _written(value) != value:
        raise LlmcError(f"the integer {value} cannot be represented; structured output holds "
                        f"integers up to 2^53 exactly, use a string instead")
    for element in value.values() if isinstance(value, dict) else \
            value if isinstance(value, list) else ():
        _check_value(element)


def _written(value: int) -> int | None:
    """The integer that llguidance writes for an integer of a schema."""
    try:
        rounded = float(value)
    except OverflowError:
        return None
    return int(rounded) if abs(rounded) < 2**63 else int(Decimal(repr(rounded)))
