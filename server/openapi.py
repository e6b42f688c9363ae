"""Operations of the server: source of the application's routes and of /openapi.json.

The models of `protocol` describe the bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from llmc import __version__
from llmc.server.messages import CountTokensRequest, MessagesRequest
from llmc.server.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from llmc.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    ResponsesRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from llmc.server.transcription import TranscriptionRequest, TranslationRequest

_Object = dict[str, Any]
_REF = "#/components/schemas/{model}"
# Error statuses of a request with a body.
_WRONG = {400: "the request is invalid or not supported", 404: "another model is served",
          408: "the body or the answer took too long", 413: "the body is too large",
          415: "the content type is not JSON"}
_FULL = {429: "a limit is reached; retry after Retry-After seconds"}
_NOT_STORED = "the response is not stored"
MAX_ITEMS = 100  # of a page of a response's input items
ITEM_ORDERS = ("desc", "asc")
DOWN = "a step failed; the server must be restarted"
_UNAVAILABLE = "a step failed, or the server is shutting down"
_UNHEALTHY = "a step failed, or no step has completed for stall_timeout"


@dataclass(frozen=True)
class Operation:
    """A path with an HTTP method.

    Args:
        endpoint: method of `Api` that answers it.
        answer: keys of the answer's JSON, or the media type of another answer.
        body: model of the request's body.
        wrong: error statuses with their meanings.
        query: query parameters with their schemas.
        has_file: the body is a form with a file.
    """

    method: str
    path: str
    endpoint: str
    answer: tuple[str, ...] | str
    body: type[Body] | None = None
    wrong: tuple[tuple[int, str], ...] = ()
    query: tuple[tuple[str, _Object], ...] = ()
    has_file: bool = False

    @property
    def generates(self) -> bool:
        """Whether the operation may answer with server-sent events."""
        return 429 in dict(self.wrong)


def _post(path: str, endpoint: str, body: type[Body], *answer: str,
          generates: bool = False) -> Operation:
    wrong = _WRONG | {503: _UNAVAILABLE} | (_FULL if generates else {})
    return Operation("POST", path, endpoint, answer, body, tuple(sorted(wrong.items())))


_LIST = ("id", "object", "created", "model", "data", "usage")
_CHOICES = ("id", "object", "created", "model", "choices", "usage")
OPERATIONS = (
    _post("/v1/chat/completions", "chat", ChatRequest, *_CHOICES, generates=True),
    _post("/v1/completions", "completions", CompletionRequest, *_CHOICES, generates=True),
    _post("/v1/responses", "responses", ResponsesRequest, "id", "object", "created_at", "model",
          "output", "status", "usage", generates=True),
    # First, because the names of the next operations may have slashes.
    Operation("GET", "/v1/responses/{name}/input_items", "input_items",
              ("object", "data", "first_id", "last_id", "has_more"),
              wrong=((400, "a parameter is out of range"), (404, _NOT_STORED)),
              query=(("limit", {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS,
                                "default": 20}),
                     ("order", {"enum": [*ITEM_ORDERS], "default": "desc"}),
                     ("after", {"type": "string"}))),
    Operation("GET", "/v1/responses/{name}", "stored_response", ("id", "object", "output"),
              wrong=((404, _NOT_STORED),)),
    Operation("DELETE", "/v1/responses/{name}", "delete_response", ("id", "object", "deleted"),
              wrong=((404, _NOT_STORED),)),
    _post("/v1/messages", "messages", MessagesRequest, "id", "type", "role", "content", "model",
          "stop_reason", "usage", generates=True),
    _post("/v1/messages/count_tokens", "count_tokens", CountTokensRequest, "input_tokens"),
    _post("/v1/embeddings", "embeddings", EmbeddingRequest, *_LIST, generates=True),
    *(_post(path, "rerank", RerankRequest, "id", "model", "results", "usage", generates=True)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(_post(path, "score", ScoreRequest, *_LIST, generates=True)
      for path in ("/score", "/v1/score")),
    _post("/classify", "classify", ClassifyRequest, *_LIST, generates=True),
    _post("/pooling", "pooling", PoolingRequest, *_LIST, generates=True),
    *(Operation("POST", f"/v1/audio/{endpoint}", endpoint, ("text",), body,
                tuple(sorted((_WRONG | _FULL | {
                    415: "the content type is not multipart/form-data",
                    503: _UNAVAILABLE}).items())), has_file=True)
      for endpoint, body in (("transcriptions", TranscriptionRequest),
                             ("translations", TranslationRequest))),
    _post("/tokenize", "tokenize", TokenizeRequest, "count", "max_model_len", "tokens"),
    _post("/detokenize", "detokenize", DetokenizeRequest, "prompt"),
    Operation("GET", "/v1/models", "models", ("object", "data")),
    Operation("GET", "/v1/models/{name}", "named", ("id", "object", "created", "owned_by"),
              wrong=((404, _WRONG[404]),)),
    Operation("GET", "/health", "health", "", wrong=((503, _UNHEALTHY),)),
    Operation("GET", "/ping", "ping", "", wrong=((503, _UNHEALTHY),)),
    Operation("POST", "/ping", "post_ping", "", wrong=((503, _UNHEALTHY),)),
    Operation("GET", "/load", "load", ("server_load",)),
    Operation("GET", "/version", "version", ("version",)),
    Operation("GET", "/metrics", "metrics", "text/plain"),
    Operation("GET", "/openapi.json", "openapi", ("openapi", "info", "paths")),
    Operation("GET", "/", "page", "text/html"),
)


# Served only with --enable_tokenizer_info_endpoint, as the chat template may be private.
TOKENIZER_INFO = Operation("GET", "/tokenizer_info", "tokenizer_info", ("tokenizer_class",),
                           wrong=((400, "the model has no tokenizer"),))


# Served only with --allow_runtime_lora_updating, as a client names directories of the server.
LORA_UPDATES = tuple(
    Operation("POST", f"/v1/{name}", name, "text/plain", body,
              tuple(sorted((_WRONG | {404: missing, 503: _UNAVAILABLE}).items())))
    for name, body, missing in (
        ("load_lora_adapter", LoadAdapterRequest, _WRONG[404]),
        ("unload_lora_adapter", UnloadAdapterRequest, "there is no such adapter")))


def description(operations: Sequence[Operation], open_paths: Sequence[str]) -> _Object:
    """Return the OpenAPI 3.1 description of the server.

    Args:
        operations: the served operations.
        open_paths: paths without authentication.
    """
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    paths: dict[str, _Object] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(
            operation, operation.path in open_paths)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc", "version": __version__,
                 "description": "The OpenAI API, with vLLM's extra fields."},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR},
                       "securitySchemes": {
                           "key": {"type": "http", "scheme": "bearer"},
                           "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}}}


def _described(operation: Operation, is_open: bool) -> _Object:
    described: _Object = {"operationId": operation.endpoint, "responses": {
        "200": {"description": "the answer", **_content(operation)},
        **{str(status): _refusal(text) for status, text in _wrong(operation, is_open).items()}}}
    if not is_open:
        # Authentication is optional in general; Anthropic's clients send x-api-key.
        described["security"] = [{}, {"key": []}, {"x_api_key": []}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _body(operation)}
    parameters: list[_Object] = [{"name": name, "in": "query", "schema": schema}
                                 for name, schema in operation.query]
    if "{name}" in operation.path:
        parameters.append({"name": "name", "in": "path", "required": True,
                           "schema": {"type": "string", "minLength": 1}})
    if parameters:
        described["parameters"] = parameters
    return described


def _body(operation: Operation) -> _Object:
    assert operation.body is not None
    schema: _Object = {"$ref": _REF.format(model=operation.body.__name__)}
    if not operation.has_file:
        return {"application/json": {"schema": schema}}
    file = {"type": "object", "required": ["file"],
            "properties": {"file": {"type": "string", "format": "binary"}}}
    return {"multipart/form-data": {"schema": {"allOf": [schema, file]}}}


def _wrong(operation: Operation, is_open: bool) -> dict[int, str]:
    return dict(operation.wrong) | {403: "the Host or the Origin is not accepted"} | (
        {} if is_open else {401: "the API key is missing or wrong"})


def _content(operation: Operation) -> _Object:
    if isinstance(operation.answer, str):
        return {"content": {operation.answer: {"schema": {"type": "string"}}}} \
            if operation.answer else {}
    answer: _Object = {"application/json": {"schema": {"type": "object",
                                                       "required": [*operation.answer]}}}
    if operation.has_file:
        answer["text/plain"] = {"schema": {"type": "string"}}
    elif operation.generates:
        answer["text/event-stream"] = {}
    return {"content": answer}


def _refusal(text: str) -> _Object:
    return {"description": text, "content": {"application/json": {
        "schema": {"$ref": _REF.format(model="Error")}}}}


_TEXT_OR_NONE = {"type": ["string", "null"]}
_ERROR: _Object = {
    "type": "object", "required": ["error"], "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"},
                       "param": _TEXT_OR_NONE, "code": _TEXT_OR_NONE}}}}
