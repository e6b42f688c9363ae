"""An interactive conversation with a model."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.multimodal.messages import user_message
from llmc.runtime.sampling.params import SamplingParams


class Chat:
    """A conversation, rendered by the model's chat template for each answer.

    Args:
        params: sampling parameters of every answer.
        adapter: name of a loaded LoRA adapter.

    Raises:
        LlmcError: params.n is not 1.
    """

    def __init__(self, llm: LLM, params: SamplingParams, adapter: str | None = None) -> None:
        if params.n != 1:
            raise LlmcError(f"n is {params.n}, a conversation has one answer per message; leave n "
                            f"out")
        self._llm, self._params, self._adapter = llm, params, adapter
        self.messages: list[dict[str, Any]] = []

    def say(self, message: str, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> \
            Generator[CompletionChunk, None, None]:
        """Yield chunks of the answer to a message.

        Closing the iterator ends the answer. The message and the chunks that were read become
        history.

        Args:
            message: a text.
            images: pictures of the message: paths, data: URLs, bytes or PIL images.
            audio: clips of the message; see `LLM.media_prompt`.

        Raises:
            LlmcError: the model has no chat template or does not take the items, one is invalid,
                or the conversation exceeds the KV cache. The message is then discarded.
        """
        messages = [*self.messages, user_message(message, images, audio)]
        prompt = self._llm.chat_prompt(messages)
        room = self._llm.manifest.dims.max_seq_len
        if len(prompt) > room:
            raise LlmcError(f"the conversation has {len(prompt)} tokens, the KV cache has room "
                            f"for {room}; shorten the message, start another conversation, or "
                            f"compile with a larger --max_seq_len")
        return self._answer(messages, self._llm.stream([prompt], self._params,
                                                       adapter=self._adapter))

    def _answer(self, messages: list[dict[str, Any]], pieces: Iterator[CompletionChunk]) -> \
            Generator[CompletionChunk, None, None]:
        text = ""
        try:
            for piece in pieces:
                text += piece.text
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": text}]
