"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Draft:
    """Drafts of the next tokens of a sequence.

    Args:
        tokens: at least one.
        match: number of preceding tokens that agree with the source: its reliability.
        predicted: whether the source is the caller's predicted output.
        missing: last tokens that stand for drafts which the engine did not find.
    """

    tokens: list[int]
    match: int
    predicted: bool = False
    missing: int = 0

    @property
    def found(self) -> int:
        """Number of drafts without those missing."""
        return len(self.tokens) - self.missing


class Drafter(Protocol):
    """Drafts for one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append generated tokens to the sequence."""
        ...

    def draft(self, count: int) -> Draft | None:
        """Return at most `count` drafts; None if it has no source."""
        ...
