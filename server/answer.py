"""Answers to generation requests, as a whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, TypeVar

from llmc.runtime.core.request import CompletionChunk
from llmc.server.errors import error_body
from llmc.server.model import GenerationJob, Model
from llmc.server.output_parser import OutputParser
from llmc.server.protocol import Generation
from llmc.server.text_reader import Delta

DONE = b"data: [DONE]\n\n"
# Tokens and their alternatives; encoding more blocks the event loop for over 20 ms.
_LARGE = 4096
_SLICE = 128  # tokens whose events are encoded before the event loop runs other tasks
Object = dict[str, Any]
_Result = TypeVar("_Result")
_LEAST_LOGPROB = -9999.0  # OpenAI's value of a very unlikely token; JSON has no -inf


def event(content: Object, name: str = "") -> bytes:
    """Encode a server-sent event."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def error_event(status: int, message: str, code: str | None = None) -> bytes:
    """Encode an error as the last event of a stream."""
    return event(error_body(status, message, code=code), "error")


def finite(logprob: float) -> float:
    """Clip a log-probability to a finite value for JSON."""
    return max(logprob, _LEAST_LOGPROB)


class Answer(ABC):
    """The answer to one request."""

    def __init__(self, model: Model, job: GenerationJob) -> None:
        self.model, self.job = model, job
        self.created = int(time.time())
        self.completion_tokens = self.reasoning_tokens = 0
        self._accepted_prediction_tokens = self._rejected_prediction_tokens = 0
        self._cached: dict[int, int] = {}  # tokens of each prompt that were cached

    @property
    def model_name(self) -> str:
        """Name of the model, or of its adapter that generates."""
        return self.job.adapter or self.model.name

    @abstractmethod
    async def json(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> bytes:
        """Return the whole answer as JSON."""

    @abstractmethod
    def stream(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[bytes, None]:
        """Yield server-sent events, one piece of bytes per batch of chunks."""

    def encoded(self, content: Object) -> bytes:
        """Encode an object as JSON.

        The fast encoder is native code that holds the GIL throughout, so large answers do not use
        it.
        """
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text = "".join(encoder.iterencode(content)) if self._is_large else encoder.encode(content)
        return text.encode()

    async def build(self, make: Callable[[], _Result]) -> _Result:
        """Call `make`, in another thread if the answer is large."""
        return await asyncio.to_thread(make) if self._is_large else make()

    @property
    def _is_large(self) -> bool:
        params = self.job.params
        values = self.completion_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:
            values += self.job.prompt_tokens * (1 + params.prompt_logprobs)
        return values > _LARGE

    def count(self, piece: CompletionChunk) -> None:
        """Count a token; the n completions of a prompt share its cached tokens."""
        self.completion_tokens += piece.token_id is not None
        self._accepted_prediction_tokens += piece.accepted_prediction_tokens
        self._rejected_prediction_tokens += piece.rejected_prediction_tokens
        if piece.sample == 0:
            self._cached[piece.index] = piece.num_cached_tokens

    def parsed(self, parser: OutputParser, piece: CompletionChunk) -> Iterator[Delta]:
        """Yield the deltas of a chunk, and count its token if it is reasoning."""
        self.reasoning_tokens += parser.is_reasoning
        yield from parser.push(piece.text, piece.finish_reason is not None)

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of all prompts, as far as known."""
        return sum(self._cached.values())

    def usage(self) -> Object:
        """Return the token counts so far, as OpenAI's `usage`."""
        prompt = self.job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens,
                "total_tokens": prompt + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
                "completion_tokens_details": {
                    "reasoning_tokens": self.reasoning_tokens,
                    "accepted_prediction_tokens": self._accepted_prediction_tokens,
                    "rejected_prediction_tokens": self._rejected_prediction_tokens}}


class Choices(Answer):
    """An answer with a list of choices.

    Attributes:
        PREFIX: of the answer's id.
        WHOLE: object name of a whole answer.
        CHUNK: object name of an event.
    """

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, model: Model, body: Generation, job: GenerationJob) -> None:
        super().__init__(model, job)
        self._id = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self._include_usage, self._continuous = body.include_usage, body.continuous_usage

    @abstractmethod
    def choice(self, index: int, pieces: list[CompletionChunk]) -> Object:
        """Return a choice from all its chunks."""

    @abstractmethod
    def deltas(self, index: int, piece: CompletionChunk) -> Iterator[Object]:
        """Yield the choice deltas of a chunk."""

    async def json(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> bytes:
        """Return the whole answer as JSON.

        Choices are encoded one at a time, so that only one choice's objects are in memory.
        """
        pieces_by_choice: dict[int, list[CompletionChunk]] = {}
        async for pieces in batches:
            for piece in pieces:
                self.count(piece)
                pieces_by_choice.setdefault(self.job.choice(piece), []).append(piece)

        def encode() -> bytes:
            first = pieces_by_choice[0]
            choices = b",".join(self.encoded(self.choice(index, pieces_by_choice.pop(index)))
                                for index in sorted(pieces_by_choice))
            head = self.encoded(self._head(self.WHOLE))
            rest = {"usage": self.usage(), **self.extra(first)}
            return head[:-1] + b',"choices":[' + choices + b"]," + self.encoded(rest)[1:]

        return await self.build(encode)

    def extra(self, pieces: list[CompletionChunk]) -> Object:
        """Return further fields of the whole answer, from the first choice's chunks."""
        return {}

    async def stream(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[bytes, None]:
        head = self._head(self.CHUNK)
        async with aclosing(batches):
            async for pieces in batches:
                for start in range(0, len(pieces), _SLICE):  # many, if the client reads slowly
                    part = pieces[start:start + _SLICE]
                    events = await self.build(partial(self._events, head, part))
                    if events:
                        yield events
                    await asyncio.sleep(0)
        if self._include_usage:
            yield event({**head, "choices": [], "usage": self.usage()})
        yield DONE

    def _events(self, head: Object, pieces: list[CompletionChunk]) -> bytes:
        return b"".join(event(chunk) for piece in pieces for chunk in self._chunks(head, piece))

    def _chunks(self, head: Object, piece: CompletionChunk) -> Iterator[Object]:
        self.count(piece)
        for choice in self.deltas(self.job.choice(piece), piece):
            chunk = {**head, "choices": [choice]}
            if self._include_usage:
                chunk["usage"] = self.usage() if self._continuous else None
            yield chunk

    def _head(self, kind: str) -> Object:
        return {"id": self._id, "object": kind, "created": self.created, "model": self.model_name}
