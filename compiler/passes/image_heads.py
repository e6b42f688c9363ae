"""Linear layers before and after a selection of columns.

Given:   x → GEMM (W) → GEMM or GemmBiasRes (E), where each row of E has at most one element, 1
Result:  x → GEMM or GemmBiasRes (E · W)

Given:   x → GEMM (E, of columns of x) → GEMM or GemmBiasRes (W)
Result:  x → GEMM or GemmBiasRes (W · E)

Heads that attention hides from each other have such matrices, see `image_softmax`.
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
    op_of,
    operands,
    producer,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.gemm_bias_res.op import OP as GEMM_RESIDUAL

SELECTION = "/selection"  # suffix of E


@dataclass(frozen=True)
class _Selection:
    first: gs.Node
    second: gs.Node
    places: np.ndarray  # for each row of E its column, or the number of columns
    is_second: bool


def image_heads(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    apply_rules(graph, [Rule("image-heads", frozenset({GEMM.name, GEMM_RESIDUAL.name}),
                             lambda node, settings: _check(graph, node), _rewrite)],
                settings, report)


def selection(places: np.ndarray, width: int, name: str) -> gs.Constant:
    """The matrix [rows, width] that selects a column for each row; `width` selects zero."""
    matrix = np.zeros((len(places), width), np.float32)
    rows = np.flatnonzero(places < width)
    matrix[rows, places[rows]] = 1
    return gs.Constant(f"{name}{SELECTION}", Weight.of(matrix, f"{name}{SELECTION}"))


def _check(graph: gs.Graph, node: gs.Node) -> _Selection | NoMatch | None:
    given = operands(node)
    first = producer(given["x"])
    if first is None or not is_op(first, GEMM):
        return None
    is_second = given["weight"].name.endswith(SELECTION)
    matrix = (given if is_second else operands(first))["weight"]
    if not matrix.name.endswith(SELECTION):
        return None
    if fields_of(first).get("activation", "none") != "none" \
            or (not is_second and "bias" in operands(first)) \
            or len(consumers(graph, given["x"])) > 1:
        return NoMatch("the first layer has an activation, or other readers", node)
    values = values_of(matrix).load()
    places = np.where(values.any(1), values.argmax(1), values.shape[1])
    return _Selection(first, node, places, is_second)


def _rewrite(graph: gs.Graph, match: _Selection, settings: Settings) -> None:
    first, second = operands(match.first), operands(match.second)
    result, op, attrs = match.second.outputs[0], op_of(match.second), match.second.attrs
    assert op is not None
    weights: dict[str, gs.Tensor] = {}
    if match.is_second:
        for name in ("weight", "bias"):
            if name in first:
                own = values_of(first[name])
                zeros = Weight.of(np.zeros((1, *own.shape[1:]), np.float32))
                weights[name] = gs.Constant(f"{first[name].name}/{result.name}", Weight.concat(
                    [own, zeros]).take_rows(match.places))
    else:
        own = values_of(second["weight"]).transpose()  # [rows of E, out]
        width = int(first["x"].shape[-1])
        zeros = Weight.of(np.zeros((1, *own.shape[1:]), np.float32))
        rows = np.full(width, len(match.places))
        rows[match.places] = np.arange(len(match.places))
        weights["weight"] = gs.Constant(f"{second['weight'].name}/{result.name}", Weight.concat(
            [own, zeros]).take_rows(rows).transpose())
    match.second.outputs.clear()
    replace(graph, op, {**second, "x": first["x"], **weights}, [result], attrs)
