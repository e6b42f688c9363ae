"""Move gates of attention heads after the point where heads are joined.

Given:   Sdpa → Transpose → Mul(·, Sigmoid(gate)) → Reshape, on [batch, seq, heads, head_dim]
Result:  Sdpa → Transpose → Reshape → Mul(·, Sigmoid(Reshape(gate))), on [batch, seq, heads *
         head_dim]; a gate with one value per head, and constants per head, are expanded first
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT
from llmc.compiler.graph.rewrite import consumers, is_op, producer, tidy, values_of
from llmc.compiler.graph.sdpa import SDPA


def join_before_gates(graph: gs.Graph) -> None:
    """Rewrite each gate of attention's output."""
    stack = [node for node in graph.nodes if node.op == "Reshape"
             and (above := _gate_above(graph, node)) is not None
             and any(_is_attention(tensor) for tensor in above.inputs)]
    while stack:
        joint = stack.pop()
        gate = _gate_above(graph, joint)
        if gate is None:
            continue
        heads, result = gate.outputs[0].shape[2:], joint.outputs[0]
        inputs = []
        for index, tensor in enumerate(gate.inputs):
            if isinstance(tensor, gs.Constant):
                tensor = _for_each_number(tensor, heads, result.name)
            else:
                name = f"{result.name}.{index}"
                joined = gs.Variable(name, tensor.dtype, result.shape)
                stack.append(gs.Node(op="Reshape", name=name, attrs=dict(joint.attrs),
                                     inputs=[_expanded(graph, tensor, heads, name),
                                             joint.inputs[1]], outputs=[joined]))
                graph.nodes.append(stack[-1])
                tensor = joined
            inputs.append(tensor)
        joint.outputs.clear()
        graph.nodes.append(gs.Node(op=gate.op, name=gate.name, attrs=dict(gate.attrs),
                                   inputs=inputs, outputs=[result]))
        gate.outputs.clear()
        gate.inputs.clear()
    tidy(graph)


def _gate_above(graph: gs.Graph, joint: gs.Node) -> gs.Node | None:
    """The elementwise node of the joined tensor, if its other inputs are like it or constants."""
    before, after = joint.inputs[0], joint.outputs[0].shape
    node, shape = producer(before), before.shape
    if node is None or node.op not in ELEMENTWISE or shape is None or len(shape) != 4 \
            or not all(isinstance(size, int) for size in shape[2:]) or after is None \
            or [*after] != [*shape[:2], shape[2] * shape[3]] \
            or len(consumers(graph, before)) != 1:
        return None
    return node if all((isinstance(tensor, gs.Constant) and _lies_in(tensor.shape, shape[2:]))
                       or (len(tensor.shape or ()) == 4 and [*tensor.shape[:2]] == [*shape[:2]])
                       for tensor in node.inputs) else None


def _lies_in(shape: Sequence[int], heads: Sequence[int]) -> bool:
    """Whether a constant's shape broadcasts to these heads, equally for every token."""
    padded = [1] * (4 - len(shape)) + [*shape]
    return len(padded) == 4 and padded[:2] == [1, 1] and all(
        size in (1, whole) for size, whole in zip(padded[2:], heads, strict=True))


def _for_each_number(constant: gs.Constant, heads: Sequence[int], name: str) -> gs.Constant:
    """The constant with one element per element of these heads; unchanged if it is a scalar."""
    size = math.prod(constant.shape)
    if size == 1:
        return constant
    index = np.broadcast_to(np.arange(size).reshape(constant.shape), (1, 1, *heads)).reshape(-1)
    return gs.Constant(f"{constant.name}/{name}",
                       values_of(constant).reshape((size,)).take_rows(index))


def _is_attention(tensor: gs.Tensor) -> bool:
    """Whether a tensor is attention's output, in any layout."""
    node = producer(tensor)
    while node is not None and node.op in LAYOUT:
        node = producer(node.inputs[0])
    return is_op(node, SDPA)


def _expanded(graph: gs.Graph, tensor: gs.Tensor, heads: list[int], name: str) -> gs.Tensor:
    """The tensor broadcast to these heads."""
    if [*tensor.shape[2:]] == [*heads]:
        return tensor
    result = gs.Variable(f"{name}.expanded", tensor.dtype, [*tensor.shape[:2], *heads])
    graph.nodes.append(gs.Node(
        op="Expand", name=result.name, outputs=[result],
        inputs=[tensor, gs.Constant(f"{result.name}.shape", np.array([1, 1, *heads]))]))
    return result
