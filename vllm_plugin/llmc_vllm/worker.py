"""A vLLM worker that runs one rank of a case directory."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from vllm.distributed import (
    ensure_model_parallel_initialized,
    get_tp_group,
    init_distributed_environment,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    LogprobsLists,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from llmc.artifacts.manifest import verify_files
from llmc.runtime.core.step import Step
from llmc.runtime.replica import EngineConfig
from llmc_vllm.drafts import Drafter, by_model, check_limits
from llmc_vllm.model import read_copy, view
from llmc_vllm.options import spans_hosts
from llmc_vllm.parameters import sampler
from llmc_vllm.ranks import Rank, block_bytes, load_rank
from llmc_vllm.sequences import (
    Part,
    Pending,
    Sequences,
    TokenLogprobs,
    grammar_masks,
    with_masks,
)

_CACHE = "llmc.kv_cache"  # stands for the caches of all layers of a rank


def _logical_device_id(parallel: Any, local_rank: int) -> int:
    """Return vLLM's logical device id of a rank, and publish the GPUs that vLLM assigned.

    vLLM's process groups create an NCCL communicator on the GPU that the id stands for.

    Args:
        parallel: vLLM's ParallelConfig.
        local_rank: index of the rank among those of its replica on this host.
    """
    if parallel.distributed_executor_backend != "external_launcher" and \
            parallel.data_parallel_backend != "ray" and not spans_hosts(parallel):
        replica = parallel.data_parallel_rank_local  # index among those on this host
        if replica is None:
            replica = parallel.data_parallel_index
        local_rank += replica * parallel.world_size
    if parallel.assigned_physical_gpu_ids is not None:
        set_assigned_physical_gpu_ids(parallel.assigned_physical_gpu_ids)
    return local_rank


class LlmcWorker(WorkerBase):
    """See `vllm.v1.worker.worker_base.WorkerBase`.

    `execute_model` plans a scheduled step and `sample_tokens` runs it, because vLLM computes the
    token masks of structured output in between. With async scheduling, a step is planned and
    submitted while the previous one runs. With drafts, scheduling is not async, and
    `take_draft_token_ids` follows.
    """

    local_rank: int
    _rank: Rank
    _sequences: Sequences
    _parts: list[Part]
    _scheduled: Any
    _drafter: Drafter | None
    _drafts: dict[str, list[int]]
    _in_flight: deque[_Output]

    def init_device(self) -> None:
        parallel = self.parallel_config
        self.device = torch.device("cpu")
        self.local_rank = _logical_device_id(parallel, self.local_rank)
        init_distributed_environment(parallel.world_size, self.rank, self.distributed_init_method,
                                     self.local_rank, "gloo")
        ensure_model_parallel_initialized(parallel.tensor_parallel_size,
                                          parallel.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        case_dir, self._manifest = read_copy(self.model_config.hf_config)
        parallel, cache, scheduling = (self.parallel_config, self.cache_config,
                                       self.scheduler_config)
        if spans_hosts(parallel):
            verify_files(self._manifest, case_dir, ranks=[self.rank])
        if parallel.data_parallel_backend == "ray":
            # The engine process of the replica, on any of its hosts, reads the tokenizer.
            view(case_dir, self._manifest, Path(self.model_config.model).parent)
        device = current_platform.logical_device_id_to_visible_device_id(self.local_rank) \
            if self._manifest.target.spec.gpu else 0
        draft = by_model(self.vllm_config)
        self._block_bytes = block_bytes(self._manifest, cache.block_size, draft)
        cache_bytes = cache.kv_cache_memory_bytes
        if cache.num_gpu_blocks_override:
            cache_bytes = cache.num_gpu_blocks_override * self._block_bytes
        self._rank = load_rank(
            self._manifest, case_dir, self.rank, device, EngineConfig(
                scheduling.max_num_seqs,
                max(scheduling.max_num_batched_tokens, scheduling.max_num_seqs), cache.block_size,
                cache_bytes and cache_bytes // self._block_bytes * cache.block_size,
                cache.gpu_memory_utilization,
                speculates=self.vllm_config.speculative_config is not None, draft=draft),
            get_tp_group().cpu_group)
        check_limits(self.vllm_config, self._manifest, self._rank.limits)

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        return {_CACHE: FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, dtype=torch.uint8,
            head_size=self._block_bytes // self.cache_config.block_size // 2)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        return self._rank.measure() * self._block_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._rank.allocate(kv_cache_config.num_blocks)
        self._sequences = Sequences(
            self._rank.limits, self._manifest.dims.vocab_size,
            functools.partial(sampler, model_seed=self.model_config.seed))
        self._drafter = None if self.vllm_config.speculative_config is None \
            or by_model(self.vllm_config) else Drafter(self.vllm_config, self._rank.limits)
        self._drafts = {}
        self._in_flight = deque()

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Do nothing: the model is compiled, and `allocate` has run the timings."""
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model_inspection(self) -> str:
        manifest = self._manifest
        return (f"{manifest.source.architecture} by llmc, {manifest.tp_size} x "
                f"{manifest.target.kind}")

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        while len(self._in_flight) > 1:  # vLLM gets the outputs of one rank only
            self._in_flight.popleft().get_output()
        self._parts = self._sequences.plan(scheduler_output)
        self._scheduled = scheduler_output
        return None if self._parts else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output = _Output(self._rank, list(self._scheduled.num_scheduled_tokens),
                         self._manifest.dims.vocab_size)
        masks = grammar_masks(grammar_output, self._scheduled.scheduled_spec_decode_tokens)
        for part in self._parts:
            output.submit(part, with_masks(part, masks))
        if not self.scheduler_config.async_scheduling:
            result = output.get_output()
            self._drafts = output.drafts
            return result
        self._in_flight.append(output)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if by_model(self.vllm_config):
            return DraftTokenIds(list(self._drafts), list(self._drafts.values()))
        if self._drafter is None:
            return None
        drafts = self._drafter.propose([seq for part in self._parts for seq in part.chosen],
                                       self._scheduled.num_spec_tokens_to_schedule)
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def shutdown(self) -> None:
        if hasattr(self, "_rank"):
            self._rank.close()


class _Output(AsyncModelRunnerOutput):
    """Output of a step of vLLM, which `get_output` waits for."""

    def __init__(self, rank: Rank, request_ids: list[str], vocab_size: int) -> None:
        self._rank, self._request_ids = rank, request_ids
        self._tokens: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}  # of the compiled draft model, by request id
        self._logprobs = TokenLogprobs(vocab_size)
        self._last: tuple[int, Pending] | None = None
        self._lock = Lock()

    def submit(self, part: Part, step: Step) -> None:
        """Submit the next part, after the previous part has ended."""
        self._collect()
        ticket = self._rank.submit(step)
        self._last = ticket, Pending(part)

    def _collect(self) -> None:
        if self._last is None:
            return
        (ticket, pending), self._last = self._last, None
        sampled = self._rank.collect(ticket)
        self._tokens |= pending.settle(sampled)
        self._logprobs.add(pending.part, sampled)
        if sampled.drafts is not None:
            self.drafts |= {own.request_id: row[row >= 0].tolist() for own, row in zip(
                pending.part.chosen, sampled.drafts, strict=True)}

    def get_output(self) -> ModelRunnerOutput:
        with self._lock:
            self._collect()
        names, rows = self._request_ids, self._logprobs.rows(self._request_ids)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[self._tokens.get(name, []) for name in names],
            logprobs=None if rows is None else LogprobsLists(*rows))
