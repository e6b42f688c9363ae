"""Drafts by the engine: of its draft model, or by prompt lookup."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmc.runtime.core.step import proposal
from llmc.runtime.speculation.drafter import Draft

MATCH = 0  # of drafts that have no source


class EngineDrafter:
    """Holds the drafts that the engine returned with the latest token.

    Args:
        ahead: whether drafts may be verified before the engine has returned them. They have the
            match of those returned last.
        prompt_lookup: whether they are those of prompt lookup.

    Attributes:
        lost: whether the draft model did not run in a step of the sequence. Its caches lack those
            positions, and it drafts no more.
    """

    def __init__(self, *, ahead: bool = False, prompt_lookup: bool = False) -> None:
        self.ahead, self.prompt_lookup = ahead, prompt_lookup
        self.lost = False
        self._proposed: list[int] = []
        self._match = MATCH
        self._expected: deque[int] = deque()  # drafts of the steps that are not read yet

    @property
    def waits(self) -> bool:
        """Whether the next step needs the results of a step in flight, for its drafts."""
        return not self.ahead and any(self._expected)

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing: the engine knows the tokens."""

    def expect(self, count: int) -> None:
        """Note that a step samples the sequence, and proposes this number of drafts."""
        self._expected.append(count)
        self._proposed = [proposal(index) for index in range(count)] if self.ahead else []

    def propose(self, tokens: Sequence[int], match: int = MATCH) -> None:
        """Set the drafts after the latest token, unless a later step proposes others.

        Args:
            tokens: drafts of the oldest step that was expected.
            match: number of tokens that agree with their source.
        """
        self._expected.popleft()
        self._match = match
        if not self._expected:
            self._proposed = list(tokens)

    def reset(self) -> None:
        """Forget the drafts, and steps in flight: the sequence starts again."""
        self._proposed, self._match, self.lost = [], MATCH, False
        self._expected.clear()

    def draft(self, count: int) -> Draft | None:
        """Return at most `count` drafts; None if the engine proposed none."""
        tokens = [] if self.lost else self._proposed[:count]
        return Draft(tokens, self._match) if tokens else None
