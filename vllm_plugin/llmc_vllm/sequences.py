"""Conversion of vLLM's scheduler output to llmc's steps, and of their results to vLLM's."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
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
class _Input:
    """New tokens of a sequence in a step, the last `num_drafts` of them drafts."""

    sequence: Sequence
    tokens: list[int]
    num_drafts: int

    @property
    def reaches_the_end(self) -> bool:
        """Whether a token is sampled after them."""
        return self.sequence.computed + len(self.tokens) >= len(self.sequence.tokens)

    @property
    def following(self) -> int:
        """The token after them; -1 if it is sampled."""
        end = self.sequence.computed + len(self.tokens)
        return -1 if self.reaches_the_end else self.sequence.tokens[end]


def draft_room(limits: EngineLimits, batch_size: int) -> int:
    """Return the number of drafts that a step of `batch_size` sequences has room for."""
    return max(min(limits.max_draft_tokens, limits.max_logits - batch_size), 0)


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
        self._limits, self._vocab_size, self._sampler = limits, vocab_size, sampler
        self._all: dict[str, Sequence] = {}

    def plan(self, scheduled: Any) -> list[Part]:
        """Convert a SchedulerOutput to steps, which must run in this order."""
        self._update(scheduled)
        copies = [(copy.src_block_id, copy.dst_block_id)
                  for copy in getattr(scheduled, "kv_cache_block_copies", None) or ()]
        parts = []
        drafts = scheduled.num_spec_tokens_to_schedule if self._limits.proposes else None
        for wave in self._waves(self._inputs(scheduled)):
            parts.append(self._part(wave, copies, drafts))
            copies = []
        return parts

    def _inputs(self, scheduled: Any) -> list[_Input]:
        """Return the new tokens of each sequence.

        vLLM pads drafts with -1. Drafts that the engine has no room for are not verified either.
        """
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        room, inputs = draft_room(self._limits, len(counts)), []
        for request_id, count in counts.items():
            sequence, padded = self._all[request_id], drafts.get(request_id, [])
            kept = list(takewhile(lambda token: token >= 0, padded))[:room]
            room -= len(kept)
            end = sequence.computed + count - len(padded)
            inputs.append(_Input(sequence, [*sequence.tokens[sequence.computed:end], *kept],
                                 len(kept)))
        return inputs

    def _waves(self, inputs: list[_Input]) -> list[list[_Input]]:
        """Group inputs into consecutive steps.

        vLLM lets a sequence share a block that another fills in the same step. llmc's engine must
        have filled it in an earlier step.
        """
        size, waves = self._limits.block_size, list[list[_Input]]()
        wave_by_block: dict[int, int] = {}  # waves by block
        for own in inputs:
            seq = own.sequence
            shared = seq.blocks[:seq.computed // size]
            wave = max((wave_by_block[block] + 1 for block in shared if block in wave_by_block),
                       default=0)
            wave_by_block.update((block, wave) for block in seq.blocks[
                seq.computed // size:-(-(seq.computed + len(own.tokens)) // size)])
            if wave == len(waves):
                waves.append([])
            waves[wave].append(own)
        return waves

    def _part(self, wave: list[_Input], copies: list[tuple[int, int]], drafts: int | None) -> Part:
        """Return the step of a wave.

        Args:
            wave: the inputs.
            copies: blocks (from, to) to copy before it.
            drafts: drafts of each sequence by the compiled draft model; None: it is not loaded.
        """
        admit = {}
        for seq in (own.sequence for own in wave):
            if seq.slot is None:
                seq.slot = heapq.heappop(self._slots)
                admit[seq.slot] = SamplingState(seq.sampler, tuple(seq.tokens[seq.prompt_len:]))
        longest = self._limits.longest_first
        wave.sort(key=lambda own: (len(own.tokens) > 1, not own.num_drafts,
                                   -own.sequence.computed if longest else own.sequence.slot))
        sequences = [own.sequence for own in wave]
        sampled = [(index, own) for index, own in enumerate(wave) if own.reaches_the_end]
        return Part(Step.of(
            [own.tokens for own in wave], [seq.computed for seq in sequences],
            [seq.blocks for seq in sequences],
            [seq.slot for seq in sequences if seq.slot is not None],
            sample=[index for index, _ in sampled], admit=admit,
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logits="sampled" if any(own.sequence.params.logprobs is not None
                                    for _, own in sampled) else "none",
            masks={own.sequence.slot: np.tile(own.sequence.mask, (1 + own.num_drafts, 1))
                   for _, own in sampled if own.sequence.mask is not None},
            num_drafts=[own.num_drafts for own in wave], propose=drafts,
            next_tokens=np.array([own.following for own in wave] if drafts is not None else [],
                                 np.int64)), sequences)

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


def grammar_masks(grammar: Any, drafts: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """Return the token masks of vLLM's GrammarOutput, if any, by request id.

    Args:
        drafts: as scheduled; a request has a mask for each, and one more.
    """
    if grammar is None:
        return {}
    names = grammar.structured_output_request_ids
    ends = np.cumsum([1 + len(drafts.get(name, ())) for name in names])
    return dict(zip(names, np.split(grammar.grammar_bitmask.view(np.uint32), ends[:-1]),
                    strict=True))


def with_masks(part: Part, masks: Mapping[str, np.ndarray]) -> Step:
    """Return the step of a part with these token masks of its requests; see `grammar_masks`."""
    counts = part.step.sampled_counts.tolist()
    return replace(part.step, masks={**part.step.masks, **{
        seq.slot: masks[seq.request_id][:count]
        for seq, count in zip(part.chosen, counts, strict=True)
        if seq.request_id in masks and seq.slot is not None}})


class Pending:
    """Placeholders for the next tokens of a part's sequences."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._places = [(seq.tokens, len(seq.tokens)) for seq in part.chosen]
        for tokens, _ in self._places:
            tokens.append(LAST)

    def settle(self, sampled: StepOutput) -> dict[str, list[int]]:
        """Replace the placeholders with the sampled tokens; return these by request."""
        tokens_by_request = {}
        for seq, (tokens, place), own in zip(self.part.chosen, self._places, split(sampled),
                                             strict=True):
            if NOT_FINITE in own:  # vLLM has no way to fail a request here
                _LOGGER.error("request %s: the logits are NaN or infinite; check the checkpoint's "
                              "weights, or compile with another --dtype", seq.request_id)
                own = [0 if token == NOT_FINITE else token for token in own]
            assert min(own) >= 0, f"the masks of request {seq.request_id} allow no token"
            tokens[place:place + 1] = tokens_by_request[seq.request_id] = own
        return tokens_by_request


