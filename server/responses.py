"""/v1/responses: OpenAI's newer interface, as far as it is text in and text out. Nothing is
stored.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from llmc.runtime.request import Piece
from llmc.server.answer import Answer, Object, event
from llmc.server.chat import has_channels, with_channels
from llmc.server.errors import ApiError
from llmc.server.harmony import Harmony
from llmc.server.model import Job, Model
from llmc.server.protocol import ResponsesRequest
from llmc.server.tools import merged


async def read_response(model: Model, body: ResponsesRequest) -> Job:
    """What is to be generated.

    Raises:
        LlmcError: the input is not sound, or the model does not chat.
    """
    if body.n not in (None, 1):
        raise ApiError("n is not served; a response is one", param="n",
                       code="unsupported_parameter")
    prompt = await model.read_messages(body.messages)
    room = max(model.llm.max_model_len - len(prompt), 1)
    max_tokens = room if body.max_output_tokens is None else body.max_output_tokens
    params = body.sampling(max_tokens, None, model.sampling_defaults)
    return Job([prompt], with_channels(model, params), body.priority)


class ResponseAnswer(Answer):
    def __init__(self, model: Model, body: ResponsesRequest, job: Job) -> None:
        super().__init__(model, job)
        self._body = body
        self._id, self._message_id = (f"{kind}_{secrets.token_hex(24)}" for kind in ("resp", "msg"))
        self._text, self._reason = "", "stop"
        self._channels = Harmony(()) if has_channels(model, job.params) else None

    async def whole(self, batches: AsyncGenerator[list[Piece], None]) -> Object:
        async for pieces in batches:
            for piece in pieces:
                self._take(piece)
        return self._response(self._status, [self._message(self._status, [self._part()])])

    async def stream(self, batches: AsyncGenerator[list[Piece], None]) -> \
            AsyncGenerator[bytes, None]:
        numbers = itertools.count()
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}

        def told(kind: str, content: Object) -> bytes:
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": next(numbers), **content}, kind)

        async with aclosing(batches):
            # Before the first, something may be wrong with the request.
            pieces: list[Piece] | None = await anext(batches)
            yield told("created", {"response": self._response("in_progress", [])})
            yield told("in_progress", {"response": self._response("in_progress", [])})
            yield told("output_item.added", {"output_index": 0,
                                             "item": self._message("in_progress", [])})
            yield told("content_part.added", {**place, "part": self._part()})
            while pieces is not None:
                text = "".join(map(self._take, pieces))
                if text:
                    yield told("output_text.delta", {**place, "delta": text, "logprobs": []})
                pieces = await anext(batches, None)
        yield told("output_text.done", {**place, "text": self._text, "logprobs": []})
        yield told("content_part.done", {**place, "part": self._part()})
        item = self._message(self._status, [self._part()])
        yield told("output_item.done", {"output_index": 0, "item": item})
        yield told(self._status, {"response": self._response(self._status, [item])})

    def _take(self, piece: Piece) -> str:
        """What a piece adds to the text; reasoning does nothing."""
        self.count(piece)
        text = piece.text
        if self._channels is not None:
            deltas = [*self._channels.push(text),
                      *(self._channels.finish() if piece.finish_reason else ())]
            text = merged(deltas)[0]
        self._text += text
        self._reason = piece.finish_reason or self._reason
        return text

    @property
    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _part(self) -> Object:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _message(self, status: str, content: list[Object]) -> Object:
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant",
                "content": content}

    def _response(self, status: str, output: list[Object]) -> Object:
        body, usage = self._body, self.usage()
        return {
            "id": self._id, "object": "response", "created_at": self.created, "status": status,
            "error": None, "incomplete_details":
                {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": {}, "model": self.model.name, "output": output,
            "parallel_tool_calls": True, "previous_response_id": None, "store": False,
            "temperature": self.job.params.temperature, "top_p": self.job.params.top_p,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True,
                                                           exclude_defaults=True)
                     | {"type": body.text.format.type}},
            "tool_choice": "auto", "tools": [], "truncation": "disabled",
            "usage": None if status == "in_progress" else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"]}}
