"""Run a case directory: `LLM`, and `AsyncLLM` for asyncio."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import os
import threading
import time
import types
import weakref
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmc.artifacts.manifest import Manifest, read_manifest, verify_files
from llmc.errors import LlmcError, shown
from llmc.limits import MAX_SEQUENCES
from llmc.memory import memory_errors
from llmc.runtime.core.loop import ClientCall, Loop, OutputQueue, RequestHandle, Scheduling
from llmc.runtime.core.request import (
    Completion,
    CompletionChunk,
    InputProcessor,
    Request,
    RunningBeamSearch,
    Token,
)
from llmc.runtime.core.scheduler import MOST_PRIORITY, Scheduler
from llmc.runtime.core.session import Session
from llmc.runtime.engines import BLOCK_SIZE
from llmc.runtime.message_forms import ContentFormat
from llmc.runtime.metrics import together
from llmc.runtime.prompts import Messages, Prompt, read_conversations, read_token_ids
from llmc.runtime.replica import EngineConfig, find_devices, load_replica
from llmc.runtime.sampling.beam_search import Beams
from llmc.runtime.sampling.params import (
    STRUCTURED_OUTPUT_FIELDS,
    SamplingParams,
    is_unicode,
    listed,
    whole,
)
from llmc.runtime.sandbox import Sandbox

_MAX_BATCH_SIZE = 16
_MAX_TOKENS = 2048  # of a step, in all
# Requests with a grammar wait for each other, and not for the threads of others.
_GRAMMARS = ThreadPoolExecutor(2, "llmc-grammars")
# What all prompts of one beam search have in common.
_SEARCH = ("beam_width", "length_penalty", "diversity_rate", "early_stopping")


class _Loaded:
    """A compiled model on its devices; see `LLM`.

    Args:
        case_dir: the case directory that `llmc compile` made.
        device: devices to run on, a multiple of tp_size: one replica for each tp_size of them.
            None: one replica on all cores.
        max_batch_size: maximum number of sequences that a replica decodes at once, up to 65,536;
            others wait. None: 16, or what the model was compiled for where that is less.
        verify: check the SHA-256 of every file first.
        check_step: maximum number of in-flight steps on a GPU.
        skip_step: tokens of each sequence that a GPU makes before the host reads the first.
        max_num_batched_tokens: maximum number of tokens of a step, at least max_batch_size; longer
            prompts are prefilled in chunks.
        block_size: positions of a block of the KV cache, a power of two.
        kv_cache_tokens: positions of all blocks. None: as many as there is memory for.
        gpu_memory_utilization: fraction of a GPU's memory to use, above 0 and at most 1.
        prefix_reuse: prefix caching: sequences share the blocks of a common prefix.
        attention_backend: attention kernels of target cuda: `vanilla` (a plain reference kernel),
            `llmc`, or `cudnn` (cuDNN for prefill, llmc for decode). None or `fastest`: whichever
            is fastest.

    Raises:
        LlmcError: the case directory is missing, broken or of a newer format; the devices do not
            fit; there is too little memory; or an argument is of another type or out of range.
    """

    def __init_subclass__(cls) -> None:
        """Give a class the constructor and the documentation of its arguments under its name."""
        own = types.FunctionType(_Loaded.__init__.__code__, globals(), "__init__")
        functools.update_wrapper(own, _Loaded.__init__)
        del own.__wrapped__  # type: ignore[attr-defined]
        own.__qualname__, own.__kwdefaults__ = f"{cls.__name__}.__init__", \
            _Loaded.__init__.__kwdefaults__
        setattr(cls, "__init__", own)  # noqa: B010
        if cls.__doc__ is not None and _Loaded.__doc__ is not None:  # as with python -OO
            cls.__doc__ = cls.__doc__.rstrip() + "\n\n    " + \
                _Loaded.__doc__[_Loaded.__doc__.index("Args:"):]

    def __init__(self, case_dir: str | Path, *, device: Sequence[int] | None = None,
                 max_batch_size: int | None = None, verify: bool = True, check_step: int = 2,
                 skip_step: int = 0, max_num_batched_tokens: int = _MAX_TOKENS,
                 block_size: int = BLOCK_SIZE, kv_cache_tokens: int | None = None,
                 gpu_memory_utilization: float = 0.9, prefix_reuse: bool = True,
                 attention_backend: str | None = None) -> None:
        self._loops: list[Loop] = []
        weakref.finalize(self, _close, self._loops)  # also at the end of the process
        self._dealt = 0  # completions to replicas, in turn
        check_step = _whole("check_step", check_step, 1)
        skip_step = _whole("skip_step", skip_step, 0)
        if max_batch_size is not None:
            max_batch_size = _whole("max_batch_size", max_batch_size, 1)
            if max_batch_size > MAX_SEQUENCES:
                raise LlmcError(f"max_batch_size {max_batch_size} is above {MAX_SEQUENCES}; more "
                                f"sequences than decode at once wait")
        devices = None if device is None else _devices(device)
        if not isinstance(case_dir, str | os.PathLike):
            raise LlmcError(f"case_dir is {shown(case_dir)}; give the directory that `llmc "
                            f"compile` made")
        self.case_dir = Path(case_dir)
        self.manifest: Manifest = read_manifest(self.case_dir)
        verify_files(self.manifest, self.case_dir, hashes=verify)
        limit = self.manifest.target.max_batch_size
        if max_batch_size is None:
            max_batch_size = min(_MAX_BATCH_SIZE, limit or _MAX_BATCH_SIZE)
        if limit is not None and max_batch_size > limit:
            raise LlmcError(f"max_batch_size {max_batch_size} exceeds {limit}, for which the model "
                            f"was compiled; lower it, or compile with a larger --max_batch_size")
        room = EngineConfig(max_batch_size,
                    max(_whole("max_num_batched_tokens", max_num_batched_tokens, 1),
                        max_batch_size),
                    _power("block_size", block_size),
                    None if kv_cache_tokens is None else
                    _whole("kv_cache_tokens", kv_cache_tokens, 1),
                    _part("gpu_memory_utilization", gpu_memory_utilization), attention_backend)
        self._max_batch_size = max_batch_size
        with memory_errors("load the model"):
            self._load(devices, room, prefix_reuse, check_step, skip_step)

    def _load(self, devices: list[int] | None, room: EngineConfig, prefix_reuse: bool,
              check_step: int,
              skip_step: int) -> None:
        self._reader = InputProcessor(self.manifest, self.case_dir, self._max_batch_size)
        self.tokenizer = self._reader.tokenizer
        try:
            for placements in find_devices(self.manifest, devices):
                engine = load_replica(self.manifest, self.case_dir, placements, room)
                self._loops.append(Loop(
                    engine, Scheduler(engine.limits, room.max_num_batched_tokens,
                                      reuse=prefix_reuse),
                    self._reader.completing, self._reader.searching,
                    encodes=self.manifest.encoder is not None,
                    check_step=check_step, skip_step=skip_step))
            self._reader.max_model_len = self.max_model_len
        except BaseException:
            _close(self._loops)
            raise

    def chat_prompt(self, messages: Messages, *,
                    tools: Sequence[Mapping[str, object]] | None = None,
                    chat_template_kwargs: Mapping[str, object] | None = None,
                    chat_template_content_format: ContentFormat = "auto") -> list[int]:
        """Messages, or one of the user, in the model's chat template, as a prompt of token ids.

        Args:
            messages: each with `role` and `content`, in any form of OpenAI's API: a text, or parts
                `{"type": "text", "text": …}`; arguments of tool calls as JSON text or as objects.
                A form that the template cannot read becomes one that it can. Other keys are the
                template's.
            tools: that the model may call, as the template wants them.
            chat_template_kwargs: other variables of the template.
            chat_template_content_format: `string` makes every content a text, `openai` a list of
                parts, whatever the template reads.

        Raises:
            LlmcError: the messages are no such list; the model has no chat template, or it cannot
                write them; or it is an encoder-decoder model.
        """
        return self._reader.chat_prompt(messages, tools, chat_template_kwargs or {},
                                        chat_template_content_format)

    def render_chat(self, messages: str | Sequence[Mapping[str, object]], *,
                    tools: Sequence[Mapping[str, object]] | None = None,
                    chat_template_kwargs: Mapping[str, object] | None = None,
                    chat_template_content_format: ContentFormat = "auto") -> str:
        """`chat_prompt` as a text, before it is tokenized."""
        return self._reader.render_chat(messages, tools, chat_template_kwargs or {},
                                        chat_template_content_format)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of prompts that are given none: what the model's generation_config.json
        recommends, and llmc's own defaults.
        """
        return self._reader.default_params

    @property
    def sandbox(self) -> Sandbox:
        """Child processes for jobs on untrusted input."""
        return self._reader.sandbox

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json; None where the model was compiled without a tokenizer."""
        return self._reader.tokenizer_file if self.tokenizer is not None else None

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's token ids, as of a prompt.

        Raises:
            LlmcError: the model has no tokenizer, or the text is no Unicode.
        """
        return self._reader.tokenize(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Raises:
            LlmcError: the model has no tokenizer, or has no such token.
        """
        return self._reader.detokenize(token_ids, skip_special_tokens)

    @property
    def max_model_len(self) -> int:
        """Positions of the longest sequence that there is room for, its prompt's among them."""
        return min([self.manifest.dims.max_seq_len, *(loop.cache_tokens for loop in self._loops)])

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once."""
        return self._max_batch_size * len(self._loops)

    def check_health(self) -> None:
        """Raises LlmcError where nothing runs any more: a step failed, or this is closed."""
        self._first()
        for loop in self._loops:
            loop.check_health()

    def stalled_seconds(self) -> float:
        """Seconds for which a replica that has work has neither completed a step nor taken orders.
        """
        return max((loop.stalled_seconds() for loop in self._loops), default=0.0)

    def metrics(self) -> dict[str, Any]:
        """What the replicas do and have done.

        Sequences `running` and callers `waiting`; `generated_tokens`, `tokens_per_second` of the
        last ten seconds, `finished` completions, requests that ended because of NaN or infinite
        logits (`nan_logits`), `preemptions`; prompt tokens looked up and found in the prefix cache
        when they first came (`cache_queries`, `cache_hits`); `cache_usage` from 0 to 1 of
        `num_blocks` of `block_size` positions; and of the newest few thousand, p50, p90 and p99 of
        `time_to_first_token` and `inter_token_latency` in seconds.

        Raises:
            LlmcError: this is closed.
        """
        self._first()
        return together([loop.metrics for loop in self._loops])

    def _first(self) -> Loop:
        if not self._loops:
            raise LlmcError("this LLM is closed")
        self._loops[0].check_process()
        return self._loops[0]

    def _pieces(self, made: Token | RunningBeamSearch,
                all_beams: bool = False) -> Iterator[CompletionChunk]:
        """What a caller is told; of a beam search its best sequence, or all."""
        if isinstance(made, Token):
            yield made.owner.piece(made)
            return
        for sample, tokens in enumerate(made.sequences()[:None if all_beams else 1]):
            found = self._reader.completing(made.request, sample)
            found.num_cached_tokens = made.num_cached_tokens
            for token in tokens:
                taken = found.take(token, None)
                yield found.piece(taken)
                if taken.finish_reason:
                    break

    def _calls(self, requests: list[Request], outbox: OutputQueue, scheduling: Scheduling) -> \
            list[tuple[Loop, ClientCall]]:
        """What each replica is to do: as many completions as the others."""
        self._first()
        count = len(self._loops)
        starts = {}
        for request in requests:
            starts[request.index], self._dealt = self._dealt, self._dealt + request.params.n

        def share(of: int) -> Callable[[Request], range]:
            return lambda request: range((of - starts[request.index]) % count, request.params.n,
                                         count)

        return [(loop, ClientCall(requests, share(index), outbox, scheduling))
                for index, loop in enumerate(self._loops)]


class LLM(_Loaded):
    """A compiled model, loaded; any number of threads may use it at once."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and free the KV caches."""
        _close(self._loops)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int = 0, tenant: str | None = None,
                 cache_salt: str | None = None) -> list[Completion]:
        """Complete each prompt; see `stream`. Where a prompt has n completions, they follow one
        another.
        """
        return sorted(self.complete(prompts, params, priority=priority, tenant=tenant,
                                    cache_salt=cache_salt),
                      key=lambda c: (c.index, c.sample))

    def chat(self, messages: Messages | Sequence[Messages],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             tools: Sequence[Mapping[str, object]] | None = None,
             chat_template_kwargs: Mapping[str, object] | None = None,
             priority: int = 0) -> list[Completion]:
        """Answer one conversation or several, written by the model's chat template.

        Args:
            messages: one conversation, a list of messages with `role` and `content`, or a text of
                the user; or a list of such lists.
            params: for all conversations, or one for each.
            tools: tools that the model may call, as the chat template expects them.
            chat_template_kwargs: further variables of the chat template.
            priority: see `stream`.

        Raises:
            LlmcError: see `chat_prompt` and `stream`.
        """
        return self.generate([self.chat_prompt(each, tools=tools,
                                               chat_template_kwargs=chat_template_kwargs)
                              for each in read_conversations(messages)], params, priority=priority)

    def complete(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
                 progress: Callable[[CompletionChunk], object] = lambda piece: None) -> \
            Iterator[Completion]:
        """Yield each completion as soon as it is whole; `progress` is called with each piece. See
        `stream`.
        """
        requests = self._reader.requests(prompts, params)
        scheduling = _scheduling(priority, tenant, cache_salt)
        return _completions(requests, self._stream(requests, scheduling), progress)

    def stream(self, prompts: Prompt | Sequence[Prompt],
               params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
               arrivals: Sequence[float] | None = None) -> Iterator[CompletionChunk]:
        """Yield each token as it is made, those of a beam search when it is done. Closing the
        iterator stops the work; where nobody reads it, its completions wait.

        Args:
            prompts: one or several, each text or token ids; a batch may have unequal lengths. They
                are what an encoder reads, where the model has one.
            params: for all prompts, or one for each; None: `default_sampling_params`.
            priority: from -100 to 100, lower ones go first.
            tenant: name of the user or customer. Tenants have equal shares of the slots while
                others wait, whatever they ask for, and so have the calls of a tenant. None: the
                call is a tenant of its own.
            cache_salt: a text; only calls with the same one share cached prefixes. None: with
                other calls without one.
            arrivals: seconds from now, at the first piece that is asked for, when each prompt
                comes; None: all at once.

        Raises:
            LlmcError: a prompt is neither text nor token ids of the vocabulary, or is empty or
                longer than the KV cache; params do not fit the model or the number of prompts; no
                token is allowed; or a step failed.
        """
        requests = self._reader.requests(prompts, params)
        return self._stream(requests, _scheduling(priority, tenant, cache_salt),
                            _arrivals(arrivals, len(requests)))

    def logits(self, token_ids: Sequence[int], source: Sequence[int] | None = None) -> np.ndarray:
        """float32 [num_tokens, vocab_size] for one sequence from its start; of an encoder-decoder
        model, for the decoder's tokens where its encoder reads `source`.
        """
        session = self.session(1, None if source is None else [source])
        try:
            return session.extend([read_token_ids(token_ids, "token_ids")], all_logits=True)
        finally:
            session.close()

    def session(self, batch_size: int, sources: Sequence[Sequence[int]] | None = None) -> Session:
        """Step by step access to the first replica, for checks and experiments. An encoder-decoder
        model's encoder reads `sources`, one of token ids for each sequence.
        """
        if (sources is None) != (self.manifest.encoder is None):
            raise LlmcError(f"'{self.manifest.source.architecture}' has "
                            f"{'an' if sources is None else 'no'} encoder: "
                            f"{'give' if sources is None else 'leave out'} what it is to read")
        batch_size = _whole("batch_size", batch_size, 1)
        if batch_size > self._max_batch_size:
            raise LlmcError(f"batch_size {batch_size} is not from 1 to max_batch_size "
                            f"{self._max_batch_size}")
        return Session(self._first(), self._reader, batch_size, sources)

    def beam_search(self, prompts: Prompt | Sequence[Prompt],
                    params: SamplingParams | Sequence[SamplingParams]) -> Beams:
        """All sequences that beam search finds; `generate` with a beam_width gives the best of each
        prompt.

        Raises:
            LlmcError: see `stream`; or there is no prompt, beam_width is 1, or prompts differ in
                beam_width, length_penalty, diversity_rate or early_stopping.
        """
        requests = self._reader.requests(prompts, params)
        if not requests:
            raise LlmcError("there is no prompt; give at least one")
        for name in _SEARCH:
            values = list(dict.fromkeys(getattr(r.params, name) for r in requests))
            if len(values) > 1:
                raise LlmcError(f"one beam search has one {name} for all prompts, not {values[0]} "
                                f"and {values[1]}; use generate, or search one after the other")
        if requests[0].params.beam_width == 1:
            raise LlmcError("beam_width 1 is no beam search; give SamplingParams(beam_width=2) or "
                            "more, or use generate")
        found = {made.request.index: made.beams() for made in self._made(requests, Scheduling())
                 if isinstance(made, RunningBeamSearch)}
        return Beams.join([found[request.index] for request in requests])

    def _made(self, requests: list[Request], scheduling: Scheduling,
              arrivals: Sequence[float] | None = None) -> Iterator[Token | RunningBeamSearch]:
        """What comes of requests, until all of it has come."""
        ready = threading.Event()
        work = RequestHandle(ready.set)
        start, coming = time.monotonic(), deque(_by_arrival(requests, arrivals))
        try:
            while coming or work.left:
                wait = coming[0][0] + start - time.monotonic() if coming else None
                if wait is not None and wait <= 0:
                    work.begin(self._calls(coming.popleft()[1], work.outbox, scheduling))
                    continue
                made = work.take()
                if not made:
                    ready.wait(wait)
                    ready.clear()
                for own in made:
                    yield own
                    work.check_process()  # the generator may go on in a forked child
        finally:
            work.abort()

    def _stream(self, requests: list[Request], scheduling: Scheduling,
                arrivals: Sequence[float] | None = None) -> Iterator[CompletionChunk]:
        for made in self._made(requests, scheduling, arrivals):
            yield from self._pieces(made)


