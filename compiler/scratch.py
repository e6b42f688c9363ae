"""Temporary files, whose errors say where they were to be."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.errors import LlmcError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# As tokenizers, which is Rust, and tempfile, which finds no folder at all, say it.
_SAID = (*(f"(os error {number})" for number in _FULL), "No usable temporary directory")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end of the block.

    Raises:
        LlmcError: it cannot be made, or is full.
    """
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def temporary_files() -> Iterator[None]:
    """Errors of a full disk, in a block that writes temporary files, as errors for users.

    Raises:
        LlmcError: the disk is full or read-only.
    """
    try:
        yield
    except Exception as error:  # other libraries wrap the system's error
        if not _is_full(error):
            raise
        where = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise LlmcError(f"temporary files cannot be written to '{where}' "
                        f"({getattr(error, 'strerror', None) or error}); free some space there, "
                        f"or set TMPDIR to another folder") from error


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) \
                or any(text in str(error) for text in _SAID):
            return True
        error = error.__cause__
    return False
