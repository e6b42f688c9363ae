"""Images and audio of requests: read and preprocessed outside the event loop.

| work | where | bound |
| --- | --- | --- |
| reading a URL | a thread; canceled when the client disconnects | 16 at a time, 4 of a request |
| decoding and preprocessing | a thread, the items of a request together | 2 requests at a time |
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from llmc.errors import LlmcError
from llmc.runtime.multimodal.items import PLURALS, MediaItem, Modality
from llmc.runtime.multimodal.media import Fetch, MediaAccess, Network, is_data
from llmc.runtime.multimodal.messages import MediaSource
from llmc.runtime.prompts import MediaPrompt
from llmc.server.errors import ApiError

if TYPE_CHECKING:
    from llmc.runtime.multimodal.processor import Processor

DEFAULT_LIMITS: Mapping[Modality, int] = MappingProxyType({"image": 16, "audio": 4})
_FETCHES_PER_REQUEST = 4
_FETCHES = ThreadPoolExecutor(16, "llmc-fetch")
_ITEMS = ThreadPoolExecutor(2, "llmc-media")  # decoding competes with the model for cores


@dataclass(frozen=True)
class MediaLimits:
    """Limits of images and audio in requests.

    Args:
        access: what URLs may reach; `max_bytes` also limits all items of a request together.
        per_prompt: maximum number of items of a prompt.
        memory_bytes: limit of the preprocessed items of all admitted requests.
    """

    access: MediaAccess = field(default_factory=MediaAccess)
    per_prompt: Mapping[Modality, int] = field(default_factory=lambda: dict(DEFAULT_LIMITS))
    memory_bytes: int = 4 << 30


def media_limits(domains: Sequence[str], networks: Sequence[str], local_path: Path | None,
                 max_bytes: int, timeout: float, per_prompt: str, memory_gb: float) -> MediaLimits:
    """Read the options of `llmc serve`.

    Args:
        domains, networks, local_path, max_bytes, timeout: see `MediaAccess`.
        per_prompt: limits of items, as `image=4,audio=1` or JSON.
        memory_gb: limit of preprocessed items in GB.

    Raises:
        LlmcError: a network or a limit is invalid, or the path is no directory.
    """
    for name, value in (("max_media_bytes", max_bytes), ("media_timeout", timeout),
                        ("media_memory_gb", memory_gb)):
        if not value > 0:
            raise LlmcError(f"{name} is {value}, expected more than 0; give a larger number")
    if local_path is not None and not local_path.is_dir():
        raise LlmcError(f"allowed_local_media_path '{local_path}' is no directory; give one")
    return MediaLimits(MediaAccess(
        tuple(domains), tuple(map(_network, networks)), local_path, max_bytes, timeout),
        {**DEFAULT_LIMITS, **_read_counts(per_prompt)}, int(memory_gb * 1e9))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise LlmcError(f"allowed_media_networks has '{text}' ({error}); give networks like "
                        f"10.1.0.0/16") from error


def _read_counts(text: str) -> dict[Modality, int]:
    """Read limits by modality, in JSON or as `image=4,audio=1`."""
    try:
        read = json.loads(text) if text.lstrip().startswith("{") else dict(
            part.strip().split("=") for part in text.split(",") if part.strip())
        counts = {cast(Modality, name): int(count) for name, count in read.items()}
    except (TypeError, ValueError):
        counts = {}
        read = {text: ""}
    if any(name not in PLURALS or count < 0 for name, count in counts.items()) or \
            len(counts) != len(read):
        raise LlmcError(f"limit_mm_per_prompt is '{text}', expected counts of "
                        f"{' and '.join(PLURALS)}; write it as image=4,audio=1")
    return counts


class MediaReader:
    """Reads the images and audio of requests for one model."""

    def __init__(self, processor: Processor, limits: MediaLimits) -> None:
        self._processor, self._limits = processor, limits
        self._held = 0  # bytes

    @property
    def modalities(self) -> list[Modality]:
        """What prompts may have beside text."""
        return [*self._processor.placeholders]

    async def read(self, sources: Sequence[MediaSource], param: str) -> list[MediaItem]:
        """Read and preprocess the items of a prompt.

        Canceling ends reads that wait for the network.

        Args:
            sources: URLs or bytes.
            param: the request's field that has them.

        Raises:
            ApiError: there are too many, a URL is not allowed or cannot be read, or an item is
                invalid.
        """
        self._check_counts(sources, param)
        turn = asyncio.Semaphore(_FETCHES_PER_REQUEST)
        reads = [asyncio.ensure_future(self._fetched(index, own, turn))
                 for index, own in enumerate(sources)]
        try:
            contents = await asyncio.gather(*reads)
            self._check_sizes(contents)
            return await asyncio.get_running_loop().run_in_executor(
                _ITEMS, self._processor.process,
                [(own.modality, data) for own, data in zip(sources, contents, strict=True)])
        except LlmcError as error:
            raise ApiError(str(error), param=param) from None
        finally:
            for read in reads:
                read.cancel()

    @contextmanager
    def holding(self, prompts: Sequence[MediaPrompt]) -> Iterator[None]:
        """Context of a request with these prompts, whose items are in memory until it ends.

        One request is always admitted.

        Raises:
            ApiError: the memory of all requests' items would exceed the limit.
        """
        size = sum(array.nbytes for prompt in prompts for own in prompt.ranges
                   for array in own.item.arrays.values())
        if self._held and size and self._held + size > self._limits.memory_bytes:
            raise ApiError(f"the request's images and audio take {size} bytes once preprocessed, "
                           f"those of other requests take {self._held} of at most "
                           f"{self._limits.memory_bytes}; retry after Retry-After", 429,
                           code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def _fetched(self, index: int, source: MediaSource, turn: asyncio.Semaphore) -> bytes:
        """Return an item's bytes."""
        if isinstance(source.value, bytes):
            return source.value
        fetch, run = Fetch(source.value, self._limits.access), asyncio.get_running_loop()
        try:
            if is_data(source.value):  # waits for no network
                return await run.run_in_executor(_ITEMS, fetch.read)
            async with turn:
                return await run.run_in_executor(_FETCHES, fetch.read)
        except LlmcError as error:
            raise LlmcError(f"item {index} ({source.modality}): {error}") from None
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    def _check_counts(self, sources: Sequence[MediaSource], param: str) -> None:
        for modality, count in Counter(own.modality for own in sources).items():
            if modality not in self.modalities:
                raise ApiError(f"the request has {count} {PLURALS[modality]}, and this model takes "
                               f"none; leave them out", param=param)
            limit = self._limits.per_prompt.get(modality, DEFAULT_LIMITS[modality])
            if count > limit:
                raise ApiError(f"the request has {count} {PLURALS[modality]}, this server takes at "
                               f"most {limit} in a prompt; give fewer", param=param)

    def _check_sizes(self, contents: Sequence[bytes]) -> None:
        size, limit = sum(map(len, contents)), self._limits.access.max_bytes
        if size > limit:
            raise LlmcError(f"the request's images and audio have {size} bytes, the limit is "
                            f"{limit}; give fewer or smaller ones")
