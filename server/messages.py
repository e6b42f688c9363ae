"""/v1/messages: the Anthropic API, for text, images and tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.sampling.params import SamplingParams
from llmc.server.answer import Answer, Object, event
from llmc.server.chat import read_conversation, read_prompt
from llmc.server.errors import ApiError
from llmc.server.model import GenerationJob, Model
from llmc.server.output_parser import output_parser
from llmc.server.protocol import (
    Conversation,
    Fields,
    Function,
    Message,
    Tool,
    ToolUse,
    chosen_tools,
)
from llmc.server.text_reader import Delta

_MODES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class ImageSource(Fields):
    """Where the bytes of an image are."""

    model_config = ConfigDict(extra="allow")

    type: str = ""
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(Fields):
    """A block of a message's content; its attributes depend on `type`."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    # Of a tool call and of its result.
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class InputMessage(Fields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) \
            else self.content


class InputTool(Fields):
    """A tool that the client runs."""

    type: str = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class ToolChoice(Fields):
    """The mode of tool calls, and the tool that must be called."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model reasons, if its chat template has `enable_thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountTokensRequest(Conversation):
    """The body of /v1/messages/count_tokens."""

    REFUSED: ClassVar[Any] = {
        "container": ((None,), "no state is stored; give the conversation as messages"),
        "mcp_servers": ((None, []), "give tools"),
    }

    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[InputTool] = Field(default_factory=list)
    tool_choice: ToolChoice = Field(default_factory=ToolChoice)
    thinking: Thinking | None = None

    @property
    def conversation(self) -> list[Message]:
        """The messages in the format of the OpenAI API.

        Raises:
            ApiError: a block lacks a required field, or the last message is the assistant's.
        """
        if self.messages[-1].role == "assistant":
            raise ApiError("the last message is the assistant's, and answers cannot be continued; "
                           "end with a user's message", param="messages")
        system = [Block(type="text", text=self.system)] if isinstance(self.system, str) \
            else self.system or []
        first = [{"role": "system", "content": _parts(system)}] if system else []
        return [Message.model_validate(converted) for converted in [
            *first, *(converted for message in self.messages for converted in _messages(message))]]

    @property
    def tool_use(self) -> ToolUse:
        for tool in self.tools:
            if tool.type != "custom":
                raise ApiError(f"tools of type '{tool.type}' are not supported; give a tool with "
                               f"an input_schema", param="tools", code="unsupported_parameter")
        tools = [Tool(type="function", function=Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema))
            for tool in self.tools]
        choice = self.tool_choice
        names = [choice.name or ""] if choice.type == "tool" else None
        return chosen_tools(tools, _MODES[choice.type], names,
                            not choice.disable_parallel_tool_use)

    @property
    def template_variables(self) -> Mapping[str, Any] | None:
        if self.thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.thinking.type != "disabled",
                **(self.chat_template_kwargs or {})}


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None

    def sampling(self, max_tokens: int, logprobs: int | None,
                 defaults: Mapping[str, Any] = MappingProxyType({}),
                 prompt_logprobs: int | None = None) -> SamplingParams:
        if self.stop_sequences is None:
            return super().sampling(max_tokens, logprobs, defaults, prompt_logprobs)
        given = self.model_copy(update={"stop": self.stop_sequences, "stop_sequences": None})
        return given.sampling(max_tokens, logprobs, defaults, prompt_logprobs)


def _messages(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Convert a message to OpenAI's messages; tool results become separate messages before it."""
    converted: dict[str, Any] = {"role": message.role}
    others: list[Block] = []
    for block in message.blocks:
        if block.type == "tool_result":
            content = block.content or ""
            yield {"role": "tool", "tool_call_id": block.tool_use_id,
                   "content": content if isinstance(content, str) else _parts(content)}
        elif block.type == "tool_use":
            if not block.name:
                raise ApiError("a block of type 'tool_use' has no name; add it", param="messages")
            converted.setdefault("tool_calls", []).append({"id": block.id, "function": {
                "name": block.name, "arguments": json.dumps(block.input or {})}})
        elif block.type == "thinking":
            converted["reasoning_content"] = \
                converted.get("reasoning_content", "") + (block.thinking or "")
        elif block.type != "redacted_thinking":
            others.append(block)
    if others:
        converted["content"] = _parts(others)
    if len(converted) > 1:
        yield converted


def _parts(blocks: list[Block]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": _image_url(block)}}
            if block.type == "image" else {"type": block.type, "text": block.text}
            for block in blocks]


def _image_url(block: Block) -> str:
    """Return the URL of an image's source.

    Raises:
        ApiError: the source is of another type, or incomplete.
    """
    source = block.source or ImageSource()
    if source.type == "base64" and source.data and source.media_type:
        return f"data:{source.media_type};base64,{source.data}"
    if source.type == "url" and source.url:
        return source.url
    raise ApiError("the source of an image is neither base64 with media_type and data, nor a url; "
                   "give one of them", param="messages")


