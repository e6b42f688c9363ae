"""Limits of the server: API keys, admission, timeouts and sizes."""

from __future__ import annotations

import hmac
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import LlmcError, shortened
from llmc.server.errors import ApiError

# Paths without authentication: they generate nothing and expose no client's data.
OPEN = ("/", "/health", "/load", "/metrics", "/openapi.json", "/ping", "/version")
_LARGE_BODIES = 512 << 20  # bytes of bodies above max_request_bytes, of all requests
_BODY_BYTES = "llmc.body_bytes"  # key of a request's scope


# A line of --api_key_file: `name: key`, or `key`. A bearer token has no spaces.
_KEY_LINE = re.compile(r"(?:(\S+):\s+)?(\S+)")


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server.

    Args:
        api_keys: API keys by name; clients send one as a bearer token. Empty: no authentication.
        max_waiting: maximum number of waiting sequences; further requests get 429.
        max_seqs_per_key: maximum number of running and waiting sequences of an API key. None: an
            equal share for each key, at least the batch size.
        allow_priority: accept requests with a priority other than 0.
        max_request_bytes: maximum size of a request's body.
        max_media_request_bytes: the same of requests with audio or images, if it is larger.
        request_timeout: seconds, from a request's arrival to its end.
        body_timeout: seconds, for a request's body to arrive.
        drain_timeout: seconds, for requests to finish at shutdown.
        header_timeout: seconds, for the request line and the headers to arrive.
        write_timeout: seconds, until a connection is closed if the client reads nothing.
        stall_timeout: seconds without a completed step of pending work until /health is 503.

    Raises:
        LlmcError: a value is not above 0, or a key is empty or has two names.
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    max_waiting: int = 256
    max_seqs_per_key: int | None = None
    allow_priority: bool = False
    max_request_bytes: int = 8 * 2**20
    max_media_request_bytes: int = 26 * 2**20
    request_timeout: float = 1800.0
    body_timeout: float = 30.0
    drain_timeout: int = 30
    header_timeout: float = 10.0
    write_timeout: float = 60.0
    stall_timeout: float = 60.0

    def __post_init__(self) -> None:
        names: dict[str, str] = {}
        for name, key in self.api_keys.items():
            if not key.strip():
                raise LlmcError(f"API key '{name}' is empty; give a key, or leave it out")
            if names.setdefault(key, name) != name:
                raise LlmcError(f"API keys '{names[key]}' and '{name}' are the same; give each "
                                f"name a different key")
        if self.max_waiting < 0:
            raise LlmcError(f"max_waiting is {self.max_waiting}, expected at least 0; give a "
                            f"larger number")
        if self.max_seqs_per_key is not None and self.max_seqs_per_key < 1:
            raise LlmcError(f"max_seqs_per_key is {self.max_seqs_per_key}, expected at least 1; "
                            f"give a larger number, or leave it out")
        for name in ("max_request_bytes", "max_media_request_bytes", "request_timeout",
                     "body_timeout", "drain_timeout", "header_timeout", "write_timeout",
                     "stall_timeout"):
            if not getattr(self, name) > 0:
                raise LlmcError(f"{name} is {getattr(self, name)}, expected more than 0; give a "
                                f"larger number")

    def check_key(self, path: str, authorization: bytes) -> str | None:
        """Return the name of a request's API key; None if the path or the server needs none.

        Raises:
            ApiError: the key is missing or wrong.
        """
        if not self.api_keys or path in OPEN:
            return None
        scheme, _, given = authorization.partition(b" ")
        given = given.strip()
        # Compare with all keys in constant time, so that timing does not reveal a key.
        found = [name for name, key in self.api_keys.items()
                 if hmac.compare_digest(given, key.encode("utf-8", "surrogateescape"))]
        if not found or scheme.lower() != b"bearer":
            raise ApiError("the API key is missing or wrong; send it as: Authorization: Bearer …",
                           401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[0]

    def check_priority(self, priority: int) -> None:
        """Raise ApiError for a priority that is not allowed, as vLLM does."""
        if priority and not self.allow_priority:
            raise ApiError(f"priority is {priority}, expected 0 on this server; leave it out, or "
                           f"start the server with --allow_priority",
                           param="priority", code="unsupported_parameter")

    def cache_salt(self, key: str | None, given: str | None) -> str | None:
        """Return the salt of a request's prefix cache entries.

        With several API keys the salt depends on the key, so that timing does not reveal the
        prompts of other clients.
        """
        return json.dumps([key, given]) if len(self.api_keys) > 1 else given

    async def read(self, request: Request, accepted: str, large: LargeBodies | None) -> bytes:
        """Read a request's body.

        Args:
            accepted: its content type.
            large: memory of bodies above `max_request_bytes`; None: it may have no media.

        Raises:
            ApiError: it has another content type, or is too large, or large bodies of other
                requests take the memory.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Cross-site pages cannot send JSON without CORS; forms are sent with an Origin.
        if kind != accepted:
            raise ApiError(f"the content-type is '{shortened(kind)}', expected {accepted}", 415)
        parts, size = [], 0
        most = self.max_request_bytes if large is None else \
            max(self.max_request_bytes, self.max_media_request_bytes)
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise ApiError(f"the request has more than {most} bytes; send a smaller one", 413)
            if large is not None and size > self.max_request_bytes:
                large.hold(request.scope, size)
            parts.append(part)
        return b"".join(parts)


class LargeBodies:
    """Memory of the bodies above `max_request_bytes`, until their requests end."""

    def __init__(self) -> None:
        self._held = 0  # bytes

    def hold(self, scope: Scope, size: int) -> None:
        """Note the size of a request's body so far. One request is always admitted.

        Raises:
            ApiError: the bodies of all requests would exceed the limit.
        """
        others = self._held - scope.get(_BODY_BYTES, 0)
        if others and others + size > _LARGE_BODIES:
            raise ApiError(f"large bodies of other requests take {others} of at most "
                           f"{_LARGE_BODIES} bytes; retry after Retry-After", 429,
                           code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self._held, scope[_BODY_BYTES] = others + size, size

    def release(self, scope: Scope) -> None:
        """Note that a request has ended."""
        self._held -= scope.pop(_BODY_BYTES, 0)


class ReleasesBodies:
    """Middleware that frees the memory of a request's large body when the request ends."""

    def __init__(self, app: ASGIApp, large: LargeBodies) -> None:
        self._app, self._large = app, large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._large.release(scope)


def read_api_keys(keys: Iterable[str], path: Path | None) -> dict[str, str]:
    """Read API keys by name: those of the command line, then those of a file.

    The name of a key without a name is its number, counted from 1.

    Args:
        keys: keys without names.
        path: file with one `name: key` or `key` per line. Empty lines and lines that start with #
            are ignored.

    Raises:
        LlmcError: the file cannot be read, a line is invalid, or a name occurs twice.
    """
    found: dict[str, str] = {}

    def add(name: str | None, key: str) -> None:
        name = name or str(len(found) + 1)
        if name in found:
            raise LlmcError(f"two API keys have the name '{name}'; give each a different name")
        found[name] = key

    for key in keys:
        add(None, key)
    if path is not None:
        try:
            lines = path.read_text("utf-8", "surrogateescape").splitlines()
        except OSError as error:
            raise LlmcError(f"api_key_file '{path}' cannot be read ({error.strerror}); give a file "
                            f"with one key per line") from error
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            match = _KEY_LINE.fullmatch(line)
            if match is None:
                raise LlmcError(f"line {number} of '{path}' is not an API key; write 'name: key' "
                                f"or 'key', without other spaces")
            add(*match.groups())
        if not found:
            raise LlmcError(f"'{path}' has no API key; write one per line, or leave out "
                            f"api_key_file")
    return found


class AdmissionGate:
    """Admission control of generation requests.

    Args:
        max_sequences: maximum number of admitted sequences.
        max_per_key: maximum number of admitted sequences of an API key.

    Attributes:
        inside: admitted requests.
        refused: requests that got 429.
    """

    def __init__(self, max_sequences: int, max_per_key: int) -> None:
        self._max_sequences, self._max_per_key = max_sequences, max_per_key
        self._of_key: Counter[str | None] = Counter()  # sequences
        self.inside = self.refused = 0

    @staticmethod
    def of(limits: ServerLimits, max_num_seqs: int) -> AdmissionGate:
        """Return the gate of a server whose batch size is `max_num_seqs`."""
        total = max_num_seqs + limits.max_waiting
        share = max(total // max(len(limits.api_keys), 1), max_num_seqs)
        return AdmissionGate(total, limits.max_seqs_per_key or share)

    @property
    def sequences(self) -> int:
        """Number of admitted sequences."""
        return self._of_key.total()

    @contextmanager
    def entered(self, sequences: int, key: str | None = None) -> Iterator[None]:
        """Context of an admitted request with this number of sequences.

        One request of each API key, or one in total without keys, is always admitted.

        Raises:
            ApiError: a limit would be exceeded.
        """
        of_key, total = self._of_key[key], self.sequences
        for held, limit, scope in ((total, self._max_sequences, "those of all clients"),
                                   (of_key, self._max_per_key, "those of this API key")):
            if of_key and held + sequences > limit:
                self.refused += 1
                raise ApiError(f"the request has {sequences} sequences, {scope} have {held} of at "
                               f"most {limit}; retry after Retry-After", 429,
                               code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.inside += 1
        self._of_key[key] += sequences
        try:
            yield
        finally:
            self.inside -= 1
            self._of_key[key] -= sequences
            if not self._of_key[key]:
                del self._of_key[key]
