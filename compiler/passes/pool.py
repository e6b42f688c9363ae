"""Fuse the pooling of a sequence's tokens.

Given:   x [batch, seq, hidden] → layout, index and reduction nodes → y [batch, hidden]
Result:  y = Pool(x, cu_seqlens) {kind}

Exporters write `hidden[:, 0]`, a masked mean and the last token that is no padding in many ways, so
the nodes between x and y are recognized by probing. Packed tokens have no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    LAYOUT,
    Piece,
    close,
    cone,
    data_tensors,
    scalars,
    token_feeds,
)
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    graph_input,
    pools,
    producer,
    replace,
)
from llmc.errors import LlmcError
from llmc.plugins.pool.op import KINDS
from llmc.plugins.pool.op import OP as POOL

_ALLOWED = LAYOUT | ELEMENTWISE | {"ReduceSum", "ReduceMean", "ArgMax", "GatherElements", "Range",
                                   "Shape", "ConstantOfShape"}
_MAX_STEPS = 6  # nodes above and below the one that removes the axis of tokens
_LENGTHS = (5, 7)


@dataclass(frozen=True)
class _Pooled:
    x: gs.Tensor
    y: gs.Tensor
    kind: str


def pool(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass.

    Raises:
        LlmcError: the pooling of a model that has one was not recognized.
    """
    data = data_tensors(graph)
    rule = Rule("pool", _ALLOWED, lambda node, settings: _check(graph, node, data), _rewrite)
    apply_rules(graph, [rule], settings, report)
    pooled = [tensor for tensor in graph.outputs if _is_pooled(tensor)]
    if pooled and not any(map(pools, graph.nodes)):
        reason = (report.refusals or ["no node removes the axis of tokens"])[0]
        raise LlmcError(f"the pooling of the model was not recognized: {reason}; llmc supports "
                        f"{', '.join(KINDS)}")


def _is_pooled(tensor: gs.Tensor) -> bool:
    return tensor.shape is not None and len(tensor.shape) == 2 and tensor.shape[0] == "batch"


def _is_tokens(tensor: gs.Tensor) -> bool:
    """Whether a tensor has one row of known width per token."""
    shape = tensor.shape
    return shape is not None and len(shape) == 3 and list(shape[:2]) == ["batch", "seq"] \
        and isinstance(shape[2], int)


def _check(graph: gs.Graph, node: gs.Node, data: set[int]) -> _Pooled | NoMatch | None:
    """Match at a node that makes [batch, hidden] of tokens."""
    first = node.outputs[0]
    if id(first) not in data or not _without_tokens(first) or not any(
            id(tensor) in data and _has_tokens(tensor) for tensor in node.inputs):
        return None
    reason = NoMatch("this is neither the first, the last nor the mean of the tokens", node)
    for y in _below(graph, first):
        for x in _above(node, data):
            if not _is_pooled(y) or y.shape[1] != x.shape[2]:
                continue
            piece = cone(y, data, _ALLOWED, borders_at={id(x)}, reads_shapes=True)
            if isinstance(piece, NoMatch):
                reason = piece
                continue
            try:
                kind = _kind(piece, x)
            except CannotEvaluate as error:
                reason = error.reason
                continue
            if kind is not None:
                return _Pooled(x, y, kind)
    return reason


def _has_tokens(tensor: gs.Tensor) -> bool:
    return tensor.shape is not None and "seq" in tensor.shape and len(tensor.shape) > 2


def _without_tokens(tensor: gs.Tensor) -> bool:
    """Whether a tensor is a row per sequence, perhaps with axes of size 1."""
    shape = tensor.shape
    return shape is not None and "seq" not in shape and len(shape) in (2, 3) and \
        shape[0] == "batch"


def _below(graph: gs.Graph, tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """A tensor, and the results of nodes that alone read it."""
    for _ in range(_MAX_STEPS):
        yield tensor
        users = consumers(graph, tensor)
        if len(users) != 1 or users[0] is None or users[0].op not in _ALLOWED:
            return
        tensor = users[0].outputs[0]


def _above(node: gs.Node, data: set[int]) -> Iterator[gs.Tensor]:
    """The activations of tokens that a node reads, and those that they are computed from."""
    current: gs.Node | None = node
    for _ in range(_MAX_STEPS):
        rows = [tensor for tensor in current.inputs if id(tensor) in data and _has_tokens(tensor)] \
            if current is not None else []
        if len(rows) != 1:
            return
        if _is_tokens(rows[0]):
            yield rows[0]
        current = producer(rows[0])
        if current is None or current.op not in _ALLOWED:
            return


def _kind(piece: Piece, x: gs.Tensor) -> str | None:
    """The pooling that a subgraph computes, or None."""
    rng = np.random.default_rng(0)
    kinds = set(KINDS)
    token = int(max((value for value in scalars(piece) if abs(value) < 2**31), default=0)) + 1
    for length in _LENGTHS:
        values = rng.standard_normal((2, length, x.shape[2])).astype(np.float32)
        feeds = token_feeds(2, length)
        feeds["input_ids"] += max(token, 1)  # no padding
        result = piece.run({**feeds, x.name: values})
        expected = {"cls": values[:, 0], "last": values[:, -1], "mean": values.mean(1)}
        kinds = {kind for kind in kinds if close(result, expected[kind], 1e-5)}
    return next(iter(kinds), None)


def _rewrite(graph: gs.Graph, match: _Pooled, settings: Settings) -> None:
    replace(graph, POOL, {"x": match.x, "cu_seqlens": graph_input(
        graph, "cu_seqlens", ("batch_plus_1",))}, [match.y], {"kind": match.kind})
