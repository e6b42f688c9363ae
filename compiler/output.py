"""Atomic replacement of an output directory.

Output is written to a hidden work folder next to the output, `.llmc-compile-XXXXXXXX`:

    lock    locked (flock) by the writing process until it exits
    new/    the new output while it is written; after the exchange, the old output
    old/    where an exchange is unsupported: the old output, under its name

At the end, renameat2 exchanges `new` and the output atomically: a concurrent reader finds the old
or the new output. On a file system without renameat2, two renames replace it, and the first is
undone if the second fails.

A killed process leaves its work folder, but the kernel releases its lock. The next compile to the
same parent takes the lock and removes the folder. If the process was killed between the two
renames, the old output is restored first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from llmc.artifacts.manifest import MANIFEST_NAME
from llmc.errors import LlmcError

_PREFIX = ".llmc-compile-"
_WORK_NAME = re.compile(rf"{re.escape(_PREFIX)}[a-z0-9_]{{8}}")  # tempfile's random suffix
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_output(output: str | Path, manifest: str = MANIFEST_NAME) -> None:
    """Check that `new_directory` can create or replace the output.

    An existing output must be an empty folder, or a case directory with only the files that its
    manifest lists. A symbolic link is followed; its target must exist.

    Args:
        manifest: name of the manifest; that of an adapter has another.

    Raises:
        LlmcError: it cannot be created, or must not be replaced.
    """
    target = _resolve(output)
    with _turn(target.parent):
        _check_replaceable(target, output, manifest)
    parent = next(folder for folder in target.parents if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise LlmcError(f"'{output}' cannot be written: no folder can be created in '{parent}' "
                        f"({error.strerror}); choose another output") from error


@contextmanager
def new_directory(output: str | Path, manifest: str = MANIFEST_NAME) -> Iterator[Path]:
    """Yield an empty folder that replaces `output` when the block succeeds.

    On an error or interrupt, the folder and the parents created for it are removed.

    Args:
        output: the directory to write.
        manifest: see `check_output`.

    Raises:
        LlmcError: it cannot be written, or `check_output` rejects the present output.
    """
    target = _resolve(output)
    new_parents: list[Path] = []
    try:
        _make_parents(target.parent, new_parents)
        _clear_dead(target.parent)
        work, lock = _new_work(target.parent)
    except OSError as error:
        _remove_empty(new_parents)
        raise _not_written(output, error) from error
    new, done = work / "new", False
    try:
        os.mkdir(new)
        yield new
        extra = _unlisted(new, manifest)
        assert not extra, f"the manifest does not list {extra}"
        _sync(new)
        with _turn(target.parent):
            _check_replaceable(target, output, manifest)
            _put(new, target, work)
        done = True
        _sync_folder(target.parent)
    except OSError as error:
        raise _not_written(output, error, work) from error
    finally:
        if os.path.lexists(target) or not (work / "old" / target.name).exists():
            _remove(work, lock)
        else:  # the only copy of the old output, which the error of `_rename_both` names
            os.close(lock)
        if not done:
            _remove_empty(new_parents)


@contextmanager
def _turn(parent: Path) -> Iterator[None]:
    """Serialize replacements in a folder, as the output is absent between two renames.

    Without effect on a folder that cannot be locked.
    """
    try:
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # absent or unreadable: reported by later checks
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _resolve(output: str | Path) -> Path:
    """Return the absolute path without symbolic links."""
    try:
        target, here = Path(os.path.realpath(output)), Path.cwd()
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(target)
        for path in (Path(output), *Path(output).parents):
            if path.is_symlink() and not path.exists():
                raise LlmcError(f"'{path}' is a symbolic link to '{os.readlink(path)}', which does "
                                f"not exist; create that folder, or remove the link")
    except (OSError, ValueError) as error:  # a name that is too long; a null byte
        reason = getattr(error, "strerror", None) or error
        raise LlmcError(f"output {str(output)!r} is not a valid path ({reason}); choose another "
                        f"output") from error
    if target == here or target == target.parent:
        raise LlmcError(f"output '{output}' is the {'current' if target == here else 'root'} "
                        f"folder, which cannot be replaced; name a folder in it, such as "
                        f"'{Path(output, 'case')}'")
    return target


def _check_replaceable(target: Path, output: str | Path, manifest: str) -> None:
    """Reject an existing output without this manifest, or that has other files."""
    other = "exists and is not a case directory" if manifest == MANIFEST_NAME \
        else "exists and is not the directory of an adapter"
    try:
        if not os.path.lexists(target):
            _check_parents(target, output)
            return
        if not target.is_dir():
            raise LlmcError(f"'{output}' exists and is a file, not a folder; choose "
                            f"another output")
        if os.path.ismount(target):
            raise LlmcError(f"'{output}' is a mount point, which cannot be replaced; name a "
                            f"folder in it, such as '{Path(output, 'case')}'")
        if not os.access(target, os.W_OK | os.X_OK):
            raise LlmcError(f"'{output}' exists and is write-protected; choose another output")
        if not os.listdir(target):
            return
        if not (target / manifest).is_file():
            raise LlmcError(f"'{output}' {other}; choose another output")
        others = _unlisted(target, manifest)
    except OSError as error:
        raise LlmcError(f"'{output}' exists but cannot be read ({error.strerror}); choose "
                        f"another output") from error
    if others is None:
        raise LlmcError(f"'{output}' has a {manifest} without a list of files, so llmc cannot "
                        f"tell its files from yours; remove '{output}', or choose another output")
    if others:
        names = ", ".join(f"'{name}'" for name in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise LlmcError(f"'{output}' contains files that llmc did not write and would delete: "
                        f"{names}{more}; move them elsewhere, or choose another output")


def _check_parents(target: Path, output: str | Path) -> None:
    for parent in target.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise LlmcError(f"'{output}' cannot be created: '{parent}' is not a folder; choose "
                                f"another output")
            return


def _unlisted(case_dir: Path, manifest: str) -> list[str] | None:
    """Return relative paths of files and empty folders that the manifest does not list.

    None if the manifest has no list of files. Manifests of any version are accepted.
    """
    try:
        entries = json.loads((case_dir / manifest).read_bytes())["files"]
        listed = {str(PurePosixPath(entry["path"])) for entry in entries} | {manifest}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    present = []
    for folder, folders, files in os.walk(case_dir, onerror=_raise):
        here = Path(folder).relative_to(case_dir)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        present += [(here / name).as_posix() for name in (*files, *links)]
        if not folders and not files:
            present.append(f"{here.as_posix()}/")
    return sorted(set(present) - listed)


def _raise(error: OSError) -> None:
    raise error


def _make_parents(parent: Path, created: list[Path]) -> None:
    """Create the folder and its parents; append new ones to `created`, top first."""
    for folder in (*reversed(parent.parents), parent):
        with suppress(FileExistsError):
            os.mkdir(folder)
            created.append(folder)


def _new_work(parent: Path) -> tuple[Path, int]:
    """Create a work folder in `parent`; return it and the descriptor of its lock, held."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Until the lock is held, another compile may take the folder for abandoned and remove it.
        with suppress(FileNotFoundError):
            lock = _lock(work, wait=True)
            assert lock is not None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(work / "lock")):
                    return work, lock
            os.close(lock)


