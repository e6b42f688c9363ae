"""Recognise what chooses the experts of a token.

Given:   logits = x·Wᵀ; softmax or sigmoid, TopK, perhaps in groups, GatherElements, a division, …;
         y = Experts(x, experts, scores, …)
Result:  experts, scores = Route(logits)

What lies between the router's linear layer and the experts is run on random logits, and compared
with llmc::Route.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import Piece, close, scalars, token_feeds
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    describe,
    is_llmc,
    is_op,
    operands,
    producer,
    replace,
    values_of,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.experts.op import OP as EXPERTS
from llmc.plugins.route.op import OP as ROUTE

_TOKENS = 256
_TOLERANCE = 1e-5  # of scores
_MAX_NODES = 96
_LINEAR = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True)
class _Route:
    logits: gs.Tensor
    weight: gs.Tensor | None
    role: str
    experts: gs.Tensor
    scores: gs.Tensor
    fields: dict[str, Any]


def route(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    known: dict[bytes, tuple[dict[str, Any], str] | NoMatch] = {}
    rule = Rule("route", frozenset({EXPERTS.name}),
                lambda node, settings: _check(graph, node, known), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node,
           known: dict[bytes, tuple[dict[str, Any], str] | NoMatch]) -> _Route | NoMatch | None:
    chosen, scores = (operands(node)[name] for name in ("experts", "scores"))
    if is_op(producer(chosen), ROUTE):
        return None
    piece = routing(graph, chosen, scores)
    if isinstance(piece, NoMatch):
        return piece
    logits = linear_layers(piece)
    weights = [tensor for tensor in piece.inputs if weight(tensor) is not None]
    if len(logits) != 1 or len(weights) > 1:
        return NoMatch(f"the routing reads {len(logits)} linear layers and {len(weights)} weights, "
                       f"expected one router and at most a bias or a scale", chosen)
    if piece.key not in known:
        known[piece.key] = _recognise(piece, logits[0], weights[0] if weights else None)
    found = known[piece.key]
    if isinstance(found, NoMatch):
        return NoMatch(f"{found.reason} ({_path(piece)})", logits[0])
    fields, role = found
    return _Route(logits[0], weights[0] if role else None, role, chosen, scores, fields)


def _path(piece: Piece) -> str:
    """The piece's ops in order, as messages show them."""
    return " → ".join(node.op for node in piece.nodes)


def _is_linear(node: gs.Node | None) -> bool:
    """Whether a node is a product with a weight, or such a product plus a bias."""
    if node is None or is_llmc(node):
        return False
    if node.op == "Add":
        left, right = node.inputs
        return any(weight(bias) is not None and len(linear.outputs) == 1
                   and (inner := producer(linear)) is not None and inner.op in _LINEAR
                   and _is_linear(inner) for linear, bias in ((left, right), (right, left)))
    return node.op in _LINEAR and any(weight(tensor) is not None for tensor in node.inputs[:2])


def linear_layers(piece: Piece) -> list[gs.Tensor]:
    """What a piece reads of linear layers: of a router the logits."""
    return [tensor for tensor in piece.inputs if _is_linear(producer(tensor))]


def routing(graph: gs.Graph, *outputs: gs.Tensor) -> Piece | NoMatch:
    """What lies above tensors of a router, up to linear layers, weights and the graph's inputs."""
    inside: set[int] = set()
    borders: dict[int, gs.Tensor] = {}
    stack = [*outputs]
    while stack:
        tensor = stack.pop()
        node = producer(tensor)
        if tensor.is_empty() or (isinstance(tensor, gs.Constant)
                                 and not isinstance(tensor._values, Weight)):
            continue
        if node is None or _is_linear(node):
            borders[id(tensor)] = tensor
        elif is_llmc(node):
            return NoMatch(f"the routing comes from {describe(node)} and not from a linear layer",
                           outputs[0])
        elif id(node) not in inside:
            inside.add(id(node))
            stack.extend(node.inputs)
        if len(inside) > _MAX_NODES:
            return NoMatch(f"the routing has more than {_MAX_NODES} nodes", outputs[0])
    nodes = tuple(node for node in graph.nodes if id(node) in inside)
    return Piece(nodes, tuple(borders.values()), outputs)


