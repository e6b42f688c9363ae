"""Work of a request that must not block the event loop or occupy a core of the model.

| work | location |
| --- | --- |
| tokenizing up to 32 KiB of text | a thread; `tokenizers` releases the GIL |
| tokenizing texts for embedding and classification | a thread, over 32 KiB one request at a time |
| tokenizing a longer text | a child process at low priority, one text at a time |
| rejecting a text that is too long | by its size, if that decides |
| rendering a chat template | two child processes |
| counting the values of a large JSON body | a child process, before pydantic reads the body |
| compiling a grammar | see `llmc.runtime.sampling.structured_output` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from llmc.runtime.core.llm import AsyncLLM
from llmc.runtime.message_forms import ContentFormat
from llmc.runtime.sandbox import JobLimits, Lane
from llmc.runtime.tokenizer import load_for_texts, tokenize_long
from llmc.server.errors import ApiError
from llmc.server.json_values import count_values

MAX_TOKENS = 2**18  # maximum that /tokenize returns
MAX_VALUES = 2**15  # of a JSON body: pydantic takes up to 1 us for each, and holds the GIL
_SHORT = 32 * 1024  # characters
# Threads that wait for child processes; separate, so that no kind of work delays another.
_TEXTS = ThreadPoolExecutor(1, "llmc-texts")
_TEMPLATES = ThreadPoolExecutor(2, "llmc-templates")
_BODIES = ThreadPoolExecutor(1, "llmc-bodies")
_Result = TypeVar("_Result")


class Offload:
    """Tokenizes texts, renders chat templates and counts JSON values for one model."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        path = llm.tokenizer_file
        self._texts = Lane(JobLimits(cpu_seconds=30, memory_mib=4096),
                           prepare=partial(load_for_texts, path) if path else None)
        self._bodies = Lane(JobLimits(cpu_seconds=10, memory_mib=1024))
        llm.sandbox.start()

    async def tokenize(self, text: str, add_special_tokens: bool, limit: int) -> \
            tuple[int, list[int]]:
        """Tokenize a text.

        Returns:
            The number of tokens or a lower bound of it, and the token ids if they are at most
            `limit`.

        Raises:
            LlmcError: see `LLM.tokenize`.
        """
        path = self._llm.tokenizer_file
        if len(text) <= _SHORT or path is None:
            ids = await asyncio.to_thread(self._llm.tokenize, text, add_special_tokens)
            return len(ids), ids
        count, ids = await asyncio.get_running_loop().run_in_executor(
            _TEXTS, self._llm.sandbox.run, self._texts, tokenize_long, path, text,
            add_special_tokens, limit)
        return count, ids

    async def long_work(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Tokenize texts of `size` characters together; long ones of one request at a time."""
        threads = _TEXTS if size > _SHORT else None  # None: asyncio's default
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def render_chat(self, messages: Callable[[], Sequence[Mapping[str, object]]],
                          tools: Sequence[Mapping[str, object]] | None,
                          chat_template_kwargs: Mapping[str, object] | None,
                          content_format: ContentFormat) -> str:
        """Render a conversation as `LLM.render_chat` does; calls `messages` in another thread."""
        def render() -> str:
            return self._llm.render_chat(messages(), tools=tools,
                                         chat_template_kwargs=chat_template_kwargs,
                                         chat_template_content_format=content_format)

        return await asyncio.get_running_loop().run_in_executor(_TEMPLATES, render)

    async def check_body(self, raw: bytes) -> None:
        """Reject a body whose number of JSON values would block the event loop.

        Raises:
            ApiError: it has more values than a prompt of token ids can need.
        """
        limit = max(MAX_VALUES, 2 * self._llm.max_model_len)
        if sum(map(raw.count, (b",", b"[", b"{"))) < limit:  # an upper bound of the values
            return
        count = await asyncio.get_running_loop().run_in_executor(
            _BODIES, self._llm.sandbox.run, self._bodies, count_values, raw)
        if count < 0:
            raise ApiError("Invalid JSON")
        if count > limit:
            raise ApiError(f"the body has {count} JSON values, expected at most {limit}; send "
                           f"texts instead of token ids, or several requests", 413)
