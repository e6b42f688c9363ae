"""A rank on a GPU in a separate process, which runs this module as its program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
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

_PATIENCE = 3.0  # seconds to wait for a process to end
_NO_OUTPUT = StepOutput(np.empty(0, np.int64), ())


def load_engine(manifest: Manifest, rank: int, case_dir: Path, device: int,
                **options: Any) -> CudaEngine:
    """Create a rank's engine on a GPU, of the target's class.

    Args:
        options: keyword arguments of `CudaEngine`.
    """
    engine: type[CudaEngine] = manifest.target.spec.load_engine_class()
    return engine(manifest, manifest.chips[rank], case_dir, device, **options)


class RemoteEngine:
    """One rank on one GPU in a separate process. See `CudaEngine`.

    Steps are written to a pipe without waiting. Their outputs stay in the process; their errors are
    raised by `collect`.

    Raises:
        LlmcError: an error in the process, or its end.
    """

    def __init__(self, case_dir: Path, rank: int, device: int, **options: Any) -> None:
        self._rank = rank
        self._tickets = 0
        self._pipe, server_end = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(server_end.fileno())],
            pass_fds=[server_end.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        server_end.close()
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
        """Send a step, with this rank's matrices of adapters. See `Engine`."""
        adapters = {slot: replace(adapter, matrices=[
            own if rank == self._rank else {} for rank, own in enumerate(adapter.matrices)])
            for slot, adapter in step.load_adapters.items()}
        self._send("submit", replace(step, load_adapters=adapters))
        self._tickets += 1
        return self._tickets - 1

    def collect(self, ticket: int) -> StepOutput:
        """Wait for the end of a step; its output is empty."""
        self._receive()
        return _NO_OUTPUT

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
    """Executes the requests of the pipe and responds in order.

    The reading thread submits steps as they arrive. Another thread collects them and responds, so
    that no step waits for the one before it.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._sending = pipe, Lock()
        self._engine: Any = None
        self._in_flight: SimpleQueue[tuple[int, str | None]] = SimpleQueue()

    def serve(self) -> None:
        """Run until the pipe is closed or the parent process has ended."""
        Thread(target=self._collect_steps, daemon=True).start()
        while True:
            try:
                method, arguments = self._pipe.recv()
            except (EOFError, OSError):
                return
            if method == "submit":
                problem, ticket = self._try(lambda own=arguments: self._engine.submit(*own))
                self._in_flight.put((ticket, problem))
            else:
                self._respond(*self._try(
                    lambda method=method, own=arguments: self._call(method, *own)))

    def _collect_steps(self) -> None:
        while True:
            ticket, problem = self._in_flight.get()
            if problem is None:
                problem, _ = self._try(lambda own=ticket: self._engine.collect(own))
            self._respond(problem, None)

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
        """Run `work`; returns its error, or None, and its result."""
        try:
            return None, work()
        except LlmcError as error:
            return str(error), None
        except Exception as error:
            return repr(error), None

    def _respond(self, problem: str | None, result: Any) -> None:
        with self._sending:
            self._pipe.send((problem, result))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank's process ends this one
    _Server(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # a step that waits for other ranks would never end
