"""The field `prompt_embeds` of /v1/completions: an array in base64, as in vLLM.

It holds what `torch.save` writes for a tensor, or a .npy file. Neither is unpickled by Python's
rules: of torch's file, only a tensor's own structure is read.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_MAX_PICKLE = 64 << 10  # a tensor's takes 400 bytes
_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_GIVE = "give base64 of torch.save's bytes, or of a .npy file, with [num_tokens, hidden_size]"


def read_prompt_embeds(text: str) -> np.ndarray:
    """Read an array from base64.

    Returns:
        Its values, of any shape; bfloat16 as float32.

    Raises:
        ValueError: the text is not such an array; with the reason and what to give.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"is not base64; {_GIVE}") from None
    try:
        if data.startswith(_NPY):
            array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
            return array
        if data.startswith(_ZIP):
            return _read_tensor(data)
    except Exception as error:  # damaged files raise errors of many types
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"cannot be read ({reason}); {_GIVE}") from None
    raise ValueError(f"is neither a file of torch.save nor a .npy file; {_GIVE}")


@dataclass(frozen=True)
class _Storage:
    """Elements of a tensor: dtype in the file, name of their file, and number."""

    dtype: str
    key: str
    size: int


def _rebuild(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...],
             *others: object) -> tuple[_Storage, tuple[int, ...]]:
    """Stand in for torch's `_rebuild_tensor_v2`; refuse parts of other tensors."""
    sizes = [int(size) for size in shape]
    dense = [math.prod(sizes[axis + 1:]) for axis in range(len(sizes))]
    if not isinstance(storage, _Storage) or offset or list(stride) != dense \
            or math.prod(sizes) != storage.size or min(sizes, default=0) < 0:
        raise ValueError("the tensor is a view of another; save a contiguous copy")
    return storage, tuple(sizes)


_DTYPES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8",
           "BFloat16Storage": "bfloat16"}
_KNOWN: dict[tuple[str, str], Callable[..., Any] | str] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild, ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()}}


class _Unpickler(pickle.Unpickler):
    """Reader of the pickle of one tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise ValueError(f"it has {module}.{name}; save one floating-point tensor")
        return _KNOWN[module, name]

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, key, _, size = reference
        if kind != "storage" or dtype not in _DTYPES.values():
            raise ValueError("it is not one floating-point tensor")
        return _Storage(dtype, str(key), int(size))


def _read_tensor(data: bytes) -> np.ndarray:
    """Read a file of torch.save."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("its zip file is compressed")
        found = [name for name in names if name.endswith("/data.pkl")]
        if len(found) != 1 or archive.getinfo(found[0]).file_size > _MAX_PICKLE:
            raise ValueError("it is not one tensor")
        root = found[0].removesuffix("data.pkl")
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("it was saved on a big-endian machine")
        loaded = _Unpickler(io.BytesIO(archive.read(found[0]))).load()
        if not isinstance(loaded, tuple) or len(loaded) != 2 or \
                not isinstance(loaded[0], _Storage):
            raise ValueError("it is not one tensor")
        storage, shape = loaded
        raw = archive.read(f"{root}data/{storage.key}")
    if storage.dtype == "bfloat16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, storage.dtype)
    return values.reshape(shape)
