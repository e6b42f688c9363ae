"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmc.runtime.request import Piece
from llmc.server.answer import Answer, Object
from llmc.server.errors import ApiError
from llmc.server.model import Job, Model
from llmc.server.protocol import ChatRequest, Generation


async def read_chat(model: Model, body: ChatRequest) -> Job:
    """What is to be generated.

    Raises:
        LlmcError: the messages are not sound, or the model does not chat.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    prompt = await model.read_messages(body.messages,
                                       chat_template_kwargs=body.chat_template_kwargs)
    max_tokens = body.max_tokens if body.max_completion_tokens is None \
        else body.max_completion_tokens
    if max_tokens is None:  # an answer ends by itself
        max_tokens = max(model.llm.max_model_len - len(prompt), 1)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Job([prompt], body.sampling(max_tokens, logprobs), body.priority)


class ChatAnswer(Answer):
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: Model, body: Generation, job: Job) -> None:
        super().__init__(model, body, job)
        self._begun: set[int] = set()

    def choice(self, index: int, pieces: list[Piece]) -> Object:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        return {"index": index, "message": message, "logprobs": self._logprobs(pieces),
                "finish_reason": pieces[-1].finish_reason, "stop_reason": None}

    def deltas(self, index: int, piece: Piece) -> Iterator[Object]:
        if index not in self._begun:
            self._begun.add(index)
            yield {"index": index, "delta": {"role": "assistant", "content": ""},
                   "logprobs": None, "finish_reason": None}
        if piece.text or piece.finish_reason or piece.logprobs:
            yield {"index": index, "delta": {"content": piece.text} if piece.text else {},
                   "logprobs": self._logprobs([piece]), "finish_reason": piece.finish_reason}

    def _logprobs(self, pieces: Sequence[Piece]) -> Object | None:
        if not pieces[-1].logprobs:
            return None
        return {"content": [{**self._token(piece.token_id, piece.logprobs.chosen),
                             "top_logprobs": [self._token(*own) for own in piece.logprobs.top]}
                            for piece in pieces if piece.logprobs]}

    def _token(self, token_id: int, logprob: float) -> Object:
        text = self.model.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
