"""Recognize MoE layers that compute all experts for every token, most with score zero.

Given:   rows = x, repeated for each expert, times the token's score for it; inner = act(gate) · up
         of the halves of rows·W; y = Σ over experts of inner·D; scores are zero except a TopK's
Result:  y = Experts(x, experts, scores at experts, W, D, scale_input=1), experts the TopK's

Rows, inner and the sum are each probed. So is that an expert maps zeros to zeros, which allows to
skip experts with score zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    LAYOUT,
    Piece,
    close,
    cone,
    data_tensors,
    token_feeds,
)
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    producer,
    replace,
    values_of,
    weight,
)
from llmc.compiler.passes.experts import find_activation
from llmc.compiler.passes.route import linear_layers, routing
from llmc.plugins.experts.op import OP as EXPERTS

_SPREAD = LAYOUT | {"Tile", "Mul"}
_SUM = LAYOUT | {"ReduceSum"}
_TOKENS = 5


@dataclass(frozen=True)
class _Dense:
    x: gs.Tensor
    dense: gs.Tensor  # scores, [num_tokens, num_experts]
    chosen: gs.Tensor
    output: gs.Tensor
    up: gs.Node
    down: gs.Node
    fields: dict[str, Any]
    rows: np.ndarray  # of the first weight, in llmc::Experts' order


def dense_experts(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    rule = Rule("dense-experts", frozenset({"MatMul"}),
                lambda node, settings: _check(graph, node, data), _rewrite)
    apply_rules(graph, [rule], settings, report)


def _check(graph: gs.Graph, node: gs.Node, data: set[int]) -> _Dense | NoMatch | None:
    up = _product_above(node, data)
    if up is None:
        return None
    both, inner = up.outputs[0], node.inputs[0]
    num_experts, hidden, width = values_of(up.inputs[1]).shape
    output = _summed(graph, node)
    if output is None or len(output.shape or ()) != 2:
        return NoMatch("the experts' second GEMM is not summed token by token", node)
    piece = cone(inner, data, ELEMENTWISE | LAYOUT, borders_at={id(both)})
    if isinstance(piece, NoMatch):
        return NoMatch(f"between the experts' GEMMs: {piece.reason}", piece.value)
    if len(piece.inputs) > 1:
        return NoMatch("the experts' second GEMM does not read the first alone", inner)
    found = find_activation(piece, both, width, values_of(node.inputs[1]).shape[1])
    if isinstance(found, NoMatch):
        return found
    if piece.run({both.name: np.zeros((num_experts, 1, width), np.float32)}).any():
        return NoMatch("experts do not map zeros to zeros", inner)
    summed = cone(output, data, _SUM, borders_at={id(node.outputs[0])})
    if isinstance(summed, NoMatch) or not _is_sum(summed, node.outputs[0]):
        return NoMatch("the experts' results are not summed token by token", output)
    rows = _rows(up.inputs[0], data, output.shape[0], num_experts, hidden)
    if isinstance(rows, NoMatch):
        return rows
    x, dense = rows
    chosen = _selected_experts(graph, dense, num_experts)
    if isinstance(chosen, NoMatch):
        return chosen
    fields, order = found
    top_k = int(chosen.shape[-1])
    return _Dense(x, dense, chosen, output, up, node, {"top_k": top_k, "scale_input": 1, **fields},
                  order)


def _is_stacked(node: gs.Node) -> bool:
    """Whether a node is a MatMul with one matrix per expert."""
    values = weight(node.inputs[1]) if node.op == "MatMul" else None
    return values is not None and len(values.shape) == 3


def _product_above(down: gs.Node, data: set[int]) -> gs.Node | None:
    """The MatMul with as many matrices above this one, past elementwise and layout ops."""
    node: gs.Node | None = down if _is_stacked(down) else None
    while node is not None:
        tensor = next((t for t in node.inputs if id(t) in data), None)
        node = None if tensor is None else producer(tensor)
        if node is not None and _is_stacked(node):
            same = values_of(node.inputs[1]).shape[0] == values_of(down.inputs[1]).shape[0]
            return node if same else None
        if node is not None and node.op not in ELEMENTWISE | LAYOUT:
            return None
    return None


def _summed(graph: gs.Graph, down: gs.Node) -> gs.Tensor | None:
    """The sum that alone reads a MatMul's result, or None."""
    tensor = down.outputs[0]
    while True:
        users = consumers(graph, tensor)
        if len(users) != 1 or users[0] is None or users[0].op not in _SUM:
            return None
        tensor = users[0].outputs[0]
        if users[0].op == "ReduceSum":
            return tensor


