"""Lowering and partition of a reference in the same way as a case directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import Manifest, WeightForm
from llmc.compiler.frontend import RawModel
from llmc.compiler.graph.weights import HeadMatrices, Weight
from llmc.compiler.lower import Lowered, divide, fuse
from llmc.compiler.options import CompileOptions
from llmc.compiler.quant.scheme import SMALLEST_GROUP
from llmc.errors import LlmcError
from llmc.plugins.code_types import CODE_TYPES


def lower_alike(raw: RawModel, manifest: Manifest, root: Path, options: CompileOptions) -> Lowered:
    """Lower the reference so that its weights have the shapes of the case directory's.

    The manifest does not record the column granularity of the partition or expert parallelism.
    The first combination whose shapes match is used. Consumes `raw.graph`.

    Raises:
        LlmcError: the reference cannot be lowered, or a weight file cannot be read.
    """
    options = replace(options, target=manifest.target.kind, tp_size=manifest.tp_size,
                      max_seq_len=manifest.dims.max_seq_len)
    fused = fuse(raw, options)
    if manifest.tp_size == 1:
        return divide(fused, options)
    first = None
    for together, whole_experts in _partitions(manifest):
        try:
            lowered = divide(fused, replace(options, expert_parallel=whole_experts), together)
        except LlmcError:  # the model has no experts
            if first is None:
                raise
            continue
        if all(_shapes_agree(graph, manifest, rank, root)
               for rank, graph in enumerate(lowered.graphs)):
            return lowered
        first = first or lowered
    assert first is not None
    return first


def weight_file(root: Path, rank: int) -> Any:
    """Open a rank's weight file.

    Raises:
        LlmcError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = root / f"chip{rank}" / "weights.safetensors"
    try:
        return safe_open(path, framework="np")
    except (OSError, SafetensorError) as error:
        raise LlmcError(f"'{path}' cannot be read ({error}); compile the model again") from error


def _partitions(manifest: Manifest) -> Iterator[tuple[int, bool]]:
    sizes = {form.group_size for chip in manifest.chips for form in chip.quantization.values()}
    least = max(SMALLEST_GROUP, manifest.target.spec.group_multiple)
    together = [0, *([least, *sorted(sizes)] if sizes else [])]
    return ((size, whole) for whole, size in itertools.product((False, True), together))


def _shapes_agree(graph: gs.Graph, manifest: Manifest, rank: int, root: Path) -> bool:
    """Whether a rank's stored weights have the shapes of its graph."""
    forms = manifest.chips[rank].quantization
    with weight_file(root, rank) as file:
        names = set(file.keys())
        return all(_shape(file.get_slice(tensor.name).get_shape(), forms.get(tensor.name))
                   == _graph_shape(tensor._values)
                   for tensor in graph.tensors().values()
                   if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)
                   and tensor.name in names)


def _graph_shape(weight: Weight) -> tuple[int, ...]:
    return weight.matrix.shape if isinstance(weight, HeadMatrices) else weight.shape


def _shape(stored: list[int], form: WeightForm | None) -> tuple[int, ...]:
    """Return the unpacked shape of a stored weight."""
    if form is None:
        return tuple(stored)
    return (*stored[:-1], stored[-1] * CODE_TYPES[form.dtype].per_byte)
