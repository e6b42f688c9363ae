"""Fuse soft-capping into one op.

Given:   Mul(Tanh(Div(x, c)), c), c a scalar constant
Result:  Softcap(x) with cap c
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs
from softcap.op import OP as SOFTCAP

from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    producer,
    replace,
    scalar,
)


@dataclass(frozen=True)
class _Softcap:
    x: gs.Tensor
    cap: float
    output: gs.Tensor


def fuse_softcap(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Replace every soft-cap by one Softcap."""
    rule = Rule("softcap", frozenset({"Mul"}), _check, _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(node: gs.Node, settings: Settings) -> _Softcap | NoMatch | None:
    for bounded, factor in (node.inputs, node.inputs[::-1]):
        tanh, cap = producer(bounded), scalar(factor)
        if tanh is None or tanh.op != "Tanh" or cap is None:
            continue
        div = producer(tanh.inputs[0])
        if div is None or div.op != "Div":
            return NoMatch("the input of Tanh is not a quotient", tanh)
        if scalar(div.inputs[1]) != cap:
            return NoMatch(f"divisor {scalar(div.inputs[1])} differs from factor {cap}", div)
        return _Softcap(div.inputs[0], cap, node.outputs[0])
    return None  # not a soft-cap


def _rewrite(graph: gs.Graph, match: _Softcap, settings: Settings) -> None:
    replace(graph, SOFTCAP, {"x": match.x}, [match.output], {"cap": match.cap})
