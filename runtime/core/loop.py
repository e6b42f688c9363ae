"""The engine loop: schedule, submit, collect, postprocess. Many callers, one thread."""

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

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.adapters import Adapter
from llmc.runtime.core.fair_queue import WaitingGroup
from llmc.runtime.core.image_memory import PromptMemory
from llmc.runtime.core.pacing import StepPacer
from llmc.runtime.core.pooling import Pooled, RunningPooling, require_finite
from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.core.request import Request, RunningBeamSearch, RunningCompletion, Token
from llmc.runtime.core.scheduler import (
    ScheduledStep,
    Scheduler,
    Sequence,
    SequenceOutput,
    SlotLease,
)
from llmc.runtime.core.step import EncoderInput, Engine, Step, StepOutput
from llmc.runtime.heap import frozen_heap
from llmc.runtime.metrics import Metrics
from llmc.runtime.speculation.config import Method
from llmc.runtime.speculation.engine_drafts import EngineDrafter
from llmc.runtime.speculation.ngram import NgramDrafter
from llmc.runtime.speculation.planner import SequenceDrafts

# Unread tokens of one completion, and of all of a caller's, at which generation pauses.
_UNREAD, _UNREAD_IN_ALL = 256, 8192
_Result = TypeVar("_Result")
Output = Token | RunningBeamSearch | Pooled
Owner = RunningCompletion | RunningBeamSearch | RunningPooling


class OutputQueue:
    """Outputs of one caller's requests, passed from the loops' threads to the caller's.

    Args:
        wake: called from a loop's thread when there is output to take.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._ready: list[Output] = []
        self._unread: Counter[RunningCompletion] = Counter()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def take(self) -> tuple[list[Output], bool]:
        """Take all outputs, without waiting; and whether a completion may have been paused.

        Raises:
            LlmcError: the requests failed.
        """
        with self._lock:
            if not self._ready and self._error is not None:
                raise self._error
            was_full = any(map(self.is_behind, self._unread))
            outputs, self._ready = self._ready, []
            self._unread.clear()
            return outputs, was_full

    def put(self, outputs: list[Output]) -> None:
        with self._lock:
            self._ready.extend(outputs)
            for output in outputs:
                if isinstance(output, Token):
                    self._unread[output.owner] += 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._wake()

    def is_behind(self, owner: RunningCompletion) -> bool:
        """Whether the caller must read before this completion continues."""
        return self._unread[owner] >= _UNREAD or len(self._ready) >= _UNREAD_IN_ALL


@dataclass(frozen=True)
class Scheduling:
    """Scheduling parameters of a call.

    Args:
        priority: lower ones go first.
        tenant: its share of the slots includes the call's. None: a separate share.
        salt: hashed into block names: only calls with the same salt share prefixes.
    """

    priority: int = 0
    tenant: str | None = None
    salt: bytes = b""


@dataclass(eq=False)
class ClientCall:
    """The samples of a caller's requests that one loop generates."""

    requests: abc.Sequence[Request]
    samples: Callable[[Request], abc.Sequence[int]]
    outbox: OutputQueue
    scheduling: Scheduling = Scheduling()
    begun: float = field(default_factory=time.monotonic)
    aborted: bool = False
    left: int = field(init=False)  # unfinished completions
    longest: int = field(init=False)  # largest limit of its requests
    sequences: set[Sequence] = field(init=False, default_factory=set)  # unfinished

    def __post_init__(self) -> None:
        self.left = sum(len(self.samples(request)) for request in self.requests)
        self.longest = max((request.limit for request in self.requests), default=0)


class _LoopTask(Generic[_Result]):
    """A task for the loop's thread between two steps."""

    def __init__(self, work: Callable[[Scheduler, Engine], _Result]) -> None:
        self._work, self.result = work, Future[_Result]()

    def run(self, scheduler: Scheduler, engine: Engine) -> None:
        try:
            self.result.set_result(self._work(scheduler, engine))
        except BaseException as error:  # raised in its caller
            self.result.set_exception(error)


