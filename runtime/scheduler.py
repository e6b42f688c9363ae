"""Which sequences run in the next step, and how many tokens of each.

All that wait or run are in one order, by priority and arrival. Whoever is behind gives its blocks
back where somebody before it lacks them, and is computed again later. A priority is worth so many
steps of waiting and no more, so nobody waits for ever; and the first in order has all blocks if it
needs them, so that it always goes on.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

import numpy as np

from llmc.runtime.blocks import Blocks, Chain, Table
from llmc.runtime.decoding.beam_search import Candidates
from llmc.runtime.decoding.sampling import Logprobs
from llmc.runtime.step import LAST, Limits, Memory, Sampled, SamplingState, Step

HEAD_START = 256  # steps that a priority is before the next
MOST_PRIORITY = 100  # and the least is as far below 0
_LOOKED_AT = 64  # callers, for one that can enter
_MIXED = 512  # tokens of a step that some wait for, where no prompt has waited long
_LONG = 4  # steps

_Key = tuple[int, ...]


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

    Attributes:
        tokens: generated and known. Those of beams are their search's.
        computed: positions that are in the cache once all that was submitted has run.
        cached: of its prompt, when it first began.
        ahead: tokens that were asked for and are not known yet.
        beams: what each beam goes on with, once known.
        coming: names of blocks that it is about to compute.
        epoch: how often it has ended, or had to leave.
        line: in which it waits since it had to leave.
    """

    request: int
    prompt: list[int]
    limit: int
    state: Callable[[Listed[int]], SamplingState]
    width: int = 1
    candidates: int = 0
    key: bytes = b""
    source: Listed[int] | None = None
    stalled: Callable[[], bool] = lambda: False
    aborted: Callable[[], bool] = lambda: False
    mask: Callable[[], np.ndarray] | None = None
    tokens: list[int] = field(default_factory=list)
    order: _Key = ()
    priority: int = 0
    chain: Chain | None = None
    slots: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    ahead: int = 0
    beams: list[int] = field(default_factory=list)
    coming: list[bytes] = field(default_factory=list)
    epoch: int = 0
    line: Line | None = None

    def __post_init__(self) -> None:
        self.known = len(self.prompt)  # tokens whose keys and values can be computed

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


class Line:
    """Sequences of one caller, of which only the first that waits is made. Each is behind the one
    before.
    """

    def __init__(self, sequences: Iterator[Sequence], order: _Key, priority: int) -> None:
        self._sequences, self.order, self.priority = sequences, order, priority
        self.first: Sequence | None = None
        self._taken = 0
        self.take()

    def take(self) -> None:
        """The first enters, and the next is made."""
        self.first = next(self._sequences, None)
        if self.first is not None and self.first.epoch == 0:
            self.first.order, self.first.priority = (*self.order, self._taken), self.priority
            self._taken += 1


@dataclass(frozen=True)
class Scheduled:
    """A step, and for each of its `sample` the sequence, and its epoch."""

    step: Step
    chosen: list[tuple[Sequence, int]]

    def read(self, sampled: Sampled) -> Iterator[tuple[Sequence, Chosen]]:
        """What the step led to for each sequence that it still concerns."""
        rows: dict[Sequence, list[int]] = {}
        for index, (sequence, epoch) in enumerate(self.chosen):
            if sequence.epoch == epoch:
                rows.setdefault(sequence, []).append(index)
        for sequence, own in rows.items():
            sequence.ahead -= 1
            yield sequence, Chosen.of(sampled, own)


_Row = tuple[Sequence, int]  # and how many new tokens of each of its rows
_Entry = tuple[_Key, int, Line]


@dataclass(frozen=True)
class _Part:
    """A row of a step."""

    sequence: Sequence
    slot: int
    table: Table
    tokens: list[int]
    past: int
    samples: bool


@dataclass(eq=False)
class Lease:
    """Slots, rows of an encoder's memory and blocks that a session holds, until a sequence lacks
    them; then `slots` is empty.
    """

    slots: list[int]
    memory: list[int]
    tables: list[Table]


