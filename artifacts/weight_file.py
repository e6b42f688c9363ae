"""`weights.safetensors`: its header, checked before any weight is read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from llmc.artifacts.case_files import open_regular
from llmc.errors import LlmcError, shown

WEIGHTS_NAME = "weights.safetensors"
_MAX_HEADER_BYTES = 32 << 20  # 100,000 weights take half of that
_MAX_DIMS = 8
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
           "I64": ("int64", 8), "I32": ("int32", 4), "U8": ("uint8", 1)}


class StoredWeight(NamedTuple):
    """A weight in the file; its bytes are `[start, stop)`, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_weight_header(path: Path) -> dict[str, StoredWeight]:
    """Read the weights of a safetensors file, by name, in the order of their offsets.

    Raises:
        LlmcError: the file cannot be read, or its header is invalid: a weight beyond the end of
            the file, overlapping weights, or a size that does not match the shape.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 8 <= 8 + length <= size:
                raise ValueError(f"the header has {length} bytes, the file {size}")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"the header has {length} bytes, expected at most "
                                 f"{_MAX_HEADER_BYTES}")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        header.pop("__metadata__", None)
        return _parse_header(header, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' is not a valid weight file ({error}); compile the model again") \
            from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("the header has a name twice")
    return unique


def _parse_header(header: dict[str, Any], first: int, size: int) -> dict[str, StoredWeight]:
    """Parse the header; offsets count from byte `first` of a file of `size` bytes."""
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r} must have dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{name!r} has dtype {shown(dtype)}, expected one of "
                             f"{', '.join(_DTYPES)}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"{name!r} has invalid shape {shown(shape)} or offsets "
                             f"{shown(offsets)}")
    weights = {}
    end = 0  # weights are contiguous, so that none overlap
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        known, width = _DTYPES[dtype]
        if offsets != [end, end + math.prod(shape) * width]:
            raise ValueError(f"{name!r} is {dtype} {shape} at {offsets}, expected bytes {end} to "
                             f"{end + math.prod(shape) * width}")
        end = offsets[1]
        weights[name] = StoredWeight(known, tuple(shape), first + offsets[0], first + end)
    if first + end != size:
        raise ValueError(f"the weights end at byte {first + end}, the file at {size}")
    return weights


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of sizes or offsets."""
    return isinstance(value, list) and len(value) <= _MAX_DIMS and all(
        type(number) is int and 0 <= number < 2**63 for number in value)
