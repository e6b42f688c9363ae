"""One of vLLM's workers: a rank of a case directory, on vLLM's schedule and in vLLM's blocks."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import (
    ensure_model_parallel_initialized,
    get_tp_group,
    init_distributed_environment,
)
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from llmc.runtime.manifest import read_manifest
from llmc.runtime.replica import Room
from llmc_vllm.model import CASE_DIR
from llmc_vllm.parameters import sampler
from llmc_vllm.ranks import Rank, block_bytes, load_rank
from llmc_vllm.sequences import Planned, Sequences, grammar_masks, logprobs

_CACHE = "llmc.kv_cache"  # of all layers of a rank, as one


class LlmcWorker(WorkerBase):
    """See `vllm.v1.worker.worker_base.WorkerBase`.

    A step is planned by `execute_model` and run by `sample_tokens`, as vLLM makes the masks of
    structured output between them.
    """

    _rank: Rank
    _sequences: Sequences
    _planned: Planned | None = None

    def init_device(self) -> None:
        parallel = self.parallel_config
        self._device = self.local_rank
        if parallel.distributed_executor_backend not in ("ray", "external_launcher"):
            self._device += (parallel.data_parallel_rank_local or 0) * parallel.world_size
        self.device = torch.device("cpu")
        init_distributed_environment(parallel.world_size, self.rank, self.distributed_init_method,
                                     self.local_rank, "gloo")
        ensure_model_parallel_initialized(parallel.tensor_parallel_size,
                                          parallel.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        case_dir = Path(getattr(self.model_config.hf_config, CASE_DIR))
        self._manifest = read_manifest(case_dir)
        cache, scheduling = self.cache_config, self.scheduler_config
        self._block_bytes = block_bytes(self._manifest, cache.block_size)
        wish = cache.kv_cache_memory_bytes
        if cache.num_gpu_blocks_override:
            wish = cache.num_gpu_blocks_override * self._block_bytes
        self._rank = load_rank(
            self._manifest, case_dir, self.rank, self._device, Room(
                scheduling.max_num_seqs,
                max(scheduling.max_num_batched_tokens, scheduling.max_num_seqs), cache.block_size,
                wish and wish // self._block_bytes * cache.block_size,
                cache.gpu_memory_utilization),
            get_tp_group().cpu_group)

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
        limits, vocab_size = self._rank.limits, self._manifest.dims.vocab_size
        self._sequences = Sequences(
            limits.max_slots, vocab_size,
            functools.partial(sampler, model_seed=self.model_config.seed),
            longest_first=limits.longest_first)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """All is compiled, and `allocate` has timed what it times."""
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model(self) -> None:
        return None

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        self._planned = self._sequences.plan(scheduler_output)
        return EMPTY_MODEL_RUNNER_OUTPUT if self._planned is None else None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        planned, self._planned = self._planned, None
        assert planned is not None, "execute_model comes first"
        step = replace(planned.step, masks=grammar_masks(planned, grammar_output))
        sampled = self._rank.collect(self._rank.submit(step))
        tokens = self._sequences.append(planned, sampled)
        found = logprobs(planned, sampled, self._manifest.dims.vocab_size)
        names = planned.request_ids
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[tokens[name]] if name in tokens else [] for name in names],
            logprobs=None if found is None else LogprobsLists(*found))

    def shutdown(self) -> None:
        if hasattr(self, "_rank"):
            self._rank.close()
