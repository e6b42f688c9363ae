"""The log: a line of JSON on stderr for each request, and for whatever else happens."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.server.errors import ApiError, error_body
from llmc.server.limits import Limits

LOGGER = logging.getLogger("llmc.server")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; `fields` of it stand beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"time": f"{stamp}.{int(record.msecs):03}Z",
                                "level": record.levelname.lower(), "message": record.getMessage(),
                                **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr() -> None:
    """From now on; of libraries what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("llmc.server", logging.INFO), ("uvicorn", logging.WARNING),
                        ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def note(scope: Scope, **fields: object) -> None:
    """Things that a request's line is to tell."""
    scope["llmc.log"].update(fields)


class Logged:
    """Gives each request an id, lets it in by its key, and logs what became of it. An id that a
    client gives, as X-Request-Id, is kept.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, given = time.monotonic(), Headers(scope=scope).get("x-request-id", "")
        number = given if _ID.fullmatch(given) else secrets.token_hex(16)
        status, whole = 499, False  # 499: the client was gone before

        async def sending(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = number
            whole = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        fields = scope["llmc.log"] = {}
        try:
            try:
                self._limits.check_key(scope["path"], _authorization(Headers(scope=scope)))
            except ApiError as error:
                refused = JSONResponse(error_body(error.status, str(error), code=error.code),
                                       error.status, headers=error.headers)
                await refused(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except BaseException:
            status, whole = 500, True
            raise
        finally:
            level = logging.DEBUG if scope["path"] in ("/health", "/metrics") else logging.INFO
            LOGGER.log(level, "request", extra={"fields": {
                "request_id": number, "method": scope["method"], "path": scope["path"],
                "status": status if whole else 499,
                "seconds": round(time.monotonic() - started, 4), **fields}})


def _authorization(headers: Headers) -> bytes:
    """The authorization of a request; Anthropic's clients give their key as x-api-key."""
    key = headers.get("x-api-key")
    given = headers.get("authorization", "" if key is None else f"Bearer {key}")
    return given.encode("latin-1")
