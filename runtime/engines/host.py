"""Choosing tokens on the host, for devices that make logits alone."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.step import LAST, EngineLimits, Step, StepOutput
from llmc.runtime.sampling import logits_processors
from llmc.runtime.sampling.beam_search import Candidates, log_softmax
from llmc.runtime.sampling.sampler import (
    NONE_ALLOWED,
    NOT_FINITE,
    Logprobs,
    NonFiniteLogits,
    Sampler,
)


class RankGroup(Protocol):
    """What makes logits of a step in which no token is LAST, float32 [num_logits, vocab_size]."""

    def compute(self, step: Step) -> np.ndarray:
        ...

    def close(self) -> None:
        ...


class HostSampling:
    """See `Engine`: a step is done when `submit` returns."""

    def __init__(self, ranks: RankGroup, limits: EngineLimits) -> None:
        self._ranks, self.limits = ranks, limits
        self._samplers: dict[int, Sampler | None] = {}  # by slot
        self._tokens: dict[int, list[int]] = {}
        self._made: dict[int, StepOutput] = {}
        self._tickets = 0

    def submit(self, step: Step) -> int:
        for slot, state in step.admit.items():
            self._samplers[slot], self._tokens[slot] = state.sampler, list(state.tokens)
        for index in np.flatnonzero(step.token_ids == LAST).tolist():
            sequence = int(np.searchsorted(step.cu_seqlens, index, side="right")) - 1
            step.token_ids[index] = self._tokens[int(step.slots[sequence])][-1]
        logits = self._ranks.compute(step)
        self._tickets += 1
        self._made[self._tickets] = self._choose(step, logits)
        return self._tickets

    def _choose(self, step: Step, logits: np.ndarray) -> StepOutput:
        if step.logits == "all":
            return StepOutput(np.empty(0, np.int64), [], None, logits)
        scored: list[Logprobs] = []
        if len(step.scored):
            logits, scored = self._score(step, logits)
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        finite = np.isfinite(logits.max(axis=1)).tolist()  # the maximum is NaN where any logit is
        for row, (slot, own) in enumerate(zip(step.slots[step.sample].tolist(), logits,
                                              strict=True)):
            sampler = self._samplers.get(slot)
            token, count = NONE_ALLOWED, None
            if sampler is not None and not finite[row]:
                token = NOT_FINITE
            elif sampler is not None:
                allowed = logits_processors.allow(own, step.masks[slot]) \
                    if slot in step.masks else own
                token, count = self._token(sampler, allowed, slot), sampler.params.logprobs
            tokens.append(token)
            logprobs.append(None if count is None or token < 0
                            else Logprobs.of(own, token, count))
        candidates = Candidates.of(log_softmax(logits), step.candidates) if step.candidates \
            else None
        return StepOutput(np.array(tokens, np.int64), logprobs, candidates,
                       logits if step.logits == "sampled" else None, scored)

    def _score(self, step: Step, logits: np.ndarray) -> tuple[np.ndarray, list[Logprobs]]:
        """Part the logits of a step into those of sampled rows, and what scored ones come to."""
        own, wanted = step.logits_indices, step.scored
        made = [Logprobs.of_prompt(logits[row], target, count) for row, target, count in zip(
            np.searchsorted(own, wanted.rows).tolist(), wanted.targets.tolist(),
            wanted.counts.tolist(), strict=True)]
        return logits[np.searchsorted(own, step.sampled_rows)], made

    def _token(self, sampler: Sampler, logits: np.ndarray, slot: int) -> int:
        """The next token, which is kept; or why there is none."""
        tokens = self._tokens[slot]
        try:
            tokens.append(sampler(logits, tokens))
        except NonFiniteLogits:
            return NOT_FINITE
        except LlmcError:
            return NONE_ALLOWED
        return tokens[-1]

    def collect(self, ticket: int) -> StepOutput:
        return self._made.pop(ticket)

    def close(self) -> None:
        self._ranks.close()
