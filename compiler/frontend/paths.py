"""Files that an input names: an index its shards, an ONNX file its external data."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from llmc.errors import LlmcError

_LFS = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer, which a clone without git-lfs has in place of a large file.

    Raises:
        LlmcError: it is one.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(_LFS))
    except OSError:  # the reader of the file says so
        return
    if start == _LFS:
        raise LlmcError(f"'{path}' is a Git LFS pointer, not the file itself; run 'git lfs pull' "
                        f"in '{path.parent}', or download the file")


def named_file(source: Path, name: str) -> Path:
    """The file that `source` calls `name`, which is relative to the folder of `source`.

    A name never leads out of that folder. A symbolic link in it may: who made the folder made the
    link, as the Hugging Face cache does for every file.

    Raises:
        LlmcError: the name is empty, absolute, has `..` or a backslash in it, or no file is
            there, or a Git LFS pointer.
    """
    parts = PurePosixPath(name).parts
    problem = "is empty" if not parts \
        else "is an absolute path" if name.startswith("/") or PureWindowsPath(name).drive \
        else "leads out of its folder" if ".." in parts \
        else "has a character that no such name may have" if "\\" in name or "\0" in name else None
    if problem is not None:
        raise LlmcError(f"'{source}' names the file {name!r}, which {problem}; it may only name "
                        f"files in '{source.parent}'")
    path = source.parent / name
    try:
        found = path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        found = False
    if not found:
        raise LlmcError(f"'{source}' lists {name!r}, which is missing")
    refuse_pointer(path)
    return path
