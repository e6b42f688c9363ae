"""The CPU target: ONNX files for ONNX Runtime.

At tp_size 1 the engine is `graph.onnx` itself. Beyond, `graph.onnx` is cut at its collectives into
`segment_*.onnx`, and the runtime's communicator works between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_graphsurgeon as gs

from llmc.compiler.artifact import (
    WEIGHTS_NAME,
    describe_chip,
    split_at_collectives,
    to_onnx,
    write_onnx,
    write_weights,
)
from llmc.compiler.targets import Options
from llmc.runtime.manifest import Chip, CollectiveStep, FileEntry, GraphStep, Target

KIND = "cpu"
DTYPES = ("float32",)
_COLLECTIVES = {"AllReduce": "all_reduce", "AllGather": "all_gather"}


def describe(options: Options) -> Target:
    return Target(kind="cpu")


def emit(graph: gs.Graph, rank: int, case_dir: Path, options: Options) -> \
        tuple[Chip, list[FileEntry]]:
    """Write `chip<rank>/` and describe it."""
    name = f"chip{rank}"
    directory = case_dir / name
    directory.mkdir()
    places, weights = write_weights(graph, directory / WEIGHTS_NAME)
    files = [weights, write_onnx(to_onnx(graph, places, KIND), directory / "graph.onnx")]
    pieces = split_at_collectives(graph)
    steps: list[GraphStep | CollectiveStep] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, gs.Node):
            steps.append(CollectiveStep(kind=_COLLECTIVES[piece.op], input=piece.inputs[0].name,
                                        output=piece.outputs[0].name))
            continue
        file = "graph.onnx" if len(pieces) == 1 else f"segment_{index:03}.onnx"
        if len(pieces) > 1:
            files.append(write_onnx(to_onnx(piece, places, KIND), directory / file))
        steps.append(GraphStep(path=f"{name}/{file}", inputs=_names(piece.inputs),
                               outputs=_names(piece.outputs)))
    chip = describe_chip(graph, rank, tuple(steps),
                         sum(place.length for place in places.values()))
    return chip, [FileEntry(path=f"{name}/{file.path}", size=file.size, sha256=file.sha256)
                  for file in files]


def _names(tensors: Sequence[gs.Tensor]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in tensors)
