"""Number of values in a JSON text; a separate module because a child process imports it."""

from __future__ import annotations

import json


def count_values(raw: bytes) -> int:
    """Count the values in a JSON text; -1 if it is invalid."""
    try:
        stack = [json.loads(raw)]
    except (ValueError, RecursionError):
        return -1
    count = 0
    while stack:
        value = stack.pop()
        count += 1
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return count
