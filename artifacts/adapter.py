"""A compiled LoRA adapter: `adapter_info.json` and a weight file for each chip of its base."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmc.artifacts.case_files import check_case_file, read_bounded
from llmc.artifacts.manifest import (
    MANIFEST_NAME,
    Chip,
    FileEntry,
    LoraLayer,
    Manifest,
    SourceFile,
    explain,
    hash_file,
)
from llmc.artifacts.weight_file import StoredWeight, read_weight_header
from llmc.errors import LlmcError
from llmc.plugins.lora import RANK_MULTIPLE

ADAPTER_INFO = "adapter_info.json"
MAX_RANK = 256
_MAX_INFO_BYTES = 16 << 20
_AGAIN = "compile the adapter again"

# Matrices by layer: A [rows, in] and B [rows, out], float32, of experts [rows, experts, in] and
# [rows, experts, out]; or for a layer whose adapters are in slots [parts, rank, in] and
# [out, rank], of experts [experts, rank, in] and [experts * out, rank], in its dtype (bfloat16 as
# uint16).
Matrices = dict[str, tuple[np.ndarray, np.ndarray]]


class AdapterInfo(BaseModel):
    """The contents of `adapter_info.json`.

    Args:
        base_sha256: digest of the model_info.json of the case directory that it belongs to.
        rank: largest rank of its modules.
        modules: the modules of the base that it changes, sorted.
        ranks: the rank of each of these.
        source: the files that it was read from.
        files: its files; chip N has `chipN/adapter.safetensors`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Literal[1]
    llmc_version: str
    base_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    modules: tuple[str, ...]
    ranks: tuple[Annotated[int, Field(ge=1, le=MAX_RANK)], ...]
    source: tuple[SourceFile, ...]
    files: Annotated[tuple[FileEntry, ...], Field(max_length=65536)]

    @model_validator(mode="after")
    def _check_ranks(self) -> AdapterInfo:
        if len(self.ranks) != len(self.modules):
            raise ValueError(f"{len(self.modules)} modules have {len(self.ranks)} ranks")
        return self

    def ranks_of(self, layer: LoraLayer) -> list[int]:
        """The rank of each module of a layer; 0: the adapter does not change it."""
        own = dict(zip(self.modules, self.ranks, strict=True))
        return [own.get(module, 0) for module in layer.modules]


def adapter_weights(rank: int) -> str:
    """The path of a chip's weight file."""
    return f"chip{rank}/adapter.safetensors"


