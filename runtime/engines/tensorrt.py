"""TensorRT on an NVIDIA GPU: a plan as the single node of llmc's engine.

The engine keeps inputs, KV caches and logits at fixed addresses, samples on the device and captures
decode steps as CUDA graphs, as with its own kernels; TensorRT runs the forward pass. A plan has one
profile and execution context for prefill and one for decode. Its additional input `llmc_step` gives
its plugins access to the step. An encoder's plan is the first node of the engine's encoder; scatter
nodes store its outputs in the encoder-output buffer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llmc.artifacts.manifest import Chip, GraphStep, Manifest, Target, TensorInfo
from llmc.errors import LlmcError
from llmc.installation import CUDA_INSTALL_COMMAND
from llmc.runtime.core.step import Step
from llmc.runtime.engines.cuda import SIZES, CudaEngine, extension

LIBRARY = "LLMC_TENSORRT_LIBRARY"
_PLUGINS = "libllmc_plugins.so"


def plugin_library() -> Path:
    """Path of llmc's TensorRT plugin library.

    Raises:
        LlmcError: it was not built.
    """
    path = Path(str(extension().__file__)).with_name(_PLUGINS)
    if not hasattr(extension(), "tensorrt") or not path.is_file():
        raise LlmcError(f"this installation of llmc has no {_PLUGINS}; install it from a checkout, "
                        f"with TensorRT's headers: TENSORRT_ROOT=… {CUDA_INSTALL_COMMAND}")
    return path


def tensorrt_library(major: str) -> str:
    """TensorRT's library: of LLMC_TENSORRT_LIBRARY, of its package, or of the system."""
    name = f"libnvinfer.so.{major}"
    configured = os.environ.get(LIBRARY)
    if configured:
        return os.path.join(configured, name) if os.path.isdir(configured) else configured
    for package in ("tensorrt_libs", "tensorrt"):
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(root, name)).exists():
                return str(path)
    return name


class TensorRTEngine(CudaEngine):
    """One rank on one GPU, executed by TensorRT. See `CudaEngine`.

    Raises:
        LlmcError: the extension, plugin library or TensorRT is missing or differs from the versions
            that the model was compiled with, or memory is insufficient.
    """

    verifies = False

    def _load(self, cuda: ModuleType, manifest: Manifest, chip: Chip, case_dir: Path,
              limits: Mapping[str, Any]) -> Any:
        plugins = str(plugin_library())
        check_plugins(manifest, {creator.name: int(creator.version)
                                 for creator in cuda.tensorrt.Harness(plugins).creators})
        major = cuda.tensorrt.version.split(".")[0]
        check_version(manifest.target, cuda.tensorrt.load(tensorrt_library(major)))
        width = 4 if manifest.dtype == "float32" else 2
        encoded = chip.encoder.outputs if chip.encoder else ()
        result = next(tensor for tensor in chip.outputs if tensor.name == chip.result)
        of_tokens = [*encoded, *([result] if result.shape[0] == "num_tokens" else ())]
        program = cuda.Program(**limits,
                               token_bytes=sum(_columns(tensor) for tensor in of_tokens) * width,
                               logit_bytes=0 if result in of_tokens else _columns(result) * width)
        tensors: dict[str, int] = {}
        for tensor in (*chip.inputs, *(chip.encoder.inputs if chip.encoder else ())):
            if tensor.name not in tensors:
                tensors[tensor.name] = _declare(program, tensor)
        tensors.update({f"{name}_out": number for name, number in tensors.items()
                        if "_cache_" in name})
        tensors[result.name] = program.add_value(
            result.dtype, [SIZES.get(dim, dim) for dim in result.shape], 0,
            result not in of_tokens)
        values, offset = {}, 0
        for tensor in encoded:
            values[tensor.name] = program.add_value(
                tensor.dtype, [SIZES.get(dim, dim) for dim in tensor.shape], offset, False)
            offset += _columns(tensor) * width
        for part, outputs in ((chip.encoder, values), (chip, tensors)):
            for step in part.steps if part else ():
                assert isinstance(step, GraphStep)
                cuda.tensorrt.add_plan(program, self._device, plugins,
                                       (case_dir / step.path).read_bytes(),
                                       [(name, tensors[name]) for name in step.inputs],
                                       [(name, outputs[name]) for name in step.outputs],
                                       part is chip.encoder)
        if encoded:
            rows = program.add_input("memory_rows", "int64")
            for name, number in values.items():
                program.add_node("Scatter", {}, [number, rows, tensors[name]], [], "encoder")
        if manifest.pooling is None:
            program.set_logits(tensors[result.name], manifest.dims.vocab_size)
        else:
            program.set_pooled(tensors[result.name])
        return cuda.Engine(program, self._device, self._backend)

    def trace(self, step: Step) -> dict[str, np.ndarray]:
        """Execute a step without sampling.

        The host waits after every plugin. Outputs of TensorRT's layers are not visible, except the
        logits.

        Returns:
            float32 outputs of every plugin, in order, by tensor name; and the logits of all tokens.
        """
        tensorrt = extension().tensorrt
        watch = tensorrt.Watch()
        tensorrt.watch(self._engine, watch)
        try:
            logits = self._execute(step)
            values = {name: np.frombuffer(data, np.float32).reshape(shape)
                      for name, shape, data in watch.values()}
        finally:
            tensorrt.watch(self._engine, None)
        values.pop("logits", None)
        return {**values, "logits": logits}


def _declare(program: Any, tensor: TensorInfo) -> int:
    """Declare an input of a plan. The program has int64 where plans have int32."""
    number: int
    if "_cache_" in tensor.name:
        number = program.add_cache(tensor.dtype, tensor.shape[1], tensor.shape[3])
    elif tensor.shape[0] == "num_memory_tokens":
        number = program.add_memory(_columns(tensor))
    else:
        wide = tensor.name in ("input_ids", "position_ids", "logits_indices", "token_type_ids")
        number = program.add_input(tensor.name, "int64" if wide else "int32")
    return number


def _columns(tensor: TensorInfo) -> int:
    columns = tensor.shape[-1]
    assert isinstance(columns, int)
    return columns


def check_plugins(manifest: Manifest, known: Mapping[str, int]) -> None:
    """Compare the model's ops with those of the plugin library.

    Raises:
        LlmcError: the library lacks an op, or has another version of it.
    """
    for name, version in manifest.ops.items():
        if known.get(name) != version:
            raise LlmcError(
                f"the model uses version {version} of the plugin {name}, {_PLUGINS} has "
                f"{f'version {known[name]}' if name in known else 'none'}; install the llmc that "
                f"the model was compiled with, {manifest.llmc_version}, or compile it again")


def check_version(target: Target, version: str) -> None:
    """Compare the TensorRT that built the plan with the installed one.

    Raises:
        LlmcError: they differ; a plan runs only on the version that built it.
    """
    built = target.versions.get("tensorrt", "")
    if built.split(".")[:3] != version.split(".")[:3]:
        raise LlmcError(f"the model was built by TensorRT {built}, TensorRT {version} is "
                        f"installed; install tensorrt=={built}, or compile the model again")
