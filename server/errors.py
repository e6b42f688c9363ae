"""Errors as OpenAI's interface tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from llmc.errors import LlmcError, shortened

_MAX_MESSAGE = 1000  # characters


class ApiError(LlmcError):
    """What a client did wrong, or what it cannot have now.

    Args:
        status: of the HTTP response.
        param: the field that it is about.
        code: a name for programs.
    """

    def __init__(self, message: str, status: int = 400, *, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> \
        dict[str, Any]:
    """The JSON of an error, as OpenAI has it; `type` beside it is Anthropic's. Its texts are short,
    whatever of a client's they repeat.
    """
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {
        "message": shortened(message, _MAX_MESSAGE), "type": kind,
        "param": None if param is None else shortened(param), "code": code}}


def error_response(error: ApiError) -> JSONResponse:
    """The response to a request that did not reach its route."""
    return JSONResponse(error_body(error.status, str(error), error.param, error.code),
                        error.status, headers=error.headers)


def prompt_too_long(limit: int, given: int, param: str, at_least: bool = False) -> ApiError:
    """An error by which OpenAI's clients know that a prompt exceeds the context length."""
    source = "messages resulted in" if param == "messages" else f"{param} has"
    return context_error(limit, f"your {source} {'at least ' if at_least else ''}{given} tokens. "
                                f"Please reduce the length of the {param}.", param)


def context_error(limit: int, problem: str, param: str) -> ApiError:
    """`problem` says how many tokens there are, and of what."""
    return ApiError(f"This model's maximum context length is {limit} tokens. However, {problem}",
                    param=param, code="context_length_exceeded")
