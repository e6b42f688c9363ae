"""/v1/responses: OpenAI's Responses API, for text, images, audio and function calls."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from llmc.runtime.core.request import CompletionChunk
from llmc.server.answer import Answer, Object, event
from llmc.server.chat import read_conversation
from llmc.server.errors import ApiError
from llmc.server.model import GenerationJob, Model
from llmc.server.output_parser import output_parser
from llmc.server.protocol import Item, Message, ResponsesRequest, messages_of
from llmc.server.response_store import ResponseStore
from llmc.server.text_reader import Delta

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc",
             "function_call_output": "fco"}  # of item ids
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # types of content parts
_LOGPROBS: dict[str, Object] = {"message": {"logprobs": []}, "reasoning": {}}  # of text events


@dataclass(frozen=True)
class ResponseJob(GenerationJob):
    """A generation job with the items of its conversation, and the name of the client's API key."""

    items: Sequence[Item] = ()
    owner: str | None = None


async def read_response(store: ResponseStore, owner: str | None, model: Model,
                        body: ResponsesRequest) -> ResponseJob:
    """Build the generation job of a request.

    Args:
        store: where the previous response is.
        owner: name of the client's API key, if there are keys.
        model: the model.
        body: the request.

    Raises:
        LlmcError: the input is invalid, or the model has no chat template.
    """
    if body.n not in (None, 1):
        raise ApiError(f"n {body.n} is not supported for a response; leave it out", param="n",
                       code="unsupported_parameter")
    items = store.conversation(body, owner)
    first = [Message(role="system", content=body.instructions)] if body.instructions else []
    job = await read_conversation(model, body, [*first, *messages_of(items)],
                                  body.max_output_tokens)
    return ResponseJob(job.prompts, job.params, job.priority, with_rows=job.with_rows,
                       items=items, owner=owner)


class ResponseAnswer(Answer):
    """A response: items of reasoning, text and function calls, in the order of generation.

    Args:
        store: stores the response.
        model: the model.
        body: the request.
        job: its generation job.
    """

    def __init__(self, store: ResponseStore, model: Model, body: ResponsesRequest,
                 job: GenerationJob) -> None:
        super().__init__(model, job)
        self._store, self._body = store, body
        self._id = _new_id("resp")
        self._output: list[Object] = []
        self._is_open = False  # whether the last item is unfinished
        self._reason = "stop"
        self._parser = output_parser(model, body, job)
        self._numbers = itertools.count()

    async def json(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> bytes:
        async for pieces in batches:
            for piece in pieces:
                self._take(piece)
        self._end()
        answer = self._finished()
        return await self.build(lambda: self.encoded(answer))

    async def stream(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[bytes, None]:
        async with aclosing(batches):
            # The request may still fail before the first token.
            pieces: list[CompletionChunk] | None = await anext(batches)
            for kind in ("created", "in_progress"):
                yield self._event(kind, {"response": self._response("in_progress")})
            while pieces is not None:
                events = b"".join(itertools.chain.from_iterable(map(self._take, pieces)))
                if events:
                    yield events
                pieces = await anext(batches, None)
        yield b"".join(self._end())
        yield self._event(self._status, {"response": self._finished()})

    def _take(self, piece: CompletionChunk) -> list[bytes]:
        """Return the events of a chunk."""
        self.count(piece)
        self._reason = piece.finish_reason or self._reason
        return [event for delta in self.parsed(self._parser, piece) for event in self._emit(delta)]

    def _emit(self, delta: Delta) -> Iterator[bytes]:
        if "reasoning_content" in delta:
            yield from self._text("reasoning", delta["reasoning_content"])
        elif "content" in delta:
            yield from self._text("message", delta["content"])
        else:
            call, = delta["tool_calls"]
            function = call["function"]
            if "id" in call:
                yield from self._open({"type": "function_call", "call_id": call["id"],
                                       "name": function["name"], "arguments": ""})
            if function["arguments"]:
                self._output[-1]["arguments"] += function["arguments"]
                yield self._event("function_call_arguments.delta", {
                    **self._place(), "delta": function["arguments"]})

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._open_text(kind)
        self._output[-1]["content"][0]["text"] += text
        yield self._event(f"{_PARTS[kind]}.delta", {**self._place(0), "delta": text,
                                                    **_LOGPROBS[kind]})

    def _open_text(self, kind: str) -> Iterator[bytes]:
        part: Object = {"type": _PARTS[kind], "text": ""}
        if kind == "message":
            item: Object = {"type": kind, "role": "assistant", "content": []}
            part |= {"annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "summary": [], "content": []}
        yield from self._open(item)
        self._output[-1]["content"].append(part)
        yield self._event("content_part.added", {**self._place(0), "part": part})

    def _open(self, item: Object) -> Iterator[bytes]:
        """Yield the events that end the previous item and begin this one."""
        yield from self._close("completed")
        self._output.append({**item, "id": _new_id(_PREFIXES[item["type"]]),
                             "status": "in_progress"})
        self._is_open = True
        yield self._event("output_item.added", {"output_index": len(self._output) - 1,
                                                "item": self._output[-1]})

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._is_open:
            return
        item = self._output[-1]
        item["status"], self._is_open = status, False
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", {
                **self._place(), "name": item["name"], "arguments": item["arguments"]})
        else:
            part, kind = item["content"][0], item["type"]
            yield self._event(f"{_PARTS[kind]}.done", {**self._place(0), "text": part["text"],
                                                       **_LOGPROBS[kind]})
            yield self._event("content_part.done", {**self._place(0), "part": part})
        yield self._event("output_item.done", {"output_index": len(self._output) - 1,
                                               "item": item})

    def _end(self) -> list[bytes]:
        """Return the events that end the last item; an empty response gets an empty message."""
        opened = [] if self._output else [*self._open_text("message")]
        return [*opened, *self._close(self._status)]

    def _finished(self) -> Object:
        """Store the response and return it."""
        response = self._response(self._status)
        if self._body.store:
            assert isinstance(self.job, ResponseJob)
            inputs = [{"id": _new_id(_PREFIXES[item.type]), **item.model_dump(exclude_none=True)}
                      for item in self.job.items]
            self._store.put(response, inputs, self.job.owner)
        return response

    def _place(self, part: int | None = None) -> Object:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place if part is None else {**place, "content_index": part}

    def _event(self, kind: str, content: Object) -> bytes:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(self._numbers), **content}, kind)

    @property
    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _response(self, status: str) -> Object:
        body, usage = self._body, self.usage()
        choice = body.tool_choice
        return {
            "id": self._id, "object": "response", "created_at": self.created, "status": status,
            "error": None, "incomplete_details":
                {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata, "model": self.model_name, "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": body.store and self._store.enabled,
            "temperature": self.job.params.temperature, "top_p": self.job.params.top_p,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True,
                                                           exclude_defaults=True)
                     | {"type": body.text.format.type}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools], "truncation": "disabled",
            "usage": None if status == "in_progress" else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": usage["total_tokens"]}}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
