"""Times of steps by batch size and number of prompt tokens, learned while serving."""

from __future__ import annotations

from bisect import bisect_right, insort

_WEIGHT = 0.2  # of a new measurement in the moving average
_MIN_PROMPT = 32  # prompt tokens of a step, below which their time is too short to measure


class StepTimes:
    """Moving averages of the seconds that steps take, by rows per step and prompt tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []  # measured sizes, sorted
        self._per_prompt_token: float | None = None  # seconds; None before any measurement

    def add(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` sequences without prompt tokens."""
        if rows not in self._seconds:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        self._seconds[rows] += _WEIGHT * (seconds - self._seconds[rows])

    def add_prompts(self, rows: int, tokens: int, seconds: float) -> None:
        """Record a step of `rows` sequences with this number of prompt tokens."""
        if tokens < _MIN_PROMPT:
            return
        each = max(seconds - self.of(rows), 0.0) / tokens
        if self._per_prompt_token is None:
            self._per_prompt_token = each
        self._per_prompt_token += _WEIGHT * (each - self._per_prompt_token)

    def prompt_tokens(self, rows: int, seconds: float) -> int | None:
        """Number of prompt tokens with which a step of `rows` sequences takes this time.

        None: not measured yet.
        """
        if not self._per_prompt_token:
            return None
        return int(max(seconds - self.of(rows), 0.0) / self._per_prompt_token)

    def of(self, rows: int) -> float:
        """Return the expected seconds of a step.

        An unmeasured size has the time of the next smaller measured one, or 0. This is optimistic,
        so that the scheduler tries sizes without a measurement.
        """
        index = bisect_right(self._rows, rows)
        return self._seconds[self._rows[index - 1]] if index else 0.0
