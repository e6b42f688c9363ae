"""Media by URL: `data:`, and `http(s):` and `file:` where a list allows them.

A URL comes from a client, so that a fetch may reach only what the operator has allowed:

| scheme | allowed |
| --- | --- |
| data: | always; base64 |
| http:, https: | hosts of `allowed_domains`, at public addresses or in `allowed_networks` |
| file: | regular files below `allowed_local_path`, after symbolic links are resolved |

Every address of a host must be allowed, and the connection is made to an address that was checked:
a second resolution could give another. Each redirect is checked as the first URL is. Proxies of the
environment are not used.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from llmc.errors import LlmcError, reason_of, shortened

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SCHEMES = ("data", "http", "https", "file")
_MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_CHUNK = 1 << 16


@dataclass(frozen=True)
class MediaAccess:
    """What a URL of a client may reach.

    Args:
        allowed_domains: host names of http(s) URLs. `*.example.com` is every name below it, `*`
            every host.
        allowed_networks: networks beside the public Internet, such as `10.1.0.0/16`.
        allowed_local_path: directory of file: URLs.
        max_bytes: limit of an item.
        timeout_s: limit of a fetch, with its redirects.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_networks: tuple[Network, ...] = ()
    allowed_local_path: Path | None = None
    max_bytes: int = 32 << 20
    timeout_s: float = 10.0


def fetch(url: str, access: MediaAccess) -> bytes:
    """Read the item at a URL; see `Fetch.read`."""
    return Fetch(url, access).read()


class Fetch:
    """The fetch of one item, which another thread may cancel.

    Args:
        url: from a client.
        access: what it may reach.
    """

    def __init__(self, url: str, access: MediaAccess) -> None:
        self._url, self._access = url, access
        self._download = _Download(access)

    def read(self) -> bytes:
        """Read the item.

        Raises:
            LlmcError: the URL is invalid or not allowed, or the item is missing, too large or too
                slow.
        """
        url, access = self._url, self._access
        if is_data(url):
            return _read_data(url, access.max_bytes)
        parts = _split(url)
        if parts.scheme in ("http", "https"):
            return self._download.read(url)
        if parts.scheme == "file":
            return _read_file(parts, access)
        raise LlmcError(f"the URL {_quoted(url)} has the scheme {parts.scheme!r}; give a data: "
                        f"URL, or an http:, https: or file: URL that the server allows")

    def cancel(self) -> None:
        """End a read over the network; its result is of no use."""
        self._download.cancel()


def is_data(url: str) -> bool:
    """Whether a URL has its item in itself."""
    return url[:5].lower() == "data:"


def _quoted(url: str) -> str:
    return f"'{shortened(url, 80)}'"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
    except ValueError as error:
        raise LlmcError(f"{_quoted(url)} is no URL ({error}); give one like "
                        f"data:image/png;base64,…") from error
    return parts


