"""Fuse the token embedding with its scale and with learned positions.

Given:   Gather(W, input_ids) → Mul(scale) → Add(Gather(P, position_ids + offset))
Result:  Embedding(input_ids, W, position_ids, P[offset:]) {scale}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.probe import ELEMENTWISE, LAYOUT, cone, data_tensors, token_feeds
from llmc.compiler.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    producer,
    replace,
    scalar,
    weight,
)

_INDEX_OPS = ELEMENTWISE | LAYOUT | {"Range", "Shape", "CumSum", "ConstantOfShape"}


@dataclass(frozen=True)
class _Embedding:
    ids: gs.Tensor
    table: gs.Tensor
    scale: float
    positions: gs.Constant | None
    output: gs.Tensor


def embedding(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    rule = Rule("embedding", frozenset({"Gather"}),
                lambda node, settings: _check(graph, node, data, settings), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node, data: set[int], settings: Settings) -> \
        _Embedding | NoMatch | None:
    table, ids = node.inputs
    while (above := producer(ids)) is not None and above.op in ("Reshape", "Cast", "Identity"):
        ids = above.inputs[0]
    if weight(table) is None or ids.name != "input_ids":
        return None
    if node.attrs.get("axis", 0) != 0:
        return NoMatch("the embedding gathers along another axis than 0", node)
    output, scale, positions = node.outputs[0], 1.0, None
    while True:
        users = consumers(graph, output)
        if len(users) != 1 or users[0] is None or users[0].op not in ("Mul", "Add"):
            break
        other = next(t for t in users[0].inputs if t is not output)
        number = scalar(other)
        if users[0].op == "Mul" and number is not None and positions is None:
            scale *= number
        elif users[0].op == "Add" and positions is None and id(other) not in data:
            positions = _position_table(other, data, settings)
            if isinstance(positions, NoMatch):
                return positions
        else:
            break
        output = users[0].outputs[0]
    return _Embedding(ids, table, scale, positions, output)


def _position_table(tensor: gs.Tensor, data: set[int], settings: Settings) -> \
        gs.Constant | NoMatch:
    """The rows of a learned position table, from position 0 on."""
    node = producer(tensor)
    if node is None or node.op != "Gather" or weight(node.inputs[0]) is None:
        return NoMatch("what is added to the embedding is not a learned position table", tensor)
    table, index = node.inputs
    piece = cone(index, data, _INDEX_OPS)
    if isinstance(piece, NoMatch):
        return piece
    length = min(8, settings.max_seq_len)
    feeds = token_feeds(1, length)
    rows = feeds["position_ids"] if not piece.nodes else piece.run(feeds)
    offset = int(rows.reshape(-1)[0])
    if not np.array_equal(rows.reshape(-1), np.arange(length) + offset):
        return NoMatch("the rows of the position table are not position + offset", index)
    values = weight(table)
    available = values.shape[0] - offset
    if available < settings.max_seq_len:
        return NoMatch(f"the position table has {available} positions, --max_seq_len is "
                       f"{settings.max_seq_len}", table)
    return gs.Constant(table.name, values.take_rows(np.arange(offset, values.shape[0])))


def _rewrite(graph: gs.Graph, match: _Embedding, settings: Settings) -> None:
    inputs = [match.ids, match.table]
    if match.positions is not None:
        position_ids = next((t for t in graph.inputs if t.name == "position_ids"), None)
        if position_ids is None:
            position_ids = gs.Variable("position_ids", np.int64, match.ids.shape)
            graph.inputs.append(position_ids)
        inputs += [position_ids, match.positions]
    replace(graph, "Embedding", inputs, [match.output], {"scale": match.scale})
