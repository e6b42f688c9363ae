"""Persistent results of algorithm tuning, stored next to the case directory.

They are keyed by GPU, library version and kernels, since they are invalid for others.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmc.artifacts.case_files import read_bounded
from llmc.errors import LlmcError

_MAX_BYTES = 16 << 20
Choices = list[tuple[list[int], list[int]]]  # a shape, and the library's algorithm for it


def tuning_file(case_dir: Path) -> Path:
    """Path of the tuning file of a case directory."""
    resolved = case_dir.resolve()
    return resolved.with_name(f"{resolved.name}.tuning.json")


def read_choices(path: Path, made_on: str) -> Choices:
    """Read the results of a GPU, library and kernels; empty if absent or invalid."""
    choices = _read(path).get(made_on, [])
    if not isinstance(choices, list):
        return []
    return [(entry[0], entry[1]) for entry in choices
            if isinstance(entry, list) and len(entry) == 2 and all(map(_numbers, entry))]


def write_choices(path: Path, made_on: str, choices: Choices) -> None:
    """Store results, replacing those of the same GPU and library with other kernels.

    Does nothing if the file cannot be written.

    Args:
        made_on: GPU, library version and kernels, in this order.
    """
    same, _, _ = made_on.rpartition(", ")
    others = {name: kept for name, kept in _read(path).items() if name.rpartition(", ")[0] != same}
    data = {**others, made_on: choices}
    with suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_bounded(path, _MAX_BYTES))
    except (OSError, LlmcError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _numbers(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**64 for value in values)
