"""A case directory as a model directory for vLLM, with config.json and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from llmc.artifacts.manifest import MANIFEST_NAME, Manifest, check_files, hash_file, read_manifest
from llmc.errors import LlmcError

MODEL_TYPE = "llmc"
ARCHITECTURE = "LlmcForCausalLM"
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
# Keys of config.json that are llmc's.
CASE_DIR = "llmc_case_dir"
MANIFEST_SHA256 = "llmc_manifest_sha256"


def is_case_dir(path: object) -> bool:
    """Whether a path is a case directory."""
    return isinstance(path, str | os.PathLike) and Path(path, MANIFEST_NAME).is_file()


def read_copy(config: Any) -> tuple[Path, Manifest]:
    """Read the manifest of the case directory that config.json names, on this host.

    Raises:
        LlmcError: it is missing or invalid, or differs from that of vLLM's first host.
    """
    case_dir = Path(getattr(config, CASE_DIR))
    manifest = read_manifest(case_dir)
    path = case_dir / MANIFEST_NAME
    if hash_file(path) != getattr(config, MANIFEST_SHA256):
        raise LlmcError(f"'{path}' on host '{socket.gethostname()}' differs from that of the host "
                        f"where vLLM was started; copy the case directory to this host again")
    return case_dir, manifest


def view(case_dir: Path, manifest: Manifest, root: Path) -> Path:
    """Write a model directory for vLLM in `root`.

    It has the tokenizer, config.json and generation_config.json. Its name is a digest of its
    contents, and it is created atomically.
    """
    written = {CONFIG_NAME: json.dumps(describe(case_dir, manifest), indent=2, sort_keys=True)}
    if manifest.sampling is not None:
        written[GENERATION_CONFIG_NAME] = json.dumps(
            {"do_sample": bool(manifest.sampling.temperature),
             **manifest.sampling.model_dump(exclude_defaults=True)}, indent=2, sort_keys=True)
    check_files(manifest, case_dir, ranks=())
    folder = case_dir / (manifest.tokenizer.path or "")
    files = sorted(case_dir / entry.path for entry in manifest.files
                   if manifest.tokenizer.path and manifest.tokenizer.path in
                   map(str, PurePosixPath(entry.path).parents))
    digest = hashlib.sha256("".join(written.values()).encode())
    for file in files:
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    directory = root / digest.hexdigest()[:32]
    if directory.is_dir():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=root))
    for file in files:
        copy = making / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    for name, text in written.items():
        (making / name).write_text(text, encoding="utf-8")
    try:
        making.rename(directory)
    except OSError:  # another process has created it
        shutil.rmtree(making)
    return directory


def describe(case_dir: Path, manifest: Manifest) -> dict[str, Any]:
    """Return config.json; it makes vLLM neither load weights nor select kernels.

    Numbers of heads are rounded up to multiples of tp_size, as vLLM requires. llmc does not.
    """
    dims, tokenizer, size = manifest.dims, manifest.tokenizer, manifest.tp_size
    heads, kv_heads = (-(-count // size) * size for count in (dims.num_heads, dims.num_kv_heads))
    ends = list(tokenizer.eos_token_ids)
    return {
        "architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "dtype": manifest.dtype,
        "hidden_size": dims.hidden_size, "num_hidden_layers": dims.num_layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": dims.head_dim, "vocab_size": dims.vocab_size,
        "max_position_embeddings": dims.max_seq_len, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        CASE_DIR: str(case_dir), MANIFEST_SHA256: hash_file(case_dir / MANIFEST_NAME)}
