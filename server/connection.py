"""HTTP connections: strict framing, timeouts, and a limit by file descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmc.server.errors import error_body
from llmc.server.log import LOGGER

_MAX_HEAD = 16 * 1024  # bytes of a request line and its headers, h11's default
_MAX_SPARE = 64  # maximum number of descriptors reserved for the server's files
_RETRY = 1.0  # seconds between attempts to accept after an error
_NEW_LINE = re.compile(rb"\r?\n")
_END_OF_HEAD = re.compile(rb"\n\r?\n")


class StrictParser(h11.Connection):
    """h11's parser, which also rejects ambiguous request heads.

    A proxy and this server must agree where a request ends; otherwise request smuggling is
    possible. h11 repairs ambiguous heads; RFC 9112 (sections 5.2, 6.1 and 6.3) allows to reject
    them.

    Attributes:
        problem: reason of a rejection, for the client.
    """

    problem = "the request is not valid HTTP/1.1"

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        head = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            problem = _framing_problem(head, event)
            if problem is not None:
                self.problem = problem
                raise h11.RemoteProtocolError(problem)
        return event


def _framing_problem(head: bytes, request: h11.Request) -> str | None:
    """Return why a head is ambiguous; None if it is not."""
    lines = _NEW_LINE.split(_END_OF_HEAD.split(head, 1)[0])[1:]
    if any(line[:1] in (b" ", b"\t") for line in lines):
        return "a header is folded over several lines (obs-fold); send it on one line"
    fields = [(name.strip().lower(), value) for name, _, value in
              (line.partition(b":") for line in lines)]
    lengths = [value for name, value in fields if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in fields)
    if len(lengths) > 1 or any(b"," in value for value in lengths):
        return "the request has several Content-Length values; send one"
    if lengths and chunked:
        return "the request has both Content-Length and Transfer-Encoding; send one of them"
    if chunked and request.http_version < b"1.1":
        return "an HTTP/1.0 request has Transfer-Encoding; send Content-Length"
    return None


class HttpProtocol(H11Protocol):
    """uvicorn's connection with `StrictParser` and a timeout for each request head.

    A connection is aborted `header_timeout` seconds after its start, or after the first byte that
    follows an answer, unless a whole head has arrived. uvicorn's keep-alive timer closes idle
    connections.

    Args:
        header_timeout: seconds.
        closed: called with this object when the connection is lost.
        uvicorn: arguments of `H11Protocol`.
    """

    def __init__(self, *, header_timeout: float, closed: Callable[[HttpProtocol], None],
                 **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.conn: StrictParser = StrictParser()
        self._header_timeout, self._closed = header_timeout, closed
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        self._closed(self)

    def send_400_response(self, msg: str) -> None:
        if self._is_answering and self.cycle.response_started:
            self.transport.close()  # an error cannot be sent in the middle of an answer
            return
        body = json.dumps(error_body(400, self.conn.problem)).encode()
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                             b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_head(self) -> None:
        if self._is_answering or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self._header_timeout, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Acceptor:
    """Accepts connections while file descriptors are free; others wait in the backlog.

    asyncio's servers accept until the system refuses, and log each refusal with a traceback,
    thousands per second.

    Args:
        listening: bound socket; this object listens on it and closes it.
        protocol: makes the protocol of a connection; its argument must be called when the
            connection is lost.
        tls: None: plain TCP.
        handshake_timeout: seconds, of a TLS handshake.
    """

    def __init__(self, listening: socket.socket,
                 protocol: Callable[[Callable[[HttpProtocol], None]], HttpProtocol],
                 tls: ssl.SSLContext | None, handshake_timeout: float, backlog: int) -> None:
        self._listening, self._protocol = listening, protocol
        self._tls, self._handshake_timeout = tls, handshake_timeout
        self._open: set[HttpProtocol] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._max_open = _max_connections()
        self._warned = -_RETRY
        listening.setblocking(False)
        listening.listen(backlog)
        self._task = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting; open connections continue."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._open) >= self._max_open:
                self._warn(f"{self._max_open} connections are open, the most that file descriptors "
                           f"allow; further ones wait (raise ulimit -n)")
                self._freed.clear()
                await self._freed.wait()
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except ConnectionError:  # the client has disconnected
                continue
            except OSError as error:
                self._warn(f"accepting a connection failed ({error.strerror}); further ones wait")
                await asyncio.sleep(_RETRY)
                continue
            protocol = self._protocol(self._lost)
            self._open.add(protocol)
            task = loop.create_task(self._begin(accepted, protocol))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _begin(self, accepted: socket.socket, protocol: HttpProtocol) -> None:
        tls_only = {} if self._tls is None else {"ssl_handshake_timeout": self._handshake_timeout}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, **tls_only)
        except OSError:  # the TLS handshake failed
            self._lost(protocol)

    def _lost(self, protocol: HttpProtocol) -> None:
        self._open.discard(protocol)
        self._freed.set()

    def _warn(self, message: str) -> None:
        """Log at most one line per second."""
        now = time.monotonic()
        if now - self._warned >= _RETRY:
            self._warned = now
            LOGGER.warning("%s", message)


def _max_connections() -> int:
    """Return the maximum number of connections, with some descriptors reserved for files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**31
    free = limit - len(os.listdir("/proc/self/fd"))
    return max(free - min(free // 4, _MAX_SPARE), 1)


def close_silent_peers(listening: socket.socket, seconds: float) -> None:
    """Have the system close connections whose peer acknowledges nothing for `seconds`.

    Accepted connections inherit the option. It applies if the peer is gone or does not read.
    """
    with suppress(OSError, AttributeError):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
