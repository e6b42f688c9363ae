"""A replica on GPUs: the ranks of one model, which together are an `Engine`."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.runtime.core.step import EngineLimits, Step, StepOutput
from llmc.runtime.devices import Placement
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.engines.cuda_image_encoder import load_image_encoder
from llmc.runtime.engines.media_encoders import MediaEncoders
from llmc.runtime.engines.remote import RemoteEngine, load_engine
from llmc.runtime.replica import EngineConfig

_POLL = 0.5  # seconds between checks of the first rank while waiting for others
_Rank = CudaEngine | RemoteEngine
_Result = TypeVar("_Result")


class GpuReplica:
    """An `Engine` of one or several GPUs.

    The first rank is in this process, each other in a separate one. All run the same steps and
    sample the same tokens. If one fails, all are ended. Encoders of images and audio run in this
    process, that of images also on the first GPU, before the step that reads their rows is
    submitted.

    Raises:
        LlmcError: see `CudaEngine`.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, placements: list[Placement],
                 config: EngineConfig) -> None:
        options: dict[str, Any] = dict(
            max_batch_size=config.max_batch_size, max_tokens=config.max_num_batched_tokens,
            block_size=config.block_size, kv_cache_tokens=config.kv_cache_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            attention_backend=config.attention_backend, speculates=config.speculates,
            draft=config.draft, prompt_lookup=config.prompt_lookup, max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank)
        self._ranks: list[_Rank] = []
        self._first: CudaEngine
        threads = len(os.sched_getaffinity(0))
        self._media = None if not manifest.media else MediaEncoders(
            manifest, case_dir, threads, None if manifest.image is None else
            load_image_encoder(manifest, case_dir, threads, placements[0].device))
        size = manifest.tp_size
        others: dict[int, RemoteEngine] = {}

        def load(rank: int) -> _Rank:
            device = placements[rank].device
            loaded: _Rank
            if rank:
                loaded = others[rank] = RemoteEngine(case_dir, rank, device, **options)
            else:
                loaded = self._first = load_engine(manifest, rank, case_dir, device, **options)
            self._ranks.append(loaded)  # `_end` ends it if another rank fails
            return loaded

        try:
            self._ranks = ranks = self._on_all(load, size)
            self._others = [others[rank] for rank in range(1, size)]
            if size > 1:
                communicator = self._first.unique_id()
                self._on_all(lambda rank: ranks[rank].join(communicator, rank, size), size)
            blocks = min(self._on_all(lambda rank: ranks[rank].measure(), size))
            self._on_all(lambda rank: ranks[rank].allocate(blocks, show_progress=not rank), size)
        except BaseException:
            self._end()
            raise

    @property
    def limits(self) -> EngineLimits:
        return self._first.limits

    def submit(self, step: Step) -> int:
        """See `Engine`."""
        if self._media is not None:
            step = self._media.fill(step).without_media()
        try:
            for rank in self._others:
                rank.submit(step)
            return self._first.submit(step)
        except BaseException:
            if self._others:  # they have the step, and wait for this rank
                self._end()
            raise

    def collect(self, ticket: int) -> StepOutput:
        """See `Engine`."""
        try:
            waiting = {rank.connection: rank for rank in self._others}
            while waiting:
                ready = {*wait([*waiting], _POLL)}
                for connection in [own for own in waiting if own in ready]:
                    waiting.pop(connection).collect(ticket)
                self._first.check()
            return self._first.collect(ticket)
        except BaseException:
            self._end()
            raise

    def trace(self, step: Step) -> list[dict[str, np.ndarray]]:
        """Execute a step and return the outputs of every node of each rank, by tensor name."""
        return self._on_all(lambda rank: self._ranks[rank].trace(step), len(self._ranks))

    def close(self) -> None:
        """See `Engine`."""
        self._media = None  # frees its memory
        for rank in reversed(self._ranks):
            rank.close()

    def _end(self) -> None:
        """Abort all ranks, including those that wait for a failed one."""
        for rank in [*self._ranks]:
            rank.abort()

    def _on_all(self, work: Callable[[int], _Result], size: int) -> list[_Result]:
        """Run `work(rank)` for all ranks at once; if one fails, abort all."""
        if size == 1:
            return [work(0)]
        with ThreadPoolExecutor(size) as threads:
            futures = [threads.submit(work, rank) for rank in range(size)]
            done, _ = wait_for(futures, return_when=FIRST_EXCEPTION)
            failed = next((error for error in (future.exception() for future in done) if error),
                          None)
            if failed is not None:
                self._end()
                raise failed
            return [future.result() for future in futures]
