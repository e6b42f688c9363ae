"""Which sequences run in the next step, and how many tokens of each.

Running sequences are in one order, by priority and arrival. A sequence that lacks blocks preempts
later ones, which are recomputed; the first in order gets all blocks if it needs them, so that it
always goes on. A priority is worth a fixed number of steps of waiting, so nobody waits for ever.

Waiting sequences are admitted by fair shares of the slots (fair_queue.py). No request and no tenant
holds all slots while another waits: one that has no slot preempts the youngest sequence of the one
that holds the most. This costs one recomputation of few tokens, most of which the prefix cache
still has; to wait for a completion costs up to its whole length. Only a share without any slot
preempts, so each arrival preempts once, and what was preempted cannot preempt back.

Tenants with many running sequences take turns with them where a step of all would delay the others:
see `_limit_rows`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

from llmc.runtime.core.fair_queue import HEAD_START, Order, Share, WaitingGroup, has_waited_for
from llmc.runtime.core.kv_cache import BlockHashes, BlockPool, BlockTable
from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.core.step import (
    LAST,
    EncoderOutputs,
    EngineLimits,
    SamplingState,
    ScoredRows,
    Step,
    StepOutput,
)
from llmc.runtime.core.step_times import StepTimes
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import Logprobs

MOST_PRIORITY = 100  # and the least is as far below 0
_LOOKED_AT = 64  # waiting groups, for one whose prompt is not being computed
_MIXED = 512  # tokens of a step that some wait for, where no prompt has waited long
_LONG = 4  # steps
_MAX_SLOWDOWN = 1.5  # of a step of equal shares, by the further rows of large tenants


@dataclass(eq=False)
class Sequence:
    """A prompt that is being completed: once, or by `width` beams.

    Args:
        request: whose it is.
        prompt: what the decoder reads.
        limit: tokens to generate, at most.
        state: what its slot begins with, after these tokens.
        width: beams. Each has a slot and a table; the prompt is read by the first alone.
        candidates: of each beam; 0: their logits are wanted.
        key: what else changes the content of its blocks.
        source: what an encoder reads.
        stalled: whether it is not to go on for now.
        aborted: whether nobody wants it any more; it is removed before the next step.
        mask: which tokens it may choose next, as in `Step.masks`; it waits for its last token then.
        scores: log-probabilities of the prompt, where they are wanted.

    Attributes:
        tokens: generated and known. Those of beams are their search's.
        computed: positions that are in the cache once all that was submitted has run.
        cached: of its prompt, when it first began.
        ahead: tokens that were asked for and are not known yet.
        beams: what each beam goes on with, once known.
        coming: names of blocks that it is about to compute.
        epoch: how often it has ended, or had to leave.
        share: of its request.
        group: in which it waits since it was preempted.
        last_step: the last step that it was a part of.
    """

    request: int
    prompt: list[int]
    limit: int
    state: Callable[[abc.Sequence[int]], SamplingState]
    width: int = 1
    candidates: int = 0
    key: bytes = b""
    source: abc.Sequence[int] | None = None
    stalled: Callable[[], bool] = lambda: False
    aborted: Callable[[], bool] = lambda: False
    mask: Callable[[], np.ndarray] | None = None
    scores: PromptScores | None = None
    tokens: list[int] = field(default_factory=list)
    order: Order = ()
    priority: int = 0
    chain: BlockHashes | None = None
    slots: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    ahead: int = 0
    beams: list[int] = field(default_factory=list)
    coming: list[bytes] = field(default_factory=list)
    epoch: int = 0
    share: Share = field(init=False, repr=False)
    group: WaitingGroup | None = None
    last_step: int = 0

    def __post_init__(self) -> None:
        self.known = len(self.prompt)  # tokens whose keys and values can be computed

    @property
    def tenant(self) -> Share:
        """The share that the request's is a part of."""
        assert self.share.parent is not None
        return self.share.parent

    @property
    def searches(self) -> bool:
        """It has read its prompt, and goes on by beams."""
        return self.width > 1 and self.computed >= len(self.prompt)

    def between(self, start: int, end: int) -> list[int]:
        """Tokens that are known."""
        count = len(self.prompt)
        return self.prompt[start:end] + self.tokens[max(start - count, 0):max(end - count, 0)]

    def wanted(self) -> int:
        """New tokens of each row that can be computed now."""
        if self.stalled():
            return 0
        if self.searches:
            return 1 if self.beams else 0
        if self.computed < self.known:
            return self.known - self.computed
        if self.mask is not None:
            return 0
        return 1 if self.ahead and len(self.tokens) + self.ahead < self.limit else 0


