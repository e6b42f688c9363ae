"""Scheduling on an engine that hashes histories instead of computing keys and values.

Wrong or missing blocks and repeated tokens change the generated tokens.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import pytest
from drafting import TestDrafter
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.core.scheduler import HEAD_START, Scheduler, Sequence
from llmc.runtime.core.step import LAST, EngineLimits, SamplingState, StepOutput
from llmc.runtime.core.step_times import StepTimes
from llmc.runtime.engines.state_slots import StateSlots
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import Logprobs
from llmc.runtime.speculation.engine_drafts import EngineDrafter
from llmc.runtime.speculation.planner import DraftPlanner, VerificationCosts

VOCAB = 50


def digest(before, token):
    return hashlib.blake2b(before + bytes([token]), digest_size=8).digest()


def choice(history, rank=0):
    return (history[0] + 7 * rank) % VOCAB


def score(history, target):
    return Logprobs(-float(digest(history, target)[0]), ())


class Histories:
    """An engine whose cache stores for each position a hash of all tokens up to it.

    With `keeps_states` a sequence continues from its state, such a hash, which is stored before
    drafts.
    """

    def __init__(self, limits):
        self.limits = limits
        self.slots = StateSlots(limits) if limits.keeps_states else None
        self.states = [b""] * limits.max_slots
        self.cells = {}
        self.last = {}
        self.ends = {}  # by slot: positions whose tokens are accepted
        self.proposed = {}  # by slot
        self.made = {}
        self.behind = False  # whether a step was submitted before the one before it was read
        self.longest = self.tickets = self.drafts = self.proposals = self.homeless = 0
        self.proposing = []  # of each step, whether the draft model runs
        self.following = 0  # steps that continue from tokens that were not read

    def submit(self, step):
        assert step.num_tokens <= self.limits.max_tokens
        assert len(set(step.slots.tolist())) == step.batch_size <= self.limits.max_slots
        assert (step.seq_lens[:step.num_decode] == 1).all()
        assert (step.seq_lens[step.num_decode:] > 1).all()
        self.longest = max(self.longest, step.num_tokens)
        for old, new in step.copies.tolist():
            for row in range(self.limits.block_size):
                self.cells[new, row] = self.cells.get((old, row))
        for slot in step.admit:
            self.last.pop(slot, None)
        written, ends, histories, passes = set(), [], [], []
        drafts = int(step.num_drafts.sum())
        self.drafts += drafts
        self.proposing.append(step.propose is not None)
        self.following += LAST in step.token_ids
        assert self.slots is not None or not len(step.num_uncommitted)
        rows, copies = self.slots.place(step) if self.slots else ((), np.empty((0, 2), int))
        for old, new in copies.tolist():
            self.states[new] = self.states[old]
        assert not (drafts and step.candidates)
        assert drafts + len(step.scored) <= self.limits.max_scored
        for index in range(step.batch_size):
            table, past = step.block_tables[index].tolist(), self._past(step, index)

            def cell(position, table=table):
                return table[position // self.limits.block_size], \
                    position % self.limits.block_size

            history = self.cells[cell(past - 1)] if past else b""
            if past and self.slots:
                assert self.states[rows[index]] == history
            passed = []
            for position, token in enumerate(self._tokens(step, index), past):
                history = digest(history, token)
                assert cell(position) not in written
                written.add(cell(position))
                self.cells[cell(position)] = history
                histories.append(history)
                passed.append(history)
            if self.slots:
                self.states[rows[index]] = passed[step.commit_lens[index] - 1]
            ends.append(history)
            passes.append(passed)
        tokens, counts = [], []
        for index in step.sample.tolist():
            drafts = int(step.num_drafts[index]) if len(step.num_drafts) else 0
            assert drafts <= self.limits.max_drafts
            sampled = []
            tokens_of = self._tokens(step, index)
            for history, draft in zip(passes[index][-1 - drafts:],
                                      [*tokens_of[len(tokens_of) - drafts:], None], strict=True):
                sampled.append(choice(history))
                if sampled[-1] != draft:
                    break
            tokens += sampled
            counts.append(len(sampled))
        self._keep(step, passes, tokens, counts)
        candidates = None
        if step.candidates:
            candidates = Candidates(
                np.array([[choice(ends[index], rank) for rank in range(step.candidates)]
                          for index in step.sample]),
                np.array([[ends[index][1]] * step.candidates for index in step.sample], float))
        self.tickets += 1
        scored = [score(histories[row], target) for row, target in zip(
            step.scored.rows.tolist(), step.scored.targets.tolist(), strict=True)]
        self.made[self.tickets] = StepOutput(
            np.array(tokens), [None] * len(tokens), candidates, scored=scored,
            counts=np.array(counts), drafts=self._propose(step, written, passes, tokens, counts))
        return self.tickets

    def _past(self, step, index):
        """Return the positions before a sequence's tokens."""
        past = int(step.past_lens[index])
        if not len(step.unread) or not step.unread[index]:
            return past
        assert self.limits.drafts_ahead and index in step.sample
        assert past - step.unread[index] <= self.ends[int(step.slots[index])] <= past
        self.behind = True
        return self.ends[int(step.slots[index])]

    def _tokens(self, step, index):
        """Return a sequence's tokens, without placeholders."""
        slot = int(step.slots[index])
        start, end = step.cu_seqlens[index:index + 2]
        return [self.last[slot] if token == LAST else token if token >= 0
                else max(self.proposed[slot][-2 - token], 0)
                for token in step.token_ids[start:end].tolist()]

    def _keep(self, step, passes, tokens, counts):
        """Keep what later steps refer to by placeholders."""
        self.before = {index: (self._past(step, index), self._tokens(step, index))
                       for index in step.sample.tolist()}
        ends = np.cumsum(counts)
        for index, count, end in zip(step.sample.tolist(), counts, ends, strict=True):
            drafts = int(step.num_drafts[index]) if len(step.num_drafts) else 0
            past, own = self.before[index]
            self.last[int(step.slots[index])] = tokens[end - 1]
            self.ends[int(step.slots[index])] = past + len(own) - drafts + count - 1

    def _propose(self, step, written, passes, tokens, counts):
        """Return drafts, and write them after each sequence's tokens as a draft model does."""
        if step.propose is None:
            return None
        size, made, first = self.limits.block_size, [], 0
        for index, count in zip(step.sample.tolist(), counts, strict=True):
            table, (past, _) = step.block_tables[index].tolist(), self.before[index]
            drafts = int(step.num_drafts[index]) if len(step.num_drafts) else 0
            kept = len(passes[index]) - drafts + count - 1
            own = {(table[position // size], position % size) for position in
                   range(past, past + len(passes[index]))}
            history = digest(passes[index][kept - 1], tokens[first + count - 1])
            made.append([])
            for position in range(past + kept, past + kept + step.propose):
                block = table[position // size] if position // size < len(table) else -1
                self.proposals, self.homeless = self.proposals + 1, self.homeless + (block < 0)
                if block >= 0:
                    cell = block, position % size
                    assert cell in own or cell not in written
                    self.cells[cell] = b"a draft"
                made[-1].append((choice(history) + (history[2] < 64)) % VOCAB)  # a quarter is wrong
                history = digest(history, made[-1][-1])
            self.proposed[int(step.slots[index])] = made[-1]
            first += count
        return np.array(made, np.int64).reshape(len(made), step.propose)


@dataclass(eq=False)
class Wish:
    prompt: list
    count: int
    width: int
    priority: int
    arrives: int
    aborts: int | None
    stalls: range
    tenant: str | None = None
    scores: PromptScores | None = None
    drafts: str | None = None
    got: list = field(default_factory=list)

    def prompt_alone(self):
        """Return the expected prompt log-probabilities."""
        history, made = b"", [None]
        for token, target in zip(self.prompt, self.prompt[1:], strict=False):
            history = digest(history, token)
            made.append(score(history, target))
        return tuple(made)

    def alone(self):
        """Return the expected tokens."""
        histories = [b""]
        for token in self.prompt:
            histories = [digest(histories[0], token)]
        if self.width == 1:
            for _ in range(self.count):
                self.got.append(choice(histories[0]))
                histories = [digest(histories[0], self.got[-1])]
        for _ in range(self.count if self.width > 1 else 0):
            histories = (histories * self.width)[:self.width]
            found = Candidates(np.array([[choice(h, r) for r in range(2)] for h in histories]),
                               np.array([[h[1]] * 2 for h in histories], float))
            tokens, parents = go_on(found)
            self.got.append((tokens, parents))
            histories = [digest(histories[p], t) for t, p in zip(tokens, parents, strict=True)]
        got, self.got = self.got, []
        return got


def go_on(found):
    """Return the continuations of beams by an arbitrary rule."""
    width = len(found.tokens)
    parents = [int(found.log_probs[beam, 0] + beam) % width for beam in range(width)]
    return [int(found.tokens[parent, beam % 2]) for beam, parent in enumerate(parents)], parents


def calls_of(wishes, together):
    """Return requests of one call, which are canceled together."""
    def key(wish):
        return wish.arrives, wish.priority if together else wishes.index(wish)

    calls = [list(own) for _, own in groupby(sorted(wishes, key=key), key)]
    for call in calls:
        aborts = min((wish.aborts for wish in call if wish.aborts), default=None)
        for wish in call:
            wish.aborts = aborts
    return calls


class Linear(StepTimes):
    """Step times: 1 for one row, plus 0.5 per further row."""

    def of(self, rows):
        return 0.5 + rows / 2


def run(wishes, limits, budget, depth, reuse=True, together=False, watch=lambda *_: None,
        step_times=None, num_drafts=3, costs=None, max_itl=None):
    """Run requests with arrivals and cancellations; return their tokens and the scheduler.

    `watch` is called after each step with the running sequences by request, and the remaining
    requests.
    """
    planner = DraftPlanner(num_drafts, VerificationCosts(costs or {}))
    scheduler, engine = Scheduler(limits, budget, max_itl=max_itl, reuse=reuse, drafts=planner), \
        Histories(limits)
    scheduler.step_times = step_times or StepTimes()
    under_way, lines, owners, now = deque(), {}, {}, 0
    waiting = deque(calls_of(wishes, together))
    left = set(wishes)

    def sequence(wish):
        made = Sequence(id(wish), wish.prompt, wish.count, lambda tokens: restart(wish, tokens),
                        width=wish.width, candidates=2 if wish.width > 1 else 0,
                        stalled=lambda: now in wish.stalls, scores=wish.scores,
                        drafts=wish.drafts and planner.sequence(
                            EngineDrafter(ahead=limits.drafts_ahead) if wish.drafts == "engine"
                            else TestDrafter(wish.alone(), wish.drafts, VOCAB)))
        owners[made] = wish
        return made

    def restart(wish, tokens):
        if wish.width > 1:
            wish.got.clear()
        return SamplingState(None, tuple(tokens))

    def abort(wish):
        left.discard(wish)
        scheduler.drop(lines[wish])
        for own in [own for own, whose in owners.items() if whose is wish]:
            scheduler.remove(own)
            del owners[own]

    while left:
        now += 1
        assert now < 5000, "nothing goes on"
        while waiting and waiting[0][0].arrives <= now:
            call = []
            for wish in waiting.popleft():
                if scheduler.problem(len(wish.prompt), wish.count, wish.width):
                    left.discard(wish)
                    wish.got = None
                else:
                    call.append(wish)
            if call:
                line = scheduler.add(map(sequence, call), call[0].priority, call[0].tenant)
                lines |= dict.fromkeys(call, line)
        for wish in [wish for wish in left if wish.aborts == now and wish in lines]:
            abort(wish)
        scheduled = scheduler.schedule() if len(under_way) < depth else None
        if scheduled is not None:
            under_way.append((engine.submit(scheduled.step), scheduled))
        if under_way and (scheduled is None or len(under_way) >= depth):
            ticket, scheduled = under_way.popleft()
            for own, chosen in scheduled.read(engine.made.pop(ticket)):
                wish = owners[own]
                if wish.scores is not None:
                    assert wish.scores.result() == wish.prompt_alone()
                if wish.width > 1:
                    found = chosen.candidates
                    if len(found.tokens) < wish.width:
                        found = Candidates(np.repeat(found.tokens, wish.width, axis=0),
                                           np.repeat(found.log_probs, wish.width, axis=0))
                    wish.got.append(go_on(found))
                else:
                    for token in chosen.tokens:
                        wish.got.append(token)
                assert len(wish.got) <= wish.count
                if len(wish.got) == wish.count:
                    scheduler.remove(own)
                    del owners[own]
                    left.discard(wish)
                elif wish.width > 1:
                    scheduler.go_on(own, *wish.got[-1])
                else:
                    scheduler.append(own, chosen.tokens)
        watch([owners[own] for own in scheduler.running if own in owners], left)
    assert not scheduler.waiting and not scheduler._shares.slots and not scheduler._shares.holders
    assert scheduler._shares.head(scheduler._steps) is None
    assert scheduler.blocks.free == limits.num_blocks and not any(scheduler.blocks._users)
    assert not scheduler.running and not scheduler._coming and not scheduler._first
    assert sorted(scheduler._slots) == list(range(limits.max_slots))
    return scheduler, engine


WISHES = st.lists(st.builds(
    Wish, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), count=st.integers(1, 9),
    width=st.sampled_from([1, 1, 1, 1, 2, 3]), priority=st.integers(-1, 1),
    arrives=st.integers(0, 30), aborts=st.none() | st.none() | st.integers(1, 40),
    stalls=st.builds(lambda start, length: range(start, start + length),
                     st.integers(1, 40), st.sampled_from([0, 0, 20])),
    tenant=st.sampled_from([None, None, "a", "b"])), max_size=10)


@settings(deadline=None, max_examples=400)
@given(wishes=WISHES, scored=st.lists(st.booleans(), min_size=10, max_size=10),
       max_scored=st.integers(1, 6), blocks=st.integers(3, 30), size=st.sampled_from([1, 2, 4, 8]),
       slots=st.integers(3, 6), budget=st.integers(3, 12), depth=st.integers(1, 4),
       reuse=st.booleans(), longest_first=st.booleans(), together=st.booleans(),
       turns=st.booleans(), drafts=st.lists(
           st.sampled_from([None, "right", "wrong", "random", "engine"]), min_size=10,
           max_size=10),
       num_drafts=st.integers(1, 5), proposes=st.booleans(), lookahead=st.integers(0, 1),
       drafts_ahead=st.booleans(), states=st.booleans())
def test_tokens_do_not_depend_on_concurrent_requests(wishes, scored, max_scored, blocks, size,
                                                     slots, budget, depth, reuse, longest_first,
                                                     together, turns, drafts, num_drafts,
                                                     proposes, lookahead, drafts_ahead, states):
    """With recurrent states, too, which are stored before drafts."""
    limits = EngineLimits(blocks, size, max(budget, slots), slots, 512, depth, max_scored,
                          longest_first=longest_first, max_drafts=num_drafts, proposes=proposes,
                          proposals_take_blocks=proposes, lookahead=lookahead * proposes,
                          drafts_ahead=drafts_ahead and proposes and not states,
                          keeps_states=states)
    for wish, wants, kind in zip(wishes, scored, drafts, strict=False):
        if wants and wish.width == 1:
            wish.scores = PromptScores(wish.prompt, 0)
        wish.drafts = kind if wish.width == 1 and (proposes or kind != "engine") else None
    expected = {wish: wish.alone() for wish in wishes}
    run(wishes, limits, budget, depth, reuse, together, step_times=Linear() if turns else None,
        num_drafts=num_drafts)
    for wish in wishes:
        if wish.got is not None:
            assert wish.got == expected[wish][:len(wish.got)]
            assert wish.aborts is not None or len(wish.got) == wish.count


def wish(prompt, count, **options):
    return Wish(**{**dict(prompt=prompt, count=count, width=1, priority=0, arrives=1, aborts=None,
                          stalls=range(0)), **options})


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("kind", "steps"), [(None, 12), ("right", 3), ("wrong", 12)])
def test_accepted_drafts_save_steps(kind, steps, states):
    own = wish([1] * 3, 12, drafts=kind)
    _, engine = run([own], EngineLimits(12, 4, 16, 2, 512, 2, max_drafts=3, keeps_states=states),
                    16, 2)
    assert engine.tickets <= steps + 1 and (engine.drafts > 0) == (kind is not None)


@pytest.mark.parametrize("blocks", [40, 4])
def test_proposals_have_blocks_if_there_are_enough(blocks):
    own = wish([1] * 3, 12, drafts="engine")
    _, engine = run([own], EngineLimits(blocks, 4, 16, 2, 512, 2, max_drafts=3, proposes=True,
                                        proposals_take_blocks=True, lookahead=1), 16, 2)
    assert engine.proposals > engine.homeless and bool(engine.homeless) == (blocks == 4)
    assert own.got == own.alone() and engine.drafts > 0 and engine.tickets < 12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_of_steps_in_flight_are_verified(depth):
    own = wish([1] * 3, 40, drafts="engine")
    _, engine = run([own], EngineLimits(40, 4, 16, 2, 512, depth, max_drafts=3, proposes=True,
                                        proposals_take_blocks=True, lookahead=1,
                                        drafts_ahead=True), 16, depth)
    assert own.got == own.alone() and engine.drafts > 30
    assert engine.behind == (depth > 1)


CHEAP, DEAR = [1.0, 1.01, 1.02, 1.03], [1.0, 9.0, 9.0, 9.0]  # steps with 0 to 3 drafts


def proposing(wishes, costs):
    """Whether the draft model runs, by step."""
    _, engine = run(wishes, EngineLimits(200, 4, 16, 2, 512, 1, max_drafts=3, proposes=True), 16, 1,
                    num_drafts=None, costs=costs)
    assert all(own.got == own.alone() for own in wishes)
    return engine.proposing, engine.drafts


@pytest.mark.parametrize(("costs", "drafts"), [(CHEAP, True), (DEAR, False)])
def test_only_drafts_wait_for_the_steps_in_flight(costs, drafts):
    """Of an engine that verifies drafts only after they have been read."""
    own = wish([1] * 3, 40, drafts="engine")
    _, engine = run([own], EngineLimits(40, 4, 16, 2, 512, 2, max_drafts=3, proposes=True,
                                        keeps_states=True), 16, 2, num_drafts=None,
                    costs={1: costs})
    assert own.got == own.alone() and (engine.drafts > 0) == drafts
    assert (engine.following > 30) == (not drafts)


def test_a_draft_model_does_not_run_if_no_drafts_pay_off():
    runs, drafts = proposing([wish([1] * 3, 40, drafts="engine")], {1: DEAR})
    assert not any(runs) and not drafts


def test_a_draft_model_runs_on_through_a_short_crowd():
    runs, drafts = proposing([wish([1] * 3, 80, drafts="engine"),
                              wish([2] * 3, 4, arrives=9, drafts="engine")], {1: CHEAP, 2: DEAR})
    assert all(runs) and drafts > 40


def test_a_draft_model_ends_in_a_long_crowd_and_begins_with_the_next_sequence():
    long = [wish([1] * 3, 150, drafts="engine"), wish([2] * 3, 60, arrives=9, drafts="engine")]
    last = wish([3] * 3, 40, arrives=180, drafts="engine")
    runs, _ = proposing([*long, last], {1: CHEAP, 2: DEAR})
    end = runs.index(False)
    assert 32 < end < 60
    begin = runs.index(True, end)
    assert begin > 100 and all(runs[begin:])


def test_no_request_starves():
    """A low-priority request under constant arrivals of higher priority."""
    crowd = [wish([1] * 3, 6, priority=0, arrives=1 + n) for n in range(3 * HEAD_START)]
    poor = wish([0] * 8, 4, priority=1, arrives=1)
    seen = []
    poor.got = Watched(poor.got, lambda: seen.append(sum(len(own.got) == 6 for own in crowd)))
    run([poor, *crowd], EngineLimits(12, 4, 8, 2, 512, 1), 8, 1)
    assert seen[0] < len(crowd) - HEAD_START


def test_requests_with_slow_readers_do_not_block_others():
    """For any number of earlier requests, both waiting and preempted ones."""
    lazy = [wish([2] * 4, 8, arrives=1 + n // 4, stalls=range(4 + n // 4, 800)) for n in range(300)]
    later = wish([1] * 4, 5, priority=1, arrives=100)
    when = []
    later.got = Watched([], lambda: when.append(sum(len(own.got) for own in lazy)))
    expected = [own.alone() for own in lazy]
    run([*lazy, later], EngineLimits(60, 4, 16, 4, 512, 1), 16, 1)
    assert when[-1] < 1000 and [own.got for own in lazy] == expected


def test_blocks_of_a_request_with_a_slow_reader_can_be_preempted():
    lazy, other = wish([3] * 40, 2, stalls=range(3, 800)), wish([3] * 40, 2, arrives=6)
    when = []
    other.got = Watched([], lambda: when.append(len(lazy.got)))
    run([lazy, other], EngineLimits(40, 4, 8, 4, 512, 1), 8, 1)
    assert when == [0, 0] and len(lazy.got) == 2


def test_a_recomputed_prompt_is_looked_up_once_in_the_prefix_cache():
    wishes = [wish([n] * 8, 12) for n in range(4)]
    scheduler, _ = run(wishes, EngineLimits(12, 4, 16, 4, 512, 1), 16, 1)
    assert scheduler.preemptions and scheduler.queries == 4 * 8


class Watched(list):
    def __init__(self, own, told):
        super().__init__(own)
        self._told = told

    def append(self, value):
        super().append(value)
        self._told()


def test_prompts_of_one_call_preempt_one_another():
    """All of them run, and all blocks are used."""
    wishes = [wish([n] * 4, 30) for n in range(6)]
    expected = [own.alone() for own in wishes]
    scheduler, _ = run(wishes, EngineLimits(18, 2, 16, 6, 512, 2), 16, 2, together=True)
    assert [own.got for own in wishes] == expected and scheduler.preemptions


def test_a_higher_priority_takes_the_slot_of_a_lower_one():
    slow, fast = wish([1] * 4, 40, priority=5), wish([0] * 4, 2, priority=0, arrives=10)
    when = []
    fast.got = Watched([], lambda: when.append(len(slow.got)))
    expected = slow.alone()
    scheduler, _ = run([slow, fast], EngineLimits(40, 4, 8, 1, 512, 1), 8, 1)
    assert when[-1] < 20 and slow.got == expected and scheduler.preemptions == 1


def test_requests_are_served_first_come_first_served():
    order = []
    wishes = [wish([n] * 4, 3) for n in range(6)]
    for own in wishes:
        own.got = Watched([], lambda own=own: order.append(own))
    run(wishes, EngineLimits(40, 4, 8, 2, 512, 1), 8, 1)
    assert list(dict.fromkeys(order)) == wishes


def test_chunked_prefill_runs_while_others_decode():
    long, short = wish(list(range(40)), 2, arrives=3), wish([1], 30)
    gaps = []
    long.got = Watched([], lambda: gaps.append(len(short.got)))
    _, engine = run([short, long], EngineLimits(40, 4, 6, 4, 512, 1), 6, 1)
    assert engine.longest == 6 and gaps[0] >= 8  # 40 tokens, 5 beside each of the other's


def test_prefill_chunks_are_small_while_others_decode():
    def longest(prompts):
        long = [wish([7] * 750, 2, arrives=9) for _ in range(prompts)]
        _, engine = run([wish([1], 60), *long], EngineLimits(2000, 16, 2048, 40, 1024, 1), 2048, 2,
                        reuse=False)
        return engine.longest

    assert longest(1) == 512
    assert longest(30) == 2048


@pytest.mark.parametrize(("goal", "longest"), [(4.0, 1 + 30), (40.0, 1 + 390), (0.5, 1 + 16)])
def test_prefill_chunks_fit_the_goal_for_the_time_between_tokens(goal, longest):
    times = Linear()
    times.add_prompts(1, 100, 11.0)  # 0.1 each
    long = wish([7] * 750, 2, arrives=9)
    _, engine = run([wish([1], 100), long], EngineLimits(2000, 16, 2048, 40, 1024, 1), 2048, 1,
                    reuse=False, step_times=times, max_itl=goal)
    assert engine.longest == longest


def test_completions_and_later_turns_share_prompt_blocks():
    first = wish(list(range(12)), 4)
    later = wish([*range(12), *first.alone(), 7, 8], 3, arrives=20)
    scheduler, _ = run([first, later], EngineLimits(40, 4, 32, 4, 512, 1), 32, 1)
    assert (scheduler.queries, scheduler.hits) == (12 + 18, 12)  # 3 of the 15 computed fill none
    same = [wish(list(range(30)), 2) for _ in range(5)]
    scheduler, engine = run(same, EngineLimits(60, 4, 64, 8, 512, 1), 64, 1)
    assert scheduler.hits == 4 * 28 and engine.longest <= 30


def test_requests_that_never_fit_are_refused_with_the_sizes():
    scheduler = Scheduler(EngineLimits(10, 16, 64, 4, 512, 1), 64)
    assert scheduler.problem(100, 61) is None
    assert scheduler.problem(100, 62) == (
        "100 tokens and 62 to generate take 11 blocks of 16, the KV cache has 10; ask for fewer, "
        "or load the model with a larger kv_cache_tokens")
    assert "by 4 beams take 17 blocks" in scheduler.problem(20, 60, 4)


def test_blocks_of_an_idle_session_can_be_evicted():
    scheduler = Scheduler(EngineLimits(4, 4, 64, 2, 512, 1), 64)
    lease = scheduler.lease(2)
    assert scheduler.extend(lease, [8, 8]) and not scheduler.extend(lease, [9, 8])
    newer = scheduler.lease(2)
    assert not lease.slots and scheduler.extend(newer, [8, 8]) and scheduler.lease(3) is None
    scheduler.add(iter([Sequence(0, [1] * 9, 2, lambda tokens: SamplingState(None))]))
    assert scheduler.schedule() is not None and not newer.slots


def finished(own):
    return len(own.got) == own.count


def test_an_arrival_gets_a_slot_from_a_request_that_holds_all():
    many = [wish([n] * 4, 40) for n in range(12)]
    late = wish([20] * 4, 3, arrives=8)
    expected = [own.alone() for own in many]
    when = []
    late.got = Watched([], lambda: when.append(max(len(own.got) for own in many)))
    seen = []
    scheduler, _ = run([*many, late], EngineLimits(400, 4, 64, 4, 512, 2), 64, 2, together=True,
                       watch=lambda running, left: seen.append(len(running)))
    assert when[-1] < 20 and scheduler.preemptions == 1
    assert [own.got for own in many] == expected
    assert seen.count(4) > 100  # alone, the request has all slots


def test_a_request_finishes_under_constant_arrivals():
    many = [wish([n] * 4, 20) for n in range(8)]
    crowd = [wish([20 + n % 20] * 4, 3, arrives=1 + n // 2) for n in range(1000)]
    seen = []
    many[-1].got = Watched([], lambda: seen.append(sum(map(finished, crowd))))
    run([*many, *crowd], EngineLimits(400, 4, 64, 3, 512, 1), 64, 1, together=True)
    assert len(seen) == 20 and seen[-1] < 900


def test_tenants_get_equal_shares_of_the_slots():
    first = [wish([n] * 4, 12, tenant="a") for n in range(40)]
    second = [wish([n, 1] * 2, 12, arrives=20, tenant="b") for n in range(20)]
    shares = []

    def watch(running, left):
        if any(map(finished, second)) and sum(own.tenant == "b" for own in left) > 4:
            shares.append(sum(own.tenant == "b" for own in running))

    run([*first, *second], EngineLimits(400, 4, 64, 6, 512, 1), 64, 1, watch=watch)
    assert len(shares) > 40 and 2.4 < np.mean(shares) <= 3


def test_a_request_gets_a_slot_from_another_of_its_tenant():
    many = [wish([n] * 4, 40, tenant="a") for n in range(8)]
    late = wish([20] * 4, 2, arrives=8, tenant="a")
    when = []
    late.got = Watched([], lambda: when.append(max(len(own.got) for own in many)))
    run([*many, late], EngineLimits(400, 4, 64, 4, 512, 1), 64, 1, together=True)
    assert when[-1] < 20


def test_no_tenant_loses_its_last_slot_to_another():
    """A last sequence is never preempted, so waiting requests take turns as sequences end."""
    wishes = [wish([n] * 4, 10, tenant=str(n)) for n in range(20)]
    scheduler, _ = run(wishes, EngineLimits(400, 4, 64, 4, 512, 1), 64, 1)
    assert not scheduler.preemptions


def test_a_beam_search_is_not_preempted_for_its_share():
    beams, late = wish([1] * 4, 30, width=4), wish([0] * 4, 2, arrives=5)
    scheduler, _ = run([beams, late], EngineLimits(400, 4, 64, 4, 512, 1), 64, 1)
    assert not scheduler.preemptions


@pytest.mark.parametrize("step_times", [None, Linear()])
def test_a_beam_search_gets_slots_from_a_request_that_holds_all(step_times):
    """At most half of the slots, so that a wider search waits for completions."""
    for width, soon in ((3, True), (4, False)):
        many = [wish([n] * 4, 40) for n in range(12)]
        beams = wish([20] * 4, 3, width=width, arrives=8)
        when = []
        beams.got = Watched([], lambda many=many, when=when: when.append(
            sum(map(finished, many))))
        run([*many, beams], EngineLimits(400, 4, 64, 6, 512, 1), 64, 1, together=True,
            step_times=step_times)
        assert (when[0] == 0) == soon and when[0] <= 6


def test_an_arrival_keeps_its_blocks_while_those_of_a_larger_share_grow():
    many = [wish([n] * 4, 60) for n in range(6)]
    late = wish([20] * 4, 40, arrives=20)
    when = []
    late.got = Watched([], lambda: when.append(sum(map(finished, many))))
    expected = [own.alone() for own in many]
    left_out = []

    def watch(running, left):
        if 0 < len(late.got) < late.count and late not in running:
            left_out.append(len(late.got))

    scheduler, _ = run([*many, late], EngineLimits(40, 4, 32, 6, 512, 1), 32, 1, together=True,
                       watch=watch)
    assert scheduler.preemptions > 1 and not left_out
    assert [own.got for own in many] == expected


def test_an_arrival_gets_blocks_from_a_request_that_holds_them_all():
    many = [wish([n] * 4, 40) for n in range(4)]
    late = wish([20] * 12, 2, arrives=24)
    when = []
    late.got = Watched([], lambda: when.append(sum(map(finished, many))))
    run([*many, late], EngineLimits(33, 4, 32, 8, 512, 1), 32, 1, together=True)
    assert when[0] == 0


def test_a_lower_priority_does_not_wait_for_one_large_request():
    many = [wish([n % 20] * 4, 40) for n in range(100)]
    poor = wish([30] * 4, 2, priority=1, arrives=10)
    when = []
    poor.got = Watched([], lambda: when.append(sum(map(finished, many))))
    scheduler, _ = run([*many, poor], EngineLimits(400, 4, 64, 2, 512, 1), 64, 1, together=True)
    steps = when[0] * 40 / 2
    assert HEAD_START - 80 < steps < HEAD_START + 160 and scheduler.preemptions == 1


@pytest.mark.parametrize(("depth", "tenants"), [(1, None), (3, None), (1, "ab"), (2, "ab")])
def test_rows_of_a_large_request_take_turns_beside_a_small_one(depth, tenants):
    """If a step of all rows would exceed 1.5 times that of one row each."""
    many = [wish([n] * 4, 40, tenant=tenants and "a") for n in range(11)]
    small = wish([20] * 4, 30, arrives=20, tenant=tenants and "b")
    gaps, sizes = [], []

    def watch(running, left):
        if 2 < len(small.got) < 28:
            sizes.append(sum(len(own.got) for own in [*many, small]))
            own = [len(own.got) for own in many]
            gaps.append(max(own) - min(own))

    run([*many, small], EngineLimits(400, 4, 64, 12, 512, depth), 64, depth,
        together=tenants is None, watch=watch, step_times=Linear())
    assert len(sizes) > 20 and max(np.diff(sizes)) <= 3  # 2.25: 3 rows take 2
    assert max(gaps) <= 12


def test_all_rows_run_if_larger_batches_cost_nothing():
    many, small = [wish([n] * 4, 60) for n in range(11)], wish([20] * 4, 9, arrives=8)
    sizes = []
    run([*many, small], EngineLimits(400, 4, 64, 12, 512, 1), 64, 1, together=True,
        watch=lambda *_: 2 < len(small.got) < 8 and sizes.append(
            sum(len(own.got) for own in [*many, small])))
    assert set(np.diff(sizes)) == {12}


def test_step_times_are_averages_and_optimistic_of_sizes_that_were_not_measured():
    times = StepTimes()
    assert times.of(5) == 0
    for seconds in (1.0, 2.0):
        times.add(2, seconds)
    times.add(8, 5.0)
    assert times.of(1) == 0 and times.of(2) == times.of(7) == pytest.approx(1.2)
    assert times.of(8) == times.of(100) == 5


def test_times_of_prompt_tokens_are_learned_from_steps_with_many():
    times = StepTimes()
    times.add(8, 5.0)
    times.add_prompts(8, 4, 100.0)  # too few to measure
    assert times.prompt_tokens(8, 10.0) is None
    times.add_prompts(8, 100, 15.0)
    assert times.prompt_tokens(8, 10.05) == 50 and times.prompt_tokens(8, 4.0) == 0
    times.add_prompts(8, 100, 25.0)
    assert times.prompt_tokens(8, 11.05) == 50