class Loop:
    """Runs callers' requests on one engine.

    Args:
        completing, searching: create the owner of a sequence.
        encodes: whether the model has an encoder.
        check_step: maximum number of in-flight steps, up to the engine's limit.
        skip_step: tokens of each sequence to generate before the first is read.
        method: drafts of sequences, in addition to predicted outputs.
        pools: whether the model's outputs are pooled rows.
        direct: whether any thread may run a step of such a model, as it keeps nothing.

    Attributes:
        drafts_enabled: whether newly admitted sequences have drafts.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler,
                 completing: Callable[[Request, int], RunningCompletion],
                 searching: Callable[[Request, int], RunningBeamSearch], *, encodes: bool,
                 check_step: int, skip_step: int, method: Method = "off",
                 pools: bool = False, direct: bool = False) -> None:
        self._engine, self._scheduler, self._method = engine, scheduler, method
        self._pools, self._direct = pools, direct
        self._turn = threading.Lock()  # of the thread that uses the engine
        self.drafts_enabled = True
        self._completing, self._searching, self._encodes = completing, searching, encodes
        self._check_step, self._skip_step = check_step, skip_step
        # On CPU, detokenize in this thread: a caller's thread would take cores from the next step.
        self._reads = engine.limits.ahead == 1
        self._calls: dict[ClientCall, WaitingGroup] = {}
        self._owners: dict[Sequence, tuple[ClientCall, Owner]] = {}
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()  # callers' requests to the thread
        self._tasks: deque[_LoopTask[Any]] = deque()
        self._pace = StepPacer()
        scheduler.step_times = self._pace.step_times
        self._pace.costs = None if scheduler.drafts is None else scheduler.drafts.costs
        self._error: BaseException | None = None
        self._closing = False
        self._busy_since: float | None = None  # start of this iteration; None while idle
        self.metrics = Metrics(scheduler)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="llmc-loop", daemon=True)
        self._thread.start()

    # Called from callers' threads.
    def add(self, call: ClientCall) -> None:
        """Start a call.

        Raises:
            LlmcError: a request can never run, or the loop has ended.
        """
        for request in call.requests:
            problem = self._scheduler.problem(len(request.prompt), request.limit,
                                              request.params.beam_width, request.embeds)
            if problem:
                raise LlmcError(problem)

        def message() -> None:
            self._pace.came()
            try:
                self._calls[call] = self._scheduler.add(
                    self._sequences(call), call.scheduling.priority, call.scheduling.tenant)
            except Exception as error:  # fails only this call
                call.outbox.fail(error)

        if call.left:
            self._post(message)

    def pool_now(self, requests: abc.Sequence[Request]) -> list[np.ndarray] | None:
        """Run a step of pooled outputs in the calling thread, if no other request runs or waits.

        Between threads, and with a schedule, a text of all-MiniLM-L6-v2 takes 0.5 ms more of 2 ms.

        Returns:
            The row of each request; None: the requests must be added.

        Raises:
            LlmcError: the loop has ended, the step failed, or a row has NaN or infinite elements.
        """
        limits = self._engine.limits
        if not self._direct or not 0 < len(requests) <= limits.max_slots \
                or sum(len(request.prompt) for request in requests) > limits.max_tokens:
            return None
        self.check_process()
        if not self._turn.acquire(blocking=False):
            return None
        try:
            with self._condition:
                self._check()
                if self._busy_since is not None:
                    return None
            outputs = self._engine.collect(self._engine.submit(_pooled_step(requests)))
            assert outputs.pooled is not None
            rows = [require_finite(row) for row in outputs.pooled]
            self.metrics.finished += len(rows)
            return rows
        finally:
            self._turn.release()

    def abort(self, call: ClientCall) -> None:
        """Cancel a call. Its blocks are freed after the running step."""
        call.aborted = True
        self._post_if_running(lambda: self._forget(call))

    def go_on(self) -> None:
        """Wake the loop after a caller has read its outputs."""
        self._post_if_running(lambda: None)

    def end(self, lease: SlotLease) -> None:
        """End a session."""
        self._post_if_running(lambda: self._scheduler.end(lease))

    @property
    def cache_tokens(self) -> int:
        """Positions of all blocks of the KV cache."""
        return self._engine.limits.num_blocks * self._engine.limits.block_size

    def check_health(self) -> None:
        """Check that the loop still runs.

        Raises:
            LlmcError: a step failed, the loop was closed, or this is a forked child.
        """
        self.check_process()
        with self._condition:
            self._check()

    def stalled_seconds(self) -> float:
        """Seconds since a step completed or calls were read; 0 while idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check_process(self) -> None:
        """Check that this is the process that loaded the model.

        Raises:
            LlmcError: this is a forked child, which has no threads of its parent.
        """
        if self._forked():
            raise LlmcError(f"this LLM was loaded in process {self._pid}, and cannot be used in "
                            f"its forked child {os.getpid()}; load it in the child, or start the "
                            f"child with multiprocessing's 'spawn'")

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def run(self, work: Callable[[Scheduler, Engine], _Result]) -> _Result:
        """Run a task in the loop's thread between two steps, and return its result."""
        task = _LoopTask(work)
        self._post(lambda: self._tasks.append(task))
        return task.result.result()

    def close(self) -> None:
        """End running requests and the thread."""
        if self._forked():  # the parent closes it
            return
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def forget_adapter(self, adapter: Adapter) -> int:
        """Free an adapter's slot; or return how many unfinished calls use it, if any do."""
        def forget(scheduler: Scheduler, engine: Engine) -> int:
            users = sum(any(request.adapter is adapter for request in call.requests)
                        for call in self._calls)
            if not users:
                scheduler.adapters.forget(adapter)
            return users

        return self.run(forget)

    def _post_if_running(self, message: Callable[[], None]) -> None:
        """`_post`, or do nothing if the loop has ended."""
        if self._forked():
            return
        with self._condition:
            self._enqueue(message)

    def _post(self, message: Callable[[], None]) -> None:
        self.check_process()
        with self._condition:
            self._check()
            self._enqueue(message)

    def _enqueue(self, message: Callable[[], None]) -> None:
        self._inbox.append(message)
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._condition.notify()

    def _check(self) -> None:
        if self._error is not None:
            raise LlmcError(f"the model has to be loaded again, as a step failed: {self._error}")
        if self._closing:
            raise LlmcError("this LLM is closed")

    # Run by the loop's thread.
    def _serve(self) -> None:
        with frozen_heap():
            self._run_steps()

    def _run_steps(self) -> None:
        in_flight: deque[tuple[int, ScheduledStep]] = deque()
        idle = True
        try:
            while True:
                self._read_inbox(None if idle else 0)
                while self._may_wait(len(in_flight)) and (left := self._pace.left()):
                    self._read_inbox(left)
                with self._turn:
                    idle = self._run_step(in_flight)
        except BaseException as error:  # fails every caller
            self._end(error)
        finally:
            with self._turn:
                self._engine.close()

    def _run_step(self, in_flight: deque[tuple[int, ScheduledStep]]) -> bool:
        """Submit the next step, or collect the oldest; return whether there was neither."""
        while self._tasks and not in_flight:
            self._tasks.popleft().run(self._scheduler, self._engine)
        scheduled = None
        if not self._tasks and len(in_flight) < self._depth():
            scheduled = self._scheduler.schedule()
        idle = scheduled is None and not in_flight
        if scheduled is not None:
            self._pace.submitting(scheduled.step)
            in_flight.append((self._engine.submit(scheduled.step), scheduled))
        if in_flight and (scheduled is None or len(in_flight) >= self._depth()):
            ticket, oldest = in_flight.popleft()
            self._pace.collecting()
            output = self._engine.collect(ticket)
            self._pace.collected()
            self._postprocess(oldest, output)
        return idle

    def _postprocess(self, scheduled: ScheduledStep, sampled: StepOutput) -> None:
        """Pass a step's outputs to their callers, and end finished sequences."""
        outputs: dict[OutputQueue, list[Output]] = {}
        for sequence, output in scheduled.read(sampled):
            if sequence not in self._owners:
                continue  # its call failed in this step
            call, owner = self._owners[sequence]
            owner.num_cached_tokens = sequence.cached
            try:
                results = self._process(sequence, owner, output)
            except LlmcError as error:  # fails only this call
                self.metrics.failed(error)
                self._forget(call)
                call.outbox.fail(error)
            else:
                if results:
                    outputs.setdefault(call.outbox, []).extend(results)
        made = [result for results in outputs.values() for result in results]
        self.metrics.count([result for result in made if isinstance(result, Token)])
        self.metrics.finished += sum(isinstance(result, Pooled) for result in made)
        for outbox, pieces in outputs.items():
            outbox.put(pieces)

    def _process(self, sequence: Sequence, owner: Owner, output: SequenceOutput) -> \
            abc.Sequence[Output]:
        """Return what a step's output adds to a request's result."""
        if isinstance(owner, RunningBeamSearch):
            return self._search(sequence, owner, output)
        if isinstance(owner, RunningPooling):
            pooled = owner.take(output)
            self._leave(sequence)
            return (pooled,)
        return self._decode(sequence, owner, output)

    def _decode(self, sequence: Sequence, owner: RunningCompletion,
                output: SequenceOutput) -> abc.Sequence[Token]:
        tokens = []
        if sequence.on_host:
            output = owner.sample_on_host(output, sequence.tokens)
        for index, token_id in enumerate(output.tokens, 1):
            tokens.append(owner.take(token_id, output.logprobs[index - 1], self._reads,
                                     following=len(output.tokens) - index))
            if tokens[-1].finish_reason:
                self._leave(sequence)
                return tokens
        self._scheduler.append(sequence, output.tokens)
        return tokens

    def _resume_masked(self, sequence: Sequence, owner: RunningCompletion,
                       error: LlmcError | None) -> None:
        """Resume a sequence whose token mask was computed in another thread."""
        assert owner.guide is not None
        owner.guide.pending = False
        if error is not None and sequence in self._owners:
            call, _ = self._owners[sequence]
            self._forget(call)
            call.outbox.fail(error)

    def _search(self, sequence: Sequence, owner: RunningBeamSearch,
                output: SequenceOutput) -> abc.Sequence[RunningBeamSearch]:
        continuation = owner.take(output)
        if continuation is not None:
            self._scheduler.go_on(sequence, *continuation)
            return ()
        self._leave(sequence)
        return (owner,)

    def _depth(self) -> int:
        """Number of steps that may be in flight."""
        fewest = min((len(own.tokens) for own in self._scheduler.running), default=0)
        return min(self._engine.limits.ahead, max(self._check_step, self._skip_step - fewest, 1))

    def _may_wait(self, in_flight: int) -> bool:
        """Whether the next step may be delayed for requests that have not arrived."""
        return (in_flight == self._depth() - 1 and not self._tasks
                and not self._scheduler.waiting)

    def _read_inbox(self, wait: float | None) -> None:
        """Run callers' messages.

        Args:
            wait: seconds to wait for one. None: without limit.
        """
        with self._condition:
            idle = wait is None and not self._inbox
            self._busy_since = None if idle else time.monotonic()
            self._condition.wait_for(lambda: self._inbox or self._closing, wait)
            if self._closing:  # `_end` runs the remaining messages
                raise LlmcError("this LLM was closed")
            messages, self._inbox = self._inbox, deque()
        for message in messages:
            message()

    def _sequences(self, call: ClientCall) -> Iterator[Sequence]:
        """Yield a call's sequences; each is created when it is the next to be admitted."""
        for request in call.requests:
            number = next(self._numbers)
            source = request.encoder_input if self._encodes else None
            prompt, key = list(request.prompt), call.scheduling.salt + request.key(self._encodes)
            count = request.params.prompt_logprobs
            rows = request.embeds.positions.tolist() if request.embeds is not None else \
                request.memory.positions if request.memory is not None else ()
            scores = None if count is None else PromptScores(prompt, count, rows)
            for sample in call.samples(request):
                yield self._sequence(call, request, number, sample, prompt, key, source, scores)

    def _sequence(self, call: ClientCall, request: Request, number: int, sample: int,
                  prompt: list[int],
                  key: bytes, source: EncoderInput | None,
                  scores: PromptScores | None) -> Sequence:
        owner: Owner
        if self._pools:
            owner = RunningPooling(request)
            sequence = Sequence(number, prompt, request.limit, owner.state, key=key, pools=True,
                                token_type_ids=request.token_type_ids,
                                aborted=lambda: call.aborted)
        elif request.params.beam_width > 1:
            owner = searching = self._searching(request, call.longest)
            sequence = Sequence(number, prompt, request.limit, owner.state,
                               width=request.params.beam_width, candidates=searching.candidates,
                               key=key, source=source, aborted=lambda: call.aborted,
                               adapter=request.adapter, embeds=request.embeds)
        else:
            owner = completing = self._completing(request, sample)
            completing.latest, completing.scores = call.begun, scores
            completing.on_host = request.needs_logits and not self._engine.limits.applies_rules
            guide = completing.guide
            sequence = Sequence(number, prompt, request.limit, owner.state, key=key, source=source,
                               on_host=completing.on_host,
                               stalled=lambda: call.outbox.is_behind(completing) or
                               (guide is not None and guide.pending),
                               aborted=lambda: call.aborted,
                               mask=None if guide is None else guide.mask, scores=scores,
                               drafts=None if completing.on_host
                               else self._drafts(request, source), adapter=request.adapter,
                               embeds=request.embeds)
            completing.drafts = sequence.drafts
            if guide is not None:
                completing.masked = lambda error: self._post_if_running(
                    lambda: self._resume_masked(sequence, completing, error))
        self._owners[sequence] = call, owner
        call.sequences.add(sequence)
        return sequence

    def _drafts(self, request: Request, source: EncoderInput | None) -> SequenceDrafts | None:
        """Start the drafts of a completion; None without speculative decoding."""
        planner = self._scheduler.drafts
        if planner is None or not self.drafts_enabled \
                or not (self._method != "off" or request.prediction):
            return None
        limits = self._engine.limits
        by_engine = self._method == "draft" or (self._method == "ngram" and limits.prompt_lookup)
        if by_engine and not request.prediction:  # which the engine does not know
            return planner.sequence(EngineDrafter(ahead=limits.drafts_ahead,
                                                  prompt_lookup=limits.prompt_lookup))
        return planner.sequence(NgramDrafter(
            request.prompt, request.prediction,
            () if source is None or isinstance(source, np.ndarray | PromptMemory)
            or self._method == "off" else source))

    def _leave(self, sequence: Sequence) -> None:
        call = self._remove(sequence)
        call.sequences.discard(sequence)
        call.left -= 1
        if not call.left:
            del self._calls[call]

    def _forget(self, call: ClientCall) -> None:
        group = self._calls.pop(call, None)
        if group is None:
            return
        self._scheduler.drop(group)
        for sequence in call.sequences:
            self._remove(sequence)
        call.sequences.clear()

    def _remove(self, sequence: Sequence) -> ClientCall:
        call, owner = self._owners.pop(sequence)
        self._scheduler.remove(sequence)
        if isinstance(owner, RunningCompletion):
            owner.masked = None  # which refers to the sequence: only the collector would free both
        return call

    def _end(self, error: BaseException) -> None:
        """Fail all callers and accept no further ones."""
        with self._condition:
            if not self._closing:
                self._error = error
            self._closing = True
            messages, self._inbox = self._inbox, deque()
        for message in messages:
            message()
        for call in self._calls:
            call.outbox.fail(error)
        for task in self._tasks:
            task.result.set_exception(error)


