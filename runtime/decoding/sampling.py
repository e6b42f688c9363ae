"""Choose the next token from logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.errors import LlmcError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Args:
        temperature: 0 takes the most likely token.
        top_k: sample among this many tokens; 0 for all. Ties stay.
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
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise LlmcError(f"seed {self.seed} is not from 0 to 2^64 - 1")


class Sampler:
    """Chooses the tokens of one sequence.

    A token is the first whose cumulative probability, in the order of tokens, exceeds a random
    number; number n of a sequence is numpy's Philox(key=seed, counter=n), on every target.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed

    def __call__(self, logits: np.ndarray, drawn: int) -> int:
        """The next token from logits `[vocab_size]` of a sequence that drew `drawn` tokens."""
        if self.params.temperature == 0:
            return int(logits.argmax())
        below = np.cumsum(probabilities(logits, self.params))
        number = np.random.Philox(key=self.seed, counter=drawn).random_raw() * 2.0**-64
        # Rounding may put the number at or behind the sum; the last token that can be is meant.
        return int(min(np.searchsorted(below, number * below[-1], side="right"),
                       np.searchsorted(below, below[-1])))


@dataclass(frozen=True)
class Draws:
    """A batch's samplers as arrays [batch], for an engine that chooses tokens itself."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32
    top_p: np.ndarray  # float32
    seed: np.ndarray  # uint64
    drawn: np.ndarray  # int64: tokens that each sequence drew before

    @staticmethod
    def of(samplers: Sequence[Sampler], drawn: Sequence[int]) -> Draws:
        params = [sampler.params for sampler in samplers]
        return Draws(np.array([p.temperature for p in params], np.float32),
                     np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
                     np.array([p.top_p for p in params], np.float32),
                     np.array([sampler.seed for sampler in samplers], np.uint64),
                     np.array(drawn, np.int64))


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that is sampled, float64 [vocab_size], for temperature above 0."""
    scores = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scores):
        scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    if params.top_p < 1:
        kept = np.flatnonzero(chances)
        order = kept[np.argsort(-chances[kept], kind="stable")]
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[before >= params.top_p]] = 0
        chances /= chances.sum()
    return chances
