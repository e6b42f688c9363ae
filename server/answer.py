"""Answers to requests that generate text: whole, or piece by piece."""

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
# Tokens and their alternatives. To make a larger answer takes the event loop for over 20 ms.
_LARGE = 4096
_SLICE = 128  # tokens whose events are made before others have their turn
Object = dict[str, Any]
_Result = TypeVar("_Result")
_LEAST_LOGPROB = -9999.0  # OpenAI's for a token that is very unlikely; JSON has no -inf


def _encoded(content: Object, *, fast: bool) -> bytes:
    """JSON. The fast encoder is native code, which holds the GIL until the end."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (encoder.encode(content) if fast else "".join(encoder.iterencode(content))).encode()


def event(content: Object, name: str = "") -> bytes:
    """One server-sent event, perhaps with a name."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def error_event(status: int, message: str, code: str | None = None) -> bytes:
    """The last event of a stream in which something went wrong."""
    return event(error_body(status, message, code=code), "error")


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


class Answer(ABC):
    """One request's answer, in the making."""

    def __init__(self, model: Model, job: GenerationJob) -> None:
        self.model, self.job = model, job
        self.created = int(time.time())
        self.completion_tokens = self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}  # tokens of each prompt that were in the cache

    @abstractmethod
    async def json(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> bytes:
        """The whole answer as JSON."""

    @abstractmethod
    def stream(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[bytes, None]:
        """Server-sent events, those of a batch of pieces together."""

    def encoded(self, content: Object) -> bytes:
        """An object as JSON."""
        return _encoded(content, fast=not self._is_large)

    async def made(self, make: Callable[[], _Result]) -> _Result:
        """What `make` returns, from another thread where the answer is large."""
        return await asyncio.to_thread(make) if self._is_large else make()

    @property
    def _is_large(self) -> bool:
        params = self.job.params
        values = self.completion_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:
            values += self.job.prompt_tokens * (1 + params.prompt_logprobs)
        return values > _LARGE

    def count(self, piece: CompletionChunk) -> None:
        """One more token; n completions read their prompt once."""
        self.completion_tokens += piece.token_id is not None
        if piece.sample == 0:
            self._cached[piece.index] = piece.num_cached_tokens

    def parsed(self, parser: OutputParser, piece: CompletionChunk) -> Iterator[Delta]:
        """Deltas of a piece, which is counted where it is reasoning."""
        self.reasoning_tokens += parser.is_reasoning
        yield from parser.push(piece.text, piece.finish_reason is not None)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, as far as that is known."""
        return sum(self._cached.values())

    def usage(self) -> Object:
        """Tokens so far."""
        prompt = self.job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens,
                "total_tokens": prompt + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
                "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}


class Choices(Answer):
    """An answer of choices."""

    PREFIX: ClassVar[str]  # of its id
    WHOLE: ClassVar[str]  # the name of the object
    CHUNK: ClassVar[str]

    def __init__(self, model: Model, body: Generation, job: GenerationJob) -> None:
        super().__init__(model, job)
        self._id = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self._include_usage, self._continuous = body.include_usage, body.continuous_usage

    @abstractmethod
    def choice(self, index: int, pieces: list[CompletionChunk]) -> Object:
        """A choice, of all its pieces."""

    @abstractmethod
    def deltas(self, index: int, piece: CompletionChunk) -> Iterator[Object]:
        """What a stream tells of a piece of a choice."""

    async def json(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> bytes:
        """The whole answer as JSON. Choices are encoded one by one, so that the objects of one at a
        time are in memory.
        """
        made: dict[int, list[CompletionChunk]] = {}
        async for pieces in batches:
            for piece in pieces:
                self.count(piece)
                made.setdefault(self.job.choice(piece), []).append(piece)

        def encode() -> bytes:
            first = made[0]
            choices = b",".join(self.encoded(self.choice(index, made.pop(index)))
                                for index in sorted(made))
            head = self.encoded(self._head(self.WHOLE))
            rest = {"usage": self.usage(), **self.extra(first)}
            return head[:-1] + b',"choices":[' + choices + b"]," + self.encoded(rest)[1:]

        return await self.made(encode)

    def extra(self, pieces: list[CompletionChunk]) -> Object:
        """Further fields of the whole answer, of the first choice's pieces."""
        return {}

    async def stream(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[bytes, None]:
        head = self._head(self.CHUNK)
        async with aclosing(batches):
            async for pieces in batches:
                for start in range(0, len(pieces), _SLICE):  # of a client that reads slowly
                    part = pieces[start:start + _SLICE]
                    events = await self.made(partial(self._events, head, part))
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
        return {"id": self._id, "object": kind, "created": self.created, "model": self.model.name}
