"""Provenance: the files that a model was read from, for reproducible compiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.manifest import SourceFile, hash_file

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # of a Hugging Face model
_PICKLED = "pytorch_model*.bin"
# Hashing SmolLM2-135M's weights whole takes 0.95 s of CPU time, 8 % of its compile.
_MOST_HASHED = 64 << 20


@dataclass(frozen=True)
class Origin:
    """The origin of a model.

    Args:
        paths: its files.
        repo_id: repository on the Hugging Face hub; None for local files.
        commit: commit of that repository.
    """

    paths: Sequence[Path] = ()
    repo_id: str | None = None
    commit: str | None = None

    def files(self) -> tuple[SourceFile, ...]:
        """Return name, size and digest of each file, sorted by name."""
        return tuple(SourceFile(name=path.name, size=path.stat().st_size, sha256=_sha256(path))
                     for path in sorted(self.paths, key=lambda path: path.name))


def directory_origin(directory: Path, repo_id: str | None = None) -> Origin:
    """Return the origin of a Hugging Face directory, or of a snapshot in the hub's cache."""
    commit = directory.name if repo_id and re.fullmatch("[0-9a-f]{40}", directory.name) else None
    return Origin(_model_files(directory), repo_id, commit)


def _model_files(directory: Path) -> tuple[Path, ...]:
    files = [path for pattern in PATTERNS for path in directory.glob(pattern) if path.is_file()]
    if not any(path.suffix == ".safetensors" for path in files):
        files += directory.glob(_PICKLED)
    return tuple(files)


def _sha256(path: Path) -> str | None:
    """Return a file's digest; of a large file only if the hub's cache uses it as its name."""
    named = path.resolve().name
    if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", named):
        return named
    return hash_file(path) if path.stat().st_size <= _MOST_HASHED else None
