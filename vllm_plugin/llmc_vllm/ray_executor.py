"""vLLM's Ray executor on hosts without a GPU: each rank takes a CPU of a node."""

from __future__ import annotations

from typing import Any

import ray
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node


class CpuRayWorkerProc(ray_executor_v2.RayWorkerProc):
    """See `RayWorkerProc`."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return no GPU ids; Ray assigns ids to GPUs only."""
        return ray.get_runtime_context().get_node_id(), []


class CpuRayExecutor(ray_executor_v2.RayExecutorV2):
    """See `RayExecutorV2`."""

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
        ray_executor_v2.get_bundles_sorted_by_node = self._rank_bundles
        super()._init_executor()

    def _rank_bundles(self, placement_group: Any) -> list[tuple[int, str, str]]:
        """Return index, node id and address of each rank's bundle.

        With data parallelism over Ray, the engine of a replica has another bundle after them.
        """
        return [bundle for bundle in get_bundles_sorted_by_node(placement_group)
                if bundle[0] < self.parallel_config.world_size]

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        """Request no resources besides those of the rank's bundle."""
        return {"num_gpus": 0}
