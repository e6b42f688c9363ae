"""Recognize RMSNorm and LayerNorm in any form.

Given:   x → Pow → ReduceMean → Add(eps) → Sqrt → Reciprocal → Mul(x) → Mul(w), or
         RMSNormalization(x, w), or LayerNormalization(x, w, b), or ReduceMean, Sub, …
Result:  RMSNorm(x, w) or LayerNorm(x, w, b)

Given:   MatMul(x, W) · r, r the factor of x in the first form
Result:  MatMul(RMSNorm(x, ones), W)

The nodes between x and the result are run on random x, w and b; a match has to compute the norm. A
norm without weights gets a weight of ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE, Piece, closed_regions, magnitudes, scalars
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    constant,
    consumers,
    is_op,
    operands,
    producer,
    replace,
    scalar,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins import Op
from llmc.plugins.add_layer_norm.op import OP as ADD_LAYER_NORM
from llmc.plugins.add_rms_norm.op import OP as ADD_RMS_NORM
from llmc.plugins.layer_norm.op import OP as LAYER_NORM
from llmc.plugins.rms_norm.op import OP as RMS_NORM

_ALLOWED = ELEMENTWISE | {"ReduceMean"}
_MAX_NODES = 16
_WIDEST = 1e9  # of bounds: the square of twice this value fits in float32
# The op of a norm fused with the Add before it.
_ADDED = {RMS_NORM.name: ADD_RMS_NORM, LAYER_NORM.name: ADD_LAYER_NORM}


@dataclass(frozen=True)
class _Norm:
    op: Op
    source: gs.Tensor
    output: gs.Tensor
    weight: gs.Tensor | None
    bias: gs.Tensor | None
    width: int
    epsilon: float


def norm(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    standard = Rule("norm-op", frozenset({"RMSNormalization", "LayerNormalization",
                                          "SimplifiedLayerNormalization"}), _standard, _rewrite)
    decomposed = Rule("norm-decomposed", frozenset({"ReduceMean"}),
                      lambda node, settings: _decomposed(graph, node), _rewrite)
    scaled = Rule("norm-behind-product", frozenset({"ReduceMean"}),
                  lambda node, settings: _check_scaled(graph, node), _rewrite_scaled)
    apply_rules(graph, [standard, scaled, decomposed], settings, report)


@dataclass(frozen=True)
class _ScaledProduct:
    source: gs.Tensor
    product: gs.Node
    scaled: gs.Node
    epsilon: float


def _check_scaled(graph: gs.Graph, node: gs.Node) -> _ScaledProduct | NoMatch | None:
    """x · W / sqrt(mean(x²) + eps): a factor per token commutes with the product."""
    for source, seeds in _sources(node):
        for piece in closed_regions(graph, source, seeds, _ALLOWED):
            if len(piece.nodes) > _MAX_NODES:
                break
            readers = consumers(graph, piece.output)
            scaled = readers[0] if len(readers) == 1 else None
            if scaled is None or scaled.op not in ("Mul", "Div") \
                    or [*(piece.output.shape or ())][-1:] != [1]:
                continue
            other = next((t for t in scaled.inputs if t is not piece.output), None)
            product = None if other is None else producer(other)
            if product is None or product.op != "MatMul" or product.inputs[0] is not source \
                    or len(consumers(graph, other)) != 1 \
                    or (scaled.op == "Div" and scaled.inputs[0] is not other):
                continue
            if not isinstance(source.shape[-1], int) or len(piece.inputs) > 1:
                return NoMatch("the divisor of a product is not computed from the same rows", node)
            x = _rows(piece, source.shape[-1]).astype(np.float64)
            actual = piece.run({source.name: x.astype(np.float32)})
            power = -0.5 if scaled.op == "Mul" else 0.5
            for epsilon in [value for value in scalars(piece) if 0 < value < 1e-2] or [0.0]:
                expected = ((x**2).mean(-1, keepdims=True) + epsilon)**power
                if _near(actual, expected, expected):
                    return _ScaledProduct(source, product, scaled, epsilon)
    return None


def _rewrite_scaled(graph: gs.Graph, match: _ScaledProduct, settings: Settings) -> None:
    result, width = match.scaled.outputs[0], match.source.shape[-1]
    normed = gs.Variable(f"{result.name}.normed", match.source.dtype, match.source.shape)
    gain = gs.Constant(f"ones.{width}.{result.name}", Weight.of(np.ones(width, np.float32)))
    match.product.inputs[0] = normed
    match.scaled.outputs.clear()
    match.product.outputs[0] = result
    replace(graph, RMS_NORM, {"x": match.source, "weight": gain}, [normed],
            {"epsilon": match.epsilon})


def _standard(node: gs.Node, settings: Settings) -> _Norm | NoMatch:
    axis, rank = node.attrs.get("axis", -1), len(node.inputs[0].shape or ())
    gain = node.inputs[1]
    shape = gain.shape
    if axis not in (-1, rank - 1) or shape is None or len(shape) != 1:
        return NoMatch("the norm is not over the last axis only", node)
    op = LAYER_NORM if node.op == "LayerNormalization" else RMS_NORM
    bias = node.inputs[2] if len(node.inputs) > 2 and not node.inputs[2].is_empty() else None
    if bias is not None and _is_zero(bias):
        bias = None
    return _Norm(op, node.inputs[0], node.outputs[0], gain, bias, shape[0],
                 float(node.attrs.get("epsilon", 1e-5)))


def _is_zero(tensor: gs.Tensor) -> bool:
    array = constant(tensor)
    return array is not None and not array.any()


def _decomposed(graph: gs.Graph, node: gs.Node) -> _Norm | NoMatch:
    """Match from a mean: of x (LayerNorm) or of x² (RMSNorm)."""
    reason = NoMatch("the nodes around this mean compute neither RMSNorm nor LayerNorm", node)
    for source, seeds in _sources(node):
        width = source.shape[-1] if source.shape else None
        if not isinstance(width, int):
            return NoMatch("the last dimension of the norm's input is unknown", source)
        best: _Norm | None = None
        for piece in closed_regions(graph, source, seeds, _ALLOWED):
            if len(piece.nodes) > _MAX_NODES:
                break
            try:
                best = _prove(piece, source, width) or best  # the largest wins
            except CannotEvaluate as error:
                reason = error.reason
        if best:
            return best
    return reason


def _sources(mean: gs.Node) -> Iterator[tuple[gs.Tensor, list[gs.Node]]]:
    """Candidates for x, each with the norm's first nodes below it."""
    inner = mean.inputs[0]
    square = inner.inputs[0] if inner.inputs else None
    if square is not None and ((square.op == "Pow" and scalar(square.inputs[1]) == 2.0) or
                               (square.op == "Mul" and square.inputs[0] is square.inputs[1])):
        source = square.inputs[0]
        cast = source.inputs[0] if source.inputs else None
        yield source, [square]
        if cast is not None and cast.op == "Cast":
            yield cast.inputs[0], [cast]
        return
    users = [user for user in inner.outputs if user is mean or user.op == "Sub"]
    yield inner, users


