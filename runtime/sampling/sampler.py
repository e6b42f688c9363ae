"""Sampling of the next token from logits, and log-probabilities."""

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
from llmc.runtime.sampling.speech_rules import SpeechRules

_BLOCK = 256  # random numbers to generate, and probabilities to sum, at once
# What an engine returns in place of a token.
NONE_ALLOWED, NOT_FINITE = -1, -2


class NonFiniteLogits(LlmcError):
    """The model computed NaN or infinite logits: not the caller's fault."""

    def __init__(self, generated: int) -> None:
        super().__init__(f"the logits after {generated} generated tokens are NaN or infinite; "
                         f"check the checkpoint's weights, or compile with a --dtype of larger "
                         f"range such as bfloat16 or float32")


class Sampler:
    """Samples the tokens of one sequence.

    A token is the first whose cumulative probability, in order of token ids, exceeds a random
    number. Random number n of a sequence is numpy's Philox(key=seed, counter=n), on every target.

    Args:
        params: sampling parameters; their `bad_words` are ignored.
        sample: number of the completion among the prompt's n.
        prompt: token ids.
        end_tokens: EOS and stop tokens that `min_tokens` masks.
        bad_words: as token ids.
        forced: allowed tokens, by number of tokens generated before.
        rules: rules of speech. Engines that sample on a device apply only `first_forbidden`.
    """

    def __init__(self, params: SamplingParams, sample: int = 0, prompt: Sequence[int] = (),
                 end_tokens: Sequence[int] = (), bad_words: Sequence[Sequence[int]] = (),
                 forced: Mapping[int, Sequence[int]] | None = None,
                 rules: SpeechRules | None = None) -> None:
        self.params, self._rules = params, rules
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
        """Sample the next token from logits [vocab_size], after these generated tokens.

        Raises:
            LlmcError: no token is allowed.
            NonFiniteLogits: a logit is NaN or positive infinity.
        """
        scores = self.process(logits, tokens) if self.processes else logits
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):  # argmax finds NaN first
            raise nothing_allowed(len(tokens)) if scores[best] == -np.inf \
                else NonFiniteLogits(len(tokens))
        if self.params.temperature == 0:
            return best
        token_ids, weights = _candidates(scores, self.params)
        block, index = divmod(len(tokens), _BLOCK)
        return int(token_ids[_draw(weights, _random_numbers(self.seed, block)[index])])

    def logprobs(self, logits: np.ndarray, token: int, tokens: Sequence[int]) -> Logprobs:
        """Log-probabilities of the token sampled after these."""
        if self._rules is not None and self._rules.processed_logprobs:
            logits = self.process(logits, tokens)
        return Logprobs.of(logits, token, self.params.logprobs or 0)

    def process(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Apply all processors before temperature; returns a new array."""
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
        if self._rules is not None:
            self._rules.apply(scores, tokens)
        return scores

    @property
    def processes(self) -> bool:
        """Whether `process` changes logits."""
        return self._rules is not None or self.processing is not None

    @cached_property
    def processing(self) -> SlotParams | None:
        """The parameters of `process` for an engine that samples; None if no logits change."""
        params, min_tokens, end_tokens = self.params, self.params.min_tokens, self._end_tokens
        if self._rules is not None and self._rules.first_forbidden:  # as if min_tokens were 1
            end_tokens = np.array([*self._rules.first_forbidden,
                                   *(end_tokens if min_tokens else ())], np.int64)
            min_tokens = 1
        return SlotParams.of(
            repetition=params.repetition_penalty, presence=params.presence_penalty,
            frequency=params.frequency_penalty, biased=self._biased, biases=self._biases,
            bad_words=self._words, min_tokens=min(min_tokens, 2**31 - 1),
            end_tokens=end_tokens, forced=self._forced)


def nothing_allowed(generated: int) -> LlmcError:
    """The error if every token is forbidden after `generated` ones."""
    return LlmcError(f"no token is allowed after {generated} generated ones; forbid fewer in "
                     f"bad_words and logit_bias")


def probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution to sample from, float64 [vocab_size].

    Args:
        scores: processed logits [vocab_size].
        params: with a temperature above 0.
    """
    chances = np.zeros(len(scores))
    token_ids, weights = _candidates(scores, params)
    chances[token_ids] = weights / weights.sum()
    return chances


def _candidates(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be sampled: ids, int64 [kept], ascending, and weights, float64 [kept]."""
    if params.top_k:  # before temperature, which preserves the order: fewer tokens to process
        token_ids = logits_processors.top_k(scores, params.top_k)
        scores = scores[token_ids]
    else:
        token_ids = _all_tokens(len(scores))
    weights = logits_processors.weights(scores, params.temperature)
    for warper, value, neutral in ((logits_processors.top_p, params.top_p, 1),
                                   (logits_processors.min_p, params.min_p, 0),
                                   (logits_processors.typical_p, params.typical_p, 1)):
        if value != neutral:
            kept = warper(weights, value)
            token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights


@lru_cache(maxsize=4)
def _all_tokens(vocab_size: int) -> np.ndarray:
    token_ids = np.arange(vocab_size)
    token_ids.flags.writeable = False
    return token_ids


@lru_cache(maxsize=1024)
def _random_numbers(seed: int, block: int) -> np.ndarray:
    """Random numbers from 0 to 1 of tokens from `block * _BLOCK` on, float64 [_BLOCK].

    Philox generates four words per counter; the first is used.
    """
    generator = np.random.Philox(key=seed, counter=block * _BLOCK)
    return generator.random_raw(4 * _BLOCK)[::4] * 2.0**-64


def _draw(weights: np.ndarray, number: float) -> int:
    """The first index whose cumulative weight exceeds `number` times the total."""
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    target = number * ends[-1]
    block = _first_above(ends, target)
    start = block * _BLOCK
    sums = np.cumsum(weights[start:start + _BLOCK])
    return start + _first_above(sums, target - (ends[block - 1] if block else 0))


def _first_above(sums: np.ndarray, target: float) -> int:
    """The first index whose sum exceeds the target.

    Rounding may put the target at or after the last sum; then it is the last index with a weight.
    """
    return int(min(np.searchsorted(sums, target, side="right"), np.searchsorted(sums, sums[-1])))


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one position: the float64 log-softmax of the unprocessed logits.

    Args:
        chosen: log-probability of the sampled token.
        top: the most likely tokens as (token id, log-probability), in descending order.
        rank: rank of a prompt token among all tokens, from 1; the lowest of equal ones.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None

    @staticmethod
    def of(logits: np.ndarray, token: int, count: int) -> Logprobs:
        """Log-probabilities of a sampled token and of the `count` most likely.

        Args:
            logits: [vocab_size].
        """
        peak = float(logits.max())
        shift = peak + math.log(logits_processors.weights(logits).sum())
        top = _most_likely(logits, count)
        return Logprobs(float(logits[token]) - shift,
                        tuple((other, float(logits[other]) - shift) for other in top))

    @staticmethod
    def of_prompt(logits: np.ndarray, token: int, count: int) -> Logprobs:
        """Log-probabilities of a prompt token, with its rank.

        Args:
            logits: [vocab_size] of the position before. NaN or infinite logits give NaN.
        """
        if not math.isfinite(logits.max()):
            return Logprobs(math.nan, ())
        result = Logprobs.of(logits, token, count)
        return replace(result, rank=int((logits > logits[token]).sum()) + 1)


def _most_likely(logits: np.ndarray, count: int) -> list[int]:
    """Token ids, most likely first; of equal ones the lowest id."""
    if not count:
        return []
    near = logits_processors.top_k(logits, count)
    ids: list[int] = near[np.argsort(-logits[near], kind="stable")][:count].tolist()
    return ids