class AsyncLLM(_Loaded):
    """A compiled model, loaded, for asyncio; any number of tasks may use it at once."""

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs, and free the KV caches."""
        await asyncio.to_thread(_close, self._loops)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *,
                       priority: int = 0, tenant: str | None = None,
                       cache_salt: str | None = None) -> AsyncIterator[CompletionChunk]:
        """`stream` of one prompt."""
        async with aclosing(self.stream([prompt], params, priority=priority, tenant=tenant,
                                        cache_salt=cache_salt)) as pieces:
            async for piece in pieces:
                yield piece

    async def chat(self, messages: Messages, params: SamplingParams | None = None, *,
                   tools: Sequence[Mapping[str, object]] | None = None,
                   chat_template_kwargs: Mapping[str, object] | None = None,
                   priority: int = 0) -> AsyncIterator[CompletionChunk]:
        """`generate` of a conversation, written by the model's chat template; see `LLM.chat`."""
        prompt = await asyncio.to_thread(self.chat_prompt, messages, tools=tools,
                                         chat_template_kwargs=chat_template_kwargs)
        async with aclosing(self.stream([prompt], params, priority=priority)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream(self, prompts: Prompt | Sequence[Prompt],
                     params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                     priority: int = 0, tenant: str | None = None, cache_salt: str | None = None,
                     all_beams: bool = False) -> AsyncGenerator[CompletionChunk, None]:
        """Yield each token of all completions as it is made; see `LLM.stream`. Closing the
        iterator, or cancelling the task that reads it, stops the work; where nobody reads it, it
        waits.

        Args:
            all_beams: of a beam search all sequences, best first, each a sample; else the best.
        """
        async with aclosing(self.stream_batches(
                prompts, params, priority=priority, tenant=tenant, cache_salt=cache_salt,
                all_beams=all_beams)) as batches:
            async for pieces in batches:
                for piece in pieces:
                    yield piece

    async def stream_batches(self, prompts: Prompt | Sequence[Prompt],
                             params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                             priority: int = 0, tenant: str | None = None,
                             cache_salt: str | None = None, all_beams: bool = False) -> \
            AsyncGenerator[list[CompletionChunk], None]:
        """`stream`, but each time all tokens that are there: who is slower than they come has less
        to do for each.
        """
        threads = _GRAMMARS if _has_grammar(params) else None  # None: asyncio's own
        requests = await asyncio.get_running_loop().run_in_executor(
            threads, self._reader.requests, prompts, params)
        scheduling = _scheduling(priority, tenant, cache_salt)
        async with aclosing(self._made(requests, scheduling)) as all_made:
            async for made in all_made:
                yield [piece for own in made for piece in self._pieces(own, all_beams)]

    async def _made(self, requests: list[Request], scheduling: Scheduling) -> \
            AsyncGenerator[list[Token | RunningBeamSearch], None]:
        """What comes of requests, until all of it has come; each time all that is there."""
        ready, alarm = asyncio.Event(), _Alarm.of_running_loop()
        work = RequestHandle(lambda: alarm.ring(ready))
        try:
            work.begin(self._calls(requests, work.outbox, scheduling))
            while work.left:
                made = work.take()
                if made:
                    yield made
                else:
                    await ready.wait()
                    ready.clear()
        finally:
            work.abort()


class _Alarm:
    """Sets events of an asyncio loop from other threads, those of a step all at once: to wake the
    loop takes a system call, at which a thread loses its turn.
    """

    _ALL: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm]] = \
        weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._events: list[asyncio.Event] = []

    @staticmethod
    def of_running_loop() -> _Alarm:
        loop = asyncio.get_running_loop()
        return _Alarm._ALL.setdefault(loop, _Alarm(loop))

    def ring(self, event: asyncio.Event) -> None:
        with self._lock:
            self._events.append(event)
            first = len(self._events) == 1
        loop = self._loop()
        if first and loop is not None:
            with suppress(RuntimeError):  # it was closed, so nobody waits
                loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()


