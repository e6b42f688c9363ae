"""Choose the next token from logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.sampling import logits_processors
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.slot_params import SlotParams

_BLOCK = 256  # random numbers made, and probabilities added up, at once
# What an engine returns in place of a token.
NONE_ALLOWED, NOT_FINITE = -1, -2


class NonFiniteLogits(LlmcError):
    """The model computed NaN or infinity for a sequence: no fault of the caller."""

    def __init__(self, generated: int) -> None:
        super().__init__(f"the logits after {generated} generated tokens are NaN or infinite; "
                         f"check the checkpoint's weights, or compile with a --dtype of larger "
                         f"range such as bfloat16 or float32")


class Sampler:
    """Chooses the tokens of one sequence.

    A token is the first whose cumulative probability, in the order of tokens, exceeds a random
    number; number n of a sequence is numpy's Philox(key=seed, counter=n), on every target.

    Args:
        params: `bad_words` in it are not looked at.
        sample: which of the prompt's n completions this is.
        prompt: token ids.
        end_tokens: what `min_tokens` keeps away.
        bad_words: as token ids.
        forced: tokens of which one must be generated, by the number of those before it.
    """

    def __init__(self, params: SamplingParams, sample: int = 0, prompt: Sequence[int] = (),
                 end_tokens: Sequence[int] = (), bad_words: Sequence[Sequence[int]] = (),
                 forced: Mapping[int, Sequence[int]] | None = None) -> None:
        self.params = params
        self._forced = forced or {}
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.seed = (seed + sample) % 2**64
        self.prompt = np.array(prompt, np.int64)
        self._end_tokens = np.array(end_tokens, np.int64)
        self._words = bad_words
        self._bad_words = logits_processors.BadWords(bad_words) if bad_words else None
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)

    def __call__(self, logits: np.ndarray, tokens: Sequence[int]) -> int:
        """The next token from logits [vocab_size] of a sequence that has generated `tokens`.

        Raises:
            LlmcError: no token is allowed.
            NonFiniteLogits: a logit is NaN or positive infinity.
        """
        scores = logits if self.processing is None else self.process(logits, tokens)
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):  # argmax finds NaN first
            raise nothing_allowed(len(tokens)) if scores[best] == -np.inf \
                else NonFiniteLogits(len(tokens))
        if self.params.temperature == 0:
            return best
        token_ids, weights = _candidates(scores, self.params)
        block, place = divmod(len(tokens), _BLOCK)
        return int(token_ids[_draw(weights, _random_numbers(self.seed, block)[place])])

    def process(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Logits as they are before temperature, in a new array."""
        params, scores = self.params, logits.copy()
        if len(self._biased):
            logits_processors.logit_bias(scores, self._biased, self._biases)
        if params.repetition_penalty != 1 or self._bad_words:
            context = np.concatenate([self.prompt, np.array(tokens, np.int64)])
        if params.repetition_penalty != 1:
            logits_processors.repetition_penalty(scores, context, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            logits_processors.presence_and_frequency_penalty(
                scores, tokens, params.presence_penalty, params.frequency_penalty)
        if self._bad_words:
            self._bad_words(scores, context)
        logits_processors.min_tokens(scores, len(tokens), params.min_tokens, self._end_tokens)
        if len(tokens) in self._forced:
            logits_processors.force(scores, self._forced[len(tokens)])
        return scores

    @cached_property
    def processing(self) -> SlotParams | None:
        """What `process` does, for an engine that does it itself; None: nothing."""
        params = self.params
        return SlotParams.of(
            repetition=params.repetition_penalty, presence=params.presence_penalty,
            frequency=params.frequency_penalty, biased=self._biased, biases=self._biases,
            bad_words=self._words, min_tokens=min(params.min_tokens, 2**31 - 1),
            end_tokens=self._end_tokens, forced=self._forced)


def nothing_allowed(generated: int) -> LlmcError:
    """The error where every token after so many generated ones is forbidden."""
    return LlmcError(f"no token is allowed after {generated} generated ones; forbid fewer in "
                     f"bad_words and logit_bias")


def probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that is sampled, float64 [vocab_size], for temperature above 0 and scores
    that are processed up to there.
    """
    chances = np.zeros(len(scores))
    token_ids, weights = _candidates(scores, params)
    chances[token_ids] = weights / weights.sum()
    return chances


def _candidates(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [kept], ascending, that may be drawn, and their probabilities up to a factor,
    float64 [kept].
    """
    if params.top_k:  # before temperature, which changes no order, to leave few to work on
        token_ids = logits_processors.top_k(scores, params.top_k)
        scores = scores[token_ids]
    else:
        token_ids = _all_tokens(len(scores))
    weights = logits_processors.weights(scores, params.temperature)
    for cut, value, none in ((logits_processors.top_p, params.top_p, 1),
                             (logits_processors.min_p, params.min_p, 0),
                             (logits_processors.typical_p, params.typical_p, 1)):
        if value != none:
            kept = cut(weights, value)
            token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights


@lru_cache(maxsize=4)
def _all_tokens(vocab_size: int) -> np.ndarray:
    token_ids = np.arange(vocab_size)
    token_ids.flags.writeable = False
    return token_ids


@lru_cache(maxsize=1024)
def _random_numbers(seed: int, block: int) -> np.ndarray:
    """The random numbers from 0 to 1 of a sequence's tokens `block * _BLOCK` and after, float64
    [_BLOCK]. Philox makes four words of a counter, of which the first is taken.
    """
    generator = np.random.Philox(key=seed, counter=block * _BLOCK)
    return generator.random_raw(4 * _BLOCK)[::4] * 2.0**-64


def _draw(weights: np.ndarray, number: float) -> int:
    """The first place whose cumulative weight exceeds this part of all weight."""
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    goal = number * ends[-1]
    block = _first_above(ends, goal)
    start = block * _BLOCK
    inside = np.cumsum(weights[start:start + _BLOCK])
    return start + _first_above(inside, goal - (ends[block - 1] if block else 0))


def _first_above(sums: np.ndarray, goal: float) -> int:
    """Rounding may put the goal at or behind the last sum; the last place that adds is meant."""
    return int(min(np.searchsorted(sums, goal, side="right"), np.searchsorted(sums, sums[-1])))


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one place of a completion, in the model's own distribution: the
    log-softmax, in float64, of its logits before anything is done to them.

    Args:
        chosen: of the token that was chosen.
        top: the likeliest tokens as (token id, log-probability), likeliest first.
        rank: of a prompt's token among all tokens, from 1; of equal ones the least.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None

    @staticmethod
    def of(logits: np.ndarray, token: int, count: int) -> Logprobs:
        """From logits [vocab_size], for a chosen token and the `count` likeliest."""
        peak = float(logits.max())
        shift = peak + math.log(logits_processors.weights(logits).sum())
        top = _most_likely(logits, count)
        return Logprobs(float(logits[token]) - shift,
                        tuple((other, float(logits[other]) - shift) for other in top))

    @staticmethod
    def of_prompt(logits: np.ndarray, token: int, count: int) -> Logprobs:
        """From logits [vocab_size] of the position before, for a token of a prompt, with its rank.
        Logits that are NaN or infinite lead to NaN.
        """
        if not math.isfinite(logits.max()):
            return Logprobs(math.nan, ())
        found = Logprobs.of(logits, token, count)
        return replace(found, rank=int((logits > logits[token]).sum()) + 1)


def _most_likely(logits: np.ndarray, count: int) -> list[int]:
    """Token ids, most likely first; of equal ones the lower."""
    if not count:
        return []
    near = logits_processors.top_k(logits, count)
    found: list[int] = near[np.argsort(-logits[near], kind="stable")][:count].tolist()
    return found
