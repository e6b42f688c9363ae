"""Convert nodes in layouts by heads or channels to rows [batch, seq, width].

Given:   y = Sigmoid(Reshape(Split(Reshape(GEMM(x))))), elementwise in any layout
Result:  y = Sigmoid(GEMM'(x)); the GEMM computes exactly these columns, in this order

Layouts are determined by probing, see graph/columns.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.columns import Columns, Joined, Layout, Placed, join, layout_of
from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT, data_tensors
from llmc.compiler.graph.recurrence import CONVOLUTION
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Settings,
    constant,
    describe,
    fields_of,
    is_llmc,
    is_op,
    op_of,
    operands,
    producer,
    replace,
    row_weights,
    tidy,
    values_of,
    weight,
)
from llmc.compiler.graph.weights import Weight
from llmc.errors import LlmcError
from llmc.plugins.group_rms_norm.op import OP as GROUP_RMS_NORM
from llmc.plugins.rms_norm.op import OP as RMS_NORM


def gates(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Convert elementwise functions of some columns of a linear layer to rows.

    An example is the output gate of attention that its query projection computes too.
    """
    rows = RowConverter(graph)
    for node in _after_layouts(graph):
        reason = rows.rewrite(node, in_place=True)
        if reason is None:
            report.count("gate")
    tidy(graph)


def bring_into_rows(graph: gs.Graph, nodes: Sequence[gs.Node], what: str) -> None:
    """Convert nodes to rows, in their order.

    Args:
        graph: to change.
        nodes: in topological order.
        what: subject of the error, such as "a layer was".

    Raises:
        LlmcError: a node cannot be converted.
    """
    rows = RowConverter(graph)
    for node in nodes:
        reason = rows.rewrite(node)
        if reason is not None:
            raise LlmcError(f"{what} not recognized: {reason} ({describe(node)})")
    tidy(graph)


def _after_layouts(graph: gs.Graph) -> list[gs.Node]:
    """Elementwise nodes after a layout op, and elementwise nodes above these."""
    data = data_tensors(graph)

    def above(node: gs.Node) -> list[gs.Node]:
        makers = [producer(tensor) for tensor in node.inputs if id(tensor) in data]
        return [maker for maker in makers if maker is not None and not is_llmc(maker)
                and maker.op in ELEMENTWISE | LAYOUT]

    stack = [node for node in graph.nodes if node.op in ELEMENTWISE
             and any(maker.op in LAYOUT - ELEMENTWISE for maker in above(node))]
    found = {id(node) for node in stack}
    while stack:
        for maker in above(stack.pop()):
            if id(maker) not in found:
                found.add(id(maker))
                stack.append(maker)
    return [node for node in graph.nodes if id(node) in found and node.op in ELEMENTWISE]


