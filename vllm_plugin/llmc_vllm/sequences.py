"""Conversion of vLLM's scheduler output to llmc's steps, and of their results to vLLM's."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmc.runtime.core.step import LAST, EngineLimits, SamplingState, Step, StepOutput
from llmc.runtime.sampling.sampler import NOT_FINITE, Logprobs, Sampler
from llmc_vllm.parameters import allowed_mask

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class Sequence:
    """A request that vLLM runs.

    Args:
        request_id: vLLM's id.
        params: vLLM's SamplingParams.
        sampler: of the request.
        tokens: prompt and generated tokens; LAST for a token that is in flight.
        prompt_len: number of prompt tokens.
        blocks: KV-cache blocks, in order.
        computed: number of tokens whose keys and values are in the KV cache.
        mask: see `allowed_mask`.
        slot: index of its sampling state; None before admission and after preemption.
    """

    request_id: str
    params: Any
    sampler: Sampler
    tokens: list[int]
    prompt_len: int
    blocks: list[int]
    computed: int
    mask: np.ndarray | None
    slot: int | None = None


@dataclass(frozen=True)
class Part:
    """A step of llmc's engine, as a part of a step of vLLM's scheduler."""

    step: Step
    sequences: list[Sequence]

    @property
    def chosen(self) -> list[Sequence]:
        """The sampled sequences, in the order of `step.sample`."""
        return [self.sequences[index] for index in self.step.sample.tolist()]


class Sequences:
    """All requests of a worker that have not finished.

    Args:
        limits: of the engine.
        vocab_size: of the model.
        sampler: builds a sampler from vLLM's SamplingParams, a prompt and a request id.
    """

    def __init__(self, limits: EngineLimits, vocab_size: int,
                 sampler: Callable[[Any, list[int], str], Sampler]) -> None:
        self._slots = list(range(limits.max_slots))
        self._block_size, self._longest_first = limits.block_size, limits.longest_first
        self._vocab_size, self._sampler = vocab_size, sampler
        self._all: dict[str, Sequence] = {}

    def plan(self, scheduled: Any) -> list[Part]:
        """Convert a SchedulerOutput to steps, which must run in this order."""
        self._update(scheduled)
        copies = [(copy.src_block_id, copy.dst_block_id)
                  for copy in getattr(scheduled, "kv_cache_block_copies", None) or ()]
        parts = []
        for wave in self._waves(scheduled.num_scheduled_tokens):
            parts.append(self._part(wave, copies))
            copies = []
        return parts

    def _waves(self, counts: Mapping[str, int]) -> list[list[tuple[Sequence, int]]]:
        """Group sequences, with their numbers of new tokens, into consecutive steps.

        vLLM lets a sequence share a block that another fills in the same step. llmc's engine must
        have filled it in an earlier step.
        """
        size, waves = self._block_size, list[list[tuple[Sequence, int]]]()
        wave_by_block: dict[int, int] = {}  # waves by block
        for request_id, count in counts.items():
            seq = self._all[request_id]
            shared = seq.blocks[:seq.computed // size]
            wave = max((wave_by_block[block] + 1 for block in shared if block in wave_by_block),
                       default=0)
            wave_by_block.update((block, wave) for block in
                             seq.blocks[seq.computed // size:-(-(seq.computed + count) // size)])
            if wave == len(waves):
                waves.append([])
            waves[wave].append((seq, count))
        return waves

    def _part(self, wave: list[tuple[Sequence, int]], copies: list[tuple[int, int]]) -> Part:
        admit = {}
        for seq, _ in wave:
            if seq.slot is None:
                seq.slot = heapq.heappop(self._slots)
                admit[seq.slot] = SamplingState(seq.sampler, tuple(seq.tokens[seq.prompt_len:]))
        wave.sort(key=lambda part: (part[1] > 1, -part[0].computed if self._longest_first
                                    else part[0].slot))
        sequences = [seq for seq, _ in wave]
        sampled = [seq for seq, count in wave if seq.computed + count >= len(seq.tokens)]
        return Part(Step.of(
            [seq.tokens[seq.computed:seq.computed + count] for seq, count in wave],
            [seq.computed for seq in sequences], [seq.blocks for seq in sequences],
            [seq.slot for seq in sequences if seq.slot is not None],
            sample=[index for index, seq in enumerate(sequences) if seq in sampled], admit=admit,
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logits="sampled" if any(seq.params.logprobs is not None for seq in sampled) else "none",
            masks={seq.slot: seq.mask for seq in sampled if seq.mask is not None}), sequences)

    def _update(self, scheduled: Any) -> None:
        """Update the sequences: preempted, finished, new, running and resumed ones."""
        for request_id in scheduled.preempted_req_ids or ():
            self._release_slot(self._all.get(request_id))
        for request_id in scheduled.finished_req_ids:
            self._release_slot(self._all.pop(request_id, None))
        for new in scheduled.scheduled_new_reqs:
            self._add(new)
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids,
                                                cached.num_computed_tokens, strict=True):
            sequence = self._all[request_id]
            if request_id in cached.resumed_req_ids:
                self._release_slot(sequence)
                sequence.blocks = []
                # vLLM may have dropped tokens that were in flight at preemption.
                sequence.tokens = list(cached.all_token_ids.get(request_id, sequence.tokens))
            sequence.blocks += blocks[0] if blocks else []
            sequence.computed = computed

    def _add(self, new: Any) -> None:
        """Add a new request, or one that resumes, as one of vLLM's model runners reports it."""
        self._release_slot(self._all.get(new.req_id))
        prompt = list(new.prompt_token_ids)
        self._all[new.req_id] = Sequence(
            new.req_id, new.sampling_params,
            self._sampler(new.sampling_params, prompt, new.req_id),
            list(new.prefill_token_ids or prompt), len(prompt), list(new.block_ids[0]),
            new.num_computed_tokens, allowed_mask(new.sampling_params, self._vocab_size))

    def _release_slot(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.slot is not None:
            heapq.heappush(self._slots, sequence.slot)
            sequence.slot = None


def with_grammar(part: Part, grammar: Any) -> Step:
    """Return the step of a part with the token masks of vLLM's GrammarOutput, if any."""
    if grammar is None:
        return part.step
    rows = dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))
    return replace(part.step, masks={**part.step.masks, **{
        seq.slot: rows[seq.request_id].view(np.uint32) for seq in part.chosen
        if seq.request_id in rows and seq.slot is not None}})


