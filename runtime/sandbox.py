"""Jobs on untrusted input, in child processes with limits on CPU time, memory and stack.

Requests and case directories contain programs: chat templates, grammars, regular expressions of
tokenizers. Such a program may not end, may allocate without bound, or may overflow the stack of the
native library that reads it, which ends the process. It therefore runs here first.

    caller ── pickled job ──▶ worker (forked for one lane) ──▶ JSON result, or end of file
                                ▲ fork
    caller ── socket, limits ─▶ fork server (single-threaded, holds the imports)

The fork server forks a worker in about 2 ms. A worker that exceeds a limit is killed by the
kernel. Its caller then gets an `LlmcError`; other callers are not affected.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from llmc.errors import LlmcError

_MIB = 2**20
_NICENESS = 10  # below engines on the same cores
_PREPARATION_SECONDS = 60  # of the fork server, once per lane
_WALL = 10  # wall time limit: 10 times the CPU time plus a minute, for workers without a core


@dataclass(frozen=True)
class JobLimits:
    """Limits of one job.

    Args:
        cpu_seconds: user and system time.
        memory_mib: address space in addition to the fork server's.
        stack_kib: native stack.
    """

    cpu_seconds: float
    memory_mib: int
    stack_kib: int = 8192


@dataclass(eq=False)
class Lane:
    """A kind of jobs: their limits and concurrency.

    Args:
        workers: maximum number of concurrent worker processes; further callers wait.
        reuse: keep a worker for the next job; for jobs that free their memory.
        prepare: a picklable callable that the fork server runs once, before it forks.
    """

    limits: JobLimits
    workers: int = 1
    reuse: bool = False
    prepare: Callable[[], object] | None = None
    idle: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = threading.BoundedSemaphore(self.workers)


class Sandbox:
    """The fork server and its workers, for any thread. It starts with the first job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., Sandbox] = weakref.finalize(self, _nothing)

    def run(self, lane: Lane, job: Callable[..., Any], *args: object) -> Any:
        """Run a job in a worker of a lane.

        Args:
            job: a picklable callable whose result is JSON.

        Returns:
            The job's result, converted by JSON.

        Raises:
            LlmcError: the error that the job raised, or the exceeded limit, as a part of a message.
        """
        try:
            payload = pickle.dumps((job, args))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise LlmcError(f"it has values that are not JSON: {error}") from error
        with lane.gate:
            try:
                worker = lane.idle.pop()
            except IndexError:
                worker = self._fork(lane, job)
            result = json.loads(_exchange(worker, payload, _wall_seconds(lane.limits)))
            if lane.reuse and "signal" not in result:
                lane.idle.append(worker)
            else:
                worker.close()
        if "signal" in result:
            raise LlmcError(_exceeded(lane.limits, result["signal"]))
        if "error" in result:
            raise LlmcError(str(result["error"]))
        return result["value"]

    def start(self) -> None:
        """Start the fork server before the first job."""
        with self._lock:
            self._connect()

    def close(self) -> None:
        """End the fork server. Workers end after their jobs."""
        self._finalizer()

    def _fork(self, lane: Lane, job: Callable[..., Any]) -> Connection:
        parent_end, child_end = socket.socketpair()
        message = pickle.dumps((lane.limits, lane.prepare, job))
        with self._lock, child_end:
            for attempt in (1, 2):  # restart a fork server that a preparation ended
                try:
                    socket.send_fds(self._connect(), [message], [child_end.fileno()])
                    break
                except OSError as error:
                    self._finalizer()
                    if attempt == 2:
                        parent_end.close()
                        raise LlmcError(f"no child process can be started ({error})") from error
        return Connection(parent_end.detach())

    def _connect(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._finalizer()
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(child_end.fileno())],
                pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                                  "TOKENIZERS_PARALLELISM": "false"})
        self._control = parent_end
        self._finalizer = weakref.finalize(self, _end, self._process, parent_end)
        return parent_end


def _nothing() -> None:
    pass


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _exchange(worker: Connection, payload: bytes, seconds: float) -> bytes:
    """The response to a job: its result, or the signal that ended its worker."""
    try:
        worker.send_bytes(payload)
        return worker.recv_bytes() if worker.poll(seconds) else _ended(signal.SIGALRM)
    except (EOFError, OSError):
        return _ended(signal.SIGKILL)


def _ended(number: int) -> bytes:
    return json.dumps({"signal": number}).encode()


def _exceeded(limits: JobLimits, number: int) -> str:
    if number in (signal.SIGPROF, signal.SIGALRM):
        return f"it takes more than {limits.cpu_seconds:g} s of CPU time"
    return f"it takes more than {limits.memory_mib} MiB of memory, or nests too deeply"


def _wall_seconds(limits: JobLimits) -> float:
    return _WALL * limits.cpu_seconds + 60


# Run in child processes.

def _serve_forks(control: socket.socket) -> None:
    """Fork a worker for each socket that arrives, until the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the parent handles it
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # for SIGCHLD
    os.nice(_NICENESS)
    workers: dict[int, Connection] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(workers)
        if control.fileno() not in ready:
            continue
        message, sockets, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        limits, prepare, _ = pickle.loads(message)  # imports the job's module, once
        if prepare is not None:
            _prepare(prepare)
        caller = Connection(sockets[0])
        worker = os.fork()
        if worker == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for own in workers.values():
                own.close()
            os.close(woken)
            os.close(wake)
            _work(caller, limits)
            os._exit(0)
        workers[worker] = caller


def _reap(workers: dict[int, Connection]) -> None:
    """Notify the callers of workers that a signal ended."""
    while workers:
        worker, status = os.waitpid(-1, os.WNOHANG)
        if not worker:
            return
        caller = workers.pop(worker)
        if os.WIFSIGNALED(status):
            with suppress(OSError):  # the caller has ended
                caller.send_bytes(_ended(os.WTERMSIG(status)))
        caller.close()


def _prepare(prepare: Callable[[], object]) -> None:
    signal.alarm(_PREPARATION_SECONDS)  # SIGALRM ends this process
    try:
        prepare()
    except Exception:
        pass  # the job raises it again
    finally:
        signal.alarm(0)


def _work(caller: Connection, limits: JobLimits) -> None:
    """Execute jobs one after the other."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # silences native libraries that abort
        os.dup2(quiet, stream)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, limits.stack_kib * 1024)
    _limit(resource.RLIMIT_AS, _address_space() + limits.memory_mib * _MIB)
    while True:
        try:
            job, args = pickle.loads(caller.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)  # SIGPROF ends the process
        signal.setitimer(signal.ITIMER_REAL, _wall_seconds(limits) - 30)
        try:
            result = {"value": job(*args)}
        except MemoryError:
            return  # as if the native allocator had aborted
        except BaseException as error:  # a panic of pyo3 is not an Exception
            result = {"error": " ".join(str(error).split()) or type(error).__name__}
        caller.send_bytes(json.dumps(result).encode())
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
