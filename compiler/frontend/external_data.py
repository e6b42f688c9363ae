"""External data of ONNX files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import Message

from llmc.compiler.frontend.checkpoint import read_rows
from llmc.compiler.frontend.paths import named_file
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

# The last two may be present, but are not read.
_KEYS = {"location", "offset", "length", "checksum", "basepath"}
_HALF_BYTES = {onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1}


@dataclass(frozen=True)
class ExternalArray:
    """The position of an array in an existing file, in bytes."""

    path: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]

    def weight(self, dtype: np.dtype, name: str) -> Weight:
        """Return the array as a lazy weight."""
        return Weight(self.shape, dtype, lambda start, stop: read_rows(
            self.path, self.offset, self.shape, dtype, start, stop), name)


def find_external_data(model: onnx.ModelProto, source: Path) -> \
        Iterator[tuple[onnx.TensorProto, ExternalArray]]:
    """Find all tensors of a model, including those in subgraphs, with external data.

    Raises:
        LlmcError: a file is missing, outside the model's folder, or too short for its tensor.
    """
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor, _locate(tensor, source)


def embed(tensor: onnx.TensorProto, array: ExternalArray) -> None:
    """Read a tensor's external data into the model."""
    data = read_rows(array.path, array.offset, (array.nbytes,), np.dtype(np.uint8), 0, array.nbytes)
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.raw_data = data.tobytes()


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    for _, value in message.ListFields():
        for item in ([value] if isinstance(value, Message) else value
                     if not isinstance(value, str | bytes | int | float) else ()):
            if isinstance(item, onnx.TensorProto):
                yield item
            elif isinstance(item, Message):
                yield from _tensors(item)


def _locate(tensor: onnx.TensorProto, source: Path) -> ExternalArray:
    what = f"tensor '{tensor.name}' in '{source}'"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    unknown = sorted(entries.keys() - _KEYS)
    if unknown or len(entries) < len(tensor.external_data):
        raise LlmcError(f"{what} has duplicate or unknown keys in external_data: "
                        f"{unknown or sorted(entry.key for entry in tensor.external_data)}; "
                        f"export the model again")
    path = named_file(source, entries.get("location", ""))
    shape = tuple(tensor.dims)
    nbytes = _nbytes(tensor, what)
    offset, length = (_count(entries[key], key, what) if key in entries else default
                      for key, default in (("offset", 0), ("length", nbytes)))
    if length != nbytes:
        raise LlmcError(f"{what} {list(shape)} has length {length} in '{path.name}', expected "
                        f"{nbytes} bytes; export the model again")
    size = path.stat().st_size
    if offset + nbytes > size:
        raise LlmcError(f"{what} {list(shape)} is at bytes {offset} to {offset + nbytes} of "
                        f"'{path.name}', which has {size} bytes; the file is truncated or of "
                        f"another model: copy it again")
    return ExternalArray(path, offset, nbytes, shape)


def _nbytes(tensor: onnx.TensorProto, what: str) -> int:
    if tensor.data_type == onnx.TensorProto.STRING or min(tensor.dims, default=0) < 0:
        raise LlmcError(f"{what} of type {tensor.data_type} and shape {list(tensor.dims)} cannot "
                        f"have external data; export the model again")
    try:
        itemsize: int = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        raise LlmcError(f"{what} has type {tensor.data_type}, which ONNX does not define; export "
                        f"the model again") from None
    count: int = math.prod(tensor.dims)
    return -(-count // 2) if tensor.data_type in _HALF_BYTES else count * itemsize


def _count(text: str, key: str, what: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise LlmcError(f"{what} has {key} {text!r}, expected a number of bytes; export the model "
                        f"again")
    return int(text)
