"""Conversion of out-of-memory errors of any library to LlmcError."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from llmc.errors import LlmcError

_TEXTS = ("bad_alloc", "Failed to allocate memory", "can't allocate memory",
          "Cannot allocate memory", "Unable to allocate", "can't start new thread",
          "failed to map segment", "memory allocation of")


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
