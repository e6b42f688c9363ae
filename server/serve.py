"""Serve a case directory over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from llmc.artifacts.manifest import MANIFEST_NAME
from llmc.errors import LlmcError
from llmc.runtime.core.llm import AsyncLLM
from llmc.runtime.message_forms import ContentFormat
from llmc.server.access import Access
from llmc.server.app import Api
from llmc.server.connection import Acceptor, HttpProtocol, close_silent_peers
from llmc.server.limits import ServerLimits
from llmc.server.log import LOGGER, log_to_stderr
from llmc.server.model import GenerationConfig, Model, check_parsers
from llmc.server.response_store import ResponseStore

_LOOK = 1.0  # seconds between two looks at a case directory
_KEEP_ALIVE = 5  # seconds that a connection is idle between two requests
_LAST_WORDS = 2.0  # seconds for the errors of requests that drain_timeout ends
_Stamp = tuple[int, int, int]


def serve(case_dir: str | Path, *, host: str = "127.0.0.1", port: int = 8000,
          served_model_name: str | None = None, limits: ServerLimits | None = None,
          access: Access | None = None, tls: ssl.SSLContext | None = None,
          tool_call_parser: str | None = None, reasoning_parser: str = "auto",
          chat_template_content_format: ContentFormat = "auto",
          generation_config: GenerationConfig = "auto", response_store_mb: float = 64,
          response_store_ttl: float = 3600, watch: bool = False,
          enable_tokenizer_info_endpoint: bool = False, **loading: Any) -> None:
    """Serve the model until SIGTERM or SIGINT, in the main thread; log to stderr. What was asked
    before the signal is still answered, as long as `drain_timeout` says. SIGHUP is ignored.

    Args:
        host: an address of this machine; 0.0.0.0 is all of them.
        port: 0 lets the system choose.
        served_model_name: None: the name of the directory.
        tls: None: plain HTTP.
        tool_call_parser: how the model calls tools. None: as its chat template does.
        reasoning_parser: the marks around the model's reasoning; `auto` are those of its chat
            template.
        response_store_mb: megabytes of stored responses; 0 stores none.
        response_store_ttl: seconds that a response is stored.
        chat_template_content_format: see `LLM.chat_prompt`.
        generation_config: where sampling defaults come from: `auto`, the model; `none`, llmc.
        watch: load what replaces the case directory, and let it take over; requests that are under
            way end with what they began with.
        enable_tokenizer_info_endpoint: serve /tokenizer_info, which has the chat template.
        loading: of `AsyncLLM`.

    Raises:
        LlmcError: the address cannot be had, an option is out of range, or see `LLM`.
    """
    check_parsers(tool_call_parser, reasoning_parser)
    responses = ResponseStore(int(response_store_mb * 1e6), response_store_ttl)
    case_dir = Path(case_dir).absolute()  # as which no error tells it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _bind(host, port) as bound:
        name = served_model_name or case_dir.resolve().name
        log_to_stderr()
        _allow_connections()
        asyncio.run(_serve(
            bound, limits or ServerLimits(), _for_address(access or Access(), bound), tls,
            responses,
            lambda: Model(AsyncLLM(case_dir, **loading), name, tool_call_parser, reasoning_parser,
                          chat_template_content_format, generation_config),
            case_dir if watch else None, enable_tokenizer_info_endpoint))


def _for_address(access: Access, bound: socket.socket) -> Access:
    """The hosts that are accepted where no option says so."""
    if access.allowed_hosts is not None:
        return access
    address = str(bound.getsockname()[0]).partition("%")[0]  # an IPv6 zone follows it
    is_loopback = ipaddress.ip_address(address).is_loopback
    return replace(access, allowed_hosts=() if is_loopback else ("*",))


def _bind(host: str, port: int) -> socket.socket:
    """A socket of this address, before the model is loaded, which takes longer."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise LlmcError(f"--host '{host}' --port {port} is no address ({error})") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise LlmcError(f"--host '{host}' --port {port} cannot be had ({error}); give another") \
            from error
    return bound


async def _serve(bound: socket.socket, limits: ServerLimits, access: Access,
                 tls: ssl.SSLContext | None, responses: ResponseStore,
                 load: Callable[[], Model], watched: Path | None, tokenizer_info: bool) -> None:
    before = None if watched is None else _stamp(watched)
    api = Api(await asyncio.to_thread(load), limits, access, responses, tokenizer_info)
    watching = None
    if watched is not None:
        watching = asyncio.create_task(_watch(api, watched, before, load))
    # h11 is uvicorn's parser in every installation, and the one that is strict here.
    server = _Server(uvicorn.Config(
        api.app(), http=HttpProtocol, log_config=None, access_log=False, server_header=False,
        lifespan="off", ws="none", timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=limits.drain_timeout), bound, limits, tls)
    # uvicorn ends by these in good order, and then sends them on to what was there before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.ready = lambda: LOGGER.info("serving", extra={"fields": {
        "url": _url(bound, tls is not None), "model": api.model.name,
        "sampling_defaults": api.model.logged_defaults}})
    try:
        await server.serve()
    finally:
        if watching is not None:
            watching.cancel()
        await api.model.llm.close()
    LOGGER.info("ended")


async def _watch(api: Api, case_dir: Path, served: _Stamp | None, load: Callable[[], Model]) -> \
        None:
    """Whenever there is another case directory under the name, load it and let it take over. A
    directory appears whole, so what is there can be loaded; where it cannot, all stays as it is.
    """
    tasks = set()
    while True:
        await asyncio.sleep(_LOOK)
        found = _stamp(case_dir)
        if found is None or found == served:
            continue
        served = found
        try:
            model = await asyncio.to_thread(load)
        except LlmcError as error:
            LOGGER.error("a new case directory cannot be served: %s", error)
            continue
        tasks.add(asyncio.create_task(api.swap(model)))
        tasks = {task for task in tasks if not task.done()}
        LOGGER.info("a new case directory is served")


def _stamp(case_dir: Path) -> _Stamp | None:
    """What tells one case directory from the next; None where there is none."""
    try:
        found = (case_dir / MANIFEST_NAME).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


class _Server(uvicorn.Server):
    """uvicorn's server behind an `Acceptor`, whose requests are told when it ends them.

    Attributes:
        ready: called once it listens.
    """

    ready: Callable[[], object]

    def __init__(self, config: uvicorn.Config, bound: socket.socket, limits: ServerLimits,
                 tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._bound, self._limits, self._tls = bound, limits, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        close_silent_peers(self._bound, self._limits.write_timeout)
        self._acceptor = Acceptor(self._bound, self._protocol, self._tls,
                                  self._limits.header_timeout, self.config.backlog)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.close()
        await super().shutdown(sockets=[])
        if self.server_state.tasks:  # which are cancelled now
            await asyncio.wait({*self.server_state.tasks}, timeout=_LAST_WORDS)

    def _protocol(self, closed: Callable[[HttpProtocol], None]) -> HttpProtocol:
        return HttpProtocol(header_timeout=self._limits.header_timeout, closed=closed,
                            config=self.config, server_state=self.server_state, app_state={})


def _allow_connections() -> None:
    """As many as the system lets this process have; what is usual is little more than 1,000."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _url(bound: socket.socket, is_tls: bool) -> str:
    host, port = bound.getsockname()[:2]
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{'https' if is_tls else 'http'}://{authority}"