def _recognise(piece: Piece, logits: gs.Tensor, own: gs.Tensor | None) -> \
        tuple[dict[str, Any], str] | NoMatch:
    """The fields of llmc::Route that the piece is, and which of its inputs the weight is."""
    num_experts = logits.shape[-1] if logits.shape else None
    if not isinstance(num_experts, int):
        return NoMatch("the number of experts is not known")
    if own is not None and tuple(own.shape) not in ((num_experts,), (1, num_experts)):
        return NoMatch(f"the routing's weight is {list(own.shape)}, not [{num_experts}]")
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((_TOKENS, num_experts)) * 2).astype(np.float32)
    drawn = np.zeros(0, np.float32)
    feeds = {**token_feeds(1, _TOKENS),
             logits.name: rows if len(logits.shape) == 2 else rows[None]}
    if own is not None:
        # Small, so that it does not choose alone.
        drawn = (rng.standard_normal(num_experts) * 0.2).astype(np.float32)
        feeds[own.name] = drawn.reshape(own.shape)
    try:
        chosen, scores = piece.run_all(feeds)
    except CannotEvaluate as error:
        return error.reason
    chosen, scores = (made.reshape(_TOKENS, -1) for made in (chosen, scores))
    if chosen.shape != scores.shape or chosen.shape[1] > num_experts:
        return NoMatch(f"of {num_experts} experts, {chosen.shape[1]} are chosen and "
                       f"{scores.shape[1]} weighed")
    order = np.argsort(chosen, -1)
    chosen, scores = (np.take_along_axis(made, order, -1) for made in (chosen, scores))
    for fields, role in _candidates(chosen.shape[1], num_experts, own is not None,
                                    scalars(piece)):
        given = {"logits": rows, **({role: drawn} if role else {})}
        try:
            found = _compare(fields, given, chosen, scores)
        except ValueError:
            continue  # no such Route
        if found is not None:
            return found, role
    return NoMatch("what chooses experts is nothing that llmc::Route does")


def _compare(fields: dict[str, Any], inputs: dict[str, np.ndarray], chosen: np.ndarray,
             scores: np.ndarray) -> dict[str, Any] | None:
    """The fields with the scale that makes a Route of them give these scores; None if none does."""
    shapes = {name: array.shape for name, array in inputs.items()}
    ROUTE.fit(shapes, fields)
    assert ROUTE.reference is not None
    own_chosen, own = ROUTE.reference(ROUTE.complete(fields), inputs)
    order = np.argsort(own_chosen, -1)
    if not np.array_equal(np.take_along_axis(own_chosen, order, -1), chosen):
        return None
    own = np.take_along_axis(own, order, -1)
    scale = float(np.median(scores / own))
    if not np.isfinite(scale) or not close(scores, own * scale, _TOLERANCE):
        return None
    return {**fields, "scale": float(np.float32(round(scale, 6)))}


def _candidates(top_k: int, num_experts: int, has_weight: bool, numbers: set[float]) -> \
        Iterator[tuple[dict[str, Any], str]]:
    """Fields, and which input a weight is, "" for none; what is common first."""
    # Those that are there before none: too small to show, they are still what the model adds.
    epsilons = [*sorted(value for value in numbers if 0 < value <= 1e-2), 0.0]
    ways: list[dict[str, Any]] = [{"normalize": 0}]
    ways += ({"normalize": 1, "epsilon": epsilon} for epsilon in epsilons)
    limits: list[dict[str, Any]] = [{}]
    for groups in (count for count in range(2, num_experts) if num_experts % count == 0):
        limits += ({"groups": groups, "top_groups": top, "group_score": score}
                   for top in range(1, groups) for score in ("max", "top2"))
    for limit in limits:
        for score in ("softmax", "sigmoid", "sqrtsoftplus"):
            for way in ways:
                for role in ("bias", "expert_scale", "") if has_weight else ("",):
                    yield {"top_k": top_k, "score": score, **way, **limit}, role
    for value in sorted(number for number in numbers if 0 < number < 1):
        for jitter in (value, value / 2):
            yield {"top_k": top_k, "score": "sparsemixer", "jitter": jitter}, ""


def _rewrite(graph: gs.Graph, match: _Route, settings: Settings) -> None:
    match.experts.dtype, match.scores.dtype = np.int64, np.float32
    inputs = {"logits": match.logits}
    if match.weight is not None:
        inputs[match.role] = match.weight
        if len(match.weight.shape) > 1:
            inputs[match.role] = gs.Constant(f"{match.weight.name}.flat", Weight.of(
                values_of(match.weight).load().reshape(-1)))
    replace(graph, ROUTE, inputs, [match.experts, match.scores], match.fields)
