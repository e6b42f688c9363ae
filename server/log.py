"""The log: one line of JSON on stderr per request and per event."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import shortened
from llmc.server.errors import ApiError, error_response

LOGGER = logging.getLogger("llmc.server")
ENDING = "the server is shutting down and drain_timeout has passed; send the request again"
_FREQUENT = ("/health", "/load", "/metrics", "/ping")  # logged at level DEBUG
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C's


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with its `fields` next to the message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"time": f"{stamp}.{int(record.msecs):03}Z",
                                "level": record.levelname.lower(), "message": record.getMessage(),
                                **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr() -> None:
    """Log to stderr from now on; of libraries, warnings and errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("llmc.server", logging.INFO), ("uvicorn", logging.WARNING),
                        ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def note(scope: Scope, **fields: object) -> None:
    """Add fields to the log line of a request."""
    scope["llmc.log"].update(fields)


class Logged:
    """Middleware that gives each request an id and logs its outcome.

    It keeps a client's X-Request-Id, logs its `traceparent`, and returns both in the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, echoed = time.monotonic(), _echoed(Headers(scope=scope))
        status, complete = 499, False  # 499: the client disconnected

        async def sending(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(echoed)
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        fields = scope["llmc.log"] = {}
        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:  # shutdown, after drain_timeout
            if status == 499:
                await error_response(ApiError(ENDING, 503))(scope, receive, sending)
        except BaseException:
            status, complete = 500, True
            raise
        finally:
            level = logging.DEBUG if scope["path"] in _FREQUENT else logging.INFO
            LOGGER.log(level, "request", extra={"fields": {
                "request_id": echoed["X-Request-Id"], "method": shortened(scope["method"]),
                "path": shortened(scope["path"], 200), "status": status if complete else 499,
                "seconds": round(time.monotonic() - started, 4), **fields,
                **({"traceparent": echoed["traceparent"]} if "traceparent" in echoed else {})}})


def _echoed(headers: Headers) -> dict[str, str]:
    """Return the headers of the answer that identify the request."""
    given, trace = headers.get("x-request-id", ""), headers.get("traceparent", "")
    echoed = {"X-Request-Id": given if _ID.fullmatch(given) else secrets.token_hex(16)}
    return echoed | ({"traceparent": trace} if _TRACEPARENT.fullmatch(trace) else {})
