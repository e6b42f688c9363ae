"""Drafts by the engine's draft model."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.runtime.core.step import proposal
from llmc.runtime.speculation.drafter import Draft

MATCH = 0  # of drafts that have no source


class EngineDrafter:
    """Holds the drafts that the engine returned with the latest token.

    Args:
        ahead: whether drafts may be verified before the engine has returned them.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self.ahead = ahead
        self._proposed: list[int] = []
        self._expected = 0  # steps whose drafts the engine has not returned

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing: the engine knows the tokens."""

    def expect(self, count: int) -> None:
        """Note that a step proposes drafts."""
        self._expected += 1
        self._proposed = [proposal(index) for index in range(count)] if self.ahead else []

    def propose(self, tokens: Sequence[int]) -> None:
        """Set the drafts after the latest token, unless a later step proposes others."""
        self._expected -= 1
        if not self._expected:
            self._proposed = list(tokens)

    def reset(self) -> None:
        """Forget the drafts, and steps in flight."""
        self._proposed, self._expected = [], 0

    def draft(self, count: int) -> Draft | None:
        """Return at most `count` drafts; None if the engine proposed none."""
        tokens = self._proposed[:count]
        return Draft(tokens, MATCH) if tokens else None
