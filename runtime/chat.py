"""A conversation with a model."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.sampling.params import SamplingParams


class Chat:
    """Messages so far, which the model sees through its chat template at each answer.

    Args:
        params: of every answer.

    Raises:
        LlmcError: params ask for more than one.
    """

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        if params.n != 1:
            raise LlmcError(f"n {params.n} answers cannot all be part of a conversation; leave n "
                            f"out")
        self._llm, self._params = llm, params
        self.messages: list[dict[str, str]] = []

    def say(self, message: str) -> Generator[CompletionChunk, None, None]:
        """Pieces of the answer. Closing the iterator ends it; the message and as much of the
        answer as was taken are history then.

        Raises:
            LlmcError: the model has no chat template, or the conversation has outgrown the KV
                cache; the message is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        prompt = self._llm.chat_prompt(messages)
        room = self._llm.manifest.dims.max_seq_len
        if len(prompt) > room:
            raise LlmcError(f"the conversation has {len(prompt)} tokens, the KV cache has room "
                            f"for {room}; say less, begin another, or compile with a larger "
                            f"--max_seq_len")
        return self._answer(messages, self._llm.stream([prompt], self._params))

    def _answer(self, messages: list[dict[str, str]], pieces: Iterator[CompletionChunk]) -> \
            Generator[CompletionChunk, None, None]:
        text = ""
        try:
            for piece in pieces:
                text += piece.text
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": text}]
