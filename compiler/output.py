"""Put a new directory in the place of an old one, whole or not at all.

What is written goes to a hidden folder beside the output, `.llmc-compile-XXXXXXXX`:

    lock    flocked by the process that writes, for as long as it lives
    new/    what is being written; after the exchange, what was there before
    old/    where the two cannot be exchanged: what was there before, under its name

At the end `new` and the output change places in one step (renameat2), so that who reads the output
finds the old one or the new one and never none. A file system that cannot do that gets two
renames, and the first is undone where the second fails.

A process that is killed leaves its folder behind. The kernel drops the lock with it, so the next
compile to the same parent takes the lock and clears the folder; that of a living process it cannot
take. Where the death came between the two renames, it first puts the old output back.
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
_WORK_NAME = re.compile(rf"{re.escape(_PREFIX)}[a-z0-9_]{{8}}")  # as tempfile makes them
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_output(output: str | Path) -> None:
    """Refuse what `new_directory` could not make or should not replace.

    An output that is there must be a case directory, with the files that its manifest lists and no
    others, or an empty folder. Of a symbolic link the target is meant; it must be there.

    Raises:
        LlmcError: one sentence.
    """
    target = _resolve(output)
    with _turn(target.parent):
        _check_replaceable(target, output)
    parent = next(folder for folder in target.parents if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise LlmcError(f"'{output}' cannot be written: '{parent}' takes no new folder "
                        f"({error.strerror}); choose another output") from error


@contextmanager
def new_directory(output: str | Path) -> Iterator[Path]:
    """An empty folder that takes the place of `output` when the block succeeds.

    When it fails, or is interrupted, nothing is left of it, nor of parents that were made for it.

    Raises:
        LlmcError: it cannot be written, or `check_output` refuses what is there by now.
    """
    target = _resolve(output)
    made: list[Path] = []
    try:
        _make_parents(target.parent, made)
        _clear_dead(target.parent)
        work, lock = _new_work(target.parent)
    except OSError as error:
        _remove_empty(made)
        raise _not_written(output, error) from error
    new, done = work / "new", False
    try:
        os.mkdir(new)
        yield new
        assert not _unlisted(new), f"the manifest does not list {_unlisted(new)}"
        _sync(new)
        with _turn(target.parent):
            _check_replaceable(target, output)
            _put(new, target, work)
        done = True
        _sync_folder(target.parent)
    except OSError as error:
        raise _not_written(output, error, work) from error
    finally:
        if os.path.lexists(target) or not (work / "old" / target.name).exists():
            _remove(work, lock)
        else:  # the only copy of the old output: `_rename_both` has said so
            os.close(lock)
        if not done:
            _remove_empty(made)


@contextmanager
def _turn(parent: Path) -> Iterator[None]:
    """One after the other, where several put something into a folder: between two renames there is
    nothing to be looked at. Where a folder cannot be locked, as it comes.
    """
    try:
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it is not there, or not readable: others will say so
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _resolve(output: str | Path) -> Path:
    """The absolute path that is meant, free of symbolic links."""
    try:
        target, here = Path(os.path.realpath(output)), Path.cwd()
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(target)
        for path in (Path(output), *Path(output).parents):
            if path.is_symlink() and not path.exists():
                raise LlmcError(f"'{path}' is a symbolic link to '{os.readlink(path)}', which is "
                                f"not there; make that folder, or remove the link")
    except (OSError, ValueError) as error:  # a name that is too long; a null byte
        reason = getattr(error, "strerror", None) or error
        raise LlmcError(f"output {str(output)!r} is no path that can be used ({reason}); choose "
                        f"another one") from error
    if target == here or target == target.parent:
        raise LlmcError(f"output '{output}' is the {'current' if target == here else 'root'} "
                        f"folder, which cannot be replaced; name a folder in it, such as "
                        f"'{Path(output, 'case')}'")
    return target


def _check_replaceable(target: Path, output: str | Path) -> None:
    """Refuse to replace what is not a case directory, or holds more than one."""
    try:
        if not os.path.lexists(target):
            _check_parents(target, output)
            return
        if not target.is_dir():
            raise LlmcError(f"'{output}' is there and is not a case directory but a file; choose "
                            f"another output")
        if os.path.ismount(target):
            raise LlmcError(f"'{output}' is where a file system is mounted, which cannot be "
                            f"replaced; name a folder in it, such as '{Path(output, 'case')}'")
        if not os.access(target, os.W_OK | os.X_OK):
            raise LlmcError(f"'{output}' is there and is write-protected; choose another output")
        if not os.listdir(target):
            return
        if not (target / MANIFEST_NAME).is_file():
            raise LlmcError(f"'{output}' is there and is not a case directory; choose another "
                            f"output")
        others = _unlisted(target)
    except OSError as error:
        raise LlmcError(f"'{output}' is there but cannot be read ({error.strerror}); choose "
                        f"another output") from error
    if others is None:
        raise LlmcError(f"'{output}' has a {MANIFEST_NAME} that lists no files, so what else is "
                        f"there may be yours; remove '{output}', or choose another output")
    if others:
        names = ", ".join(f"'{name}'" for name in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise LlmcError(f"'{output}' holds what llmc did not put there and would be lost: {names}"
                        f"{more}; move it elsewhere, or choose another output")


def _check_parents(target: Path, output: str | Path) -> None:
    for parent in target.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise LlmcError(f"'{output}' cannot be made: '{parent}' is not a folder; choose "
                                f"another output")
            return


def _unlisted(case_dir: Path) -> list[str] | None:
    """Files and empty folders, relative, that the manifest does not list; None if it is not one.

    It is read leniently: an older llmc's is as good, and one that no llmc loads.
    """
    try:
        entries = json.loads((case_dir / MANIFEST_NAME).read_bytes())["files"]
        listed = {str(PurePosixPath(entry["path"])) for entry in entries} | {MANIFEST_NAME}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    found = []
    for folder, folders, files in os.walk(case_dir, onerror=_raise):
        here = Path(folder).relative_to(case_dir)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        found += [(here / name).as_posix() for name in (*files, *links)]
        if not folders and not files:
            found.append(f"{here.as_posix()}/")
    return sorted(set(found) - listed)


def _raise(error: OSError) -> None:
    raise error


def _make_parents(parent: Path, made: list[Path]) -> None:
    """Make the folder and those above it; `made` gets each that was not there, top first."""
    for folder in (*reversed(parent.parents), parent):
        with suppress(FileExistsError):
            os.mkdir(folder)
            made.append(folder)


def _new_work(parent: Path) -> tuple[Path, int]:
    """A hidden folder in `parent`, and the descriptor of its lock, taken."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Until the lock is taken, who clears may take the folder for a dead one's.
        with suppress(FileNotFoundError):
            lock = _lock(work, wait=True)
            assert lock is not None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(work / "lock")):
                    return work, lock
            os.close(lock)