def split(sampled: StepOutput) -> list[list[int]]:
    """Return the tokens of each sampled sequence."""
    if sampled.counts is None:
        return [[token] for token in sampled.tokens.tolist()]
    ends = np.cumsum(sampled.counts)
    return [own.tolist() for own in np.split(sampled.tokens, ends[:-1])]


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
        self._all: dict[str, list[_Ranked]] = {}

    def add(self, part: Part, sampled: StepOutput) -> None:
        if sampled.logits is None:
            return
        starts = accumulate(part.step.sampled_counts.tolist(), initial=0)
        for seq, tokens, start in zip(part.chosen, split(sampled), starts, strict=False):
            count = seq.params.logprobs
            if count is not None:
                self._all[seq.request_id] = [
                    self._ranked(token, logits, self._vocab_size if count == -1 else count)
                    for token, logits in zip(tokens, sampled.logits[start:], strict=False)]

    @staticmethod
    def _ranked(token: int, logits: np.ndarray, count: int) -> _Ranked:
        return _Ranked(token, Logprobs.of(logits, token, count),
                       int(np.count_nonzero(logits > logits[token])))

    def rows(self, request_ids: list[str]) -> \
            tuple[np.ndarray, np.ndarray, np.ndarray, list[int]] | None:
        """Return the contents of vLLM's LogprobsLists; None if no request has logprobs.

        Returns:
            Tokens and log-probabilities [num_rows, 1 + maximum logprobs], with the sampled token
            first, its rank from 1 [num_rows], and the first row of each request.
        """
        if not self._all:
            return None
        entries = [entry for name in request_ids for entry in self._all.get(name, ())]
        starts = accumulate((len(self._all.get(name, ())) for name in request_ids), initial=0)
        width = 1 + max(len(entry.found.top) for entry in entries)
        tokens = np.zeros((len(entries), width), np.int64)
        values = np.full((len(entries), width), -np.inf, np.float32)
        for row, entry in enumerate(entries):
            pairs = [(entry.token, entry.found.chosen), *entry.found.top]
            tokens[row, :len(pairs)], values[row, :len(pairs)] = zip(*pairs, strict=True)
        ranks = np.array([entry.num_above + 1 for entry in entries], np.int64)
        return tokens, values, ranks, [*starts]
