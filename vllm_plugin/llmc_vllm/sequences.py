"""From what vLLM's scheduler says to llmc's steps, and from what those lead to back."""

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
        params: vLLM's SamplingParams.
        tokens: the prompt's and those generated; LAST for one that is under way.
        blocks: of the KV cache, in order.
        computed: tokens whose keys and values are there.
        mask: see `allowed_mask`.
        slot: None while it has none.
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
    """What an engine runs at once of what vLLM schedules at once: a step and its sequences."""

    step: Step
    sequences: list[Sequence]

    @property
    def chosen(self) -> list[Sequence]:
        """The sequences of `step.sample`."""
        return [self.sequences[index] for index in self.step.sample.tolist()]


class Sequences:
    """All requests that vLLM has told a worker of, and not yet ended.

    Args:
        sampler: makes one from vLLM's SamplingParams, a prompt and a request's id.
        limits: of the engine.
    """

    def __init__(self, limits: EngineLimits, vocab_size: int,
                 sampler: Callable[[Any, list[int], str], Sampler]) -> None:
        self._slots = list(range(limits.max_slots))
        self._block_size, self._longest_first = limits.block_size, limits.longest_first
        self._vocab_size, self._sampler = vocab_size, sampler
        self._all: dict[str, Sequence] = {}

    def plan(self, scheduled: Any) -> list[Part]:
        """The steps of a SchedulerOutput, to be run in this order."""
        self._follow(scheduled)
        copies = [(copy.src_block_id, copy.dst_block_id)
                  for copy in getattr(scheduled, "kv_cache_block_copies", None) or ()]
        parts = []
        for wave in self._waves(scheduled.num_scheduled_tokens):
            parts.append(self._part(wave, copies))
            copies = []
        return parts

    def _waves(self, counts: Mapping[str, int]) -> list[list[tuple[Sequence, int]]]:
        """Sequences with their numbers of new tokens. vLLM has a sequence share a block that
        another only fills in the same step; an engine has to have filled it before.
        """
        size, waves = self._block_size, list[list[tuple[Sequence, int]]]()
        filled_in: dict[int, int] = {}  # waves by block
        for request_id, count in counts.items():
            own = self._all[request_id]
            shared = own.blocks[:own.computed // size]
            wave = max((filled_in[block] + 1 for block in shared if block in filled_in), default=0)
            filled_in.update((block, wave) for block in
                             own.blocks[own.computed // size:-(-(own.computed + count) // size)])
            if wave == len(waves):
                waves.append([])
            waves[wave].append((own, count))
        return waves

    def _part(self, wave: list[tuple[Sequence, int]], copies: list[tuple[int, int]]) -> Part:
        admit = {}
        for own, _ in wave:
            if own.slot is None:
                own.slot = heapq.heappop(self._slots)
                admit[own.slot] = SamplingState(own.sampler, tuple(own.tokens[own.prompt_len:]))
        wave.sort(key=lambda part: (part[1] > 1, -part[0].computed if self._longest_first
                                    else part[0].slot))
        sequences = [own for own, _ in wave]
        chosen = [own for own, count in wave if own.computed + count >= len(own.tokens)]
        return Part(Step.of(
            [own.tokens[own.computed:own.computed + count] for own, count in wave],
            [own.computed for own in sequences], [own.blocks for own in sequences],
            [own.slot for own in sequences if own.slot is not None],
            sample=[index for index, own in enumerate(sequences) if own in chosen], admit=admit,
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logits="sampled" if any(own.params.logprobs is not None for own in chosen) else "none",
            masks={own.slot: own.mask for own in chosen if own.mask is not None}), sequences)

    def _follow(self, scheduled: Any) -> None:
        """Do as a SchedulerOutput says of sequences that begin, go on, wait and end."""
        for request_id in scheduled.preempted_req_ids or ():
            self._give_back(self._all.get(request_id))
        for request_id in scheduled.finished_req_ids:
            self._give_back(self._all.pop(request_id, None))
        for new in scheduled.scheduled_new_reqs:
            self._begin(new)
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids,
                                                cached.num_computed_tokens, strict=True):
            sequence = self._all[request_id]
            if request_id in cached.resumed_req_ids:
                self._give_back(sequence)
                sequence.blocks = []
                # Of what was under way when it had to leave, vLLM may have kept nothing.
                sequence.tokens = list(cached.all_token_ids.get(request_id, sequence.tokens))
            sequence.blocks += blocks[0] if blocks else []
            sequence.computed = computed

    def _begin(self, new: Any) -> None:
        """A request that is new, or, as one of vLLM's two model runners has it, comes back."""
        self._give_back(self._all.get(new.req_id))
        prompt = list(new.prompt_token_ids)
        self._all[new.req_id] = Sequence(
            new.req_id, new.sampling_params,
            self._sampler(new.sampling_params, prompt, new.req_id),
            list(new.prefill_token_ids or prompt), len(prompt), list(new.block_ids[0]),
            new.num_computed_tokens, allowed_mask(new.sampling_params, self._vocab_size))

    def _give_back(self, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.slot is not None:
            heapq.heappush(self._slots, sequence.slot)
            sequence.slot = None


def with_grammar(part: Part, grammar: Any) -> Step:
    """Its step, with the masks of vLLM's GrammarOutput, which may be None."""
    if grammar is None:
        return part.step
    rows = dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))
    return replace(part.step, masks={**part.step.masks, **{
        own.slot: rows[own.request_id].view(np.uint32) for own in part.chosen
        if own.request_id in rows and own.slot is not None}})


class Pending:
    """The next tokens of a part's sequences, of which nothing is known but their places."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._places = [(own.tokens, len(own.tokens)) for own in part.chosen]
        for tokens, _ in self._places:
            tokens.append(LAST)

    def settle(self, sampled: StepOutput) -> dict[str, int]:
        """They are what the step chose; by request."""
        made = {}
        for own, (tokens, place), token in zip(self.part.chosen, self._places,
                                               sampled.tokens.tolist(), strict=True):
            if token == NOT_FINITE:  # vLLM cannot end a request here
                _LOGGER.error("request %s: the logits are NaN or infinite; check the checkpoint's "
                              "weights, or compile with another --dtype", own.request_id)
                token = 0
            assert token >= 0, f"no token was allowed for request {own.request_id}"
            tokens[place] = made[own.request_id] = token
        return made


@dataclass(frozen=True)
class _Ranked:
    """Log-probabilities at one place, and how many tokens are likelier than the chosen one."""

    token: int
    found: Logprobs
    likelier: int


class TokenLogprobs:
    """The log-probabilities of vLLM's output, as they come of its parts."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._all: dict[str, _Ranked] = {}

    def add(self, part: Part, sampled: StepOutput) -> None:
        if sampled.logits is None:
            return
        for own, token, logits in zip(part.chosen, sampled.tokens.tolist(), sampled.logits,
                                      strict=True):
            wish = own.params.logprobs
            if wish is not None:
                self._all[own.request_id] = _Ranked(
                    token, Logprobs.of(logits, token, self._vocab_size if wish == -1 else wish),
                    int(np.count_nonzero(logits > logits[token])))

    def rows(self, request_ids: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """As vLLM's LogprobsLists has them, a row for each request: tokens and log-probabilities
        [rows, 1 + most that one asks for], the chosen token's first, and its rank from 1 [rows].
        None where none asks.
        """
        if not self._all:
            return None
        width = 1 + max(len(own.found.top) for own in self._all.values())
        tokens = np.zeros((len(request_ids), width), np.int64)
        values = np.full((len(request_ids), width), -np.inf, np.float32)
        ranks = np.zeros(len(request_ids), np.int64)
        for row, own in enumerate(map(self._all.get, request_ids)):
            if own is not None:
                pairs = [(own.token, own.found.chosen), *own.found.top]
                tokens[row, :len(pairs)], values[row, :len(pairs)] = zip(*pairs, strict=True)
                ranks[row] = own.likelier + 1
        return tokens, values, ranks