class Pending:
    """Placeholders for the next tokens of a part's sequences."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._places = [(seq.tokens, len(seq.tokens)) for seq in part.chosen]
        for tokens, _ in self._places:
            tokens.append(LAST)

    def settle(self, sampled: StepOutput) -> dict[str, int]:
        """Replace the placeholders with the sampled tokens; return these by request."""
        tokens_by_request = {}
        for seq, (tokens, place), token in zip(self.part.chosen, self._places,
                                               sampled.tokens.tolist(), strict=True):
            if token == NOT_FINITE:  # vLLM has no way to fail a request here
                _LOGGER.error("request %s: the logits are NaN or infinite; check the checkpoint's "
                              "weights, or compile with another --dtype", seq.request_id)
                token = 0
            assert token >= 0, f"the masks of request {seq.request_id} allow no token"
            tokens[place] = tokens_by_request[seq.request_id] = token
        return tokens_by_request


@dataclass(frozen=True)
class _Ranked:
    """Log-probabilities of a position, and the number of tokens above the sampled one."""

    token: int
    found: Logprobs
    num_above: int


class TokenLogprobs:
    """Log-probabilities of a step of vLLM, collected from its parts."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._all: dict[str, _Ranked] = {}

    def add(self, part: Part, sampled: StepOutput) -> None:
        if sampled.logits is None:
            return
        for seq, token, logits in zip(part.chosen, sampled.tokens.tolist(), sampled.logits,
                                      strict=True):
            count = seq.params.logprobs
            if count is not None:
                self._all[seq.request_id] = _Ranked(
                    token, Logprobs.of(logits, token, self._vocab_size if count == -1 else count),
                    int(np.count_nonzero(logits > logits[token])))

    def rows(self, request_ids: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the contents of vLLM's LogprobsLists; None if no request has logprobs.

        Returns:
            Tokens and log-probabilities [num_requests, 1 + maximum logprobs], with the sampled
            token first, and its rank from 1 [num_requests].
        """
        if not self._all:
            return None
        width = 1 + max(len(entry.found.top) for entry in self._all.values())
        tokens = np.zeros((len(request_ids), width), np.int64)
        values = np.full((len(request_ids), width), -np.inf, np.float32)
        ranks = np.zeros(len(request_ids), np.int64)
        for row, entry in enumerate(map(self._all.get, request_ids)):
            if entry is not None:
                pairs = [(entry.token, entry.found.chosen), *entry.found.top]
                tokens[row, :len(pairs)], values[row, :len(pairs)] = zip(*pairs, strict=True)
                ranks[row] = entry.num_above + 1
        return tokens, values, ranks
