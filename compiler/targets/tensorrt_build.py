"""A program that builds an engine with TensorRT.

It runs in a Python with `tensorrt` and `polygraphy`, which may be older than llmc's, and imports
nothing of llmc.

Input is JSON on stdin with paths: `plugins`; to build also `onnx`, `script`, `plan` and
`timing_cache`. Output is lines of JSON to the file descriptor given as argument: any number of
`progress`, then either `error`, or `version`, `gpu` and `compute_capability`.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[..., None]


def main(work: dict[str, str], answer: Answer) -> None:
    """Load the plugins, build if requested, and answer with versions."""
    import tensorrt as trt
    name, capability = gpu()
    load_plugins(work["plugins"])
    if "onnx" in work:
        build(trt, work, answer)
    answer(version=trt.__version__, gpu=name, compute_capability=capability)


def gpu() -> tuple[str, str]:
    """Return name and compute capability of the first GPU, from the driver."""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        has_gpu = not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0)
    except OSError:  # no driver
        has_gpu = False
    if not has_gpu:
        raise RuntimeError("no NVIDIA GPU was found, which the build needs; build on a machine "
                           "with a GPU")
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return name.value.decode(), f"{major.value}.{minor.value}"


def load_plugins(path: str) -> None:
    """Register the library's plugins with TensorRT.

    Raises:
        RuntimeError: the library rejects this TensorRT or GPU.
    """
    library = ctypes.CDLL(path)
    library.initLlmcPlugins.restype = ctypes.c_bool
    library.llmcPluginError.restype = ctypes.c_char_p
    if not library.initLlmcPlugins(None, b"llmc", None):
        raise RuntimeError(library.llmcPluginError().decode())


def build(trt: Any, work: dict[str, str], answer: Answer) -> None:
    """Build the plan and write it, with the timing cache."""
    from polygraphy.backend.trt import engine_bytes_from_network, network_from_onnx_path
    strongly_typed = int(trt.__version__.split(".")[0]) >= 10
    builder, network, parser = network_from_onnx_path(work["onnx"], strongly_typed=strongly_typed)
    config = runpy.run_path(work["script"])["load_config"](builder, network)
    if hasattr(trt, "PreviewFeature") and hasattr(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03"):
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if hasattr(trt, "IProgressMonitor"):
        config.progress_monitor = make_monitor(trt, answer)
    kept = b""
    if os.path.exists(work["timing_cache"]):
        with open(work["timing_cache"], "rb") as file:
            kept = file.read()
    timing = config.create_timing_cache(kept)
    if timing is None or not config.set_timing_cache(timing, ignore_mismatch=False):
        timing = config.create_timing_cache(b"")  # the cache is of another TensorRT or GPU
        config.set_timing_cache(timing, ignore_mismatch=False)
    answer(progress="TensorRT builds")
    plan = engine_bytes_from_network((builder, network, parser), config=config)
    for name, content in (("plan", plan), ("timing_cache", config.get_timing_cache().serialize())):
        with open(work[name], "wb") as file:
            file.write(content)


def make_monitor(trt: Any, answer: Answer) -> Any:
    """Create a progress monitor for the builder."""
    class Monitor(trt.IProgressMonitor):
        """Reports the builder's top-level phases, at each tenth of their steps."""

        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.steps[phase] = max(1, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            count = self.steps.get(phase)
            if count and step * 10 // count != (step - 1) * 10 // count:
                answer(progress=f"TensorRT: {phase}, {step} of {count}")
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose tensorrt.py would shadow the package
    with open(int(sys.argv[1]), "w", encoding="utf-8") as pipe:
        def answer(**fields: str) -> None:
            pipe.write(json.dumps(fields) + "\n")
            pipe.flush()

        try:
            main(json.load(sys.stdin), answer)
        except Exception as error:
            answer(error=" ".join(str(error).split()) or type(error).__name__)
            sys.exit(1)
