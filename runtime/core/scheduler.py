"""The scheduler: which sequences run in the next step, and with how many tokens each.

Running sequences are ordered by priority and arrival. A sequence that lacks blocks preempts later
ones, which are recomputed. The first in order gets all blocks if it needs them, so it always makes
progress. A priority level is worth a fixed number of steps of waiting, so no sequence starves.

Waiting sequences are admitted by fair shares of the slots (fair_queue.py). No request and no tenant
holds all slots while another waits: a share without a slot preempts the youngest sequence of the
share with the most. Such a preemption recomputes few tokens, most of them found in the prefix
cache, while waiting for a completion takes up to its whole length. Only a share without any slot
preempts, so each arrival preempts at most once, and a preempted sequence cannot preempt in turn.

A sequence waits while running ones use all slots of adapters, and those after it pass. After
_ADAPTER_WAIT steps no other sequence with an adapter is admitted before it.

Tenants with many running sequences run them in turns if a step with all of them would delay other
tenants: see `_limit_rows`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakValueDictionary

import numpy as np

from llmc.runtime.core.adapters import Adapter, AdapterSlots
from llmc.runtime.core.encoder_cache import EncoderCache
from llmc.runtime.core.encoder_rows import EncoderRows
from llmc.runtime.core.fair_queue import HEAD_START, Order, Share, WaitingGroup, has_waited_for
from llmc.runtime.core.image_memory import PromptMemory
from llmc.runtime.core.input_embeds import InputEmbeds
from llmc.runtime.core.kv_cache import BlockHashes, BlockPool, BlockTable
from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.core.step import (
    LAST,
    EncoderInput,
    EncoderOutputs,
    EngineLimits,
    SamplingState,
    ScoredRows,
    Step,
    StepOutput,
)
from llmc.runtime.core.step_times import StepTimes
from llmc.runtime.multimodal.items import MediaItem
from llmc.runtime.multimodal.rotary_positions import IN_CACHE
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import Logprobs
from llmc.runtime.speculation.engine_drafts import MATCH
from llmc.runtime.speculation.planner import DraftPlanner, SequenceDrafts

MOST_PRIORITY = 100  # priorities range from -100 to 100
_LOOKED_AT = 64  # maximum number of waiting groups to examine for admission in a step
_MIXED = 512  # tokens of a step with decoding sequences, unless a prompt has waited _LONG
_LONG = 4  # steps
_LEAST = 16  # prompt tokens of a step, if there are any
_HOLD = 2  # steps
_ADAPTER_WAIT = 64  # steps that other adapters may pass a sequence whose adapter has no slot
_MAX_SLOWDOWN = 1.1  # of a step by rows of large tenants, relative to equal shares


@dataclass(eq=False)
class Sequence:
    """A sequence to generate, by sampling or by `width` beams.

    Args:
        request: number of its request.
        prompt: token ids that the decoder reads.
        limit: maximum number of tokens to generate.
        state: returns the slot's sampling state, given the tokens so far.
        width: number of beams. Each has a slot and a table; only the first prefills the prompt.
        candidates: number per beam; 0: return logits instead.
        key: anything but tokens that determines the contents of its blocks.
        source: the encoder's input.
        stalled: whether to pause it.
        aborted: whether it is canceled; it is removed before the next step.
        on_host: whether the caller samples from the logits that steps return; each step then awaits
            the one before it.
        mask: returns the token masks for the drafts that are allowed, as in `Step.masks`. Each step
            then awaits the one before it.
        scores: log-probabilities of the prompt, if requested.
        drafts: drafts of its next tokens, for speculative decoding.
        pools: whether its pooled output is returned instead of a sampled token.
        token_type_ids: of the prompt; empty: all 0.
        adapter: its LoRA adapter.
        embeds: rows of its prompt in place of token embeddings.

    Attributes:
        held: numbers of the images in `embeds` that it holds in the encoder cache.
        tokens: generated tokens that the host has read. A beam search keeps its own.
        computed: positions that are in the cache after all submitted steps, if drafts are accepted.
            With recurrent state, those up to the stored state.
        uncommitted: accepted drafts after these, which the next step computes again.
        cached: prompt positions found in the prefix cache at its first admission.
        ahead: number of in-flight tokens.
        beams: next token of each beam, once known.
        coming: names of blocks that it is about to compute.
        epoch: number of times that it ended or was preempted.
        share: share of its request.
        group: waiting group since its preemption.
        last_step: the last step that included it.
    """

    request: int
    prompt: list[int]
    limit: int
    state: Callable[[abc.Sequence[int]], SamplingState]
    width: int = 1
    candidates: int = 0
    key: bytes = b""
    source: EncoderInput | None = None
    stalled: Callable[[], bool] = lambda: False
    aborted: Callable[[], bool] = lambda: False
    on_host: bool = False
    mask: Callable[[abc.Sequence[int]], np.ndarray] | None = None
    scores: PromptScores | None = None
    drafts: SequenceDrafts | None = None
    pools: bool = False
    token_type_ids: abc.Sequence[int] = ()
    adapter: Adapter | None = None
    embeds: InputEmbeds | None = None
    tokens: list[int] = field(default_factory=list)
    order: Order = ()
    priority: int = 0
    chain: BlockHashes | None = None
    slots: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    computed: int = 0
    uncommitted: int = 0
    cached: int = 0
    ahead: int = 0
    beams: list[int] = field(default_factory=list)
    coming: list[bytes] = field(default_factory=list)
    epoch: int = 0
    share: Share = field(init=False, repr=False)
    group: WaitingGroup | None = None
    last_step: int = 0
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.known = len(self.prompt)  # prompt tokens and generated tokens

    @property
    def tenant(self) -> Share:
        """Share of its tenant."""
        return self.share.tenant

    @property
    def searches(self) -> bool:
        """Whether beam search is past the prompt."""
        return self.width > 1 and self.computed >= len(self.prompt)

    def between(self, start: int, end: int) -> list[int]:
        """Known tokens from `start` to `end`."""
        count = len(self.prompt)
        return self.prompt[start:end] + self.tokens[max(start - count, 0):max(end - count, 0)]

    def decodes(self, count: int) -> bool:
        """Whether it decodes in a step with `count` new tokens per row, rather than prefills."""
        return count == 1 + self.uncommitted

    def wanted(self) -> int:
        """Number of new tokens per row that can be computed now."""
        if self.stalled():
            return 0
        if self.searches:
            return 1 if self.beams else 0
        if self.computed < self.known:
            return self.known - self.computed
        if self.on_host or self.mask is not None or (
                self.drafts is not None and not self.drafts.ahead):
            return 0  # the next step needs the last token
        return 1 if self.ahead and len(self.tokens) + self.coming_tokens < self.limit else 0

    @property
    def coming_tokens(self) -> int:
        """Maximum number of tokens of the steps in flight."""
        return self.ahead + (0 if self.drafts is None else self.drafts.unread)


@dataclass(frozen=True)
class ScheduledStep:
    """A step with the sequence and epoch of each of its `sample`.

    Args:
        scored: prompts, each with its number of `Step.scored`, in their order.
        keeps_states: whether sequences have recurrent state.
    """

    step: Step
    chosen: list[tuple[Sequence, int]]
    scored: list[tuple[PromptScores, int]] = field(default_factory=list)
    keeps_states: bool = False

    def read(self, sampled: StepOutput) -> Iterator[tuple[Sequence, SequenceOutput]]:
        """Yield the output of each sequence that has neither ended nor been preempted since."""
        start = 0
        for scores, count in self.scored:  # also if its sequence has been preempted
            scores.extend(sampled.scored[start:start + count])
            start += count
        rows: dict[Sequence, list[int]] = {}
        for index, (sequence, epoch) in enumerate(self.chosen):
            if sequence.epoch == epoch:
                rows.setdefault(sequence, []).append(index)
        starts = None if sampled.counts is None else [0, *accumulate(sampled.counts.tolist())]
        for sequence, own in rows.items():
            sequence.ahead -= 1
            output = SequenceOutput.of(sampled, own, starts)
            if sequence.drafts is not None:
                rejected = sequence.drafts.verified(len(output.tokens))
                if self.keeps_states:
                    sequence.uncommitted = len(output.tokens) - 1
                else:
                    sequence.computed -= rejected
                if sequence.drafts.engine is not None:
                    sequence.drafts.proposed(*_proposed(sampled, own[0]))
            yield sequence, output


_Row = tuple[Sequence, int]  # a sequence and the number of new tokens of each of its rows


@dataclass(frozen=True)
class _StepRow:
    """A row of a step: one sequence, or one beam."""

    sequence: Sequence
    slot: int
    table: BlockTable
    tokens: list[int]
    past: int
    samples: bool
    scored: abc.Sequence[int] = ()  # positions
    drafts: int = 0  # the last of its tokens
    unread: int = 0  # drafts of its steps in flight
    uncommitted: int = 0  # the first of its tokens


@dataclass(eq=False)
class SlotLease:
    """Slots, encoder-output rows and blocks that a session holds.

    `slots` is empty once a sequence has needed them.
    """

    slots: list[int]
    memory: list[int]
    tables: list[BlockTable]


@dataclass(frozen=True)
class SequenceOutput:
    """The rows of a `StepOutput` that belong to one sequence.

    Args:
        tokens: sampled tokens in order; several if drafts were accepted.
        logprobs: of each token.
    """

    tokens: list[int]
    logprobs: list[Logprobs | None]
    candidates: Candidates | None
    logits: np.ndarray | None
    pooled: np.ndarray | None = None

    @staticmethod
    def of(sampled: StepOutput, rows: list[int], starts: list[int] | None = None) -> SequenceOutput:
        """Select a sequence's rows.

        Args:
            starts: first token of each row, with `StepOutput.counts`.
        """
        found = sampled.candidates
        first = rows[0] if starts is None else starts[rows[0]]
        end = first + 1 if starts is None else starts[rows[0] + 1]
        return SequenceOutput(sampled.tokens[first:end].tolist(), list(sampled.logprobs[first:end]),
                      found and Candidates(found.tokens[rows], found.log_probs[rows]),
                      None if sampled.logits is None else sampled.logits[rows],
                      sampled.pooled[rows[0]] if sampled.pooled else None)


class Scheduler:
    """Continuous batching over slots and blocks. It never waits and accesses no device.

    Args:
        max_num_batched_tokens: maximum number of tokens of a step; at least one per slot.
        reuse: prefix caching. Off for models with recurrent state, which blocks do not contain,
            and for sequences that must be computed whole.
        drafts: chooses the drafts of sequences that have any.
        images: the engine's cache of encoded images. As many of their rows are encoded in a step
            as it may have tokens, and at least one image.

    Attributes:
        preemptions: number of preemptions.
        queries, hits: prompt tokens of admitted sequences, and those found in the prefix cache.
        step_times: durations of steps.
        drafts, images: see the arguments.
        adapters: the engine's slots of adapters.
    """

    def __init__(self, limits: EngineLimits, max_num_batched_tokens: int, *,
                 max_itl: float | None = None, reuse: bool = True,
                 drafts: DraftPlanner | None = None,
                 images: EncoderCache | None = None) -> None:
        self.limits = limits
        self.images = images
        self.drafts = drafts
        self.budget = max(max_num_batched_tokens, limits.max_slots)
        self._max_itl = max_itl
        self._reuse = reuse and not limits.keeps_states and not limits.whole
        self.blocks = BlockPool(limits.num_blocks, limits.block_size, reuse=self._reuse)
        self.running: list[Sequence] = []  # in order
        self.adapters = AdapterSlots(limits.max_loras)
        self._new_adapters: dict[int, Adapter] = {}  # by slot, of this step
        self._overdue: WaitingGroup | None = None  # has waited for an adapter's slot for too long
        self.preemptions = self.queries = self.hits = 0
        self.step_times = StepTimes()
        self._shares = Share()  # of all tenants
        self._tenants: WeakValueDictionary[str, Share] = WeakValueDictionary()
        self._groups: dict[WaitingGroup, None] = {}  # waiting
        self._hidden: list[WaitingGroup] = []  # skipped in this step
        self._score_room = limits.max_scored  # tokens that this step can still score
        self._slots = list(range(limits.max_slots))  # a heap: lowest first
        self._encoder_rows = EncoderRows(reuse)
        self._coming: Counter[bytes] = Counter()  # names that running sequences will compute
        self._first: dict[int, Sequence] = {}  # running, by request
        self._leases: list[SlotLease] = []
        self._steps = self._arrivals = 0
        self._row_limit = self._held_until = 0
        self._yielded = False

    # Queue.
    def add(self, sequences: Iterable[Sequence], priority: int = 0,
            tenant: str | None = None) -> WaitingGroup:
        """Queue the sequences of a request.

        Args:
            priority: lower ones go first.
            tenant: its share of the slots includes the request's. None: a separate share.
        """
        self._arrivals += 1
        group = WaitingGroup(iter(sequences), (self._steps + priority * HEAD_START, self._arrivals),
                             priority, Share(self._tenant(tenant)))
        self._wait(group)
        return group

    def _tenant(self, name: str | None) -> Share:
        if name is None:
            return Share(self._shares)
        return self._tenants.setdefault(name, Share(self._shares))

    def drop(self, group: WaitingGroup) -> None:
        """Remove a waiting group."""
        group.first = None
        self._wait(group)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, running or waiting."""
        if sequence.group is not None:
            self.drop(sequence.group)
        elif sequence.slots:
            self._free(sequence)
            self.running.remove(sequence)
            sequence.share.hold(-sequence.width)
            sequence.share.moved(self._steps)

    @property
    def waiting(self) -> int:
        """Number of waiting requests and preempted sequences; callable from any thread."""
        return len(self._firsts())

    def load(self) -> tuple[int, int, int]:
        """Running sequences, waiting callers and free blocks; callable from any thread.

        Aborted sequences are not counted, though a running step holds their blocks until it ends.
        """
        present = list(self.running)
        active = [own for own in present if not own.aborted()]
        waiting = sum(not own.aborted() for own in self._firsts())
        free = self.blocks.free
        if len(active) < len(present):
            tables = [table for own in active for table in list(own.tables)]
            tables += [table for lease in list(self._leases) for table in lease.tables]
            used = {block for table in tables for block in list(table.blocks)}
            free = max(free, self.blocks.num_blocks - len(used))
        return len(active), waiting, free

    def adapter_names(self) -> tuple[set[str], set[str]]:
        """Names of the adapters of running and of waiting sequences; callable from any thread."""
        running, waiting = ({own.adapter.name for own in sequences if own.adapter is not None}
                            for sequences in (list(self.running), self._firsts()))
        return running, waiting

    def _firsts(self) -> list[Sequence]:
        """The first sequence of each waiting group."""
        return [group.first for group in list(self._groups) if group.first is not None]

    def problem(self, prompt: int, limit: int, width: int = 1,
                embeds: InputEmbeds | None = None) -> str | None:
        """Return why a sequence can never run; None if it can."""
        longest = 0 if embeds is None else embeds.longest_range
        others = self.limits.max_slots - 1  # which may decode in the same step
        if longest + others > self.budget:
            return (f"{longest} tokens have bidirectional attention, so they must be in one step, "
                    f"beside {others} other sequences; a step has at most {self.budget} tokens: "
                    f"load the model with max_num_batched_tokens of at least {longest + others}")
        length = prompt + max(limit - 1, 0)
        need = self.blocks.spans(length)
        if width > 1:
            need += (width - 1) * (need - prompt // self.blocks.block_size)
        if need <= self.blocks.num_blocks:
            return None
        size = self.blocks.block_size
        return (f"{prompt} tokens and {limit} to generate"
                f"{f' by {width} beams' if width > 1 else ''} take {need} blocks of {size}, the KV "
                f"cache has {self.blocks.num_blocks}; ask for fewer, or load the model with a "
                f"larger kv_cache_tokens")

    # The next step.

    def schedule(self) -> ScheduledStep | None:
        """Return the next step; None if no sequence can run before a pending step is read."""
        self._steps += 1
        step = self._schedule()
        if step is None and self._held_until >= self._steps:  # all that can run was left out
            self._held_until = 0
            step = self._schedule(limited=False)
        return step

    def _schedule(self, limited: bool = True) -> ScheduledStep | None:
        self._score_room = self.limits.max_scored
        self._token_room = self.budget
        self._memory_rows = 0  # of images that layers attend to, to encode in this step
        self._draft_masks: dict[Sequence, np.ndarray] = {}
        self._unhide()
        self._free_stalled_adapter()
        self._preempt_for_next()
        rows: list[_Row] = []
        copies: list[tuple[int, int]] = []
        admitted: dict[int, SamplingState] = {}
        encode: dict[int, EncoderInput] = {}
        wanted = {sequence: sequence.wanted() for sequence in self.running}
        if limited:
            self._limit_rows(wanted)
        decoding = sum(sequence.width if sequence.searches else count
                       for sequence, count in wanted.items() if sequence.decodes(count))
        drafts = self._plan_drafts(wanted, decoding)
        budget = self._room(wanted, decoding) - decoding - drafts
        self._token_room = self.budget - decoding - drafts
        for sequence in list(self.running):
            count = wanted[sequence]
            if count > 1 and not sequence.decodes(count):
                count = self._fit(sequence, count, max(budget, 0))
                budget -= count
                self._token_room -= count
            elif sequence.embeds is not None:
                count = self._before_images(sequence, count)
            if count > 0 and sequence.slots and self._make_room(sequence, count, rows):
                self._make_room_for_drafts(sequence, count)
                copies += self._copy_on_write(sequence)
                self._append(rows, sequence, count)
        while budget > 0 and (new := self._admit_next(rows, budget)):
            count = self._fit(new, new.known - new.computed, budget) or \
                self._before_images(new, self._least(new, new.computed), forced=True)
            budget -= count
            self._token_room -= count
            copies += self._copy_on_write(new)
            self._append(rows, new, count)
            admitted.update(dict.fromkeys(new.slots, new.state(new.tokens)))
            if new.source is not None and self._encoder_rows.begin_write(new.key):
                encode[self._encoder_rows.row(new.key)] = new.source
                self._memory_rows += _rows_to_encode(new.source)
        self.blocks.copied()
        return self._step(rows, copies, admitted, encode) if rows else None

    def _plan_drafts(self, wanted: Mapping[Sequence, int], decoding: int) -> int:
        """Choose the drafts of the decoding sequences, and return their number.

        With recurrent state, the next step has room for all of them that are accepted.

        Args:
            wanted: new tokens of each running sequence.
            decoding: those of the decoding sequences together.
        """
        drafting = [(own, own.drafts) for own, count in wanted.items()
                    if own.drafts is not None and own.decodes(count)]
        if self.drafts is None or not drafting:
            return 0
        uncommitted = sum(own.uncommitted for own, count in wanted.items() if own.decodes(count))
        room = self.budget - decoding - self._longest_range()
        if self.limits.keeps_states:
            room = self.budget - self.limits.max_slots - sum(own.uncommitted for own in wanted)
        self.drafts.plan([
            (drafts, own.tokens,
             0 if not own.ahead and own.computed + own.uncommitted + 1 != own.known
             else own.limit - len(own.tokens) - own.coming_tokens - 1) for own, drafts in drafting],
            decoding - uncommitted, min(room, self._score_room, self.limits.max_draft_tokens))
        for own, drafts in drafting:
            if own.mask is not None and drafts.pending:
                self._draft_masks[own] = masks = own.mask(drafts.pending)
                drafts.shorten(len(masks) - 1)
        count = sum(len(drafts.pending) for _, drafts in drafting)
        self._score_room -= count
        return count

    def _make_room_for_drafts(self, sequence: Sequence, count: int) -> None:
        """Allocate positions for drafts, or drop the drafts if blocks are short.

        Args:
            count: new tokens before the drafts.
        """
        if sequence.drafts is None or not sequence.drafts.pending:
            return
        length = sequence.computed + count + len(sequence.drafts.pending)
        if not self._grow_if_free(sequence.tables[0], length):
            sequence.drafts.submit(None)

    def _limit_rows(self, wanted: dict[Sequence, int]) -> None:
        """Leave out rows of large tenants, which would slow the step down for small ones.

        The step takes at most _MAX_SLOWDOWN times as long as one in which all tenants have as many
        rows as the smallest. Rows take turns: those that ran last are left out. Beams are never
        left out. A tenant that waits for its first slot counts as one row; its prefill step has no
        rows of large tenants, but not two steps in succession. The limit stays for _HOLD steps
        after a small tenant has left, since its next request often follows at once.

        Args:
            wanted: new tokens of each running sequence; set to 0 for those left out.
        """
        tenants: dict[Share, list[Sequence]] = {}
        beams = 0
        for sequence, count in wanted.items():
            if sequence.searches:
                beams += sequence.width
            elif sequence.decodes(count):
                tenants.setdefault(sequence.tenant, []).append(sequence)
        group = self._next()
        waits = group is not None and not group.share.tenant.slots
        sizes = [len(rows) for rows in tenants.values()] + [1] * waits
        if len(sizes) < 2 or max(sizes) == min(sizes):
            if self._steps > self._held_until:
                return
            limit = self._row_limit
        else:
            limit = self._row_limit = self._rows_within(beams, sizes)
            self._held_until = self._steps + _HOLD
            if waits and limit < max(sizes) and not self._yielded:
                limit = 0
        self._yielded = limit == 0
        for rows in tenants.values():
            if len(rows) > max(limit, 1):
                rows.sort(key=lambda own: own.last_step)
                wanted.update(dict.fromkeys(rows[limit:], 0))

    def _rows_within(self, beams: int, sizes: abc.Sequence[int]) -> int:
        """Return the maximum rows of a tenant with which the step keeps to _MAX_SLOWDOWN.

        Args:
            beams: rows of beam searches.
            sizes: rows of each tenant.
        """
        def seconds(limit: int) -> float:
            return self.step_times.of(beams + sum(min(size, limit) for size in sizes))

        allowed = _MAX_SLOWDOWN * seconds(min(sizes))
        return next((size for size in range(max(sizes), min(sizes), -1)
                     if seconds(size) <= allowed), min(sizes))

    def _room(self, wanted: Mapping[Sequence, int], decoding: int) -> int:
        """Token budget of a step.

        While sequences decode, prefill gets a small budget, which keeps ITL low, unless a prompt
        has waited for more than _LONG steps. With a goal for ITL, it gets what fits.
        """
        if decoding and self._max_itl is not None:
            fitting = self.step_times.prompt_tokens(decoding, self._max_itl)
            return min(self.budget, decoding + max(_MIXED if fitting is None else fitting, _LEAST))
        prompts = [(own.order[0], own.priority) for own, count in wanted.items()
                   if count > 1 and not own.decodes(count)]
        if group := self._next():
            prompts.append((group.order[0], group.priority))
        waited = max((self._steps - at + priority * HEAD_START for at, priority in prompts),
                     default=0)
        if not decoding or waited > _LONG:
            return self.budget
        return min(self.budget, max(_MIXED, 2 * decoding))

    def _fit(self, sequence: Sequence, count: int, budget: int) -> int:
        """Limit `count` new tokens to the budget and to what can be scored."""
        count = min(self._before_branching(sequence, count), budget)
        count = self._whole_ranges(sequence, count, self._token_room)
        count = self._whole_ranges(sequence, self._before_images(sequence, count), 0)
        if isinstance(sequence.source, PromptMemory):
            count = min(count, (sequence.source.stop(sequence.computed) or sequence.known)
                        - sequence.computed)
        if sequence.scores is None:
            return count
        count = sequence.scores.fit(sequence.computed, count, self._score_room)
        return self._whole_ranges(sequence, count, 0)

    def _whole_ranges(self, sequence: Sequence, count: int, room: int) -> int:
        """Change `count` new tokens, so that they end within no range with bidirectional attention.

        Args:
            room: tokens up to which a range is completed; else they end before it.
        """
        stop = sequence.computed + count
        inside = None if sequence.embeds is None else sequence.embeds.range_of(stop)
        if inside is None or inside[0] == stop:
            return count
        whole = inside[1] - sequence.computed
        return whole if whole <= room else max(inside[0] - sequence.computed, 0)

    def _least(self, sequence: Sequence, start: int) -> int:
        """Fewest tokens of a sequence that can be computed after `start` others."""
        inside = None if sequence.embeds is None else sequence.embeds.range_of(start)
        return 1 if inside is None else inside[1] - start

    def _longest_range(self) -> int:
        """Tokens that must be in one step, of any sequence that may still prefill."""
        group = self._next()
        first = [] if group is None or group.first is None else [group.first]
        return max((own.embeds.longest_range for own in (*self.running, *first)
                    if own.embeds is not None and own.computed < len(own.prompt)), default=0)

    def _before_images(self, sequence: Sequence, count: int, *, forced: bool = False) -> int:
        """Limit `count` new tokens to those whose images are encoded, in this step at the latest.

        Images of one range are encoded together, even if there is no room for all of them.

        Args:
            forced: encode them even if there is no room for it.
        """
        if sequence.embeds is None or self.images is None:
            return count
        start, together = sequence.computed, 0
        for index, own in sequence.embeds.items_within(start, start + count):
            if index not in sequence.held:
                if own.offset >= together and not forced and not self._can_hold(own.item):
                    return max(int(own.positions[0]) - start, 0)
                self.images.hold(own.item)
                sequence.held.add(index)
            together = own.offset + self._least(sequence, own.offset)
        return count

    def _can_hold(self, item: MediaItem) -> bool:
        """Whether an image is encoded, or can be in this step."""
        assert self.images is not None
        return self.images.has(item) or (self.images.has_room(item) and (
            not self.images.encode or self.images.num_rows + item.num_rows <= self.budget))

    def _release_images(self, sequence: Sequence, end: int | None = None) -> None:
        """Release the images that a sequence holds, or those whose rows are before `end`."""
        for index in [*sequence.held]:
            assert sequence.embeds is not None and self.images is not None
            own = sequence.embeds.items[index]
            if end is None or own.offset + own.length <= end:
                self.images.release(own.item)
                sequence.held.remove(index)

    def _append(self, rows: list[_Row], sequence: Sequence, count: int) -> None:
        """Add a sequence to the step."""
        rows.append((sequence, count))
        if sequence.scores is not None:
            self._score_room -= len(sequence.scores.positions(
                sequence.computed, sequence.computed + count))

    def _before_branching(self, sequence: Sequence, count: int) -> int:
        """Limit `count` so that a prompt with recurrent state pauses before its last token.

        Further completions of the same prompt start from the state at that position.
        """
        left = len(sequence.prompt) - 1 - sequence.computed
        if not self.limits.keeps_states or not 0 < left < count or not any(
                first.request == sequence.request for first in self._firsts()):
            return count
        return left

    def _make_room(self, sequence: Sequence, count: int, rows: list[_Row]) -> bool:
        """Allocate `count` positions for each row, preempting later sequences if necessary."""
        if sequence.width == 1 and self.blocks.has(sequence.tables[0], sequence.computed, count):
            return True
        while True:
            length, tables = sequence.computed + count, self._tables(sequence)
            missing = sum(self.blocks.lacks(table, length) for table in tables)
            if missing + self.blocks.copies(tables, sequence.computed) <= self.blocks.free:
                for table in tables:
                    self.blocks.grow(table, length)
                return True
            if not self._preempt_for_running(sequence, {id(own) for own, _ in rows}):
                return False

    def _tables(self, sequence: Sequence) -> list[BlockTable]:
        return sequence.tables if sequence.searches else sequence.tables[:1]

    def _copy_on_write(self, sequence: Sequence) -> list[tuple[int, int]]:
        return [self.blocks.own(table, sequence.computed) for table in self._tables(sequence)
                if self.blocks.shared(table, sequence.computed)]

    def _preempt_for_running(self, growing: Sequence, kept: set[int]) -> bool:
        """Free blocks for a running sequence: end a session, or else preempt another sequence.

        Stalled ones go first, then later ones: those of the lowest priority, then of the largest
        share.
        """
        if self._leases:
            self.end(self._leases[-1])
            return True
        later = [own for own in self.running if id(own) not in kept and own is not growing
                 and (own.stalled() or self._may_lose_blocks(own, growing))]
        if not later:
            return False
        self._preempt(max(later, key=lambda own: (own.stalled(), own.priority, *_held(own),
                                                  own.order)))
        return True

    def _may_lose_blocks(self, own: Sequence, growing: Sequence) -> bool:
        """Whether a sequence may be preempted for another's growth.

        A sequence of a smaller share is preempted only for the first in order, which always runs.
        """
        if own.order < growing.order:
            return False
        losing_share, growing_share = _rivals(own, growing)
        return own.priority > growing.priority or losing_share.slots >= growing_share.slots \
            or growing is self.running[0]

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.remove(sequence)
        sequence.group = WaitingGroup(iter([sequence]), sequence.order, sequence.priority,
                                      sequence.share)
        self._wait(sequence.group)

    def _wait(self, group: WaitingGroup) -> None:
        """Sort a group by its next sequence."""
        if group.first is None:
            self._groups.pop(group, None)
        else:
            self._groups[group] = None
        group.moved(self._steps)

    def _hide(self, group: WaitingGroup) -> None:
        group.hidden = True
        self._hidden.append(group)
        group.moved(self._steps)

    def _unhide(self) -> None:
        """Unhide groups, except stalled ones."""
        hidden, self._hidden = self._hidden, []
        for group in hidden:
            if group.first is not None and group.first.stalled():
                self._hidden.append(group)
            else:
                group.hidden = False
                group.moved(self._steps)

    def _next(self) -> WaitingGroup | None:
        """The group to admit next whose first sequence is not stalled."""
        while group := self._shares.head(self._steps):
            assert group.first is not None
            if not group.first.stalled() and not self._is_held_back(group):
                return group
            self._hide(group)
        return None

    def _is_held_back(self, group: WaitingGroup) -> bool:
        """Whether its tenant runs as many rows as `_limit_rows` lets it, so a slot is of no use."""
        return self._steps <= self._held_until \
            and group.share.tenant.slots > max(self._row_limit, 1)

    def _ready(self) -> WaitingGroup | None:
        """`_next`, except groups whose prompt is being computed for another sequence."""
        for _ in range(_LOOKED_AT):
            group = self._next()
            if group is not None and self._waits_for_tokens(group):
                if self._steps - group.order[0] + group.priority * HEAD_START > _LONG:
                    return None  # others would take the room again and again
                self._hide(group)
                continue
            if group is None or not (self._is_coming(group) or self._waits_for_scoring(group)
                                     or self._lacks_adapter(group)
                                     or self._waits_for_images(group)):
                return group
            self._hide(group)
        return None

    def _admit_next(self, rows: list[_Row], budget: int) -> Sequence | None:
        """Admit the next sequence; None if none can be.

        Args:
            rows: sequences of the step so far.
            budget: tokens that the step has room for.
        """
        group = self._ready()
        if group is None or (first := group.first) is None or \
                (self.limits.whole and first.known > budget) or not self._admit(first, rows):
            return None
        first.share.hold(first.width)
        group.waits_since = None
        if group is self._overdue:
            self._overdue = None
        group.take()
        self._wait(group)
        return first

    def _names(self, sequence: Sequence) -> list[bytes]:
        """Names of its blocks, as far as its tokens are known."""
        if sequence.chain is None:
            sequence.chain = BlockHashes(self.blocks.block_size, sequence.key,
                                         self.limits.lookahead, sequence.embeds)
        chain, span = sequence.chain, (len(sequence.chain.names) + 1) * self.blocks.block_size
        if span + self.limits.lookahead <= sequence.known:
            chain.extend(sequence.prompt + sequence.tokens)
        return chain.names

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that it may share: not those whose logits it needs."""
        names, scores = self._names(sequence), sequence.scores
        if scores is None or scores.complete:
            return names
        return names[:scores.scheduled // self.blocks.block_size]

    def _waits_for_scoring(self, group: WaitingGroup) -> bool:
        """Whether its first sequence needs scores, and this step can score no more tokens."""
        sequence = group.first
        return not self._score_room and sequence is not None and \
            sequence.scores is not None and not sequence.scores.complete

    def _waits_for_images(self, group: WaitingGroup) -> bool:
        """Whether its first sequence needs an image first that this step cannot encode."""
        sequence = group.first
        if sequence is None:
            return False
        rows = _rows_to_encode(sequence.source)
        if rows and self._memory_rows and self._memory_rows + rows > self.budget:
            return not self._encoder_rows.has(sequence.key)
        if sequence.embeds is None or not sequence.embeds.items:
            return False
        start = self._cached(sequence)
        return any(not self._can_hold(own.item)
                   for _, own in sequence.embeds.items_within(start, start + 1))

    def _waits_for_tokens(self, group: WaitingGroup) -> bool:
        """Whether its first sequence begins with a range for which this step has no room."""
        sequence = group.first
        if sequence is None or sequence.embeds is None or not len(sequence.embeds.ranges):
            return False
        return self._least(sequence, self._cached(sequence)) > self._token_room

    def _cached(self, sequence: Sequence) -> int:
        """Positions of a waiting sequence in the prefix cache."""
        matched = self.blocks.match(self._reusable(sequence), sequence.known)
        return self._start(sequence, len(matched) * self.blocks.block_size)

    def _lacks_adapter(self, group: WaitingGroup) -> bool:
        """Whether its first sequence waits for a slot of its adapter."""
        adapter = None if group.first is None else group.first.adapter
        if adapter is None:
            return False
        if self._overdue not in (None, group):
            return True
        if self.adapters.has_room(adapter):
            return False
        if group.waits_since is None:
            group.waits_since = self._steps
        if self._steps - group.waits_since >= _ADAPTER_WAIT:
            self._overdue = group
        return True

    def _free_stalled_adapter(self) -> None:
        """Preempt the sequences of an adapter if all are stalled and another adapter is overdue."""
        if self._overdue is not None and self._overdue.first is None:  # was canceled
            self._overdue = None
        if self._overdue is None:
            return
        busy = {own.adapter for own in self.running if not own.stalled()}
        adapter = next((own.adapter for own in self.running
                        if own.adapter is not None and own.adapter not in busy), None)
        for own in [own for own in self.running if adapter and own.adapter is adapter]:
            self._preempt(own)

    def _is_coming(self, group: WaitingGroup) -> bool:
        """Whether others compute at least half of its first sequence's uncached prompt."""
        sequence = group.first
        assert sequence is not None
        first = self._first.get(sequence.request)
        if first is not None and \
                first.computed < len(first.prompt) - self.limits.keeps_states:
            return True
        if not self._coming:
            return False
        stalled = Counter(name for own in self.running if own.coming and own.stalled()
                          for name in own.coming)  # may never be computed
        names = self._reusable(sequence)
        coming = cached = len(self.blocks.match(names, sequence.known))
        while coming < len(names) and self._coming[names[coming]] > stalled[names[coming]]:
            coming += 1
        size = self.blocks.block_size
        return 2 * (coming - cached) * size >= max(sequence.known - cached * size, 1)

    def _admit(self, sequence: Sequence, rows: list[_Row]) -> bool:
        """Allocate a sequence's slots and blocks; return False if they are short."""
        names = self._names(sequence)
        table = self._open(sequence)
        spare = len(self.running)  # a block for each running sequence
        computed = self._start(sequence, len(table.blocks) * self.blocks.block_size)
        missing = self.blocks.lacks(table, sequence.known) + \
            self.blocks.copies([table], computed)
        while len(self._slots) < sequence.width or missing > self.blocks.free - spare:
            if not self._preempt_for_new(sequence, {id(own) for own, _ in rows}):
                self.blocks.close(table)
                return False
            spare = len(self.running)
        sequence.group = None
        if sequence.adapter is not None and self.adapters.hold(sequence.adapter):
            self._new_adapters[self.adapters.slot(sequence.adapter)] = sequence.adapter
        sequence.tables = [table]
        sequence.slots = [heapq.heappop(self._slots) for _ in range(sequence.width)]
        sequence.computed = computed
        if not sequence.epoch:
            sequence.cached = sequence.computed
            self.queries += sequence.known
            self.hits += sequence.computed
        self.blocks.grow(table, sequence.known)
        sequence.coming = names[table.named:] if self._reuse else []
        self._coming.update(sequence.coming)
        if sequence.source is not None:
            self._encoder_rows.acquire(sequence.key)
        self._first.setdefault(sequence.request, sequence)
        insort(self.running, sequence, key=lambda own: own.order)
        return True

    def _start(self, sequence: Sequence, cached: int) -> int:
        """The first position to compute of a sequence with `cached` positions in the prefix cache.

        Its last token is computed again. That of a range is computed with the one before it, since
        it does not decode.
        """
        last = sequence.known - 1
        inside = None if sequence.embeds is None else sequence.embeds.range_of(last)
        return min(cached, last if inside is None else last - 1)

    def _open(self, sequence: Sequence) -> BlockTable:
        """Create a sequence's table from cached blocks.

        A completion of a prompt that another one has prefilled shares all blocks up to the last
        token; the last block, if not full, is copied before it is written. Recurrent state is
        shared only if the other is at that position.
        """
        last = len(sequence.prompt) - 1
        first = self._first.get(sequence.request)
        if first is not None and not sequence.tokens and first.width == sequence.width == 1 \
                and (first.computed == last or not self.limits.keeps_states) \
                and (sequence.scores is None or sequence.scores.complete):
            return self.blocks.fork(first.tables[0], last)
        return self.blocks.open(self.blocks.match(self._reusable(sequence), sequence.known))

    def _preempt_for_next(self) -> None:
        """Preempt for the next sequence to admit, before the running ones are scheduled.

        It preempts by priority, or if its share holds no slot.
        """
        group = self._ready()
        if group is None or (first := group.first) is None:
            return
        if any(own.priority > first.priority for own in self.running):
            missing = self._missing_blocks(first)
            while not self._has_room(first, missing):
                if not self._preempt_for_new(first, set()):
                    break
        for own in self._over_share(first):
            self._preempt(own)

    def _missing_blocks(self, first: Sequence) -> int:
        """Number of uncached blocks that a waiting sequence needs."""
        cached = len(self.blocks.match(self._reusable(first), first.known))
        return self.blocks.spans(first.known) - cached

    def _has_room(self, first: Sequence, missing: int) -> bool:
        return len(self._slots) >= first.width and missing <= self.blocks.free - len(self.running)

    def _preempt_for_new(self, sequence: Sequence, kept: set[int]) -> bool:
        """Free a slot and blocks for a waiting sequence: end a session, or else preempt another.

        Stalled sequences go first, then those of lower priority.
        """
        if self._leases:
            self.end(self._leases[-1])
            return True
        later = [own for own in self.running if id(own) not in kept
                 and (own.stalled() or self._goes_before(sequence, own))]
        if not later:
            return False
        self._preempt(max(later, key=lambda own: (own.stalled(), own.order)))
        return True

    def _goes_before(self, first: Sequence, own: Sequence) -> bool:
        """Whether a waiting sequence may preempt a running one of lower priority.

        It may not if the preempted sequence would be admitted before it.
        """
        if own.priority <= first.priority or own.order < first.order:
            return False
        waiting_share, running_share = _rivals(first, own)
        return not waiting_share.slots or running_share.slots > own.width or \
            not has_waited_for(own.order, first.priority, self._steps)

    def _over_share(self, first: Sequence) -> list[Sequence]:
        """Running sequences to preempt for a waiting one whose request or tenant has no slot.

        They are the youngest of the rival share with the most slots, at most half of its slots.
        Empty if that is not enough, or if nothing needs to be preempted. Beam searches are not
        preempted, since they would start over.
        """
        parent = first.tenant if first.tenant.slots else self._shares
        if first.share.slots or parent.slots == parent.holders:
            return []
        missing = self._missing_blocks(first)
        if self._has_room(first, missing) or self._leases or \
                any(own.stalled() for own in self.running):  # `_admit` preempts these
            return []

        def share(own: Sequence) -> Share:
            return own.tenant if parent is self._shares else own.share

        rivals = [own for own in self.running if own.width == 1 and share(own).parent is parent
                  and share(own).slots > 1
                  and has_waited_for(first.order, own.priority, self._steps)]
        rivals.sort(key=lambda own: (share(own).slots, own.share.slots, own.order), reverse=True)
        free, victims = self.blocks.free - len(self.running), list[Sequence]()
        for own in rivals:
            if share(own) is not share(rivals[0]) or len(victims) == share(own).slots // 2:
                break
            victims.append(own)
            free += self.blocks.alone(own.tables[0]) + 1
            if missing <= free and len(self._slots) + len(victims) >= first.width:
                return victims
        return []

    def _free(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            self.blocks.close(table)
        for slot in sequence.slots:
            heapq.heappush(self._slots, slot)
        if sequence.adapter is not None:
            self.adapters.release(sequence.adapter)
        self._release_images(sequence)
        if sequence.source is not None:
            self._encoder_rows.release(sequence.key)
        if self._first.get(sequence.request) is sequence:
            del self._first[sequence.request]
        self._no_longer_coming(sequence.coming)
        sequence.tables, sequence.slots, sequence.beams, sequence.coming = [], [], [], []
        if sequence.drafts is not None:
            sequence.drafts.drop()
        sequence.computed = sequence.ahead = sequence.uncommitted = 0
        sequence.epoch += 1

    def _step(self, rows: list[_Row], copies: list[tuple[int, int]],
              admitted: dict[int, SamplingState],
              encode: dict[int, EncoderInput]) -> ScheduledStep:
        """Build a step and advance its sequences.

        There are no drafts beside a beam search or a sequence that the host samples, which read the
        logits of all sampled rows.
        """
        if any(sequence.width > 1 or sequence.on_host for sequence, _ in rows):
            for sequence, _ in rows:
                if sequence.drafts is not None:
                    sequence.drafts.submit(None)
        step_rows = [row for sequence, count in rows for row in self._step_rows(sequence, count)]
        longest = self.limits.longest_first
        step_rows.sort(key=lambda row: (len(row.tokens) > 1, not row.drafts,
                                        -row.past if longest else row.slot))
        sampled = [(index, row) for index, row in enumerate(step_rows) if row.samples]
        searching = [row.sequence for _, row in sampled if row.sequence.width > 1]
        scored, prompts = _scored(step_rows)
        memory = None
        sources = [row.sequence.source for row in step_rows]
        if isinstance(sources[0], PromptMemory):
            memory = EncoderOutputs.of_images(
                [self._encoder_rows.row(row.sequence.key) for row in step_rows],
                [own.view(row.past) for own, row in zip(sources, step_rows, strict=True)
                 if isinstance(own, PromptMemory)])
        elif sources[0] is not None:
            memory = EncoderOutputs.of(
                [self._encoder_rows.row(row.sequence.key) for row in step_rows],
                [0 if own is None else len(own) for own in sources])
        proposals = self._proposals(step_rows)
        step = Step.of(
            [row.tokens for row in step_rows], [row.past for row in step_rows],
            [row.table.blocks for row in step_rows], [row.slot for row in step_rows],
            sample=[index for index, _ in sampled], admit=admitted,
            copies=np.array(copies, np.int32).reshape(-1, 2), encode=encode, memory=memory,
            candidates=max((own.candidates for own in searching), default=0),
            logits="pooled" if any(row.sequence.pools for row in step_rows) else
            "sampled" if any(not own.candidates for own in searching)
            or any(row.sequence.on_host for _, row in sampled) else "none",
            token_type_ids=_token_types(step_rows),
            scored=scored,
            masks={row.slot: self._draft_masks[row.sequence] if row.drafts
                   else row.sequence.mask(()) for _, row in sampled
                   if row.sequence.mask is not None},
            num_drafts=[row.drafts for row in step_rows],
            num_uncommitted=[row.uncommitted for row in step_rows],
            adapters=[self._adapter_slot(row.sequence) for row in step_rows],
            load_adapters=self._new_adapters, **self._images_of_step(),
            **_embeds(step_rows, self.images), rotary_positions=_rotary_positions(step_rows),
            bidirectional_ranges=_bidirectional_ranges(step_rows),
            unread=[row.unread for row in step_rows], **proposals)
        self._new_adapters = {}
        scheduled = ScheduledStep(
            step, [(row.sequence, row.sequence.epoch) for _, row in sampled], prompts,
            self.limits.keeps_states)
        for sequence, count in rows:
            self._count(sequence, count)
        for _, row in sampled:
            self._start_drafts(row.sequence, step.propose)
        return scheduled

    def _images_of_step(self) -> dict[str, object]:
        """Fields of a step for the images to encode and to free."""
        if self.images is None:
            return {}
        encode, freed = self.images.take()
        return {"encode_media": encode, "free_media": freed}

    def _adapter_slot(self, sequence: Sequence) -> int:
        """The slot of a sequence's adapter; -1 without one."""
        return -1 if sequence.adapter is None else self.adapters.slot(sequence.adapter)

    def _start_drafts(self, sequence: Sequence, propose: int | None) -> None:
        """Note that a step samples a sequence and verifies its drafts.

        Args:
            propose: see `Step`.
        """
        if sequence.drafts is None:
            return
        sequence.drafts.start()
        if sequence.drafts.engine is not None:
            sequence.drafts.engine.expect(propose or 0)

    def _proposals(self, step_rows: abc.Sequence[_StepRow]) -> dict[str, object]:
        """Fields of a step for the engine's draft model or prompt lookup.

        A draft model runs in every step of the sequences that it drafts for, so that its caches
        have all positions.
        """
        if not self.limits.proposes or self.drafts is None:
            return {}
        drafting = [(row, row.sequence.drafts) for row in step_rows
                    if row.sequence.drafts is not None and row.sequence.drafts.engine]
        wanted = self.drafts.num_proposals([drafts for _, drafts in drafting])
        room = max((row.sequence.limit - len(row.sequence.tokens) - row.sequence.ahead - 2
                    for row, _ in drafting if row.samples), default=0)
        count = max(min(wanted or 0, room), 0)
        if self.limits.prompt_lookup:
            return {"propose": count} if count else {}
        if wanted is None:
            for _, drafts in drafting:
                assert drafts.engine is not None
                drafts.engine.lost = True
            return {}
        if self.limits.proposals_take_blocks:
            self._make_room_for_proposals(
                step_rows, max(count, self.limits.proposed_positions) if count else 0)
        following = [() if row.samples else row.sequence.between(
            row.past + len(row.tokens), row.past + len(row.tokens) + 1) for row in step_rows]
        return {"next_tokens": np.array([token for own in following for token in own or (-1,)],
                                        np.int64), "propose": count}

    def _make_room_for_proposals(self, step_rows: abc.Sequence[_StepRow], count: int) -> None:
        """Allocate positions for proposals, as far as blocks are free."""
        for row in step_rows:
            if row.samples and row.sequence.drafts is not None:
                self._grow_if_free(row.table, row.past + len(row.tokens) + count)

    def _grow_if_free(self, table: BlockTable, length: int) -> bool:
        """Extend a table, but leave a block for each running sequence."""
        return self.blocks.lacks(table, length) + len(self.running) <= self.blocks.free \
            and self.blocks.grow(table, length)

    def _step_rows(self, sequence: Sequence, count: int) -> list[_StepRow]:
        past = sequence.computed
        sequence.last_step = self._steps
        if sequence.searches:
            return [_StepRow(sequence, slot, table, [token], past, True) for slot, table, token in
                    zip(sequence.slots, sequence.tables, sequence.beams, strict=True)]
        tokens = sequence.between(past, past + count) if past < sequence.known else [LAST]
        drafts = [] if sequence.drafts is None else sequence.drafts.pending
        scored: abc.Sequence[int] = () if sequence.scores is None else \
            sequence.scores.schedule(past, past + count)
        return [_StepRow(sequence, sequence.slots[0], sequence.tables[0], tokens + drafts, past,
                         past + count >= sequence.known, scored, len(drafts),
                         sequence.drafts.unread if sequence.drafts is not None else 0,
                         sequence.uncommitted)]

    def _count(self, sequence: Sequence, count: int) -> None:
        searched, sequence.beams = sequence.searches, []
        sequence.computed += count
        if sequence.drafts is not None and not self.limits.keeps_states:
            sequence.computed += len(sequence.drafts.pending)
        sequence.uncommitted = 0
        self._release_images(sequence, sequence.computed)
        sequence.ahead += sequence.computed >= sequence.known
        if not searched:
            self._name(sequence)

    def _no_longer_coming(self, names: abc.Sequence[bytes]) -> None:
        """Remove names from the blocks that running sequences will compute."""
        for name in names:
            self._coming[name] -= 1
            if self._coming[name] <= 0:
                del self._coming[name]

    def _name(self, sequence: Sequence) -> None:
        """Name the computed blocks, so that other sequences can share them."""
        table, length = sequence.tables[0], min(sequence.computed, sequence.known)
        before = table.named
        if length < (before + 1) * self.blocks.block_size:
            return
        names = self._names(sequence)
        self.blocks.name(table, names, length)
        done = names[before:table.named]
        if sequence.coming and done:
            self._no_longer_coming(sequence.coming[:len(done)])
            sequence.coming = sequence.coming[len(done):]

    # Results of a step.
    def append(self, sequence: Sequence, tokens: abc.Sequence[int]) -> None:
        """Append sampled tokens to a sequence."""
        sequence.tokens += tokens
        sequence.known += len(tokens)
        self._name(sequence)

    def go_on(self, sequence: Sequence, tokens: abc.Sequence[int],
              parents: abc.Sequence[int]) -> None:
        """Continue a beam search with these tokens, each after the beam of its parent."""
        before = sequence.tables
        initial = len(before) == 1  # all beams continue the prompt
        sequence.tables = [self.blocks.fork(before[0 if initial else parent]) for parent in parents]
        for table in before:
            self.blocks.close(table)
        sequence.beams = list(tokens)

    # Sessions.

    def lease(self, count: int) -> SlotLease | None:
        """Reserve slots for a session, ending older ones if necessary; None if they are too few."""
        held = sum(len(lease.slots) for lease in self._leases)
        while len(self._slots) < count <= len(self._slots) + held and self._leases:
            held -= len(self._leases[0].slots)
            self.end(self._leases[0])
        if count > len(self._slots):
            return None
        lease = SlotLease([heapq.heappop(self._slots) for _ in range(count)],
                      [self._encoder_rows.take() for _ in range(count)],
                      [BlockTable() for _ in range(count)])
        self._leases.append(lease)
        return lease

    def extend(self, lease: SlotLease, lengths: abc.Sequence[int]) -> bool:
        """Allocate positions for a session's sequences, ending other sessions if necessary.

        Returns False, and takes nothing, if blocks are short.

        Args:
            lengths: positions of each sequence.
        """
        lacks = sum(map(self.blocks.lacks, lease.tables, lengths))
        while lacks > self.blocks.free and len(self._leases) > 1:
            self.end(next(own for own in self._leases if own is not lease))
        return lacks <= self.blocks.free and all(map(self.blocks.grow, lease.tables, lengths))

    def end(self, lease: SlotLease) -> None:
        """End a session and free its slots and blocks."""
        if lease in self._leases:
            self._leases.remove(lease)
            for table in lease.tables:
                self.blocks.close(table)
            for slot, row in zip(lease.slots, lease.memory, strict=True):
                heapq.heappush(self._slots, slot)
                self._encoder_rows.give_back(row)
            lease.slots = []


def _rows_to_encode(source: EncoderInput | None) -> int:
    """Rows of images that layers attend to."""
    return len(source) if isinstance(source, PromptMemory) and source.pieces else 0


def _token_types(step_rows: abc.Sequence[_StepRow]) -> np.ndarray:
    """Token types of a step's tokens; empty if all are 0."""
    if not any(row.sequence.token_type_ids for row in step_rows):
        return np.empty(0, np.int64)
    return np.concatenate([
        np.asarray(row.sequence.token_type_ids[row.past:row.past + len(row.tokens)]
                   or [0] * len(row.tokens), np.int64) for row in step_rows])


def _embeds(step_rows: abc.Sequence[_StepRow], images: EncoderCache | None) -> \
        dict[str, np.ndarray]:
    """Fields of a step for rows in place of token embeddings; none if no token has one."""
    if not any(row.sequence.embeds for row in step_rows):
        return {}
    given = [_given_rows(row) for row in step_rows]
    rows = [own for own in given if len(own)]
    count, first = sum(map(len, rows)), 0
    ids, encoded = list[np.ndarray](), list[tuple[int, int, int]]()
    for row, known in zip(step_rows, given, strict=True):
        own, embeds = np.full(len(row.tokens), -1, np.int32), row.sequence.embeds
        if embeds is not None and embeds.rows is not None:
            own[embeds.positions[embeds.within(row.past, row.past + len(row.tokens))] - row.past] \
                = np.arange(first, first + len(known))
            first += len(known)
        elif embeds is not None:
            assert images is not None
            for _, item in embeds.items_within(row.past, row.past + len(row.tokens)):
                start, stop = np.searchsorted(
                    item.positions, (row.past, row.past + len(row.tokens))).tolist()
                own[item.positions[start:stop] - row.past] = np.arange(count, count + stop - start)
                encoded.append((images.place(item.item), start, stop - start))
                count += stop - start
        ids.append(own)
    return {"embeds": np.concatenate(rows or given[:1]), "embed_ids": np.concatenate(ids),
            "media_rows": np.array(encoded, np.int32).reshape(-1, 3)} if count else {}


def _rotary_positions(step_rows: abc.Sequence[_StepRow]) -> np.ndarray:
    """Positions by axis of a step's tokens; empty if all are positions in the cache."""
    by_axis = [row.sequence.embeds.rotary if row.sequence.embeds else None for row in step_rows]
    if not any(by_axis):
        return IN_CACHE.of_prompt
    return np.concatenate([
        (own or IN_CACHE).within(row.past, row.past + len(row.tokens))
        for row, own in zip(step_rows, by_axis, strict=True)])


def _bidirectional_ranges(step_rows: abc.Sequence[_StepRow]) -> np.ndarray:
    """Ranges of a step's tokens; empty: none has one."""
    if not any(row.sequence.embeds is not None and row.past < row.sequence.embeds.last_range_end
               for row in step_rows):
        return np.empty((0, 2), np.int32)
    return np.concatenate([
        np.zeros((len(row.tokens), 2), np.int32) if row.sequence.embeds is None else
        row.sequence.embeds.ranges_within(row.past, row.past + len(row.tokens))
        for row in step_rows])


def _given_rows(row: _StepRow) -> np.ndarray:
    """The rows that the caller gave for the tokens of a row of a step, [n, width]."""
    embeds = row.sequence.embeds
    if embeds is None or embeds.rows is None:
        return np.empty((0, 0), np.float32)
    return embeds.rows[embeds.within(row.past, row.past + len(row.tokens))]


def _proposed(sampled: StepOutput, index: int) -> tuple[list[int], int]:
    """Drafts of one of `Step.sample`, and the number of tokens that agree with their source."""
    if sampled.drafts is None:
        return [], MATCH
    drafts = sampled.drafts[index]
    return drafts[drafts >= 0].tolist(), \
        MATCH if sampled.matches is None else int(sampled.matches[index])


def _scored(step_rows: abc.Sequence[_StepRow]) -> \
        tuple[ScoredRows, list[tuple[PromptScores, int]]]:
    """The scored rows of a step, and each prompt with its number of them."""
    rows, targets, owners = list[np.ndarray](), list[int](), list[tuple[PromptScores, int]]()
    start = 0
    for row in step_rows:
        scores, scored = row.sequence.scores, row.scored
        if scores is not None and scored:
            rows.append(np.array(scored, np.int64) + (start - row.past))
            targets += scores.targets(scored)
            owners.append((scores, len(scored)))
        start += len(row.tokens)
    if not owners:
        return ScoredRows.none(), owners
    counts = np.repeat([scores.count for scores, _ in owners], [count for _, count in owners])
    return ScoredRows(np.concatenate(rows), np.array(targets, np.int64),
                      counts.astype(np.int32)), owners


def _rivals(one: Sequence, other: Sequence) -> tuple[Share, Share]:
    """The shares of two sequences on the level where they differ: tenants or requests."""
    if one.tenant is other.tenant:
        return one.share, other.share
    return one.tenant, other.tenant


def _held(own: Sequence) -> tuple[int, int]:
    """Slots of a sequence's tenant and request."""
    return own.tenant.slots, own.share.slots
