"""Row-wise ops of an image encoder on [rows, width], without axes of tiles.

Given:   LayerNorm, GEMM, Add, … on [tiles, patches, width]
Result:  Reshape to [rows, width] → the same ops → Reshape to [tiles, patches, width]

Reshapes and transposes that undo each other are removed afterwards. That is determined by running
the nodes between two row-wise ops on numbered elements, for images of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.program import MOST_JOINED
from llmc.compiler.graph.image_samples import ImageSample, Size, product
from llmc.compiler.graph.names import PIXEL_VALUES
from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT, Piece, cone, data_tensors
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    attends,
    is_llmc,
    producer,
    scalar,
    tidy,
)
from llmc.compiler.graph.verify import verify
from llmc.compiler.passes.fold import forward

_MAX_EXACT = 1 << 24  # integers in float32


def image_rows(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    _Rows(graph, report).run()
    tidy(graph)
    verify(graph, "image_rows")  # fills in shapes
    data, known = data_tensors(graph), dict[object, bool]()
    apply_rules(graph, [Rule("identity", frozenset({"Reshape"}),
                             lambda node, settings: _check_identity(node, settings, data, known),
                             _remove)], settings, report)


class _Rows:
    """Row-wise nodes on rows, in topological order."""

    def __init__(self, graph: gs.Graph, report: Report) -> None:
        self._graph, self._report = graph, report
        self._data = data_tensors(graph)
        self._rows: dict[int, gs.Variable] = {}  # by the tensor with its axes
        self._restored: set[int] = set()  # tensors that are views of rows
        self._moved: set[int] = set()  # tensors with elements of llmc ops in another layout

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if is_llmc(node) or (node.op in LAYOUT and id(node.inputs[0]) in self._moved):
                self._moved.update(map(id, node.outputs))
            row_wise = not attends(node) if is_llmc(node) else self._splits_columns(node) or (
                node.op in ELEMENTWISE and self._is_row_wise(node))
            if row_wise:
                self._convert(node)

    def _is_row_wise(self, node: gs.Node) -> bool:
        """Whether an elementwise op combines views of rows, and constants of one row.

        An op with numbers may read any layout of them, as bounds of attention's result. Sets the
        shape of its result if that is unknown.
        """
        output = node.outputs[0]
        given = [tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant)]
        rows = [tensor for tensor in node.inputs if isinstance(tensor, gs.Constant)]
        numbers = len(given) == 1 and id(given[0]) in self._moved and len(rows) > 0 and all(
            scalar(row) is not None for row in rows) and len(given[0].shape or ()) == 3
        if not numbers and not any(id(tensor) in self._restored for tensor in given):
            return False
        shape = list(given[0].shape or ())
        if not shape or any(id(tensor) not in self._data or list(tensor.shape or ()) != shape
                            for tensor in given) \
                or any(tuple(row.shape) not in ((), (1,), (shape[-1],)) for row in rows):
            return False
        if output.shape is None:
            output.shape = shape
        return list(output.shape) == shape

    def _splits_columns(self, node: gs.Node) -> bool:
        """Whether a node splits views of rows along columns."""
        return node.op == "Split" and id(node.inputs[0]) in self._restored \
            and node.attrs.get("axis", 0) in (-1, len(node.inputs[0].shape) - 1)

    def _convert(self, node: gs.Node) -> None:
        shapes = [tensor.shape for tensor in (*node.inputs, *node.outputs)
                  if id(tensor) in self._data]
        if any(not shape or None in shape or not isinstance(shape[-1], int) for shape in shapes) \
                or all(len(shape) == 2 for shape in shapes) \
                or any(_dynamic(shape) > 1 for shape in shapes if len(shape) > 2):
            return
        for index, tensor in enumerate(node.inputs):
            if id(tensor) in self._data and len(tensor.shape) > 2:
                node.inputs[index] = self._as_rows(tensor)
        if node.op == "Split":
            node.attrs["axis"] = -1
        for index, tensor in enumerate(node.outputs):
            if len(tensor.shape) == 2:
                continue
            rows = gs.Variable(f"{tensor.name}.rows", tensor.dtype,
                               [product(tensor.shape[:-1]), tensor.shape[-1]])
            node.outputs[index] = rows
            self._reshape(rows, tensor, [size if isinstance(size, int) else -1
                                         for size in tensor.shape])
            self._rows[id(tensor)] = rows
            self._restored.add(id(tensor))
        self._report.count("rows")

    def _as_rows(self, tensor: gs.Tensor) -> gs.Variable:
        if id(tensor) not in self._rows:
            rows = gs.Variable(f"{tensor.name}.as_rows", tensor.dtype,
                               [product(tensor.shape[:-1]), tensor.shape[-1]])
            self._rows[id(tensor)] = rows
            parts = self._joined(tensor)
            if parts:
                join_columns(self._graph, [self._as_rows(part) for part in parts], rows)
            else:
                self._reshape(tensor, rows, [-1, tensor.shape[-1]])
        return self._rows[id(tensor)]

    def _joined(self, tensor: gs.Tensor) -> list[gs.Tensor]:
        """Tensors of as many rows whose columns a tensor joins; empty: it joins none."""
        node = producer(tensor)
        if node is None or node.op != "Concat" or node.attrs["axis"] not in (
                -1, len(tensor.shape) - 1):
            return []
        return [*node.inputs] if all(
            id(own) in self._data and own.shape is not None and isinstance(own.shape[-1], int)
            and list(own.shape[:-1]) == list(tensor.shape[:-1]) for own in node.inputs) else []

    def _reshape(self, source: gs.Tensor, result: gs.Variable, shape: list[int]) -> None:
        self._graph.nodes.append(gs.Node(
            op="Reshape", name=f"{result.name}.view", outputs=[result],
            inputs=[source, gs.Constant(f"{result.name}.shape", np.array(shape))]))


def join_columns(graph: gs.Graph, parts: Sequence[gs.Tensor], result: gs.Variable) -> None:
    """Join the columns of tensors by nodes that the engine runs, see `MOST_JOINED`."""
    waiting = [*parts]
    while len(waiting) > 1:
        some, waiting = waiting[:MOST_JOINED], waiting[MOST_JOINED:]
        made = gs.Variable(f"{some[0].name}.{len(waiting)}", result.dtype,
                           [result.shape[0], sum(int(own.shape[-1]) for own in some)]) \
            if waiting else result
        graph.nodes.append(gs.Node(op="Concat", name=made.name, attrs={"axis": -1},
                                   inputs=some, outputs=[made]))
        waiting.insert(0, made)


def _dynamic(shape: Iterable[Size]) -> int:
    return sum(not isinstance(size, int) for size in shape)


def between(output: gs.Tensor, data: set[int], allowed: frozenset[str] = LAYOUT,
            stop: Container[int] = (), reads_shapes: bool = False,
            through: Callable[[gs.Node], bool] = lambda node: False) -> Piece | NoMatch:
    """The nodes above a tensor up to the nearest ops other than `allowed` along pixels.

    Args:
        output: the tensor.
        data: see `data_tensors`.
        allowed: op types.
        stop: ids of further tensors to end at.
        reads_shapes, through: see `cone`.
    """
    borders: set[int] = set()
    waiting, seen = [output], set[int]()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or id(tensor) not in data or not tensor.inputs:
            continue
        seen.add(id(tensor))
        node = tensor.inputs[0]
        if id(tensor) not in stop and (
                through(node) or (node.op in allowed and not is_llmc(node))):
            waiting.extend(node.inputs)
        else:
            borders.add(id(tensor))
    return cone(output, data, allowed, through, borders, reads_shapes)


@dataclass(frozen=True)
class _Identity:
    node: gs.Node
    source: gs.Tensor


def _check_identity(node: gs.Node, settings: Settings, data: set[int],
                    known: dict[object, bool]) -> _Identity | None:
    """A Reshape whose result is, for any image, rows of a previous op.

    Layers have the same subgraphs, which are run once: `known` has their results.
    """
    result = node.outputs[0]
    if result.shape is None or len(result.shape) != 2 or id(result) not in data:
        return None
    piece = between(result, data)
    if isinstance(piece, NoMatch):
        return None
    sources = [tensor for tensor in piece.inputs if id(tensor) in data
               and tensor.name != PIXEL_VALUES]
    others = [tensor for tensor in piece.inputs if id(tensor) not in data]
    if len(sources) != 1 or others or not settings.image_samples:  # an order of patches
        return None
    source = sources[0]
    shapes = [sample.shape(source) for sample in settings.image_samples]
    key = piece.key, *shapes
    if key not in known:
        try:
            known[key] = all(
                _is_same(piece, source, sample, shape)
                for sample, shape in zip(settings.image_samples, shapes, strict=True))
        except CannotEvaluate:
            known[key] = False
    return _Identity(node, source) if known[key] else None


def _is_same(piece: Piece, source: gs.Tensor, sample: ImageSample,
             shape: tuple[int, ...] | None) -> bool:
    if shape is None or len(shape) != 2 or max(shape) > _MAX_EXACT:
        return False
    for numbered in np.meshgrid(*map(np.arange, shape), indexing="ij"):
        given = numbered.astype(np.float32)
        if not np.array_equal(piece.run({**sample.arrays, source.name: given}), given):
            return False
    return True


def _remove(graph: gs.Graph, match: _Identity, settings: Settings) -> None:
    match.node.inputs[0] = match.source
    forward(match.node, graph)
