"""Error responses of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from llmc.errors import LlmcError, shortened

_MAX_MESSAGE = 1000  # characters


class ApiError(LlmcError):
    """An error response to a client.

    Args:
        status: HTTP status.
        param: name of the invalid field.
        code: machine-readable name.
        headers: further response headers.
    """

    def __init__(self, message: str, status: int = 400, *, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> \
        dict[str, Any]:
    """Return the JSON of an error, as OpenAI has it, with Anthropic's `type` next to it.

    Texts are shortened, because they may quote the client.
    """
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {
        "message": shortened(message, _MAX_MESSAGE), "type": kind,
        "param": None if param is None else shortened(param), "code": code}}


def error_response(error: ApiError) -> JSONResponse:
    """Return the response to a request that does not reach its route."""
    return JSONResponse(error_body(error.status, str(error), error.param, error.code),
                        error.status, headers=error.headers)


def prompt_too_long(limit: int, given: int, param: str, at_least: bool = False) -> ApiError:
    """Return the error of a prompt beyond the context length; OpenAI's clients recognize it."""
    source = "messages resulted in" if param == "messages" else f"{param} has"
    return context_error(limit, f"your {source} {'at least ' if at_least else ''}{given} tokens. "
                                f"Please reduce the length of the {param}.", param)


def context_error(limit: int, problem: str, param: str) -> ApiError:
    """Return OpenAI's context length error; `problem` has the number of tokens."""
    return ApiError(f"This model's maximum context length is {limit} tokens. However, {problem}",
                    param=param, code="context_length_exceeded")
