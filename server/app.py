"""The Starlette application: routes, request handling and error responses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmc import __version__
from llmc.errors import LlmcError, shortened
from llmc.runtime.core.adapters import base_of
from llmc.runtime.core.transcription import Transcription
from llmc.runtime.prompts import MediaPrompt
from llmc.runtime.sampling.sampler import NonFiniteLogits
from llmc.server.access import Access, Authenticated, Guarded
from llmc.server.answer import Answer, error_event
from llmc.server.chat import ChatAnswer, read_chat
from llmc.server.completions import CompletionAnswer, read_completion
from llmc.server.errors import ApiError, context_error, error_body, prompt_too_long
from llmc.server.limits import (
    OPEN,
    AdmissionGate,
    LargeBodies,
    ReleasesBodies,
    ServerLimits,
)
from llmc.server.log import ENDING, LOGGER, Logged, note
from llmc.server.messages import (
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    count_tokens,
    read_message,
)
from llmc.server.metrics import Metrics
from llmc.server.model import GenerationJob, Model
from llmc.server.offload import MAX_TOKENS
from llmc.server.openapi import (
    DOWN,
    ITEM_ORDERS,
    LORA_UPDATES,
    MAX_ITEMS,
    OPERATIONS,
    TOKENIZER_INFO,
    description,
)
from llmc.server.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    read_inputs,
)
from llmc.server.pooling import answer as pooled_answer
from llmc.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    LoadAdapterRequest,
    ResponsesRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from llmc.server.response_store import ResponseStore
from llmc.server.responses import ResponseAnswer, read_response
from llmc.server.transcription import (
    MEDIA_TYPES,
    SpeechRequest,
    TranscriptionRequest,
    TranslationRequest,
    read_form,
    transcribe,
)
from llmc.server.transcription import answer as speech_answer
from llmc.server.transcription import events as speech_events
from llmc.server.transcription import whole as whole_speech

# Ollama's endpoints, and their replacements.
_OLLAMA = {"/api/chat": "/v1/chat/completions", "/api/generate": "/v1/completions",
           "/api/tags": "/v1/models", "/api/embed": "/v1/embeddings"}
_FAILED = "internal server error; the server's log has the details"
_PAGE = Path(__file__).with_name("page.html")
# The page loads no resources and connects only to this server. The hashes allow its inline script
# and style. Trusted types forbid HTML from strings.
_PAGE_POLICY = ("default-src 'none'; connect-src 'self'; script-src {script}; style-src {style}; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                "require-trusted-types-for 'script'; trusted-types 'none'")
_Result = TypeVar("_Result")
_Kind = TypeVar("_Kind", bound=Body)
_Generating = TypeVar("_Generating", bound=Generation)
_Pooling = TypeVar("_Pooling", bound=PoolingBody)
_Begin = Callable[[ExitStack], Awaitable[Response | AsyncGenerator[bytes, None]]]


class _Events(StreamingResponse):
    """Server-sent events; the generation ends with the connection.

    Args:
        first: the first event.
        others: the other events.
        deadline: time of the event loop's clock.
        on_error: returns the last event of a stream that failed.
        done: called at the end in any case.
    """

    def __init__(self, first: bytes, others: AsyncGenerator[bytes, None], deadline: float,
                 on_error: Callable[[Exception], bytes], done: Callable[[], None]) -> None:
        super().__init__(self._all(), media_type="text/event-stream",
                         headers={"cache-control": "no-cache"})
        self._first, self._others, self._deadline = first, others, deadline
        self._on_error, self._done = on_error, done
        self._begun = False

    async def _all(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        try:
            async for event in self._others:
                yield event
        except Exception as error:  # the status has been sent, so the stream has the error
            yield self._on_error(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # shutdown, after drain_timeout
            if not self._begun:
                raise
            await self._end(send, ApiError(ENDING, 503))
        finally:
            await self._others.aclose()
            self._done()

    async def stream_response(self, send: Send) -> None:
        self._begun = True
        try:
            async with asyncio.timeout_at(self._deadline):
                await super().stream_response(send)
        except TimeoutError as error:
            await self._others.aclose()
            await self._end(send, error)

    async def _end(self, send: Send, error: Exception) -> None:
        """Send an error as the last event, unless the client does not read for a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await send({"type": "http.response.body", "body": self._on_error(error)})


