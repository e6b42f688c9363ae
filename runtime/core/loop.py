"""The loop: schedule, submit, collect, postprocess. Many callers, one thread."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, abc, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from llmc.errors import LlmcError
from llmc.runtime.core.fair_queue import WaitingGroup
from llmc.runtime.core.pacing import StepPacer
from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.core.request import Request, RunningBeamSearch, RunningCompletion, Token
from llmc.runtime.core.scheduler import (
    ScheduledStep,
    Scheduler,
    Sequence,
    SequenceOutput,
    SlotLease,
)
from llmc.runtime.core.step import Engine, StepOutput
from llmc.runtime.metrics import Metrics

# Tokens that nobody has read: of a completion, and of all of a caller's, before they wait.
_UNREAD, _UNREAD_IN_ALL = 256, 8192
_Result = TypeVar("_Result")


class OutputQueue:
    """What has come of one caller's requests, on its way from the loops' threads to the caller's.

    Args:
        wake: is told, from a loop's thread, that there is something to take.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._ready: list[Token | RunningBeamSearch] = []
        self._unread: Counter[RunningCompletion] = Counter()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def take(self) -> tuple[list[Token | RunningBeamSearch], bool]:
        """All that is there, perhaps nothing yet; and whether somebody may have waited for that.

        Raises:
            LlmcError: what ended the requests.
        """
        with self._lock:
            if not self._ready and self._error is not None:
                raise self._error
            waited = any(map(self.is_behind, self._unread))
            made, self._ready = self._ready, []
            self._unread.clear()
            return made, waited

    def put(self, made: list[Token | RunningBeamSearch]) -> None:
        with self._lock:
            self._ready.extend(made)
            for own in made:
                if isinstance(own, Token):
                    self._unread[own.owner] += 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._wake()

    def is_behind(self, owner: RunningCompletion) -> bool:
        """Whether a completion has as many unread tokens as are kept, or all have."""
        return self._unread[owner] >= _UNREAD or len(self._ready) >= _UNREAD_IN_ALL


@dataclass(frozen=True)
class Scheduling:
    """How the requests of a call are scheduled, and which prefixes they share.

    Args:
        priority: lower ones go first.
        tenant: whose share of the slots they are a part of. None: each call has its own.
        salt: is hashed into the names of their blocks, so that only calls with the same one share
            prefixes.
    """

    priority: int = 0
    tenant: str | None = None
    salt: bytes = b""


@dataclass(eq=False)
class ClientCall:
    """What one caller wants of one loop: some samples of its requests."""

    requests: abc.Sequence[Request]
    samples: Callable[[Request], abc.Sequence[int]]
    outbox: OutputQueue
    scheduling: Scheduling = Scheduling()
    begun: float = field(default_factory=time.monotonic)
    aborted: bool = False
    left: int = field(init=False)  # completions
    longest: int = field(init=False)  # the most new tokens that one may have
    sequences: set[Sequence] = field(init=False, default_factory=set)  # that exist now

    def __post_init__(self) -> None:
        self.left = sum(len(self.samples(request)) for request in self.requests)
        self.longest = max((request.limit for request in self.requests), default=0)


class _LoopTask(Generic[_Result]):
    """Work for the loop's thread between two steps."""

    def __init__(self, work: Callable[[Scheduler, Engine], _Result]) -> None:
        self._work, self.result = work, Future[_Result]()

    def run(self, scheduler: Scheduler, engine: Engine) -> None:
        try:
            self.result.set_result(self._work(scheduler, engine))
        except BaseException as error:  # its caller's to know
            self.result.set_exception(error)