def _has_grammar(params: SamplingParams | Sequence[SamplingParams] | None) -> bool:
    each = [params] if isinstance(params, SamplingParams) else params or ()
    return any(getattr(own, name) for own in each for name in STRUCTURED_OUTPUT_FIELDS)


def _close(loops: list[Loop]) -> None:
    for loop in loops:
        loop.close()
    loops.clear()


def _by_arrival(requests: list[Request], arrivals: Sequence[float] | None) -> \
        list[tuple[float, list[Request]]]:
    """Requests that come at the same time, in the order in which they come."""
    if arrivals is None:
        return [(0.0, requests)] if requests else []
    order = sorted(range(len(requests)), key=lambda index: arrivals[index])
    return [(arrivals[index], [requests[index]]) for index in order]


def _arrivals(value: object, count: int) -> list[float] | None:
    """When each of so many prompts comes."""
    if value is None:
        return None
    try:
        read = [float(seconds) for seconds in listed(value)]
    except (TypeError, ValueError):
        read = []
    if len(read) != count or not all(0 <= seconds < math.inf for seconds in read):
        raise LlmcError(f"arrivals is {shown(value)}; give seconds from 0 for each of {count} "
                        f"prompts")
    return read


def _completions(requests: Sequence[Request], pieces: Iterator[CompletionChunk],
                 progress: Callable[[CompletionChunk], object]) -> Iterator[Completion]:
    """Each as soon as it is whole."""
    made: dict[tuple[int, int], list[CompletionChunk]] = defaultdict(list)
    for piece in pieces:
        progress(piece)
        made[piece.index, piece.sample].append(piece)
        if piece.finish_reason:
            yield Completion.of(requests[piece.index].source,
                                made.pop((piece.index, piece.sample)))


