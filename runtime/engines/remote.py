"""A rank on a GPU in a process of its own, which this module also is the program of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import BeamStep, PackedBatch
from llmc.runtime.decoding.sampling import Draws
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.engines.tensorrt import TensorRTEngine
from llmc.runtime.manifest import Manifest, read_manifest


def load_engine(manifest: Manifest, rank: int, case_dir: Path, device: int, max_batch_size: int,
                max_tokens: int) -> CudaEngine:
    """A rank's engine on a GPU, of the kind that the model was compiled for."""
    kind = TensorRTEngine if manifest.target.kind == "tensorrt" else CudaEngine
    return kind(manifest, manifest.chips[rank], case_dir, device, max_batch_size, max_tokens)


class RemoteEngine:
    """One rank on one GPU, behind a pipe. See `Engine`; logits and tokens stay in its process.

    Raises:
        LlmcError: what the process said, or that it ended.
    """

    def __init__(self, case_dir: Path, rank: int, device: int, max_batch_size: int,
                 max_tokens: int) -> None:
        self._rank = rank
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        theirs.close()
        try:
            self._call("load", case_dir, rank, device, max_batch_size, max_tokens)
        except LlmcError:
            self.close()
            raise

    def join(self, communicator: bytes, rank: int, size: int) -> None:
        self._call("join", communicator, rank, size)

    def run(self, batch: PackedBatch) -> np.ndarray:
        self._call("submit", batch)
        return np.empty((0, 0), np.float32)

    def encode(self, batch: PackedBatch, rows: Sequence[int]) -> None:
        self._call("encode", batch, rows)

    def decode(self, batch: PackedBatch, draws: Draws, end_ids: Sequence[int], steps: int) -> None:
        self._call("decode", batch, draws, end_ids, steps)

    def likeliest(self, batch: PackedBatch, count: int) -> None:
        self._call("likeliest", batch, count)

    def follow(self, step: BeamStep) -> None:
        self._call("follow", step)

    def trace(self, batch: PackedBatch) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = self._call("trace", batch)
        return values

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._call("copy_row", source, target, length)

    def abort(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((method, arguments))
            problem, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise LlmcError(f"the process of rank {self._rank} has ended") from error
        if problem:
            raise LlmcError(f"rank {self._rank}: {problem}")
        return result


def _serve(pipe: Connection) -> None:
    """Do as the pipe says until it is closed; answer with what went wrong, and what came out."""
    engine: Any = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        problem, result = None, None
        try:
            if method == "load":
                case_dir, rank, device, *limits = arguments
                manifest = read_manifest(case_dir)
                engine = load_engine(manifest, rank, case_dir, device, *limits)
            else:
                result = getattr(engine, method)(*arguments)
        except LlmcError as error:
            problem = str(error)
        except Exception as error:
            problem = repr(error)
        pipe.send((problem, result if method == "trace" else None))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank's process ends this one
    _serve(Connection(int(sys.argv[1])))
