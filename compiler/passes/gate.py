"""Fuse the product of a value and a linear layer's result into an op.

Given:   Mul(x, act(GEMM(…)))
Result:  Gate(x, act(GEMM(…)))

The op can read columns of wider rows, so the linear layer can be merged with others, see
projections.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    fields_of,
    is_op,
    producer,
    replace,
)
from llmc.plugins.gate.op import OP as GATE
from llmc.plugins.gemm_bias_act.op import OP as GEMM


@dataclass(frozen=True)
class _Gate:
    x: gs.Tensor
    gate: gs.Tensor
    output: gs.Tensor


def gate(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    rule = Rule("gate", frozenset({"Mul"}), _check, _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(node: gs.Node, settings: Settings) -> _Gate | NoMatch | None:
    makers = [producer(tensor) for tensor in node.inputs]
    if any(isinstance(tensor, gs.Constant) for tensor in node.inputs) \
            or not any(is_op(maker, GEMM) for maker in makers):
        return None  # a scale, or no linear layer involved
    shapes = [[*(tensor.shape or ())] for tensor in node.inputs]
    if shapes[0] != shapes[1]:
        return NoMatch(f"the factors have different shapes: {shapes}", node)
    order = [0 if not is_op(maker, GEMM) else 1 if fields_of(maker)["activation"] == "none" else 2
             for maker in makers]  # the one with an activation is the gate
    x, gate_input = node.inputs if order[0] <= order[1] else node.inputs[::-1]
    return _Gate(x, gate_input, node.outputs[0])


def _rewrite(graph: gs.Graph, match: _Gate, settings: Settings) -> None:
    replace(graph, GATE, {"x": match.x, "gate": match.gate}, [match.output])