def _read_data(url: str, max_bytes: int) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise LlmcError(f"the data: URL begins with {_quoted(head)}; give one like "
                        f"data:image/png;base64,…")
    if len(data) // 4 * 3 > max_bytes + 3:
        raise _too_large(len(data) // 4 * 3, max_bytes)
    try:
        read = base64.b64decode(unquote(data) if "%" in data else data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LlmcError(f"the data: URL has invalid base64 ({error}); encode the file again") \
            from error
    if len(read) > max_bytes:
        raise _too_large(len(read), max_bytes)
    return read


def _too_large(size: int, limit: int) -> LlmcError:
    return LlmcError(f"the item has {size} bytes, the limit is {limit}; give a smaller one")


def _read_file(parts: SplitResult, access: MediaAccess) -> bytes:
    name = unquote(parts.path)
    if access.allowed_local_path is None:
        raise LlmcError("the server allows no file: URLs; give a data: URL")
    if parts.netloc not in ("", "localhost") or "\0" in name:
        raise LlmcError(f"{_quoted(parts.geturl())} names no local file; give one like "
                        f"file:///path")
    # One answer for all: whether a file outside the directory exists is not the client's business.
    refused = LlmcError(f"'{shortened(name, 80)}' is no file below the directory that the server "
                        f"allows; give a file in it, or a data: URL")
    try:
        path = Path(name).resolve(strict=True)
        if not path.is_relative_to(access.allowed_local_path.resolve()):
            raise refused
        # Opening a FIFO or a device may block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, RuntimeError) as error:
        raise refused from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise refused
        size = os.fstat(file.fileno()).st_size
        if size > access.max_bytes:
            raise _too_large(size, access.max_bytes)
        return file.read(access.max_bytes)


class _Download:
    """One http(s) fetch, with its redirects and deadline."""

    def __init__(self, access: MediaAccess) -> None:
        self._access = access
        self._connection: _Connection | None = None
        self._is_late = False

    def read(self, url: str) -> bytes:
        timer = threading.Timer(self._access.timeout_s, self.cancel)
        timer.daemon = True
        timer.start()
        try:
            return self._follow(url)
        except (OSError, http.client.HTTPException) as error:
            if self._is_late:
                raise self._late(url) from error
            raise LlmcError(f"{_quoted(url)} cannot be read ({reason_of(error)}); check the URL, "
                            f"or give a data: URL") from error
        finally:
            timer.cancel()
            if self._connection is not None:
                self._connection.close()

    def cancel(self) -> None:
        """Interrupt a read that waits."""
        self._is_late = True
        if self._connection is not None:
            self._connection.interrupt()

    def _late(self, url: str) -> LlmcError:
        return LlmcError(f"{_quoted(url)} was not read within {self._access.timeout_s:g} s; check "
                         f"the URL, or give a data: URL")

    def _follow(self, url: str) -> bytes:
        asked = url
        for _ in range(_MAX_REDIRECTS + 1):
            if self._is_late:
                raise self._late(asked)
            response = self._get(url)
            if response.status not in _REDIRECTS:
                return self._body(response, asked)
            target = response.headers.get("Location", "")
            if self._connection is not None:
                self._connection.close()
            url = urljoin(url, target)
            if _split(url).scheme not in ("http", "https"):
                raise LlmcError(f"{_quoted(asked)} redirects to {_quoted(url)}, which is no http "
                                f"URL; give the item's own URL")
        raise LlmcError(f"{_quoted(asked)} redirects more than {_MAX_REDIRECTS} times; give the "
                        f"item's own URL")

    def _get(self, url: str) -> http.client.HTTPResponse:
        parts = _split(url)
        host = _allowed_host(parts, self._access.allowed_domains)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = _allowed_address(host, port, self._access.allowed_networks)
        timeout = self._access.timeout_s
        connection = _Connection(host, port, address, timeout) if parts.scheme == "http" else \
            _SecureConnection(host, port, address, timeout)
        self._connection = connection
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("GET", target, headers={
                "User-Agent": "llmc", "Accept": "*/*", "Accept-Encoding": "identity"})
        except (UnicodeError, ValueError) as error:
            raise LlmcError(f"{_quoted(url)} is no URL ({reason_of(error)}); encode spaces and "
                            f"other characters with %") from error
        if self._is_late:
            raise self._late(url)
        return connection.getresponse()

    def _body(self, response: http.client.HTTPResponse, url: str) -> bytes:
        limit = self._access.max_bytes
        if response.status != 200:
            raise LlmcError(f"{_quoted(url)} answers {response.status}; check the URL, or give a "
                            f"data: URL")
        if response.length is not None and response.length > limit:
            raise _too_large(response.length, limit)
        chunks, size = [], 0
        while not self._is_late and (chunk := response.read1(_CHUNK)):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise LlmcError(f"{_quoted(url)} has more than {limit} bytes, the limit; give a "
                                f"smaller item")
        if self._is_late:
            raise self._late(url)
        return b"".join(chunks)


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked."""

    def __init__(self, host: str, port: int, address: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._address = address
        self._socket: socket.socket | None = None  # `sock` is None once a response has its end

    def connect(self) -> None:
        self.sock = self._socket = socket.create_connection((self._address, self.port),
                                                            self.timeout)

    def interrupt(self) -> None:
        """End a read in another thread."""
        if self._socket is not None:
            with suppress(OSError):  # closed already
                self._socket.shutdown(socket.SHUT_RDWR)


class _SecureConnection(_Connection):
    """The same with TLS; the certificate is that of the host's name."""

    default_port = 443

    def connect(self) -> None:
        super().connect()
        secure = ssl.create_default_context().wrap_socket(
            self.sock, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock = self._socket = secure
        secure.do_handshake()


def _allowed_host(parts: SplitResult, allowed: Sequence[str]) -> str:
    host = (parts.hostname or "").rstrip(".").lower()
    if not allowed:
        raise LlmcError("the server allows no http URLs; give a data: URL")
    if not host or not any(_matches(host, own.lower()) for own in allowed):
        raise LlmcError(f"the server does not allow URLs of the host '{shortened(host)}'; allowed: "
                        f"{', '.join(allowed)}")
    return host


def _matches(host: str, allowed: str) -> bool:
    return allowed in ("*", host) or (allowed.startswith("*.") and host.endswith(allowed[1:]))


def _allowed_address(host: str, port: int, networks: Sequence[Network]) -> str:
    """Resolve a host, all of whose addresses must be allowed; return the first."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LlmcError(f"the host '{shortened(host)}' has no address ({reason_of(error)}); check "
                        f"the URL") from error
    addresses = [str(own[4][0]) for own in found]
    for address in addresses:
        if not _is_allowed(address, networks):
            raise LlmcError(f"the host '{shortened(host)}' has an address that is not public; give "
                            f"a data: URL")
    return addresses[0]


def _is_allowed(text: str, networks: Sequence[Network]) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if any(address.version == own.version and address in own for own in networks):
        return True
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return _is_allowed(str(inner), networks)
        if address.teredo is not None or address in _NAT64:
            return False
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # carries any IPv4 address
