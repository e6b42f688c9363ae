"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmc.runtime.core.request import CompletionChunk
from llmc.runtime.prompts import MediaPrompt
from llmc.server.answer import Choices, Object, finite
from llmc.server.errors import ApiError
from llmc.server.model import GenerationJob, Model
from llmc.server.output_parser import OutputParser, output_parser, with_marks
from llmc.server.prompt_logprobs import by_token_id, check_values
from llmc.server.protocol import ChatRequest, Conversation, Message
from llmc.server.tool_parsers import merged


async def read_chat(model: Model, body: ChatRequest) -> GenerationJob:
    """Build the generation job of a request.

    Raises:
        LlmcError: the messages are invalid, or the model has no chat template.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs is not supported with stream; leave out one of them",
                       param="prompt_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs requires logprobs; set logprobs to true",
                       param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None \
        else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    job = await read_conversation(model, body, body.messages, max_tokens, logprobs,
                                  body.prompt_logprobs)
    return replace(job, params=await model.predicted(job.params, body.prediction))


async def read_conversation(model: Model, body: Conversation, messages: Sequence[Message],
                            max_tokens: int | None, logprobs: int | None = None,
                            prompt_logprobs: int | None = None) -> GenerationJob:
    """Build the generation job that continues a conversation.

    Args:
        max_tokens: of the answer. None: up to the maximum length.

    Raises:
        LlmcError: the messages or the tools are invalid, or the model has no chat template.
    """
    prompt = await read_prompt(model, body, messages)
    ids = prompt.token_ids if isinstance(prompt, MediaPrompt) else prompt
    if max_tokens is None:  # the answer ends at EOS
        max_tokens = max(model.llm.max_model_len - len(ids), 1)
    check_values([ids], prompt_logprobs)
    params = with_marks(model, body, body.sampling(max_tokens, logprobs, model.sampling_defaults,
                                                   prompt_logprobs))
    return GenerationJob([ids], params, body.priority,
                         with_rows=[prompt] if isinstance(prompt, MediaPrompt) else ())


async def read_prompt(model: Model, body: Conversation, messages: Sequence[Message]) -> \
        list[int] | MediaPrompt:
    """Render a conversation, with the tools, and tokenize it.

    Raises:
        LlmcError: the messages or the tools are invalid, or the model has no chat template.
    """
    use = body.tool_use
    if use.tools and not use.is_forced:
        _check_callable(model)
    tools = [tool.model_dump(exclude_none=True) for tool in use.tools]
    return await model.read_messages(messages, tools or None, body.template_variables,
                                     body.PROMPT)


def _check_callable(model: Model) -> None:
    """Raise ApiError if the model cannot call tools without a forced call."""
    if model.tool_call_parser is None:
        raise ApiError("the format of this model's tool calls is unknown; force a call with "
                       "tool_choice, or start the server with --tool_call_parser",
                       param="tools")
    if not model.shows_tools:
        raise ApiError("this model's chat template does not render tools; force a call with "
                       "tool_choice, or compile the model with a chat template that renders tools",
                       param="tools")


class ChatAnswer(Choices):
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: Model, body: ChatRequest, job: GenerationJob) -> None:
        super().__init__(model, body, job)
        self._body = body
        self._parsers: dict[int, OutputParser] = {}  # of the choices with a first delta

    def extra(self, pieces: list[CompletionChunk]) -> Object:
        found = pieces[0].prompt_logprobs
        if found is None:
            return {}
        return {"prompt_logprobs": by_token_id(self.model, self.job.prompts[0], found)}

    def choice(self, index: int, pieces: list[CompletionChunk]) -> Object:
        parser = output_parser(self.model, self._body, self.job)
        content, calls, reasoning = merged(
            delta for piece in pieces for delta in self.parsed(parser, piece))
        reason = pieces[-1].finish_reason
        message: Object = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            reason = _called(reason)
        return {"index": index, "message": message, "logprobs": self._logprobs(pieces),
                "finish_reason": reason, "stop_reason": self.job.stop_reason(pieces[-1])}

    def deltas(self, index: int, piece: CompletionChunk) -> Iterator[Object]:
        if index not in self._parsers:
            self._parsers[index] = output_parser(self.model, self._body, self.job)
            yield _delta(index, {"role": "assistant", "content": ""})
        parser, reason = self._parsers[index], piece.finish_reason
        parsed: list[Object] = [*self.parsed(parser, piece)]
        reason = _called(reason) if parser.calls else reason
        logprobs = self._logprobs([piece])
        if not parsed and (reason or logprobs):
            parsed = [{}]
        for place, delta in enumerate(parsed):
            last = place == len(parsed) - 1
            chunk = _delta(index, delta, logprobs if last else None, reason if last else None)
            if last and reason:
                chunk["stop_reason"] = self.job.stop_reason(piece)
            yield chunk

    def _logprobs(self, pieces: Sequence[CompletionChunk]) -> Object | None:
        if not pieces[-1].logprobs:
            return None
        return {"content": [{**self._token(piece.token_id, piece.logprobs.chosen),
                             "top_logprobs": [self._token(*pair) for pair in piece.logprobs.top]}
                            for piece in pieces if piece.logprobs and piece.token_id is not None]}

    def _token(self, token_id: int, logprob: float) -> Object:
        return {"token": self.model.token_text(token_id), "logprob": finite(logprob),
                "bytes": list(self.model.token_bytes(token_id))}


def _delta(index: int, delta: Object, logprobs: Object | None = None,
           finish_reason: str | None = None) -> Object:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _called(reason: str | None) -> str | None:
    """Return the finish reason of an answer with tool calls."""
    return "tool_calls" if reason == "stop" else reason