def _prove(piece: Piece, source: gs.Tensor, width: int) -> _Norm | None:
    """The norm that a subgraph computes, or None.

    Raises:
        CannotEvaluate: ONNX Runtime cannot run it.
    """
    weights = [t for t in piece.inputs if t is not source]
    weights += [t for node in piece.nodes for t in node.inputs
                if (array := constant(t)) is not None and array.shape == (width,) and width > 1]
    if any(tuple(w.shape) != (width,) for w in weights) or len(weights) > 2:
        return None
    small = {scalar(t) for node in piece.nodes for t in node.inputs if isinstance(t, gs.Constant)
             and constant(t) is not None}
    epsilons = [value for value in small if value is not None and 0 < value < 1e-2] or [0.0]
    rng = np.random.default_rng(0)
    x = _rows(piece, width)
    # Results have to exceed the subgraph's constants too.
    spread = np.resize([1.0, *(2 * number for number in _beyond(piece))], width)
    drawn = {w.name: (rng.standard_normal(width) * spread).astype(np.float32)
             for w in weights if isinstance(w._values, Weight)}
    values = {w.name: drawn[w.name] if w.name in drawn else np.asarray(constant(w))
              for w in weights}
    actual = piece.run({source.name: x, **drawn})
    for epsilon in epsilons:
        for gain, bias in _roles(weights):
            for op in (RMS_NORM, LAYER_NORM):
                centred = x - x.mean(-1, keepdims=True) if op is LAYER_NORM else x
                normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
                factor, offset = (default if tensor is None else values[tensor.name]
                                  for tensor, default in ((gain, np.ones(1)), (bias, np.zeros(1))))
                if (op is LAYER_NORM or bias is None) and _near(
                        actual, normed * factor + offset,
                        np.maximum(np.abs(normed), 1) * np.abs(factor) + np.abs(offset)):
                    return _Norm(op, source, piece.output, gain, bias, width, epsilon)
    return None


