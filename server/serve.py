"""Serve a case directory over HTTP."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from llmc.errors import LlmcError
from llmc.runtime.llm import AsyncLLM
from llmc.runtime.manifest import MANIFEST_NAME
from llmc.runtime.message_forms import ContentFormat
from llmc.server.app import Api
from llmc.server.limits import Limits
from llmc.server.log import LOGGER, log_to_stderr
from llmc.server.model import GenerationConfig, Model
from llmc.server.tools import ToolCallParser

_LOOK = 1.0  # seconds between two looks at a case directory
_Stamp = tuple[int, int, int]


def serve(case_dir: str | Path, *, host: str = "127.0.0.1", port: int = 8000,
          served_model_name: str | None = None, limits: Limits | None = None,
          tool_call_parser: ToolCallParser | None = None,
          chat_template_content_format: ContentFormat = "auto",
          generation_config: GenerationConfig = "auto", watch: bool = False,
          **loading: Any) -> None:
    """Serve the model until SIGTERM or SIGINT, in the main thread; log to stderr. What was asked
    before the signal is still answered, as long as `drain_timeout` says.

    Args:
        host: an address of this machine; 0.0.0.0 is all of them.
        port: 0 lets the system choose.
        served_model_name: None: the name of the directory.
        tool_call_parser: how the model calls tools. None: what its chat template says.
        chat_template_content_format: see `LLM.chat_prompt`.
        generation_config: where sampling defaults come from: `auto`, the model; `none`, llmc.
        watch: load what replaces the case directory, and let it take over; requests that are under
            way end with what they began with.
        loading: of `AsyncLLM`.

    Raises:
        LlmcError: the address cannot be had, or see `LLM`.
    """
    case_dir = Path(case_dir).absolute()  # as which no error tells it
    with _bind(host, port) as bound:
        name = served_model_name or case_dir.resolve().name
        log_to_stderr()
        _allow_connections()
        asyncio.run(_serve(
            bound, limits or Limits(),
            lambda: Model(AsyncLLM(case_dir, **loading), name, tool_call_parser,
                          chat_template_content_format, generation_config),
            case_dir if watch else None))


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


async def _serve(bound: socket.socket, limits: Limits, load: Callable[[], Model],
                 watched: Path | None) -> None:
    before = None if watched is None else _stamp(watched)
    api = Api(await asyncio.to_thread(load), limits)
    watching = None
    if watched is not None:
        watching = asyncio.create_task(_watch(api, watched, before, load))
    server = _Server(uvicorn.Config(
        api.app(), log_config=None, access_log=False, server_header=False, lifespan="off",
        ws="none", timeout_graceful_shutdown=limits.drain_timeout))
    # uvicorn ends by these in good order, and then sends them on to what was there before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.ready = lambda: LOGGER.info("serving", extra={"fields": {
        "url": _url(bound), "model": api.model.name,
        "sampling_defaults": api.model.logged_defaults}})
    try:
        await server.serve(sockets=[bound])
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
    """Tells when it listens."""

    ready: Callable[[], object]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def _allow_connections() -> None:
    """As many as the system lets this process have; what is usual is little more than 1,000."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
