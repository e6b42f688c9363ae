"""The TensorRT-RTX target: an engine that is built without a GPU.

It has no plugins: `graph.onnx` is standard ONNX with all function bodies inlined. The sequences of
a step are padded to the same number of new tokens, as shapes must not depend on data.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import onnx.inliner
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import Chip, FileEntry, Target
from llmc.compiler.artifact import (
    WEIGHTS_NAME,
    describe_chip,
    file_entry,
    graph_step,
    to_onnx,
    write_onnx,
    write_weights,
)
from llmc.compiler.graph import rewrite
from llmc.compiler.graph.rewrite import caches, is_op, op_of
from llmc.compiler.options import CompileOptions
from llmc.errors import LlmcError
from llmc.installation import install_command
from llmc.plugins.experts.op import OP as EXPERTS
from llmc.targets import TENSORRT_RTX

_BATCH, _TOKENS = 16, 4096  # limits of a step; a single prompt may be longer


def describe(options: CompileOptions) -> Target:
    """Return the builder's version, to be matched by the runtime."""
    _library()
    return Target(kind=TENSORRT_RTX.name,
                  versions={"tensorrt_rtx": importlib.metadata.version("tensorrt-rtx")})


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: CompileOptions) -> \
        tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it.

    Raises:
        LlmcError: the model has several chips or experts, or TensorRT rejects the graph.
    """
    if any((op := op_of(node)) is not None and op.collective for node in graph.nodes):
        raise LlmcError("TensorRT-RTX has no collectives; compile with --tp_size 1")
    experts = next((node for node in graph.nodes if is_op(node, EXPERTS)), None)
    if experts is not None:
        raise LlmcError(f"TensorRT-RTX has no kernel for llmc::Experts "
                        f"({rewrite.describe(experts)}); compile for --target cpu")
    name = f"chip{rank}"
    directory = case_dir / name
    directory.mkdir()
    cache = next(cache for node in graph.nodes for cache, _ in caches(node))
    step = graph_step(f"{name}/{TENSORRT_RTX.engine_file}", graph)
    profiles = [{tensor.name: [tuple(_size(dim, sizes, which) for dim in tensor.shape)
                               for which in range(3)] for tensor in graph.inputs}
                for sizes in _profiles(cache.shape[2])]
    places, weights = write_weights([graph], directory / WEIGHTS_NAME)
    chip = describe_chip(graph, rank, (step,), sum(place.length for place in places.values()))
    path = directory / "graph.onnx"
    files = [weights, write_onnx(_inlined(to_onnx(graph, places, TENSORRT_RTX.name)), path)]
    plan = _build(path, profiles)
    (directory / TENSORRT_RTX.engine_file).write_bytes(plan)
    files.append(file_entry(directory / TENSORRT_RTX.engine_file))
    return chip, files


def _profiles(max_seq_len: int) -> list[dict[str, tuple[int, int, int]]]:
    """Return min, opt and max of each size, for prefill and for decode.

    The maxima must be consistent: every sequence has num_tokens / batch tokens.
    """
    most = max(min(_BATCH * max_seq_len, _TOKENS), -(-max_seq_len // _BATCH) * _BATCH)
    return [{"batch": (1, 1, _BATCH), "num_tokens": (1, min(128, max_seq_len), most)},
            {"batch": (1, 4, _BATCH), "num_tokens": (1, 4, _BATCH)}]


def _size(dim: int | str, sizes: dict[str, tuple[int, int, int]], which: int) -> int:
    if isinstance(dim, int):
        return dim
    named = {"batch_plus_1": sizes["batch"][which] + 1, "num_logits": sizes["batch"][which]}
    return named[dim] if dim in named else sizes[dim][which]


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline all functions, so that only standard ops remain."""
    flat = onnx.inliner.inline_local_functions(model)
    foreign = [entry for entry in flat.opset_import if entry.domain]
    for entry in foreign:
        flat.opset_import.remove(entry)
    return flat


def _library() -> ModuleType:
    try:
        import tensorrt_rtx
    except ImportError as error:
        raise LlmcError(f"target {TENSORRT_RTX.name} needs the package tensorrt-rtx ({error}); "
                        f"install it with: {install_command('tensorrt-rtx')}") from error
    library: ModuleType = tensorrt_rtx
    return library


def _build(path: Path, profiles: list[dict[str, list[tuple[int, ...]]]]) -> memoryview:
    """Build the serialized engine of an ONNX file.

    Raises:
        LlmcError: TensorRT cannot parse or build it; the message has TensorRT's reason.
    """
    trt: Any = _library()

    class Logger(trt.ILogger):  # collects errors
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(text)

    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise LlmcError(f"TensorRT cannot parse '{path.name}': {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            name = network.get_input(index).name
            profile.set_shape(name, *shapes[name])
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise LlmcError(f"TensorRT cannot build '{path.name}': "
                        f"{logger.errors[-1] if logger.errors else 'without a reason'}")
    return memoryview(plan)
