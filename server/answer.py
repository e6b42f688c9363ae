"""Answers to requests that generate text: whole, or piece by piece."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from llmc.runtime.request import Piece
from llmc.server.model import Job, Model
from llmc.server.protocol import Generation

DONE = b"data: [DONE]\n\n"
Object = dict[str, Any]
_LEAST_LOGPROB = -9999.0  # OpenAI's for a token that is very unlikely; JSON has no -inf


def event(content: Object, name: str = "") -> bytes:
    """One server-sent event, perhaps with a name."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


class Answer(ABC):
    """One request's answer, in the making."""

    def __init__(self, model: Model, job: Job) -> None:
        self.model, self.job = model, job
        self.created = int(time.time())
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # tokens of each prompt that were in the cache

    @abstractmethod
    async def whole(self, batches: AsyncGenerator[list[Piece], None]) -> Object:
        """The answer, once there is nothing more to come."""

    @abstractmethod
    def stream(self, batches: AsyncGenerator[list[Piece], None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events, those of a batch of pieces together."""

    def count(self, piece: Piece) -> None:
        """One more token; n completions read their prompt once."""
        self.completion_tokens += 1
        if piece.sample == 0:
            self._cached[piece.index] = piece.num_cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, as far as that is known."""
        return sum(self._cached.values())

    def usage(self) -> Object:
        """Tokens so far."""
        prompt = self.job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens,
                "total_tokens": prompt + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


class Choices(Answer):
    """An answer of choices."""

    PREFIX: ClassVar[str]  # of its id
    WHOLE: ClassVar[str]  # the name of the object
    CHUNK: ClassVar[str]

    def __init__(self, model: Model, body: Generation, job: Job) -> None:
        super().__init__(model, job)
        self._id = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self._include_usage, self._continuous = body.include_usage, body.continuous_usage

    @abstractmethod
    def choice(self, index: int, pieces: list[Piece]) -> Object:
        """A choice, of all its pieces."""

    @abstractmethod
    def deltas(self, index: int, piece: Piece) -> Iterator[Object]:
        """What a stream tells of a piece of a choice."""

    async def whole(self, batches: AsyncGenerator[list[Piece], None]) -> Object:
        made: dict[int, list[Piece]] = {}
        async for pieces in batches:
            for piece in pieces:
                self.count(piece)
                made.setdefault(self.job.choice(piece), []).append(piece)
        return {**self._head(self.WHOLE), "choices": [self.choice(index, made[index])
                                                      for index in sorted(made)],
                "usage": self.usage()}

    async def stream(self, batches: AsyncGenerator[list[Piece], None]) -> \
            AsyncGenerator[bytes, None]:
        head = self._head(self.CHUNK)
        async with aclosing(batches):
            async for pieces in batches:
                chunks = [chunk for piece in pieces for chunk in self._chunks(head, piece)]
                if chunks:
                    yield b"".join(map(event, chunks))
        if self._include_usage:
            yield event({**head, "choices": [], "usage": self.usage()})
        yield DONE

    def _chunks(self, head: Object, piece: Piece) -> Iterator[Object]:
        self.count(piece)
        for choice in self.deltas(self.job.choice(piece), piece):
            chunk = {**head, "choices": [choice]}
            if self._include_usage:
                chunk["usage"] = self.usage() if self._continuous else None
            yield chunk

    def _head(self, kind: str) -> Object:
        return {"id": self._id, "object": kind, "created": self.created, "model": self.model.name}