def _rows(piece: Piece, width: int) -> np.ndarray:
    """float32 `[rows, 3, width]`: small, ordinary, and larger than each of the constants."""
    scales = np.array([1e-2, 1.0, *(2 * number for number in _beyond(piece))])
    rows = np.random.default_rng(0).standard_normal((len(scales), 3, width))
    return np.asarray(rows * scales[:, None, None], np.float32)


def _beyond(piece: Piece) -> list[float]:
    """Constants of the subgraph that ordinary rows do not exceed, such as bounds."""
    return [number for number in magnitudes(piece) if 1 < number < _WIDEST]


def _near(actual: np.ndarray, expected: np.ndarray, scale: np.ndarray) -> bool:
    """Whether all elements agree within 1e-5 of the magnitude of their operands."""
    return actual.shape == expected.shape and bool(
        (np.abs(actual - expected) <= 1e-5 * scale).all())


def _roles(weights: list[gs.Tensor]) -> list[tuple[gs.Tensor | None, gs.Tensor | None]]:
    if not weights:
        return [(None, None)]
    if len(weights) == 1:
        return [(weights[0], None)]
    return [(weights[0], weights[1]), (weights[1], weights[0])]


def _rewrite(graph: gs.Graph, match: _Norm, settings: Settings) -> None:
    gain = match.weight
    if gain is None:
        gain = gs.Constant(f"ones.{match.width}.{match.output.name}",
                           Weight.of(np.ones(match.width, np.float32)))
    inputs = {"x": match.source, "weight": gain}
    if match.bias is not None:
        inputs["bias"] = match.bias
    replace(graph, match.op, inputs, [match.output], {"epsilon": match.epsilon})


@dataclass(frozen=True)
class _AddNorm:
    add: gs.Node
    norm: gs.Node


def add_norm(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Fuse a residual Add, unless a GEMM has taken it, with the norm that follows.

    Given:   sum = Add(x, residual); y = RMSNorm(sum, w)
    Result:  y, sum = AddRMSNorm(x, residual, w)
    """
    rule = Rule("add-norm", frozenset(_ADDED),
                lambda node, settings: _check_add(graph, node), _rewrite_add)
    apply_rules(graph, [rule], settings, report)


def _check_add(graph: gs.Graph, node: gs.Node) -> _AddNorm | NoMatch | None:
    add = producer(node.inputs[0])
    if is_op(add, *_ADDED.values()) and node.inputs[0] is add.outputs[1]:
        return NoMatch("the Add is fused with another norm of the same sum", add)
    if add is None or add.op != "Add":
        return None  # no Add before it
    if any(isinstance(t, gs.Constant) for t in add.inputs):
        return NoMatch("a constant is added before the norm", add)
    left, right = add.inputs
    if left.shape is not None and right.shape is not None and (
            len(left.shape) != len(right.shape) or left.shape[-1] != right.shape[-1]):
        return NoMatch(f"shapes {list(left.shape)} and {list(right.shape)} are added before the "
                       f"norm", add)
    first = next(user for user in consumers(graph, add.outputs[0])
                 if is_op(user, RMS_NORM, LAYER_NORM))
    if first is not node:
        return NoMatch("the Add is fused with another norm of the same sum", first)
    return _AddNorm(add, node)


def _rewrite_add(graph: gs.Graph, match: _AddNorm, settings: Settings) -> None:
    left, right = match.add.inputs
    total, result = match.add.outputs[0], match.norm.outputs[0]
    inputs = {**operands(match.norm), "x": left, "residual": right}
    match.add.outputs.clear()
    replace(graph, _ADDED[match.norm.op], inputs, [result, total], match.norm.attrs)


