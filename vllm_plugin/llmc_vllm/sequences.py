"""From what vLLM's scheduler says to llmc's steps, and from what those lead to back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.runtime.decoding.sampling import Logprobs, Sampler
from llmc.runtime.step import Sampled, SamplingState, Step
from llmc_vllm.parameters import allowed_mask


@dataclass(eq=False)
class Sequence:
    """A request that vLLM runs.

    Args:
        params: vLLM's SamplingParams.
        tokens: the prompt's and those generated.
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
class Planned:
    """A step, and the requests of vLLM's output in its order: those of the step are `sequences`."""

    step: Step
    sequences: list[Sequence]
    request_ids: list[str]

    @property
    def chosen(self) -> list[Sequence]:
        """The sequences of `step.sample`."""
        return [self.sequences[index] for index in self.step.sample.tolist()]


class Sequences:
    """All requests that vLLM has told a worker of, and not yet ended.

    Args:
        sampler: makes one from vLLM's SamplingParams, a prompt and a request's id.
        longest_first: see `Limits`.
    """

    def __init__(self, max_slots: int, vocab_size: int,
                 sampler: Callable[[Any, list[int], str], Sampler], *,
                 longest_first: bool) -> None:
        self._slots = list(range(max_slots))
        self._vocab_size, self._sampler = vocab_size, sampler
        self._longest_first = longest_first
        self._all: dict[str, Sequence] = {}

    def plan(self, scheduled: Any) -> Planned | None:
        """The step of a SchedulerOutput; None where it has none."""
        self._follow(scheduled)
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        if not counts:
            return None
        parts = [(self._all[request_id], count) for request_id, count in counts.items()]
        admit = {}
        for sequence, _ in parts:
            if sequence.slot is None:
                sequence.slot = heapq.heappop(self._slots)
                admit[sequence.slot] = SamplingState(
                    sequence.sampler, tuple(sequence.tokens[sequence.prompt_len:]))
        parts.sort(key=lambda part: (part[1] > 1, -part[0].computed if self._longest_first
                                     else part[0].slot))
        sequences = [sequence for sequence, _ in parts]
        copies = [(copy.src_block_id, copy.dst_block_id)
                  for copy in getattr(scheduled, "kv_cache_block_copies", None) or ()]
        chosen = [index for index, (own, count) in enumerate(parts)
                  if own.computed + count >= len(own.tokens)]
        step = Step.of(
            [own.tokens[own.computed:own.computed + count] for own, count in parts],
            [own.computed for own in sequences], [own.blocks for own in sequences],
            [own.slot for own in sequences], sample=chosen, admit=admit,
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logits="sampled" if any(sequences[i].params.logprobs is not None for i in chosen)
            else "none",
            masks={own.slot: own.mask for own in map(sequences.__getitem__, chosen)
                   if own.mask is not None},
            prompt_lens=tuple(own.prompt_len for own in sequences))
        return Planned(step, sequences, list(counts))

    def append(self, planned: Planned, sampled: Sampled) -> dict[str, int]:
        """What a step chose is the next token of its sequences; by request."""
        tokens = {}
        for sequence, token in zip(planned.chosen, sampled.tokens.tolist(), strict=True):
            assert token >= 0, f"no token was allowed for request {sequence.request_id}"
            sequence.tokens.append(token)
            tokens[sequence.request_id] = token
        return tokens

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


def grammar_masks(planned: Planned, grammar: Any) -> Mapping[int, np.ndarray]:
    """`Step.masks` of a step, with those of vLLM's GrammarOutput, which may be None."""
    if grammar is None:
        return planned.step.masks
    rows = dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))
    return {**planned.step.masks,
            **{own.slot: rows[own.request_id].view(np.uint32) for own in planned.chosen
               if own.request_id in rows and own.slot is not None}}


def logprobs(planned: Planned, sampled: Sampled, vocab_size: int) -> \
        tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """As vLLM's LogprobsLists has them, a row for each of `planned.request_ids`: tokens and
    log-probabilities [rows, 1 + most that a request asks for], the chosen token's first, and its
    rank from 1 [rows]. None where none asks.
    """
    wishes = [own.params.logprobs for own in planned.chosen]
    counts = [vocab_size if wish == -1 else wish for wish in wishes if wish is not None]
    if not counts or sampled.logits is None:
        return None
    most, rows = max(counts), {own: row for row, own in enumerate(planned.request_ids)}
    tokens = np.zeros((len(rows), most + 1), np.int64)
    values = np.full((len(rows), most + 1), -np.inf, np.float32)
    ranks = np.zeros(len(rows), np.int64)
    for own, wish, token, logits in zip(planned.chosen, wishes, sampled.tokens.tolist(),
                                        sampled.logits, strict=True):
        if wish is None:
            continue
        row, found = rows[own.request_id], Logprobs.of(logits, token, most)
        tokens[row] = [token, *(other for other, _ in found.top)]
        values[row] = [found.chosen, *(value for _, value in found.top)]
        ranks[row] = 1 + np.count_nonzero(logits > logits[token])
    return tokens, values, ranks
