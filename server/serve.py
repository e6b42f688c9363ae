"""Serving of case directories over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from llmc.artifacts.manifest import MANIFEST_NAME, hash_file, read_manifest
from llmc.errors import LlmcError
from llmc.runtime.core.adapters import base_of
from llmc.runtime.core.llm import AsyncLLM
from llmc.runtime.heap import freeze_again
from llmc.runtime.message_forms import ContentFormat
from llmc.server.access import Access
from llmc.server.app import Api
from llmc.server.connection import Acceptor, HttpProtocol, close_silent_peers
from llmc.server.limits import ServerLimits
from llmc.server.log import LOGGER, log_to_stderr
from llmc.server.media import MediaLimits
from llmc.server.model import GenerationConfig, Model, check_parsers
from llmc.server.response_store import ResponseStore

_WATCH_INTERVAL = 1.0  # seconds between checks for a new case directory
_KEEP_ALIVE = 5  # seconds until an idle connection is closed
_ERROR_TIMEOUT = 2.0  # seconds to send errors to requests that drain_timeout ends
_Stamp = tuple[int, int, int]


def serve(case_dir: str | Path | Sequence[str | Path], *, host: str = "127.0.0.1", port: int = 8000,
          served_model_name: str | Sequence[str] | None = None, limits: ServerLimits | None = None,
          access: Access | None = None, media: MediaLimits | None = None,
          tls: ssl.SSLContext | None = None,
          tool_call_parser: str | None = None, reasoning_parser: str = "auto",
          chat_template_content_format: ContentFormat = "auto",
          generation_config: GenerationConfig = "auto", response_store_mb: float = 64,
          response_store_ttl: float = 3600, watch: bool = False,
          enable_tokenizer_info_endpoint: bool = False, enable_prompt_embeds: bool = False,
          allow_runtime_lora_updating: bool = False, **loading: Any) -> None:
    """Serve models until SIGTERM or SIGINT, in the main thread, and log to stderr.

    After the signal, running requests have `drain_timeout` seconds to finish. SIGHUP is ignored.

    Args:
        case_dir: case directory of the model, or of each model.
        host: local address; 0.0.0.0: all addresses.
        port: 0: any free port.
        served_model_name: of each model; None: name of the directory.
        limits: limits of the server.
        access: access control.
        media: limits of images and audio in requests.
        tls: None: plain HTTP.
        tool_call_parser: format of the model's tool calls. None: that of the chat template.
        reasoning_parser: markers of the model's reasoning; `auto`: those of the chat template.
        chat_template_content_format: see `LLM.chat_prompt`.
        generation_config: source of sampling defaults: `auto`, the model; `none`, llmc.
        response_store_mb: megabytes of stored responses; 0: store none.
        response_store_ttl: lifetime of a stored response in seconds.
        watch: when a case directory is replaced, load the new model and switch to it; running
            requests finish with the old one.
        enable_tokenizer_info_endpoint: serve /tokenizer_info, which has the chat template.
        enable_prompt_embeds: take `prompt_embeds` in /v1/completions.
        allow_runtime_lora_updating: let clients load adapters from directories of this machine, and
            unload them, by /v1/load_lora_adapter and /v1/unload_lora_adapter.
        loading: arguments of `AsyncLLM`, for each model. Of several models, each has those of the
            `adapters` that were compiled for it.

    Raises:
        LlmcError: the address cannot be used, an option is out of range, two models have one name,
            an adapter is of none of several models, or see `LLM`.
    """
    check_parsers(tool_call_parser, reasoning_parser)
    responses = ResponseStore(int(response_store_mb * 1e6), response_store_ttl)
    # The server removes these paths from its errors.
    given = [case_dir] if isinstance(case_dir, str | Path) else case_dir
    served = _named([Path(path).absolute() for path in given], served_model_name)
    adapters = _adapters_by_model(served, loading.pop("adapters", None) or {})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def load(name: str) -> Model:
        return Model(AsyncLLM(served[name], adapters=adapters[name], **loading), name,
                     tool_call_parser, reasoning_parser, chat_template_content_format,
                     generation_config, enable_prompt_embeds, media)

    with _bind(host, port) as bound:
        log_to_stderr()
        _raise_descriptor_limit()
        asyncio.run(_serve(
            bound, limits or ServerLimits(), _for_address(access or Access(), bound), tls,
            responses, served, load, watch, tokenizer_info=enable_tokenizer_info_endpoint,
            lora_updates=allow_runtime_lora_updating))


def _named(case_dirs: Sequence[Path], names: str | Sequence[str] | None) -> dict[str, Path]:
    """Return case directories by the names of their models.

    Raises:
        LlmcError: there are other numbers of them, or two models have one name.
    """
    each = [names] if isinstance(names, str) else [*(names or ())]
    each = each or [path.resolve().name for path in case_dirs]
    if len(each) != len(case_dirs) or not each:
        raise LlmcError(f"{len(each)} served_model_name are given for {len(case_dirs)} case "
                        f"directories; give one for each, or none")
    twice = next((name for name in each if each.count(name) > 1), None)
    if twice is not None:
        raise LlmcError(f"two models have the name '{twice}'; give --served_model_name for each")
    return dict(zip(each, case_dirs, strict=True))


def _adapters_by_model(served: Mapping[str, Path], adapters: Mapping[str, str | Path]) -> \
        dict[str, dict[str, str | Path]]:
    """Return the adapters of each model: of several models, those compiled for it.

    Raises:
        LlmcError: an adapter has a model's name, is invalid, or was compiled for no model, or for
            two equal ones.
    """
    for name in adapters:
        if name in served:
            raise LlmcError(f"an adapter has the name of the model, '{name}'; give it another")
    if len(served) == 1:
        return {name: dict(adapters) for name in served}
    found: dict[str, dict[str, str | Path]] = {name: {} for name in served}
    bases = {name: hash_file(path / MANIFEST_NAME) for name, path in served.items()
             if adapters and read_manifest(path).takes_adapters}
    for name, path in adapters.items():
        found[base_of(name, path, bases)][name] = path
    return found


def _for_address(access: Access, bound: socket.socket) -> Access:
    """Set the default of allowed_hosts, which depends on the address."""
    if access.allowed_hosts is not None:
        return access
    address = str(bound.getsockname()[0]).partition("%")[0]  # without the IPv6 zone
    is_loopback = ipaddress.ip_address(address).is_loopback
    return replace(access, allowed_hosts=() if is_loopback else ("*",))


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket before loading the model, which takes longer, to report errors early."""
    if not 0 <= port <= 65535:
        raise LlmcError(f"--port {port} is not from 0 to 65535; 0 is any free port")
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
                 tls: ssl.SSLContext | None, responses: ResponseStore, served: Mapping[str, Path],
                 load: Callable[[str], Model], watch: bool, **endpoints: bool) -> None:
    stamps = {name: _stamp(path) for name, path in served.items()}
    models = list[Model]()
    try:
        for name in served:
            models.append(await asyncio.to_thread(load, name))
    except BaseException:
        for model in models:
            await model.llm.close()
        raise
    api = Api(models, limits, access, responses, **endpoints)
    watching = [asyncio.create_task(_watch(api, path, stamps[name], partial(load, name)))
                for name, path in served.items()] if watch else []
    # h11 is a dependency of uvicorn, so it is always installed; StrictParser extends it.
    server = _Server(uvicorn.Config(
        api.app(), http=HttpProtocol, log_config=None, access_log=False, server_header=False,
        lifespan="off", ws="none", timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=limits.drain_timeout), bound, limits, tls)
    # uvicorn shuts down on these signals, and then re-raises them for the handlers before its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.ready = lambda: LOGGER.info("serving", extra={"fields": {
        "url": _url(bound, tls is not None), **_logged(models)}})
    try:
        await server.serve()
    finally:
        for task in watching:
            task.cancel()
        for model in api.served.values():
            await model.llm.close()
    LOGGER.info("the server has stopped")


def _logged(models: Sequence[Model]) -> dict[str, Any]:
    """Return the names of models, and the sampling defaults, of each if there are several."""
    if len(models) == 1:
        return {"model": models[0].name, "sampling_defaults": models[0].logged_defaults}
    return {"models": {model.name: model.logged_defaults if model.llm.manifest.pooling is None
                       else {} for model in models}}


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
        tasks.add(asyncio.create_task(_switch(api, model)))
        tasks = {task for task in tasks if not task.done()}
        LOGGER.info("serving the new case directory")


async def _switch(api: Api, model: Model) -> None:
    """Switch to a model; the one before is closed when its requests have finished."""
    await api.swap(model)
    freeze_again()


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
