"""Fuse the token embedding with its scale and with position embeddings.

Given:   Gather(W, input_ids) → Mul(scale) → Add(Gather(P, position_ids + offset))
Result:  Embedding(input_ids, W, position_ids, P[offset:]) {scale}

Given:   Gather(P, position_ids + offset), added later
Result:  Embedding(position_ids, P[offset:])

Given:   Gather(W, input_ids) → Add(Gather(T, token_type_ids)) → Add(Gather(P, position_ids))
Result:  Add(Embedding(input_ids, W, position_ids, P), Embedding(token_type_ids, T))

Positions that count only non-padding tokens are evaluated into a table: packed tokens have no
padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT, cone, data_tensors, token_feeds
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    is_op,
    producer,
    replace,
    scalar,
    values_of,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.embedding.op import OP as EMBEDDING

_INDEX_OPS = ELEMENTWISE | LAYOUT | {"Range", "Shape", "CumSum", "ConstantOfShape",
                                     "GatherElements"}


@dataclass(frozen=True)
class _Embedding:
    ids: gs.Tensor
    table: gs.Tensor
    scale: float
    positions: gs.Constant | None
    output: gs.Tensor
    types: gs.Tensor | None = None  # embedded token types, added to it


def embedding(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    rule = Rule("embedding", frozenset({"Gather"}),
                lambda node, settings: _check(graph, node, data, settings, report), _rewrite)
    alone = Rule("positions", frozenset({"Gather"}),
                 lambda node, settings: _check_positions(node, data, settings), _rewrite_positions)
    apply_rules(graph, [rule, alone], settings, report)


def _check(graph: gs.Graph, node: gs.Node, data: set[int], settings: Settings, report: Report) -> \
        _Embedding | NoMatch | None:
    """Match from the lookup on. `report` gets the reason if an addend is left out."""
    table, ids = node.inputs
    while (above := producer(ids)) is not None and above.op in ("Reshape", "Cast", "Identity"):
        ids = above.inputs[0]
    if weight(table) is None or ids.name not in ("input_ids", "token_type_ids"):
        return None  # not a token embedding
    if node.attrs.get("axis", 0) != 0:
        return NoMatch("the embedding is gathered along an axis other than 0", node)
    output, scale = node.outputs[0], 1.0
    if ids.name == "token_type_ids":
        return _Embedding(ids, table, scale, None, output)
    positions: gs.Constant | None = None
    types: gs.Tensor | None = None
    while True:
        users = consumers(graph, output)
        if len(users) != 1 or users[0] is None or users[0].op not in ("Mul", "Add"):
            break
        other = next(t for t in users[0].inputs if t is not output)
        number = scalar(other)
        if users[0].op == "Mul" and number is not None and positions is None and types is None:
            scale *= number
        elif users[0].op == "Add" and types is None and _is_type_embedding(other):
            types = other
        elif users[0].op == "Add" and not _is_type_embedding(other) \
                and (positions is None or _is_row(other)):
            found = _counted_positions(other, data, settings) if id(other) in data else \
                _position_table(other, data, settings)
            if isinstance(found, NoMatch) and positions is None and id(other) not in data:
                return found
            if isinstance(found, NoMatch):
                report.refuse(users[0], found)
                break
            positions = found if positions is None else _sum(positions, found)
        else:
            break
        output = users[0].outputs[0]
    return _Embedding(ids, table, scale, positions, output, types)


def _is_type_embedding(tensor: gs.Tensor) -> bool:
    node = producer(tensor)
    return node is not None and (node.op == "Gather" or is_op(node, EMBEDDING)) and any(
        t.name == "token_type_ids" for t in node.inputs)


def _position_table(tensor: gs.Tensor, data: set[int], settings: Settings) -> \
        gs.Constant | NoMatch:
    """The rows of a learned position table, from position 0 on."""
    node = producer(tensor)
    while node is not None and node.op == "Reshape" and _width(tensor) is not None \
            and _width(node.inputs[0]) == _width(tensor):  # whole rows, in order
        node = producer(node.inputs[0])
    if node is None or node.op != "Gather" or weight(node.inputs[0]) is None:
        return NoMatch("the addend of the embedding is not a learned position table", tensor)
    table, index = node.inputs
    piece = cone(index, data, _INDEX_OPS)
    if isinstance(piece, NoMatch):
        return piece
    length = min(8, settings.max_seq_len)
    feeds = token_feeds(1, length)
    rows = feeds["position_ids"] if not piece.nodes else piece.run(feeds)
    offset = int(rows.reshape(-1)[0])
    values = values_of(table)
    if (rows == offset).all() and length > 1:  # such as of token types, all 0
        return gs.Constant(table.name, values.take_rows(np.full(settings.max_seq_len, offset)))
    if not np.array_equal(rows.reshape(-1), np.arange(length) + offset):
        return NoMatch("the rows of the position table are not position + offset", index)
    available = values.shape[0] - offset
    if available < settings.max_seq_len:
        return NoMatch(f"the position table has {available} positions, --max_seq_len is "
                       f"{settings.max_seq_len}; compile with --max_seq_len of at most "
                       f"{available}", table)
    return gs.Constant(table.name, values.take_rows(np.arange(offset, values.shape[0])))


def _is_row(tensor: gs.Tensor) -> bool:
    """Whether an addend is a lookup in a table."""
    node = producer(tensor)
    return node is not None and node.op == "Gather" and weight(node.inputs[0]) is not None


def _sum(one: gs.Constant, other: gs.Constant) -> gs.Constant:
    """The sum of two tables of positions, of the length of the shorter one."""
    left, right = values_of(one), values_of(other)
    shape = min(left.shape[0], right.shape[0]), left.shape[1]
    return gs.Constant(other.name, Weight(
        shape, np.float32, lambda start, stop: left.rows(start, stop) + right.rows(start, stop),
        other.name))


def _width(tensor: gs.Tensor) -> int | None:
    """The size of the last axis, if known."""
    last = (tensor.shape or (None,))[-1]
    return last if isinstance(last, int) else None


def _counted_positions(tensor: gs.Tensor, data: set[int], settings: Settings) -> \
        gs.Constant | NoMatch:
    """The addend at each position, if tokens matter only as padding or not."""
    piece = cone(tensor, data, _INDEX_OPS)
    if isinstance(piece, NoMatch):
        return piece
    computed = next((t for t in piece.inputs if t.inputs), None)
    if computed is not None:
        return NoMatch("the addend of the embedding is computed by a layer", computed)
    readers = [node for node in piece.nodes if any(t.name == "input_ids" for t in node.inputs)]
    padding = {number for node in readers if node.op == "Equal" for t in node.inputs
               if (number := scalar(t)) is not None}
    if len(padding) != 1 or any(node.op not in ("Shape", "Equal") for node in readers):
        return NoMatch("the addend of the embedding depends on token ids", tensor)
    weights = {t.name: values_of(t).load() for t in piece.inputs if isinstance(t, gs.Constant)}

    def at(length: int) -> np.ndarray:
        feeds = token_feeds(1, length)
        feeds["input_ids"] += int(next(iter(padding))) + 1
        return piece.run({**feeds, **weights})

    try:
        table, few = at(settings.max_seq_len), at(3)
    except CannotEvaluate as error:
        return error.reason
    if table.ndim != 3 or not np.array_equal(table[:, :3], few[:, :settings.max_seq_len]):
        return NoMatch("the addend of the embedding at a position depends on the sequence length",
                       tensor)
    return gs.Constant(f"positions.{tensor.name}", Weight.of(table[0]))


@dataclass(frozen=True)
class _Positions:
    table: gs.Constant
    output: gs.Tensor


def _check_positions(node: gs.Node, data: set[int], settings: Settings) -> \
        _Positions | NoMatch | None:
    """A position table that is not added to the token embedding directly."""
    output = node.outputs[0]
    rows = list(output.shape or ())[:-1]  # [seq] or [batch, seq]; a bias of scores has [seq, seq]
    if weight(node.inputs[0]) is None or id(output) in data or rows[-1:] != ["seq"] \
            or rows.count("seq") > 1 or len(rows) > 2:
        return None  # not a table with one lookup per position
    table = _position_table(output, data, settings)
    return table if isinstance(table, NoMatch) else _Positions(table, output)


def _rewrite_positions(graph: gs.Graph, match: _Positions, settings: Settings) -> None:
    match.output.shape = ["batch", "seq", match.output.shape[-1]]
    replace(graph, EMBEDDING, {"input_ids": _position_ids(graph), "table": match.table},
            [match.output])


def _rewrite(graph: gs.Graph, match: _Embedding, settings: Settings) -> None:
    inputs = {"input_ids": match.ids, "table": match.table}
    if match.positions is not None:
        inputs |= {"position_ids": _position_ids(graph), "position_table": match.positions}
    output = match.output
    if match.types is not None:
        tokens = gs.Variable(f"{output.name}.tokens", np.float32, output.shape)
        output.inputs.clear()
        graph.nodes.append(gs.Node(op="Add", name=f"{output.name}.types",
                                   inputs=[tokens, match.types], outputs=[output]))
        output = tokens
    replace(graph, EMBEDDING, inputs, [output], {"scale": match.scale})


def _position_ids(graph: gs.Graph) -> gs.Variable:
    """The graph's input of this name, added on first use."""
    found = next((t for t in graph.inputs if t.name == "position_ids"), None)
    if found is None:
        found = gs.Variable("position_ids", np.int64, ["batch", "seq"])
        graph.inputs.append(found)
    return found
