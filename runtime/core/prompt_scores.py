"""Log-probabilities of a prompt's tokens, as its chunks are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmc.errors import LlmcError
from llmc.runtime.sampling.sampler import Logprobs


class PromptScores:
    """Log-probabilities of one prompt, which all its completions on a replica share.

    The logits of position p score the token at p + 1, so the last position scores none.

    Args:
        count: most likely tokens to return at each position.

    Attributes:
        scheduled: positions, from the first on, whose logits a step has been asked for. What the
            prefix cache has of later ones is not reused.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self.count, self.scheduled = count, 0
        self._prompt = prompt
        self._made: list[Logprobs] = []
        self._result: tuple[Logprobs | None, ...] | None = None

    @property
    def complete(self) -> bool:
        """Whether steps have been asked for all positions."""
        return self.scheduled >= len(self._prompt) - 1

    def fit(self, start: int, count: int, room: int) -> int:
        """Limit `count` tokens from position `start` on so that at most `room` are scored."""
        positions = self.positions(start, start + count)
        return count if len(positions) <= room else positions.start + room - start

    def positions(self, start: int, end: int) -> range:
        """Positions of a chunk that are to be scored."""
        return range(max(start, self.scheduled), min(end, len(self._prompt) - 1))

    def schedule(self, start: int, end: int) -> range:
        """`positions`, which count as scheduled from now on."""
        assert start <= self.scheduled or self.complete
        positions = self.positions(start, end)
        self.scheduled = max(self.scheduled, positions.stop)
        return positions

    def targets(self, positions: range) -> Sequence[int]:
        """Token ids that these positions score."""
        return self._prompt[positions.start + 1:positions.stop + 1]

    def extend(self, made: Sequence[Logprobs]) -> None:
        """Take what a step led to; steps are collected in their order."""
        self._made.extend(made)

    def result(self) -> tuple[Logprobs | None, ...]:
        """Of each token of the prompt; None for the first.

        Raises:
            LlmcError: a logit is NaN or infinite.
        """
        if self._result is not None:
            return self._result
        assert len(self._made) == len(self._prompt) - 1
        bad = next((at for at, own in enumerate(self._made) if math.isnan(own.chosen)), None)
        if bad is not None:
            raise LlmcError(f"the logits at position {bad} of the prompt have NaN or infinity; the "
                            f"weights or activations overflow, compile with --dtype float32")
        self._result = None, *self._made
        return self._result