class Api:
    """Handlers of the OpenAI API, and of further endpoints of vLLM and Anthropic.

    Args:
        models: served models of different names.
        access: None: accept any Host, and no other origin.
        responses: store of /v1/responses. None: store nothing.
        tokenizer_info: serve /tokenizer_info.
        lora_updates: serve /v1/load_lora_adapter and /v1/unload_lora_adapter.

    Attributes:
        served: models of new requests by name.
    """

    def __init__(self, models: Sequence[Model], limits: ServerLimits, access: Access | None = None,
                 responses: ResponseStore | None = None, tokenizer_info: bool = False,
                 lora_updates: bool = False) -> None:
        self.served, self._limits = {model.name: model for model in models}, limits
        self._operations = (*OPERATIONS, *((TOKENIZER_INFO,) if tokenizer_info else ()),
                            *(LORA_UPDATES if lora_updates else ()))
        self._access = access or Access()
        self._large_bodies = LargeBodies()
        self._responses = responses or ResponseStore(0, 1)
        self._lora_updates = asyncio.Lock()
        self._gates = {model.name: AdmissionGate.of(limits, model.llm.max_num_seqs)
                       for model in models}
        self._metrics = Metrics({
            name: (partial(self._runtime_metrics, name), gate)
            for name, gate in self._gates.items()})

    def _runtime_metrics(self, name: str) -> Mapping[str, Any]:
        return self.served[name].llm.metrics()

    async def swap(self, model: Model) -> None:
        """Replace the model of this name for new requests.

        The old one is closed after its last request.
        """
        before, self.served[model.name] = self.served[model.name], model
        while before.requests:
            await asyncio.sleep(0.1)
        await before.llm.close()

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route(operation.path.replace("{name}", "{name:path}"),
                          getattr(self, operation.endpoint), methods=[operation.method])
                    for operation in self._operations],
            middleware=[Middleware(Logged), Middleware(ReleasesBodies, large=self._large_bodies),
                        Middleware(Guarded, access=self._access),
                        *self._access.cors, Middleware(Authenticated, limits=self._limits)],
            exception_handlers={HTTPException: self._http_error, LlmcError: self._llmc_error,
                                ClientDisconnect: self._client_disconnect,
                                Exception: self._internal_error})

    # Endpoints.

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, read_chat, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, read_completion, CompletionAnswer,
                                    "prompt")

    async def responses(self, request: Request) -> Response:
        return await self._generate(
            request, ResponsesRequest, partial(read_response, self._responses, _api_key(request)),
            partial(ResponseAnswer, self._responses), "input")

    async def stored_response(self, request: Request) -> Response:
        return Response(self._responses.response(request.path_params["name"],
                                                 _api_key(request)), media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        query = request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_ITEMS:
            raise ApiError(f"limit is '{shortened(limit)}'; give 1 to {MAX_ITEMS}", param="limit")
        if order not in ITEM_ORDERS:
            raise ApiError(f"order is '{shortened(order)}'; give one of "
                           f"{', '.join(ITEM_ORDERS)}", param="order")
        return JSONResponse(self._responses.input_items(
            request.path_params["name"], int(limit), order == "desc", query.get("after"),
            _api_key(request)))

    async def delete_response(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._responses.delete(name, _api_key(request))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, MessagesRequest, read_message, MessageAnswer)

    async def count_tokens(self, request: Request) -> Response:
        model, body = await self._read(request, CountTokensRequest)
        return JSONResponse({"input_tokens": await count_tokens(model, body)})

    async def embeddings(self, request: Request) -> Response:
        return await self._pool(request, EmbeddingRequest)

    async def rerank(self, request: Request) -> Response:
        return await self._pool(request, RerankRequest)

    async def score(self, request: Request) -> Response:
        return await self._pool(request, ScoreRequest)

    async def classify(self, request: Request) -> Response:
        return await self._pool(request, ClassifyRequest)

    async def pooling(self, request: Request) -> Response:
        return await self._pool(request, PoolingRequest)

    async def transcriptions(self, request: Request) -> Response:
        return await self._speak(request, TranscriptionRequest)

    async def translations(self, request: Request) -> Response:
        return await self._speak(request, TranslationRequest)

    async def tokenize(self, request: Request) -> Response:
        model, body = await self._read(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("expected either prompt or messages; give one of them")
        if body.messages is not None:
            read = await model.read_messages(
                body.messages, chat_template_kwargs=body.chat_template_kwargs)
            tokens = read.token_ids if isinstance(read, MediaPrompt) else read
        else:
            count, tokens = await model.offload.tokenize(
                body.prompt or "", body.add_special_tokens, MAX_TOKENS)
            if count > len(tokens):
                raise ApiError(f"the prompt has at least {count} tokens, expected at most "
                               f"{MAX_TOKENS} for /tokenize; send it in parts", param="prompt")
        texts = await asyncio.to_thread(lambda: [*map(model.token_text, tokens)]) \
            if body.return_token_strs else None
        return JSONResponse({"count": len(tokens), "max_model_len": model.llm.max_model_len,
                             "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        model, body = await self._read(request, DetokenizeRequest)
        text = await asyncio.to_thread(model.llm.detokenize, body.tokens)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        model = self._model_of(request, request.query_params.get("model"))
        return JSONResponse(await asyncio.to_thread(model.tokenizer_info))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [
            _described(model, name) for model in self.served.values()
            for name in (None, *model.llm.adapters)]})

    async def named(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:  # /v1/models/
            return await self.models(request)
        model = self._model_of(request, name)
        return JSONResponse(_described(model, model.adapter_of(name)))

    async def load_lora_adapter(self, request: Request) -> Response:
        body = await self._read_body(request, LoadAdapterRequest)
        name, wrong = body.lora_name, f"lora_name '{shortened(body.lora_name)}' is"
        async with self._lora_updates:  # a name is that of one adapter, whatever its model
            model = await self._base_of(request, body)
            owner = self._owner(name)
            if name in self.served:
                raise ApiError(f"{wrong} the name of the model; give another", param="lora_name")
            if owner is not None and owner is not model:
                raise ApiError(f"{wrong} the name of an adapter of '{owner.name}'; give another",
                               param="lora_name")
            await asyncio.to_thread(model.llm.load_adapter, name, body.lora_path)
        LOGGER.info("loaded an adapter", extra={"fields": {
            "adapter": name, "model": model.name}})
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        body = await self._read_body(request, UnloadAdapterRequest)
        name, model = body.lora_name, self._owner(body.lora_name)
        if model is None or body.model not in (None, model.name):
            raise ApiError(f"there is no adapter '{shortened(name)}'", 404, param="lora_name")
        request.scope["llmc.model"] = model
        await asyncio.to_thread(model.llm.unload_adapter, name)
        LOGGER.info("unloaded an adapter", extra={"fields": {
            "adapter": name, "model": model.name}})
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _owner(self, adapter: str) -> Model | None:
        """Return the model that an adapter is loaded for."""
        return next((own for own in self.served.values() if adapter in own.llm.adapters), None)

    async def _base_of(self, request: Request, body: LoadAdapterRequest) -> Model:
        """Return the model that the request names, or that its adapter was compiled for."""
        if body.model is not None or len(self.served) == 1:
            return self._model_of(request, body.model)
        bases = {name: model.llm.adapter_base for name, model in self.served.items()
                 if model.llm.adapter_base}
        found = await asyncio.to_thread(base_of, body.lora_name, body.lora_path, bases)
        return self._model_of(request, found)

    async def health(self, request: Request) -> Response:
        try:
            for model in self.served.values():
                model.llm.check_health()
        except LlmcError:
            raise ApiError(DOWN, 503) from None
        stalled = max(model.llm.stalled_seconds() for model in self.served.values())
        if stalled > self._limits.stall_timeout:
            raise ApiError(f"no step has completed for {stalled:.0f} s while requests are pending",
                           503, code="stalled")
        return Response()

    ping = post_ping = health  # SageMaker's path, as in vLLM

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": sum(gate.inside for gate in self._gates.values())})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(),
                        media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description(self._operations, OPEN))

    async def page(self, request: Request) -> Response:
        text, policy = _page()
        return HTMLResponse(text, headers={
            "content-security-policy": policy, "x-content-type-options": "nosniff"})

    # Answers.

    async def _generate(self, request: Request, kind: type[_Generating],
                        read: Callable[[Model, _Generating], Coroutine[Any, Any, GenerationJob]],
                        answered: Callable[[Model, _Generating, GenerationJob], Answer],
                        param: str = "messages") -> Response:
        """Answer a generation request whose prompt is the field `param`."""
        model, body = await self._read(request, kind)
        model.check_generates()
        self._limits.check_priority(body.priority)
        key = _api_key(request)

        async def begin(stack: ExitStack) -> Response | AsyncGenerator[bytes, None]:
            # The client may disconnect while images are fetched.
            job = replace(await _unless_disconnected(request, read(model, body)),
                          adapter=model.adapter_of(body.model))
            if model.media is not None:
                stack.enter_context(model.media.holding(
                    [own for own in job.with_rows if isinstance(own, MediaPrompt)]))
            _check_length(model, job, param)
            answer = answered(model, body, job)
            stack.callback(lambda: note(
                request.scope, prompt_tokens=job.prompt_tokens,
                cached_tokens=answer.cached_tokens, completion_tokens=answer.completion_tokens))
            pieces = self._metrics.measured(model.name, job, model.pieces(
                job, key, self._limits.cache_salt(key, body.cache_salt)))
            if body.stream:
                return answer.stream(pieces)
            return Response(await _unless_disconnected(request, answer.json(pieces)),
                            media_type="application/json")

        return await self._admit(request, model, body.num_sequences, begin)

    async def _pool(self, request: Request, kind: type[_Pooling]) -> Response:
        """Answer a request to an embedding model or classifier."""
        model, body = await self._read(request, kind)
        self._limits.check_priority(body.priority)
        key, started = _api_key(request), time.monotonic()

        async def begin(stack: ExitStack) -> Response:
            inputs = await read_inputs(model, body)
            lengths = [len(own.token_ids) for own in inputs]
            note(request.scope, prompt_tokens=sum(lengths))
            content = await _unless_disconnected(request, pooled_answer(model, body, inputs, key))
            self._metrics.pooled(model.name, lengths, time.monotonic() - started)
            return Response(content, media_type="application/json")

        return await self._admit(request, model, body.num_sequences, begin)

    async def _speak(self, request: Request, kind: type[SpeechRequest]) -> Response:
        """Answer a request with speech."""
        raw = await self._receive(request, "multipart/form-data", with_media=True)
        form, file = read_form(raw, request.headers.get("content-type", ""))
        body = kind.read(form)
        if body.ignored:
            note(request.scope, ignored=body.ignored)
        model = self._model_of(request, body.model)
        key, started = _api_key(request), time.monotonic()

        def finished(result: Transcription) -> None:
            note(request.scope, prompt_tokens=result.prompt_tokens,
                 completion_tokens=result.completion_tokens)
            self._metrics.pooled(model.name, [result.prompt_tokens], time.monotonic() - started)

        async def begin(stack: ExitStack) -> Response | AsyncGenerator[bytes, None]:
            chunks = transcribe(model, body, file, key)
            if body.stream:
                return speech_events(chunks, finished)
            result = await _unless_disconnected(request, whole_speech(chunks))
            finished(result)
            return Response(speech_answer(body, result),
                            media_type=MEDIA_TYPES[body.response_format])

        return await self._admit(request, model, 1, begin)

    async def _admit(self, request: Request, model: Model, num_sequences: int, begin: _Begin) -> \
            Response:
        """Answer a request to a model within the server's limits.

        Args:
            request: the request.
            model: the model, which is not closed before the answer ends.
            num_sequences: number of sequences, counted by the admission gate.
            begin: returns the answer, or the events of a stream. Its argument is closed after the
                last event.

        Raises:
            ApiError: there are too many requests, or it took too long before the first event.
            ClientDisconnect: the client has disconnected.
        """
        deadline = asyncio.get_running_loop().time() + self._limits.request_timeout
        with ExitStack() as stack:
            stack.enter_context(self._gates[model.name].entered(num_sequences, _api_key(request)))
            stack.enter_context(model.working())
            try:
                async with asyncio.timeout_at(deadline):
                    begun = await begin(stack)
                    if isinstance(begun, Response):
                        return begun
                    # Most errors of a request occur before its first token, when the status can
                    # still be set.
                    first = await _unless_disconnected(request, anext(begun))
            except TimeoutError:
                raise ApiError(self._timeout_message(), 408, code="timeout") from None
            return _Events(first, begun, deadline, partial(self._error_event, model),
                           stack.pop_all().close)
        raise AssertionError  # unreachable, but mypy cannot know

    async def _receive(self, request: Request, accepted: str = "application/json", *,
                       with_media: bool = False) -> bytes:
        """Receive a request's body of this content type, which may have images or audio."""
        large = self._large_bodies if with_media else None
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                return await self._limits.read(request, accepted, large)
        except TimeoutError:
            raise ApiError(f"the request's body did not arrive within "
                           f"{self._limits.body_timeout:g} s", 408) from None

    async def _read(self, request: Request, kind: type[_Kind]) -> tuple[Model, _Kind]:
        """Read a request's body, and return the model that it names."""
        body = await self._read_body(request, kind)
        return self._model_of(request, body.model), body

    async def _read_body(self, request: Request, kind: type[_Kind]) -> _Kind:
        takes_media = any(own.media is not None for own in self.served.values())
        raw = await self._receive(request, with_media=takes_media and kind.TAKES_MEDIA)
        await next(iter(self.served.values())).offload.check_body(raw)
        body = kind.read(raw)
        if body.ignored:
            note(request.scope, ignored=body.ignored)
        return body

    def _model_of(self, request: Request, name: str | None) -> Model:
        """Return the model that a request names, or whose adapter it names.

        Raises:
            ApiError: there is no such model, or there are several and the request names none.
        """
        models = [*self.served.values()]
        model = models[0] if len(models) == 1 else next(
            (own for own in models if name == own.name or name in own.llm.adapters), None)
        if model is None:
            adapters = sum(len(own.llm.adapters) for own in models)
            names = ", ".join(f"'{own}'" for own in self.served)
            names += f" and {adapters} adapters" if adapters else ""
            if name is None:
                raise ApiError(f"the request names no model; this server has {names}: give one of "
                               f"them", param="model")
            raise ApiError(f"unknown model '{shortened(name)}'; this server has {names}", 404,
                           param="model", code="model_not_found")
        model.adapter_of(name)
        request.scope["llmc.model"] = model
        return model

    def _timeout_message(self) -> str:
        return f"the request took longer than {self._limits.request_timeout:g} s"

    def _error_event(self, model: Model, error: Exception) -> bytes:
        """Return the last event of a stream that failed."""
        if isinstance(error, LlmcError):
            status, message = _status_and_message(error, model)
            return error_event(status, message)
        if isinstance(error, TimeoutError):
            return error_event(408, self._timeout_message(), "timeout")
        LOGGER.error("a stream failed", exc_info=error)
        return error_event(500, _FAILED)

    # Errors.

    async def _llmc_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, LlmcError)
        status, message = _status_and_message(error, request.scope.get("llmc.model"))
        api_error = error if isinstance(error, ApiError) else ApiError("")
        return JSONResponse(error_body(status, message, api_error.param, api_error.code), status,
                            headers=api_error.headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shortened(request.url.path)
        instead = f"; Ollama's API is not supported, use {_OLLAMA[path]}" \
            if path in _OLLAMA else ""
        message = {404: f"unknown path {path}{instead}",
                   405: f"{path} does not support {shortened(request.method)}"}.get(
                       error.status_code, error.detail)
        return JSONResponse(error_body(error.status_code, message), error.status_code,
                            headers=error.headers)

    async def _client_disconnect(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # never read by the client

    async def _internal_error(self, request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, _FAILED), 500)


def _described(model: Model, adapter: str | None) -> dict[str, Any]:
    """Return the entry of a model, or of one of its adapters."""
    return {"id": adapter or model.name, "object": "model", "created": model.created,
            "owned_by": "llmc", "root": model.name,
            "parent": None if adapter is None else model.name,
            "max_model_len": model.llm.max_model_len,
            "input_modalities": ["audio"] if model.llm.manifest.features else
            ["text", *(model.media.modalities if model.media else ())]}


def _status_and_message(error: LlmcError, model: Model | None) -> tuple[int, str]:
    """Return an error's status, and its message without local paths.

    If the request's model has failed, the reason is logged and the client gets 503.
    """
    status = error.status if isinstance(error, ApiError) else \
        500 if isinstance(error, NonFiniteLogits) else 400
    if model is None:
        return status, str(error)
    if status == 400:
        try:
            model.llm.check_health()
        except LlmcError as reason:
            LOGGER.error("%s", reason)
            return 503, DOWN
    return status, str(error).replace(str(model.llm.case_dir.absolute()), model.name)


def _api_key(request: Request) -> str | None:
    """Return the name of the client's API key, or None if there are no keys."""
    name: str | None = request.scope["llmc.api_key"]
    return name


@cache
def _page() -> tuple[str, str]:
    """Return the chat page and its content security policy."""
    text = _PAGE.read_text("utf-8")

    def source(tag: str) -> str:
        content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        return f"'sha256-{digest}'"

    return text, _PAGE_POLICY.format(script=source("script"), style=source("style"))


def _check_length(model: Model, job: GenerationJob, param: str) -> None:
    """Check the prompt's length; OpenAI's clients recognize the error's text.

    Raises:
        ApiError: the prompt, alone or with the completion, exceeds the maximum length.
    """
    manifest, limit = model.llm.manifest, model.max_prompt_len
    given = max(map(len, job.prompts), default=0)
    available = limit - given + 1  # the last token of a completion has no position
    completion = min(job.params.max_tokens, manifest.dims.max_seq_len - given + 1)
    if available < 1:
        raise prompt_too_long(limit, given, param)
    if manifest.encoder is None and completion > available:
        raise context_error(limit, f"you requested {given + completion} tokens ({given} in the "
                                   f"{param}, {completion} in the completion). Please reduce the "
                                   f"length of the {param} or max_tokens.", param)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, and cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for waiter in (task, disconnect):
            waiter.cancel()
            with suppress(BaseException):
                await waiter


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
