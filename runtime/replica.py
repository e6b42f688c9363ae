"""One running copy of a model: its ranks, each with an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmc.runtime.attention.metadata import BeamStep, PackedBatch
from llmc.runtime.collectives import Communicator
from llmc.runtime.decoding.beam_search import Candidates
from llmc.runtime.decoding.sampling import Choices, Draws
from llmc.runtime.devices import Placement, pin
from llmc.runtime.engines.cpu import CpuEngine, check_ops
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.engines.remote import RemoteEngine, load_engine
from llmc.runtime.manifest import Manifest

_GpuEngine = CudaEngine | RemoteEngine
_AnyEngine = CpuEngine | _GpuEngine
_Result = TypeVar("_Result")


def on_gpus(manifest: Manifest) -> bool:
    """Whether the model's devices are GPUs, which choose tokens themselves."""
    return manifest.target.kind in ("cuda", "tensorrt")


class Replica:
    """The ranks of one model.

    On CPU they are threads of this process, a single unpinned one the caller's. On GPUs the first
    is a thread of this process, and each other has a process of its own.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, placements: list[Placement],
                 max_batch_size: int, max_tokens: int) -> None:
        self._vocab = manifest.dims.vocab_size
        self.on_gpus = on_gpus(manifest)
        self._communicator = Communicator(manifest.tp_size)
        self._failure: BaseException | None = None
        self._threads = [ThreadPoolExecutor(1, f"llmc-rank{rank}", pin, (placement,))
                         for rank, placement in enumerate(placements)
                         if manifest.tp_size > 1 or placement.pinned]

        # Each rank's own thread works too.
        threads = sum(len(placement.cores) for placement in placements) - manifest.tp_size + 1

        def load(rank: int) -> _AnyEngine:
            if self.on_gpus:
                limits = placements[rank].device, max_batch_size, max_tokens
                return RemoteEngine(case_dir, rank, *limits) if rank else \
                    load_engine(manifest, rank, case_dir, *limits)
            return CpuEngine(manifest, manifest.chips[rank], case_dir, placements[rank],
                             self._communicator, threads, max_batch_size)

        self._engines: list[_AnyEngine] = []
        try:
            self._engines = self._on_all_ranks(load)
            if not self.on_gpus:
                check_ops(manifest, [engine for engine in self._engines
                                     if isinstance(engine, CpuEngine)])
            if self.on_gpus and manifest.tp_size > 1:
                first = self._engines[0]
                assert isinstance(first, CudaEngine)
                communicator = first.unique_id()
                self._on_all_ranks(lambda rank: self._gpu(rank).join(
                    communicator, rank, manifest.tp_size))
        except BaseException:
            self.close()
            raise

    def run(self, batch: PackedBatch) -> np.ndarray:
        """Execute a step on all ranks: logits float32 [num_logits, vocab_size]."""
        return self._on_each(lambda engine: engine.run(batch))[0][:, :self._vocab]

    def encode(self, batch: PackedBatch, rows: Sequence[int]) -> None:
        """Run the encoder on all ranks: see `Engine`."""
        self._on_each(lambda engine: engine.encode(batch, rows))

    def decode(self, batch: PackedBatch, draws: Draws, end_ids: Sequence[int], steps: int) -> \
            Choices:
        """Steps whose tokens GPUs choose: see `CudaEngine.decode`."""
        chosen = self._on_gpus(lambda engine: engine.decode(batch, draws, end_ids, steps))[0]
        assert chosen is not None  # of the first rank, whose engine is in this process
        return chosen

    def likeliest(self, batch: PackedBatch, count: int) -> Candidates:
        """A step on GPUs: the likeliest tokens [num_logits, count] of each row of its logits."""
        found = self._on_gpus(lambda engine: engine.likeliest(batch, count))[0]
        assert found is not None
        return found

    def follow(self, step: BeamStep) -> Candidates:
        """A step of beam search on GPUs: candidates [batch * beam, count]."""
        found = self._on_gpus(lambda engine: engine.follow(step))[0]
        assert found is not None
        return found

    def trace(self, batch: PackedBatch) -> list[dict[str, np.ndarray]]:
        """A step on GPUs, and every value that each rank makes in it, by name."""
        return self._on_gpus(lambda engine: engine.trace(batch))

    def _gpu(self, rank: int) -> _GpuEngine:
        engine = self._engines[rank]
        assert isinstance(engine, _GpuEngine)
        return engine

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy a sequence's cache to another row on all ranks."""
        for engine in self._engines:
            engine.copy_row(source, target, length)

    def close(self) -> None:
        """End the rank threads and processes."""
        for thread in self._threads:
            thread.shutdown()
        for engine in self._engines:
            if isinstance(engine, RemoteEngine):
                engine.close()

    def _on_gpus(self, work: Callable[[_GpuEngine], _Result]) -> list[_Result]:
        """`_on_each` of engines on GPUs."""
        def on_gpu(engine: _AnyEngine) -> _Result:
            assert isinstance(engine, _GpuEngine)
            return work(engine)

        return self._on_each(on_gpu)

    def _on_each(self, work: Callable[[_AnyEngine], _Result]) -> list[_Result]:
        """Do this with every rank's engine; where one fails, wake the ranks that wait for it."""
        if not self._threads:
            return [work(self._engines[0])]
        return self._on_all_ranks(lambda rank: self._guard(work, self._engines[rank]))

    def _guard(self, work: Callable[[_AnyEngine], _Result], engine: _AnyEngine) -> _Result:
        """Do one rank's work; where it fails, wake the ranks that wait for it."""
        try:
            return work(engine)
        except BaseException as error:
            if self._failure is None:  # what the others then say is a consequence
                self._failure = error
            self._abort()
            raise

    def _abort(self) -> None:
        self._communicator.abort()
        for engine in self._engines:
            if isinstance(engine, _GpuEngine):
                engine.abort()

    def _on_all_ranks(self, work: Callable[[int], _Result]) -> list[_Result]:
        """Run `work(rank)` for every rank in its thread; raise the first real error."""
        if not self._threads:
            return [work(0)]
        futures: list[Future[_Result]] = []
        self._failure = None
        try:
            futures += (thread.submit(work, rank) for rank, thread in enumerate(self._threads))
            errors = [error for error in (future.exception() for future in futures) if error]
            if errors:
                raise self._failure or errors[0]
        except BaseException:  # an interrupt too: ranks must not wait for one another for ever
            self._abort()
            wait(futures)
            self._communicator.reset()
            raise
        return [future.result() for future in futures]
