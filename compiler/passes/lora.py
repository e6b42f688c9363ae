"""Give linear layers the inputs of LoRA adapters that requests bring.

Given:   GemmBiasAct(x, W, bias)
Result:  GemmBiasAct(x, W, bias, lora_a, lora_b, lora_owner, lora_ids), all four graph inputs

Only with `--enable_lora`; otherwise the graph stays as it is. The pass runs after partition, when a
weight has its final rows and columns, and before quantization, which changes its values. A layer
whose weight is computed from the checkpoint's, not made of its rows and columns, takes no adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import LayerRows, LoraLayer
from llmc.compiler.graph.origin import Origin
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Settings,
    arranged,
    graph_input,
    op_of,
    operands,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError

_WEIGHT = ".weight"


class LoraInput(gs.Variable):
    """A graph input for the adapters' first matrices of a layer.

    Attributes:
        layer: name of the layer.
        group: number of its group; see `LoraLayer`.
        origin: of its weight.
    """

    def __init__(self, layer: str, group: int, origin: Origin) -> None:
        super().__init__(f"{layer}.lora_a", np.float32, (_rows(group), len(origin.column)))
        self.layer, self.group, self.origin = layer, group, origin


def lora(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Run the pass on the model's graph; a draft model drafts without adapters.

    Raises:
        LlmcError: no layer can take adapters.
    """
    if not settings.options.enable_lora:
        return
    graph, groups = graphs[0], dict[tuple[str, ...], int]()
    known: dict[str, tuple[LoraInput, gs.Variable]] = {}
    for node in graph.nodes:
        op = op_of(node)
        if op is None or "lora_a" not in op.input_names:
            continue
        given = operands(node)
        weight = given["weight"]
        origin = values_of(weight).origin
        if origin is None or not all(name.endswith(_WEIGHT) for name in origin.names):
            report.refuse(node, NoMatch("its weight is not rows and columns of linear layers, so "
                                        "it takes no adapters", weight))
            continue
        layer = weight.name.removesuffix(_WEIGHT)
        if layer not in known:
            kinds = tuple(name.removesuffix(_WEIGHT).rpartition(".")[2] for name in origin.names)
            left = LoraInput(layer, groups.setdefault(kinds, len(groups)), origin)
            known[layer] = left, gs.Variable(f"{layer}.lora_b", np.float32,
                                             (left.shape[0], len(origin.row)))
            graph.inputs.extend(known[layer])
        left, right = known[layer]
        rows = given["x"].shape[0]
        node.inputs = arranged(op, {
            **given, "lora_a": left, "lora_b": right,
            "lora_owner": graph_input(graph, f"lora_owner_{left.group}", (left.shape[0],)),
            "lora_ids": graph_input(graph, "lora_logits_ids" if rows == "num_logits"
                                    else "lora_ids", (rows,))})
        report.count("layers")
    if not known:
        raise LlmcError(f"enable_lora is given, but no linear layer of '{settings.model}' can take "
                        f"adapters; leave it out, or merge one with --adapter")


def describe_lora(graph: gs.Graph) -> tuple[LoraLayer, ...]:
    """Return the manifest's entries of the layers that take adapters."""
    return tuple(LoraLayer(
        name=tensor.layer, group=tensor.group,
        rows=_runs(tensor.origin.row, [
            "" if source < 0 else tensor.origin.names[source].removesuffix(_WEIGHT)
            for source in tensor.origin.source.tolist()]),
        columns=_runs(tensor.origin.column, [""] * len(tensor.origin.column)))
        for tensor in graph.inputs if isinstance(tensor, LoraInput))


def _rows(group: int) -> str:
    return f"lora_rows_{group}"


def _runs(index: np.ndarray, modules: Sequence[str]) -> tuple[LayerRows, ...]:
    """Describe indices as runs of a constant step within one module."""
    runs, start, numbers = list[LayerRows](), 0, index.tolist()
    while start < len(numbers):
        stop = start + 1
        step = 1
        if stop < len(numbers) and modules[stop] == modules[start]:
            step = numbers[stop] - numbers[start]
        while step > 0 and stop < len(numbers) and modules[stop] == modules[start] \
                and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        step = max(step, 1)
        runs.append(LayerRows(module=modules[start], start=numbers[start],
                              stop=numbers[stop - 1] + step, step=step))
        start = stop
    return tuple(runs)


def name_origins(graph: gs.Graph) -> None:
    """Record each exported matrix as the origin of what the passes make of it."""
    for tensor in graph.tensors().values():
        values = tensor._values if isinstance(tensor, gs.Constant) else None
        if isinstance(values, Weight) and len(values.shape) == 2:
            values.origin = Origin.of(tensor.name, values.shape)