@dataclass(frozen=True)
class Chosen:
    """What one sequence got: `Sampled` of its rows."""

    token: int
    logprobs: Logprobs | None
    candidates: Candidates | None
    logits: np.ndarray | None

    @staticmethod
    def of(sampled: Sampled, rows: list[int]) -> Chosen:
        found = sampled.candidates
        return Chosen(int(sampled.tokens[rows[0]]), sampled.logprobs[rows[0]],
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
    """

    def __init__(self, limits: Limits, max_num_batched_tokens: int, *, reuse: bool = True) -> None:
        self.limits = limits
        self.budget = max(max_num_batched_tokens, limits.max_slots)
        self._reuse = reuse and not limits.keeps_states
        self.blocks = Blocks(limits.num_blocks, limits.block_size, reuse=self._reuse)
        self.running: list[Sequence] = []  # in order
        self.preemptions = self.queries = self.hits = 0
        self._lines: list[_Entry] = []  # a heap
        self._aside: list[_Entry] = []  # whose first is stalled, so that nobody is behind them
        self._slots = list(range(limits.max_slots))  # a heap: the lowest are used first
        self._memory: dict[int, list[int]] = {}  # request: row and users
        self._memory_rows = list(range(limits.max_slots))
        self._coming: Counter[bytes] = Counter()  # names that running sequences will compute
        self._first: dict[int, Sequence] = {}  # by request, of those that run
        self._leases: list[Lease] = []
        self._steps = self._arrivals = 0

    # Who is there.

    def add(self, sequences: Iterable[Sequence], priority: int = 0) -> Line:
        """A caller comes, whose sequences enter one after the other."""
        self._arrivals += 1
        line = Line(iter(sequences), (self._steps + priority * HEAD_START, self._arrivals),
                    priority)
        self._wait(line)
        return line

    def drop(self, line: Line) -> None:
        """What waits in a line is not wanted any more."""
        line.first = None

    def remove(self, sequence: Sequence) -> None:
        """A sequence ends, wherever it is."""
        if sequence.line is not None:
            sequence.line.first = None
        elif sequence.slots:
            self._give_back(sequence)
            self.running.remove(sequence)

    @property
    def waiting(self) -> int:
        """Callers of whom something waits."""
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
        """Of each line the sequence that waits."""
        return [line.first for _, _, line in itertools.chain(self._lines, self._aside)
                if line.first is not None]

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

    def schedule(self) -> Scheduled | None:
        """The next step; None where nothing can run until something is read, or at all."""
        self._steps += 1
        self._bring_back()
        self._make_way()
        rows: list[_Row] = []  # and how many tokens of each row
        copies: list[tuple[int, int]] = []
        admitted: dict[int, SamplingState] = {}
        encode: dict[int, Listed[int]] = {}
        wanted = {sequence: sequence.wanted() for sequence in self.running}
        decoding = sum(sequence.width if sequence.searches else 1
                       for sequence, count in wanted.items() if count == 1)
        budget = self._room(wanted, decoding) - decoding
        for sequence in list(self.running):
            count = wanted[sequence]
            if count > 1:
                count = min(self._before_branching(sequence, count), max(budget, 0))
                budget -= count
            if count > 0 and sequence.slots and self._make_room(sequence, count, rows):
                copies += self._own(sequence)
                rows.append((sequence, count))
        while budget > 0 and (line := self._enter(rows)):
            entering = line.first
            assert entering is not None
            line.take()
            self._wait(line)
            count = min(self._before_branching(entering, entering.known - entering.computed),
                        budget)
            budget -= count
            copies += self._own(entering)
            rows.append((entering, count))
            admitted.update(dict.fromkeys(entering.slots, entering.state(entering.tokens)))
            if entering.source is not None and self._memory[entering.request][1] == 1:
                encode[self._memory[entering.request][0]] = entering.source
        self.blocks.copied()
        return self._step(rows, copies, admitted, encode) if rows else None

    def _room(self, wanted: Mapping[Sequence, int], decoding: int) -> int:
        """Tokens of a step: while some decode, no more than they hardly notice, unless a prompt has
        waited for steps. So a prompt that comes alone stalls nobody, and of many none has to wait.
        """
        prompts = [(own.order[0], own.priority) for own, count in wanted.items() if count > 1]
        if first := self._next():
            prompts.append((first.order[0], first.priority))
        waited = max((self._steps - came + priority * HEAD_START for came, priority in prompts),
                     default=0)
        if not decoding or waited > _LONG:
            return self.budget
        return min(self.budget, max(_MIXED, 2 * decoding))

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
            if not self._leave_for(sequence.order, {id(own) for own, _ in rows}, sequence):
                return False

    def _tables(self, sequence: Sequence) -> list[Table]:
        return sequence.tables if sequence.searches else sequence.tables[:1]

    def _own(self, sequence: Sequence) -> list[tuple[int, int]]:
        return [self.blocks.own(table, sequence.computed) for table in self._tables(sequence)
                if self.blocks.shared(table, sequence.computed)]

    def _leave_for(self, order: _Key, kept: set[int], wants: Sequence) -> bool:
        """Have a sequence behind that order leave, or a stalled one; a session first of all."""
        if self._leases:
            self.end(self._leases[-1])
            return True
        behind = [own for own in self.running if id(own) not in kept and own is not wants
                  and (own.order > order or own.stalled())]
        if not behind:
            return False
        self._preempt(max(behind, key=lambda own: (own.stalled(), own.order)))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.remove(sequence)
        sequence.line = Line(iter([sequence]), sequence.order, sequence.priority)
        self._wait(sequence.line)

    def _wait(self, line: Line) -> None:
        if line.first is not None:
            self._arrivals += 1
            heapq.heappush(self._lines, (line.first.order, self._arrivals, line))

    def _bring_back(self) -> None:
        """Those that were set aside wait again where they may go on."""
        aside, self._aside = self._aside, []
        for entry in aside:
            first = entry[2].first
            if first is not None and first.stalled():
                self._aside.append(entry)
            elif first is not None:
                heapq.heappush(self._lines, entry)

    def _next(self) -> Sequence | None:
        """The first that waits and may go on, which is that of `_lines[0]`."""
        while self._lines:
            first = self._lines[0][2].first
            if first is not None and not first.stalled():
                return first
            entry = heapq.heappop(self._lines)
            if first is not None:
                self._aside.append(entry)
        return None

    def _enter(self, rows: list[_Row]) -> Line | None:
        """The line whose first sequence runs from now on, and which waits no more; None where no
        one can.
        """
        passed: list[_Entry] = []
        entered = None
        while len(passed) < _LOOKED_AT and (first := self._next()):
            entry = heapq.heappop(self._lines)
            if self._is_coming(first):
                passed.append(entry)
                continue
            if self._begin(first, rows):
                entered = entry[2]
            else:
                passed.append(entry)
            break
        for entry in passed:
            heapq.heappush(self._lines, entry)
        return entered

    def _names(self, sequence: Sequence) -> list[bytes]:
        """The names of its blocks, as far as its tokens are known."""
        if sequence.chain is None:
            sequence.chain = Chain(self.blocks.block_size, sequence.key)
        chain = sequence.chain
        if (len(chain.names) + 1) * self.blocks.block_size <= sequence.known:
            chain.extend(sequence.prompt + sequence.tokens)
        return chain.names

    def _is_coming(self, sequence: Sequence) -> bool:
        """Whether its prompt, or at least half of what it would compute, is being computed for
        another.
        """
        first = self._first.get(sequence.request)
        if first is not None and \
                first.computed < len(first.prompt) - self.limits.keeps_states:
            return True
        if not self._coming:
            return False
        stalled = Counter(name for own in self.running if own.coming and own.stalled()
                          for name in own.coming)  # nobody knows when these come
        names = self._names(sequence)
        coming = found = len(self.blocks.match(names, sequence.known))
        while coming < len(names) and self._coming[names[coming]] > stalled[names[coming]]:
            coming += 1
        size = self.blocks.block_size
        return 2 * (coming - found) * size >= max(sequence.known - found * size, 1)

    def _begin(self, sequence: Sequence, rows: list[_Row]) -> bool:
        """Give a sequence its slots and blocks, if there are enough for all that is known of it."""
        names = self._names(sequence)
        table = self._open(sequence, names)
        spare = len(self.running)  # a block for each that runs already
        lacks = self.blocks.lacks(table, sequence.known) + \
            self.blocks.copies([table], sequence.known - 1)
        while len(self._slots) < sequence.width or lacks > self.blocks.free - spare:
            if not self._leave_for_new(sequence, {id(own) for own, _ in rows}):
                self.blocks.close(table)
                return False
            spare = len(self.running)
        sequence.line = None
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

    def _open(self, sequence: Sequence, names: list[bytes]) -> Table:
        """The blocks that are there of a sequence. Of a prompt that another completion of it has
        read, that are all but the last token's; a last block that is not full is to be copied. A
        state is that of the place where the other is.
        """
        last = len(sequence.prompt) - 1
        first = self._first.get(sequence.request)
        if first is not None and not sequence.tokens and first.width == sequence.width == 1 \
                and (first.computed == last or not self.limits.keeps_states):
            return self.blocks.fork(first.tables[0], last)
        return self.blocks.open(self.blocks.match(names, sequence.known))

    def _make_way(self) -> None:
        """Have those of lower priority leave for the first that waits, before they get a step."""
        first = self._next()
        if first is None or all(own.priority <= first.priority for own in self.running):
            return
        found = len(self.blocks.match(self._names(first), first.known))
        lacks = self.blocks.spans(first.known) - found
        while len(self._slots) < first.width or lacks > self.blocks.free - len(self.running):
            if not self._leave_for_new(first, set()):
                return

    def _leave_for_new(self, sequence: Sequence, kept: set[int]) -> bool:
        """Have one leave for a sequence that is to enter: only one of lower priority, or a stalled
        one, or a session.
        """
        if any(own.stalled() or (own.priority > sequence.priority and own.order > sequence.order)
               for own in self.running if id(own) not in kept):
            kept.update(id(own) for own in self.running
                        if not own.stalled() and own.priority <= sequence.priority)
        elif not self._leases:
            return False
        return self._leave_for(sequence.order, kept, sequence)

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
              admitted: dict[int, SamplingState], encode: dict[int, Listed[int]]) -> Scheduled:
        """Put a step together; from now on what it computes counts as computed."""
        parts = [part for sequence, count in rows for part in self._parts(sequence, count)]
        longest = self.limits.longest_first
        parts.sort(key=lambda part: (len(part.tokens) > 1, -part.past if longest else part.slot))
        chosen = [(index, part) for index, part in enumerate(parts) if part.samples]
        searching = [part.sequence for _, part in chosen if part.sequence.width > 1]
        memory = None
        if parts[0].sequence.source is not None:
            memory = Memory.of([self._memory[part.sequence.request][0] for part in parts],
                               [len(part.sequence.source or ()) for part in parts])
        step = Step.of(
            [part.tokens for part in parts], [part.past for part in parts],
            [part.table.blocks for part in parts], [part.slot for part in parts],
            sample=[index for index, _ in chosen], admit=admitted,
            copies=np.array(copies, np.int32).reshape(-1, 2), encode=encode, memory=memory,
            candidates=max((own.candidates for own in searching), default=0),
            logits="sampled" if any(not own.candidates for own in searching) else "none",
            masks={part.slot: part.sequence.mask() for _, part in chosen
                   if part.sequence.mask is not None},
            request_ids=tuple(part.sequence.request for part in parts),
            prompt_lens=tuple(len(part.sequence.prompt) for part in parts))
        scheduled = Scheduled(step, [(part.sequence, part.sequence.epoch) for _, part in chosen])
        for sequence, count in rows:
            self._count(sequence, count)
        return scheduled

    def _parts(self, sequence: Sequence, count: int) -> list[_Part]:
        past = sequence.computed
        if sequence.searches:
            return [_Part(sequence, slot, table, [token], past, True) for slot, table, token in
                    zip(sequence.slots, sequence.tables, sequence.beams, strict=True)]
        tokens = sequence.between(past, past + count) if past < sequence.known else [LAST]
        return [_Part(sequence, sequence.slots[0], sequence.tables[0], tokens, past,
                      past + count >= sequence.known)]

    def _count(self, sequence: Sequence, count: int) -> None:
        searched, sequence.beams = sequence.searches, []
        sequence.computed += count
        sequence.ahead += sequence.computed >= sequence.known
        if not searched:
            self._name(sequence)

    def _has_come(self, names: Listed[bytes]) -> None:
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

    def go_on(self, sequence: Sequence, tokens: Listed[int], parents: Listed[int]) -> None:
        """Beams go on with these tokens, each from where one of them was."""
        before = sequence.tables
        alike = len(before) == 1  # they have the prompt in common
        sequence.tables = [self.blocks.fork(before[0 if alike else parent]) for parent in parents]
        for table in before:
            self.blocks.close(table)
        sequence.beams = list(tokens)

    # Sessions.

    def lease(self, count: int) -> Lease | None:
        """Slots for a session, older sessions' too; None where there are not so many."""
        held = sum(len(lease.slots) for lease in self._leases)
        while len(self._slots) < count <= len(self._slots) + held and self._leases:
            held -= len(self._leases[0].slots)
            self.end(self._leases[0])
        if count > len(self._slots):
            return None
        lease = Lease([heapq.heappop(self._slots) for _ in range(count)],
                      [heapq.heappop(self._memory_rows) for _ in range(count)],
                      [Table() for _ in range(count)])
        self._leases.append(lease)
        return lease

    def extend(self, lease: Lease, lengths: Listed[int]) -> bool:
        """Room for so many positions of each sequence of a session, other sessions' too; False, and
        nothing taken, where there is too little.
        """
        lacks = sum(map(self.blocks.lacks, lease.tables, lengths))
        while lacks > self.blocks.free and len(self._leases) > 1:
            self.end(next(own for own in self._leases if own is not lease))
        return lacks <= self.blocks.free and all(map(self.blocks.grow, lease.tables, lengths))

    def end(self, lease: Lease) -> None:
        """A session ends, or has to."""
        if lease in self._leases:
            self._leases.remove(lease)
            for table in lease.tables:
                self.blocks.close(table)
            for slot, row in zip(lease.slots, lease.memory, strict=True):
                heapq.heappush(self._slots, slot)
                heapq.heappush(self._memory_rows, row)
            lease.slots = []