def write_adapter_info(info: AdapterInfo, directory: Path) -> None:
    """Write `adapter_info.json` deterministically."""
    text = json.dumps(info.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    (directory / ADAPTER_INFO).write_text(text, encoding="utf-8")


def read_adapter_info(directory: Path) -> AdapterInfo:
    """Read and validate `adapter_info.json`.

    Raises:
        LlmcError: the directory or the file is missing or invalid.
    """
    path = directory / ADAPTER_INFO
    if not os.path.lexists(path):
        hint = "it is a PEFT adapter; compile it first" \
            if (directory / "adapter_config.json").is_file() else "give the output directory"
        raise LlmcError(f"'{directory}' has no {ADAPTER_INFO}; {hint}: llmc adapter PEFT_DIR "
                        f"--case_dir CASE_DIR -o DIR")
    try:
        return AdapterInfo.model_validate_json(read_bounded(path, _MAX_INFO_BYTES))
    except ValidationError as error:
        raise LlmcError(f"'{path}' is not valid: {explain(error)}; {_AGAIN}") from error
    except OSError as error:
        raise LlmcError(f"'{path}' cannot be read ({error.strerror}); {_AGAIN}") from error


def load_adapter(directory: Path, manifest: Manifest, base_sha256: str, *,
                 verify: bool = True) -> tuple[AdapterInfo, list[Matrices]]:
    """Read a compiled adapter.

    Args:
        directory: output of `llmc adapter`.
        manifest: of the base.
        base_sha256: digest of the base's model_info.json.
        verify: check the digest of each file.

    Returns:
        Its description, and the matrices of each chip.

    Raises:
        LlmcError: it belongs to another base, is damaged, or has NaN or infinite values.
    """
    info = read_adapter_info(directory)
    if info.base_sha256 != base_sha256:
        raise LlmcError(f"the adapter in '{directory}' was compiled for another case directory "
                        f"({MANIFEST_NAME} has SHA-256 {info.base_sha256[:12]}…, this one has "
                        f"{base_sha256[:12]}…); compile the adapter for this one")
    listed = {entry.path: entry for entry in info.files}
    chips = []
    for chip in manifest.chips:
        name = adapter_weights(chip.rank)
        if name not in listed:
            raise LlmcError(f"'{directory / ADAPTER_INFO}' does not list '{name}'; {_AGAIN}")
        check_case_file(directory, name)
        path, entry = directory / name, listed[name]
        if path.stat().st_size != entry.size or (verify and hash_file(path) != entry.sha256):
            raise LlmcError(f"'{path}' has changed since compilation: its size or SHA-256 differs "
                            f"from {ADAPTER_INFO}; {_AGAIN}, or copy it again")
        chips.append(_read_matrices(path, chip, info))
    return info, chips


def _read_matrices(path: Path, chip: Chip, info: AdapterInfo) -> Matrices:
    """Read the matrices of a chip and check them against its layers."""
    header = read_weight_header(path)
    layers = {layer.name: layer for layer in chip.lora}
    matrices: Matrices = {}
    for name in sorted({name.rpartition(".")[0] for name in header}):
        left, right = (header.get(f"{name}.lora_{part}") for part in "ab")
        layer = layers.get(name)
        if layer is None or left is None or right is None:
            raise LlmcError(f"'{path}' has matrices of '{name}', which is no layer of chip "
                            f"{chip.rank} that takes adapters; {_AGAIN}")
        leading = sum(info.ranks_of(layer)), *((layer.num_experts,) if layer.experts else ())
        shapes = [(*leading, layer.in_features), (*leading, layer.out_features)]
        if (left.dtype, right.dtype) != ("float32", "float32") \
                or [tuple(left.shape), tuple(right.shape)] != shapes:
            raise LlmcError(f"'{path}' has matrices {list(left.shape)} and {list(right.shape)} of "
                            f"'{name}', expected float32 {list(shapes[0])} and {list(shapes[1])}; "
                            f"{_AGAIN}")
        pair = _finite(path, left, name), _finite(path, right, name)
        matrices[name] = pair if layer.dtype is None else \
            slot_matrices(layer, info.ranks_of(layer), *pair)
    return matrices


def slot_matrices(layer: LoraLayer, ranks: Sequence[int], left: np.ndarray,
                  right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert a layer's A and B to those of a slot, in the layer's dtype."""
    rank = -(-max(ranks) // RANK_MULTIPLE) * RANK_MULTIPLE
    if layer.experts:
        more = (0, rank - len(left)), (0, 0), (0, 0)
        down, up = np.pad(left, more).swapaxes(0, 1), np.pad(right, more).transpose(1, 2, 0)
        return (_as_stored(np.ascontiguousarray(down), layer.dtype),
                _as_stored(np.ascontiguousarray(up).reshape(-1, rank), layer.dtype))
    down = np.zeros((len(ranks), rank, layer.in_features), np.float32)
    up = np.zeros((layer.out_features, rank), np.float32)
    start = 0
    for part, count in enumerate(ranks):
        down[part, :count] = left[start:start + count]
        up[:, :count] += right[start:start + count].T  # 0 in outputs of other parts
        start += count
    return _as_stored(down, layer.dtype), _as_stored(up, layer.dtype)


def _as_stored(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """Round to the dtype; bfloat16 as uint16."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    bits = array.view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _finite(path: Path, stored: StoredWeight, name: str) -> np.ndarray:
    array = np.fromfile(path, np.float32, math.prod(stored.shape), offset=stored.start)
    if not np.isfinite(array).all():
        raise LlmcError(f"'{path}' has NaN or infinite values of '{name}'; {_AGAIN}")
    return array.reshape(stored.shape)
