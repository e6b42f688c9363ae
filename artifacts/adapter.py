"""A compiled LoRA adapter: `adapter_info.json` and a weight file for each chip of its base."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmc.artifacts.case_files import check_case_file, read_bounded
from llmc.artifacts.manifest import (
    MANIFEST_NAME,
    Chip,
    FileEntry,
    Manifest,
    SourceFile,
    explain,
    hash_file,
)
from llmc.artifacts.weight_file import StoredWeight, read_weight_header
from llmc.errors import LlmcError

ADAPTER_INFO = "adapter_info.json"
MAX_RANK = 256
_MAX_INFO_BYTES = 16 << 20
_AGAIN = "compile the adapter again"

Matrices = dict[str, tuple[np.ndarray, np.ndarray]]  # A [rows, in] and B [rows, out] by layer


class AdapterInfo(BaseModel):
    """The contents of `adapter_info.json`.

    Args:
        base_sha256: digest of the model_info.json of the case directory that it belongs to.
        rank: largest rank of its modules.
        modules: the modules of the base that it changes, sorted.
        source: the files that it was read from.
        files: its files; chip N has `chipN/adapter.safetensors`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Literal[1]
    llmc_version: str
    base_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    modules: tuple[str, ...]
    source: tuple[SourceFile, ...]
    files: Annotated[tuple[FileEntry, ...], Field(max_length=65536)]


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
        chips.append(_read_matrices(path, chip, info.rank))
    return info, chips


def _read_matrices(path: Path, chip: Chip, rank: int) -> Matrices:
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
        rows = left.shape[0]
        if (left.dtype, right.dtype) != ("float32", "float32") \
                or left.shape != (rows, layer.in_features) \
                or right.shape != (rows, layer.out_features) \
                or rows > rank * len(layer.modules):
            raise LlmcError(f"'{path}' has matrices {list(left.shape)} and {list(right.shape)} of "
                            f"'{name}', expected float32 [rows, {layer.in_features}] and [rows, "
                            f"{layer.out_features}] with up to {rank * len(layer.modules)} rows; "
                            f"{_AGAIN}")
        matrices[name] = _finite(path, left, name), _finite(path, right, name)
    return matrices


def _finite(path: Path, stored: StoredWeight, name: str) -> np.ndarray:
    array = np.fromfile(path, np.float32, math.prod(stored.shape), offset=stored.start)
    if not np.isfinite(array).all():
        raise LlmcError(f"'{path}' has NaN or infinite values of '{name}'; {_AGAIN}")
    return array.reshape(stored.shape)
