"""How much a server takes on, and for whom."""

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

from llmc.errors import LlmcError
from llmc.server.errors import ApiError

# What may be had without a key: nothing is generated, and nobody's texts are told.
OPEN = ("/", "/health", "/load", "/metrics", "/openapi.json", "/ping", "/version")


# A line of --api_key_file: `name: key`, or `key`. A bearer token has no spaces.
_KEY_LINE = re.compile(r"(?:(\S+):\s+)?(\S+)")


@dataclass(frozen=True)
class ServerLimits:
    """Of a server.

    Args:
        api_keys: by name. A client gives one as a bearer token. Empty: they need none.
        max_waiting: sequences beside as many as are decoded at once; a request for more is refused,
            to come again later.
        max_seqs_per_key: sequences of one API key that run or wait at once. None: an equal part for
            each key, at least as many as are decoded at once.
        allow_priority: requests may have a priority other than 0.
        max_request_bytes: of a request's body.
        request_timeout: seconds from a request's coming to its end.
        body_timeout: seconds for a request's body to come.
        drain_timeout: seconds that requests have to end once the server is to.
        header_timeout: seconds for the line and the headers of a request.
        write_timeout: seconds after which a connection ends whose client takes nothing of an
            answer.
        stall_timeout: seconds without a step, while there is work, after which /health is 503.

    Raises:
        LlmcError: a number is not above 0, or a key is empty or has two names.
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    max_waiting: int = 256
    max_seqs_per_key: int | None = None
    allow_priority: bool = False
    max_request_bytes: int = 8 * 2**20
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
                raise LlmcError(f"API key '{name}' is empty; give one, or leave it out")
            if names.setdefault(key, name) != name:
                raise LlmcError(f"API keys '{names[key]}' and '{name}' are the same; give each "
                                f"name a key of its own")
        if self.max_waiting < 0:
            raise LlmcError(f"max_waiting {self.max_waiting} is below 0")
        if self.max_seqs_per_key is not None and self.max_seqs_per_key < 1:
            raise LlmcError(f"max_seqs_per_key {self.max_seqs_per_key} is below 1; give at least "
                            f"1, or leave it out")
        for name in ("max_request_bytes", "request_timeout", "body_timeout", "drain_timeout",
                     "header_timeout", "write_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise LlmcError(f"{name} {getattr(self, name)} is not above 0")

    def check_key(self, path: str, authorization: bytes) -> str | None:
        """The name of a request's API key; None if the path or the server needs none.

        Raises:
            ApiError: the key is missing or wrong.
        """
        if not self.api_keys or path in OPEN:
            return None
        scheme, _, given = authorization.partition(b" ")
        given = given.strip()
        # Each in constant time, and all of them, so that nobody learns a key letter by letter.
        found = [name for name, key in self.api_keys.items()
                 if hmac.compare_digest(given, key.encode("utf-8", "surrogateescape"))]
        if not found or scheme.lower() != b"bearer":
            raise ApiError("the API key is missing or wrong; give it as: Authorization: Bearer …",
                           401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[0]

    def check_priority(self, priority: int) -> None:
        """Refuse a priority that is not allowed, as vLLM does without priority scheduling."""
        if priority and not self.allow_priority:
            raise ApiError(f"priority {priority} is not allowed, as this server takes 0 only; "
                           f"leave priority out, or start the server with --allow_priority",
                           param="priority", code="unsupported_parameter")

    def cache_salt(self, key: str | None, given: str | None) -> str | None:
        """The salt of a request's prefixes: its own, and with several API keys that of its key, so
        that no client finds out what another asked.
        """
        return json.dumps([key, given]) if len(self.api_keys) > 1 else given

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


def read_api_keys(keys: Iterable[str], path: Path | None) -> dict[str, str]:
    """API keys by name, those of a file after the others. A key without a name has its number,
    counted from 1.

    Args:
        path: a file with `name: key` or `key` a line. Empty lines and those that begin with # do
            not count.

    Raises:
        LlmcError: the file cannot be read, a line is neither, or a name comes twice.
    """
    found: dict[str, str] = {}

    def add(name: str | None, key: str) -> None:
        name = name or str(len(found) + 1)
        if name in found:
            raise LlmcError(f"there are two API keys of the name '{name}'; give each its own name")
        found[name] = key

    for key in keys:
        add(None, key)
    if path is not None:
        try:
            lines = path.read_text("utf-8", "surrogateescape").splitlines()
        except OSError as error:
            raise LlmcError(f"api_key_file '{path}' cannot be read ({error.strerror}); give a file "
                            f"with a key a line") from error
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            match = _KEY_LINE.fullmatch(line)
            if match is None:
                raise LlmcError(f"line {number} of '{path}' is no API key; write 'name: key' or "
                                f"'key', without other spaces")
            add(*match.groups())
        if not found:
            raise LlmcError(f"'{path}' has no API key; write one a line, or leave api_key_file out")
    return found


class AdmissionGate:
    """Counts requests that generate, and their sequences.

    Args:
        most: sequences at once.
        most_per_key: of one API key.
    """

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most, self._most_per_key = most, most_per_key
        self._of_key: Counter[str | None] = Counter()  # sequences
        self.inside = self.refused = 0  # requests

    @staticmethod
    def of(limits: ServerLimits, max_num_seqs: int) -> AdmissionGate:
        """The gate of a server that decodes up to `max_num_seqs` sequences at once."""
        most = max_num_seqs + limits.max_waiting
        part = max(most // max(len(limits.api_keys), 1), max_num_seqs)
        return AdmissionGate(most, limits.max_seqs_per_key or part)

    @property
    def sequences(self) -> int:
        """Of the requests that are inside."""
        return self._of_key.total()

    @contextmanager
    def entered(self, sequences: int, key: str | None = None) -> Iterator[None]:
        """A request for so many sequences is inside. One may always be of each API key, or in all
        if there are no keys, however large it is.

        Raises:
            ApiError: it is one too many.
        """
        own, total = self._of_key[key], self.sequences
        for held, most, whose in ((total, self._most, "those of all clients"),
                                  (own, self._most_per_key, "those of this API key")):
            if own and held + sequences > most:
                self.refused += 1
                raise ApiError(f"the request is for {sequences} sequences, {whose} have {held} of "
                               f"at most {most}; come again later", 429,
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
