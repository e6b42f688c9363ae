"""Files of a case directory: regular ones, reached through no symbolic link.

A case directory may come from anyone. A link would have the runtime read a file outside of it, and
to open a FIFO or a device may block for ever.
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
    """Check that `path`, relative to the case directory, is a regular file and no link leads there.

    The case directory itself may be a symbolic link.

    Raises:
        LlmcError: it is missing or something else, or is in a directory that is a symbolic link.
    """
    parts = PurePosixPath(path).parts
    for end in range(1, len(parts) + 1):
        found = case_dir.joinpath(*parts[:end])
        try:
            mode = os.lstat(found).st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise LlmcError(f"'{case_dir / path}' is missing; compile the model again, or copy the "
                            f"case directory again") from None
        except (OSError, ValueError) as error:  # a name that no file system takes
            raise LlmcError(f"'{case_dir / path}' cannot be read ({error}); compile the model "
                            f"again, or copy the case directory again") from error
        if stat.S_ISLNK(mode):
            raise _symbolic_link(found)
    if not stat.S_ISREG(mode):
        raise _not_regular(case_dir / path, mode)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read. Never blocks.

    Raises:
        OSError: it cannot be opened.
        LlmcError: it is a symbolic link, a directory, a FIFO, a device or a socket.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise _symbolic_link(path)
    if not stat.S_ISREG(mode):  # to open a device may have effects
        raise _not_regular(path, mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LlmcError(f"'{path}' was replaced while it was opened; try again")
    return open(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read.
        LlmcError: it is not a regular file, or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise LlmcError(f"'{path}' has {size} bytes, the limit is {max_bytes}")
        return file.read(max_bytes)


def _symbolic_link(path: Path) -> LlmcError:
    return LlmcError(f"'{path}' is a symbolic link, where a case directory has regular files and "
                     f"directories; copy the case directory with 'cp -rL'")


def _not_regular(path: Path, mode: int) -> LlmcError:
    return LlmcError(f"'{path}' is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, expected a regular "
                     f"file; compile the model again, or copy the case directory again")
