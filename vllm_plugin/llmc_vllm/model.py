"""A case directory as vLLM wants a model: a directory with config.json and a tokenizer."""

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
# What it says beside what vLLM asks of any model.
CASE_DIR = "llmc_case_dir"
MANIFEST_SHA256 = "llmc_manifest_sha256"


def is_case_dir(path: object) -> bool:
    """Whether `llmc compile` made this."""
    return isinstance(path, str | os.PathLike) and Path(path, MANIFEST_NAME).is_file()


def read_copy(config: Any) -> tuple[Path, Manifest]:
    """The case directory that a config.json names, as it is on this host, and its manifest.

    Raises:
        LlmcError: it is missing or broken, or of another compilation than on vLLM's first host.
    """
    case_dir = Path(getattr(config, CASE_DIR))
    manifest = read_manifest(case_dir)
    path = case_dir / MANIFEST_NAME
    if hash_file(path) != getattr(config, MANIFEST_SHA256):
        raise LlmcError(f"'{path}' on host '{socket.gethostname()}' differs from the one that vLLM "
                        f"was started with; copy the case directory to this host again")
    return case_dir, manifest


def view(case_dir: Path, manifest: Manifest, root: Path) -> Path:
    """The directory in `root` that shows vLLM a case directory: its tokenizer's files, config.json
    and generation_config.json. It is named after what is in it, and appears whole.
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
    except OSError:  # another process was first
        shutil.rmtree(making)
    return directory


def describe(case_dir: Path, manifest: Manifest) -> dict[str, Any]:
    """config.json: nothing of it makes vLLM load weights or choose kernels. vLLM wants heads that
    ranks share evenly, which llmc's need not.
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
