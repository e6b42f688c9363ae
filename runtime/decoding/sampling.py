"""Choose the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmc.errors import LlmcError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Args:
        temperature: 0 takes the most likely token.
        top_k: sample among this many tokens; 0 for all.
        top_p: sample among the likeliest tokens that together have this probability.
        seed: of the random numbers of each sequence, so that a result does not depend on what
            else is in the batch; None for other numbers each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            problem = "negative" if self.temperature < 0 else "no finite number"
            raise LlmcError(f"temperature {self.temperature} is {problem}; 0 is greedy")
        if self.top_k < 0:
            raise LlmcError(f"top_k {self.top_k} is negative; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise LlmcError(f"top_p {self.top_p} is not above 0 and at most 1")
        if self.seed is not None and self.seed < 0:
            raise LlmcError(f"seed {self.seed} is negative")


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.default_rng(params.seed)

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest token."""
        return self._params.temperature == 0

    def __call__(self, logits: np.ndarray) -> int:
        """The next token from logits `[vocab_size]`."""
        if self.greedy:
            return int(logits.argmax())
        return int(self._random.choice(len(logits), p=probabilities(logits, self._params)))


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that is sampled, float64 [vocab_size], for temperature above 0."""
    scores = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scores):
        scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    if params.top_p < 1:
        kept = np.flatnonzero(chances)
        order = kept[np.argsort(-chances[kept])]
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[before >= params.top_p]] = 0
        chances /= chances.sum()
    return chances