class RowConverter:
    """Converts nodes to rows, one after the other in graph order."""

    def __init__(self, graph: gs.Graph) -> None:
        self._graph = graph
        self._data = data_tensors(graph)
        self._known: dict[int, Placed] = {}  # tensors that are computed as rows
        self._taken: dict[tuple[object, ...], gs.Tensor] = {}
        self._names = itertools.count()

    def rewrite(self, node: gs.Node, in_place: bool = False) -> NoMatch | None:
        """Convert a node, or return why not. `in_place` requires a result that is rows."""
        if is_op(node, RMS_NORM):
            return self._norm(node)
        if is_llmc(node):
            return self._end(node)
        if node.op in ELEMENTWISE:
            return self._elementwise(node, in_place)
        if node.op == "ReduceSum":
            return self._sum(node)
        return NoMatch("this op is not row-wise", node)

    def _layout(self, tensor: gs.Tensor) -> Layout | NoMatch:
        return layout_of(tensor, self._data, self._known)

    def _end(self, node: gs.Node) -> NoMatch | None:
        """Convert the inputs of an llmc op, which reads rows."""
        for index, tensor in enumerate(node.inputs):
            if id(tensor) not in self._data or (is_llmc(producer(tensor))
                                                and len(tensor.shape or ()) == 3):
                continue
            layout = self._layout(tensor)
            joined = layout if isinstance(layout, NoMatch) else join([layout])
            if isinstance(joined, NoMatch):
                return joined
            if not joined.in_order:
                return NoMatch("the tokens are not in order", tensor)
            node.inputs[index] = self._columns(joined.operands[0])
        return None

    def _elementwise(self, node: gs.Node, in_place: bool) -> NoMatch | None:
        layouts, constants = [], []
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant):
                constants.append(tuple(tensor.shape))
            elif not tensor.is_empty():
                layout = self._layout(tensor)
                if isinstance(layout, NoMatch):
                    return layout
                layouts.append(layout)
        joined = join(layouts, *constants)
        if isinstance(joined, NoMatch):
            return NoMatch(joined.reason, node)
        if in_place and not joined.is_rows:
            return NoMatch("its result is not in rows", node)
        rows = iter(joined.operands)
        inputs = []
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant):
                part = self._constant(tensor, joined)
                if isinstance(part, NoMatch):
                    return NoMatch(part.reason, tensor)
                inputs.append(part)
            else:
                inputs.append(tensor if tensor.is_empty() else self._columns(next(rows)))
        result = self._result(node, joined)
        self._graph.nodes.append(gs.Node(op=node.op, name=result.name, attrs=dict(node.attrs),
                                         inputs=inputs, outputs=[result]))
        return None

    def _constant(self, tensor: gs.Constant, joined: Joined) -> gs.Constant | NoMatch:
        """The element of a constant for each column, [width]; a scalar stays one."""
        shape = tuple(tensor.shape)
        if np.prod(shape, dtype=int) == 1:
            return gs.Constant(f"{tensor.name}.{next(self._names)}", tensor.values.reshape(())) \
                if shape else tensor
        index = joined.of_constant(shape)
        if isinstance(index, NoMatch):
            return index
        values = values_of(tensor)
        flat = values.reshape((int(np.prod(shape)),)).take_rows(index)
        return tensor if flat is values else gs.Constant(f"{tensor.name}.{next(self._names)}", flat)

    def _norm(self, node: gs.Node) -> NoMatch | None:
        """Convert an RMSNorm over the last axis of a layout: of whole rows or of their groups."""
        given = operands(node)
        layout = self._layout(given["x"])
        joined = layout if isinstance(layout, NoMatch) else join([layout])
        if isinstance(joined, NoMatch) or isinstance(layout, NoMatch):
            return joined if isinstance(joined, NoMatch) else None
        if (layout.token != layout.token[..., :1]).any():
            return NoMatch("the norm spans several tokens", node)
        width, total = layout.token.shape[-1], joined.order.shape[1]
        attrs, x = dict(node.attrs), self._columns(joined.operands[0])
        result, gain, op = self._result(node, joined), given["weight"], RMS_NORM
        if width < total:
            op, attrs["groups"] = GROUP_RMS_NORM, total // width
            gain = gs.Constant(f"{gain.name}.{next(self._names)}",
                               values_of(gain).take_rows(np.tile(np.arange(width), total // width)))
        replace(self._graph, op, {"x": x, "weight": gain}, [result], attrs)
        return None

    def _sum(self, node: gs.Node) -> NoMatch | None:
        """Convert a sum over an axis of a layout to a sum of slices of rows."""
        layout = self._layout(node.inputs[0])
        axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        if isinstance(layout, NoMatch):
            return layout
        if axes is None or axes.size != 1:
            return NoMatch("the sum is not over one constant axis", node)
        axis = int(axes.reshape(()))
        kept = [slice(None)] * axis if axis >= 0 else [...]

        def part(index: int) -> Layout:
            own = (*kept, [index] if node.attrs.get("keepdims", 1) else index,
                   *[slice(None)] * (-axis - 1 if axis < 0 else 0))
            return Layout(layout.rows, layout.token[own], layout.source[own], layout.column[own])

        joined = join([part(index) for index in range(layout.token.shape[axis])])
        if isinstance(joined, NoMatch):
            return NoMatch(joined.reason, node)
        total, *others = [self._picked(columns) for columns in joined.operands]
        result = self._result(node, joined)
        if not others:
            self._graph.nodes.append(gs.Node(op="Identity", name=result.name, inputs=[total],
                                             outputs=[result]))
        for index, other in enumerate(others):
            partial = result if other is others[-1] else self._variable(total, total.shape[-1])
            self._graph.nodes.append(gs.Node(op="Add", name=f"{result.name}.{index}",
                                             inputs=[total, other], outputs=[partial]))
            total = partial
        return None

    def _picked(self, columns: Columns) -> gs.Tensor:
        """These columns, selected from an existing tensor if they are of only one."""
        if len({*columns.source.tolist()}) > 1:
            return self._columns(columns)
        rows = columns.rows[int(columns.source[0])]
        result = self._variable(rows, len(columns.column))
        self._graph.nodes.append(selected(rows, columns.column, result))
        return result

    def _result(self, node: gs.Node, joined: Joined) -> gs.Tensor:
        """The node's result as rows, in its place."""
        before = node.outputs[0]
        if joined.is_rows:
            before.inputs.clear()
            before.shape = ["batch", "seq", joined.order.shape[1]]
            self._known[id(before)] = Placed.of(before)
            return before
        result = gs.Variable(f"{before.name}.rows", before.dtype,
                             ["batch", "seq", joined.order.shape[1]])
        before.inputs.clear()
        if joined.in_order:  # equal values; the original tensor is about to be removed
            before.name, result.name = result.name, before.name
        self._data.add(id(result))
        self._known[id(before)] = Placed(result, joined.place)
        return result

    def _columns(self, columns: Columns) -> gs.Tensor:
        """The tensor of these columns."""
        borders = np.flatnonzero(np.diff(columns.source)) + 1
        parts = [(columns.rows[int(source[0])], column) for source, column in zip(
            np.split(columns.source, borders), np.split(columns.column, borders), strict=True)]
        if len(parts) == 1:
            return self._take(*parts[0])
        key = tuple((id(rows), column.tobytes()) for rows, column in parts)
        if key not in self._taken:
            self._taken[key] = self._merged(parts) or self._convolved(parts) \
                or self._concatenated(parts)
        return self._taken[key]

    def _merged(self, parts: list[tuple[gs.Tensor, np.ndarray]]) -> gs.Tensor | None:
        """Columns of several linear layers as those of one, if they differ only in rows."""
        gemms = [producer(rows) for rows, _ in parts]
        first, op = gemms[0], op_of(gemms[0])
        weights = [row_weights(gemm) for gemm in gemms]
        if first is None or op is None or not weights[0] or any(
                gemm is None or gemm.op != first.op or list(own) != list(weights[0])
                or fields_of(gemm) != fields_of(first) or any(
                    tensor is not operands(first).get(name)
                    for name, tensor in operands(gemm).items() if name not in own)
                for gemm, own in zip(gemms, weights, strict=True)):
            return None
        result = self._variable(parts[0][0], sum(len(column) for _, column in parts))
        stacked = {name: gs.Constant(f"{weights[0][name].name}.{result.name}", Weight.concat(
            [values_of(own[name]).take_rows(column)
             for own, (_, column) in zip(weights, parts, strict=True)])) for name in weights[0]}
        replace(self._graph, op, {**operands(first), **stacked}, [result], first.attrs)
        return result

    def _convolved(self, parts: list[tuple[gs.Tensor, np.ndarray]]) -> gs.Tensor | None:
        """Channels of several convolutions as those of one, with a common state."""
        nodes = [node for node in (producer(rows) for rows, _ in parts) if is_op(node, CONVOLUTION)]
        given = [operands(node) for node in nodes]
        if len(nodes) < len(parts) or any(fields_of(node) != fields_of(nodes[0])
                                          or own.keys() != given[0].keys()
                                          or any(weight(tensor) is None
                                                 for name, tensor in own.items()
                                                 if name != "hidden_sequences")
                                          for node, own in zip(nodes, given, strict=True)):
            return None
        borders = np.cumsum([len(column) for _, column in parts])[:-1]
        channels = np.concatenate([column for _, column in parts])
        source = np.repeat(np.arange(len(parts)), np.diff([0, *borders, len(channels)]))
        result = self._variable(parts[0][0], len(channels))
        inputs = {name: gs.Constant(f"{tensor.name}.{result.name}", Weight.concat(
            [values_of(own[name]).take_rows(column)
             for own, (_, column) in zip(given, parts, strict=True)]))
            for name, tensor in given[0].items() if name != "hidden_sequences"}
        inputs["hidden_sequences"] = self._columns(Columns(
            tuple(own["hidden_sequences"] for own in given), source, channels))
        replace(self._graph, CONVOLUTION, inputs, [result], nodes[0].attrs)
        return result

    def _concatenated(self, parts: list[tuple[gs.Tensor, np.ndarray]]) -> gs.Tensor:
        tensors = [self._take(*part) for part in parts]
        result = self._variable(tensors[0], sum(tensor.shape[-1] for tensor in tensors))
        self._graph.nodes.append(gs.Node(op="Concat", name=result.name, attrs={"axis": -1},
                                         inputs=tensors, outputs=[result]))
        return result

    def _take(self, rows: gs.Tensor, columns: np.ndarray) -> gs.Tensor:
        """Columns of a tensor, computed as such if its producer can."""
        if np.array_equal(columns, np.arange(rows.shape[-1])):
            return rows
        key = (id(rows), columns.tobytes())
        if key in self._taken:
            return self._taken[key]
        result = self._taken[key] = self._variable(rows, len(columns))
        node = producer(rows)
        op, cut = op_of(node), row_weights(node)
        if len(columns) > rows.shape[-1]:  # repeated columns: cheaper to copy than to compute
            self._graph.nodes.append(selected(rows, columns, result))
        elif node is not None and is_op(node, CONVOLUTION):
            inputs = {name: self._take(tensor, columns) if name == "hidden_sequences" else
                      self._cut(tensor, columns, result)
                      for name, tensor in operands(node).items()}
            replace(self._graph, CONVOLUTION, inputs, [result], node.attrs)
        elif node is not None and op is not None and cut:
            own = {name: self._cut(tensor, columns, result) for name, tensor in cut.items()}
            replace(self._graph, op, {**operands(node), **own}, [result], node.attrs)
        elif node is not None and op is None and node.op in ELEMENTWISE:
            self._graph.nodes.append(gs.Node(
                op=node.op, name=result.name, attrs=dict(node.attrs), outputs=[result],
                inputs=[self._cut(tensor, columns, result) if isinstance(tensor, gs.Constant)
                        else tensor if tensor.is_empty() else self._take(tensor, columns)
                        for tensor in node.inputs]))
        else:
            self._graph.nodes.append(selected(rows, columns, result))
        return result

    def _cut(self, tensor: gs.Tensor, columns: np.ndarray, result: gs.Tensor) -> gs.Tensor:
        """The elements of a per-column constant for these columns; a scalar stays."""
        values = values_of(tensor)
        return gs.Constant(f"{tensor.name}.{result.name}", values.take_rows(columns)) \
            if values.shape and values.shape != (1,) else tensor

    def _variable(self, like: gs.Tensor, width: int) -> gs.Variable:
        result = gs.Variable(f"{like.name}.{next(self._names)}", like.dtype,
                             ["batch", "seq", width])
        self._data.add(id(result))
        return result


def selected(rows: gs.Tensor, columns: np.ndarray, result: gs.Tensor) -> gs.Node:
    """A node that selects columns: a Slice if they are consecutive, else a Gather."""
    if np.array_equal(columns, np.arange(columns[0], columns[0] + len(columns))):
        bounds = [gs.Constant(f"{result.name}.{name}", np.array([value], np.int64))
                  for name, value in (("start", columns[0]), ("end", columns[-1] + 1),
                                      ("axis", -1))]
        return gs.Node(op="Slice", name=result.name, inputs=[rows, *bounds], outputs=[result])
    return gs.Node(op="Gather", name=result.name, attrs={"axis": -1}, outputs=[result],
                   inputs=[rows, gs.Constant(f"{result.name}.index", columns)])
