"""Give linear layers the inputs of LoRA adapters that requests bring.

Given:   GemmBiasAct(x, W, bias)
Result:  GemmBiasAct(x, W, bias, lora_a, lora_b, lora_owner, lora_ids), all four graph inputs

Or for a target whose kernels take adapters in slots (see llmc.plugins.lora):

Result:  GemmBiasAct(x, W, bias, lora_ids, lora_down, lora_up, lora_ranks, lora_part), the last one
         a constant

An Embedding takes adapters, too: as a linear layer of one-hot vectors.

Only with `--enable_lora`; otherwise the graph stays as it is. The pass runs after partition, when a
weight has its final rows and columns, and before quantization, which changes its values. A layer
whose weight is computed from the checkpoint's, not made of its rows and columns, takes no adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import cast

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import TIED_TABLE, DTypeName, LayerRows, LoraLayer
from llmc.compiler.graph.origin import Origin
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Settings,
    arranged,
    graph_input,
    is_op,
    op_of,
    operands,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.norm_gemm import NORMED
from llmc.errors import LlmcError
from llmc.plugins.embedding.op import OP as EMBEDDING
from llmc.plugins.lora import NORM_INPUTS

_WEIGHT = ".weight"
_TIED_HEAD = "lm_head"  # transformers' name of a head whose weight is the embedding's


class LoraInput(gs.Variable):
    """A graph input for the adapters' first matrices of a layer.

    Attributes:
        layer: name of the layer.
        group: number of its group; see `LoraLayer`.
        origin: of its weight.
        parts: int32 [out], the index of each output's module among those of the layer.
    """

    def __init__(self, layer: str, group: int, origin: Origin, *, slots: bool) -> None:
        modules = list(dict.fromkeys(source for source in origin.source.tolist() if source >= 0))
        self.parts = np.array([modules.index(source) if source >= 0 else 0
                               for source in origin.source.tolist()], np.int32)
        width = len(origin.column)
        shape: tuple[int | str, ...] = _rows(group), width
        if slots:
            shape = max(len(modules), 1), "max_loras", "max_lora_rank", width
        super().__init__(f"{layer}.{'lora_down' if slots else 'lora_a'}", np.float32, shape)
        self.layer, self.group, self.origin, self.slots = layer, group, origin, slots


def lora(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> None:
    """Run the pass on the model's graph; a draft model drafts without adapters.

    Raises:
        LlmcError: no layer can take adapters.
    """
    if not settings.options.enable_lora:
        return
    graph, groups = graphs[0], dict[tuple[str, ...], int]()
    slots = settings.target.adapters == "slots"
    known: dict[str, dict[str, gs.Tensor]] = {}
    tables = {id(values_of(operands(node)["table"])) for node in graph.nodes
              if is_op(node, EMBEDDING)}
    tied = tables & {id(values_of(operands(node)["weight"])) for node in graph.nodes
                     if (op := op_of(node)) is not None and "lora_a" in op.input_names
                     and not is_op(node, EMBEDDING)}
    for node in graph.nodes:
        op = op_of(node)
        if op is None or "lora_a" not in op.input_names:
            continue
        given = operands(node)
        if is_op(node, EMBEDDING):
            _adapt_table(graph, node, known, groups, tied, slots=slots)
            report.count("embeddings")
            continue
        weight = given["weight"]
        origin = values_of(weight).origin
        layer = weight.name.removesuffix(NORMED).removesuffix(_WEIGHT)
        if origin is not None and id(values_of(weight)) in tied:
            origin, layer = replace(origin, names=(f"{_TIED_HEAD}{_WEIGHT}",)), _TIED_HEAD
        if origin is None or not all(name.endswith(_WEIGHT) for name in origin.names):
            node.inputs = arranged(op, {name: tensor for name, tensor in given.items()
                                        if name not in NORM_INPUTS})
            report.refuse(node, NoMatch("its weight is not rows and columns of linear layers, so "
                                        "it takes no adapters", weight))
            continue
        if layer not in known:
            first = LoraInput(layer, _group(origin, groups), origin, slots=slots)
            known[layer] = _in_slots(first) if slots else _in_rows(graph, first)
            _add_inputs(graph, known[layer])
        rows = given["x"].shape[0]
        node.inputs = arranged(op, {
            **given, **known[layer], "lora_ids": graph_input(
                graph, "lora_logits_ids" if rows == "num_logits" else "lora_ids", (rows,))})
        report.count("layers")
    if not known:
        raise LlmcError(f"enable_lora is given, but no linear layer of '{settings.model}' can take "
                        f"adapters; leave it out, or merge one with --adapter")


def _adapt_table(graph: gs.Graph, node: gs.Node, known: dict[str, dict[str, gs.Tensor]],
                 groups: dict[tuple[str, ...], int], tied: Set[int], *, slots: bool) -> None:
    """Give an Embedding the inputs of adapters, if its table is a parameter's rows.

    Args:
        tied: ids of tables that are weights of linear layers, too.
    """
    given = operands(node)
    table = values_of(given["table"])
    origin = None if table.origin is None else _turned(table.origin)
    if origin is None:
        return
    if id(table) in tied:  # it may have the head's name
        origin = replace(origin, names=(f"{TIED_TABLE}{_WEIGHT}",))
    layer = origin.names[0].removesuffix(_WEIGHT)
    first = LoraInput(layer, _group(origin, groups), origin, slots=slots)
    known[layer] = _in_slots(first) if slots else _in_rows(graph, first)
    _add_inputs(graph, known[layer])
    op = op_of(node)
    assert op is not None
    node.inputs = arranged(op, {**given, **known[layer], "lora_ids": graph_input(
        graph, "lora_ids", given["input_ids"].shape)})


def _turned(origin: Origin) -> Origin | None:
    """The origin of a table's transpose, whose columns of zeros are those of any row.

    No token has an id of these.
    """
    if len(origin.names) > 1 or not origin.names[0].endswith(_WEIGHT):
        return None
    return replace(origin, source=np.zeros_like(origin.source),
                   row=np.where(origin.source < 0, 0, origin.row)).transpose()


def _group(origin: Origin, groups: dict[tuple[str, ...], int]) -> int:
    """The number of the group of layers with modules of these names, which may be new."""
    kinds = tuple(name.removesuffix(_WEIGHT).rpartition(".")[2] for name in origin.names)
    return groups.setdefault(kinds, len(groups))


def _add_inputs(graph: gs.Graph, tensors: Mapping[str, gs.Tensor]) -> None:
    graph.inputs.extend(tensor for tensor in tensors.values() if isinstance(tensor, gs.Variable)
                        and all(tensor is not given for given in graph.inputs))


def _in_rows(graph: gs.Graph, left: LoraInput) -> dict[str, gs.Tensor]:
    """The inputs of a layer whose adapters are concatenated rows."""
    rows = _rows(left.group)
    return {"lora_a": left, "lora_b": gs.Variable(f"{left.layer}.lora_b", np.float32,
                                                  (rows, len(left.origin.row))),
            "lora_owner": graph_input(graph, f"lora_owner_{left.group}", (rows,))}


def _in_slots(down: LoraInput) -> dict[str, gs.Tensor]:
    """The inputs of a layer whose adapters are in slots."""
    up = gs.Variable(f"{down.layer}.lora_up", np.float32,
                     ("max_loras", len(down.origin.row), "max_lora_rank"))
    ranks = gs.Variable(f"{down.layer}.lora_ranks", np.int32, ("max_loras",))
    part = {"lora_part": gs.Constant(f"{down.layer}.lora_part", Weight.of(down.parts))} \
        if down.shape[0] > 1 else {}
    return {"lora_down": down, "lora_up": up, "lora_ranks": ranks, **part}


def describe_lora(graph: gs.Graph) -> tuple[LoraLayer, ...]:
    """Return the manifest's entries of the layers that take adapters."""
    return tuple(LoraLayer(
        name=tensor.layer, group=tensor.group,
        rows=_runs(tensor.origin.row, [
            "" if source < 0 else tensor.origin.names[source].removesuffix(_WEIGHT)
            for source in tensor.origin.source.tolist()]),
        columns=_runs(tensor.origin.column, [""] * len(tensor.origin.column)),
        dtype=cast(DTypeName, np.dtype(tensor.dtype).name) if tensor.slots else None,
        scaled=tensor.origin.is_scaled)
        for tensor in graph.inputs if isinstance(tensor, LoraInput))


def lora_scales(graph: gs.Graph) -> dict[str, Weight]:
    """Return the weights of `LoraLayer.scales`, for `compile_adapter`."""
    layers = {layer.name: layer for layer in describe_lora(graph)}
    return {name: Weight.of(scale) for tensor in graph.inputs if isinstance(tensor, LoraInput)
            and tensor.origin.is_scaled
            for name, scale in zip(layers[tensor.layer].scales, tensor.origin.scales, strict=True)}


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
            values.set_origin(Origin.of(tensor.name, values.shape))
