"""What sampling parameters do to logits, as an engine that chooses tokens itself, on a GPU, reads
it: records as csrc/kernels/launch.h declares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

MAX_LOGPROBS = 20  # likeliest tokens whose log-probabilities such an engine tells
RULE = np.dtype([("presence", np.float64), ("frequency", np.float64), ("repetition", np.float32),
                 ("min_tokens", np.int32), ("lists", np.int32), ("num_biases", np.int32),
                 ("num_ends", np.int32), ("num_forced", np.int32), ("num_words", np.int32),
                 ("remembers", np.int32)], align=True)
LOGPROBS = np.dtype([("chosen", np.float32), ("top", np.float32, MAX_LOGPROBS),
                     ("tokens", np.int32, MAX_LOGPROBS)])

_PLAIN = np.array((0, 0, 1, 0, 0, 0, 0, 0, 0, 0), RULE)
_PLAIN_LISTS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Rule:
    """One sequence's: a RULE and its lists, int32, of which `lists` in it is not the place yet."""

    record: np.ndarray
    lists: np.ndarray

    @staticmethod
    def of(*, repetition: float, presence: float, frequency: float, biased: np.ndarray,
           biases: np.ndarray, bad_words: Sequence[Sequence[int]], min_tokens: int,
           end_tokens: np.ndarray, forced: Mapping[int, Sequence[int]]) -> Rule | None:
        """None where nothing is done to the logits."""
        if not min_tokens:
            end_tokens = end_tokens[:0]
        remembers = repetition != 1 or presence != 0 or frequency != 0 or \
            any(len(word) > 1 for word in bad_words)
        turns = [turn for turn, tokens in forced.items() for _ in tokens]
        if not remembers and not len(biased) and not len(bad_words) and not len(end_tokens) \
                and not turns:
            return None
        fixed = 2 * len(biased) + len(end_tokens) + 2 * len(turns)
        starts = accumulate(map(len, bad_words),
                            initial=fixed + len(bad_words) + 1) if bad_words else ()
        lists = [biased, biases.astype(np.float32).view(np.int32), end_tokens,
                 [token for tokens in forced.values() for token in tokens], turns, [*starts],
                 *bad_words]
        record = np.array((presence, frequency, repetition, min_tokens, 0, len(biased),
                           len(end_tokens), len(turns), len(bad_words), remembers), RULE)
        return Rule(record, np.concatenate([np.asarray(part, np.int32) for part in lists]))


@dataclass(frozen=True)
class Rules:
    """A batch's: RULE [batch], and the lists of all, int32."""

    rows: np.ndarray
    lists: np.ndarray

    @staticmethod
    def of(rules: Sequence[Rule | None]) -> Rules | None:
        """None where no sequence has one."""
        if not any(rules):
            return None
        rows = np.stack([_PLAIN if rule is None else rule.record for rule in rules])
        lists = [_PLAIN_LISTS if rule is None else rule.lists for rule in rules]
        rows["lists"] = np.cumsum([0, *map(len, lists[:-1])])
        return Rules(rows, np.concatenate(lists))

    @property
    def remember(self) -> bool:
        """Whether any depends on the tokens before."""
        return bool(self.rows["remembers"].any())