def _whole(name: str, value: object, least: int) -> int:
    """An argument that is a whole number."""
    try:
        read = whole(value)
    except (TypeError, ValueError) as error:
        raise LlmcError(f"{name} is {shown(value)}; give {error}") from None
    if read < least:
        raise LlmcError(f"{name} {read} is below {least}")
    return read


def _scheduling(priority: object, tenant: object, cache_salt: object) -> Scheduling:
    """Arguments of a call, read. A salt is hashed by another function than blocks are, so no
    tokens lead to the same hash.
    """
    level = _whole("priority", priority, -MOST_PRIORITY)
    if level > MOST_PRIORITY:
        raise LlmcError(f"priority {level} is above {MOST_PRIORITY}")
    salt = _name("cache_salt", cache_salt)
    return Scheduling(level, _name("tenant", tenant), b"" if salt is None else hashlib.blake2b(
        salt.encode(), digest_size=32, person=b"cache_salt").digest())


def _name(name: str, value: object) -> str | None:
    """An argument that is a text of at least one character, or None."""
    if value is not None and not (isinstance(value, str) and value and is_unicode(value)):
        raise LlmcError(f"{name} is {shown(value)}; give a text that is not empty, or None")
    return value


def _power(name: str, value: object) -> int:
    """An argument that is a power of two."""
    read = _whole(name, value, 1)
    if read & (read - 1):
        raise LlmcError(f"{name} {read} is no power of two; give one such as {BLOCK_SIZE}")
    return read


def _part(name: str, value: object) -> float:
    """An argument that is a part of a whole."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LlmcError(f"{name} is {shown(value)}; give a number above 0, at most 1")
    if not 0 < value <= 1:
        raise LlmcError(f"{name} {value} is not above 0 and at most 1")
    return float(value)


def _devices(value: object) -> list[int]:
    try:
        return [whole(number) for number in listed(value)]
    except (TypeError, ValueError):
        raise LlmcError(f"device is {shown(value)}; give a list of numbers such as [0, 1]") \
            from None
