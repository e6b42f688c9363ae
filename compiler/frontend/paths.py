"""Files that an input refers to: shards of an index, external data of an ONNX file."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from llmc.errors import LlmcError

_LFS = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Reject a Git LFS pointer, a placeholder for a large file in clones without git-lfs.

    Raises:
        LlmcError: the file is a pointer.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(_LFS))
    except OSError:  # reported by the reader of the file
        return
    if start == _LFS:
        raise LlmcError(f"'{path}' is a Git LFS pointer, not the file itself; run 'git lfs pull' "
                        f"in '{path.parent}', or download the file")


def named_file(source: Path, name: str) -> Path:
    """Resolve a file name in `source`, relative to the folder of `source`.

    A name never leads outside of that folder. A symbolic link in the folder may, as in the Hugging
    Face cache: it is trusted like the folder.

    Raises:
        LlmcError: the name is empty or absolute, contains `..` or a backslash, or the file is
            missing or a Git LFS pointer.
    """
    parts = PurePosixPath(name).parts
    problem = "is empty" if not parts \
        else "is an absolute path" if name.startswith("/") or PureWindowsPath(name).drive \
        else "leads outside of its folder" if ".." in parts \
        else "contains a backslash or a null byte" if "\\" in name or "\0" in name else None
    if problem is not None:
        raise LlmcError(f"'{source}' refers to the file {name!r}, which {problem}; it may only "
                        f"refer to files in '{source.parent}'")
    path = source.parent / name
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # a name that the file system rejects
        exists = False
    if not exists:
        raise LlmcError(f"'{source}' lists {name!r}, which is missing; copy or download it to "
                        f"'{source.parent}'")
    refuse_pointer(path)
    return path