@dataclass(frozen=True)
class ScheduledStep:
    """A step, and for each of its `sample` the sequence, and its epoch.

    Args:
        scored: prompts and how many of `Step.scored` are each one's, in their order.
    """

    step: Step
    chosen: list[tuple[Sequence, int]]
    scored: list[tuple[PromptScores, int]] = field(default_factory=list)

    def read(self, sampled: StepOutput) -> Iterator[tuple[Sequence, SequenceOutput]]:
        """What the step led to for each sequence that it still concerns."""
        start = 0
        for scores, count in self.scored:  # also of a prompt that has been preempted since
            scores.extend(sampled.scored[start:start + count])
            start += count
        rows: dict[Sequence, list[int]] = {}
        for index, (sequence, epoch) in enumerate(self.chosen):
            if sequence.epoch == epoch:
                rows.setdefault(sequence, []).append(index)
        for sequence, own in rows.items():
            sequence.ahead -= 1
            yield sequence, SequenceOutput.of(sampled, own)


_Row = tuple[Sequence, int]  # and how many new tokens of each of its rows


@dataclass(frozen=True)
class _Part:
    """A row of a step."""

    sequence: Sequence
    slot: int
    table: BlockTable
    tokens: list[int]
    past: int
    samples: bool
    scored: range = range(0)  # positions


@dataclass(eq=False)
class SlotLease:
    """Slots, rows of an encoder's memory and blocks that a session holds, until a sequence lacks
    them; then `slots` is empty.
    """

    slots: list[int]
    memory: list[int]
    tables: list[BlockTable]


@dataclass(frozen=True)
class SequenceOutput:
    """What one sequence got: `StepOutput` of its rows."""

    token: int
    logprobs: Logprobs | None
    candidates: Candidates | None
    logits: np.ndarray | None

    @staticmethod
    def of(sampled: StepOutput, rows: list[int]) -> SequenceOutput:
        found = sampled.candidates
        return SequenceOutput(int(sampled.tokens[rows[0]]), sampled.logprobs[rows[0]],
                      found and Candidates(found.tokens[rows], found.log_probs[rows]),
                      None if sampled.logits is None else sampled.logits[rows])


