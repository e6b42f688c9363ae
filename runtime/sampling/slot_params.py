"""Logits processing parameters in the binary format of engines that sample on a GPU.

The records are those of csrc/kernels/sampling/state.h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

MAX_LOGPROBS = 20  # most likely tokens whose log-probabilities such an engine returns
SLOT_PARAMS = np.dtype([
    ("presence", np.float64), ("frequency", np.float64), ("repetition", np.float32),
    ("min_tokens", np.int32), ("lists", np.int32), ("num_biases", np.int32), ("num_ends", np.int32),
    ("num_forced", np.int32), ("num_words", np.int32), ("keeps_history", np.int32)], align=True)
LOGPROBS = np.dtype([("chosen", np.float32), ("top", np.float32, MAX_LOGPROBS),
                     ("tokens", np.int32, MAX_LOGPROBS), ("rank", np.int32)])


@dataclass(frozen=True)
class SlotParams:
    """Parameters of one slot.

    Args:
        record: SLOT_PARAMS; `lists`, the position of the lists, is set on upload.
        lists: int32, the lists of biases, EOS tokens, forced tokens and bad words.
    """

    record: np.ndarray
    lists: np.ndarray

    @staticmethod
    def of(*, repetition: float, presence: float, frequency: float, biased: np.ndarray,
           biases: np.ndarray, bad_words: Sequence[Sequence[int]], min_tokens: int,
           end_tokens: np.ndarray, forced: Mapping[int, Sequence[int]]) -> SlotParams | None:
        """Encode parameters; None if no logits change."""
        if not min_tokens:
            end_tokens = end_tokens[:0]
        keeps_history = repetition != 1 or presence != 0 or frequency != 0 or \
            any(len(word) > 1 for word in bad_words)
        steps = [step for step, tokens in forced.items() for _ in tokens]
        if not keeps_history and not len(biased) and not len(bad_words) and not len(end_tokens) \
                and not steps:
            return None
        fixed = 2 * len(biased) + len(end_tokens) + 2 * len(steps)
        starts = accumulate(map(len, bad_words),
                            initial=fixed + len(bad_words) + 1) if bad_words else ()
        lists = [biased, biases.astype(np.float32).view(np.int32), end_tokens,
                 [token for tokens in forced.values() for token in tokens], steps, [*starts],
                 *bad_words]
        record = np.array((presence, frequency, repetition, min_tokens, 0, len(biased),
                           len(end_tokens), len(steps), len(bad_words), keeps_history), SLOT_PARAMS)
        return SlotParams(record, np.concatenate([np.asarray(part, np.int32) for part in lists]))
