"""Flatten grouped columns when each layer reads one group.

Given:   x, y → Reshape([batch, seq, groups, width]) → RMSNorm, Add, Mul, … → Gather(group i)
Result:  GroupRMSNorm(x), Add, Mul, … on [batch, seq, groups * width] → Slice(columns of group i)

Gemma 4's per-layer inputs have this form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    fields_of,
    is_op,
    operands,
    producer,
    replace,
    scalar,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.group_rms_norm.op import OP as GROUP_RMS_NORM
from llmc.plugins.rms_norm.op import OP as RMS_NORM


@dataclass(frozen=True)
class _Group:
    """Group `index` of `source` [batch, seq, groups, width].

    `inside` are the nodes to flatten, in order.
    """

    node: gs.Node
    index: int
    source: gs.Tensor
    inside: tuple[gs.Node, ...]


def groups(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    flat: dict[int, gs.Tensor] = {}  # flattened sources, shared by several layers' groups

    def rewrite(graph: gs.Graph, match: _Group, settings: Settings) -> None:
        for node in match.inside:
            if id(node.outputs[0]) not in flat:
                flat[id(node.outputs[0])] = _flattened(graph, node, flat)
        _slice(graph, match, flat[id(match.source)])

    apply_rules(graph, [Rule("groups", frozenset({"Gather"}), _check, rewrite)], settings, report)


def _check(node: gs.Node, settings: Settings) -> _Group | NoMatch | None:
    source, index = node.inputs[0], scalar(node.inputs[1])
    shape = list(source.shape or ())
    if len(shape) != 4 or shape[:2] != ["batch", "seq"] or index is None \
            or node.attrs.get("axis", 0) not in (2, -2) or node.inputs[1].shape not in ((), []):
        return None  # not a selection of a group of columns
    if not all(isinstance(size, int) for size in shape[2:]) or not 0 <= index < shape[2]:
        return NoMatch(f"group {index} of unsupported shape {shape}", node)
    inside: dict[int, gs.Node] = {}
    reason = _collect(source, shape, inside)
    if reason is not None:
        return reason
    return _Group(node, int(index), source, tuple(inside.values()))


def _collect(tensor: gs.Tensor, shape: list[int | str], inside: dict[int, gs.Node]) -> \
        NoMatch | None:
    """Add the nodes between a grouped tensor and the Reshape to groups."""
    node = producer(tensor)
    if node is None or list(tensor.shape or ()) != shape:
        return NoMatch(f"this tensor is not grouped as {shape}", tensor)
    if id(node) in inside:
        return None
    if node.op == "Reshape":
        flat = list(node.inputs[0].shape or ())
        if flat != [*shape[:2], int(shape[2]) * int(shape[3])]:
            return NoMatch(f"groups {shape} are reshaped from {flat}", node)
        inside[id(node)] = node
        return None
    if is_op(node, RMS_NORM):
        grouped = [operands(node)["x"]]
    elif node.op in ELEMENTWISE:
        grouped = [operand for operand in node.inputs if scalar(operand) is None]
    else:
        return NoMatch("this op on grouped columns is unsupported", node)
    for operand in grouped:
        reason = _collect(operand, shape, inside)
        if reason is not None:
            return reason
    inside[id(node)] = node
    return None


def _flattened(graph: gs.Graph, node: gs.Node, flat: dict[int, gs.Tensor]) -> gs.Tensor:
    """The wide of a node on groups, as [batch, seq, groups * width]."""
    if node.op == "Reshape":
        return node.inputs[0]
    batch, seq, count, width = node.outputs[0].shape
    wide = gs.Variable(f"{node.outputs[0].name}.flat", np.float32, [batch, seq, count * width])
    if is_op(node, RMS_NORM):
        given = operands(node)
        gain = gs.Constant(f"{given['weight'].name}.{count}", Weight.of(
            np.tile(values_of(given["weight"]).load(), count)))
        replace(graph, GROUP_RMS_NORM, {"x": flat[id(given["x"])], "weight": gain}, [wide],
                {"groups": count, "epsilon": fields_of(node)["epsilon"]})
        return wide
    graph.nodes.append(gs.Node(op=node.op, name=wide.name, attrs=dict(node.attrs), outputs=[wide],
                               inputs=[flat.get(id(tensor), tensor) for tensor in node.inputs]))
    return wide


def _slice(graph: gs.Graph, match: _Group, source: gs.Tensor) -> None:
    output, width = match.node.outputs[0], match.source.shape[-1]
    start = match.index * width
    bounds = [gs.Constant(f"{output.name}.{name}", np.array([value], np.int64))
              for name, value in (("start", start), ("end", start + width), ("axis", -1))]
    match.node.outputs.clear()
    graph.nodes.append(gs.Node(op="Slice", name=match.node.name, inputs=[source, *bounds],
                               outputs=[output]))
