"""What sampling parameters do to logits, as an engine that chooses tokens itself, on a GPU, reads
it: records as csrc/kernels/sampling/state.h declares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

MAX_LOGPROBS = 20  # likeliest tokens whose log-probabilities such an engine tells
SLOT_PARAMS = np.dtype([
    ("presence", np.float64), ("frequency", np.float64), ("repetition", np.float32),
    ("min_tokens", np.int32), ("lists", np.int32), ("num_biases", np.int32), ("num_ends", np.int32),
    ("num_forced", np.int32), ("num_words", np.int32), ("keeps_history", np.int32)], align=True)
LOGPROBS = np.dtype([("chosen", np.float32), ("top", np.float32, MAX_LOGPROBS),
                     ("tokens", np.int32, MAX_LOGPROBS), ("rank", np.int32)])


@dataclass(frozen=True)
class SlotParams:
    """One sequence's: a record of SLOT_PARAMS, and its lists, int32. Where these will lie, `lists`
    in the record, is not known yet.
    """

    record: np.ndarray
    lists: np.ndarray

    @staticmethod
    def of(*, repetition: float, presence: float, frequency: float, biased: np.ndarray,
           biases: np.ndarray, bad_words: Sequence[Sequence[int]], min_tokens: int,
           end_tokens: np.ndarray, forced: Mapping[int, Sequence[int]]) -> SlotParams | None:
        """None where nothing is done to the logits."""
        if not min_tokens:
            end_tokens = end_tokens[:0]
        keeps_history = repetition != 1 or presence != 0 or frequency != 0 or \
            any(len(word) > 1 for word in bad_words)
        turns = [turn for turn, tokens in forced.items() for _ in tokens]
        if not keeps_history and not len(biased) and not len(bad_words) and not len(end_tokens) \
                and not turns:
            return None
        fixed = 2 * len(biased) + len(end_tokens) + 2 * len(turns)
        starts = accumulate(map(len, bad_words),
                            initial=fixed + len(bad_words) + 1) if bad_words else ()
        lists = [biased, biases.astype(np.float32).view(np.int32), end_tokens,
                 [token for tokens in forced.values() for token in tokens], turns, [*starts],
                 *bad_words]
        record = np.array((presence, frequency, repetition, min_tokens, 0, len(biased),
                           len(end_tokens), len(turns), len(bad_words), keeps_history), SLOT_PARAMS)
        return SlotParams(record, np.concatenate([np.asarray(part, np.int32) for part in lists]))
