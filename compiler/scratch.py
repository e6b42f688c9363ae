"""Temporary files with errors that name their folder."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.errors import LlmcError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Texts of errors without errno: tokenizers (Rust), and tempfile without a usable folder.
_FULL_TEXTS = (*(f"(os error {number})" for number in _FULL), "No usable temporary directory")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end of the block.

    Raises:
        LlmcError: the folder cannot be created, or the disk is full.
    """
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def temporary_files() -> Iterator[None]:
    """Convert a full disk's errors to `LlmcError` in a block that writes temporary files.

    Raises:
        LlmcError: the disk is full or read-only.
    """
    try:
        yield
    except Exception as error:  # libraries wrap the OSError
        if not _is_full(error):
            raise
        where = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise LlmcError(f"temporary files cannot be written to '{where}' "
                        f"({getattr(error, 'strerror', None) or error}); free some space there, "
                        f"or set TMPDIR to another folder") from error


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) \
                or any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__
    return False
