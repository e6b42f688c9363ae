"""The application: which path leads where, and what becomes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Send

from llmc import __version__
from llmc.errors import LlmcError
from llmc.server.answer import Answer, event
from llmc.server.chat import ChatAnswer, read_chat
from llmc.server.completions import CompletionAnswer, read_completion
from llmc.server.errors import ApiError, error_body
from llmc.server.model import Job, Model
from llmc.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)

_Result = TypeVar("_Result")
_Kind = TypeVar("_Kind", bound=Body)
_Generating = TypeVar("_Generating", bound=Generation)


class _Events(StreamingResponse):
    """Server-sent events, whose making ends with the connection."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


class Api:
    """OpenAI's interface, and what of vLLM's servers and their clients expect."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def app(self) -> Starlette:
        def post(path: str, endpoint: Callable[[Request], Coroutine[Any, Any, Response]]) -> Route:
            return Route(path, endpoint, methods=["POST"])

        return Starlette(
            routes=[
                post("/v1/chat/completions", self.chat), post("/v1/completions", self.completions),
                post("/tokenize", self.tokenize), post("/detokenize", self.detokenize),
                Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.named),
                Route("/health", self.health), Route("/version", self.version)],
            exception_handlers={HTTPException: self._refused, LlmcError: self._wrong,
                                ClientDisconnect: self._gone, Exception: self._failed})

    # What is asked.

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, read_chat, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, read_completion, CompletionAnswer)

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either prompt or messages")
        if body.messages is not None:
            tokens = await self._model.read_messages(
                body.messages, chat_template_kwargs=body.chat_template_kwargs)
        else:
            tokens, = await self._model.read_prompts([body.prompt or ""], body.add_special_tokens)
        texts = [self._model.token_text(token) for token in tokens] if body.return_token_strs \
            else None
        return JSONResponse({"count": len(tokens), "max_model_len": self._model.llm.max_model_len,
                             "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        return JSONResponse({"prompt": self._model.llm.detokenize(body.tokens)})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def named(self, request: Request) -> Response:
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._described())

    async def health(self, request: Request) -> Response:
        try:
            self._model.llm.check_health()
        except LlmcError as error:
            raise ApiError(str(error), 503) from None
        return Response()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    # How it is answered.

    async def _generate(self, request: Request, kind: type[_Generating],
                        read: Callable[[Model, _Generating], Coroutine[Any, Any, Job]],
                        answered: Callable[[Model, Generation, Job], Answer]) -> Response:
        body = await self._read(request, kind)
        job = await read(self._model, body)
        answer = answered(self._model, body, job)
        pieces = self._model.pieces(job)
        if not body.stream:
            return JSONResponse(await _unless_gone(request, answer.whole(pieces)))
        events = answer.stream(pieces)
        # What is wrong with a request shows until its first token; then the status is still open.
        first = await _unless_gone(request, anext(events))
        return _Events(self._rest(first, events))

    async def _rest(self, first: bytes, events: AsyncGenerator[bytes, None]) -> \
            AsyncGenerator[bytes, None]:
        """All events; the last says what went wrong, if something did."""
        async with aclosing(events):
            try:
                yield first
                async for own in events:
                    yield own
            except LlmcError as error:
                status, message = self._told(error)
                yield event(error_body(status, message))

    async def _read(self, request: Request, kind: type[_Kind]) -> _Kind:
        body = kind.read(await request.body())
        self._model.check_name(body.model)
        return body

    def _described(self) -> dict[str, Any]:
        model = self._model
        return {"id": model.name, "object": "model", "created": model.created, "owned_by": "llmc",
                "root": model.name, "parent": None, "max_model_len": model.llm.max_model_len}

    # What went wrong.

    def _told(self, error: LlmcError) -> tuple[int, str]:
        """The status of an error, and its message without a path of this machine."""
        status = error.status if isinstance(error, ApiError) else 400
        if status == 400:
            try:
                self._model.llm.check_health()
            except LlmcError:
                status = 503
        case_dir, message = self._model.llm.case_dir, str(error)
        for path in (str(case_dir.absolute()), str(case_dir)):
            message = message.replace(path, self._model.name)
        return status, message

    async def _wrong(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, LlmcError)
        status, message = self._told(error)
        own = error if isinstance(error, ApiError) else ApiError("")
        return JSONResponse(error_body(status, message, own.param, own.code), status,
                            headers=own.headers)

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: f"there is no {request.url.path} here",
                   405: f"{request.url.path} does not take {request.method}"}.get(
                       error.status_code, error.detail)
        return JSONResponse(error_body(error.status_code, message), error.status_code,
                            headers=error.headers)

    async def _gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # which nobody reads

    async def _failed(self, request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "the server failed; its log says why"), 500)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """What the work comes to; it is cancelled where the client goes.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for own in (task, gone):
            own.cancel()
            with suppress(BaseException):
                await own


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