def _lock(work: Path, wait: bool) -> int | None:
    """Take the lock of a folder: a descriptor that holds it; None where another process does."""
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if not wait or error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        # A file system without locks: none can be taken there to clear the folder either.
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _clear_dead(parent: Path) -> None:
    """Remove what killed processes left in `parent`; what cannot be removed stays."""
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
    """Put back what was moved away by a process that could not put anything in its place."""
    if (work / "new").exists() and (work / "old").exists():
        for old in (work / "old").iterdir():
            if not os.path.lexists(work.parent / old.name):
                os.rename(old, work.parent / old.name)


def _remove(work: Path, lock: int) -> None:
    """Remove a folder whose lock is held, the lock's file last and before it is let go: whoever
    waits for it must not find it again.
    """
    try:
        for name in ("new", "old"):
            shutil.rmtree(work / name, ignore_errors=True)
        with suppress(OSError):
            os.unlink(work / "lock")
            os.rmdir(work)  # in which another may have made a lock of its own just now
    finally:
        os.close(lock)


def _remove_empty(made: list[Path]) -> None:
    for folder in reversed(made):
        with suppress(OSError):
            os.rmdir(folder)


def _put(new: Path, target: Path, work: Path) -> None:
    """Let `new` take the place of `target`, and what was there that of `new`, or go to `work/old`.

    Raises:
        OSError: it cannot; the target is what it was.
        LlmcError: nor can the old one be put back.
    """
    old = work / "old" / target.name
    while True:
        try:
            _exchange(new, target)
            return
        except FileNotFoundError:  # there is none yet
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
                raise  # else another compile made one just now, which is to be replaced too


def _rename_both(new: Path, target: Path, old: Path) -> None:
    """Rename `target`, if there is one, to `old`, if there is room, and `new` to `target`."""
    try:
        with suppress(FileNotFoundError):
            os.rename(target, old)
        os.rename(new, target)
    except BaseException as error:
        if old.exists() and not os.path.lexists(target):
            try:
                os.rename(old, target)
            except OSError as second:
                raise LlmcError(f"'{target}' could not be replaced ({error}), nor could what was "
                                f"there be put back ({second}); it is now '{old}': move it to "
                                f"'{target}'") from error
        raise


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change places in one step.

    Raises:
        OSError: they cannot; ENOSYS, EINVAL or EOPNOTSUPP where the system or the file system has
            no such step.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def _sync(directory: Path) -> None:
    """Have all bytes of a tree on the disk, before it takes the place of what is there."""
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system can, and the files are there
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _not_written(output: str | Path, error: OSError, work: Path | None = None) -> LlmcError:
    """What to tell of an error; of a file elsewhere, such as a model's, that it is that file."""
    reason, path = error.strerror or str(error), error.filename
    if work is not None and isinstance(path, str) and error.filename2 is None \
            and not Path(path).is_relative_to(work):
        return LlmcError(f"'{path}': {reason}; '{output}' was not changed")
    # Such as what lies in a lower layer of a container's image.
    way = "; remove it first, or choose another output" if error.errno == errno.EXDEV else ""
    return LlmcError(f"'{output}' cannot be written ({reason}); nothing was changed{way}")
