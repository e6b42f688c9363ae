"""vLLM's platform for hosts without a GPU; workers decide where models run."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from llmc.errors import LlmcError

if not torch.accelerator.is_available():
    # vLLM calls these at exit on every platform.
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
            raise LlmcError(f"no device of this host can run '{model.model}' in vLLM, and "
                            f"llmc-vllm runs case directories only; give the output of "
                            f"`llmc compile`")
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "ray":
            from llmc_vllm.ray_executor import CpuRayExecutor

            parallel.distributed_executor_backend = CpuRayExecutor

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        from llmc.memory import memory_of_machine

        return memory_of_machine("MemTotal")

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

    # Not applicable: vLLM's kernels are for other devices, and llmc's workers select theirs.

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
