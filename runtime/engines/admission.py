"""Admitted sequences in the binary format of engines that sample on a GPU.

The records are those of csrc/kernels/sampling/state.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmc.runtime.core.step import SamplingState
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.slot_params import SLOT_PARAMS

SLOT_STATE = np.dtype([
    ("seed", np.uint64), ("drawn", np.int64), ("temperature", np.float32), ("top_p", np.float32),
    ("min_p", np.float32), ("typical_p", np.float32), ("top_k", np.int32), ("logprobs", np.int32),
    ("processing", SLOT_PARAMS), ("prompt_lookup", np.int32)], align=True)

_NO_PROCESSING = np.zeros((), SLOT_PARAMS)
_NO_PROCESSING["repetition"] = 1
_NO_TOKENS = np.empty(0, np.int32)
_GREEDY = Sampler(SamplingParams())  # of slots whose sampled token is not used


@dataclass(frozen=True)
class Admissions:
    """Admissions of n sequences to slots.

    Args:
        slots: int32 [n].
        states: SLOT_STATE [n]; `lists` in their `processing` is the offset of their lists.
        prompts, lengths: int32 [n], prompt tokens and all tokens of sequences whose processing or
            prompt lookup needs their history, 0 of others.
        tokens: int32, the histories of these sequences, concatenated.
        lists: int32, the lists of all sequences, concatenated.
    """

    slots: np.ndarray
    states: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    lists: np.ndarray

    @staticmethod
    def of(admit: Mapping[int, SamplingState]) -> Admissions:
        if not admit:
            return NO_ADMISSIONS
        states = np.empty(len(admit), SLOT_STATE)
        lists: list[np.ndarray] = []
        histories: list[np.ndarray] = []
        prompts = np.zeros(len(admit), np.int32)
        offset = 0
        for i, state in enumerate(admit.values()):
            sampler = state.sampler or _GREEDY
            processing = sampler.processing
            states[i] = slot_state(sampler, len(state.tokens))
            states[i]["processing"]["lists"] = offset
            states[i]["prompt_lookup"] = state.prompt_lookup
            lists.append(_NO_TOKENS if processing is None else processing.lists)
            offset += len(lists[-1])
            histories.append(_NO_TOKENS)
            if state.prompt_lookup or (
                    processing is not None and processing.record["keeps_history"]):
                prompts[i] = len(sampler.prompt)
                histories[i] = np.concatenate([sampler.prompt, state.tokens]) \
                    .astype(np.int32)
        return Admissions(np.fromiter(admit, np.int32, len(admit)), states, prompts,
                          np.array([*map(len, histories)], np.int32), np.concatenate(histories),
                          np.concatenate(lists))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """The engine's arguments; records are bytes."""
        return (self.slots, self.states.view(np.uint8), self.prompts, self.lengths, self.tokens,
                self.lists)


def slot_state(sampler: Sampler, drawn: int) -> np.ndarray:
    """A record of SLOT_STATE for a sequence that has generated `drawn` tokens."""
    params, processing = sampler.params, sampler.processing
    return np.array((sampler.seed, drawn, params.temperature, params.top_p, params.min_p,
                     params.typical_p, min(params.top_k, 2**31 - 1),
                     -1 if params.logprobs is None else params.logprobs,
                     _NO_PROCESSING if processing is None else processing.record, False),
                    SLOT_STATE)


NO_ADMISSIONS = Admissions(_NO_TOKENS, np.empty(0, SLOT_STATE), _NO_TOKENS, _NO_TOKENS, _NO_TOKENS,
                           _NO_TOKENS)
