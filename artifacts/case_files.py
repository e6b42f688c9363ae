"""Files of a case directory: regular files that no symbolic link leads to.

A case directory is untrusted. Through a link the runtime would read a file outside it, and opening
a FIFO or a device may block forever.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path, PurePosixPath

from llmc.errors import LlmcError

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a device",
          stat.S_IFCHR: "a device", stat.S_IFDIR: "a directory"}


def check_case_file(case_dir: Path, path: str) -> None:
    """Check that `path` is a regular file that no symbolic link leads to.

    Args:
        case_dir: it may itself be a symbolic link.
        path: relative to the case directory.

    Raises:
        LlmcError: the path is missing, not a regular file, or below a symbolic link.
    """
    parts = PurePosixPath(path).parts
    for end in range(1, len(parts) + 1):
        component = case_dir.joinpath(*parts[:end])
        try:
            mode = os.lstat(component).st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise LlmcError(f"'{case_dir / path}' is missing; compile the model again, or copy the "
                            f"case directory again") from None
        except (OSError, ValueError) as error:  # ValueError: not a valid file name
            raise LlmcError(f"'{case_dir / path}' cannot be read ({error}); compile the model "
                            f"again, or copy the case directory again") from error
        if stat.S_ISLNK(mode):
            raise _symbolic_link(component)
    if not stat.S_ISREG(mode):
        raise _not_regular(case_dir / path, mode)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without ever blocking.

    Raises:
        OSError: the file cannot be opened.
        LlmcError: the path is a symbolic link, a directory, a FIFO, a device or a socket.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise _symbolic_link(path)
    if not stat.S_ISREG(mode):  # opening a device may have side effects
        raise _not_regular(path, mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LlmcError(f"'{path}' was replaced while it was opened; try again")
    return open(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: the file cannot be read.
        LlmcError: the path is not a regular file, or the file is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise LlmcError(f"'{path}' has {size} bytes, expected at most {max_bytes}; compile the "
                            f"model again, or copy the case directory again")
        return file.read(max_bytes)


def _symbolic_link(path: Path) -> LlmcError:
    return LlmcError(f"'{path}' is a symbolic link, expected a regular file or directory; copy the "
                     f"case directory with 'cp -rL'")


def _not_regular(path: Path, mode: int) -> LlmcError:
    kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
    return LlmcError(f"'{path}' is {kind}, expected a regular file; compile the model again, or "
                     f"copy the case directory again")
