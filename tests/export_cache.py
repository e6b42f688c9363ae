"""Disk cache of exports that tests share, since torch's exporter dominates their time.

The key covers the config, the request, library versions and the exporting code. Exports of model
classes outside transformers, and exports that a test observes, are not cached.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import pytest

from llmc.compiler.frontend import export, trace

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / ".pytest_cache" / "exports"
_LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "accelerate")


@cache
def _folder() -> Path:
    """Return the folder for this code and these libraries; remove ones unused for a day."""
    digest = hashlib.sha256("".join(map(version, _LIBRARIES)).encode())
    for path in (*sorted((_ROOT / "compiler" / "frontend").glob("*.py")), Path(__file__)):
        digest.update(path.read_bytes())
    folder = _FOLDER / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    for other in _FOLDER.iterdir():
        if other.stat().st_mtime < time.time() - 24 * 3600:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def kept(key: str, make: Callable[[], onnx.ModelProto]) -> onnx.ModelProto:
    """Return the cached result of `make` for the key; a lock serializes processes."""
    path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.onnx"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return onnx.load(path, load_external_data=False)
        model = make()
        part = path.with_suffix(".part")
        part.write_bytes(model.SerializeToString())
        os.rename(part, path)
        return model


@contextmanager
def installed() -> Iterator[None]:
    """Cache the compiler's exports."""
    real, exporter = trace.trace, trace._run_exporter

    def cached(config: Any, part: Any, layers_name: str | None, trust_remote_code: bool,
               kept_layers: Sequence[int] = (), by_axis: bool = False,
               to_images: bool = False) -> onnx.ModelProto:
        def make() -> onnx.ModelProto:
            return real(config, part, layers_name, trust_remote_code, kept_layers, by_axis,
                        to_images)

        if trace._run_exporter is not exporter or \
                not type(config).__module__.startswith("transformers."):
            return make()
        described = {key: value for key, value in config.to_dict().items()
                     if key != "_name_or_path"}
        return kept(f"{json.dumps(described, sort_keys=True, default=str)} {type(config).__name__} "
                    f"{part.name} {layers_name} {list(kept_layers)}{' by axis' * by_axis}"
                    f"{' to images' * to_images}", make)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "trace", cached)
        yield
