"""Fold a constant that scales the columns of a linear layer's result into its weights.

Given:   y = GemmBiasAct(x, W, b) without activation; z = y * scale, scale [out]
Result:  z = GemmBiasAct(x, scale * W, scale * b)

Encoders of images have such scales (LayerScale) before their residuals.
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
    operands,
    producer,
    replace,
    values_of,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.gemm_bias_act.op import OP as GEMM


@dataclass(frozen=True)
class _Scaled:
    gemm: gs.Node
    scale: Weight
    output: gs.Tensor


def layer_scale(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    apply_rules(graph, [Rule("layer-scale", frozenset({"Mul"}),
                             lambda node, settings: _check(graph, node), _rewrite)],
                settings, report)


def _check(graph: gs.Graph, node: gs.Node) -> _Scaled | NoMatch | None:
    for product, scale in (node.inputs, node.inputs[::-1]):
        gemm, values = producer(product), weight(scale)
        if not is_op(gemm, GEMM) or values is None:
            continue
        matrix = values_of(operands(gemm)["weight"])
        if tuple(values.shape) != matrix.shape[:1]:
            return NoMatch(f"the constant has shape {list(values.shape)}, expected "
                           f"[{matrix.shape[0]}]", scale)
        if fields_of(gemm)["activation"] != "none" or len(consumers(graph, product)) > 1:
            return NoMatch("the layer has an activation, or its result is also read unscaled",
                           gemm)
        if matrix.stored is not None:
            return NoMatch("the layer's weight is quantized", gemm)
        return _Scaled(gemm, values, node.outputs[0])
    return None


def _rewrite(graph: gs.Graph, match: _Scaled, settings: Settings) -> None:
    factors = match.scale.load().astype(np.float32)
    given = operands(match.gemm)
    matrix = given["weight"]
    inputs = {**given, "weight": gs.Constant(
        f"{matrix.name}/{match.output.name}",
        values_of(matrix).transpose().scale_columns(factors).transpose())}
    if "bias" in given:
        bias = given["bias"]
        inputs["bias"] = gs.Constant(f"{bias.name}/{match.output.name}", Weight.of(
            values_of(bias).load() * factors, bias.name))
    replace(graph, GEMM, inputs, [match.output], match.gemm.attrs)
