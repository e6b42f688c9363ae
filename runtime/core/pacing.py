"""When the next step is submitted: late enough that who comes while one runs is in the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from llmc.runtime.core.step import Step
from llmc.runtime.core.step_times import StepTimes

_KEPT, _FEWEST = 64, 16  # steps that are learned from; fewer than that say nothing
_RECENT = 10.0  # seconds for which somebody who came lets others be expected
_BELOW = 0.05  # of steps may be shorter than is believed, and as many take longer to submit
_ROUNDS, _FORGETS = 4, 0.97
_FIRST = 1e-3  # seconds from where a submission begins to its first kernel, and more
_THERE = 3e-4  # seconds that it takes at most to collect a step that has ended before


class StepPacer:
    """Learns how long steps take, and how long the host takes to make one.

    A device that has a step to go on with is never idle, but a request that comes while the first
    of two runs has to wait for both. So where requests come one by one, the second is submitted
    when the first is about to end: by a line, fitted to the last steps, of their sequences, whether
    they read prompts, and how many tokens of these. What is shorter than it should have been costs
    the device a pause; so the line lies below nineteen of twenty steps, and the device has the next
    step at once where one had ended before it was asked for.

    Args:
        clock: seconds.

    Attributes:
        step_times: of decode steps, by their rows.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.step_times = StepTimes()
        self._under_way: deque[tuple[tuple[float, ...], float]] = deque()  # with when it may begin
        self._steps: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_KEPT)  # with seconds
        self._late: deque[float] = deque([1e-3], maxlen=_KEPT)  # submissions, after they were due
        self._ended = self._came = -np.inf
        self._asked, self._behind = 0.0, False
        self._due: float | None = None  # when the next one is to be submitted, if that can wait

    def came(self) -> None:
        """A request has come."""
        if self._under_way:
            self._came = self._clock()

    def submitting(self, step: Step) -> None:
        """A step is made, and submitted now: the device begins while the host still tells it more.
        """
        now = self._clock()
        if self._due is not None:
            self._late.append(now - self._due)
        prompts = step.num_ctx_tokens
        self._under_way.append(((1, step.batch_size, prompts > 0, prompts), now + _FIRST))
        self._due = None

    def collecting(self) -> None:
        """The oldest step is asked for."""
        self._asked = self._clock()

    def collected(self) -> None:
        """It has ended."""
        step, earliest = self._under_way.popleft()
        now = self._clock()
        seconds = now - max(earliest, self._ended)
        self._steps.append((step, seconds))
        _, rows, prompts, _ = step
        if not prompts:
            self.step_times.add(int(rows), seconds)
        # Where it took the host long to submit the next, this one may have ended meanwhile.
        submitted = self._under_way[-1][1] if self._under_way else earliest
        self._behind = self._asked < submitted and now - self._asked < _THERE
        self._ended, self._due = now, None

    def left(self) -> float:
        """Seconds until the next step should be submitted; 0 where it should be at once."""
        if (self._behind or not self._under_way or len(self._steps) < _FEWEST
                or self._clock() - self._came > _RECENT):
            return 0.0
        if self._due is None:
            step, earliest = self._under_way[0]
            due = max(earliest, self._ended) + float(self._fit() @ step) - self._lead()
            if due <= self._clock():
                return 0.0
            self._due = due
        return max(self._due - self._clock(), 0.0)

    def _fit(self) -> np.ndarray:
        """A line with so many steps below it, by least squares with weights: the last steps count
        most, and one that took far longer than others counts for no more than any that is above.
        """
        steps = np.array([own for own, _ in self._steps], np.float64)
        seconds = np.array([own for _, own in self._steps])
        recent = weights = _FORGETS**np.arange(len(steps))[::-1]
        for _ in range(_ROUNDS):
            root = np.sqrt(weights)
            line: np.ndarray = np.linalg.lstsq(steps * root[:, None], seconds * root, rcond=None)[0]
            above = seconds - steps @ line
            weights = recent * np.where(above > 0, _BELOW, 1 - _BELOW) / (np.abs(above) + 1e-5)
        return line

    def _lead(self) -> float:
        """How long before a step's end the host has to begin with the next."""
        return sorted(self._late)[int(len(self._late) * (1 - _BELOW))] + _FIRST
