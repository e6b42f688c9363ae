"""Fuse MoE experts: two GEMMs per token and expert, with an activation between.

Given:   both = ExpertsUp(x, experts, W); inner = act(gate) · up, of halves or alternate columns;
         y = ExpertsDown(inner, experts, scores, D)
Result:  y = Experts(x, experts, scores, W, D, activation=act)

The subgraph between the GEMMs is probed. Rows of W are reordered for llmc::Experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.activations import activation_rows, bounds, is_activation
from llmc.compiler.graph.expert_products import EXPERTS_DOWN, EXPERTS_UP
from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT, Piece, cone, data_tensors
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    fields_of,
    is_op,
    operand,
    operands,
    producer,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.activations import REFERENCE as ACTIVATIONS
from llmc.plugins.experts.op import OP as EXPERTS

_FEW = 256  # results that already exclude most candidates


@dataclass(frozen=True)
class _Experts:
    up: gs.Node
    down: gs.Node
    fields: dict[str, Any]
    rows: np.ndarray  # of the first weight, in llmc::Experts' order


def experts(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    known: dict[bytes, tuple[dict[str, Any], np.ndarray] | NoMatch] = {}
    rule = Rule("experts", frozenset({EXPERTS_DOWN.name}),
                lambda node, settings: _check(node, data, known), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(node: gs.Node, data: set[int],
           known: dict[bytes, tuple[dict[str, Any], np.ndarray] | NoMatch]) -> _Experts | NoMatch:
    inner = operands(node)["x"]
    piece = cone(inner, data, ELEMENTWISE | LAYOUT)
    if isinstance(piece, NoMatch):
        return NoMatch(f"between the experts' GEMMs: {piece.reason}", piece.value)
    sources = [tensor for tensor in piece.inputs if id(tensor) in data]
    up = producer(sources[0]) if len(sources) == 1 else None
    if not is_op(up, EXPERTS_UP) or len(piece.inputs) > 1:
        return NoMatch("the experts' second GEMM does not read the first alone", inner)
    if operands(up)["experts"] is not operands(node)["experts"]:
        return NoMatch("the two GEMMs are of different experts", node)
    both, width = _width(up), _width(node, of_input=True)
    if piece.key not in known:
        known[piece.key] = find_activation(piece, sources[0], both, width)
    found = known[piece.key]
    if isinstance(found, NoMatch):
        return found
    fields, rows = found
    top_k = operands(node)["experts"].shape[-1]
    return _Experts(up, node, {"top_k": int(top_k), **fields}, rows)


def _width(node: gs.Node, of_input: bool = False) -> int:
    """The output width of an experts' GEMM, or its input width."""
    axis = 1 + (bool(fields_of(node)["transposed"]) != of_input)
    return values_of(operands(node)["weight"]).shape[axis]


def find_activation(piece: Piece, source: gs.Tensor, both: int, width: int) -> \
        tuple[dict[str, Any], np.ndarray] | NoMatch:
    """The activation between two GEMMs of experts.

    Args:
        piece: the subgraph between the GEMMs.
        source: output of the first GEMM.
        both: its width.
        width: of the second GEMM's input.

    Returns:
        Attributes of llmc::Experts, and the first GEMM's columns in its order.
    """
    if both not in (width, 2 * width):
        return NoMatch(f"the experts' GEMMs are {both} and {width} wide", piece.output)
    numbers = bounds(piece)
    x = activation_rows(numbers, both)
    actual = piece.run({source.name: x}).reshape(-1)
    columns = np.arange(both)
    orders = [columns] if both == width else [
        columns, np.roll(columns, width), columns.reshape(-1, 2).T.reshape(-1),
        columns.reshape(-1, 2)[:, ::-1].T.reshape(-1)]
    for order in orders:
        gate, up = (half.reshape(-1) for half in np.split(x[..., order].astype(np.float64),
                                                          [width], axis=-1))
        for candidate in _candidates(numbers, both > width):
            if not all(_computes(candidate, actual[:count], gate[:count], up[:count])
                       for count in (_FEW, None)):
                continue
            name, alpha, limit, offset = candidate
            pairs = order.reshape(-1, width).T.reshape(-1)
            return {"activation": name, "gated": int(both > width), "alpha": alpha, "limit": limit,
                    "up_offset": offset}, pairs
    return NoMatch("the subgraph between the experts' GEMMs is not a known activation of one half "
                   "times the other", piece.output)


def _computes(candidate: tuple[str, float, float, float], actual: np.ndarray, gate: np.ndarray,
              up: np.ndarray) -> bool:
    """Whether an activation with its alpha, limit and offset gives `actual`.

    Of `gate` alone if `up` is empty.
    """
    name, alpha, limit, offset = candidate
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-alpha * gate)) if name == "silu" else ACTIVATIONS[name](gate)
    return is_activation(actual, gate, expected, up, offset) if up.size else \
        is_activation(actual, gate, expected)


def _candidates(numbers: Sequence[float], gated: bool) -> Iterator[tuple[str, float, float, float]]:
    """Activations with alpha, limit and offset, those without parameters first."""
    plain = [name for name in ACTIVATIONS if name != "none"]
    for name in plain:
        yield name, 1.0, 0.0, 0.0
    for alpha in (1.0, *numbers):
        yield "silu", alpha, 0.0, 0.0
    for limit, offset in itertools.product((0.0, *numbers), (0.0, *numbers)) if gated else ():
        for name in plain:
            for alpha in (1.0, *numbers) if name == "silu" else (1.0,):
                yield name, alpha, limit, offset


def _rewrite(graph: gs.Graph, match: _Experts, settings: Settings) -> None:
    first, second = operands(match.up), operands(match.down)
    gate_up = _arranged(match.up, match.rows)
    bias = operand(match.up, "bias")
    inputs = {"x": first["x"], "experts": first["experts"], "scores": second["scores"],
              "gate_up": gate_up, "down": _arranged(match.down),
              "gate_up_bias": None if bias is None else gs.Constant(
                  bias.name, values_of(bias).take(match.rows, 1)),
              "down_bias": operand(match.down, "bias")}
    replace(graph, EXPERTS, inputs, [match.down.outputs[0]], match.fields)


def _arranged(node: gs.Node, rows: np.ndarray | None = None) -> gs.Constant:
    """A GEMM's weight [num_experts, out, in], with its rows in this order."""
    tensor = operands(node)["weight"]
    values: Weight = values_of(tensor)
    if fields_of(node)["transposed"]:
        values = values.transpose()
    return gs.Constant(tensor.name, values if rows is None else values.take(rows, 1))
