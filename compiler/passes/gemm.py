"""Fuse every linear layer into one node, with its epilogue.

Given:   MatMul(x, Wᵀ) (+ b), or Gemm(x, W, b)
Result:  GemmBiasAct(x, W, b), W as [out, in]

Given:   y = GemmBiasAct(x, W, b); z = y · sigmoid(y), or any other form of a known activation
Result:  z = GemmBiasAct(x, W, b, activation="silu")

Given:   y = GemmBiasAct(x, W, b); z = y + residual
Result:  z = GemmBiasRes(x, W, b, residual)

Given:   g = x·Wgᵀ; u = x·Wuᵀ (or both halves of one GEMM); y = act(g) · u
Result:  y = GatedMLP(x, [Wg; Wu], activation=act)

Given:   y = Where(x > 20, x, log(1 + exp(x))), not part of a GEMM
Result:  y = Softplus(x)

Activations are recognized by probing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.activations import (
    activation_inputs,
    activation_rows,
    bounds,
    is_activation,
)
from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    LAYOUT,
    Piece,
    closed_regions,
    cone,
    data_tensors,
)
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    fields_of,
    is_llmc,
    is_op,
    merge_constants,
    operand,
    operands,
    producer,
    replace,
    values_of,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.flatten import flatten
from llmc.compiler.passes.fold import forward
from llmc.plugins.activations import REFERENCE as ACTIVATIONS
from llmc.plugins.gated_mlp.op import OP as GATED_MLP
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.gemm_bias_res.op import OP as GEMM_RESIDUAL

_MAX_NODES = 16  # of an activation
_MAX_GATED_NODES = 24


def gemm(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Replace linear layers with GemmBiasAct nodes without activation."""
    flatten(graph, settings, report)
    present = {id(tensor._values): tensor for node in graph.nodes for tensor in node.inputs
               if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
    linear = Rule("linear", frozenset({"MatMul", "Gemm"}),
                  lambda node, settings: _check_linear(node, present), _rewrite_linear)
    nothing = Rule("nothing", frozenset({"Add"}), lambda node, settings: _check_zero_addend(node),
                   _rewrite_zero_addend)
    apply_rules(graph, [nothing, linear, _bias_rule(graph)], settings, report)


@dataclass(frozen=True)
class _ZeroAddend:
    add: gs.Node
    other: gs.Tensor


def _check_zero_addend(node: gs.Node) -> _ZeroAddend | None:
    """An Add of a linear layer without features (shared experts of size 0), whose result is 0."""
    for tensor, other in (node.inputs, node.inputs[::-1]):
        source = producer(tensor)
        values = weight(source.inputs[1]) if source is not None and source.op == "MatMul" else None
        if values is not None and 0 in values.shape and tensor.shape is not None \
                and other.shape is not None and list(tensor.shape) == list(other.shape) \
                and not isinstance(other, gs.Constant):
            return _ZeroAddend(node, other)
    return None


def _rewrite_zero_addend(graph: gs.Graph, match: _ZeroAddend, settings: Settings) -> None:
    match.add.inputs = [match.other]
    forward(match.add, graph)


@dataclass(frozen=True)
class _Linear:
    node: gs.Node
    weight: gs.Constant
    bias: gs.Tensor | None


def _check_linear(node: gs.Node, present: dict[int, gs.Constant]) -> _Linear | NoMatch | None:
    """`present` holds the graph's constants by their values, so that a tied weight stays one."""
    source, matrix = node.inputs[:2]
    values = weight(matrix)
    if values is None or isinstance(source, gs.Constant):
        return None  # a product of activations (queries and keys) or of tables
    if node.domain == "com.microsoft":
        return NoMatch("this op is ONNX Runtime's contrib op", node)
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
    """A weight's name without the suffixes of folding."""
    return name.split("/")[0].removesuffix(".T")


def _rewrite_linear(graph: gs.Graph, match: _Linear, settings: Settings) -> None:
    replace(graph, GEMM, {"x": match.node.inputs[0], "weight": match.weight, "bias": match.bias},
            list(match.node.outputs))


@dataclass(frozen=True)
class _Bias:
    gemm: gs.Node
    bias: gs.Tensor
    output: gs.Tensor


def _bias_rule(graph: gs.Graph) -> Rule:
    return Rule("bias", frozenset({"Add"}), lambda node, settings: _check_bias(graph, node),
                _rewrite_bias)


def _check_bias(graph: gs.Graph, node: gs.Node) -> _Bias | NoMatch | None:
    for linear, bias in (node.inputs, node.inputs[::-1]):
        source = producer(linear)
        if not is_op(source, GEMM) or weight(bias) is None:
            continue
        width = values_of(operands(source)["weight"]).shape[0]
        if operand(source, "bias") is not None:
            return NoMatch("the GEMM has a bias already", source)
        if fields_of(source)["activation"] != "none":
            return NoMatch("the GEMM has an activation before the bias", source)
        if len(consumers(graph, linear)) > 1:
            return NoMatch("the GEMM's result is also read without the bias", source)
        if tuple(bias.shape) not in ((width,), (1, width), (1, 1, width)):
            return NoMatch(f"the constant added to the GEMM has shape {list(bias.shape)}, not "
                           f"[{width}]", source)
        return _Bias(source, bias, node.outputs[0])
    return None  # not a constant added to a GEMM's result


def _rewrite_bias(graph: gs.Graph, match: _Bias, settings: Settings) -> None:
    bias = match.bias
    if len(bias.shape) > 1:
        bias = gs.Constant(f"{bias.name}.flat", Weight.of(values_of(bias).load().reshape(-1)))
    replace(graph, GEMM, {**operands(match.gemm), "bias": bias}, [match.output])


@dataclass(frozen=True)
class _Activated:
    gemm: gs.Node
    output: gs.Tensor
    activation: str


def activation(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Fuse GEMMs with their activations, and with a bias of some columns of a larger GEMM."""
    rule = Rule("activation", frozenset({GEMM.name}),
                lambda node, settings: _check_activation(graph, node), _rewrite_activation)
    softplus = Rule("softplus", frozenset({"Where"}),
                    lambda node, settings: _check_softplus(graph, node), _rewrite_softplus)
    apply_rules(graph, [_bias_rule(graph), rule, softplus], settings, report)


def _check_activation(graph: gs.Graph, node: gs.Node) -> _Activated | NoMatch | None:
    result = node.outputs[0]
    users = consumers(graph, result)
    if fields_of(node)["activation"] != "none" \
            or any(user is None or is_llmc(user) for user in users):
        return None  # it has one, or its plain result is read
    found: _Activated | NoMatch | None = None  # None: combined with other values
    for piece in closed_regions(graph, result, users, ELEMENTWISE):
        if len(piece.nodes) > _MAX_NODES:
            break
        inside = {id(member) for member in piece.nodes}
        if not all(id(user) in inside for user in users) or len(piece.inputs) > 1:
            continue
        try:
            name = recognize_activation(piece, result)
        except CannotEvaluate as error:
            found = found or error.reason
            continue
        if name is not None:  # the largest wins: relu may be the first part of relu²
            found = _Activated(node, piece.output, name)
        elif found is None:
            found = NoMatch("the ops after the GEMM compute no known activation", piece.output)
    return found


@dataclass(frozen=True)
class _Softplus:
    x: gs.Tensor
    output: gs.Tensor


def _check_softplus(graph: gs.Graph, node: gs.Node) -> _Softplus | None:
    x = node.inputs[1]
    for piece in closed_regions(graph, x, consumers(graph, x), ELEMENTWISE):
        if piece.output is node.outputs[0]:
            return _Softplus(x, piece.output) if recognize_activation(piece, x) == "softplus" \
                else None
    return None


def _rewrite_softplus(graph: gs.Graph, match: _Softplus, settings: Settings) -> None:
    match.output.inputs.clear()
    graph.nodes.append(gs.Node(op="Softplus", name=match.output.name, inputs=[match.x],
                               outputs=[match.output]))


def recognize_activation(piece: Piece, source: gs.Tensor) -> str | None:
    """The name of the activation that a subgraph computes, determined by probing, or None.

    Raises:
        CannotEvaluate: ONNX Runtime cannot run it.
    """
    x = activation_inputs(bounds(piece)).reshape(1, 1, -1)
    actual, x = piece.run({source.name: x}), x.astype(np.float64)
    with np.errstate(over="ignore"):
        return next((name for name, function in ACTIVATIONS.items()
                     if name != "none" and is_activation(actual, x, function(x))), None)


def _rewrite_activation(graph: gs.Graph, match: _Activated, settings: Settings) -> None:
    replace(graph, GEMM, operands(match.gemm), [match.output], {"activation": match.activation})


@dataclass(frozen=True)
class _Residual:
    gemm: gs.Node
    residual: gs.Tensor
    output: gs.Tensor


def residual(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Fuse GEMMs with the residual that is added to their result."""
    rule = Rule("residual", frozenset({"Add"}),
                lambda node, settings: _check_residual(graph, node), _rewrite_residual)
    apply_rules(graph, [rule], settings, report)


def _check_residual(graph: gs.Graph, node: gs.Node) -> _Residual | NoMatch | None:
    found: list[_Residual] = []
    reason: NoMatch | None = None  # None: not an activation added to a GEMM's result
    for linear, other in (node.inputs, node.inputs[::-1]):
        source = producer(linear)
        if not is_op(source, GEMM) or isinstance(other, gs.Constant):
            continue
        if fields_of(source)["activation"] != "none":
            reason = NoMatch("the GEMM has an activation before the residual", source)
        elif len(consumers(graph, linear)) > 1 or linear is other:
            reason = NoMatch("the GEMM's result is also read without the residual", source)
        elif other.shape is None or linear.shape is None \
                or len(other.shape) != len(linear.shape) or other.shape[-1] != linear.shape[-1]:
            reason = NoMatch(f"the GEMM's result is {_shape(linear)}, the residual "
                             f"{_shape(other)}", source)
        else:
            found.append(_Residual(source, other, node.outputs[0]))
    if len(found) == 2:  # the later GEMM takes the residual
        order = {id(member): index for index, member in enumerate(graph.nodes)}
        found.sort(key=lambda residual: order[id(residual.gemm)])
    return found[-1] if found else reason


def _shape(tensor: gs.Tensor) -> str:
    return "an unknown shape" if tensor.shape is None else str(list(tensor.shape))


def _rewrite_residual(graph: gs.Graph, match: _Residual, settings: Settings) -> None:
    replace(graph, GEMM_RESIDUAL, {**operands(match.gemm), "residual": match.residual},
            [match.output])


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


def _check_gated(node: gs.Node, data: set[int]) -> _Gated | NoMatch | None:
    output = node.outputs[0]
    if any(isinstance(tensor, gs.Constant) for tensor in node.inputs) or id(output) not in data:
        return None  # a scale, or a table
    piece = cone(output, data, ELEMENTWISE | LAYOUT)
    if isinstance(piece, NoMatch):
        return piece
    if len(piece.nodes) > _MAX_GATED_NODES:
        return NoMatch(f"the product depends on {len(piece.nodes)} nodes, more than "
                       f"{_MAX_GATED_NODES}", node)
    sources = [tensor for tensor in piece.inputs if id(tensor) in data]
    gemms = [gemm for tensor in sources if is_op(gemm := producer(tensor), GEMM)]
    if len(gemms) < len(sources) or len(gemms) not in (1, 2):
        return NoMatch(f"the product comes from {len(gemms)} GEMMs and {len(sources) - len(gemms)} "
                       f"other values, not from one or two GEMMs", node)
    if any(fields_of(gemm)["activation"] != "none" for gemm in gemms) \
            or len({id(gemm.inputs[0]) for gemm in gemms}) > 1 \
            or len({tuple(operands(gemm)) for gemm in gemms}) > 1:
        return NoMatch("the GEMMs of a product differ in input or bias, or have an activation",
                       node)
    width = output.shape[-1] if output.shape else None
    widths = [values_of(operands(gemm)["weight"]).shape[0] for gemm in gemms]
    if not isinstance(width, int) or not width or sum(widths) != 2 * width:
        return NoMatch(f"the product is {_shape(output)}, its GEMMs have {widths} columns", node)
    columns = np.arange(2 * width)
    orders = [columns, np.roll(columns, width), np.concatenate([columns[::2], columns[1::2]])]
    x = activation_rows(bounds(piece), 2 * width).swapaxes(0, 1)
    splits = np.split(x, np.cumsum(widths)[:-1], axis=-1)
    feeds = {tensor.name: part for tensor, part in zip(sources, splits, strict=True)}
    feeds.update({t.name: np.zeros(x.shape[:2], np.int64) for t in piece.inputs if id(t) not in data
                  and t.name not in feeds})
    actual = piece.run(feeds)
    for order in orders:
        gate, up = np.split(x[..., order].astype(np.float64), 2, axis=-1)
        for name, function in ACTIVATIONS.items():
            with np.errstate(over="ignore"):
                if name != "none" and is_activation(actual, gate, function(gate), up):
                    return _merge(output, gemms, order, name)
    return NoMatch("the product is not an activation of one half times the other", node)


def _merge(output: gs.Tensor, gemms: list[gs.Node], order: np.ndarray, activation: str) -> _Gated:
    def stack(given: str) -> gs.Constant:
        values = Weight.concat([values_of(operands(gemm)[given]) for gemm in gemms])
        return merge_constants(gemms, given, values.take_rows(order), "gate_up_proj", output)

    bias = stack("bias") if operand(gemms[0], "bias") is not None else None
    return _Gated(output, gemms[0].inputs[0], stack("weight"), bias, activation)


def _rewrite_gated(graph: gs.Graph, match: _Gated, settings: Settings) -> None:
    replace(graph, GATED_MLP, {"x": match.source, "weight": match.weight, "bias": match.bias},
            [match.output], {"activation": match.activation})
