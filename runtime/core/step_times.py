"""Time of a decode step by its number of rows, learned while serving."""

from __future__ import annotations

from bisect import bisect_right, insort

_WEIGHT = 0.2  # of a new measurement in the moving average


class StepTimes:
    """Moving averages of the seconds that decode steps take, by rows per step."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []  # measured sizes, sorted

    def add(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` sequences without prompt tokens."""
        if rows not in self._seconds:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        self._seconds[rows] += _WEIGHT * (seconds - self._seconds[rows])

    def of(self, rows: int) -> float:
        """Return the expected seconds of a step.

        An unmeasured size has the time of the next smaller measured one, or 0. This is optimistic,
        so that the scheduler tries sizes without a measurement.
        """
        index = bisect_right(self._rows, rows)
        return self._seconds[self._rows[index - 1]] if index else 0.0
