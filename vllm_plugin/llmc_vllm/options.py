"""vLLM's options for a case directory: defaults and checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmc.artifacts.manifest import Manifest, read_manifest, verify_files
from llmc.errors import LlmcError
from llmc.runtime.engines import BLOCK_SIZE
from llmc_vllm.drafts import check_speculation
from llmc_vllm.model import view

WORKER = "llmc_vllm.worker.LlmcWorker"
_MAX_NUM_SEQS = 16  # on CPUs, where each sequence has a cache row of the maximum length
# Options that contradict the compiled model, or that llmc's workers do not support.
_UNSUPPORTED = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "enable_expert_parallel", "enable_eplb", "enable_dbo", "quantization", "quantization_config",
    "kv_cache_dtype", "load_format", "hf_overrides", "model_weights", "model_impl",
    "model_class_overrides", "kv_transfer_config", "ec_transfer_config",
    "weight_transfer_config", "diffusion_config", "watermark_config", "kv_offloading_size",
    "cpu_offload_gb", "enable_prompt_embeds", "enable_sleep_mode", "enable_return_routed_experts",
    "return_sampling_mask", "enable_trace_replay", "logits_processors", "logprobs_mode",
    "attention_backend")


def complete(args: Any, case_dir: Path) -> Manifest:
    """Complete vLLM's `EngineArgs` for a case directory.

    `check_ranks` checks the files of the chips.

    Raises:
        LlmcError: the case directory is invalid, or an option is not supported.
    """
    from vllm import envs

    manifest = read_manifest(case_dir)
    verify_files(manifest, case_dir, ranks=())
    _check(args, manifest)
    speculates = check_speculation(args, manifest)
    args.served_model_name = args.served_model_name or args.model
    args.model = str(view(case_dir, manifest, Path(envs.VLLM_CACHE_ROOT, "llmc")))
    args.worker_cls = WORKER
    args.tensor_parallel_size = manifest.tp_size
    args.dtype = manifest.dtype
    args.block_size = args.block_size or BLOCK_SIZE
    args.skip_tokenizer_init = args.skip_tokenizer_init or manifest.tokenizer.path is None
    args.enforce_eager = True
    on_cpu = not manifest.target.spec.gpu
    if on_cpu or speculates:  # submitting a step runs it, or the next one needs its drafts
        args.async_scheduling = bool(args.async_scheduling)
    limit = manifest.target.max_batch_size
    if args.max_num_seqs is None and (on_cpu or limit):
        args.max_num_seqs = min(limit or _MAX_NUM_SEQS, _MAX_NUM_SEQS)
    return manifest


def spans_hosts(parallel: Any) -> bool:
    """Whether the ranks of a replica may run on several hosts.

    Each worker then verifies its chip directory, as no host needs all of them.

    Args:
        parallel: vLLM's ParallelConfig.
    """
    return bool(parallel.use_ray or parallel.nnodes_within_dp > 1)


def check_ranks(parallel: Any, manifest: Manifest, case_dir: Path) -> None:
    """Check the executor, and the chips' files if all ranks run on this host.

    Args:
        parallel: vLLM's ParallelConfig.

    Raises:
        LlmcError: a chip directory is invalid, or vLLM's older executor for Ray is selected.
    """
    from vllm import envs

    if not spans_hosts(parallel):
        verify_files(manifest, case_dir)
    elif parallel.use_ray and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise LlmcError("VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0, which selects an executor for "
                        "vLLM's workers only; unset it")


def _check(args: Any, manifest: Manifest) -> None:
    model = f"'{manifest.source.architecture}'"
    if manifest.pooling is not None:
        raise LlmcError(f"{model} was compiled for task {manifest.pooling.task}, which is not "
                        f"supported inside vLLM; serve it with `llmc serve`")
    if manifest.encoder is not None:
        raise LlmcError(f"{model} is an encoder-decoder model, which is not supported inside "
                        f"vLLM; use llmc serve")
    if manifest.memory is not None:
        raise LlmcError(f"layers of {model} attend to images, which is not supported inside vLLM; "
                        f"use llmc serve, or compile with --language_model_only")
    if manifest.chips[0].states:
        raise LlmcError(f"{model} has layers with recurrent state, which are not supported inside "
                        f"vLLM; use llmc serve")
    if args.tensor_parallel_size not in (1, manifest.tp_size):
        raise LlmcError(f"tensor_parallel_size is {args.tensor_parallel_size}, but {model} was "
                        f"compiled for {manifest.tp_size}; leave it out, or compile with --tp_size "
                        f"{args.tensor_parallel_size}")
    if args.dtype not in ("auto", manifest.dtype):
        raise LlmcError(f"dtype is {args.dtype}, but {model} was compiled for {manifest.dtype}; "
                        f"leave it out, or compile with --dtype {args.dtype}")
    if args.block_size is not None and args.block_size & (args.block_size - 1):
        raise LlmcError(f"block_size is {args.block_size}, expected a power of two; give one such "
                        f"as {BLOCK_SIZE}")
    limit = manifest.target.max_batch_size
    if limit is not None and (args.max_num_seqs or 0) > limit:
        raise LlmcError(f"max_num_seqs is {args.max_num_seqs}, but {model} was compiled for at "
                        f"most {limit}; lower it, or compile with a larger --max_batch_size")
    if args.enable_lora:  # without it, vLLM refuses each LoRARequest
        raise LlmcError(f"enable_lora is given, but {model} was compiled by llmc, whose LoRA "
                        f"adapters are not supported inside vLLM; use llmc serve --lora_modules, "
                        f"or merge one: llmc compile --adapter")
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in _UNSUPPORTED and value != _default(field) and value not in (None, False):
            raise LlmcError(f"{field.name} {value!r} is not supported for a model compiled by "
                            f"llmc; leave it out")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING \
        else field.default_factory()
