"""One rank of a case directory, in the process of one of vLLM's workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed

from llmc.artifacts.manifest import DTYPE_BYTES, Manifest
from llmc.runtime.collectives import Communicator
from llmc.runtime.core.step import EngineLimits, Step, StepOutput
from llmc.runtime.devices import place
from llmc.runtime.engines.cpu import CpuEngine
from llmc.runtime.engines.host import HostSampling
from llmc.runtime.replica import EngineConfig, cpu_limits


class Rank(Protocol):
    """An engine (see `Engine`) whose KV cache is made once vLLM has said how large it is."""

    @property
    def limits(self) -> EngineLimits:
        ...

    def measure(self) -> int:
        """Blocks that there is room for."""
        ...

    def allocate(self, num_blocks: int) -> None:
        ...

    def submit(self, step: Step) -> int:
        ...

    def collect(self, ticket: int) -> StepOutput:
        ...

    def close(self) -> None:
        ...


def block_bytes(manifest: Manifest, block_size: int) -> int:
    """Bytes of a block of the KV cache, on the rank that has the most heads."""
    widest = max(sum(layer.token_size for layer in chip.cache) for chip in manifest.chips)
    return widest * DTYPE_BYTES[manifest.kv_dtype] * block_size


def load_rank(manifest: Manifest, case_dir: Path, rank: int, device: int, room: EngineConfig,
              group: torch.distributed.ProcessGroup) -> Rank:
    """The engine of a rank, on its share of the cores, or on this GPU.

    Args:
        group: all ranks, on gloo.

    Raises:
        LlmcError: see `LLM`.
    """
    if not manifest.target.spec.gpu:
        return CpuRank(manifest, case_dir, rank, room, group)
    from llmc.runtime.engines.remote import load_engine

    engine = load_engine(manifest, rank, case_dir, device, max_batch_size=room.max_batch_size,
                         max_tokens=room.max_num_batched_tokens, block_size=room.block_size,
                         kv_cache_tokens=room.kv_cache_tokens,
                         gpu_memory_utilization=room.gpu_memory_utilization)
    if manifest.tp_size > 1:
        names = [engine.unique_id() if rank == 0 else b""]
        torch.distributed.broadcast_object_list(names, group_src=0, group=group)
        engine.join(names[0], rank, manifest.tp_size)
    return engine


def _ranks_on_this_host(group: torch.distributed.ProcessGroup) -> list[int]:
    """Ranks of a gloo group whose processes run on this host, in order."""
    own = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    hosts = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(hosts, own, group=group)
    return [rank for rank, host in enumerate(hosts) if host == own]


class CpuRank:
    """See `Rank`. Its ONNX Runtime is loaded with the KV cache."""

    def __init__(self, manifest: Manifest, case_dir: Path, rank: int, room: EngineConfig,
                 group: torch.distributed.ProcessGroup) -> None:
        self._manifest, self._case_dir, self._rank = manifest, case_dir, rank
        here = _ranks_on_this_host(group)
        self._placement = place(manifest, None, num_ranks=len(here))[0][here.index(rank)]
        self._communicator = ProcessCommunicator(manifest.tp_size, group)
        self.limits = cpu_limits(manifest, room)
        self._engine: HostSampling | None = None

    def measure(self) -> int:
        return self.limits.num_blocks

    def allocate(self, num_blocks: int) -> None:
        self.limits = replace(self.limits, num_blocks=num_blocks)
        chip = CpuEngine(self._manifest, self._manifest.chips[self._rank], self._case_dir,
                         self._placement, self._communicator, len(self._placement.cores),
                         self.limits)
        self._engine = HostSampling(_Logits(chip, self._manifest.dims.vocab_size), self.limits)

    def submit(self, step: Step) -> int:
        assert self._engine is not None, "allocate comes first"
        return self._engine.submit(step)

    def collect(self, ticket: int) -> StepOutput:
        assert self._engine is not None, "allocate comes first"
        return self._engine.collect(ticket)

    def close(self) -> None:
        self._engine = None


class _Logits:
    """See `Ranks`: of one rank, whose logits are all ranks'."""

    def __init__(self, chip: CpuEngine, vocab_size: int) -> None:
        self._chip, self._vocab_size = chip, vocab_size

    def compute(self, step: Step) -> np.ndarray:
        return self._chip.compute(step)[:, :self._vocab_size]

    def close(self) -> None:
        pass


class ProcessCommunicator(Communicator):
    """Combines arrays of processes as `Communicator` does those of threads, so that what comes out
    is the same to the last bit.
    """

    def __init__(self, size: int, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(size)
        self._group = group

    def exchange(self, rank: int, array: np.ndarray, alike: tuple[int, ...]) -> list[np.ndarray]:
        """What every rank brought; all have this shape, as heads and padded vocabularies do."""
        own = torch.from_numpy(np.ascontiguousarray(array))
        parts = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(parts, own, group=self._group)
        return [part.numpy() for part in parts]
