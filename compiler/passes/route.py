"""Recognize MoE routers.

Given:   logits = x·Wᵀ; softmax or sigmoid, TopK, optionally in groups, GatherElements, a division,
         …; y = Experts(x, experts, scores, …)
Result:  experts, scores = Route(logits)

The subgraph between the router's linear layer and the experts is run on random logits, and compared
with llmc::Route.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import Piece, close, magnitudes, scalars, token_feeds
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
_FEW = 4  # tokens that exclude most candidates
_AROUND = 16  # tokens with logits around each bound
_TOLERANCE = 1e-5  # of scores
_SCORES = ROUTE.choices["score"]
_SATURATED = 15  # from here on sigmoid is 1 in float32
_WIDEST = 1e4  # of bounds: float32 hardly distinguishes larger logits
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
        known[piece.key] = _recognize(piece, logits[0], weights[0] if weights else None)
    found = known[piece.key]
    if isinstance(found, NoMatch):
        return NoMatch(f"{found.reason} ({_path(piece)})", logits[0])
    fields, role = found
    return _Route(logits[0], weights[0] if role else None, role, chosen, scores, fields)


def _path(piece: Piece) -> str:
    """The subgraph's ops in order, for messages."""
    return " → ".join(node.op for node in piece.nodes)


def _is_linear(node: gs.Node | None) -> bool:
    """Whether a node is a GEMM with a weight, with or without a bias."""
    if node is None or is_llmc(node):
        return False
    if node.op == "Add":
        left, right = node.inputs
        return any(weight(bias) is not None and len(linear.outputs) == 1
                   and (inner := producer(linear)) is not None and inner.op in _LINEAR
                   and _is_linear(inner) for linear, bias in ((left, right), (right, left)))
    return node.op in _LINEAR and any(weight(tensor) is not None for tensor in node.inputs[:2])


def linear_layers(piece: Piece) -> list[gs.Tensor]:
    """Inputs of a subgraph that linear layers compute: a router's logits."""
    return [tensor for tensor in piece.inputs if _is_linear(producer(tensor))]


def routing(graph: gs.Graph, *outputs: gs.Tensor) -> Piece | NoMatch:
    """The subgraph above a router's outputs, up to linear layers, weights and graph inputs."""
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
            return NoMatch(f"the routing reads {describe(node)}, expected a linear layer",
                           outputs[0])
        elif id(node) not in inside:
            inside.add(id(node))
            stack.extend(node.inputs)
        if len(inside) > _MAX_NODES:
            return NoMatch(f"the routing has more than {_MAX_NODES} nodes", outputs[0])
    nodes = tuple(node for node in graph.nodes if id(node) in inside)
    return Piece(nodes, tuple(borders.values()), outputs)


def _recognize(piece: Piece, logits: gs.Tensor, bias: gs.Tensor | None) -> \
        tuple[dict[str, Any], str] | NoMatch:
    """Attributes of the Route that a subgraph computes, and the role of its weight."""
    num_experts = logits.shape[-1] if logits.shape else None
    if not isinstance(num_experts, int):
        return NoMatch("the number of experts is unknown")
    if bias is not None and tuple(bias.shape) not in ((num_experts,), (1, num_experts)):
        return NoMatch(f"the routing's weight is {list(bias.shape)}, not [{num_experts}]")
    rng = np.random.default_rng(0)
    near, far = _near_rows(rng, num_experts), _far_rows(rng, num_experts, _bounds(piece))
    rows = np.concatenate([near, far])
    drawn = np.zeros(0, np.float32)
    feeds = {**token_feeds(1, len(rows)),
             logits.name: rows if len(logits.shape) == 2 else rows[None]}
    if bias is not None:
        # Small, so that it does not determine the selection alone.
        drawn = (rng.standard_normal(num_experts) * 0.2).astype(np.float32)
        feeds[bias.name] = drawn.reshape(bias.shape)
    try:
        chosen, scores = piece.run_all(feeds)
    except CannotEvaluate as error:
        return error.reason
    chosen, scores = (made.reshape(len(rows), -1) for made in (chosen, scores))
    if chosen.shape != scores.shape or chosen.shape[1] > num_experts:
        return NoMatch(f"{chosen.shape[1]} of {num_experts} experts are selected, but "
                       f"{scores.shape[1]} have scores")
    made = _RouterOutputs(rows, len(near), chosen, scores)
    for fields, role in _selections(made, drawn, num_experts):
        for way in _score_attributes(fields, scalars(piece)):
            for given in ("expert_scale", "") if bias is not None and not role else (role,):
                weights = {given: drawn} if given else {}
                found = _compare({**fields, **way}, weights, made, magnitudes(piece))
                if found is not None:
                    return found, given
    return NoMatch("the selection of experts is not supported by llmc::Route")