def _is_sum(piece: Piece, source: gs.Tensor) -> bool:
    experts, _, width = source.shape
    x = np.random.default_rng(0).standard_normal((experts, _TOKENS, width)).astype(np.float32)
    return close(piece.run({**token_feeds(1, _TOKENS), source.name: x}), x.sum(0), 1e-5)


def _rows(rows: gs.Tensor, data: set[int], num_tokens: int | str, num_experts: int,
          hidden: int) -> tuple[gs.Tensor, gs.Tensor] | NoMatch:
    """The tokens and scores whose products are the experts' inputs.

    Args:
        rows: `[num_experts, num_tokens, hidden]`.
        data: ids of tensors that depend on token values.
        num_tokens: first dimension of the result.
        num_experts: of the layer.
        hidden: size of a token.

    Returns:
        Tokens `[num_tokens, hidden]` and scores `[num_tokens, num_experts]`.
    """
    found: dict[int, gs.Tensor] = {}
    stack = [rows]
    while stack:
        tensor = stack.pop()
        node = producer(tensor)
        if tuple(tensor.shape or ()) in ((num_tokens, hidden), (num_tokens, num_experts)):
            found[id(tensor)] = tensor
        elif node is None or node.op not in _SPREAD:
            return NoMatch("the experts' input is not a token times its score", rows)
        else:
            stack.extend(t for t in node.inputs if id(t) in data)
    if len(found) != 2:
        return NoMatch("the experts' input is not a token times its score", rows)
    piece = cone(rows, data, _SPREAD, borders_at=found.keys())
    if isinstance(piece, NoMatch):
        return piece
    rng = np.random.default_rng(0)
    first, second = found.values()
    for x, dense in ((first, second), (second, first)):
        if (x.shape[-1], dense.shape[-1]) != (hidden, num_experts):
            continue
        tokens, scores = (rng.standard_normal((_TOKENS, t.shape[-1])).astype(np.float32)
                          for t in (x, dense))
        result = piece.run({**token_feeds(1, _TOKENS), x.name: tokens, dense.name: scores})
        if close(result, tokens * scores.T[..., None], 1e-5):
            return x, dense
    return NoMatch("the experts' input is not a token times its score", rows)


def _selected_experts(graph: gs.Graph, dense: gs.Tensor, num_experts: int) -> gs.Tensor | NoMatch:
    """The experts `[num_tokens, top_k]` with nonzero scores."""
    above = routing(graph, dense)
    if isinstance(above, NoMatch):
        return above
    choices = [node.outputs[1] for node in above.nodes if node.op == "TopK"]
    logits = linear_layers(above)
    if len(choices) != 1 or len(logits) != 1 or len(above.inputs) != 1:
        return NoMatch("the scores of experts do not come from one linear layer and one TopK",
                       dense)
    rows = np.random.default_rng(0).standard_normal((64, num_experts)).astype(np.float32)
    scores, chosen = Piece(above.nodes, above.inputs, (dense, choices[0])).run_all(
        {**token_feeds(1, len(rows)),
         logits[0].name: rows if len(logits[0].shape) == 2 else rows[None]})
    kept = np.zeros_like(scores)
    np.put_along_axis(kept, chosen, np.take_along_axis(scores, chosen, -1), -1)
    if scores.shape != rows.shape or not np.array_equal(scores, kept):
        return NoMatch("experts outside the TopK have nonzero scores", dense)
    return choices[0]


def _rewrite(graph: gs.Graph, match: _Dense, settings: Settings) -> None:
    name = match.output.name
    scores = gs.Variable(f"{name}.scores", np.float32, match.chosen.shape)
    graph.nodes.append(gs.Node(op="GatherElements", name=scores.name, attrs={"axis": -1},
                               inputs=[match.dense, match.chosen], outputs=[scores]))
    gate_up, down = (product.inputs[1] for product in (match.up, match.down))
    replace(graph, EXPERTS, {
        "x": match.x, "experts": match.chosen, "scores": scores,
        "gate_up": gs.Constant(gate_up.name, values_of(gate_up).transpose().take(match.rows, 1)),
        "down": gs.Constant(down.name, values_of(down).transpose())}, [match.output], match.fields)