def _lock(work: Path, wait: bool) -> int | None:
    """Lock a work folder; return the descriptor, or None if another process holds the lock."""
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if not wait or error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        # Without locks in the file system, no other process can lock and remove the folder either.
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _clear_dead(parent: Path) -> None:
    """Remove the work folders of killed processes in `parent`, as far as possible."""
    for name in os.listdir(parent):
        if not _WORK_NAME.fullmatch(name):
            continue
        work = parent / name
        with suppress(OSError):
            lock = _lock(work, wait=False)
            if lock is None:
                continue
            try:
                _restore(work)
            except OSError:
                os.close(lock)
                continue
            _remove(work, lock)


def _restore(work: Path) -> None:
    """Restore an old output that a killed process had moved away and not replaced."""
    if (work / "new").exists() and (work / "old").exists():
        for old in (work / "old").iterdir():
            if not os.path.lexists(work.parent / old.name):
                os.rename(old, work.parent / old.name)


def _remove(work: Path, lock: int) -> None:
    """Remove a locked work folder.

    The lock file is removed last, before the lock is released, so that a waiting process detects
    the removal.
    """
    try:
        for name in ("new", "old"):
            shutil.rmtree(work / name, ignore_errors=True)
        with suppress(OSError):
            os.unlink(work / "lock")
            os.rmdir(work)  # fails where another process has just created a lock file in it
    finally:
        os.close(lock)


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with suppress(OSError):
            os.rmdir(folder)


def _put(new: Path, target: Path, work: Path) -> None:
    """Replace `target` by `new`; the old output goes to `new` or `work/old`.

    Raises:
        OSError: it cannot be replaced; the target is unchanged.
        LlmcError: the old output could not be restored either.
    """
    old = work / "old" / target.name
    while True:
        try:
            _exchange(new, target)
            return
        except FileNotFoundError:  # no output yet
            pass
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            shutil.rmtree(old.parent, ignore_errors=True)
            old.parent.mkdir()
        try:
            _rename_both(new, target, old)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # otherwise another compile has just created the target: replace it too


def _rename_both(new: Path, target: Path, old: Path) -> None:
    """Rename `target`, if it exists, to `old`, and `new` to `target`."""
    try:
        with suppress(FileNotFoundError):
            os.rename(target, old)
        os.rename(new, target)
    except BaseException as error:
        if old.exists() and not os.path.lexists(target):
            try:
                os.rename(old, target)
            except OSError as second:
                raise LlmcError(f"'{target}' could not be replaced ({error}), and the old output "
                                f"could not be restored ({second}); it is now '{old}': move it to "
                                f"'{target}'") from error
        raise


def _exchange(one: Path, other: Path) -> None:
    """Exchange two paths atomically.

    Raises:
        OSError: the exchange failed; with ENOSYS, EINVAL or EOPNOTSUPP where the system or the
            file system does not support it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def _sync(directory: Path) -> None:
    """Flush all files and folders of a tree to disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # unsupported by some file systems; the files are flushed already
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _not_written(output: str | Path, error: OSError, work: Path | None = None) -> LlmcError:
    """Convert an OSError; a file outside the work folder, such as the model's, is named."""
    reason, path = error.strerror or str(error), error.filename
    if work is not None and isinstance(path, str) and error.filename2 is None \
            and not Path(path).is_relative_to(work):
        return LlmcError(f"'{path}': {reason}; '{output}' was not changed")
    # EXDEV: such as a folder in a lower layer of a container image.
    advice = "; remove it first, or choose another output" if error.errno == errno.EXDEV else ""
    return LlmcError(f"'{output}' cannot be written ({reason}); nothing was changed{advice}")
