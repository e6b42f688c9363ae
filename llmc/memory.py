"""Available memory, and conversion of out-of-memory errors of any library to LlmcError."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.errors import LlmcError

_TEXTS = ("bad_alloc", "Failed to allocate memory", "can't allocate memory",
          "Cannot allocate memory", "Unable to allocate", "can't start new thread",
          "failed to map segment", "memory allocation of")


def memory_of_machine(name: str) -> int:
    """A value of /proc/meminfo in bytes; the installed memory if it is absent."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    """Bytes of memory that processes may take without swapping."""
    return memory_of_machine("MemAvailable")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, NumPy, torch, ONNX Runtime or the loader is out-of-memory."""
    return isinstance(error, MemoryError) \
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM) \
        or any(text in str(error) for text in _TEXTS)


@contextmanager
def memory_errors(work: str) -> Iterator[None]:
    """Context or decorator that raises LlmcError if `work` runs out of memory."""
    try:
        yield
    except LlmcError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise LlmcError(f"too little memory to {work}{f' ({reason})' if reason else ''}; free "
                        f"memory, or raise the limit of this process (ulimit -v, cgroup)") \
            from error
