"""Errors as OpenAI's interface tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.errors import LlmcError


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
    """The JSON of an error, as OpenAI has it; `type` beside it is Anthropic's."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"message": message, "type": kind, "param": param,
                                       "code": code}}
