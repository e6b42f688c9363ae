"""Make every linear layer one node, with what follows it as its epilogue.

Given:   MatMul(x, Wᵀ) (+ b), or Gemm(x, W, b)
Result:  GemmBiasAct(x, W, b), W as [out, in]

Given:   y = GemmBiasAct(x, W, b); z = y · sigmoid(y), or any other form of a known activation
Result:  z = GemmBiasAct(x, W, b, activation="silu")

Given:   y = GemmBiasAct(x, W, b); z = y + residual
Result:  z = GemmBiasRes(x, W, b, residual)

Given:   g = x·Wgᵀ; u = x·Wuᵀ (or both halves of one GEMM); y = act(g) · u
Result:  y = GatedMLP(x, [Wg; Wu], activation=act)

Activations are recognised by running them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    LAYOUT,
    Piece,
    close,
    closed_regions,
    cone,
    data_tensors,
)
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    is_llmc,
    merge_constants,
    producer,
    replace,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.flatten import flatten
from llmc.plugins.activations import REFERENCE as ACTIVATIONS

_MAX_NODES = 16


def gemm(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Make linear layers GemmBiasAct nodes without activation."""
    flatten(graph, settings, report)
    bias = Rule("bias", frozenset({"Add"}), lambda node, settings: _check_bias(graph, node),
                _rewrite_bias)
    present = {id(tensor._values): tensor for node in graph.nodes for tensor in node.inputs
               if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
    linear = Rule("linear", frozenset({"MatMul", "Gemm"}),
                  lambda node, settings: _check_linear(node, present), _rewrite_linear)
    apply_rules(graph, [linear, bias], settings, report)


@dataclass(frozen=True)
class _Linear:
    node: gs.Node
    weight: gs.Constant
    bias: gs.Tensor | None


def _check_linear(node: gs.Node, present: dict[int, gs.Constant]) -> _Linear | NoMatch | None:
    """`present` holds the graph's constants by their values: a tied weight stays one constant."""
    source, matrix = node.inputs[:2]
    values = weight(matrix)
    if values is None or isinstance(source, gs.Constant) or node.domain == "com.microsoft":
        return None
    if len(values.shape) != 2:
        return NoMatch("the weight is not a matrix", matrix)
    if node.op == "MatMul" or not node.attrs.get("transB", 0):
        values = values.transpose()
    matrix = present.setdefault(id(values), gs.Constant(_plain(matrix.name), values))
    if node.op == "MatMul":
        return _Linear(node, matrix, None)
    if node.attrs.get("alpha", 1.0) != 1.0 or node.attrs.get("beta", 1.0) != 1.0 \
            or node.attrs.get("transA", 0):
        return NoMatch("Gemm with alpha, beta or transA", node)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and (weight(bias) is None or tuple(bias.shape) != values.shape[:1]):
        return NoMatch("Gemm's C is not a bias", node)
    return _Linear(node, matrix, bias)


def _plain(name: str) -> str:
    """A weight's own name, without the notes that folding put behind it."""
    return name.split("/")[0].removesuffix(".T")


def _rewrite_linear(graph: gs.Graph, match: _Linear, settings: Settings) -> None:
    replace(graph, "GemmBiasAct", [match.node.inputs[0], match.weight, match.bias],
            list(match.node.outputs))


@dataclass(frozen=True)
class _Bias:
    gemm: gs.Node
    bias: gs.Tensor
    output: gs.Tensor


def _check_bias(graph: gs.Graph, node: gs.Node) -> _Bias | None:
    for linear, bias in (node.inputs, node.inputs[::-1]):
        source = producer(linear)
        if is_llmc(source, "GemmBiasAct") and len(source.inputs) == 2 \
                and weight(bias) is not None and len(consumers(graph, linear)) == 1 \
                and tuple(bias.shape) in _bias_shapes(source) \
                and not source.attrs.get("activation"):
            return _Bias(source, bias, node.outputs[0])
    return None


def _bias_shapes(gemm: gs.Node) -> tuple[tuple[int, ...], ...]:
    width = weight(gemm.inputs[1]).shape[0]
    return (width,), (1, width), (1, 1, width)


def _rewrite_bias(graph: gs.Graph, match: _Bias, settings: Settings) -> None:
    bias = match.bias
    if len(bias.shape) > 1:
        bias = gs.Constant(f"{bias.name}.flat", Weight.of(weight(bias).load().reshape(-1)))
    replace(graph, "GemmBiasAct", [*match.gemm.inputs, bias], [match.output])


@dataclass(frozen=True)
class _Activated:
    gemm: gs.Node
    output: gs.Tensor
    activation: str


def activation(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Give GEMMs the activation that follows them."""
    rule = Rule("activation", frozenset({"GemmBiasAct"}),
                lambda node, settings: _check_activation(graph, node), _rewrite_activation)
    apply_rules(graph, [rule], settings, report)


def _check_activation(graph: gs.Graph, node: gs.Node) -> _Activated | None:
    if node.attrs.get("activation", "none") != "none":
        return None
    result = node.outputs[0]
    users = consumers(graph, result)
    if not users or any(user is None or is_llmc(user) for user in users):
        return None
    found = None
    for piece in closed_regions(graph, result, users, ELEMENTWISE):
        if len(piece.nodes) > _MAX_NODES:
            break
        inside = {id(member) for member in piece.nodes}
        if all(id(user) in inside for user in users) and len(piece.inputs) == 1:
            name = recognise_activation(piece, result)
            if name is not None:  # the largest wins: relu may be the beginning of relu²
                found = _Activated(node, piece.output, name)
    return found


def recognise_activation(piece: Piece, source: gs.Tensor) -> str | None:
    """The name of the activation that the piece computes, found by running it."""
    x = np.linspace(-9, 9, 145, dtype=np.float32).reshape(1, 1, -1)
    try:
        actual = piece.run({source.name: x})
    except RuntimeError:
        return None
    return next((name for name, function in ACTIVATIONS.items()
                 if name != "none" and close(actual, function(x.astype(np.float64)), 1e-5)), None)


def _rewrite_activation(graph: gs.Graph, match: _Activated, settings: Settings) -> None:
    replace(graph, "GemmBiasAct", match.gemm.inputs, [match.output],
            {"activation": match.activation})


@dataclass(frozen=True)
class _Residual:
    gemm: gs.Node
    residual: gs.Tensor
    output: gs.Tensor


def residual(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Give GEMMs the residual that is added to their result."""
    rule = Rule("residual", frozenset({"Add"}),
                lambda node, settings: _check_residual(graph, node), _rewrite_residual)
    apply_rules(graph, [rule], settings, report)


def _check_residual(graph: gs.Graph, node: gs.Node) -> _Residual | None:
    order = {id(member): index for index, member in enumerate(graph.nodes)}
    found: list[tuple[int, _Residual]] = []
    for linear, other in (node.inputs, node.inputs[::-1]):
        source = producer(linear)
        if is_llmc(source, "GemmBiasAct") and not isinstance(other, gs.Constant) \
                and source.attrs.get("activation", "none") == "none" \
                and len(consumers(graph, linear)) == 1 and linear is not other \
                and other.shape is not None and linear.shape is not None \
                and len(other.shape) == len(linear.shape) and other.shape[-1] == linear.shape[-1]:
            found.append((order[id(source)], _Residual(source, other, node.outputs[0])))
    return max(found, key=lambda item: item[0])[1] if found else None  # the later GEMM adds


def _rewrite_residual(graph: gs.Graph, match: _Residual, settings: Settings) -> None:
    inputs = list(match.gemm.inputs) + [None] * (3 - len(match.gemm.inputs))
    replace(graph, "GemmBiasRes", [*inputs, match.residual], [match.output])


@dataclass(frozen=True)
class _Gated:
    output: gs.Tensor
    source: gs.Tensor
    weight: gs.Constant
    bias: gs.Constant | None
    activation: str


def gated_mlp(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Merge gate and up projections with their product."""
    data = data_tensors(graph)
    rule = Rule("gated-mlp", frozenset({"Mul"}),
                lambda node, settings: _check_gated(node, data), _rewrite_gated)
    apply_rules(graph, [rule], settings, report)


def _check_gated(node: gs.Node, data: set[int]) -> _Gated | None:
    output = node.outputs[0]
    if any(isinstance(tensor, gs.Constant) for tensor in node.inputs) or output.shape is None:
        return None
    piece = cone(output, data, ELEMENTWISE | LAYOUT)
    if isinstance(piece, NoMatch) or len(piece.nodes) > 24:
        return None
    sources = [tensor for tensor in piece.inputs if id(tensor) in data]
    gemms = [producer(tensor) for tensor in sources]
    if len(sources) not in (1, 2) or not all(
            is_llmc(gemm, "GemmBiasAct") and gemm.attrs.get("activation", "none") == "none"
            for gemm in gemms) or len({id(gemm.inputs[0]) for gemm in gemms}) != 1 \
            or len({len(gemm.inputs) for gemm in gemms}) != 1:
        return None
    width = output.shape[-1]
    widths = [weight(gemm.inputs[1]).shape[0] for gemm in gemms]
    if not isinstance(width, int) or sum(widths) != 2 * width:
        return None
    columns = np.arange(2 * width)
    orders = [columns, np.roll(columns, width), np.concatenate([columns[::2], columns[1::2]])]
    x = np.random.default_rng(0).standard_normal((1, 2, 2 * width)).astype(np.float32) * 3
    splits = np.split(x, np.cumsum(widths)[:-1], axis=-1)
    feeds = {tensor.name: part for tensor, part in zip(sources, splits, strict=True)}
    feeds.update({t.name: np.zeros((1, 2), np.int64) for t in piece.inputs if id(t) not in data
                  and t.name not in feeds})
    try:
        actual = piece.run(feeds)
    except RuntimeError:
        return None
    for order in orders:
        gate, up = np.split(x[..., order].astype(np.float64), 2, axis=-1)
        for name, function in ACTIVATIONS.items():
            if name != "none" and close(actual, function(gate) * up, 1e-5):
                return _merge(output, gemms, order, name)
    return None


def _merge(output: gs.Tensor, gemms: list[gs.Node], order: np.ndarray, activation: str) -> _Gated:
    def stack(index: int) -> gs.Constant:
        values = Weight.concat([weight(gemm.inputs[index]) for gemm in gemms]).take_rows(order)
        return merge_constants(gemms, index, values, "gate_up_proj", output)

    bias = stack(2) if len(gemms[0].inputs) > 2 else None
    return _Gated(output, gemms[0].inputs[0], stack(1), bias, activation)


def _rewrite_gated(graph: gs.Graph, match: _Gated, settings: Settings) -> None:
    replace(graph, "GatedMLP", [match.source, match.weight, match.bias], [match.output],
            {"activation": match.activation})
