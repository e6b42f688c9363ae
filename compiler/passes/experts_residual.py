"""Move the residual addition from a norm into the experts.

Given:   y, sum = AddRMSNorm(Experts(...), x, g); GemmBiasAct(y, w), or with AddLayerNorm, GatedMLP
Result:  sum = Experts(..., residual=x); GemmBiasAct(RMSNorm(sum, g), w)

Alone this saves nothing, and an AllReduce needs its terms without the residual. It enables the pass
norm_gemm to remove the norm.
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
    consumers,
    fields_of,
    is_op,
    operand,
    operands,
    producer,
    replace,
)
from llmc.compiler.passes.norm_gemm import gemm_after
from llmc.plugins import Op
from llmc.plugins.add_layer_norm.op import OP as ADD_LAYER_NORM
from llmc.plugins.add_rms_norm.op import OP as ADD_RMS_NORM
from llmc.plugins.experts.op import OP as EXPERTS
from llmc.plugins.layer_norm.op import OP as LAYER_NORM
from llmc.plugins.rms_norm.op import OP as RMS_NORM

_NORMS = {ADD_RMS_NORM.name: RMS_NORM, ADD_LAYER_NORM.name: LAYER_NORM}


def experts_residual(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    rule = Rule("experts-residual", frozenset(_NORMS),
                lambda node, settings: _check(graph, node), _rewrite)
    apply_rules(graph, [rule], settings, report)


@dataclass(frozen=True)
class _ExpertsResidual:
    experts: gs.Node
    residual: gs.Tensor
    add_norm: gs.Node
    norm: Op


def _check(graph: gs.Graph, node: gs.Node) -> _ExpertsResidual | NoMatch | None:
    x, residual = operands(node)["x"], operands(node)["residual"]
    for result, other in ((x, residual), (residual, x)):
        experts = producer(result)
        if not is_op(experts, EXPERTS):
            continue
        if operand(experts, "residual") is not None:
            return NoMatch("the experts have a residual already", experts)
        if len(consumers(graph, result)) > 1 or result is other:
            return NoMatch("the experts' result is also read without the residual", experts)
        user = gemm_after(graph, node)
        if isinstance(user, NoMatch):
            return user
        return _ExpertsResidual(experts, other, node, _NORMS[node.op])
    return None  # not a sum with experts' results


def _rewrite(graph: gs.Graph, match: _ExpertsResidual, settings: Settings) -> None:
    normed, total = match.add_norm.outputs
    given = operands(match.add_norm)
    del given["residual"]
    match.add_norm.outputs.clear()
    replace(graph, EXPERTS, {**operands(match.experts), "residual": match.residual}, [total],
            fields_of(match.experts))
    replace(graph, match.norm, {**given, "x": total}, [normed], match.add_norm.attrs)
