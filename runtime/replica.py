"""A replica of a model: its ranks, each on a device, which together are an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmc.artifacts.manifest import DraftInfo, Manifest
from llmc.errors import LlmcError
from llmc.memory import memory_of_machine
from llmc.runtime.collectives import Communicator
from llmc.runtime.core.step import Engine, EngineLimits, Step, StepOutput
from llmc.runtime.devices import Placement, pin, place
from llmc.runtime.engines import BLOCK_SIZE, MAX_LOGITS, MAX_SCORED
from llmc.runtime.engines.cpu import MAX_CHUNK, SCORE_BYTES, CpuEngine, check_ops
from llmc.runtime.engines.draft_step import lookahead
from llmc.runtime.engines.host import HostSampling
from llmc.runtime.engines.media_encoders import MediaEncoders
from llmc.runtime.speculation.config import MAX_DRAFTS

_SCORED_BYTES = 2**26  # of logits of prompt tokens in a step; ranks may hold them twice
_SHARE = 4  # a CPU's free memory is divided by this to get the memory for blocks
# Peak activations per token of all ranks, in float32 values per hidden_size, including memory that
# allocators retain. bench/memory_cpu.py gives 47 to 56 for SmolLM2-135M on one rank, and 127 to 239
# on three: peak less loaded and less the KV cache, over a chunk.
_ACTIVATIONS = 256
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EngineConfig:
    """Capacity and backend of an engine; see `LLM`."""

    max_batch_size: int
    max_num_batched_tokens: int
    block_size: int = BLOCK_SIZE
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    attention_backend: str | None = None
    speculates: bool = False
    draft: bool = False  # whether to load the draft model
    max_loras: int = 0
    max_lora_rank: int = 0
    prompt_lookup: bool = False  # whether engines that can look drafts up themselves do so


def find_devices(manifest: Manifest, wish: Sequence[int] | None) -> list[list[Placement]]:
    """Devices of each replica; see `LLM`.

    Raises:
        LlmcError: a device does not exist, or the target has no engine.
    """
    manifest.target.spec.require_engine()
    if not manifest.target.spec.gpu:
        return place(manifest, wish)
    from llmc.runtime.engines.cuda import device_count

    return place(manifest, wish, device_count())


def load_replica(manifest: Manifest, case_dir: Path, placements: list[Placement],
                 config: EngineConfig) -> Engine:
    """Load a replica on these devices.

    Raises:
        LlmcError: see `LLM`.
    """
    if not manifest.target.spec.gpu:
        if config.attention_backend is not None:
            raise LlmcError(f"attention_backend '{config.attention_backend}' is for target cuda; "
                            f"on target {manifest.target.kind} leave it out")
        limits = cpu_limits(manifest, config)
        ranks = CpuReplica(manifest, case_dir, placements, limits)
        return HostSampling(ranks, limits, ranks.propose if limits.proposes else None, ranks.pool)
    from llmc.runtime.gpus import GpuReplica

    return GpuReplica(manifest, case_dir, placements, config)


def token_bytes(manifest: Manifest, draft: bool = False) -> int:
    """Bytes of KV cache per token, on all chips of a CPU together.

    Args:
        draft: whether the draft model is loaded.
    """
    return sum(4 * layer.token_size for chip in manifest.chips
               for layer in (*chip.cache, *(chip.draft_layers if draft else ())))


def step_bytes(manifest: Manifest, config: EngineConfig) -> int:
    """Upper bound of a step's bytes on all chips of a CPU together, without the KV cache.

    It is the sum of a chunk's activations and attention scores, and of logits.
    """
    dims = manifest.dims
    chunk = max(min(config.max_num_batched_tokens, MAX_CHUNK), config.max_batch_size)
    logits = max(_max_scored(manifest), config.max_batch_size) * dims.padded_vocab_size
    keys = max(dims.max_seq_len, manifest.mem_max_seq_len)
    scores = 4 * 3 * (dims.num_heads or 0) * chunk * keys
    return 4 * (_ACTIVATIONS * dims.hidden_size * chunk + 2 * logits) + min(scores, SCORE_BYTES)


def adapter_bytes(manifest: Manifest, config: EngineConfig) -> int:
    """Bytes of all slots of adapters, on all chips of a CPU together."""
    return sum(4 * config.max_loras * config.max_lora_rank * len(layer.modules)
               * (layer.num_experts or 1) * (layer.in_features + layer.out_features)
               for chip in manifest.chips for layer in chip.lora)


def _max_scored(manifest: Manifest) -> int:
    return max(MAX_SCORED, min(MAX_LOGITS, _SCORED_BYTES // (4 * manifest.dims.padded_vocab_size)))


def cpu_limits(manifest: Manifest, config: EngineConfig) -> EngineLimits:
    """Capacities of a replica on a CPU.

    Without kv_cache_tokens, blocks get a quarter of the free memory that steps leave. Sequences'
    rows hold another copy of the blocks.

    Raises:
        LlmcError: kv_cache_tokens does not fit in memory.
    """
    longest, each = manifest.dims.max_seq_len, max(token_bytes(manifest, config.draft), 1)
    rows, taken = config.max_batch_size * longest, step_bytes(manifest, config)
    adapters = adapter_bytes(manifest, config)
    free = max(memory_of_machine("MemAvailable") - taken - adapters, 0)
    tokens = config.kv_cache_tokens
    if tokens is None:
        tokens = max(min(rows, max(free // (_SHARE * each), longest), free // (2 * each)), 1)
    elif (size := (tokens + min(tokens, rows)) * each) > free:
        slots = f", and the slots of adapters {adapters / 1e9:.1f} GB" if adapters else ""
        raise LlmcError(f"a KV cache of {tokens} tokens takes {size / 1e9:.1f} GB with the rows of "
                        f"its sequences, and a step up to {taken / 1e9:.1f} GB{slots}; this "
                        f"machine has {(free + taken + adapters) / 1e9:.1f} GB free of "
                        f"{memory_of_machine('MemTotal') / 1e9:.1f} GB; lower kv_cache_tokens"
                        f"{', or leave out the draft model' if config.draft else ''}")
    return EngineLimits(
        num_blocks=-(-tokens // config.block_size), block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens, max_slots=config.max_batch_size,
        max_logits=MAX_LOGITS, ahead=1, max_scored=_max_scored(manifest),
        max_drafts=_max_drafts(manifest.draft if config.draft else None) if not manifest.pooling
        and all(chip.verifies_drafts for chip in manifest.chips) else 0,
        proposes=config.draft,
        lookahead=lookahead(manifest.draft if config.draft else None, manifest.chips[0]),
        keeps_states=any(chip.states for chip in manifest.chips), whole=manifest.is_whole,
        max_loras=config.max_loras, max_lora_rank=config.max_lora_rank,
        applies_rules=not manifest.target.spec.samples_on_device)


def _max_drafts(draft: DraftInfo | None) -> int:
    """Drafts of a sequence in a step, given the loaded draft model."""
    of_model = None if draft is None else draft.max_drafts
    return min(MAX_DRAFTS, of_model or MAX_DRAFTS)


class CpuReplica:
    """The ranks of one model on CPU cores.

    Each rank has a thread of this process; a single unpinned rank runs in the caller's.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, placements: list[Placement],
                 limits: EngineLimits) -> None:
        self._vocab = manifest.dims.vocab_size
        self._communicator = Communicator(manifest.tp_size)
        self._failure: BaseException | None = None
        self._threads = [ThreadPoolExecutor(1, f"llmc-rank{rank}", pin, (placement,))
                         for rank, placement in enumerate(placements)
                         if manifest.tp_size > 1 or placement.pinned]

        # Each rank's calling thread computes as well.
        threads = sum(len(placement.cores) for placement in placements) - manifest.tp_size + 1

        engine: type[CpuEngine] = manifest.target.spec.load_engine_class()

        def load(rank: int) -> CpuEngine:
            return engine(manifest, manifest.chips[rank], case_dir, placements[rank],
                          self._communicator, threads, limits)

        self._engines: list[CpuEngine] = []
        try:
            self._engines = self._on_all_ranks(load)
            self._media = None if not manifest.media else \
                MediaEncoders(manifest, case_dir, sum(len(own.cores) for own in placements))
            used = {name for own in (*self._engines, self._media) if own for name in own.ops}
            check_ops(manifest, used, limits.proposes)
        except BaseException:
            self.close()
            raise

    def compute(self, step: Step) -> np.ndarray:
        """Execute a step on all ranks; returns logits, float32 [num_logits, vocab_size]."""
        if self._media is not None:
            step = self._media.fill(step)
        return self._on_each(lambda engine: engine.compute(step))[0][:, :self._vocab]

    def pool(self, step: Step) -> list[np.ndarray]:
        """Execute a step of a model with pooled outputs on all ranks."""
        return self._on_each(lambda engine: engine.pool(step))[0]

    def propose(self, step: Step, output: StepOutput) -> np.ndarray:
        """Run the draft model on all ranks; see `HostSampling`."""
        return self._on_each(lambda engine: engine.propose(step, output))[0]

    def close(self) -> None:
        """End the rank threads."""
        for thread in self._threads:
            thread.shutdown()

    def _on_each(self, work: Callable[[CpuEngine], _Result]) -> list[_Result]:
        """Run `work(engine)` on every rank; if one fails, wake the ranks that wait for it."""
        if not self._threads:
            return [work(self._engines[0])]
        return self._on_all_ranks(lambda rank: self._guard(work, self._engines[rank]))

    def _guard(self, work: Callable[[CpuEngine], _Result], engine: CpuEngine) -> _Result:
        """Run one rank's work; if it fails, wake the ranks that wait for it."""
        try:
            return work(engine)
        except BaseException as error:
            if self._failure is None:  # errors of other ranks are consequences
                self._failure = error
            self._communicator.abort()
            raise

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
        except BaseException:  # interrupts included: no rank may wait forever
            self._communicator.abort()
            wait(futures)
            self._communicator.reset()
            raise
        return [future.result() for future in futures]