def _pooled_step(requests: abc.Sequence[Request]) -> Step:
    """A step of whole texts, the shortest first, for a model without a cache."""
    types = [request.token_type_ids or [0] * len(request.prompt) for request in requests] \
        if any(request.token_type_ids for request in requests) else []
    return Step.of([request.prompt for request in requests], [0] * len(requests),
                   [()] * len(requests), range(len(requests)), logits="pooled",
                   token_type_ids=np.array([own for each in types for own in each], np.int64))


class RequestHandle:
    """One caller's requests on all replicas.

    Attributes:
        left: number of unfinished completions.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.outbox = OutputQueue(wake)
        self._calls: list[tuple[Loop, ClientCall]] = []
        self.left = 0

    def begin(self, calls: list[tuple[Loop, ClientCall]]) -> None:
        """Start calls whose outbox is this one's.

        Raises:
            LlmcError: a request can never run, or a loop has ended; all calls are then aborted.
        """
        self._calls += calls
        self.left += sum(call.left for _, call in calls)
        try:
            for loop, call in calls:
                loop.add(call)
        except BaseException:
            self.abort()
            raise

    def take(self) -> list[Output]:
        """Take all outputs, without waiting.

        Raises:
            LlmcError: the requests failed, or this is a forked child.
        """
        self.check_process()
        outputs, was_full = self.outbox.take()
        if was_full:
            for loop in {loop for loop, _ in self._calls}:
                loop.go_on()
        self.left -= sum(isinstance(output, RunningBeamSearch) or output.finish_reason is not None
                         for output in outputs)
        return outputs

    def check_process(self) -> None:
        """See `Loop.check_process`."""
        for loop, _ in self._calls[:1]:
            loop.check_process()

    def abort(self) -> None:
        """Cancel the unfinished completions."""
        if self.left:
            for loop, call in self._calls:
                loop.abort(call)
