"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmc.runtime.decoding.params import GUIDES, SamplingParams
from llmc.runtime.request import Piece
from llmc.server.answer import Choices, Object
from llmc.server.errors import ApiError
from llmc.server.harmony import Harmony
from llmc.server.model import Job, Model
from llmc.server.protocol import ChatRequest
from llmc.server.tools import Arguments, Hermes, Plain, ToolText, merged


async def read_chat(model: Model, body: ChatRequest) -> Job:
    """What is to be generated.

    Raises:
        LlmcError: the messages are not sound, or the model does not chat.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    if tools and not body.forces_a_call and model.tool_call_parser is None:
        raise ApiError("llmc does not know how this model's chat template calls tools; force a "
                       "call by tool_choice, or start the server with --tool_call_parser",
                       param="tools")
    prompt = await model.read_messages(body.messages, tools or None, body.chat_template_kwargs)
    max_tokens = body.max_tokens if body.max_completion_tokens is None \
        else body.max_completion_tokens
    if max_tokens is None:  # an answer ends by itself
        max_tokens = max(model.llm.max_model_len - len(prompt), 1)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = with_channels(model, body.sampling(max_tokens, logprobs, model.sampling_defaults))
    return Job([prompt], params, body.priority)


def with_channels(model: Model, params: SamplingParams) -> SamplingParams:
    """Parameters that show the marks of Harmony's channels, where an answer has them."""
    return replace(params, show_special_tokens=True) if has_channels(model, params) else params


def has_channels(model: Model, params: SamplingParams) -> bool:
    """Whether an answer is in Harmony's channels, which no guide knows."""
    return model.tool_call_parser == "harmony" and not any(getattr(params, own) for own in GUIDES)


class ChatAnswer(Choices):
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: Model, body: ChatRequest, job: Job) -> None:
        super().__init__(model, body, job)
        self._body = body
        self._begun: dict[int, ToolText | None] = {}  # choices, and what finds calls in them

    def choice(self, index: int, pieces: list[Piece]) -> Object:
        text, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
        message: Object = {"role": "assistant", "content": text}
        tools = self._tools()
        if tools is not None:
            content, calls, reasoning = merged([*tools.push(text), *tools.finish()])
            message["content"] = content or (None if calls else "")
            if reasoning:
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = calls
                reason = _called(reason)
        return {"index": index, "message": message, "logprobs": self._logprobs(pieces),
                "finish_reason": reason, "stop_reason": self.job.stop_reason(pieces[-1])}

    def deltas(self, index: int, piece: Piece) -> Iterator[Object]:
        if index not in self._begun:
            self._begun[index] = self._tools()
            yield _delta(index, {"role": "assistant", "content": ""})
        tools, reason = self._begun[index], piece.finish_reason
        told: list[Object] = [{"content": piece.text}] if piece.text else []
        if tools is not None:
            told = [*tools.push(piece.text), *(tools.finish() if reason else ())]
            reason = _called(reason) if tools.calls else reason
        logprobs = self._logprobs([piece])
        if not told and (reason or logprobs):
            told = [{}]
        for place, delta in enumerate(told):
            last = place == len(told) - 1
            chunk = _delta(index, delta, logprobs if last else None, reason if last else None)
            if last and reason:
                chunk["stop_reason"] = self.job.stop_reason(piece)
            yield chunk

    def _tools(self) -> ToolText | None:
        """What finds calls and reasoning in a choice's text; None where there are none."""
        names = [tool.function.name for tool in self._body.offered]
        if has_channels(self.model, self.job.params):
            return Harmony(names)
        if not names:
            return None
        if self._body.tool_choice == "required":
            return Plain(names)
        if self._body.forces_a_call:
            return Arguments(names)
        return Plain(names) if self.model.tool_call_parser == "llama3_json" else Hermes(names)

    def _logprobs(self, pieces: Sequence[Piece]) -> Object | None:
        if not pieces[-1].logprobs:
            return None
        return {"content": [{**self._token(piece.token_id, piece.logprobs.chosen),
                             "top_logprobs": [self._token(*own) for own in piece.logprobs.top]}
                            for piece in pieces if piece.logprobs]}

    def _token(self, token_id: int, logprob: float) -> Object:
        text = self.model.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _delta(index: int, delta: Object, logprobs: Object | None = None,
           finish_reason: str | None = None) -> Object:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _called(reason: str | None) -> str | None:
    """Why an answer with calls ended."""
    return "tool_calls" if reason == "stop" else reason
