"""Sampling on the host, for engines that return only logits."""

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
    """The ranks of a replica, which compute logits."""

    def compute(self, step: Step) -> np.ndarray:
        """Compute the logits of a step without LAST, float32 [num_logits, vocab_size]."""
        ...

    def close(self) -> None:
        ...


class HostSampling:
    """An `Engine` that samples on the host. A step has ended when `submit` returns."""

    def __init__(self, ranks: RankGroup, limits: EngineLimits) -> None:
        self._ranks, self.limits = ranks, limits
        self._samplers: dict[int, Sampler | None] = {}  # by slot
        self._tokens: dict[int, list[int]] = {}
        self._outputs: dict[int, StepOutput] = {}
        self._tickets = 0

    def submit(self, step: Step) -> int:
        for slot, state in step.admit.items():
            self._samplers[slot], self._tokens[slot] = state.sampler, list(state.tokens)
        for index in np.flatnonzero(step.token_ids == LAST).tolist():
            sequence = int(np.searchsorted(step.cu_seqlens, index, side="right")) - 1
            step.token_ids[index] = self._tokens[int(step.slots[sequence])][-1]
        logits = self._ranks.compute(step)
        self._tickets += 1
        self._outputs[self._tickets] = self._sample(step, logits)
        return self._tickets

    def _sample(self, step: Step, logits: np.ndarray) -> StepOutput:
        if step.logits == "all":
            return StepOutput(np.empty(0, np.int64), [], None, logits)
        scored: list[Logprobs] = []
        if len(step.scored):
            logits, scored = self._score(step, logits)
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        finite = np.isfinite(logits.max(axis=1)).tolist()  # the maximum is NaN if any logit is
        for row, (slot, row_logits) in enumerate(zip(step.slots[step.sample].tolist(), logits,
                                                     strict=True)):
            sampler = self._samplers.get(slot)
            token, count = NONE_ALLOWED, None
            if sampler is not None and not finite[row]:
                token = NOT_FINITE
            elif sampler is not None:
                allowed = logits_processors.allow(row_logits, step.masks[slot]) \
                    if slot in step.masks else row_logits
                token, count = self._token(sampler, allowed, slot), sampler.params.logprobs
            tokens.append(token)
            logprobs.append(None if count is None or token < 0
                            else Logprobs.of(row_logits, token, count))
        candidates = Candidates.of(log_softmax(logits), step.candidates) if step.candidates \
            else None
        return StepOutput(np.array(tokens, np.int64), logprobs, candidates,
                       logits if step.logits == "sampled" else None, scored)

    def _score(self, step: Step, logits: np.ndarray) -> tuple[np.ndarray, list[Logprobs]]:
        """Separate the logits of sampled rows, and score the prompt tokens."""
        indices, requested = step.logits_indices, step.scored
        scores = [Logprobs.of_prompt(logits[row], target, count) for row, target, count in zip(
            np.searchsorted(indices, requested.rows).tolist(), requested.targets.tolist(),
            requested.counts.tolist(), strict=True)]
        return logits[np.searchsorted(indices, step.sampled_rows)], scores

    def _token(self, sampler: Sampler, logits: np.ndarray, slot: int) -> int:
        """Sample the next token and append it; on failure return the reason."""
        tokens = self._tokens[slot]
        try:
            tokens.append(sampler(logits, tokens))
        except NonFiniteLogits:
            return NOT_FINITE
        except LlmcError:
            return NONE_ALLOWED
        return tokens[-1]

    def collect(self, ticket: int) -> StepOutput:
        return self._outputs.pop(ticket)

    def close(self) -> None:
        self._ranks.close()
