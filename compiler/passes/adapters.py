"""Merge LoRA adapters into the projections of attention.

Given:   q = Gemm(x, W) + Gemm(Gemm(x, A), B), read by attention, optionally through a rotary
         embedding
Result:  q = Gemm(x, W + B·A)

Layers that share W get a separate one each, as attention takes the columns of one matrix. Adapters
of an MLP stay: there the sum costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ROTARY
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    fields_of,
    is_op,
    operand,
    operands,
    producer,
    replace,
    values_of,
)
from llmc.compiler.graph.sdpa import SDPA
from llmc.plugins.gemm_bias_act.op import OP as GEMM


@dataclass(frozen=True)
class _Adapted:
    base: gs.Node
    down: gs.Node
    up: gs.Node
    output: gs.Tensor


def adapters(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    rule = Rule("adapter", frozenset({"Add"}), lambda node, settings: _check(graph, node), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node) -> _Adapted | NoMatch | None:
    if not _goes_into_attention(graph, node.outputs[0]):
        return None
    for first, second in (node.inputs, node.inputs[::-1]):
        base, up = producer(first), producer(second)
        if not (is_op(base, GEMM) and is_op(up, GEMM)):
            continue
        down = producer(operands(up)["x"])
        if not is_op(down, GEMM) or operands(down)["x"] is not operands(base)["x"]:
            continue
        if any(fields_of(gemm)["activation"] != "none" for gemm in (base, down, up)) \
                or any(operand(gemm, "bias") is not None for gemm in (down, up)):
            return NoMatch("an adapter of a projection has an activation or a bias", up)
        if any(len(consumers(graph, gemm.outputs[0])) > 1 for gemm in (base, up)):
            return NoMatch("a projection is also read without its adapter", base)
        return _Adapted(base, down, up, node.outputs[0])
    return None


def _goes_into_attention(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """Whether attention reads the tensor, through layout ops and rotary embeddings."""
    seen: set[int] = set()
    stack = [tensor]
    while stack:
        for user in consumers(graph, stack.pop()):
            if is_op(user, SDPA):
                return True
            if user is not None and user.op in ROTARY and id(user) not in seen:
                seen.add(id(user))
                stack.extend(user.outputs)
    return False


def _rewrite(graph: gs.Graph, match: _Adapted, settings: Settings) -> None:
    given = operands(match.base)
    left, right = (operands(gemm)["weight"] for gemm in (match.up, match.down))
    merged = values_of(given["weight"]).plus_product(values_of(left), values_of(right))
    # W may have several adapters. A merge with others keeps the last part of a name.
    name = f"{given['weight'].name}.{match.output.name.replace('.', '_')}"
    replace(graph, GEMM, {**given, "weight": gs.Constant(name, merged)}, [match.output])
