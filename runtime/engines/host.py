"""Sampling on the host, for engines that return only logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    """An `Engine` that samples on the host. A step has ended when `submit` returns.

    Args:
        ranks: compute logits.
        limits: of the engine.
        propose: runs the draft model after a step with `Step.propose`; returns `StepOutput.drafts`.
        pool: runs a step that asks for pooled rows; returns `StepOutput.pooled`.
    """

    def __init__(self, ranks: RankGroup, limits: EngineLimits,
                 propose: Callable[[Step, StepOutput], np.ndarray] | None = None,
                 pool: Callable[[Step], list[np.ndarray]] | None = None) -> None:
        self._ranks, self.limits, self._propose, self._pool = ranks, limits, propose, pool
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
        if step.logits == "pooled":
            assert self._pool is not None
            output = StepOutput(np.full(len(step.sample), NONE_ALLOWED),
                                [None] * len(step.sample), pooled=self._pool(step))
        else:
            output = self._sample(step, self._ranks.compute(step))
        if self._propose is not None and step.propose is not None:
            output = replace(output, drafts=self._propose(step, output))
        self._tickets += 1
        self._outputs[self._tickets] = output
        return self._tickets

    def _sample(self, step: Step, logits: np.ndarray) -> StepOutput:
        if step.logits == "all":
            return StepOutput(np.empty(0, np.int64), [], None, logits)
        scored: list[Logprobs] = []
        if len(step.scored):
            logits, scored = self._score(step, logits)
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        counts = step.sampled_counts.tolist()
        finite = np.isfinite(logits.max(axis=1)).tolist()  # the maximum is NaN if any logit is
        start, accepted = 0, []
        for sequence, count in zip(step.sample.tolist(), counts, strict=True):
            rows = slice(start, start + count)
            end = int(step.cu_seqlens[sequence + 1])
            drafts = step.token_ids[end - count + 1:end].tolist()
            sampled = self._verify(step, int(step.slots[sequence]), logits[rows], finite[rows],
                                   drafts)
            tokens += [token for token, _ in sampled]
            logprobs += [probabilities for _, probabilities in sampled]
            accepted.append(len(sampled))
            start += count
        candidates = Candidates.of(log_softmax(logits), step.candidates) if step.candidates \
            else None
        return StepOutput(np.array(tokens, np.int64), logprobs, candidates,
                       logits if step.logits == "sampled" else None, scored,
                       np.array(accepted, np.int32) if len(step.num_drafts) else None)

    def _verify(self, step: Step, slot: int, logits: np.ndarray, finite: list[bool],
                drafts: list[int]) -> list[tuple[int, Logprobs | None]]:
        """Sample after the last token and after each draft, as long as the drafts are right.

        Args:
            logits: [1 + num_drafts, vocab_size].
            finite: [1 + num_drafts], whether the logits are.
        """
        sampler = self._samplers.get(slot)
        if sampler is None:
            return [(NONE_ALLOWED, None)]
        masks = step.masks.get(slot)
        sampled = list[tuple[int, Logprobs | None]]()
        for row, row_logits in enumerate(logits):
            token = NOT_FINITE
            if finite[row]:
                allowed = row_logits if masks is None else logits_processors.allow(
                    row_logits, masks if masks.ndim == 1 else masks[row])
                token = self._token(sampler, allowed, slot)
            sampled.append((token, None if token < 0 or sampler.params.logprobs is None
                            else sampler.logprobs(row_logits, token, self._tokens[slot][:-1])))
            if row < len(drafts) and token != drafts[row]:
                break
        return sampled

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
