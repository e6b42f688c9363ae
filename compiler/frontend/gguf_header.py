"""The header of a GGUF file: metadata without the vocabulary, and positions of tensors.

gguf's reader creates several objects per token, score and merge. For a vocabulary of 262,144 it
takes 15 CPU seconds and 700 MB each time that a file is opened.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llmc.compiler.frontend.paths import refuse_pointer
from llmc.errors import LlmcError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Bytes of scalar types, and their struct formats.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}
_INTEGERS = {0, 1, 2, 3, 4, 5, 10, 11}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_TOKENS = "tokenizer.ggml.tokens"
_LONG = 4096  # arrays above this size are per token, not per layer
_ALIGNMENT = 32
_MAX_RANK = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's position: `shape` with rows first, `offset` and `nbytes` in the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Field:
    """A metadata entry.

    Args:
        raw: key and value as in the file; empty for a long array.
        kind: type of the value.
        value: bytes of a scalar or string.
        length: length of an array.
    """

    raw: bytes
    kind: int
    value: bytes
    length: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    version: int
    fields: dict[str, _Field]
    tensors: tuple[GgufTensor, ...]

    def text(self, key: str) -> str:
        """Return a string's value; empty if absent."""
        field = self.fields.get(key)
        return field.value.decode() if field is not None and field.kind == _STRING else ""

    def number(self, key: str) -> int:
        """Return an integer's value; 0 if absent."""
        field = self.fields.get(key)
        return int.from_bytes(field.value, "little") \
            if field is not None and field.kind in _INTEGERS else 0

    def numbers(self) -> dict[str, int]:
        """Return the architecture's integers, by their keys without its prefix."""
        prefix = f"{self.text('general.architecture')}."
        return {key.removeprefix(prefix): self.number(key) for key, field in self.fields.items()
                if key.startswith(prefix) and field.kind in _INTEGERS}

    def optional_number(self, key: str) -> float | bool | None:
        """Return the value of an integer, float32, float64 or boolean; None if absent."""
        field = self.fields.get(key)
        if field is None or field.kind not in _FORMATS:
            return None
        value: float | bool = struct.unpack("<" + _FORMATS[field.kind], field.value)[0]
        return value

    def without_vocabulary(self) -> bytes:
        """Build a GGUF file with `vocab_size` instead of per-token arrays, and empty tensors."""
        raw = [field.raw for field in self.fields.values() if field.raw]
        size = f"{self.text('general.architecture')}.vocab_size"
        if _TOKENS in self.fields and size not in self.fields:
            raw.append(_string(size) + struct.pack("<II", _UINT32, self.fields[_TOKENS].length))
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(raw))
        tensors = [_string(t.name) + struct.pack("<IQIQ", 1, 0, 0, 0) for t in self.tensors]
        data = _MAGIC + counts + b"".join([*raw, *tensors])
        return data + bytes(-len(data) % (self.number("general.alignment") or _ALIGNMENT))


def read_header(path: Path) -> GgufHeader:
    """Read a header.

    Raises:
        LlmcError: it is not a GGUF file, has an unsupported byte order or version, or is
            truncated.
    """
    refuse_pointer(path)
    try:
        with open(path, "rb") as file, \
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except (struct.error, ValueError, OverflowError, OSError) as error:
        raise LlmcError(f"'{path}' cannot be read as GGUF ({error}); download it again") from error


def _read(data: mmap.mmap) -> GgufHeader:
    if data[:4] != _MAGIC:
        raise ValueError("it does not start with GGUF")
    version, tensor_count, field_count = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, expected a little-endian file of version "
                         f"{' or '.join(map(str, _VERSIONS))}")
    position = 24
    fields: dict[str, _Field] = {}
    for _ in range(field_count):
        start = position
        key, position = _read_string(data, position)
        kind, = struct.unpack_from("<I", data, position)
        value, length, position = _read_value(data, position + 4, kind)
        if key in fields:
            raise ValueError(f"duplicate key '{key}'")
        raw = b"" if length > _LONG else data[start:position]
        fields[key] = _Field(raw, kind, value, length)
    entries = []
    for _ in range(tensor_count):
        name, position = _read_string(data, position)
        rank, = struct.unpack_from("<I", data, position)
        if rank > _MAX_RANK:
            raise ValueError(f"tensor '{name}' has {rank} dimensions, expected at most {_MAX_RANK}")
        *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, position + 4)
        position += 16 + 8 * rank
        entries.append((name, GGMLQuantizationType(kind), tuple(reversed(dims)), offset))
    header = GgufHeader(version, fields, ())
    alignment = header.number("general.alignment") or _ALIGNMENT
    if alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment} is not a power of two")
    start = position + -position % alignment
    tensors = tuple(_place(name, kind, shape, start + offset, len(data))
                    for name, kind, shape, offset in entries)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("two of its tensors have the same name")
    return GgufHeader(version, fields, tensors)


def _place(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int,
           size: int) -> GgufTensor:
    block_size, block_nbytes = GGML_QUANT_SIZES[kind]
    count = math.prod(shape) if shape else 0
    if not count or shape[-1] % block_size:
        raise ValueError(f"tensor '{name}' {list(shape)} is empty, or its rows are not divisible "
                         f"into {kind.name} blocks of {block_size}")
    nbytes = count // block_size * block_nbytes
    if offset + nbytes > size:
        raise ValueError(f"tensor '{name}' ends at byte {offset + nbytes}, the file at {size}")
    return GgufTensor(name, kind, shape, offset, nbytes)


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    length, = struct.unpack_from("<Q", data, position)
    return _slice(data, position + 8, length).decode(), position + 8 + length


def _slice(data: mmap.mmap, position: int, length: int) -> bytes:
    if position + length > len(data):
        raise ValueError(f"it ends at byte {len(data)}, within its header")
    return data[position:position + length]


def _read_value(data: mmap.mmap, position: int, kind: int) -> tuple[bytes, int, int]:
    """Return the bytes of a scalar or string, the length of an array, and the value's end."""
    if kind in _WIDTHS:
        return _slice(data, position, _WIDTHS[kind]), 0, position + _WIDTHS[kind]
    if kind == _STRING:
        length, = struct.unpack_from("<Q", data, position)
        return _slice(data, position + 8, length), 0, position + 8 + length
    if kind != _ARRAY:
        raise ValueError(f"unknown value type {kind}")
    kind, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if kind in _WIDTHS:
        position += count * _WIDTHS[kind]
    elif kind == _STRING:
        for _ in range(count):
            position += 8 + struct.unpack_from("<Q", data, position)[0]
    else:
        raise ValueError(f"unsupported array of value type {kind}")
    if position > len(data):
        raise ValueError(f"it ends at byte {len(data)}, within its header")
    return b"", count, position


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
