"""Fuse a group norm with gates and weights that are multiplied before or after it.

Given:   Mul(GroupRMSNorm(x, w), g), or GroupRMSNorm(Mul(x, g), w), or either with RMSNorm
Result:  GroupRMSNorm(x, w, g), with gate_first in the second case

Given:   Mul(GroupRMSNorm(x, w), c), c a constant for each column
Result:  GroupRMSNorm(x, w · c)
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
    replace,
    values_of,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.gated_mlp.op import OP as GATED_MLP
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.group_rms_norm.op import OP as GROUP_RMS_NORM
from llmc.plugins.rms_norm.op import OP as RMS_NORM


def norm_gate(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    gain = Rule("norm-gain", frozenset({"Mul"}), lambda node, settings: _check_gain(graph, node),
                _rewrite_gain)
    after = Rule("norm-gate", frozenset({"Mul"}), lambda node, settings: _check_after(graph, node),
                 _rewrite_gate)
    before = Rule("gate-norm", frozenset({GROUP_RMS_NORM.name, RMS_NORM.name}),
                  lambda node, settings: _check_before(graph, node), _rewrite_gate)
    apply_rules(graph, [gain, after, before], settings, report)


def _norm_alone(graph: gs.Graph, tensor: gs.Tensor) -> gs.Node | NoMatch | None:
    """The norm without a gate whose result is read by one node only."""
    norm = producer(tensor)
    if not is_op(norm, GROUP_RMS_NORM, RMS_NORM):
        return None
    if operand(norm, "gate") is not None:
        return NoMatch("the norm has a gate already", norm)
    if len(consumers(graph, tensor)) > 1:
        return NoMatch("the norm's result is also read without the factor", norm)
    return norm


@dataclass(frozen=True)
class _Gain:
    norm: gs.Node
    factor: gs.Constant
    output: gs.Tensor


def _check_gain(graph: gs.Graph, node: gs.Node) -> _Gain | NoMatch | None:
    for normed, factor in (node.inputs, node.inputs[::-1]):
        norm = _norm_alone(graph, normed)
        if not isinstance(norm, gs.Node) or weight(factor) is None:
            continue
        if tuple(factor.shape) != tuple(operands(norm)["weight"].shape):
            return NoMatch(f"the norm's result is multiplied by a constant of shape "
                           f"{list(factor.shape)}", norm)
        return _Gain(norm, factor, node.outputs[0])
    return None  # not a norm's result times weights


def _rewrite_gain(graph: gs.Graph, match: _Gain, settings: Settings) -> None:
    gain = operands(match.norm)["weight"]
    scaled = values_of(gain).load().astype(np.float32) * values_of(match.factor).load()
    inputs = {**operands(match.norm), "weight": gs.Constant(
        f"{match.factor.name}.gain", Weight.of(scaled.astype(np.float32)))}
    op = GROUP_RMS_NORM if is_op(match.norm, GROUP_RMS_NORM) else RMS_NORM
    replace(graph, op, inputs, [match.output], match.norm.attrs)


@dataclass(frozen=True)
class _Gate:
    norm: gs.Node
    x: gs.Tensor
    gate: gs.Tensor
    output: gs.Tensor
    first: bool


def _check_after(graph: gs.Graph, node: gs.Node) -> _Gate | NoMatch | None:
    reason: NoMatch | None = None  # None: not a norm's result times another value
    for normed, gate in (node.inputs, node.inputs[::-1]):
        norm = _norm_alone(graph, normed)
        if isinstance(norm, NoMatch):
            reason = norm
        if not isinstance(norm, gs.Node) or isinstance(gate, gs.Constant) or gate is normed:
            continue
        if _shape(gate) != _shape(normed):
            reason = NoMatch(f"the norm's result is multiplied by a value of shape "
                             f"{_shape(gate)}", norm)
            continue
        return _Gate(norm, operands(norm)["x"], gate, node.outputs[0], first=False)
    return reason


def _check_before(graph: gs.Graph, node: gs.Node) -> _Gate | NoMatch | None:
    given = operands(node)
    product = producer(given["x"])
    if product is None or product.op != "Mul" or any(
            isinstance(tensor, gs.Constant) for tensor in product.inputs):
        return None  # not a norm of a product
    if "gate" in given:
        return NoMatch("the norm has a gate already", node)
    if len(consumers(graph, given["x"])) > 1:
        return NoMatch("the product before the norm is also read without it", node)
    if is_op(node, RMS_NORM) and any(is_op(user, GEMM, GATED_MLP)
                                     for user in consumers(graph, node.outputs[0])):
        return NoMatch("a GEMM is fused with this norm", node)
    x, gate = sorted(product.inputs, key=lambda tensor: is_op(producer(tensor), GEMM))
    if _shape(x) != _shape(gate):
        return NoMatch(f"shapes {_shape(x)} and {_shape(gate)} are multiplied before the norm",
                       node)
    return _Gate(node, x, gate, node.outputs[0], first=True)


def _shape(tensor: gs.Tensor) -> list[int | str]:
    return [*(tensor.shape or ())]


def _rewrite_gate(graph: gs.Graph, match: _Gate, settings: Settings) -> None:
    fields = fields_of(match.norm)
    replace(graph, GROUP_RMS_NORM,
            {"x": match.x, "weight": operands(match.norm)["weight"], "gate": match.gate},
            [match.output], {"groups": fields.get("groups", 1), "epsilon": fields["epsilon"],
                             "gate_first": int(match.first)})
