"""Log-probabilities of a prompt's tokens, collected chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from llmc.errors import LlmcError
from llmc.runtime.sampling.sampler import Logprobs


class PromptScores:
    """Log-probabilities of one prompt, shared by its completions on a replica.

    The logits of position p score the token at p + 1, so the last position scores none.

    Args:
        count: most likely tokens to return at each position.
        rows: positions of rows of images or audio, which are no tokens and are not scored.

    Attributes:
        scheduled: number of leading positions whose logits a step has computed or will compute.
            Cached blocks of later positions are not reused.
    """

    def __init__(self, prompt: Sequence[int], count: int, rows: Collection[int] = ()) -> None:
        self.count, self.scheduled = count, 0
        self._prompt, self._rows = prompt, frozenset(rows)
        self._scores: list[Logprobs] = []
        self._result: tuple[Logprobs | None, ...] | None = None

    @property
    def complete(self) -> bool:
        """Whether all positions are scheduled."""
        return self.scheduled >= len(self._prompt) - 1

    def fit(self, start: int, count: int, room: int) -> int:
        """Limit a chunk of `count` tokens from `start` to at most `room` scored positions."""
        positions = self.positions(start, start + count)
        return count if len(positions) <= room else positions[max(room, 0)] - start

    def positions(self, start: int, end: int) -> Sequence[int]:
        """Positions of a chunk that are not yet scheduled for scoring, ascending."""
        positions = range(max(start, self.scheduled), min(end, len(self._prompt) - 1))
        return positions if not self._rows else [
            position for position in positions if position + 1 not in self._rows]

    def schedule(self, start: int, end: int) -> Sequence[int]:
        """Mark the chunk's `positions` as scheduled and return them."""
        assert start <= self.scheduled or self.complete
        positions = self.positions(start, end)
        self.scheduled = max(self.scheduled, min(end, len(self._prompt) - 1))
        return positions

    def targets(self, positions: Sequence[int]) -> Sequence[int]:
        """Token ids that these positions score."""
        return [self._prompt[position + 1] for position in positions]

    def extend(self, scores: Sequence[Logprobs]) -> None:
        """Append the scores of a step. Steps are collected in order."""
        self._scores.extend(scores)

    def result(self) -> tuple[Logprobs | None, ...]:
        """Log-probabilities of each token of the prompt; None for the first and for rows.

        Raises:
            LlmcError: a logit is NaN or infinite.
        """
        if self._result is not None:
            return self._result
        scored = [at for at in range(len(self._prompt) - 1) if at + 1 not in self._rows]
        assert len(self._scores) == len(scored)
        bad = next((at for at, own in zip(scored, self._scores, strict=True)
                    if math.isnan(own.chosen)), None)
        if bad is not None:
            raise LlmcError(f"the logits at position {bad} of the prompt are NaN or infinite; the "
                            f"weights or activations overflow, compile with --dtype float32")
        by_position = dict(zip(scored, self._scores, strict=True))
        self._result = None, *(by_position.get(at) for at in range(len(self._prompt) - 1))
        return self._result
