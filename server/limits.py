"""How much a server takes on, and for whom."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from llmc.errors import LlmcError
from llmc.server.errors import ApiError

# What may be had without a key: nothing is generated, and nobody's texts are told.
OPEN = ("/", "/health", "/load", "/metrics", "/openapi.json", "/ping", "/version")


@dataclass(frozen=True)
class Limits:
    """Of a server.

    Args:
        api_key: that clients give as a bearer token; None: they need none.
        max_waiting: requests beside as many as are decoded at once; one more is refused, to come
            again later.
        max_request_bytes: of a request's body.
        request_timeout: seconds from a request's coming to its end.
        body_timeout: seconds for a request's body to come.
        drain_timeout: seconds that requests have to end once the server is to.
        header_timeout: seconds for the line and the headers of a request.
        write_timeout: seconds after which a connection ends whose client takes nothing of an
            answer.
        stall_timeout: seconds without a step, while there is work, after which /health is 503.

    Raises:
        LlmcError: a number is not above 0, or the key is empty.
    """

    api_key: str | None = None
    max_waiting: int = 256
    max_request_bytes: int = 8 * 2**20
    request_timeout: float = 1800.0
    body_timeout: float = 30.0
    drain_timeout: int = 30
    header_timeout: float = 10.0
    write_timeout: float = 60.0
    stall_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise LlmcError("api_key is empty; give one, or leave it out")
        if self.max_waiting < 0:
            raise LlmcError(f"max_waiting {self.max_waiting} is below 0")
        for name in ("max_request_bytes", "request_timeout", "body_timeout", "drain_timeout",
                     "header_timeout", "write_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise LlmcError(f"{name} {getattr(self, name)} is not above 0")

    def check_key(self, path: str, authorization: bytes) -> None:
        """Raises ApiError where a request needs the key and does not have it."""
        if self.api_key is None or path in OPEN:
            return
        scheme, _, given = authorization.partition(b" ")
        # In constant time, so that nobody learns the key letter by letter.
        key = self.api_key.encode("utf-8", "surrogateescape")  # of a command line: any bytes
        if not hmac.compare_digest(given.strip(), key) or scheme.lower() != b"bearer":
            raise ApiError("the API key is missing or wrong; give it as: Authorization: Bearer …",
                           401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def read(self, request: Request) -> bytes:
        """A request's body.

        Raises:
            ApiError: it is no JSON by its type, or too large.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page of others cannot send that unasked
            raise ApiError("the content-type must be application/json", 415)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_request_bytes:
                raise ApiError(f"the request has more than {self.max_request_bytes} bytes", 413)
            parts.append(part)
        return b"".join(parts)


class Gate:
    """Counts requests that generate.

    Args:
        most: at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.inside = self.refused = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One more is inside.

        Raises:
            ApiError: there are as many as may be.
        """
        if self.inside >= self._most:
            self.refused += 1
            raise ApiError(f"{self.inside} requests are here already; come again later", 429,
                           code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
