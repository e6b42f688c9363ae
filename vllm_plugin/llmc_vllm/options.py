"""vLLM's options for a case directory: what it decides, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmc.artifacts.manifest import Manifest, read_manifest, verify_files
from llmc.errors import LlmcError
from llmc.runtime.engines import BLOCK_SIZE
from llmc_vllm.model import view

WORKER = "llmc_vllm.worker.LlmcWorker"
_MAX_NUM_SEQS = 16  # on CPU cores, where each has a row of the longest sequence's length
# What is not the model as it was compiled, or asks for what no worker of llmc's does.
_REFUSED = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "enable_expert_parallel", "enable_eplb", "enable_dbo", "quantization", "quantization_config",
    "kv_cache_dtype", "load_format", "hf_overrides", "model_weights", "model_impl",
    "model_class_overrides", "enable_lora", "speculative_config", "spec_method", "spec_model",
    "kv_transfer_config", "ec_transfer_config", "weight_transfer_config", "diffusion_config",
    "watermark_config", "kv_offloading_size", "cpu_offload_gb", "enable_prompt_embeds",
    "enable_sleep_mode", "enable_return_routed_experts", "return_sampling_mask",
    "enable_trace_replay", "logits_processors", "logprobs_mode", "attention_backend")


def complete(args: Any, case_dir: Path) -> Manifest:
    """Fill in what a case directory decides of `vllm.EngineArgs`; the files of its chips are left
    to `check_ranks`.

    Raises:
        LlmcError: it is broken or newer, or an option is not for it.
    """
    from vllm import envs

    manifest = read_manifest(case_dir)
    verify_files(manifest, case_dir, ranks=())
    _check(args, manifest)
    args.served_model_name = args.served_model_name or args.model
    args.model = str(view(case_dir, manifest, Path(envs.VLLM_CACHE_ROOT, "llmc")))
    args.worker_cls = WORKER
    args.tensor_parallel_size = manifest.tp_size
    args.dtype = manifest.dtype
    args.block_size = args.block_size or BLOCK_SIZE
    args.skip_tokenizer_init = args.skip_tokenizer_init or manifest.tokenizer.path is None
    args.enforce_eager = True
    on_cpu = not manifest.target.spec.gpu
    if on_cpu:  # a step ends when it is submitted
        args.async_scheduling = bool(args.async_scheduling)
    limit = manifest.target.max_batch_size
    if args.max_num_seqs is None and (on_cpu or limit):
        args.max_num_seqs = min(limit or _MAX_NUM_SEQS, _MAX_NUM_SEQS)
    return manifest


def spans_hosts(parallel: Any) -> bool:
    """Whether ranks of a replica may run on several hosts, by vLLM's ParallelConfig. Each worker
    then verifies its own chip directory, as no host needs all of them.
    """
    return bool(parallel.use_ray or parallel.nnodes_within_dp > 1)


def check_ranks(parallel: Any, manifest: Manifest, case_dir: Path) -> None:
    """Check how vLLM runs the ranks, by its ParallelConfig, and the files of those that only this
    host can run.

    Raises:
        LlmcError: a chip directory is broken, or vLLM's older executor for Ray is chosen.
    """
    from vllm import envs

    if not spans_hosts(parallel):
        verify_files(manifest, case_dir)
    elif parallel.use_ray and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise LlmcError("VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0, which selects an executor that "
                        "runs vLLM's own workers only; unset it")


def _check(args: Any, manifest: Manifest) -> None:
    model = f"'{manifest.source.architecture}'"
    if manifest.encoder is not None:
        raise LlmcError(f"{model} is an encoder-decoder model, which llmc does not run inside "
                        f"vLLM; use llmc serve")
    if manifest.chips[0].states:
        raise LlmcError(f"{model} has layers that keep a state beside the KV cache, which llmc "
                        f"does not run inside vLLM; use llmc serve")
    if args.tensor_parallel_size not in (1, manifest.tp_size):
        raise LlmcError(f"tensor_parallel_size {args.tensor_parallel_size} is not "
                        f"{manifest.tp_size}, for which {model} was compiled; leave it out, or "
                        f"compile with --tp_size {args.tensor_parallel_size}")
    if args.dtype not in ("auto", manifest.dtype):
        raise LlmcError(f"dtype {args.dtype} is not {manifest.dtype}, for which {model} was "
                        f"compiled; leave it out, or compile with --dtype {args.dtype}")
    if args.block_size is not None and args.block_size & (args.block_size - 1):
        raise LlmcError(f"block_size {args.block_size} is no power of two; give one such as "
                        f"{BLOCK_SIZE}")
    limit = manifest.target.max_batch_size
    if limit is not None and (args.max_num_seqs or 0) > limit:
        raise LlmcError(f"max_num_seqs {args.max_num_seqs} exceeds {limit}, for which {model} was "
                        f"compiled; lower it, or compile with a larger --max_batch_size")
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in _REFUSED and value != _default(field) and value not in (None, False):
            raise LlmcError(f"{field.name} {value!r} is not for a model that llmc compiled; leave "
                            f"it out")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING \
        else field.default_factory()
