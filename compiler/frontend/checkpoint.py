"""Tensors of a checkpoint by name, in their dtypes on disk, read lazily."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from llmc.compiler.frontend.paths import named_file, refuse_pointer
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError, reason_of

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 << 20  # the index of 100,000 tensors has 10 MB
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
           "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
           "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I64": np.int64, "I32": np.int32, "I16": np.int16,
           "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
           "BOOL": np.bool_}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        LlmcError: the file is not a JSON object.
    """
    refuse_pointer(path)
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes exceed the limit of {_MAX_JSON_BYTES}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LlmcError(f"'{path}' cannot be read as JSON ({error}); download it again, or "
                        f"correct it") from error
    if not isinstance(data, dict):
        raise LlmcError(f"'{path}' is {type(data).__name__}, expected a JSON object; download it "
                        f"again, or correct it")
    return data


def open_checkpoint(directory: Path, allow_pickle: bool) -> dict[str, Weight]:
    """Open a checkpoint: the shards that an index lists, or a single file.

    Raises:
        LlmcError: weights are missing, a shard is missing or broken, two shards have the same
            tensor, or the weights are pickled and `allow_pickle` is not set.
    """
    if (directory / "adapter_config.json").is_file():
        raise LlmcError(f"'{directory}' contains an adapter ('adapter_config.json'), not a model; "
                        f"give its base model, with --adapter '{directory}' to merge them")
    tensors: dict[str, Weight] = {}
    owner: dict[str, Path] = {}
    for path, listed in _shards(directory):
        shard = open_safetensors(path)
        for name in shard:
            if name in owner:
                raise LlmcError(f"tensor '{name}' is in both '{owner[name]}' and '{path}'; remove "
                                f"one of them")
            owner[name] = path
        for name in listed:
            if name not in shard:
                raise LlmcError(f"'{directory / INDEX}' lists tensor '{name}' in '{path.name}', "
                                f"which does not contain it; download both again")
        tensors.update(shard)
    return tensors or _open_pickled(directory, allow_pickle)


def _shards(directory: Path) -> list[tuple[Path, list[str]]]:
    """Return the safetensors files, each with the tensors that the index lists for it."""
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        return [(path, []) for path in files]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names \
            or not all(isinstance(file, str) for file in names.values()):
        raise LlmcError(f"'{index}' has no weight_map from tensor names to file names; download "
                        f"it again")
    shards = [(named_file(index, file), [name for name in names if names[name] == file])
              for file in sorted(set(names.values()))]
    if single.is_file() and single not in [path for path, _ in shards]:
        raise LlmcError(f"'{single}' exists but is not listed in '{INDEX}'; remove one of them")
    return shards


def open_safetensors(path: Path) -> dict[str, Weight]:
    """Open a safetensors file.

    Raises:
        LlmcError: the file cannot be read, or a tensor has an unsupported dtype.
    """
    from safetensors import SafetensorError, safe_open

    refuse_pointer(path)
    try:
        with safe_open(path, framework="np"):  # checks dtypes, shapes and offsets
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise LlmcError(f"'{path}' is not a readable safetensors file ({error}); download it "
                        f"again") from error
    tensors: dict[str, Weight] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise LlmcError(f"tensor '{name}' in '{path}' has dtype {entry['dtype']}, which llmc "
                            f"does not support; give the checkpoint in float32, float16 or "
                            f"bfloat16")
        shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
        start = 8 + length + entry["data_offsets"][0]
        tensors[name] = Weight(shape, dtype, partial(read_rows, path, start, shape, dtype), name)
    return tensors


def read_rows(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype, start: int,
              stop: int) -> np.ndarray:
    """Read rows of an array of `shape` at `offset` bytes in a file.

    The file is not mapped, as pages of a mapped file count as memory in use.
    """
    row = int(np.prod(shape[1:], dtype=np.int64))
    flat = np.fromfile(path, dtype, (stop - start) * row, offset=offset + start * row *
                       dtype.itemsize)
    if flat.size != (stop - start) * row:
        raise LlmcError(f"'{path}' was truncated while it was read; do not change it during a "
                        f"compile")
    return flat.reshape((stop - start, *shape[1:]) if shape else ())


def _open_pickled(directory: Path, allow_pickle: bool) -> dict[str, Weight]:
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if not pickled:
        raise LlmcError(f"'{directory}' has a config but no *.safetensors weights; download the "
                        f"model again")
    if not allow_pickle:
        raise LlmcError(f"'{directory}' has only pickled weights ('{pickled[0].name}'), which can "
                        f"run code when they are read; convert them to safetensors, or trust them "
                        f"with --allow_pickle")
    tensors: dict[str, Weight] = {}
    for path in pickled:
        for name, weight in _unpickled(path):
            if name in tensors:
                raise LlmcError(f"tensor '{name}' is in '{path}' and in another file of "
                                f"'{directory}'; remove one of them")
            tensors[name] = weight
    return tensors


def _unpickled(path: Path) -> Iterator[tuple[str, Weight]]:
    import torch

    refuse_pointer(path)
    try:
        data = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # torch and pickle raise errors of many types
        raise LlmcError(f"'{path}' cannot be read as a pickled checkpoint "
                        f"({reason_of(error)}); download it again") from error
    if not isinstance(data, dict):
        raise LlmcError(f"'{path}' contains a {type(data).__name__}, expected a dict of tensors; "
                        f"give a state dict, or convert it to safetensors")
    for name, tensor in data.items():
        if not isinstance(tensor, torch.Tensor):
            raise LlmcError(f"'{path}' has a {type(tensor).__name__} under '{name}', not a tensor; "
                            f"give a checkpoint of the model's tensors alone")
        dtype = _numpy_dtype(tensor.dtype)
        yield name, Weight(tensor.shape, dtype, partial(_tensor_rows, tensor, dtype), name)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def _tensor_rows(tensor: torch.Tensor, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    import torch

    rows = tensor[start:stop] if tensor.dim() else tensor
    flat: np.ndarray = rows.contiguous().reshape(-1).view(torch.uint8).numpy()  # no bfloat16 there
    return flat.view(dtype).reshape(rows.shape)
