"""A machine without a GPU, as vLLM sees it: models run where their worker runs them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from llmc.errors import LlmcError

if not torch.accelerator.is_available():
    # vLLM empties these on its way out, whatever the platform.
    torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None


class LlmcPlatform(Platform):
    """See `vllm.platforms.interface.Platform`."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    simple_compile_backend = "eager"
    dist_backend = "gloo"
    ray_device_key = "CPU"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        model = vllm_config.model_config
        if model is not None and vllm_config.parallel_config.worker_cls == "auto":
            raise LlmcError(f"vLLM knows no device of this machine that could run '{model.model}'; "
                            f"llmc-vllm runs what `llmc compile` made, and nothing else")
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "ray":
            from llmc_vllm.ray_executor import CpuRayExecutor

            parallel.distributed_executor_backend = CpuRayExecutor

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        from llmc.runtime.replica import memory

        return memory("MemTotal")

    @classmethod
    def inference_mode(cls) -> torch.no_grad:
        return torch.no_grad()

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return False

    # vLLM's kernels are for other devices, and a worker knows of its own.

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def import_ir_kernels(cls) -> None:
        pass

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        pass

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        pass

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        pass
