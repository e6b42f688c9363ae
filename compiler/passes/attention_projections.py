"""Merge the linear layers of query, key and value of attention without a cache.

Given:   q = x · Wqᵀ, k = x · Wkᵀ, v = x · Wvᵀ; BidirectionalAttention(q, k, v, …)
Result:  q, k, v = Split(x · [Wq; Wk; Wv]ᵀ); BidirectionalAttention(q, k, v, …)

For targets whose ops do not read columns of wider rows (see projections.py). One product takes less
time than three, most of all of a single text, and with activations that are quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

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
)
from llmc.compiler.passes.projections import form_of, merge, width_of
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION
from llmc.plugins.gemm_bias_act.op import OP as GEMM


@dataclass(frozen=True)
class _Projections:
    gemms: tuple[gs.Node, ...]


def attention_projections(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    rule = Rule("attention-projections", frozenset({ATTENTION.name}),
                lambda node, settings: _check(graph, node), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node) -> _Projections | NoMatch | None:
    gemms = [gemm for tensor in node.inputs[:3] if is_op(gemm := producer(tensor), GEMM)]
    if len(gemms) < 3 or any(gemm.inputs[0] is not gemms[0].inputs[0] for gemm in gemms):
        return None  # of an encoder's rows, or merged already
    for gemm in gemms:
        if fields_of(gemm)["activation"] != "none":
            return NoMatch("a projection of attention has an activation", gemm)
        if consumers(graph, gemm.outputs[0]) != [node]:
            return NoMatch("a projection of attention has other readers", gemm)
        if len(operands(gemm)["weight"].outputs) > 1:
            return NoMatch("the weight is shared with another node", gemm)
    if len({form_of(gemm) for gemm in gemms}) > 1:
        return NoMatch("the projections of attention are quantized in different ways", node)
    return _Projections(tuple(gemms))


def _rewrite(graph: gs.Graph, match: _Projections, settings: Settings) -> None:
    gemms = match.gemms
    results = [gemm.outputs.pop() for gemm in gemms]
    merged = merge(graph, gemms, [operand(gemm, "bias") for gemm in gemms])
    widths = gs.Constant(f"{merged.name}.widths", np.array([*map(width_of, gemms)], np.int64))
    graph.nodes.append(gs.Node("Split", f"{merged.name}.split", {"axis": -1},
                               inputs=[merged, widths], outputs=results))
