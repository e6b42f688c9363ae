"""How long steps take, and so until when the next one can wait for who comes."""

from __future__ import annotations

import time

_ALIKE = 64  # tokens: steps of about as many take as long
_SPARE = 1e-3  # seconds


class Pace:
    """Of one device, from the steps that it has run; what it says is rather too early."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._making = 0.0  # seconds to make a step and submit it
        self._begun = 0.0

    def made(self, since: float, alone: bool) -> None:
        """A step was made and submitted, which began at that time; alone: it runs at once."""
        now = time.monotonic()
        self._making = max(now - since, self._making + (now - since - self._making) / 8)
        if alone:
            self._begun = now

    def ended(self, tokens: int) -> None:
        """The step that ran has ended, and the one behind it has begun."""
        now = time.monotonic()
        taken, size = now - self._begun, tokens // _ALIKE
        known = self._seconds.get(size, taken)
        self._seconds[size] = min(taken, known + (taken - known) / 8)
        self._begun = now

    def latest(self, tokens: int) -> float:
        """When the next step has to be begun with, so that the device, which runs a step of so many
        tokens, goes on without a break.
        """
        return self._begun + self._seconds.get(tokens // _ALIKE, 0) - 2 * self._making - _SPARE
