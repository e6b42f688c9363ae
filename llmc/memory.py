"""Too little memory, in whatever way a library says so, as a user's error."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from llmc.errors import LlmcError

_TEXTS = ("bad_alloc", "Failed to allocate memory", "can't allocate memory",
          "Cannot allocate memory", "Unable to allocate", "can't start new thread",
          "failed to map segment", "memory allocation of")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, NumPy, torch, ONNX Runtime or the loader says so."""
    return isinstance(error, MemoryError) \
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM) \
        or any(text in str(error) for text in _TEXTS)


@contextmanager
def memory_errors(work: str) -> Iterator[None]:
    """A block, or a function, that raises LlmcError where there is too little memory for `work`."""
    try:
        yield
    except LlmcError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise LlmcError(f"there is too little memory to {work}{f' ({reason})' if reason else ''}; "
                        f"free some, or raise the limit of this process (ulimit -v, cgroup)") \
            from error
