"""What the server takes and answers, once: the application's routes and /openapi.json are made of
it. Bodies are described by `protocol`'s models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from llmc import __version__
from llmc.server.messages import CountTokensRequest, MessagesRequest
from llmc.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)

_Object = dict[str, Any]
_REF = "#/components/schemas/{model}"
# What may become of a request with a body, beside an answer.
_WRONG = {400: "what is asked cannot be had", 404: "another model is served",
          408: "the body, or the answer, took too long", 413: "the body is too large",
          415: "the body is no JSON by its type"}
_FULL = {429: "come again after Retry-After seconds"}
_NOT_STORED = "the response is not stored"
MAX_ITEMS = 100  # of a page of a response's input items
ITEM_ORDERS = ("desc", "asc")
DOWN = "a step failed; the model has to be loaded again"
_UNAVAILABLE = "a step failed, or the server is shutting down"
_UNHEALTHY = "a step failed, or none has completed for long"


@dataclass(frozen=True)
class Operation:
    """A path with a method.

    Args:
        endpoint: the method of `Api` that answers it.
        body: of a request.
        answer: keys that an answer's JSON has, or the media type of what is none.
        wrong: statuses of what can go wrong, and what each means.
        query: the query's parameters, each a schema by its name.
    """

    method: str
    path: str
    endpoint: str
    answer: tuple[str, ...] | str
    body: type[Body] | None = None
    wrong: tuple[tuple[int, str], ...] = ()
    query: tuple[tuple[str, _Object], ...] = ()

    @property
    def generates(self) -> bool:
        """Whether it may answer by server-sent events."""
        return 429 in dict(self.wrong)


def _post(path: str, endpoint: str, body: type[Body], *answer: str,
          generates: bool = False) -> Operation:
    wrong = _WRONG | {503: _UNAVAILABLE} | (_FULL if generates else {})
    return Operation("POST", path, endpoint, answer, body, tuple(sorted(wrong.items())))


_CHOICES = ("id", "object", "created", "model", "choices", "usage")
OPERATIONS = (
    _post("/v1/chat/completions", "chat", ChatRequest, *_CHOICES, generates=True),
    _post("/v1/completions", "completions", CompletionRequest, *_CHOICES, generates=True),
    _post("/v1/responses", "responses", ResponsesRequest, "id", "object", "created_at", "model",
          "output", "status", "usage", generates=True),
    # Before the next, whose name may have slashes.
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


# Served where an option says so, as the chat template may be private.
TOKENIZER_INFO = Operation("GET", "/tokenizer_info", "tokenizer_info", ("tokenizer_class",),
                           wrong=((400, "the model has no tokenizer"),))


def description(operations: Sequence[Operation], open_paths: Sequence[str]) -> _Object:
    """The server's interface, as OpenAPI 3.1 has it.

    Args:
        operations: that it serves.
        open_paths: that need no API key.
    """
    bodies = [own.body for own in operations if own.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    paths: dict[str, _Object] = {}
    for own in operations:
        paths.setdefault(own.path, {})[own.method.lower()] = _described(
            own, own.path in open_paths)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc", "version": __version__,
                 "description": "OpenAI's interface, with vLLM's extra fields."},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR},
                       "securitySchemes": {
                           "key": {"type": "http", "scheme": "bearer"},
                           "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}}}


def _described(own: Operation, is_open: bool) -> _Object:
    told: _Object = {"operationId": own.endpoint, "responses": {
        "200": {"description": "the answer", **_content(own)},
        **{str(status): _refusal(text) for status, text in _wrong(own, is_open).items()}}}
    if not is_open:
        # A key where the server was given one; Anthropic's clients send x-api-key.
        told["security"] = [{}, {"key": []}, {"x_api_key": []}]
    if own.body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {
            "schema": {"$ref": _REF.format(model=own.body.__name__)}}}}
    parameters: list[_Object] = [{"name": name, "in": "query", "schema": schema}
                                 for name, schema in own.query]
    if "{name}" in own.path:
        parameters.append({"name": "name", "in": "path", "required": True,
                           "schema": {"type": "string", "minLength": 1}})
    if parameters:
        told["parameters"] = parameters
    return told


def _wrong(own: Operation, is_open: bool) -> dict[int, str]:
    return dict(own.wrong) | {403: "the Host or the Origin is not accepted"} | (
        {} if is_open else {401: "the API key is missing or wrong"})


def _content(own: Operation) -> _Object:
    if isinstance(own.answer, str):
        return {"content": {own.answer: {"schema": {"type": "string"}}}} if own.answer else {}
    answer: _Object = {"application/json": {"schema": {"type": "object",
                                                       "required": [*own.answer]}}}
    if own.generates:
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
