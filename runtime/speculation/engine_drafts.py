"""Drafts by the engine's draft model."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.runtime.speculation.drafter import Draft

MATCH = 0  # of drafts that have no source


class EngineDrafter:
    """Holds the drafts that the engine returned with the latest token."""

    def __init__(self) -> None:
        self._proposed: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing: the engine knows the tokens."""

    def propose(self, tokens: Sequence[int]) -> None:
        """Set the drafts of the tokens after the latest one."""
        self._proposed = list(tokens)

    def draft(self, count: int) -> Draft | None:
        """Return at most `count` drafts; None if the engine proposed none."""
        tokens = self._proposed[:count]
        return Draft(tokens, MATCH) if tokens else None