class Loop:
    """Runs what callers want on one engine.

    Args:
        completing, searching: make what owns a sequence.
        check_step: steps that are under way before the first is looked at, as far as the engine
            goes.
        skip_step: tokens of each sequence that are made before the first is looked at.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler,
                 completing: Callable[[Request, int], RunningCompletion],
                 searching: Callable[[Request, int], RunningBeamSearch], *, encodes: bool,
                 check_step: int, skip_step: int) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._completing, self._searching, self._encodes = completing, searching, encodes
        self._check_step, self._skip_step = check_step, skip_step
        # A caller's thread would take cores from a step that runs on them.
        self._reads = engine.limits.ahead == 1
        self._calls: dict[ClientCall, WaitingGroup] = {}
        self._owners: dict[Sequence, tuple[ClientCall, RunningCompletion | RunningBeamSearch]] = {}
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()  # for the thread, from callers
        self._errands: deque[_LoopTask[Any]] = deque()
        self._pace = StepPacer()
        scheduler.step_times = self._pace.step_times
        self._error: BaseException | None = None
        self._closing = False
        self._busy_since: float | None = None  # start of this turn of the loop; None while idle
        self.metrics = Metrics(scheduler)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="llmc-loop", daemon=True)
        self._thread.start()

    # What callers do, each in a thread of its own.

    def add(self, call: ClientCall) -> None:
        """Complete what a call wants.

        Raises:
            LlmcError: one can never run, or nothing can any more.
        """
        for request in call.requests:
            problem = self._scheduler.problem(len(request.prompt), request.limit,
                                              request.params.beam_width)
            if problem:
                raise LlmcError(problem)

        def order() -> None:
            self._pace.came()
            try:
                self._calls[call] = self._scheduler.add(
                    self._sequences(call), call.scheduling.priority, call.scheduling.tenant)
            except Exception as error:  # this call's own
                call.outbox.fail(error)

        if call.left:
            self._tell(order)

    def abort(self, call: ClientCall) -> None:
        """Nobody wants it any more: its blocks are free once the step that runs has ended."""
        call.aborted = True
        self._mention(lambda: self._forget(call))

    def go_on(self) -> None:
        """A stalled sequence may go on, as its caller has read."""
        self._mention(lambda: None)

    def end(self, lease: SlotLease) -> None:
        """A session is over."""
        self._mention(lambda: self._scheduler.end(lease))

    @property
    def cache_tokens(self) -> int:
        """Positions of all blocks."""
        return self._engine.limits.num_blocks * self._engine.limits.block_size

    def check_health(self) -> None:
        """Raises LlmcError where nothing can run any more."""
        self.check_process()
        with self._condition:
            self._check()

    def stalled_seconds(self) -> float:
        """Seconds since a step completed or orders were taken; 0 without work."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check_process(self) -> None:
        """Raises LlmcError in a forked child, which has no threads of its parent."""
        if self._forked():
            raise LlmcError(f"this LLM was loaded in process {self._pid}, and cannot be used in "
                            f"its forked child {os.getpid()}; load it in the child, or start the "
                            f"child with multiprocessing's 'spawn'")

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def run(self, work: Callable[[Scheduler, Engine], _Result]) -> _Result:
        """Have the thread do some work between two steps, and wait for what it returns."""
        errand = _LoopTask(work)
        self._tell(lambda: self._errands.append(errand))
        return errand.result.result()

    def close(self) -> None:
        """End what runs, and the thread."""
        if self._forked():  # it is the parent's
            return
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _mention(self, order: Callable[[], None]) -> None:
        """`_tell` what does not matter where the loop has ended."""
        if self._forked():
            return
        with self._condition:
            self._order(order)

    def _tell(self, order: Callable[[], None]) -> None:
        self.check_process()
        with self._condition:
            self._check()
            self._order(order)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._condition.notify()

    def _check(self) -> None:
        if self._error is not None:
            raise LlmcError(f"the model has to be loaded again, as a step failed: {self._error}")
        if self._closing:
            raise LlmcError("this LLM is closed")

    # What the thread does.

    def _serve(self) -> None:
        under_way: deque[tuple[int, ScheduledStep]] = deque()
        idle = True
        try:
            while True:
                self._take_orders(None if idle else 0)
                while self._may_wait(len(under_way)) and (left := self._pace.left()):
                    self._take_orders(left)
                while self._errands and not under_way:
                    self._errands.popleft().run(self._scheduler, self._engine)
                scheduled = None
                if not self._errands and len(under_way) < self._depth():
                    scheduled = self._scheduler.schedule()
                idle = scheduled is None and not under_way
                if scheduled is not None:
                    self._pace.submitting(scheduled.step)
                    under_way.append((self._engine.submit(scheduled.step), scheduled))
                if under_way and (scheduled is None or len(under_way) >= self._depth()):
                    ticket, oldest = under_way.popleft()
                    self._pace.collecting()
                    sampled = self._engine.collect(ticket)
                    self._pace.collected()
                    self._postprocess(oldest, sampled)
        except BaseException as error:  # every caller's to know
            self._end(error)
        finally:
            self._engine.close()

    def _postprocess(self, scheduled: ScheduledStep, sampled: StepOutput) -> None:
        """Hand out what a step led to; who is done makes room."""
        made: dict[OutputQueue, list[Token | RunningBeamSearch]] = {}
        for sequence, chosen in scheduled.read(sampled):
            if sequence not in self._owners:
                continue  # its call has failed just now
            call, owner = self._owners[sequence]
            owner.num_cached_tokens = sequence.cached
            try:
                own = self._search(sequence, owner, chosen) \
                    if isinstance(owner, RunningBeamSearch) \
                    else self._decode(sequence, owner, chosen)
            except LlmcError as error:  # this call's own
                self.metrics.failed(error)
                self._forget(call)
                call.outbox.fail(error)
            else:
                if own is not None:
                    made.setdefault(call.outbox, []).append(own)
        self.metrics.count([own for each in made.values() for own in each
                            if isinstance(own, Token)])
        for outbox, each in made.items():
            outbox.put(each)

    def _decode(self, sequence: Sequence, owner: RunningCompletion,
                chosen: SequenceOutput) -> Token:
        token = owner.take(chosen.token, chosen.logprobs, self._reads)
        if token.finish_reason:
            self._leave(sequence)
        else:
            self._scheduler.append(sequence, chosen.token)
        return token

    def _go_on_masked(self, sequence: Sequence, owner: RunningCompletion,
                      error: LlmcError | None) -> None:
        """The token mask of a sequence is there, or cannot be had."""
        assert owner.guide is not None
        owner.guide.pending = False
        if error is not None and sequence in self._owners:
            call, _ = self._owners[sequence]
            self._forget(call)
            call.outbox.fail(error)

    def _search(self, sequence: Sequence, owner: RunningBeamSearch,
                chosen: SequenceOutput) -> RunningBeamSearch | None:
        going_on = owner.take(chosen)
        if going_on is not None:
            self._scheduler.go_on(sequence, *going_on)
            return None
        self._leave(sequence)
        return owner

    def _depth(self) -> int:
        """Steps that may be under way at once."""
        fewest = min((len(own.tokens) for own in self._scheduler.running), default=0)
        return min(self._engine.limits.ahead, max(self._check_step, self._skip_step - fewest, 1))

    def _may_wait(self, under_way: int) -> bool:
        """Whether the next step may come later, for those who are not there yet."""
        return (under_way == self._depth() - 1 and not self._errands
                and not self._scheduler.waiting)

    def _take_orders(self, wait: float | None) -> None:
        """Do what callers said since; wait until they say something, so many seconds at most."""
        with self._condition:
            idle = wait is None and not self._orders
            self._busy_since = None if idle else time.monotonic()
            self._condition.wait_for(lambda: self._orders or self._closing, wait)
            if self._closing:  # what was said is for `_end`
                raise LlmcError("this LLM was closed")
            orders, self._orders = self._orders, deque()
        for order in orders:
            order()

    def _sequences(self, call: ClientCall) -> Iterator[Sequence]:
        """A call's sequences, each made when it is the next to enter."""
        for request in call.requests:
            number = next(self._numbers)
            source = request.source if self._encodes else None
            prompt, key = list(request.prompt), call.scheduling.salt + request.key(self._encodes)
            count = request.params.prompt_logprobs
            scores = None if count is None else PromptScores(prompt, count)
            for sample in call.samples(request):
                yield self._sequence(call, request, number, sample, prompt, key, source, scores)

    def _sequence(self, call: ClientCall, request: Request, number: int, sample: int,
                  prompt: list[int],
                  key: bytes, source: abc.Sequence[int] | None,
                  scores: PromptScores | None) -> Sequence:
        owner: RunningCompletion | RunningBeamSearch
        if request.params.beam_width > 1:
            owner = searching = self._searching(request, call.longest)
            sequence = Sequence(number, prompt, request.limit, owner.state,
                               width=request.params.beam_width, candidates=searching.candidates,
                               key=key, source=source, aborted=lambda: call.aborted)
        else:
            owner = completing = self._completing(request, sample)
            completing.latest, completing.scores = call.begun, scores
            guide = completing.guide
            sequence = Sequence(number, prompt, request.limit, owner.state, key=key, source=source,
                               stalled=lambda: call.outbox.is_behind(completing) or
                               (guide is not None and guide.pending),
                               aborted=lambda: call.aborted,
                               mask=None if guide is None else guide.mask, scores=scores)
            completing.masked = lambda error: self._mention(
                lambda: self._go_on_masked(sequence, completing, error))
        self._owners[sequence] = call, owner
        call.sequences.add(sequence)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        call, _ = self._owners.pop(sequence)
        call.sequences.discard(sequence)
        self._scheduler.remove(sequence)
        call.left -= 1
        if not call.left:
            del self._calls[call]

    def _forget(self, call: ClientCall) -> None:
        group = self._calls.pop(call, None)
        if group is None:
            return
        self._scheduler.drop(group)
        for sequence in call.sequences:
            del self._owners[sequence]
            self._scheduler.remove(sequence)
        call.sequences.clear()

    def _end(self, error: BaseException) -> None:
        """Tell all callers, and take no more."""
        with self._condition:
            if not self._closing:
                self._error = error
            self._closing = True
            orders, self._orders = self._orders, deque()
        for order in orders:
            order()
        for call in self._calls:
            call.outbox.fail(error)
        for errand in self._errands:
            errand.result.set_exception(error)


