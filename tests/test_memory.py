"""Out-of-memory conditions are user errors wherever they occur."""

import errno
import os
import subprocess
import sys

import pytest

import llmc
from llmc.memory import memory_errors


def test_too_little_address_space_is_one_sentence(case_tp1):
    mebibytes, arguments = 200, ["run", str(case_tp1), "--prompt", "a"]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -v {mebibytes * 1024}; exec "$@"', "-", sys.executable, "-m",
         "llmc.cli", *arguments], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                          "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert "Traceback" not in done.stderr and done.returncode in (1, 2), done.stderr[-2000:]
    assert "too little memory to" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("std::bad_alloc"), OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("can't start new thread"),
    ImportError("libx.so: failed to map segment from shared object")])
def test_every_library_s_words_are_known(error):
    with pytest.raises(llmc.LlmcError, match="too little memory to load the model.*ulimit -v"), \
            memory_errors("load the model"):
        raise error


@pytest.mark.parametrize("error", [llmc.LlmcError("bad_alloc"), llmc.CheckFailed("x"),
                                   ValueError("x"), OSError(errno.ENOSPC, "full")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, memory_errors("load the model"):
        raise error
    assert caught.value is error
