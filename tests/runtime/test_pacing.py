"""Pacing: steps are submitted late for sparse arrivals, and never too late."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmc.runtime.core.pacing import StepPacer

NO_DRAFTS = np.empty(0, np.int32)
FIRST = 6e-4  # seconds from the start of a submission to its first kernel


class Device:
    """A simulated device that runs steps in sequence on a simulated clock."""

    def __init__(self, seconds):
        self.now = self.end = self.paused = 0.0
        self.seconds, self.pace = seconds, StepPacer(lambda: self.now)

    def submit(self, batch, prompts, host=2e-4):
        self.now += host  # prepares it
        self.begun = self.now
        self.pace.submitting(SimpleNamespace(
            batch_size=batch, num_prefill_tokens=prompts, num_drafts=NO_DRAFTS, num_extra=NO_DRAFTS,
            propose=None))
        if self.end:
            self.paused += max(0, self.now + FIRST - self.end)
        self.end = max(self.end, self.now + FIRST) + self.seconds(batch, prompts)
        self.now += host * (2 + 8 * (prompts > 0))  # submits all of it
        return self.end

    def collect(self, end):
        self.pace.collecting()
        self.now = max(self.now, end) + 5e-5
        self.pace.collected()


def run(device, rng, steps, arrivals=True, hands_out=3e-4):
    """Return the lead of each submission before the end of the previous step."""
    early = []
    oldest = device.submit(1, 40)
    for _ in range(steps):
        if arrivals:
            device.pace.came()
        device.now += device.pace.left()
        assert device.pace.left() == pytest.approx(0, abs=1e-9)
        prompts = int(rng.integers(30, 500)) if rng.random() < 0.2 else 0
        latest = device.submit(int(rng.integers(8, 64)), prompts)
        early.append(oldest - device.begun)
        device.collect(oldest)
        device.now += hands_out
        oldest = latest
    device.collect(oldest)
    return np.array(early)


def line(rng, spread=0.01):
    return lambda batch, prompts: (4e-3 + 2e-5 * batch + 2e-3 * (prompts > 0) + 2e-5 * prompts) \
        * (1 + spread * rng.standard_normal())


def test_a_step_is_submitted_when_the_one_before_is_about_to_end():
    rng = np.random.default_rng(0)
    device = Device(line(rng))
    early = run(device, rng, 400)[100:]
    assert FIRST < np.median(early) < 2e-3
    assert device.paused < 3e-3 * device.now


def test_submission_is_not_delayed_without_arrivals_or_measurements():
    rng = np.random.default_rng(0)
    device = Device(line(rng))
    assert (run(device, rng, 200, arrivals=False) > 2e-3).all()
    device.submit(16, 0)
    device.pace.came()
    assert device.pace.left() > 0
    device.now += 20
    assert device.pace.left() == 0
    assert (run(Device(line(rng)), rng, 15) > 2e-3).all()


def test_a_host_that_takes_longer_than_the_device_never_waits():
    rng = np.random.default_rng(4)
    device = Device(line(rng))
    run(device, rng, 100)
    begun = device.now
    run(device, rng, 200, hands_out=2e-2)
    alone = Device(line(np.random.default_rng(4)))
    alone.pace.left = lambda: 0.0
    run(alone, np.random.default_rng(4), 100)
    without = alone.now
    run(alone, np.random.default_rng(4), 200, hands_out=2e-2)
    assert device.now - begun < 1.01 * (alone.now - without)


@pytest.mark.parametrize("seconds", [
    lambda rng: line(rng, 0.1),  # unpredictable
    lambda rng: lambda batch, prompts: line(rng)(batch, prompts) + (rng.random() < 0.02) * 0.2,
    lambda rng: lambda batch, prompts: line(rng)(16 * -(-batch // 16), prompts),  # padded
    lambda rng: lambda batch, prompts: 1e-4,  # shorter than the host's work
    lambda rng: lambda batch, prompts: 5e-3,
])
def test_pacing_is_short_for_irregular_devices(seconds):
    rng = np.random.default_rng(1)
    device, at_once = Device(seconds(rng)), Device(seconds(rng))
    run(device, rng, 1000)
    at_once.pace.left = lambda: 0.0
    run(at_once, rng, 1000)
    assert device.paused - at_once.paused < 0.02 * device.now


def test_pacing_adapts_to_shorter_steps():
    rng = np.random.default_rng(2)
    device = Device(line(rng))
    run(device, rng, 300)
    before = device.paused
    device.seconds = lambda batch, prompts: 0.5 * line(rng)(batch, prompts)
    run(device, rng, 64)
    after = device.paused
    run(device, rng, 300)
    assert after - before < 0.1 and device.paused - after < 0.08
