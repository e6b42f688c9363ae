"""Submission time of the next step, such that newly arrived requests can join it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from llmc.runtime.core.step import Step
from llmc.runtime.core.step_times import StepTimes
from llmc.runtime.speculation.planner import VerificationCosts

_WINDOW, _MIN_STEPS = 64, 16  # steps to fit; no prediction from fewer than the minimum
_RECENT = 10.0  # seconds after an arrival in which further ones are expected
_QUANTILE = 0.05  # fraction of steps below the fit, and of submissions above the lead time
_ROUNDS, _DECAY = 4, 0.97
_LAUNCH = 1e-3  # upper bound in seconds from the start of a submission to its first kernel
_COLLECT = 3e-4  # upper bound in seconds for collecting a step that has ended


class StepPacer:
    """Delays the next submission until just before the running step ends.

    With two steps in flight the device is never idle, but a request that arrives during the first
    waits for both. While requests keep arriving, the second step is therefore submitted just before
    the first ends.

    The duration of a step is fitted linearly to recent steps, by number of sequences, presence of
    prefill and number of prefill tokens. An underestimate costs queueing time; an overestimate
    leaves the device idle, so 95% of the measured durations are above the fit. If a step had ended
    before the host collected it, the next one is submitted at once.

    Args:
        clock: returns seconds.

    Attributes:
        step_times: durations of steps by numbers of rows and prompt tokens.
        costs: durations of steps that verify drafts; None if none do.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.step_times = StepTimes()
        self.costs: VerificationCosts | None = None
        # Features, drafts and uncommitted tokens (-1: costs are not comparable) of each step, and
        # its earliest start.
        self._in_flight: deque[tuple[tuple[float, ...], int, float]] = deque()
        self._steps: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_WINDOW)  # seconds
        self._delays: deque[float] = deque([1e-3], maxlen=_WINDOW)  # seconds
        self._ended = self._arrived = -np.inf
        self._collect_start, self._was_late = 0.0, False
        self._due: float | None = None  # time of the next submission

    def came(self) -> None:
        """Record the arrival of a request."""
        if self._in_flight:
            self._arrived = self._clock()

    def submitting(self, step: Step) -> None:
        """Record a submission. The device starts while the host is still enqueuing."""
        now = self._clock()
        if self._due is not None:
            self._delays.append(now - self._due)
        counts, prompts = step.num_extra, step.num_prefill_tokens
        extra = int(counts.max(initial=0))
        if extra and prompts == counts.sum() + np.count_nonzero(counts):
            prompts = 0
        # A draft model runs for the next step.
        if step.propose not in (None, int(step.num_drafts.max(initial=0))):
            extra = -1
        self._in_flight.append(((1, step.batch_size, prompts > 0, prompts), extra, now + _LAUNCH))
        self._due = None

    def collecting(self) -> None:
        """Record the start of collecting the oldest step."""
        self._collect_start = self._clock()

    def collected(self) -> None:
        """Record the end of the oldest step."""
        step, extra, earliest = self._in_flight.popleft()
        now = self._clock()
        seconds = now - max(earliest, self._ended)
        self._steps.append((step, seconds))
        _, rows, prompts, prompt_tokens = step
        if not prompts and not extra:
            self.step_times.add(int(rows), seconds)
        elif prompts and not extra:
            self.step_times.add_prompts(int(rows), int(prompt_tokens), seconds)
        if not prompts and extra >= 0 and self.costs is not None:
            self.costs.add(int(rows), extra, seconds)
        # A step that ended during a slow submission of the next one does not count as late.
        submitted = self._in_flight[-1][2] if self._in_flight else earliest
        self._was_late = self._collect_start < submitted and now - self._collect_start < _COLLECT
        self._ended, self._due = now, None

    def left(self) -> float:
        """Seconds until the next step should be submitted; 0: at once."""
        if (self._was_late or not self._in_flight or len(self._steps) < _MIN_STEPS
                or self._clock() - self._arrived > _RECENT):
            return 0.0
        if self._due is None:
            step, _, earliest = self._in_flight[0]
            due = max(earliest, self._ended) + float(self._fit() @ step) - self._lead()
            if due <= self._clock():
                return 0.0
            self._due = due
        return max(self._due - self._clock(), 0.0)

    def _fit(self) -> np.ndarray:
        """Fit a quantile regression to recent steps.

        Weights decay with age. Outliers above the fit count no more than any other step above it.
        """
        steps = np.array([features for features, _ in self._steps], np.float64)
        seconds = np.array([duration for _, duration in self._steps])
        recent = weights = _DECAY**np.arange(len(steps))[::-1]
        for _ in range(_ROUNDS):
            root = np.sqrt(weights)
            line: np.ndarray = np.linalg.lstsq(steps * root[:, None], seconds * root, rcond=None)[0]
            above = seconds - steps @ line
            asymmetry = np.where(above > 0, _QUANTILE, 1 - _QUANTILE)
            weights = recent * asymmetry / (np.abs(above) + 1e-5)
        return line

    def _lead(self) -> float:
        """Seconds before a step's end at which the host starts to submit the next."""
        return sorted(self._delays)[int(len(self._delays) * (1 - _QUANTILE))] + _LAUNCH
