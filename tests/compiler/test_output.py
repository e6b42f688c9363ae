"""Case directories are written atomically, and users' files are never deleted.
"""

import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import llmc
from llmc.compiler import output as output_module
from llmc.compiler.output import check_output, new_directory

# Writes a case directory as a compile does, repeatedly until killed.
WRITE = """
import json, signal, sys, time
from llmc.compiler.output import new_directory
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
with new_directory(sys.argv[1]) as directory:
    (directory / "weights").write_bytes(b"x" * 4096)
    print("writing", flush=True)
    if sys.argv[2] == "hang":
        time.sleep(60)
    (directory / "model_info.json").write_text(json.dumps({"files": [{"path": "weights"}]}))
"""


def write_case(directory, text="old", files=("weights",)):
    """Write the files of a case directory."""
    Path(directory).mkdir(exist_ok=True)
    for name in files:
        Path(directory, name).parent.mkdir(exist_ok=True, parents=True)
        Path(directory, name).write_text(text)
    Path(directory, "model_info.json").write_text(
        json.dumps({"files": [{"path": name} for name in files]}))
    return Path(directory)


def replace(output, text="new"):
    with new_directory(output) as directory:
        write_case(directory, text)


def read(case):
    return (case / "weights").read_text()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Replacement of a directory by exchange, and without support for exchange."""
    if request.param == "two renames":
        def exchange(one, other):
            os.stat(other)  # the kernel checks first whether both exist
            raise OSError(errno.EINVAL, "Invalid argument")
        monkeypatch.setattr(output_module, "_exchange", exchange)
    return request.param


def start_writer(output, *arguments):
    process = subprocess.Popen([sys.executable, "-c", WRITE, output, *arguments],
                               stdout=subprocess.PIPE, cwd=Path(llmc.__file__).parents[1])
    assert process.stdout.readline() == b"writing\n"
    return process


def test_a_killed_process_leaves_the_old_directory_and_the_next_one_clears_up(tmp_path):
    case = write_case(tmp_path / "case")
    for _ in range(3):
        process = start_writer(case, "hang")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert read(case) == "old" and len(names(tmp_path)) == 2  # the old directory is gone
    replace(tmp_path / "another")
    assert names(tmp_path) == ["another", "case"]


def test_the_output_of_a_running_process_is_not_removed(tmp_path):
    case = tmp_path / "case"
    process = start_writer(case, "hang")
    try:
        theirs, = names(tmp_path)
        replace(case)
        assert names(tmp_path) == [theirs, "case"]
        assert (tmp_path / theirs / "new" / "weights").is_file()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_interrupt_leaves_nothing_but_the_old_directory(tmp_path):
    case = write_case(tmp_path / "case")
    process = start_writer(case, "hang")
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    process.stdout.close()
    assert names(tmp_path) == ["case"] and read(case) == "old"


def test_the_next_compile_cleans_up_an_interrupt_before_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(output_module, "_lock", lambda work, wait: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace(tmp_path / "case")
    monkeypatch.undo()
    replace(tmp_path / "case")
    assert names(tmp_path) == ["case"]


def test_folders_with_similar_names_are_kept(tmp_path):
    for name in (".case.backup", ".llmc-compile-", ".llmc-compile-notes", ".llmc-compile-ABCDEFGH"):
        write_case(tmp_path / name)
    before = names(tmp_path)
    replace(tmp_path / "case")
    assert names(tmp_path) == sorted([*before, "case"])


def test_a_temporary_folder_removed_as_stale_is_recreated(tmp_path, monkeypatch):
    real, calls = output_module._lock, []

    def lock(work, wait):
        calls.append(work)
        if len(calls) == 1:
            os.rmdir(work)  # another process cleans up between the folder and its lock
        return real(work, wait)

    monkeypatch.setattr(output_module, "_lock", lock)
    replace(tmp_path / "case")
    assert len(calls) == 2 and read(tmp_path / "case") == "new"


def test_a_full_disk_leaves_no_new_files(tmp_path):
    case = write_case(tmp_path / "case")
    for output in (case, tmp_path / "deep" / "deeper" / "case"):
        with pytest.raises(llmc.LlmcError, match=r"No space left.*\); nothing was changed"), \
                new_directory(output) as directory:
            (directory / "weights").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        assert names(tmp_path) == ["case"] and read(case) == "old"


def test_an_error_of_a_file_elsewhere_names_that_file(tmp_path):
    with pytest.raises(llmc.LlmcError, match=r"'.*model\.gguf': No such file.*was not changed"), \
            new_directory(tmp_path / "case"):
        (tmp_path / "model.gguf").read_bytes()


def test_a_directory_is_replaced_atomically(way, tmp_path):
    case = write_case(tmp_path / "case", files=("weights", "chip0/a", "chip0/deep/b"))
    check_output(case)
    replace(case)
    assert names(case) == ["model_info.json", "weights"] and read(case) == "new"
    assert names(tmp_path) == ["case"]


def test_the_permissions_of_a_new_directory_are_the_user_s(tmp_path):
    old = os.umask(0o027)
    try:
        replace(tmp_path / "case")
    finally:
        os.umask(old)
    assert (tmp_path / "case").stat().st_mode & 0o777 == 0o750


def test_a_failed_second_rename_undoes_the_first(tmp_path, monkeypatch):
    case = write_case(tmp_path / "case")
    monkeypatch.setattr(output_module, "_exchange", lambda *paths: fail(errno.EINVAL))
    fail_renames(monkeypatch, lambda source, target: source.name == "new")
    with pytest.raises(llmc.LlmcError, match="Input/output error.*nothing was changed"):
        replace(case)
    assert read(case) == "old" and names(tmp_path) == ["case"]


def test_a_directory_that_cannot_be_restored_is_kept_and_named(tmp_path, monkeypatch):
    case = write_case(tmp_path / "case")
    monkeypatch.setattr(output_module, "_exchange", lambda *paths: fail(errno.EINVAL))
    fail_renames(monkeypatch, lambda source, target: target == case)
    with pytest.raises(llmc.LlmcError, match="the old output could not be restored") as caught:
        replace(case)
    kept, = tmp_path.glob(".llmc-compile-*/old/case")
    assert f"it is now '{kept}'" in str(caught.value) and read(kept) == "old"
    monkeypatch.undo()
    replace(tmp_path / "another")
    assert read(case) == "old" and names(tmp_path) == ["another", "case"]


def fail(code):
    raise OSError(code, os.strerror(code))


def fail_renames(monkeypatch, chosen):
    rename = os.rename

    def failing(source, target):
        if chosen(Path(source), Path(target)):
            fail(errno.EIO)
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)


def test_a_failed_exchange_keeps_the_old_directory(tmp_path, monkeypatch):
    case = write_case(tmp_path / "case")
    monkeypatch.setattr(output_module, "_exchange", lambda *paths: fail(errno.EXDEV))
    with pytest.raises(llmc.LlmcError, match="cross-device link.*nothing was changed; remove it"):
        replace(case)
    assert read(case) == "old" and names(tmp_path) == ["case"]


def test_a_concurrent_reader_always_finds_the_directory(tmp_path):
    case = write_case(tmp_path / "case", "0")
    seen, missed, stop = set(), [], threading.Event()

    def look():
        while not stop.is_set():
            try:
                seen.add((case / "weights").read_text())
            except OSError as error:
                missed.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for number in itertools.count(1):
        replace(case, str(number))
        if number >= 15 and len(seen) > 3:
            break
    stop.set()
    reader.join()
    assert not missed


def test_two_compiles_to_one_output_both_succeed_and_the_last_wins(way, tmp_path):
    case = tmp_path / "case"
    with new_directory(case) as one:
        write_case(one, "one")
        with new_directory(case) as two:
            write_case(two, "two")
        assert read(case) == "two"
    assert read(case) == "one" and names(tmp_path) == ["case"]


def test_many_concurrent_compiles_to_one_output_succeed(way, tmp_path):
    case, errors = tmp_path / "case", []

    def write(text):
        for _ in range(5):
            try:
                replace(case, text)
            except llmc.LlmcError as error:
                errors.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not errors and read(case) in set("abcd") and names(tmp_path) == ["case"]


def test_the_target_of_a_symbolic_link_is_replaced(way, tmp_path):
    (tmp_path / "disk").mkdir()
    case = write_case(tmp_path / "disk" / "v1")
    link = tmp_path / "case"
    link.symlink_to("disk/v1")
    check_output(link)
    replace(link)
    assert link.is_symlink() and os.readlink(link) == "disk/v1" and read(case) == "new"
    assert names(tmp_path) == ["case", "disk"] and names(tmp_path / "disk") == ["v1"]


@pytest.mark.parametrize("output", ["link", "link/case", "loop"])
def test_a_dangling_link_is_refused(output, tmp_path):
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(llmc.LlmcError, match=r"is a symbolic link to '\w+', which does not exist"):
        check_output(tmp_path / output)
    assert names(tmp_path) == ["link", "loop"]


@pytest.mark.parametrize("theirs", ["notes.txt", "chip0/notes.txt", "mine/"])
def test_a_user_s_own_file_in_a_case_directory_is_refused_by_name(theirs, tmp_path):
    case = write_case(tmp_path / "case", files=("weights", "chip0/a"))
    check_output(case)
    (case / theirs).mkdir() if theirs.endswith("/") else (case / theirs).write_text("mine")
    with pytest.raises(llmc.LlmcError, match=f"would delete: '{theirs}'; move them elsewhere"):
        check_output(case)
    with pytest.raises(llmc.LlmcError, match="would delete"):  # created during a compile
        replace(case)
    assert (case / theirs).exists() and read(case) == "old" and names(tmp_path) == ["case"]


def test_an_error_about_many_files_names_the_first_ones(tmp_path):
    case = write_case(tmp_path / "case")
    for name in "abcde":
        (case / name).symlink_to(tmp_path)
    with pytest.raises(llmc.LlmcError, match="delete: 'a', 'b', 'c' and 2 more; move them"):
        check_output(case)


@pytest.mark.parametrize("manifest", ["{", "[]", '{"files": 3}', '{"files": [{"size": 1}]}'])
def test_a_directory_whose_manifest_lists_nothing_is_refused(manifest, tmp_path):
    case = write_case(tmp_path / "case")
    (case / "model_info.json").write_text(manifest)
    with pytest.raises(llmc.LlmcError, match=r"without a list of files, so .* from yours; remove"):
        check_output(case)


def test_an_output_that_is_not_a_case_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for output, message in [
            ("file", "exists and is a file, not a folder"),
            ("folder", "exists and is not a case directory; choose"),
            ("file/case", "'.*file' is not a folder"),
            ("file/deep/case", "'.*file' is not a folder"),
            (".", "is the current folder.*name a folder in it, such as 'case'"),
            ("folder/..", "is the current folder"),
            ("/", "is the root folder"),
            ("/proc", "is a mount point"),
            ("/proc/llmc/case", "no folder can be created in '/proc'"),
            ("n" * 300, "File name too long"),
            ("a\0b", "is not a valid path"),
            (tmp_path.parent, "is not a case directory")]:
        with pytest.raises(llmc.LlmcError, match=message) as caught:
            check_output(output)
        assert "\n" not in str(caught.value)
        with pytest.raises(llmc.LlmcError, match=message):  # before the model is located
            llmc.compile("nowhere", output)
    assert names(tmp_path) == ["file", "folder"] and names(tmp_path / "folder") == ["notes"]


def test_an_unwritable_parent_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(output_module.tempfile, "mkdtemp", lambda **given: fail(errno.EROFS))
    with pytest.raises(llmc.LlmcError, match=r"can be created in .* \(Read-only file system\)"):
        check_output(tmp_path / "deep" / "case")


def test_a_write_protected_directory_is_refused(tmp_path, monkeypatch):
    case = write_case(tmp_path / "case")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # chmod does not stop root
    with pytest.raises(llmc.LlmcError, match="exists and is write-protected"):
        check_output(case)


def test_a_check_leaves_no_trace(tmp_path):
    check_output(tmp_path / "deep" / "case")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
    assert names(tmp_path) == ["empty"]
    replace(tmp_path / "empty")
    replace(tmp_path / "deep" / "case")
    assert names(tmp_path) == ["deep", "empty"]


def test_a_file_system_without_locks_is_supported_without_cleanup(tmp_path, monkeypatch):
    (tmp_path / ".llmc-compile-abcdefgh").mkdir()
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, kind: fail(errno.ENOLCK))
    replace(tmp_path / "case")
    assert names(tmp_path) == [".llmc-compile-abcdefgh", "case"]


def test_a_directory_moved_by_a_dead_process_is_restored(tmp_path):
    work = tmp_path / ".llmc-compile-abcdefgh"
    (work / "old").mkdir(parents=True)
    write_case(work / "old" / "case")
    write_case(work / "new", "half")
    replace(tmp_path / "another")
    assert names(tmp_path) == ["another", "case"] and read(tmp_path / "case") == "old"