@dataclass(frozen=True)
class _RouterOutputs:
    """A router's results.

    Args:
        rows: logits `[num_tokens, num_experts]`.
        near: number of leading rows within all bounds of logits.
        chosen: experts `[num_tokens, top_k]`.
        scores: `[num_tokens, top_k]`.
    """

    rows: np.ndarray
    near: int
    chosen: np.ndarray
    scores: np.ndarray

    @property
    def top_k(self) -> int:
        return int(self.chosen.shape[1])


def _near_rows(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """Ordinary logits `[num_tokens, num_experts]`.

    In some rows the best expert is in a group of low ones, so that its group is not selected.
    """
    plain = rng.standard_normal((_TOKENS, num_experts)) * 2
    uneven = 1 + 0.3 * rng.standard_normal((_TOKENS // 2, num_experts))
    sizes = [size for size in range(2, num_experts) if num_experts % size == 0] or [num_experts]
    for row in uneven:
        size = rng.choice(sizes)
        first = rng.integers(num_experts // size) * size
        best = row.max() + 0.05
        row[first:first + size] = rng.standard_normal(size) - 6
        row[first + rng.integers(size)] = best
    return np.concatenate([plain, uneven]).astype(np.float32)


def _bounds(piece: Piece) -> list[float]:
    """Constants of the subgraph that may be bounds of logits beyond ordinary ones."""
    return [number for number in magnitudes(piece) if 4 < number < _WIDEST]


def _far_rows(rng: np.random.Generator, num_experts: int, bounds: list[float]) -> np.ndarray:
    """Logits `[num_tokens, num_experts]` on both sides of possible bounds."""
    centres = np.array([sign * number for number in bounds for sign in (1, -1)])
    around = rng.standard_normal((len(centres), _AROUND, num_experts)) * 2
    return np.asarray(centres[:, None, None] + around, np.float32).reshape(-1, num_experts)


def _selections(outputs: _RouterOutputs, drawn: np.ndarray, num_experts: int) -> \
        Iterator[tuple[dict[str, Any], str]]:
    """Attributes that reproduce the selection of experts, with the role "bias" or "".

    Limits by groups are tried only if no selection without them fits.
    """
    unlimited: list[dict[str, Any]] = [{}]
    for limits in (unlimited, _limits(outputs.top_k, num_experts)):
        free = False
        for limit, score in itertools.product(limits, _SCORES):
            for role in ("bias", "") if len(drawn) else ("",):
                fields = {"top_k": outputs.top_k, "score": score, **limit}
                if all(_selects(fields, {role: drawn} if role else {}, outputs, count)
                       for count in (_FEW, outputs.near)):
                    free = True
                    yield fields, role
        if free:
            return  # it would fit with some limits too


def _limits(top_k: int, num_experts: int) -> list[dict[str, Any]]:
    """Attributes of all effective limits by groups.

    A limit to top_k or more groups by their best expert excludes none of the top_k experts.
    """
    return [{"groups": groups, "top_groups": top, "group_score": score}
            for groups in range(2, num_experts) if num_experts % groups == 0
            for top in range(1, groups) for score in ("max", "top2")
            if score == "top2" or top < top_k]


def _selects(fields: dict[str, Any], weights: dict[str, np.ndarray], outputs: _RouterOutputs,
             count: int) -> bool:
    """Whether a Route selects the same experts for the first tokens; False if it is invalid."""
    try:
        experts, _ = _run(fields, {"logits": outputs.rows[:count], **weights})
    except ValueError:
        return False
    return np.array_equal(np.sort(experts, -1), np.sort(outputs.chosen[:count], -1))


def _run(fields: dict[str, Any], inputs: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Outputs of a Route.

    Raises:
        ValueError: its attributes are invalid.
    """
    ROUTE.fit({name: array.shape for name, array in inputs.items()}, fields)
    assert ROUTE.reference is not None
    return ROUTE.reference(ROUTE.complete(fields), inputs)


def _score_attributes(fields: dict[str, Any], numbers: set[float]) -> Iterator[dict[str, Any]]:
    """Attributes that affect only scores, common ones first."""
    if fields["score"] == "sparsemixer":
        for number in sorted(number for number in numbers if 0 < number < 1):
            yield from ({"jitter": jitter} for jitter in (number, number / 2))
        return
    yield {"normalize": 0}
    # Before 0: an epsilon may be too small to matter here, but it is the model's.
    epsilons = [*sorted(value for value in numbers if 0 < value <= 1e-2), 0.0]
    yield from ({"normalize": 1, "epsilon": epsilon} for epsilon in epsilons)


def _compare(fields: dict[str, Any], weights: dict[str, np.ndarray], outputs: _RouterOutputs,
             numbers: list[float]) -> dict[str, Any] | None:
    """The attributes with the scale for which a Route reproduces the scores, or None."""
    far = np.zeros(len(outputs.rows), bool)
    far[outputs.near:] = _distinguishes(fields["score"], np.median(outputs.rows[outputs.near:], -1))
    order = np.argsort(outputs.chosen, -1)
    scores = np.where(far[:, None], np.sort(outputs.scores, -1),
                      np.take_along_axis(outputs.scores, order, -1))
    experts, reference = _run(fields, {"logits": outputs.rows, **weights})
    order = np.argsort(experts, -1)
    near = slice(0, outputs.near)
    if not np.array_equal(np.take_along_axis(experts, order, -1)[near],
                          np.sort(outputs.chosen[near], -1)):
        return None
    own_scores = np.take_along_axis(reference, order, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        measured = float(np.median(scores[near] / own_scores[near]))
    if not np.isfinite(measured):
        return None
    scale = _stored(measured, numbers)
    # In far rows some experts are equally good.
    expected = np.where(far[:, None], np.sort(reference * scale, -1), own_scores * scale)
    known = far.copy()
    known[near] = True
    return {**fields, "scale": scale} if close(scores[known], expected[known], _TOLERANCE) else None


def _distinguishes(score: str, centres: np.ndarray) -> np.ndarray:
    """Whether scores of logits around each center differ, bool per row."""
    if score == "softmax":
        return np.full(centres.shape, True)
    return (centres > 0) & ((centres < _SATURATED) | (score != "sigmoid"))


def _stored(measured: float, numbers: list[float]) -> float:
    """The scale as the model has it: 1 or one of its constants, if equal within rounding."""
    return next((sign * number for number in (1.0, *numbers) for sign in (1, -1)
                 if abs(measured - sign * number) <= 1e-6 * number), float(np.float32(measured)))


def _rewrite(graph: gs.Graph, match: _Route, settings: Settings) -> None:
    match.experts.dtype, match.scores.dtype = np.int64, np.float32
    inputs = {"logits": match.logits}
    if match.weight is not None:
        inputs[match.role] = match.weight
        if len(match.weight.shape) > 1:
            inputs[match.role] = gs.Constant(f"{match.weight.name}.flat", Weight.of(
                values_of(match.weight).load().reshape(-1)))
    replace(graph, ROUTE, inputs, [match.experts, match.scores], match.fields)
