"""Access control: host names, origins, CORS and API keys."""

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
    """Accepted Host and Origin headers, and the CORS policy.

    In a DNS rebinding attack, a web page's host name resolves to a loopback address, so its
    requests have that name as Host. A cross-site request has the other site as Origin.

    Args:
        allowed_hosts: host names besides the loopback names, or `*`. None: `*`, or none if the
            server listens on a loopback address only.
        allowed_origins: origins besides the server's, such as `https://example.com`, or `*`. Empty:
            CORS is off.
        allowed_methods, allowed_headers: CORS policy for `allowed_origins`.
        allow_credentials: whether those origins may send credentials.

    Raises:
        LlmcError: an origin is not of the form `scheme://host[:port]`.
    """

    allowed_hosts: Sequence[str] | None = None
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = (_ANY,)
    allowed_headers: Sequence[str] = (_ANY,)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin not in (_ANY, "null") and not _ORIGIN.fullmatch(origin):
                raise LlmcError(f"allowed_origins has '{origin}', expected scheme://host[:port]; "
                                f"give origins such as http://localhost:3000, or *")

    @property
    def cors(self) -> list[Middleware]:
        """The CORS middleware; empty if CORS is off."""
        if not self.allowed_origins:
            return []
        return [Middleware(CORSMiddleware, allow_origins=self.allowed_origins,
                           allow_methods=self.allowed_methods, allow_headers=self.allowed_headers,
                           allow_credentials=self.allow_credentials)]

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError if the Host or the Origin is not accepted."""
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
        allowed = [name.lower() for name in self.allowed_hosts]
        return host in allowed or found["name"] in allowed or _is_loopback_name(found["name"])

    def _is_origin(self, origin: str, host: str | None) -> bool:
        """Compare without the scheme: a proxy may terminate TLS in front of the server."""
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
    """Middleware that answers 403 to requests that `Access` does not accept."""

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
    """Middleware that answers 401 to requests without a valid API key."""

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
    """Return the Authorization header; Anthropic's clients send the key as x-api-key."""
    key = headers.get("x-api-key")
    given = headers.get("authorization", "" if key is None else f"Bearer {key}")
    return given.encode("latin-1")
