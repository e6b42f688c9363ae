"""One running copy of a model: its ranks, each with an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.collectives import Aborted, Communicator
from llmc.runtime.devices import Placement, pin
from llmc.runtime.engines import Engine
from llmc.runtime.engines.cpu import CpuEngine
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.manifest import Manifest


class Replica:
    """The ranks of one model as threads of this process; a single unpinned rank is the caller's."""

    def __init__(self, manifest: Manifest, case_dir: Path, placements: list[Placement],
                 max_batch_size: int, max_tokens: int) -> None:
        self._vocab = manifest.dims.vocab_size
        self._communicator = Communicator(manifest.tp_size)
        self._threads = [ThreadPoolExecutor(1, f"llmc-rank{rank}", pin, (placement,))
                         for rank, placement in enumerate(placements)
                         if manifest.tp_size > 1 or placement.pinned]

        # Each rank's own thread works too.
        threads = sum(len(placement.cores) for placement in placements) - manifest.tp_size + 1

        def load(rank: int) -> Engine:
            if manifest.target.kind == "cuda":
                return CudaEngine(manifest, manifest.chips[rank], case_dir, placements[rank].device,
                                  max_batch_size, max_tokens)
            return CpuEngine(manifest, manifest.chips[rank], case_dir, placements[rank],
                             self._communicator, threads, max_batch_size)

        self._engines: list[Engine] = []
        try:
            self._engines = self._on_all_ranks(load)
        except BaseException:
            self.close()
            raise

    def run(self, batch: PackedBatch) -> np.ndarray:
        """Execute a step on all ranks: logits float32 [num_logits, vocab_size]."""
        if not self._threads:
            return self._engines[0].run(batch)[:, :self._vocab]
        logits = self._on_all_ranks(lambda rank: self._run_rank(rank, batch))
        return logits[0][:, :self._vocab]

    def decode(self, tokens: Sequence[int], past_lens: Sequence[int], steps: int) -> \
            np.ndarray | None:
        """Several greedy steps at once: int64 [steps, batch], or None where the engine cannot."""
        return self._engines[0].decode(tokens, past_lens, steps)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy a sequence's cache to another row on all ranks."""
        for engine in self._engines:
            engine.copy_row(source, target, length)

    def close(self) -> None:
        """End the rank threads."""
        for thread in self._threads:
            thread.shutdown()

    def _run_rank(self, rank: int, batch: PackedBatch) -> np.ndarray:
        try:
            return self._engines[rank].run(batch)
        except BaseException:
            self._communicator.abort()
            raise

    def _on_all_ranks(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work(rank)` for every rank in its thread; raise the first real error."""
        if not self._threads:
            return [work(0)]
        futures: list[Future] = []
        try:
            futures += (thread.submit(work, rank) for rank, thread in enumerate(self._threads))
            errors = [error for error in (future.exception() for future in futures) if error]
            if errors:
                raise next((e for e in errors if not isinstance(e, Aborted)), errors[0])
        except BaseException:  # an interrupt too: ranks must not wait for one another for ever
            self._communicator.abort()
            wait(futures)
            self._communicator.reset()
            raise
        return [future.result() for future in futures]
