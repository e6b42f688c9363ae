"""One rank of a case directory, in the process of a vLLM worker."""

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
    """An engine (see `Engine`) whose KV cache is allocated after vLLM has determined its size."""

    @property
    def limits(self) -> EngineLimits:
        ...

    def measure(self) -> int:
        """Return the number of KV-cache blocks that fit into memory."""
        ...

    def allocate(self, num_blocks: int) -> None:
        ...

    def submit(self, step: Step) -> int:
        ...

    def collect(self, ticket: int) -> StepOutput:
        ...

    def close(self) -> None:
        ...


def block_bytes(manifest: Manifest, block_size: int, draft: bool) -> int:
    """Bytes of a KV-cache block on the rank with the most heads.

    Args:
        draft: whether the draft model is loaded.
    """
    widest = max(sum(layer.token_size for layer in (*chip.cache, *(
        chip.draft_layers if draft else ()))) for chip in manifest.chips)
    return widest * DTYPE_BYTES[manifest.kv_dtype] * block_size


def load_rank(manifest: Manifest, case_dir: Path, rank: int, device: int, config: EngineConfig,
              group: torch.distributed.ProcessGroup) -> Rank:
    """Load the engine of a rank on its share of the CPU cores, or on a GPU.

    Args:
        group: gloo group of all ranks.

    Raises:
        LlmcError: see `LLM`.
    """
    if not manifest.target.spec.gpu:
        return CpuRank(manifest, case_dir, rank, config, group)
    from llmc.runtime.engines.remote import load_engine

    engine = load_engine(manifest, rank, case_dir, device, max_batch_size=config.max_batch_size,
                         max_tokens=config.max_num_batched_tokens, block_size=config.block_size,
                         kv_cache_tokens=config.kv_cache_tokens,
                         gpu_memory_utilization=config.gpu_memory_utilization,
                         speculates=config.speculates)
    if manifest.tp_size > 1:
        names = [engine.unique_id() if rank == 0 else b""]
        torch.distributed.broadcast_object_list(names, group_src=0, group=group)
        engine.join(names[0], rank, manifest.tp_size)
    return engine


def _ranks_on_this_host(group: torch.distributed.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group whose processes run on this host, in order."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    hosts = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(hosts, boot_id, group=group)
    return [rank for rank, host in enumerate(hosts) if host == boot_id]


class CpuRank:
    """A `Rank` on CPU cores; `allocate` loads the ONNX Runtime sessions."""

    def __init__(self, manifest: Manifest, case_dir: Path, rank: int, config: EngineConfig,
                 group: torch.distributed.ProcessGroup) -> None:
        self._manifest, self._case_dir, self._rank = manifest, case_dir, rank
        here = _ranks_on_this_host(group)
        self._placement = place(manifest, None, num_ranks=len(here))[0][here.index(rank)]
        self._communicator = ProcessCommunicator(manifest.tp_size, group)
        self.limits = cpu_limits(manifest, config)
        self._engine: HostSampling | None = None

    def measure(self) -> int:
        return self.limits.num_blocks

    def allocate(self, num_blocks: int) -> None:
        self.limits = replace(self.limits, num_blocks=num_blocks)
        chip = CpuEngine(self._manifest, self._manifest.chips[self._rank], self._case_dir,
                         self._placement, self._communicator, len(self._placement.cores),
                         self.limits)
        self._engine = HostSampling(_Logits(chip, self._manifest.dims.vocab_size), self.limits,
                                    chip.propose if self.limits.proposes else None)

    def submit(self, step: Step) -> int:
        assert self._engine is not None, "allocate must be called first"
        return self._engine.submit(step)

    def collect(self, ticket: int) -> StepOutput:
        assert self._engine is not None, "allocate must be called first"
        return self._engine.collect(ticket)

    def close(self) -> None:
        self._engine = None


class _Logits:
    """`Ranks` with one rank, whose logits include those of all ranks."""

    def __init__(self, chip: CpuEngine, vocab_size: int) -> None:
        self._chip, self._vocab_size = chip, vocab_size

    def compute(self, step: Step) -> np.ndarray:
        return self._chip.compute(step)[:, :self._vocab_size]

    def close(self) -> None:
        pass


class ProcessCommunicator(Communicator):
    """Collectives between processes, bit-identical to `Communicator`'s between threads."""

    def __init__(self, size: int, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(size)
        self._group = group

    def exchange(self, rank: int, array: np.ndarray, alike: tuple[int, ...]) -> list[np.ndarray]:
        """Return the arrays of all ranks; all have the same shape (heads and vocabulary pad)."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor, group=self._group)
        return [part.numpy() for part in parts]
