"""A model that is served: its name, its texts and tokens, and what it generates."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmc.runtime.decoding.params import SamplingParams
from llmc.runtime.decoding.token_text import token_bytes, token_text
from llmc.runtime.llm import AsyncLLM
from llmc.runtime.request import Piece
from llmc.server.errors import ApiError
from llmc.server.protocol import MAX_CHOICES, Message
from llmc.server.tools import ToolCallParser, parser_of


@dataclass(frozen=True)
class Job:
    """What a request has generated: `n` choices of each prompt."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0

    def __post_init__(self) -> None:
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ApiError(f"{len(self.prompts)} prompts with {self.n} choices each are more than "
                           f"{MAX_CHOICES} choices; send several requests")

    @property
    def n(self) -> int:
        return max(self.params.n, self.params.beam_width)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def stop_reason(self, piece: Piece) -> int | None:
        """Which of `stop_token_ids` ended a completion, as vLLM tells it."""
        return piece.token_id if piece.finish_reason == "stop" and \
            piece.token_id in self.params.stop_token_ids else None

    def choice(self, piece: Piece) -> int:
        """The index of the choice that a piece belongs to."""
        return piece.index * self.n + piece.sample


class Model:
    """A loaded case directory under a name.

    Args:
        tool_call_parser: how it calls tools. None: what its chat template says.

    Attributes:
        requests: that it works on.
    """

    def __init__(self, llm: AsyncLLM, name: str,
                 tool_call_parser: ToolCallParser | None = None) -> None:
        self.llm, self.name = llm, name
        self.created, self.requests = int(time.time()), 0
        template = llm.manifest.tokenizer.chat_template
        self.tool_call_parser = tool_call_parser
        if tool_call_parser is None and template is not None:
            self.tool_call_parser = parser_of((llm.case_dir / template).read_text("utf-8"))

    @contextmanager
    def working(self) -> Iterator[None]:
        """It works on one more request."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def check_name(self, name: str | None) -> None:
        """Raises ApiError where a client names another model."""
        if name is not None and name != self.name:
            raise ApiError(f"there is no model '{name}'; this server has '{self.name}'", 404,
                           param="model", code="model_not_found")

    async def read_prompts(self, prompts: Sequence[str | list[int]],
                           add_special_tokens: bool = True) -> list[list[int]]:
        """Texts as token ids. Of a long one that takes a while, so others go on meanwhile.

        Raises:
            LlmcError: see `LLM.tokenize`.
        """
        def read() -> list[list[int]]:
            return [self.llm.tokenize(prompt, add_special_tokens) if isinstance(prompt, str)
                    else prompt for prompt in prompts]

        return await asyncio.to_thread(read)

    async def read_messages(self, messages: Sequence[Message],
                            tools: Sequence[Mapping[str, object]] | None = None,
                            chat_template_kwargs: Mapping[str, object] | None = None) -> list[int]:
        """A conversation as token ids.

        Raises:
            ApiError: a message holds what is no text.
            LlmcError: see `LLM.chat_prompt`.
        """
        written = [_message(index, message) for index, message in enumerate(messages)]

        def read() -> list[int]:
            return self.llm.chat_prompt(written, tools=tools,
                                        chat_template_kwargs=chat_template_kwargs)

        return await asyncio.to_thread(read)

    def token_text(self, token_id: int) -> str:
        """One token's text, with U+FFFD for parts of characters; empty without a tokenizer."""
        return "" if self.llm.tokenizer is None else token_text(self.llm.tokenizer, token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, also where they are no whole characters; empty without a tokenizer."""
        return b"" if self.llm.tokenizer is None else token_bytes(self.llm.tokenizer, token_id)

    def pieces(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        """What is generated, each time all that is there; closing this stops the work."""
        return self.llm.stream_batches(job.prompts, job.params, priority=job.priority,
                                       all_beams=True)


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message as chat templates want it: its content a text, and the arguments of calls no JSON
    text but what that says.
    """
    written: dict[str, Any] = message.model_dump(exclude_none=True, exclude={"content"})
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise ApiError(f"message {index} has a part of type '{part.type}'; models here "
                               f"read text", param="messages")
        content = "\n".join(part.text or "" for part in content)
    written["content"] = content or ""
    for call in written.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise ApiError(f"the arguments of a tool call in message {index} are not JSON",
                           param="messages") from None
    return written