class RequestHandle:
    """One caller's requests on all replicas.

    Attributes:
        left: completions that have not come whole.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.outbox = OutputQueue(wake)
        self._calls: list[tuple[Loop, ClientCall]] = []
        self.left = 0

    def begin(self, calls: list[tuple[Loop, ClientCall]]) -> None:
        """Have replicas begin with calls whose outbox is this one's.

        Raises:
            LlmcError: one can never run, or nothing can any more; then all has ended.
        """
        self._calls += calls
        self.left += sum(call.left for _, call in calls)
        try:
            for loop, call in calls:
                loop.add(call)
        except BaseException:
            self.abort()
            raise

    def take(self) -> list[Token | RunningBeamSearch]:
        """All that is there; perhaps nothing yet.

        Raises:
            LlmcError: what ended it; or this is a forked child.
        """
        self.check_process()
        made, stalled = self.outbox.take()
        if stalled:
            for loop in {loop for loop, _ in self._calls}:
                loop.go_on()
        self.left -= sum(isinstance(own, RunningBeamSearch) or own.finish_reason is not None
                         for own in made)
        return made

    def check_process(self) -> None:
        """See `Loop.check_process`."""
        for loop, _ in self._calls[:1]:
            loop.check_process()

    def abort(self) -> None:
        """Nobody wants the rest."""
        if self.left:
            for loop, call in self._calls:
                loop.abort(call)
