"""Serving of a case directory over HTTP."""

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

_WATCH_INTERVAL = 1.0  # seconds between checks for a new case directory
_KEEP_ALIVE = 5  # seconds until an idle connection is closed
_ERROR_TIMEOUT = 2.0  # seconds to send errors to requests that drain_timeout ends
_Stamp = tuple[int, int, int]


def serve(case_dir: str | Path, *, host: str = "127.0.0.1", port: int = 8000,
          served_model_name: str | None = None, limits: ServerLimits | None = None,
          access: Access | None = None, tls: ssl.SSLContext | None = None,
          tool_call_parser: str | None = None, reasoning_parser: str = "auto",
          chat_template_content_format: ContentFormat = "auto",
          generation_config: GenerationConfig = "auto", response_store_mb: float = 64,
          response_store_ttl: float = 3600, watch: bool = False,
          enable_tokenizer_info_endpoint: bool = False, enable_prompt_embeds: bool = False,
          allow_runtime_lora_updating: bool = False, **loading: Any) -> None:
    """Serve a model until SIGTERM or SIGINT, in the main thread, and log to stderr.

    After the signal, running requests have `drain_timeout` seconds to finish. SIGHUP is ignored.

    Args:
        case_dir: case directory of the model.
        host: local address; 0.0.0.0: all addresses.
        port: 0: any free port.
        served_model_name: None: name of the directory.
        limits: limits of the server.
        access: access control.
        tls: None: plain HTTP.
        tool_call_parser: format of the model's tool calls. None: that of the chat template.
        reasoning_parser: markers of the model's reasoning; `auto`: those of the chat template.
        chat_template_content_format: see `LLM.chat_prompt`.
        generation_config: source of sampling defaults: `auto`, the model; `none`, llmc.
        response_store_mb: megabytes of stored responses; 0: store none.
        response_store_ttl: lifetime of a stored response in seconds.
        watch: when the case directory is replaced, load the new model and switch to it; running
            requests finish with the old one.
        enable_tokenizer_info_endpoint: serve /tokenizer_info, which has the chat template.
        enable_prompt_embeds: take `prompt_embeds` in /v1/completions.
        allow_runtime_lora_updating: let clients load adapters from directories of this machine, and
            unload them, by /v1/load_lora_adapter and /v1/unload_lora_adapter.
        loading: arguments of `AsyncLLM`.

    Raises:
        LlmcError: the address cannot be used, an option is out of range, or see `LLM`.
    """
    check_parsers(tool_call_parser, reasoning_parser)
    responses = ResponseStore(int(response_store_mb * 1e6), response_store_ttl)
    case_dir = Path(case_dir).absolute()  # the server removes this path from its errors
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _bind(host, port) as bound:
        name = served_model_name or case_dir.resolve().name
        if name in (loading.get("adapters") or {}):
            raise LlmcError(f"an adapter has the name of the model, '{name}'; give it another")
        log_to_stderr()
        _raise_descriptor_limit()
        asyncio.run(_serve(
            bound, limits or ServerLimits(), _for_address(access or Access(), bound), tls,
            responses,
            lambda: Model(AsyncLLM(case_dir, **loading), name, tool_call_parser, reasoning_parser,
                          chat_template_content_format, generation_config, enable_prompt_embeds),
            case_dir if watch else None, tokenizer_info=enable_tokenizer_info_endpoint,
            lora_updates=allow_runtime_lora_updating))


def _for_address(access: Access, bound: socket.socket) -> Access:
    """Set the default of allowed_hosts, which depends on the address."""
    if access.allowed_hosts is not None:
        return access
    address = str(bound.getsockname()[0]).partition("%")[0]  # without the IPv6 zone
    is_loopback = ipaddress.ip_address(address).is_loopback
    return replace(access, allowed_hosts=() if is_loopback else ("*",))


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket before loading the model, which takes longer, to report errors early."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise LlmcError(f"--host '{host}' --port {port} is not a valid address ({error}); give "
                        f"another") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise LlmcError(f"--host '{host}' --port {port} cannot be used ({error}); give another") \
            from error
    return bound


async def _serve(bound: socket.socket, limits: ServerLimits, access: Access,
                 tls: ssl.SSLContext | None, responses: ResponseStore,
                 load: Callable[[], Model], watched: Path | None, **endpoints: bool) -> None:
    before = None if watched is None else _stamp(watched)
    api = Api(await asyncio.to_thread(load), limits, access, responses, **endpoints)
    watching = None
    if watched is not None:
        watching = asyncio.create_task(_watch(api, watched, before, load))
    # h11 is a dependency of uvicorn, so it is always installed; StrictParser extends it.
    server = _Server(uvicorn.Config(
        api.app(), http=HttpProtocol, log_config=None, access_log=False, server_header=False,
        lifespan="off", ws="none", timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=limits.drain_timeout), bound, limits, tls)
    # uvicorn shuts down on these signals, and then re-raises them for the handlers before its own.
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
    LOGGER.info("the server has stopped")


async def _watch(api: Api, case_dir: Path, served: _Stamp | None, load: Callable[[], Model]) -> \
        None:
    """Load each new case directory and switch to it.

    Case directories are replaced atomically. If loading fails, the current model stays.
    """
    tasks = set()
    while True:
        await asyncio.sleep(_WATCH_INTERVAL)
        found = _stamp(case_dir)
        if found is None or found == served:
            continue
        served = found
        try:
            model = await asyncio.to_thread(load)
        except LlmcError as error:
            LOGGER.error("the new case directory cannot be loaded: %s", error)
            continue
        tasks.add(asyncio.create_task(api.swap(model)))
        tasks = {task for task in tasks if not task.done()}
        LOGGER.info("serving the new case directory")


def _stamp(case_dir: Path) -> _Stamp | None:
    """Return values that identify a case directory; None if it is absent."""
    try:
        found = (case_dir / MANIFEST_NAME).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


class _Server(uvicorn.Server):
    """uvicorn's server with an `Acceptor`; requests that it cancels get an error.

    Attributes:
        ready: called when it listens.
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
        if self.server_state.tasks:  # canceled by now
            await asyncio.wait({*self.server_state.tasks}, timeout=_ERROR_TIMEOUT)

    def _protocol(self, closed: Callable[[HttpProtocol], None]) -> HttpProtocol:
        return HttpProtocol(header_timeout=self._limits.header_timeout, closed=closed,
                            config=self.config, server_state=self.server_state, app_state={})


def _raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors to the hard limit; a usual soft limit is 1,024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _url(bound: socket.socket, is_tls: bool) -> str:
    host, port = bound.getsockname()[:2]
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{'https' if is_tls else 'http'}://{authority}"
