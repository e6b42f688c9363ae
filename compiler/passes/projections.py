"""Merge linear layers of one input if their readers accept columns of wider rows.

Given:   a = act(x · Waᵀ + ba), b = x · Wbᵀ, …; Op(a), Other(b), …
Result:  y = x · [Wb; Wa; …]ᵀ; Op(columns of y, activation=act, bias=ba), Other(columns of y), …

`Op.columns` declares the inputs that accept columns, and whether the op applies an activation and a
bias to them. The widest layers come first, so that the others start at vector boundaries. Zero rows
pad the width of y to whole vectors, unless weights are quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    arranged,
    column_roles,
    consumers,
    fields_of,
    is_op,
    merge_constants,
    op_of,
    operand,
    operands,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.row_layout import selected
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.roles import Columns

_VECTOR = 8  # elements of 16 bits


@dataclass(frozen=True)
class _Part:
    """A linear layer, and whether its activation and its bias move to its readers."""

    gemm: gs.Node
    readers: tuple[tuple[gs.Node, Columns], ...]
    moves_activation: bool
    moves_bias: bool


@dataclass(frozen=True)
class _Merged:
    parts: tuple[_Part, ...]


def projections(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    rule = Rule("projections", frozenset({GEMM.name}),
                lambda node, settings: _check(graph, node), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node) -> _Merged | NoMatch | None:
    anchor = _part(graph, node)
    gemms = [user for user in consumers(graph, node.inputs[0])
             if is_op(user, GEMM) and operand(user, "x") is node.inputs[0]]
    if anchor is None or len(gemms) < 2:
        return None  # a reader needs all of its output, or no other layer reads its x
    if isinstance(anchor, NoMatch):
        return anchor
    parts = [part for gemm in gemms if isinstance(part := _part(graph, gemm), _Part)
             and form_of(part.gemm) == form_of(anchor.gemm)]
    if len(parts) < 2:
        return NoMatch("no other linear layer of its x can be merged with it", node)
    return _Merged(tuple(sorted(parts, key=lambda part: -width_of(part.gemm))))


def _part(graph: gs.Graph, gemm: gs.Node) -> _Part | NoMatch | None:
    """A linear layer all of whose readers accept columns; None if one does not."""
    result, fields, given = gemm.outputs[0], fields_of(gemm), operands(gemm)
    readers: list[tuple[gs.Node, Columns]] = []
    for user in consumers(graph, result):
        roles = column_roles(user, result)
        if user is None or not roles:
            return None
        readers.extend((user, role) for role in roles)
    if len(given["weight"].outputs) > 1:
        return NoMatch("the weight is shared with another node", gemm)
    activation = fields["activation"]
    takes = [(fields_of(user), operands(user), role) for user, role in readers]
    if activation != "none" and not all(
            _is_free(attrs, role) and role.activation and attrs[role.activation] == "none"
            and activation in _choices(user, role)
            for (user, _), (attrs, _, role) in zip(readers, takes, strict=True)):
        return NoMatch(f"not all of its readers support the activation {activation}", gemm)
    moves_bias = "bias" in given and all(
        _is_free(attrs, role) and role.bias and role.bias not in inputs
        for attrs, inputs, role in takes)
    return _Part(gemm, tuple(readers), activation != "none", moves_bias)


def _is_free(fields: dict[str, int | float | str], role: Columns) -> bool:
    return all(fields[name] == value for name, value in role.only_if.items())


def _choices(user: gs.Node, role: Columns) -> Sequence[int | str]:
    op = op_of(user)
    assert op is not None
    return op.choices[role.activation]


def form_of(gemm: gs.Node) -> tuple[object, ...]:
    """The weight's storage format, () if not quantized; merged layers have the same."""
    stored = values_of(operands(gemm)["weight"]).stored
    return () if stored is None else (
        stored.dtype, stored.group_size, stored.zeros is None, stored.minima is None,
        None if stored.order is None else stored.order.tobytes(), stored.activation_dtype,
        stored.rounds_groups)


def width_of(gemm: gs.Node) -> int:
    """The number of outputs of a linear layer."""
    return int(values_of(operands(gemm)["weight"]).shape[0])


def _rewrite(graph: gs.Graph, match: _Merged, settings: Settings) -> None:
    parts, gemms = match.parts, [part.gemm for part in match.parts]
    widths = [width_of(gemm) for gemm in gemms]
    padding = 0 if form_of(gemms[0]) else -sum(widths) % _VECTOR
    merged = merge(graph, gemms, [None if part.moves_bias else operand(part.gemm, "bias")
                                  for part in parts], padding)
    first = 0
    for part, width in zip(parts, widths, strict=True):
        result = part.gemm.outputs[0]
        own = operand(part.gemm, "bias") if part.moves_bias else None
        activation = fields_of(part.gemm)["activation"]
        columns = result
        if part.moves_bias or part.moves_activation:  # the original tensor no longer exists
            columns = gs.Variable(f"{result.name}.product", result.dtype, result.shape)
        for user, role in part.readers:
            moved = {role.bias: own} if own is not None else {}
            op = op_of(user)
            assert op is not None
            user.inputs = arranged(op, {**operands(user), role.input: columns, **moved})
            if part.moves_activation:
                user.attrs[role.activation] = activation
        part.gemm.outputs.clear()
        graph.nodes.append(selected(merged, np.arange(first, first + width), columns))
        first += width


def merge(graph: gs.Graph, gemms: Sequence[gs.Node], biases: Sequence[gs.Tensor | None],
          padding: int = 0) -> gs.Variable:
    """Add the linear layer of the weights of layers, one below the other, and return its output.

    Args:
        graph: the graph.
        gemms: layers of one x, which the caller removes.
        biases: of each.
        padding: number of further rows of zeros.
    """
    x, widths = gemms[0].inputs[0], [width_of(gemm) for gemm in gemms]
    merged = gs.Variable(f"{x.name}.projections", x.dtype, [*x.shape[:-1], sum(widths) + padding])
    matrices = [values_of(operands(gemm)["weight"]) for gemm in gemms]
    if padding:
        matrices.append(Weight.of(np.zeros((padding, matrices[0].shape[1]), np.float32)))
    weight = merge_constants(gemms, "weight", Weight.concat(matrices), "projections", merged)
    bias = None
    if any(biases):
        vectors = [np.zeros(width, np.float32) if own is None else values_of(own).load()
                   for own, width in zip(biases, widths, strict=True)]
        bias = gs.Constant(f"{weight.name}.bias", Weight.of(
            np.concatenate([*vectors, np.zeros(padding)]).astype(np.float32)))
    replace(graph, GEMM, {"x": x, "weight": weight, "bias": bias}, [merged])
    return merged
