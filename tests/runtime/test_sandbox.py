"""Jobs in child processes: results, limits and cleanup."""

import os
import signal
import threading
import time

import pytest
from sandbox_jobs import allocate, double, fail, overflow, spin
from server_process import until

from llmc.errors import LlmcError
from llmc.runtime.sandbox import JobLimits, Lane, Sandbox

SMALL = JobLimits(cpu_seconds=0.3, memory_mib=64, stack_kib=512)


@pytest.fixture(scope="module")
def sandbox():
    own = Sandbox()
    yield own
    own.close()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(own) for own in file.read().split()]


def test_a_job_returns_its_value_or_its_error(sandbox):
    lane = Lane(SMALL)
    assert sandbox.run(lane, double, "é" * 100_000) == ["é" * 100_000] * 2
    with pytest.raises(LlmcError, match="^a reason, on two lines$"):
        sandbox.run(lane, fail)
    with pytest.raises(LlmcError, match="values that are not JSON"):
        sandbox.run(lane, double, threading.Lock())


@pytest.mark.parametrize(("job", "said"), [
    (spin, "more than 0.3 s of CPU time"), (allocate, "more than 64 MiB of memory"),
    (overflow, "nests too deeply"), (os.abort, "nests too deeply")])
def test_a_job_over_a_limit_ends_alone(sandbox, job, said):
    lane = Lane(SMALL, reuse=True)
    with pytest.raises(LlmcError, match=said):
        sandbox.run(lane, job)
    assert sandbox.run(lane, double, 1) == [1, 1]


def test_only_a_reused_worker_does_two_jobs(sandbox):
    once, often = Lane(SMALL), Lane(SMALL, reuse=True)
    assert len({sandbox.run(once, os.getpid) for _ in range(3)}) == 3
    assert len({sandbox.run(often, os.getpid) for _ in range(3)}) == 1


def test_a_busy_lane_does_not_delay_another(sandbox):
    busy, free = Lane(JobLimits(cpu_seconds=1, memory_mib=64)), Lane(SMALL)
    failed = []

    def spinning():
        with pytest.raises(LlmcError):
            sandbox.run(busy, spin)
        failed.append(time.monotonic())

    thread = threading.Thread(target=spinning)
    thread.start()
    done = [sandbox.run(free, double, 1) and time.monotonic() for _ in range(5)]
    thread.join()
    assert max(done) < failed[0]


def test_a_fork_server_that_ended_is_started_again():
    own, lane = Sandbox(), Lane(SMALL)
    before = own.run(lane, os.getppid)
    os.kill(before, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{before}") or own._process.poll() is not None)
    after = own.run(lane, os.getppid)
    assert after != before
    own.close()
    assert not os.path.exists(f"/proc/{after}")


def test_an_unreferenced_sandbox_leaves_no_processes():
    own, lane = Sandbox(), Lane(SMALL, reuse=True)
    server = own.run(lane, os.getppid)
    worker, = children(server)
    del own, lane
    until(lambda: not os.path.exists(f"/proc/{server}") and not os.path.exists(f"/proc/{worker}"))
