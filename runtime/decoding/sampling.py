"""Choose the next token from logits."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.decoding import processors
from llmc.runtime.decoding.params import SamplingParams
from llmc.runtime.decoding.processing import BatchProcessing, Processing

_BLOCK = 256  # random numbers made, and probabilities added up, at once


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

    Attributes:
        number: no other sampler of this process has it.
    """

    _numbers = itertools.count()

    def __init__(self, params: SamplingParams, sample: int = 0, prompt: Sequence[int] = (),
                 end_tokens: Sequence[int] = (), bad_words: Sequence[Sequence[int]] = (),
                 forced: Mapping[int, Sequence[int]] | None = None) -> None:
        self.params = params
        self._forced = forced or {}
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.seed = (seed + sample) % 2**64
        self.number = next(self._numbers)
        self.prompt = np.array(prompt, np.int64)
        self._end_tokens = np.array(end_tokens, np.int64)
        self._words = bad_words
        self._bad_words = processors.BadWords(bad_words) if bad_words else None
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)

    def __call__(self, logits: np.ndarray, tokens: Sequence[int]) -> int:
        """The next token from logits [vocab_size] of a sequence that has generated `tokens`.

        Raises:
            LlmcError: no token is allowed.
        """
        scores = self.process(logits, tokens)
        best = int(scores.argmax())
        if scores[best] == -np.inf:
            raise nothing_allowed(len(tokens))
        if self.params.temperature == 0:
            return best
        token_ids, weights = _candidates(scores, self.params)
        block, place = divmod(len(tokens), _BLOCK)
        return int(token_ids[_draw(weights, _random_numbers(self.seed, block)[place])])

    def process(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Logits as they are before temperature, in a new array."""
        params, scores = self.params, logits.copy()
        if len(self._biased):
            processors.logit_bias(scores, self._biased, self._biases)
        if params.repetition_penalty != 1 or self._bad_words:
            context = np.concatenate([self.prompt, np.array(tokens, np.int64)])
        if params.repetition_penalty != 1:
            processors.repetition_penalty(scores, context, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            processors.presence_and_frequency_penalty(scores, tokens, params.presence_penalty,
                                                      params.frequency_penalty)
        if self._bad_words:
            self._bad_words(scores, context)
        processors.min_tokens(scores, len(tokens), params.min_tokens, self._end_tokens)
        if len(tokens) in self._forced:
            processors.force(scores, self._forced[len(tokens)])
        return scores

    @cached_property
    def processing(self) -> Processing | None:
        """What `process` does, for an engine that does it itself; None: nothing."""
        params = self.params
        return Processing.of(
            repetition=params.repetition_penalty, presence=params.presence_penalty,
            frequency=params.frequency_penalty, biased=self._biased, biases=self._biases,
            bad_words=self._words, min_tokens=min(params.min_tokens, 2**31 - 1),
            end_tokens=self._end_tokens, forced=self._forced)


def nothing_allowed(generated: int) -> LlmcError:
    """The error where every token after so many generated ones is forbidden."""
    return LlmcError(f"no token is allowed after {generated} generated ones; forbid fewer in "
                     f"bad_words and logit_bias")


@dataclass(frozen=True)
class Draws:
    """A batch's samplers as arrays [batch], for an engine that chooses tokens itself."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    typical_p: np.ndarray  # float32
    seed: np.ndarray  # uint64
    drawn: np.ndarray  # int64: tokens that each sequence drew before
    sequences: np.ndarray  # int64: the samplers' numbers
    processing: BatchProcessing | None  # what is done to the logits first; None: nothing
    logprobs: np.ndarray | None  # int32: of so many likeliest tokens, -1: not of the chosen either
    # Before the first token, where it depends on it: the prompts, int32, one after the other, and
    # how long they are.
    prompts: tuple[np.ndarray, list[int]] | None

    @staticmethod
    def of(samplers: Sequence[Sampler], drawn: Sequence[int]) -> Draws:
        params = [sampler.params for sampler in samplers]
        processing = BatchProcessing.of([sampler.processing for sampler in samplers])
        asked = [-1 if p.logprobs is None else p.logprobs for p in params]
        prompts = None
        if processing is not None and processing.keeps_history and not any(drawn):
            prompts = (np.concatenate([sampler.prompt for sampler in samplers]).astype(np.int32),
                       [len(sampler.prompt) for sampler in samplers])
        return Draws(np.array([p.temperature for p in params], np.float32),
                     np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
                     np.array([p.top_p for p in params], np.float32),
                     np.array([p.min_p for p in params], np.float32),
                     np.array([p.typical_p for p in params], np.float32),
                     np.array([sampler.seed for sampler in samplers], np.uint64),
                     np.array(drawn, np.int64),
                     np.array([sampler.number for sampler in samplers], np.int64),
                     processing, np.array(asked, np.int32) if max(asked) >= 0 else None, prompts)


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
        token_ids = processors.top_k(scores, params.top_k)
        scores = scores[token_ids]
    else:
        token_ids = _all_tokens(len(scores))
    weights = processors.weights(scores, params.temperature)
    for cut, value, none in ((processors.top_p, params.top_p, 1),
                             (processors.min_p, params.min_p, 0),
                             (processors.typical_p, params.typical_p, 1)):
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
    """

    chosen: float
    top: tuple[tuple[int, float], ...]

    @staticmethod
    def of(logits: np.ndarray, token: int, count: int) -> Logprobs:
        """From logits [vocab_size], for a chosen token and the `count` likeliest."""
        peak = float(logits.max())
        shift = peak + math.log(processors.weights(logits).sum())
        top: list[int] = []
        if count:
            near = processors.top_k(logits, count)
            top = near[np.argsort(-logits[near], kind="stable")][:count].tolist()
        return Logprobs(float(logits[token]) - shift,
                        tuple((other, float(logits[other]) - shift) for other in top))


@dataclass(frozen=True)
class Choices:
    """Tokens that an engine chose itself, int64 [steps, batch], -1 where none was allowed; their
    LOGPROBS [steps, batch] where some sequence asks for them.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None

    def steps(self, counts: Sequence[int | None]) -> Iterator[list[tuple[int, Logprobs | None]]]:
        """Each step's tokens, and log-probabilities with so many of the likeliest."""
        if self.logprobs is None:
            for tokens in self.tokens.tolist():
                yield [(token, None) for token in tokens]
            return
        most = max(count or 0 for count in counts)
        parts = (self.tokens, self.logprobs["chosen"], self.logprobs["tokens"][..., :most],
                 self.logprobs["top"][..., :most])
        for step in zip(*(part.tolist() for part in parts), strict=True):
            yield [(token, None if count is None else
                    Logprobs(chosen, tuple(zip(near[:count], top[:count], strict=True))))
                   for count, token, chosen, near, top in zip(counts, *step, strict=True)]
