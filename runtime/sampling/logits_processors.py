"""Logits processors and warpers: transformers' definitions, in its order.

The processors change one row of scores [vocab_size], float32 or float64, in place; a token with the
score -inf cannot be sampled. The warpers return the tokens to keep, int64 [kept], ascending; all
but top_k work on weights, which are probabilities up to a factor. The presence and frequency
penalties, which transformers lacks, are OpenAI's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def logit_bias(scores: np.ndarray, token_ids: np.ndarray, biases: np.ndarray) -> None:
    """Add biases to the scores of distinct tokens."""
    scores[token_ids] += biases


def repetition_penalty(scores: np.ndarray, context: np.ndarray, penalty: float) -> None:
    """Penalize tokens in the context (prompt and generated).

    Positive scores are divided by the penalty, negative ones multiplied.
    """
    seen = scores[context]
    scores[context] = np.where(seen < 0, seen * penalty, seen / penalty)


def presence_and_frequency_penalty(scores: np.ndarray, generated: Sequence[int], presence: float,
                                   frequency: float) -> None:
    """Subtract `presence + frequency · count` from the score of each generated token."""
    counts = Counter(generated)  # faster than np.unique
    token_ids = np.fromiter(counts, np.int64, len(counts))
    times = np.fromiter(counts.values(), np.int64, len(counts))
    scores[token_ids] -= presence + frequency * times


class BadWords:
    """Forbids the last token of each bad word whose other tokens end the context."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in words:
            self._last.setdefault(tuple(prefix), []).append(last)
        self._sizes = {len(prefix) for prefix in self._last}

    def __call__(self, scores: np.ndarray, context: np.ndarray) -> None:
        for size in self._sizes:
            end = tuple(context[max(0, len(context) - size):].tolist())
            if end in self._last:
                scores[self._last[end]] = -np.inf


def min_tokens(scores: np.ndarray, generated: int, least: int, end_tokens: np.ndarray) -> None:
    """Forbid EOS tokens until `least` tokens are generated."""
    if generated < least:
        scores[end_tokens] = -np.inf


def allow(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Forbid, in a copy, tokens whose bit is 0 in a mask, as in `Step.masks`."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=len(scores),
                         bitorder="little")
    allowed: np.ndarray = np.where(bits, scores, scores.dtype.type(-np.inf))
    return allowed


def force(scores: np.ndarray, token_ids: Sequence[int]) -> None:
    """Allow only these tokens, with equal scores."""
    scores[:] = -np.inf
    scores[list(token_ids)] = 0


def top_k(scores: np.ndarray, count: int) -> np.ndarray:
    """Keep the `count` most likely tokens, and those that tie with the last."""
    count = min(count, len(scores))
    near = _upper(scores, count)
    kept: np.ndarray = near[scores[near] >= np.partition(scores[near], -count)[-count]]
    return kept


def weights(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Probabilities up to a factor, float64: 1 for the most likely token."""
    shifted: np.ndarray = np.subtract(scores, scores.max(), dtype=np.float64)
    if temperature != 1:
        shifted /= temperature
    np.exp(shifted, out=shifted)
    return shifted


def top_p(weight: np.ndarray, mass: float) -> np.ndarray:
    """Keep the fewest most likely tokens whose probabilities add up to `mass`.

    Of equally likely tokens at the edge, those with the lowest ids stay; transformers does not
    define this.
    """
    kept, spare = _reach(weight, weight, mass)
    if spare:
        ties = np.flatnonzero(weight[kept] == weight[kept].min())
        kept = np.delete(kept, ties[-spare:])
    return kept


def min_p(weight: np.ndarray, share: float) -> np.ndarray:
    """Keep tokens with at least this fraction of the greatest probability."""
    return np.flatnonzero(weight >= share * weight.max())


def typical_p(weight: np.ndarray, mass: float) -> np.ndarray:
    """Keep the fewest locally typical tokens whose probabilities add up to `mass`.

    The tokens whose information is nearest to the entropy go first (Meister et al., 2022); ties
    stay.
    """
    # Information is the negative logarithm of a probability and entropy its mean, so the factor
    # of the weights cancels. Where the weight is 0 the logarithm matters only in being finite.
    logs = np.log(np.maximum(weight, 1e-300))
    return _reach(-np.abs(logs - (weight * logs).sum() / weight.sum()), weight, mass)[0]


def _upper(scores: np.ndarray, count: int) -> np.ndarray:
    """A superset of the `count` tokens with the highest scores, ascending.

    A bound from the maxima of groups of 64 is faster than np.partition of all scores.
    """
    greatest = scores[:len(scores) // 64 * 64].reshape(64, -1).max(axis=0)
    if 2 * count > len(greatest):
        greatest = scores
    return np.flatnonzero(scores >= np.partition(greatest, -count)[-count])


def _reach(keys: np.ndarray, weight: np.ndarray, mass: float) -> tuple[np.ndarray, int]:
    """The fewest tokens, by descending key, whose weights reach `mass` of the total.

    Includes all ties with the last token; the second result is the number of surplus ties.
    """
    goal, size = mass * weight.sum(), 32
    while True:
        size = min(8 * size, len(keys))
        near = _upper(keys, size)
        order = np.argsort(-keys[near])
        sums = np.cumsum(weight[near[order]])
        if sums[-1] >= goal or size == len(keys):
            last = min(int(np.searchsorted(sums, goal)), len(near) - 1)
            kept = near[keys[near] >= keys[near[order[last]]]]
            return kept, len(kept) - last - 1
