"""`weights.safetensors`: what its header says, checked before anything is read by it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from llmc.artifacts.case_files import open_regular
from llmc.errors import LlmcError, shown

WEIGHTS_NAME = "weights.safetensors"
_MAX_HEADER_BYTES = 32 << 20  # 100,000 weights take half of it
_MOST_DIMS = 8
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
           "I64": ("int64", 8), "I32": ("int32", 4), "U8": ("uint8", 1)}


class StoredWeight(NamedTuple):
    """A weight in the file: its bytes are those from `start` to `stop`, counted from the file's
    first.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_weight_header(path: Path) -> dict[str, StoredWeight]:
    """Every weight of a safetensors file, by name, in the order of their bytes.

    Raises:
        LlmcError: the file cannot be read, its header is none, or says what cannot be: a weight
            that is not in the file, is in another's bytes, or has not as many as its shape.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 8 <= 8 + length <= size:
                raise ValueError(f"its header has {length} bytes, the file {size}")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes, the limit is "
                                 f"{_MAX_HEADER_BYTES}")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        return _placed(header, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' is not a whole weight file ({error}); compile the model again") \
            from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in its header")
    return found


def _placed(header: dict[str, Any], first: int, size: int) -> dict[str, StoredWeight]:
    """What the header says, whose offsets count from byte `first` of a file of `size` bytes."""
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r} has not dtype, shape and data_offsets alone")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{name!r} is of dtype {shown(dtype)}, none of {', '.join(_DTYPES)}")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            raise ValueError(f"{name!r} has shape {shown(shape)} and offsets {shown(offsets)}")
    weights = {}
    end = 0  # of the weights so far: they lie one after the other, and so in nobody else's bytes
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        known, width = _DTYPES[dtype]
        if offsets != [end, end + math.prod(shape) * width]:
            raise ValueError(f"{name!r} is {dtype} {shape} at {offsets}, which should be from "
                             f"{end} to {end + math.prod(shape) * width}")
        end = offsets[1]
        weights[name] = StoredWeight(known, tuple(shape), first + offsets[0], first + end)
    if first + end != size:
        raise ValueError(f"its weights end at byte {first + end}, the file at {size}")
    return weights


def _counts(value: Any) -> bool:
    """Whether this is a list of numbers as sizes and offsets are."""
    return isinstance(value, list) and len(value) <= _MOST_DIMS and all(
        type(number) is int and 0 <= number < 2**63 for number in value)
