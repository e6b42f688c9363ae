"""Which hosts, web pages and keys open the server: DNS rebinding, cross-site requests, CORS."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import LlmcError, shortened
from llmc.server.errors import ApiError, error_response
from llmc.server.limits import ServerLimits
from llmc.server.log import note

_ANY = "*"
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]@/]+)(?::\d+)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Access:
    """What Host and Origin headers are accepted, and what CORS tells browsers.

    A web page whose name is made to resolve to a loopback address (DNS rebinding) sends its own
    name as Host. A page of another site sends its own address as Origin.

    Args:
        allowed_hosts: names beside the loopback ones, or `*`. None: `*`, but nothing where the
            server listens at a loopback address alone.
        allowed_origins: of pages beside the server's own, as `https://example.com`, or `*`. Without
            any, CORS is off.
        allowed_methods, allowed_headers: for pages of `allowed_origins`.
        allow_credentials: their cookies and the like may be sent.

    Raises:
        LlmcError: an origin is not `scheme://host[:port]`.
    """

    allowed_hosts: Sequence[str] | None = None
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = (_ANY,)
    allowed_headers: Sequence[str] = (_ANY,)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin not in (_ANY, "null") and not _ORIGIN.fullmatch(origin):
                raise LlmcError(f"allowed_origins has '{origin}'; give origins such as "
                                f"http://localhost:3000 (no path, no final slash), or *")

    @property
    def cors(self) -> list[Middleware]:
        """The middleware of CORS, where it is on."""
        if not self.allowed_origins:
            return []
        return [Middleware(CORSMiddleware, allow_origins=self.allowed_origins,
                           allow_methods=self.allowed_methods, allow_headers=self.allowed_headers,
                           allow_credentials=self.allow_credentials)]

    def check(self, method: str, headers: Headers) -> None:
        """Raises ApiError where Host or Origin is not accepted."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_host(host.lower()):
            raise ApiError(f"Host '{shortened(host)}' is not accepted; use localhost, 127.0.0.1 or "
                           f"[::1], or start the server with --allowed_hosts", 403,
                           code="host_not_allowed")
        if origin is not None and method not in _SAFE_METHODS and not self._is_origin(origin, host):
            raise ApiError(f"Origin '{shortened(origin)}' is not accepted; start the server with "
                           f"--allowed_origins", 403, code="origin_not_allowed")

    def _is_host(self, host: str) -> bool:
        if self.allowed_hosts is None or _ANY in self.allowed_hosts:
            return True
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        allowed = [own.lower() for own in self.allowed_hosts]
        return host in allowed or found["name"] in allowed or _is_loopback_name(found["name"])

    def _is_origin(self, origin: str, host: str | None) -> bool:
        """The server's own page may come through a proxy that ends TLS: the scheme is open."""
        if _ANY in self.allowed_origins or origin in self.allowed_origins:
            return True
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and host is not None and \
            authority.lower() == host.lower()


def _is_loopback_name(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class Guarded:
    """Answers 403 to what `Access` does not accept."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._access.check(scope["method"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Authenticated:
    """Answers 401 to requests that lack the API key."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["llmc.api_key"] = key = self._limits.check_key(
                scope["path"], _authorization(Headers(scope=scope)))
            if key is not None:
                note(scope, api_key=key)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _authorization(headers: Headers) -> bytes:
    """The authorization of a request; Anthropic's clients give their key as x-api-key."""
    key = headers.get("x-api-key")
    given = headers.get("authorization", "" if key is None else f"Bearer {key}")
    return given.encode("latin-1")
