"""A rank on a GPU in a process of its own, which this module also is the program of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np

from llmc.artifacts.manifest import Manifest, read_manifest
from llmc.errors import LlmcError
from llmc.runtime.core.step import EngineLimits, Step, StepOutput
from llmc.runtime.engines.cuda import CudaEngine

_PATIENCE = 3.0  # seconds for a process to end by itself
_NOBODY = StepOutput(np.empty(0, np.int64), ())


def load_engine(manifest: Manifest, rank: int, case_dir: Path, device: int,
                **options: Any) -> CudaEngine:
    """A rank's engine on a GPU, of the class that the target names; `options` are `CudaEngine`'s.
    """
    engine: type[CudaEngine] = manifest.target.spec.load_engine_class()
    return engine(manifest, manifest.chips[rank], case_dir, device, **options)


class RemoteEngine:
    """One rank on one GPU, behind a pipe. See `CudaEngine`; what steps lead to stays in its
    process. Steps are written to the pipe and not waited for: what goes wrong in one is told when
    it is collected.

    Raises:
        LlmcError: what the process said, or that it ended.
    """

    def __init__(self, case_dir: Path, rank: int, device: int, **options: Any) -> None:
        self._rank = rank
        self._tickets = 0
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        theirs.close()
        try:
            self._call("load", case_dir, rank, device, options)
        except LlmcError:
            self.close()
            raise

    def join(self, communicator: bytes, rank: int, size: int) -> None:
        self._call("join", communicator, rank, size)

    def measure(self) -> int:
        blocks: int = self._call("measure")
        return blocks

    def allocate(self, num_blocks: int, *, show_progress: bool = False) -> None:
        self._limits: EngineLimits = self._call("allocate", num_blocks)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def connection(self) -> Connection:
        """Readable when a step can be collected, or the process has ended."""
        return self._pipe

    def submit(self, step: Step) -> int:
        """See `Engine`; returns when the step is on its way."""
        self._send("submit", step)
        self._tickets += 1
        return self._tickets - 1

    def collect(self, ticket: int) -> StepOutput:
        """Wait for a step, of which nothing comes back."""
        self._receive()
        return _NOBODY

    def trace(self, step: Step) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = self._call("trace", step)
        return values

    def abort(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._send(method, *arguments)
        return self._receive()

    def _send(self, method: str, *arguments: Any) -> None:
        try:
            self._pipe.send((method, arguments))
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _receive(self) -> Any:
        try:
            problem, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if problem:
            raise LlmcError(f"rank {self._rank}: {problem}")
        return result

    def _ended(self) -> LlmcError:
        return LlmcError(f"the process of rank {self._rank} has ended; load the model again")


class _Server:
    """Does as the pipe says, and answers in order. Steps are started as they come, by the thread
    that reads, and their ends are told by another, so that no step waits for one before it.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._sending = pipe, Lock()
        self._engine: Any = None
        self._under_way: SimpleQueue[tuple[int, str | None]] = SimpleQueue()

    def serve(self) -> None:
        """Until the pipe is closed, or the process at its other end has ended."""
        Thread(target=self._tell_ends, daemon=True).start()
        while True:
            try:
                method, arguments = self._pipe.recv()
            except (EOFError, OSError):
                return
            if method == "submit":
                problem, ticket = self._try(lambda own=arguments: self._engine.submit(*own))
                self._under_way.put((ticket, problem))
            else:
                self._answer(*self._try(
                    lambda method=method, own=arguments: self._call(method, *own)))

    def _tell_ends(self) -> None:
        while True:
            ticket, problem = self._under_way.get()
            if problem is None:
                problem, _ = self._try(lambda own=ticket: self._engine.collect(own))
            self._answer(problem, None)

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "load":
            case_dir, rank, device, options = arguments
            self._load(case_dir, rank, device, options)
            return None
        result = getattr(self._engine, method)(*arguments)
        return self._engine.limits if method == "allocate" else result

    def _load(self, case_dir: Path, rank: int, device: int, options: Mapping[str, Any]) -> None:
        self._engine = load_engine(read_manifest(case_dir), rank, case_dir, device, **options)

    def _try(self, work: Any) -> tuple[str | None, Any]:
        """What went wrong, and what came out."""
        try:
            return None, work()
        except LlmcError as error:
            return str(error), None
        except Exception as error:
            return repr(error), None

    def _answer(self, problem: str | None, result: Any) -> None:
        with self._sending:
            self._pipe.send((problem, result))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank's process ends this one
    _Server(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # a step that waits for other ranks would never end