class Scheduler:
    """See above. Nothing here waits, and nothing here knows a device.

    Args:
        max_num_batched_tokens: of a step; every sequence that decodes has one.
        reuse: share blocks between sequences that begin alike; not those of a model that keeps
            states, which would be missing.

    Attributes:
        preemptions: sequences that gave their blocks back.
        queries, hits: prompt tokens of sequences that entered, and those that were there already.
        step_times: of decode steps.
    """

    def __init__(self, limits: EngineLimits, max_num_batched_tokens: int, *,
                 reuse: bool = True) -> None:
        self.limits = limits
        self.budget = max(max_num_batched_tokens, limits.max_slots)
        self._reuse = reuse and not limits.keeps_states
        self.blocks = BlockPool(limits.num_blocks, limits.block_size, reuse=self._reuse)
        self.running: list[Sequence] = []  # in order
        self.preemptions = self.queries = self.hits = 0
        self.step_times = StepTimes()
        self._shares = Share()  # of all tenants
        self._tenants: WeakValueDictionary[str, Share] = WeakValueDictionary()
        self._groups: dict[WaitingGroup, None] = {}  # that wait
        self._hidden: list[WaitingGroup] = []  # of these, not to be admitted in this step
        self._score_room = limits.max_scored  # tokens of this step that can still be scored
        self._slots = list(range(limits.max_slots))  # a heap: the lowest are used first
        self._memory: dict[int, list[int]] = {}  # request: row and users
        self._memory_rows = list(range(limits.max_slots))
        self._coming: Counter[bytes] = Counter()  # names that running sequences will compute
        self._first: dict[int, Sequence] = {}  # by request, of those that run
        self._leases: list[SlotLease] = []
        self._steps = self._arrivals = 0

    # Who is there.

    def add(self, sequences: Iterable[Sequence], priority: int = 0,
            tenant: str | None = None) -> WaitingGroup:
        """Queue the sequences of a request.

        Args:
            tenant: whose share of the slots the request has a part of. None: its own.
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
        """Forget what waits in a group."""
        group.first = None
        self._wait(group)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ends, wherever it is."""
        if sequence.group is not None:
            self.drop(sequence.group)
        elif sequence.slots:
            self._give_back(sequence)
            self.running.remove(sequence)
            sequence.share.hold(-sequence.width)
            sequence.share.moved(self._steps)

    @property
    def waiting(self) -> int:
        """Number of requests and preempted sequences that wait. Any thread may ask."""
        return len(self._firsts())

    def load(self) -> tuple[int, int, int]:
        """Running sequences, waiting callers and free blocks, for any thread to read. Aborted
        sequences count as gone, though a step that runs holds their blocks until it ends.
        """
        present = list(self.running)
        wanted = [own for own in present if not own.aborted()]
        waiting = sum(not own.aborted() for own in self._firsts())
        free = self.blocks.free
        if len(wanted) < len(present):
            tables = [table for own in wanted for table in list(own.tables)]
            tables += [table for lease in list(self._leases) for table in lease.tables]
            used = {block for table in tables for block in list(table.blocks)}
            free = max(free, self.blocks.num_blocks - len(used))
        return len(wanted), waiting, free

    def _firsts(self) -> list[Sequence]:
        """The first sequence of each waiting group."""
        return [group.first for group in list(self._groups) if group.first is not None]

    def problem(self, prompt: int, limit: int, width: int = 1) -> str | None:
        """Why a sequence could never run."""
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
        """The next step; None where nothing can run until something is read, or at all."""
        self._steps += 1
        self._score_room = self.limits.max_scored
        self._bring_back()
        self._make_way()
        rows: list[_Row] = []  # and how many tokens of each row
        copies: list[tuple[int, int]] = []
        admitted: dict[int, SamplingState] = {}
        encode: dict[int, abc.Sequence[int]] = {}
        wanted = {sequence: sequence.wanted() for sequence in self.running}
        self._limit_rows(wanted)
        decoding = sum(sequence.width if sequence.searches else 1
                       for sequence, count in wanted.items() if count == 1)
        budget = self._room(wanted, decoding) - decoding
        for sequence in list(self.running):
            count = wanted[sequence]
            if count > 1:
                count = self._fit(sequence, count, max(budget, 0))
                budget -= count
            if count > 0 and sequence.slots and self._make_room(sequence, count, rows):
                copies += self._own(sequence)
                self._append(rows, sequence, count)
        while budget > 0 and (entering := self._enter(rows)):
            count = self._fit(entering, entering.known - entering.computed, budget)
            budget -= count
            copies += self._own(entering)
            self._append(rows, entering, count)
            admitted.update(dict.fromkeys(entering.slots, entering.state(entering.tokens)))
            if entering.source is not None and self._memory[entering.request][1] == 1:
                encode[self._memory[entering.request][0]] = entering.source
        self.blocks.copied()
        return self._step(rows, copies, admitted, encode) if rows else None

    def _limit_rows(self, wanted: dict[Sequence, int]) -> None:
        """Leave out sequences of tenants with many rows, so that the step takes at most
        _MAX_SLOWDOWN times as long as one in which all tenants have as many rows as the smallest.

        The sequences that had a row last are left out, so they take turns. Beams are never left
        out. A tenant that waits for its first slot counts as one row.

        Args:
            wanted: new tokens of each running sequence; set to 0 for those left out.
        """
        tenants: dict[Share, list[Sequence]] = {}
        beams = 0
        for sequence, count in wanted.items():
            if sequence.searches:
                beams += sequence.width
            elif count == 1:
                tenants.setdefault(sequence.tenant, []).append(sequence)
        group = self._next()
        waits = group is not None and group.share.parent is not None \
            and not group.share.parent.slots
        sizes = [len(rows) for rows in tenants.values()] + [1] * waits
        if len(sizes) < 2 or max(sizes) == min(sizes):
            return

        def seconds(limit: int) -> float:
            return self.step_times.of(beams + sum(min(size, limit) for size in sizes))

        allowed = _MAX_SLOWDOWN * seconds(min(sizes))
        limit = max(size for size in range(min(sizes), max(sizes) + 1)
                    if size == min(sizes) or seconds(size) <= allowed)
        for rows in tenants.values():
            rows.sort(key=lambda own: own.last_step)
            for sequence in rows[limit:]:
                wanted[sequence] = 0

    def _room(self, wanted: Mapping[Sequence, int], decoding: int) -> int:
        """Tokens of a step: while some decode, no more than they hardly notice, unless a prompt has
        waited for steps. So a prompt that comes alone stalls nobody, and of many none has to wait.
        """
        prompts = [(own.order[0], own.priority) for own, count in wanted.items() if count > 1]
        if group := self._next():
            prompts.append((group.order[0], group.priority))
        waited = max((self._steps - came + priority * HEAD_START for came, priority in prompts),
                     default=0)
        if not decoding or waited > _LONG:
            return self.budget
        return min(self.budget, max(_MIXED, 2 * decoding))

    def _fit(self, sequence: Sequence, count: int, budget: int) -> int:
        """How many of so many tokens to read now."""
        count = min(self._before_branching(sequence, count), budget)
        if sequence.scores is None:
            return count
        return sequence.scores.fit(sequence.computed, count, self._score_room)

    def _append(self, rows: list[_Row], sequence: Sequence, count: int) -> None:
        """Give a sequence its part of this step."""
        rows.append((sequence, count))
        if sequence.scores is not None:
            self._score_room -= len(sequence.scores.positions(
                sequence.computed, sequence.computed + count))

    def _before_branching(self, sequence: Sequence, count: int) -> int:
        """How many of so many tokens to read now: of a prompt that other completions are to go on
        from, and that keeps a state, not the last one with others. They begin with that.
        """
        left = len(sequence.prompt) - 1 - sequence.computed
        if not self.limits.keeps_states or not 0 < left < count or not any(
                first.request == sequence.request for first in self._firsts()):
            return count
        return left

    def _make_room(self, sequence: Sequence, count: int, rows: list[_Row]) -> bool:
        """Blocks for so many more tokens of each row; from those behind, if need be."""
        if sequence.width == 1 and self.blocks.has(sequence.tables[0], sequence.computed, count):
            return True
        while True:
            length, tables = sequence.computed + count, self._tables(sequence)
            lacks = sum(self.blocks.lacks(table, length) for table in tables)
            if lacks + self.blocks.copies(tables, sequence.computed) <= self.blocks.free:
                for table in tables:
                    self.blocks.grow(table, length)
                return True
            if not self._leave_for(sequence, {id(own) for own, _ in rows}):
                return False

    def _tables(self, sequence: Sequence) -> list[BlockTable]:
        return sequence.tables if sequence.searches else sequence.tables[:1]

    def _own(self, sequence: Sequence) -> list[tuple[int, int]]:
        return [self.blocks.own(table, sequence.computed) for table in self._tables(sequence)
                if self.blocks.shared(table, sequence.computed)]

    def _leave_for(self, wants: Sequence, kept: set[int]) -> bool:
        """Free blocks for a running sequence: end a session, or else preempt a stalled or a later
        sequence. Of later ones, first those of the lowest priority, then of the largest share.
        """
        if self._leases:
            self.end(self._leases[-1])
            return True
        later = [own for own in self.running if id(own) not in kept and own is not wants
                 and (own.stalled() or self._may_lose_blocks(own, wants))]
        if not later:
            return False
        self._preempt(max(later, key=lambda own: (own.stalled(), own.priority, *_held(own),
                                                  own.order)))
        return True

    def _may_lose_blocks(self, own: Sequence, wants: Sequence) -> bool:
        """Whether a sequence may be preempted for another's growth. Those of a smaller share only
        for the first in order, which always goes on.
        """
        if own.order < wants.order:
            return False
        theirs, its = _rivals(own, wants)
        return own.priority > wants.priority or theirs.slots >= its.slots \
            or wants is self.running[0]

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.remove(sequence)
        sequence.group = WaitingGroup(iter([sequence]), sequence.order, sequence.priority,
                                      sequence.share)
        self._wait(sequence.group)

    def _wait(self, group: WaitingGroup) -> None:
        """Sort a group by what of it waits now."""
        if group.first is None:
            self._groups.pop(group, None)
        else:
            self._groups[group] = None
        group.moved(self._steps)

    def _hide(self, group: WaitingGroup) -> None:
        group.hidden = True
        self._hidden.append(group)
        group.moved(self._steps)

    def _bring_back(self) -> None:
        """Hidden groups may be admitted again, except stalled ones."""
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
            if not group.first.stalled():
                return group
            self._hide(group)
        return None

    def _ready(self) -> WaitingGroup | None:
        """`_next`, except groups whose prompt is being computed for another sequence."""
        for _ in range(_LOOKED_AT):
            group = self._next()
            if group is None or not (self._is_coming(group) or self._waits_for_scoring(group)):
                return group
            self._hide(group)
        return None

    def _enter(self, rows: list[_Row]) -> Sequence | None:
        """Admit the next sequence; None if none can be."""
        group = self._ready()
        if group is None or (first := group.first) is None or not self._begin(first, rows):
            return None
        first.share.hold(first.width)
        group.take()
        self._wait(group)
        return first

    def _names(self, sequence: Sequence) -> list[bytes]:
        """The names of its blocks, as far as its tokens are known."""
        if sequence.chain is None:
            sequence.chain = BlockHashes(self.blocks.block_size, sequence.key)
        chain = sequence.chain
        if (len(chain.names) + 1) * self.blocks.block_size <= sequence.known:
            chain.extend(sequence.prompt + sequence.tokens)
        return chain.names

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        """The names of blocks that it may take as they are: not those whose logits it needs."""
        names, scores = self._names(sequence), sequence.scores
        if scores is None or scores.complete:
            return names
        return names[:scores.scheduled // self.blocks.block_size]

    def _waits_for_scoring(self, group: WaitingGroup) -> bool:
        """Whether its first sequence is to be scored, for which this step has no room left."""
        sequence = group.first
        return not self._score_room and sequence is not None and \
            sequence.scores is not None and not sequence.scores.complete

    def _is_coming(self, group: WaitingGroup) -> bool:
        """Whether the prompt of its first sequence, or at least half of what that would compute, is
        being computed for another.
        """
        sequence = group.first
        assert sequence is not None
        first = self._first.get(sequence.request)
        if first is not None and \
                first.computed < len(first.prompt) - self.limits.keeps_states:
            return True
        if not self._coming:
            return False
        stalled = Counter(name for own in self.running if own.coming and own.stalled()
                          for name in own.coming)  # nobody knows when these come
        names = self._reusable(sequence)
        coming = found = len(self.blocks.match(names, sequence.known))
        while coming < len(names) and self._coming[names[coming]] > stalled[names[coming]]:
            coming += 1
        size = self.blocks.block_size
        return 2 * (coming - found) * size >= max(sequence.known - found * size, 1)

    def _begin(self, sequence: Sequence, rows: list[_Row]) -> bool:
        """Give a sequence its slots and blocks, if there are enough for all that is known of it."""
        names = self._names(sequence)
        table = self._open(sequence)
        spare = len(self.running)  # a block for each that runs already
        lacks = self.blocks.lacks(table, sequence.known) + \
            self.blocks.copies([table], sequence.known - 1)
        while len(self._slots) < sequence.width or lacks > self.blocks.free - spare:
            if not self._leave_for_new(sequence, {id(own) for own, _ in rows}):
                self.blocks.close(table)
                return False
            spare = len(self.running)
        sequence.group = None
        sequence.tables = [table]
        sequence.slots = [heapq.heappop(self._slots) for _ in range(sequence.width)]
        sequence.computed = min(len(table.blocks) * self.blocks.block_size, sequence.known - 1)
        if not sequence.epoch:
            sequence.cached = sequence.computed
            self.queries += sequence.known
            self.hits += sequence.computed
        self.blocks.grow(table, sequence.known)
        sequence.coming = names[table.named:] if self._reuse else []
        self._coming.update(sequence.coming)
        if sequence.source is not None:
            own = self._memory.get(sequence.request)
            if own is None:
                own = self._memory[sequence.request] = [heapq.heappop(self._memory_rows), 0]
            own[1] += 1
        self._first.setdefault(sequence.request, sequence)
        insort(self.running, sequence, key=lambda own: own.order)
        return True

    def _open(self, sequence: Sequence) -> BlockTable:
        """The blocks that are there of a sequence. Of a prompt that another completion of it has
        read, that are all but the last token's; a last block that is not full is to be copied. A
        state is that of the place where the other is.
        """
        last = len(sequence.prompt) - 1
        first = self._first.get(sequence.request)
        if first is not None and not sequence.tokens and first.width == sequence.width == 1 \
                and (first.computed == last or not self.limits.keeps_states) \
                and (sequence.scores is None or sequence.scores.complete):
            return self.blocks.fork(first.tables[0], last)
        return self.blocks.open(self.blocks.match(self._reusable(sequence), sequence.known))

    def _make_way(self) -> None:
        """Preempt for the sequence to admit next, before the running ones get a step: by priority,
        or if its share holds nothing.
        """
        group = self._ready()
        if group is None or (first := group.first) is None:
            return
        if any(own.priority > first.priority for own in self.running):
            lacks = self._lacks(first)
            while not self._has_room(first, lacks):
                if not self._leave_for_new(first, set()):
                    break
        for own in self._beyond_share(first):
            self._preempt(own)

    def _lacks(self, first: Sequence) -> int:
        """Blocks that a waiting sequence needs and does not find."""
        found = len(self.blocks.match(self._reusable(first), first.known))
        return self.blocks.spans(first.known) - found

    def _has_room(self, first: Sequence, lacks: int) -> bool:
        return len(self._slots) >= first.width and lacks <= self.blocks.free - len(self.running)

    def _leave_for_new(self, sequence: Sequence, kept: set[int]) -> bool:
        """Free a slot and blocks for a waiting sequence: end a session, or else preempt a stalled
        sequence, or one of lower priority.
        """
        if self._leases:
            self.end(self._leases[-1])
            return True
        after = [own for own in self.running if id(own) not in kept
                 and (own.stalled() or self._goes_before(sequence, own))]
        if not after:
            return False
        self._preempt(max(after, key=lambda own: (own.stalled(), own.order)))
        return True

    def _goes_before(self, first: Sequence, own: Sequence) -> bool:
        """Whether a waiting sequence has priority over a running one, also once that waits: it
        would be admitted first if it had lost the last slot of its share.
        """
        if own.priority <= first.priority or own.order < first.order:
            return False
        its, theirs = _rivals(first, own)
        return not its.slots or theirs.slots > own.width or \
            not has_waited_for(own.order, first.priority, self._steps)

    def _beyond_share(self, first: Sequence) -> list[Sequence]:
        """Running sequences to preempt for a waiting one whose request or tenant has no slot: of
        the rival with the most slots the youngest, at most half of them. None if that is not
        enough, or there is room. A beam search is not preempted, which would begin again.
        """
        parent = first.tenant if first.tenant.slots else self._shares
        if first.share.slots or parent.slots == parent.holders:
            return []
        lacks = self._lacks(first)
        if self._has_room(first, lacks) or self._leases or \
                any(own.stalled() for own in self.running):  # which `_begin` takes
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
            if lacks <= free and len(self._slots) + len(victims) >= first.width:
                return victims
        return []

    def _give_back(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            self.blocks.close(table)
        for slot in sequence.slots:
            heapq.heappush(self._slots, slot)
        if sequence.source is not None:
            own = self._memory[sequence.request]
            own[1] -= 1
            if not own[1]:
                heapq.heappush(self._memory_rows, self._memory.pop(sequence.request)[0])
        if self._first.get(sequence.request) is sequence:
            del self._first[sequence.request]
        self._has_come(sequence.coming)
        sequence.tables, sequence.slots, sequence.beams, sequence.coming = [], [], [], []
        sequence.computed = sequence.ahead = 0
        sequence.epoch += 1

    def _step(self, rows: list[_Row], copies: list[tuple[int, int]],
              admitted: dict[int, SamplingState],
              encode: dict[int, abc.Sequence[int]]) -> ScheduledStep:
        """Put a step together; from now on what it computes counts as computed."""
        parts = [part for sequence, count in rows for part in self._parts(sequence, count)]
        longest = self.limits.longest_first
        parts.sort(key=lambda part: (len(part.tokens) > 1, -part.past if longest else part.slot))
        chosen = [(index, part) for index, part in enumerate(parts) if part.samples]
        searching = [part.sequence for _, part in chosen if part.sequence.width > 1]
        scored, prompts = _scored(parts)
        memory = None
        if parts[0].sequence.source is not None:
            memory = EncoderOutputs.of([self._memory[part.sequence.request][0] for part in parts],
                               [len(part.sequence.source or ()) for part in parts])
        step = Step.of(
            [part.tokens for part in parts], [part.past for part in parts],
            [part.table.blocks for part in parts], [part.slot for part in parts],
            sample=[index for index, _ in chosen], admit=admitted,
            copies=np.array(copies, np.int32).reshape(-1, 2), encode=encode, memory=memory,
            candidates=max((own.candidates for own in searching), default=0),
            logits="sampled" if any(not own.candidates for own in searching) else "none",
            scored=scored,
            masks={part.slot: part.sequence.mask() for _, part in chosen
                   if part.sequence.mask is not None},
            request_ids=tuple(part.sequence.request for part in parts),
            prompt_lens=tuple(len(part.sequence.prompt) for part in parts))
        scheduled = ScheduledStep(
            step, [(part.sequence, part.sequence.epoch) for _, part in chosen], prompts)
        for sequence, count in rows:
            self._count(sequence, count)
        return scheduled

    def _parts(self, sequence: Sequence, count: int) -> list[_Part]:
        past = sequence.computed
        sequence.last_step = self._steps
        if sequence.searches:
            return [_Part(sequence, slot, table, [token], past, True) for slot, table, token in
                    zip(sequence.slots, sequence.tables, sequence.beams, strict=True)]
        tokens = sequence.between(past, past + count) if past < sequence.known else [LAST]
        scored = range(0) if sequence.scores is None else \
            sequence.scores.schedule(past, past + count)
        return [_Part(sequence, sequence.slots[0], sequence.tables[0], tokens, past,
                      past + count >= sequence.known, scored)]

    def _count(self, sequence: Sequence, count: int) -> None:
        searched, sequence.beams = sequence.searches, []
        sequence.computed += count
        sequence.ahead += sequence.computed >= sequence.known
        if not searched:
            self._name(sequence)

    def _has_come(self, names: abc.Sequence[bytes]) -> None:
        """One sequence fewer will compute these."""
        for name in names:
            self._coming[name] -= 1
            if self._coming[name] <= 0:
                del self._coming[name]

    def _name(self, sequence: Sequence) -> None:
        """Others may begin with what is computed of it."""
        table, length = sequence.tables[0], min(sequence.computed, sequence.known)
        before = table.named
        if length < (before + 1) * self.blocks.block_size:
            return
        names = self._names(sequence)
        self.blocks.name(table, names, length)
        done = names[before:table.named]
        if sequence.coming and done:
            self._has_come(sequence.coming[:len(done)])
            sequence.coming = sequence.coming[len(done):]

    # What became of it.

    def append(self, sequence: Sequence, token: int) -> None:
        """A sequence that goes on has this token."""
        sequence.tokens.append(token)
        sequence.known += 1
        self._name(sequence)

    def go_on(self, sequence: Sequence, tokens: abc.Sequence[int],
              parents: abc.Sequence[int]) -> None:
        """Beams go on with these tokens, each from where one of them was."""
        before = sequence.tables
        alike = len(before) == 1  # they have the prompt in common
        sequence.tables = [self.blocks.fork(before[0 if alike else parent]) for parent in parents]
        for table in before:
            self.blocks.close(table)
        sequence.beams = list(tokens)

    # Sessions.

    def lease(self, count: int) -> SlotLease | None:
        """Slots for a session, older sessions' too; None where there are not so many."""
        held = sum(len(lease.slots) for lease in self._leases)
        while len(self._slots) < count <= len(self._slots) + held and self._leases:
            held -= len(self._leases[0].slots)
            self.end(self._leases[0])
        if count > len(self._slots):
            return None
        lease = SlotLease([heapq.heappop(self._slots) for _ in range(count)],
                      [heapq.heappop(self._memory_rows) for _ in range(count)],
                      [BlockTable() for _ in range(count)])
        self._leases.append(lease)
        return lease

    def extend(self, lease: SlotLease, lengths: abc.Sequence[int]) -> bool:
        """Room for so many positions of each sequence of a session, other sessions' too; False, and
        nothing taken, where there is too little.
        """
        lacks = sum(map(self.blocks.lacks, lease.tables, lengths))
        while lacks > self.blocks.free and len(self._leases) > 1:
            self.end(next(own for own in self._leases if own is not lease))
        return lacks <= self.blocks.free and all(map(self.blocks.grow, lease.tables, lengths))

    def end(self, lease: SlotLease) -> None:
        """A session ends, or has to."""
        if lease in self._leases:
            self._leases.remove(lease)
            for table in lease.tables:
                self.blocks.close(table)
            for slot, row in zip(lease.slots, lease.memory, strict=True):
                heapq.heappush(self._slots, slot)
                heapq.heappush(self._memory_rows, row)
            lease.slots = []


def _scored(parts: abc.Sequence[_Part]) -> tuple[ScoredRows, list[tuple[PromptScores, int]]]:
    """The rows of a step that are scored; and whose they are, and how many each has."""
    rows, targets, owners = list[np.ndarray](), list[int](), list[tuple[PromptScores, int]]()
    start = 0
    for part in parts:
        scores, scored = part.sequence.scores, part.scored
        if scores is not None and scored:
            rows.append(np.arange(scored.start, scored.stop) + (start - part.past))
            targets += scores.targets(scored)
            owners.append((scores, len(scored)))
        start += len(part.tokens)
    if not owners:
        return ScoredRows.none(), owners
    counts = np.repeat([scores.count for scores, _ in owners], [count for _, count in owners])
    return ScoredRows(np.concatenate(rows), np.array(targets, np.int64),
                      counts.astype(np.int32)), owners


def _rivals(one: Sequence, other: Sequence) -> tuple[Share, Share]:
    """The shares of two sequences on the level where they differ: of tenants or of requests."""
    if one.tenant is other.tenant:
        return one.share, other.share
    return one.tenant, other.tenant


def _held(own: Sequence) -> tuple[int, int]:
    """Slots of a sequence's tenant and request."""
    return own.tenant.slots, own.share.slots
