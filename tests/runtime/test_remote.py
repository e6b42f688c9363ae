"""Ranks in separate processes, without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llmc
from llmc.runtime.core.step import Step
from llmc.runtime.engines.remote import RemoteEngine

STEP = Step.of([[1]], [0], [[0]], [0])


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine whose process has loaded nothing."""
    call = RemoteEngine._call
    monkeypatch.setattr(RemoteEngine, "_call", lambda self, method, *arguments: None)
    made = RemoteEngine(tmp_path, 1, 0, max_batch_size=1, max_tokens=128)
    monkeypatch.setattr(RemoteEngine, "_call", call)
    yield made
    made.close()
    assert made._process.poll() is not None


def test_load_errors_of_a_rank_reach_the_caller(tmp_path):
    with pytest.raises(llmc.LlmcError, match=r"rank 1: case directory .* does not exist"):
        RemoteEngine(tmp_path / "nothing", 1, 0, max_batch_size=1, max_tokens=128)


def test_the_end_of_a_rank_is_an_error_without_a_hang(engine):
    ticket = engine.submit(STEP)
    engine.abort()
    start = time.monotonic()
    with pytest.raises(llmc.LlmcError, match="rank 1"):
        engine.collect(ticket)
        engine.submit(STEP)
        engine.collect(ticket)
    assert time.monotonic() - start < 5


def test_errors_of_a_step_are_raised_on_collect(engine):
    """Submission does not wait; errors are raised in the order of steps."""
    tickets = [engine.submit(STEP) for _ in range(3)]
    for ticket in tickets:
        with pytest.raises(llmc.LlmcError, match="rank 1: AttributeError"):
            engine.collect(ticket)
    with pytest.raises(llmc.LlmcError, match="rank 1: AttributeError"):
        engine.measure()


def test_a_rank_ends_with_the_process_that_made_it():
    """For every way in which the process ends."""
    source = ("from pathlib import Path\n"
              "from llmc.runtime.engines.remote import RemoteEngine\n"
              "RemoteEngine._call = lambda self, method, *arguments: None\n"
              "engine = RemoteEngine(Path(), 1, 0)\n"
              "print(engine._process.pid, flush=True)\n"
              "import os\nos.kill(os.getpid(), 9)\n")
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    status = Path(f"/proc/{int(done.stdout)}")
    for _ in range(100):
        if not status.exists() or " Z" in (status / "stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the rank's process is still there")
