"""Merge linear layers of one input if their readers accept columns of wider rows.

On targets that run programs:

Given:   a = act(x · Waᵀ + ba), b = x · Wbᵀ, …; Op(a), Other(b), …
Result:  y = x · [Wb; Wa; …]ᵀ; Op(columns of y, activation=act, bias=ba), Other(columns of y), …

`Op.columns` declares the inputs that accept columns, and whether the op applies an activation and a
bias to them. The widest layers come first, so that the others start at vector boundaries. Zero rows
pad the width of y to whole vectors, unless weights are quantized.

On others, query, key and value of attention without a cache:

Given:   q = x · Wqᵀ, k = x · Wkᵀ, v = x · Wvᵀ; BidirectionalAttention(q, k, v)
Result:  q, k, v = Split(x · [Wq; Wk; Wv]ᵀ)
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
    producer,
    replace,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.row_layout import selected
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION
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
    rule = Rule("projections", frozenset({GEMM.name}), lambda node, settings: _check(
        graph, node) if settings.target.runs_program else _check_attention(graph, node), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check_attention(graph: gs.Graph, node: gs.Node) -> _Merged | None:
    """The layers of an attention's query, key and value, if they read the same rows."""
    readers = consumers(graph, node.outputs[0])
    attention = readers[0] if len(readers) == 1 else None
    if not is_op(attention, ATTENTION):
        return None
    gemms = [producer(tensor) for tensor in attention.inputs[:3]]
    if gemms[0] is not node or any(
            not is_op(gemm, GEMM) or operand(gemm, "x") is not operand(node, "x")
            or fields_of(gemm)["activation"] != "none"
            or consumers(graph, gemm.outputs[0]) != [attention]
            or len(operands(gemm)["weight"].outputs) > 1 for gemm in gemms):
        return None
    parts = tuple(_Part(gemm, (), False, False) for gemm in gemms if gemm is not None)
    return _Merged(parts) if len({_form(part) for part in parts}) == 1 \
        and len({id(part.gemm) for part in parts}) == 3 else None


def _check(graph: gs.Graph, node: gs.Node) -> _Merged | NoMatch | None:
    anchor = _part(graph, node)
    gemms = [user for user in consumers(graph, node.inputs[0])
             if is_op(user, GEMM) and operand(user, "x") is node.inputs[0]]
    if anchor is None or len(gemms) < 2:
        return None  # a reader needs all of its output, or no other layer reads its x
    if isinstance(anchor, NoMatch):
        return anchor
    parts = [part for gemm in gemms if isinstance(part := _part(graph, gemm), _Part)
             and _form(part) == _form(anchor)]
    if len(parts) < 2:
        return NoMatch("no other linear layer of its x can be merged with it", node)
    return _Merged(tuple(sorted(parts, key=lambda part: -_width(part))))


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


def _form(part: _Part) -> tuple[object, ...]:
    """The weight's storage format, () if not quantized; merged layers have the same."""
    stored = values_of(operands(part.gemm)["weight"]).stored
    return () if stored is None else (
        stored.dtype, stored.group_size, stored.zeros is None, stored.minima is None,
        None if stored.order is None else stored.order.tobytes(), stored.activation_dtype,
        stored.rounds_groups)


def _width(part: _Part) -> int:
    return int(values_of(operands(part.gemm)["weight"]).shape[0])


def _rewrite(graph: gs.Graph, match: _Merged, settings: Settings) -> None:
    parts, gemms = match.parts, [part.gemm for part in match.parts]
    x = gemms[0].inputs[0]
    widths = [_width(part) for part in parts]
    splits = not settings.target.runs_program
    padding = 0 if _form(parts[0]) or splits else -sum(widths) % _VECTOR
    merged = gs.Variable(f"{x.name}.projections", x.dtype, [*x.shape[:-1], sum(widths) + padding])
    matrices = [values_of(operands(gemm)["weight"]) for gemm in gemms]
    if padding:
        matrices.append(Weight.of(np.zeros((padding, matrices[0].shape[1]), np.float32)))
    weight = merge_constants(gemms, "weight", Weight.concat(matrices), "projections", merged)
    biases = [None if part.moves_bias else operand(part.gemm, "bias") for part in parts]
    bias = None
    if any(biases):
        vectors = [np.zeros(width, np.float32) if own is None else values_of(own).load()
                   for own, width in zip(biases, widths, strict=True)]
        bias = gs.Constant(f"{weight.name}.bias", Weight.of(
            np.concatenate([*vectors, np.zeros(padding)]).astype(np.float32)))
    (_split if splits else _give_columns)(graph, parts, widths, merged)
    replace(graph, GEMM, {"x": x, "weight": weight, "bias": bias}, [merged])


def _split(graph: gs.Graph, parts: Sequence[_Part], widths: Sequence[int],
           merged: gs.Variable) -> None:
    """Split the merged layer's output into those of its parts."""
    results = [part.gemm.outputs.pop() for part in parts]
    graph.nodes.append(gs.Node(
        "Split", f"{merged.name}.split", {"axis": -1}, outputs=results,
        inputs=[merged, gs.Constant(f"{merged.name}.widths", np.array(widths, np.int64))]))


def _give_columns(graph: gs.Graph, parts: Sequence[_Part], widths: Sequence[int],
                  merged: gs.Variable) -> None:
    """Give readers the columns of their part, with the activation and bias that move to them."""
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
