"""One of vLLM's workers: a rank of a case directory, on vLLM's schedule and in vLLM's blocks."""

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
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsLists,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from llmc.runtime.manifest import read_manifest
from llmc.runtime.replica import Room
from llmc.runtime.step import Step
from llmc_vllm.model import CASE_DIR
from llmc_vllm.parameters import sampler
from llmc_vllm.ranks import Rank, block_bytes, load_rank
from llmc_vllm.sequences import Part, Pending, Sequences, TokenLogprobs, with_grammar

_CACHE = "llmc.kv_cache"  # of all layers of a rank, as one


class LlmcWorker(WorkerBase):
    """See `vllm.v1.worker.worker_base.WorkerBase`.

    What vLLM schedules is planned by `execute_model` and run by `sample_tokens`, as it makes the
    masks of structured output between them. With async scheduling a step is planned and submitted
    while the one before it runs.
    """

    _rank: Rank
    _sequences: Sequences
    _parts: list[Part]
    _request_ids: list[str]
    _under_way: deque[_Output]

    def init_device(self) -> None:
        parallel = self.parallel_config
        replica = parallel.data_parallel_rank_local  # of those on this machine
        if replica is None:
            replica = parallel.data_parallel_index
        shown_own = parallel.distributed_executor_backend in ("ray", "external_launcher")
        self._device = self.local_rank + (0 if shown_own else replica * parallel.world_size)
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
        self._sequences = Sequences(
            self._rank.limits, self._manifest.dims.vocab_size,
            functools.partial(sampler, model_seed=self.model_config.seed))
        self._under_way = deque()

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """All is compiled, and `allocate` has timed what it times."""
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model_inspection(self) -> str:
        made = self._manifest
        return f"{made.source.architecture} by llmc, {made.tp_size} x {made.target.kind}"

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        while len(self._under_way) > 1:  # vLLM asks one rank alone for what steps led to
            self._under_way.popleft().get_output()
        self._parts = self._sequences.plan(scheduler_output)
        self._request_ids = list(scheduler_output.num_scheduled_tokens)
        return None if self._parts else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        made = _Output(self._rank, self._request_ids, self._manifest.dims.vocab_size)
        for part in self._parts:
            made.submit(part, with_grammar(part, grammar_output))
        if not self.scheduler_config.async_scheduling:
            return made.get_output()
        self._under_way.append(made)
        return made

    def shutdown(self) -> None:
        if hasattr(self, "_rank"):
            self._rank.close()


class _Output(AsyncModelRunnerOutput):
    """What a step of vLLM's leads to, which waits for whoever asks first."""

    def __init__(self, rank: Rank, request_ids: list[str], vocab_size: int) -> None:
        self._rank, self._request_ids = rank, request_ids
        self._tokens: dict[str, int] = {}
        self._logprobs = TokenLogprobs(vocab_size)
        self._last: tuple[int, Pending] | None = None
        self._lock = Lock()

    def submit(self, part: Part, step: Step) -> None:
        """The next part; the one before it has ended then."""
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

    def get_output(self) -> ModelRunnerOutput:
        with self._lock:
            self._collect()
        names, rows = self._request_ids, self._logprobs.rows(self._request_ids)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[self._tokens[name]] if name in self._tokens else []
                               for name in names],
            logprobs=None if rows is None else LogprobsLists(*rows))