async def read_message(model: Model, body: MessagesRequest) -> GenerationJob:
    """Build the generation job of a request.

    Raises:
        LlmcError: the messages are invalid, or the model has no chat template.
    """
    if body.n not in (None, 1):
        raise ApiError(f"n {body.n} is not supported for a message; leave it out", param="n",
                       code="unsupported_parameter")
    return await read_conversation(model, body, body.conversation, body.max_tokens)


async def count_tokens(model: Model, body: CountTokensRequest) -> int:
    """Count the tokens of a request's prompt.

    Raises:
        LlmcError: the messages are invalid, or the model has no chat template.
    """
    return len(await read_prompt(model, body, body.conversation))


class MessageAnswer(Answer):
    """A message: blocks of thinking, text and tool calls, in the order of generation."""

    def __init__(self, model: Model, body: MessagesRequest, job: GenerationJob) -> None:
        super().__init__(model, job)
        self._body = body
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[Object] = []
        self._is_open = False  # whether the last block is unfinished
        self._reason: str | None = None
        self._tokens: list[int] = []
        self._parser = output_parser(model, body, job)

    async def json(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> bytes:
        async for pieces in batches:
            for piece in pieces:
                self._take(piece)
        self._end()
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _parsed(block["input"])
        answer = {**self._message(self._blocks), **self._stopped(), "usage": self._usage()}
        return await self.build(lambda: self.encoded(answer))

    async def stream(self, batches: AsyncGenerator[list[CompletionChunk], None]) -> \
            AsyncGenerator[bytes, None]:
        async with aclosing(batches):
            # The request may still fail before the first token.
            pieces: list[CompletionChunk] | None = await anext(batches)
            first = [event for piece in pieces or () for event in self._take(piece)]
            yield _event("message_start", {"message": {
                **self._message([]), "stop_reason": None, "stop_sequence": None,
                "usage": {**self._usage(), "output_tokens": 0}}}) + b"".join(first)
            while (pieces := await anext(batches, None)) is not None:
                events = b"".join(event for piece in pieces for event in self._take(piece))
                if events:
                    yield events
        yield b"".join(self._end())
        yield _event("message_delta", {"delta": self._stopped(), "usage": self._usage()})
        yield _event("message_stop", {})

    def _take(self, piece: CompletionChunk) -> list[bytes]:
        """Return the events of a chunk."""
        self.count(piece)
        if piece.token_id is not None:
            self._tokens.append(piece.token_id)
        self._reason = piece.finish_reason or self._reason
        return [event for delta in self.parsed(self._parser, piece) for event in self._emit(delta)]

    def _emit(self, delta: Delta) -> Iterator[bytes]:
        if "tool_calls" in delta:
            call, = delta["tool_calls"]
            function = call["function"]
            if "id" in call:
                yield from self._open({"type": "tool_use", "id": call["id"],
                                       "name": function["name"], "input": ""})
            if function["arguments"]:
                self._blocks[-1]["input"] += function["arguments"]
                yield self._delta({"type": "input_json_delta",
                                   "partial_json": function["arguments"]})
            return
        kind = "thinking" if "reasoning_content" in delta else "text"
        text = delta["reasoning_content" if kind == "thinking" else "content"]
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        name, key = _DELTAS[kind]
        yield self._delta({"type": name, key: text})

    def _open(self, block: Object) -> Iterator[bytes]:
        """Yield the events that end the previous block and begin this one."""
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        shown = {**block, "input": {}} if block["type"] == "tool_use" else block
        yield _event("content_block_start", {"index": len(self._blocks) - 1,
                                             "content_block": shown})

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield _event("content_block_stop", {"index": len(self._blocks) - 1})

    def _end(self) -> list[bytes]:
        """Return the events that end the last block."""
        return [*self._close()]

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _message(self, content: list[Object]) -> Object:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.model_name,
                "content": content}

    def _stopped(self) -> Object:
        """Return the stop reason."""
        stop = self._stop_sequence() if self._reason == "stop" else None
        reason = "max_tokens" if self._reason != "stop" else "tool_use" if self._parser.calls \
            else "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _stop_sequence(self) -> str | None:
        """Return the stop sequence that ended the message, if any."""
        if not self._body.stop_sequences:
            return None
        text = self.model.llm.detokenize(
            self._tokens, skip_special_tokens=not self.job.params.show_special_tokens)
        found = [(place, stop) for stop in self._body.stop_sequences
                 if (place := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _usage(self) -> Object:
        cached = self.cached_tokens
        return {"input_tokens": self.job.prompt_tokens - cached, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached, "output_tokens": self.completion_tokens}


def _event(kind: str, content: Object) -> bytes:
    return event({"type": kind, **content}, kind)


def _parsed(arguments: str) -> Object:
    """Parse a call's arguments; empty if the call is incomplete."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
