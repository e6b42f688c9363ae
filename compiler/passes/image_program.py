"""Division of a fused image encoder into graphs for the host and one for a device.

Given:   pixels → Reshape, Transpose → patches → GEMM → Concat with a class token, Add of positions
         → row-wise ops and attention → Reshape, Transpose, … → row-wise ops → rows
Result:  host: pixels and sizes → patches, position rows, cosines and sines, cu_seqlens, indices
         device: patches → GemmBiasRes(residual = position rows) → row-wise ops and attention →
         Gather of each index → Concat → row-wise ops → rows
         host: what follows, such as another order, inserted rows or sums of weighted rows

What does not depend on pixels is computed by the host, as are orders of patches. The nodes between
two row-wise ops only select and join rows; that is determined by running them on numbered elements,
for images of several sizes. The host runs the same nodes on numbered rows for each image, and gives
the device the indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.artifacts.program import MOST_JOINED
from llmc.compiler.graph.image_samples import ImageSample
from llmc.compiler.graph.names import PADDING_ROWS, PIXEL_VALUES
from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    LAYOUT,
    Piece,
    data_tensors,
    dependents,
    evaluated,
)
from llmc.compiler.graph.rewrite import (
    NoMatch,
    constant,
    describe,
    is_llmc,
    is_op,
    op_of,
    operands,
    producer,
    replace,
    tidy,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.image_rows import between, join_columns
from llmc.errors import LlmcError
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.gemm_bias_res.op import OP as GEMM_RESIDUAL

MERGED_ROWS = "merged_rows"  # inputs of the device: patches of each row of the prompt
_SELECTING = LAYOUT | {"Add", "Pad"}
_TOKENS, _ROWS = "num_tokens", "num_logits"


@dataclass(frozen=True)
class ImageParts:
    """An image encoder in two or three graphs.

    Args:
        host: from the inputs of the encoder to those of `device`, and to those of `rows` that the
            device does not compute.
        device: from patches [num_tokens, …] to rows [num_logits, …] or [num_tokens, …]. All nodes
            work on rows, attend, or gather rows.
        rows: for the host, from what the others compute to the outputs of the encoder; None: the
            device computes these.
    """

    host: gs.Graph
    device: gs.Graph
    rows: gs.Graph | None = None


def divide_image(graph: gs.Graph, samples: Sequence[ImageSample]) -> ImageParts:
    """Divide a fused graph. Consumes it.

    Raises:
        LlmcError: what lies between row-wise ops is not a selection of rows, or rows of the prompt
            depend on those of padding.
    """
    padding = [tensor for tensor in graph.outputs if tensor.name.startswith(PADDING_ROWS)]
    hidden = [[evaluated(tensor, sample.arrays) for tensor in padding] for sample in samples]
    graph.outputs = [tensor for tensor in graph.outputs
                     if not any(tensor is own for own in padding)]
    _merge_equal(graph, data_tensors(graph))
    parts = _Division(graph, samples).divide()
    for masks, sample in zip(hidden, samples, strict=True):
        if masks and np.logical_or.reduce(masks)[_read_rows(parts, sample, len(masks[0]))].any():
            raise LlmcError("rows of the prompt depend on patches of padding of the image encoder; "
                            "compile for --target cpu")
    return parts


def _read_rows(parts: ImageParts, sample: ImageSample, count: int) -> np.ndarray:
    """The patches, of `count`, that rows of the prompt depend on; bool [count]."""
    given = {tensor.name: evaluated(tensor, sample.arrays) for tensor in parts.host.outputs
             if tensor.name.partition(".")[0] in (MERGED_ROWS, "cu_seqlens")}
    merged = [rows for name, rows in given.items() if name.startswith(MERGED_ROWS)]
    read = np.full(count, not merged or parts.rows is not None)
    for rows in merged:
        read[rows[:sample.num_rows]] = True
    for _ in range(count):
        before = read.copy()
        for starts in (own for name, own in given.items() if name.startswith("cu_seqlens")):
            for start, end in pairwise(starts):
                read[start:end] |= read[start:end].any()
        if np.array_equal(read, before):
            break
    return read


@dataclass(frozen=True)
class _Selection:
    """Rows that a subgraph selects from its source, and what it adds.

    Args:
        source: rows of a device's op.
        count: rows of the source that are joined to one.
        adds: whether something is added to selected rows, or rows are inserted.
        keeps: whether all rows are selected, in order, and nothing is added.
        columns: where each column is in the joined rows.
    """

    source: gs.Tensor
    piece: Piece
    count: int
    adds: bool
    keeps: bool
    columns: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """The column of the first element of each joined row."""
        places = np.arange(self.count) * (len(self.columns) // self.count)
        return np.argsort(self.columns)[places]


class _Division:
    def __init__(self, graph: gs.Graph, samples: Sequence[ImageSample]) -> None:
        self._graph, self._samples = graph, samples
        self._data = data_tensors(graph)
        self._before = _before_llmc(graph)
        on_device = {id(node) for node in graph.nodes if self._is_row_wise(node)}
        self._of_rows = dependents(graph, {
            id(tensor) for node in graph.nodes if id(node) in on_device for tensor in node.outputs})
        self._on_device: list[gs.Node] = []
        self._computed: set[int] = set()
        for node in graph.nodes:
            if (id(node) in on_device or self._joins_columns(node)) and not self._is_last(node):
                self._on_device.append(node)
                self._computed |= {id(tensor) for tensor in node.outputs}
        self._given: dict[int, gs.Variable] = {}  # inputs of the device, by the host's tensor
        self._names: dict[str, int] = {}
        self._host: list[gs.Tensor] = []
        self._copied: dict[tuple[int, str], gs.Tensor] = {}
        self._nodes: list[gs.Node] = []  # of the device, in order
        self._selected: dict[int, gs.Tensor] = {}
        self._indices: dict[bytes, list[gs.Variable]] = {}  # by selecting subgraph

    def _is_row_wise(self, node: gs.Node) -> bool:
        if is_llmc(node):
            return True
        shapes = [tensor.shape for tensor in (*node.inputs, *node.outputs)
                  if not isinstance(tensor, gs.Constant)]
        return node.op in ELEMENTWISE and id(node.outputs[0]) in self._data \
            and all(shape is not None and len(shape) == 2 for shape in shapes)

    def _is_last(self, node: gs.Node) -> bool:
        """Whether a node works on rows that the host computes of those of the device."""
        return id(node.outputs[0]) not in self._before and not all(
            id(tensor) in self._computed for tensor in node.inputs if id(tensor) in self._data)

    def _joins_columns(self, node: gs.Node) -> bool:
        return node.op == "Concat" and node.attrs["axis"] == -1 \
            and len(node.inputs) <= MOST_JOINED and all(
                id(tensor) in self._of_rows and len(tensor.shape or ()) == 2
                for tensor in node.inputs)

    def divide(self) -> ImageParts:
        for node in self._on_device:
            op = op_of(node)
            names = op.input_names if op is not None else ["x"] * len(node.inputs)
            for index, tensor in enumerate(node.inputs):
                node.inputs[index] = self._operand(node, names[index], tensor)
            self._nodes.append(node)
        outputs, rows = self._outputs()
        others = [*self._on_device, *([] if rows is None else rows.nodes)]
        host = gs.Graph(nodes=[node for node in self._graph.nodes
                               if not any(node is own for own in others)],
                        inputs=list(self._graph.inputs), outputs=self._host, opset=plugins.OPSET)
        device = gs.Graph(nodes=self._nodes, inputs=[*self._given.values()], outputs=outputs,
                          opset=plugins.OPSET)
        tidy(host)
        tidy(device)
        used = {id(tensor) for node in host.nodes for tensor in node.inputs}
        host.inputs = [tensor for tensor in host.inputs if id(tensor) in used]
        kept = {id(tensor) for tensor in (*host.inputs, *host.outputs)}
        for tensor in (own for node in host.nodes for own in (*node.inputs, *node.outputs)):
            if not (id(tensor) in kept or tensor.is_empty() or (
                    isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight))):
                kept.add(id(tensor))
                tensor.name = f"host.{tensor.name}"  # not that of an output
        _number_rows(device)
        for given, result in zip(rows.inputs if rows is not None else (), outputs, strict=False):
            given.shape = result.shape
        return ImageParts(host, device, rows)

    def _operand(self, node: gs.Node, name: str, tensor: gs.Tensor) -> gs.Tensor:
        """An input of a node of the device there."""
        op = op_of(node)
        of_image = op is not None and name in op.integer_inputs
        if tensor.is_empty() or id(tensor) in self._computed \
                or (isinstance(tensor, gs.Constant) and not of_image):
            return tensor
        if id(tensor) not in self._data:
            role = {"residual": "position_rows"}.get(name, name)
            return self._input(tensor, role, "batch_plus_1" if of_image else _TOKENS)
        selection = self._selection(tensor)
        if selection is None:
            return self._input(tensor, "patches", _TOKENS)
        if selection.keeps:
            return selection.source
        if id(tensor) not in self._selected:
            gemm = producer(selection.source)
            stem = is_op(gemm, GEMM) and any(operands(gemm)["x"] is own
                                             for own in self._given.values())
            self._selected[id(tensor)] = self._embed(tensor, selection, gemm) if stem and gemm \
                else self._gather(tensor, selection)
        return self._selected[id(tensor)]

    def _input(self, tensor: gs.Tensor, role: str, rows: str) -> gs.Variable:
        """The device's input for a tensor of the host."""
        if id(tensor) in self._given:
            return self._given[id(tensor)]
        number = self._names.get(role, 0)
        self._names[role] = number + 1
        name = f"{role}.{number}" if number else role  # unlike an input of the host
        dtype = np.dtype(tensor.dtype or np.float32)
        shape = [rows] if len(tensor.shape or ()) == 1 else [rows, self._width(tensor)]
        given = gs.Variable(name, dtype, shape)
        result = gs.Variable(name, dtype, shape)
        self._graph.nodes.append(gs.Node(op="Identity", name=f"{name}.host", inputs=[tensor],
                                         outputs=[result]))
        self._host.append(result)
        self._given[id(tensor)] = given
        return given

    def _width(self, tensor: gs.Tensor) -> int:
        if tensor.shape is None or not isinstance(tensor.shape[-1], int):
            raise LlmcError(f"the width of {describe(tensor)} of the image encoder is not known; "
                            f"compile for --target cpu")
        return int(tensor.shape[-1])

    def _selection(self, tensor: gs.Tensor) -> _Selection | None:
        """The rows that a tensor selects of a device's op; None if it is made of pixels alone."""
        if id(tensor) not in self._of_rows:
            return None
        piece = between(tensor, self._data, _SELECTING, self._computed, reads_shapes=True)
        sources = [] if isinstance(piece, NoMatch) else [
            border for border in piece.inputs if id(border) in self._of_rows]
        if isinstance(piece, NoMatch) or len(sources) != 1:
            raise LlmcError(f"{describe(tensor)} of the image encoder is not a selection of rows "
                            f"({piece if isinstance(piece, NoMatch) else 'of several tensors'}); "
                            f"compile for --target cpu")
        if id(sources[0]) not in self._computed:
            raise LlmcError(f"{describe(producer(sources[0]))} of the image encoder is neither a "
                            f"selection of rows nor an op on each row; compile for --target cpu")
        found = [_probe(piece, sources[0], sample) for sample in self._samples]
        kinds = {None if own is None else own.columns.tobytes() for own in found}
        if len(kinds) != 1 or found[0] is None:
            raise LlmcError(f"{describe(tensor)} of the image encoder is not a selection of whole "
                            f"rows of {describe(sources[0])}; compile for --target cpu")
        fixed = all(border.name == PIXEL_VALUES or border is sources[0]
                    or isinstance(border, gs.Constant) for border in piece.inputs)
        known = [own for own in found if own is not None]
        return _Selection(sources[0], piece, known[0].count, any(own.adds for own in known),
                          fixed and all(own.keeps for own in known), known[0].columns)

    def _embed(self, tensor: gs.Tensor, selection: _Selection, gemm: gs.Node) -> gs.Tensor:
        """A patch embedding with inserted rows and positions, of patches in that order.

        Patches of inserted rows are zeros. The host computes what is added, with the bias.
        """
        source, name = selection.source, tensor.name
        given = operands(gemm)
        patches = next(own for own in self._host if own.name == given["x"].name)
        index = self._rows_of(selection, f"{name}.patches", patches)
        zero = gs.Constant(f"{name}.zero", np.zeros((1, int(patches.shape[-1])), np.float32))
        padded = self._computed_by("Concat", f"{name}.padded", [zero, patches], axis=0)
        ordered = self._computed_by("Gather", f"{name}.ordered", [padded, index], axis=0)
        ordered.shape, ordered.dtype = [_TOKENS, patches.shape[-1]], np.dtype(np.float32)
        self._replace_input(given["x"], patches, ordered)
        result = gs.Variable(f"{name}.embedded", np.float32, [_TOKENS, source.shape[-1]])
        self._nodes = [node for node in self._nodes if node is not gemm]
        gemm.outputs.clear()
        if not selection.adds and "bias" not in given:
            self._nodes.append(replace(gs.Graph(), GEMM, {
                "x": given["x"], "weight": given["weight"]}, [result]))
            return result
        bias = values_of(given["bias"]).load() if "bias" in given else \
            np.zeros(int(source.shape[-1]), np.float32)
        rows = self._copied_piece(selection, f"{name}.positions", self._broadcast(
            bias[None], patches, f"{name}.bias"))
        rows.shape, rows.dtype = [_TOKENS, source.shape[-1]], np.dtype(np.float32)
        self._nodes.append(replace(gs.Graph(), GEMM_RESIDUAL, {
            "x": given["x"], "weight": given["weight"],
            "residual": self._input(rows, "position_rows", _TOKENS)}, [result]))
        return result

    def _replace_input(self, given: gs.Tensor, before: gs.Tensor, after: gs.Variable) -> None:
        """Give the device another tensor of the host as an input."""
        result = gs.Variable(given.name, after.dtype, after.shape)
        before.name = f"{given.name}.unordered"
        self._graph.nodes.append(gs.Node(op="Identity", name=f"{given.name}.ordered",
                                         inputs=[after], outputs=[result]))
        self._host = [result if own is before else own for own in self._host]

    def _gather(self, tensor: gs.Tensor, selection: _Selection) -> gs.Tensor:
        """Selected rows of the device, by indices of the host."""
        if selection.adds:
            raise LlmcError(f"{describe(tensor)} of the image encoder has rows that come from no "
                            f"patch; compile for --target cpu")
        source, width = selection.source, int(selection.source.shape[-1])
        key = selection.piece.key
        if key not in self._indices:
            self._indices[key] = self._index_inputs(selection, tensor.name)
        parts: list[gs.Tensor] = []
        for part, rows in enumerate(self._indices[key]):
            made = gs.Variable(f"{tensor.name}.{part}", np.float32, [_ROWS, width])
            self._nodes.append(gs.Node(op="Gather", name=made.name, attrs={"axis": 0},
                                       inputs=[source, rows], outputs=[made]))
            parts.append(made)
        joined = parts[0]
        if len(parts) > 1:
            joined = gs.Variable(f"{tensor.name}.joined", np.float32,
                                 [_ROWS, width * len(parts)])
            made = gs.Graph(opset=plugins.OPSET)
            join_columns(made, parts, joined)
            self._nodes += made.nodes
        if np.array_equal(selection.columns, np.arange(len(selection.columns))):
            return joined
        ordered = gs.Variable(f"{joined.name}.ordered", np.float32, joined.shape)
        self._nodes.append(gs.Node(
            op="Gather", name=ordered.name, attrs={"axis": -1}, outputs=[ordered],
            inputs=[joined, gs.Constant(f"{ordered.name}.columns", selection.columns)]))
        return ordered

    def _index_inputs(self, selection: _Selection, name: str) -> list[gs.Variable]:
        """Add inputs of row indices, one for each part of a joined row; see `MERGED_ROWS`."""
        index = self._rows_of(selection, f"{name}.rows", self._tokens(), 0)
        inputs = []
        for part in range(selection.count):
            column = self._computed_by("Gather", f"{name}.rows.{part}", [
                index, gs.Constant(f"{name}.part.{part}", np.array(part))], axis=1)
            column.shape, column.dtype = [_ROWS], np.dtype(np.int64)
            inputs.append(self._input(column, MERGED_ROWS, _ROWS))
        return inputs

    def _outputs(self) -> tuple[list[gs.Tensor], gs.Graph | None]:
        """Outputs of the device, and the nodes that follow, whose first inputs they are."""
        results = [self._output(tensor) for tensor in self._graph.outputs]
        found = [own for own in results if own is not None]
        if len(found) < len(results):
            return self._rest()
        for result, tensor in zip(found, self._graph.outputs, strict=True):
            result.name = tensor.name
        return found, None

    def _output(self, tensor: gs.Tensor) -> gs.Tensor | None:
        """The rows of a device's op that an output is; None: it is computed from them."""
        if id(tensor) in self._computed:
            return tensor
        try:
            selection = self._selection(tensor)
        except LlmcError:
            return None
        return selection.source if selection is not None and selection.keeps else None

    def _rest(self) -> tuple[list[gs.Tensor], gs.Graph]:
        """Outputs of the device, and the nodes that compute those of the encoder from them."""
        nodes, borders = list[gs.Node](), dict[int, gs.Tensor]()
        names = [tensor.name for tensor in self._graph.outputs]
        known = {*self._computed}  # what depends on the device's rows or on their number
        for node in self._graph.nodes:
            if any(id(tensor) in known for tensor in node.inputs):
                known.update(id(tensor) for tensor in node.outputs)
        waiting, seen = list(self._graph.outputs), set[int]()
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._computed or id(tensor) not in known:
                if not (tensor.is_empty() or isinstance(tensor, gs.Constant)):
                    borders[id(tensor)] = tensor
                continue
            node = tensor.inputs[0]
            if id(node) not in seen:
                seen.add(id(node))
                nodes.append(node)
                waiting.extend(node.inputs)
        results = [own for own in borders.values() if id(own) in self._computed]
        others = [own for own in borders.values() if id(own) not in self._computed]
        if not results:
            raise LlmcError(f"the output {describe(self._graph.outputs[0])} of the image encoder "
                            f"is not computed from rows; compile for --target cpu")
        inputs = {id(own): gs.Variable(f"computed_rows.{number}", np.float32, own.shape)
                  for number, own in enumerate(results)}
        inputs |= {id(own): self._typed(own, f"rows_input.{number}")
                   for number, own in enumerate(others)}
        for node in nodes:
            for index, tensor in enumerate(node.inputs):
                node.inputs[index] = inputs.get(id(tensor), tensor)
        for own in results:
            own.name = inputs[id(own)].name
        for own in others:
            given = inputs[id(own)]
            result = gs.Variable(given.name, given.dtype, given.shape)
            self._graph.nodes.append(gs.Node(op="Identity", name=f"{result.name}.host",
                                             inputs=[own], outputs=[result]))
            self._host.append(result)
        outputs = [*self._graph.outputs]
        for index, own in enumerate(outputs):
            if id(own) in inputs:  # nothing follows
                outputs[index] = gs.Variable(names[index], np.float32, own.shape)
                nodes.append(gs.Node(op="Identity", name=names[index],
                                     inputs=[inputs[id(own)]], outputs=[outputs[index]]))
        rows = gs.Graph(nodes=nodes, inputs=[*inputs.values()], outputs=outputs,
                        opset=plugins.OPSET)
        tidy(rows)
        return results, rows

    def _typed(self, tensor: gs.Tensor, name: str) -> gs.Variable:
        """A tensor like one of the host, whose dtype and axes are determined for an image."""
        if tensor.dtype is not None and tensor.shape is not None:
            return gs.Variable(name, tensor.dtype, tensor.shape)
        values = evaluated(tensor, self._samples[0].arrays)
        return gs.Variable(name, values.dtype, [f"{name}.{axis}" for axis in range(values.ndim)])

    def _tokens(self) -> gs.Tensor:
        """A tensor of the host with a row for each patch of the device."""
        return next(own for own in self._host if own.shape[0] == _TOKENS)

    def _rows_of(self, selection: _Selection, name: str, like: gs.Tensor, first: int = 1) -> \
            gs.Variable:
        """Indices of the selected rows, counted from `first`; int64 [rows] or [rows, count].

        With `first` 1, inserted rows have index 0. `like` has as many rows as the source.
        """
        width = int(selection.source.shape[-1])
        size = self._computed_by("Shape", f"{name}.size", [like], start=0, end=1)
        count = self._computed_by("Squeeze", f"{name}.count", [size])
        zero, one = (gs.Constant(f"{name}.{what}", np.array(value))
                     for what, value in (("zero", 0), ("one", 1)))
        numbers = self._computed_by("Range", f"{name}.range", [zero, count, one])
        if first:
            numbers = self._computed_by("Add", f"{name}.shifted", [
                numbers, gs.Constant(f"{name}.first", np.array(first))])
        floats = self._computed_by("Cast", f"{name}.floats", [numbers], to=1)
        column = self._computed_by("Unsqueeze", f"{name}.column", [
            floats, gs.Constant(f"{name}.axis", np.array([1]))])
        wide = self._computed_by("Expand", f"{name}.wide", [
            column, gs.Constant(f"{name}.width", np.array([1, width]))])
        selected: gs.Tensor = self._copied_piece(selection, f"{name}.selected", wide)
        if selection.adds:
            nothing = self._broadcast(np.zeros((1, width), np.float32), like, f"{name}.nothing")
            added = self._copied_piece(selection, f"{name}.added", nothing)
            selected = self._computed_by("Sub", f"{name}.difference", [selected, added])
        columns = selection.firsts
        few = self._computed_by("Gather", f"{name}.few", [selected, gs.Constant(
            f"{name}.columns", np.array(columns[0] if first else columns))], axis=1)
        rounded = self._computed_by("Round", f"{name}.rounded", [few])
        return self._computed_by("Cast", f"{name}.index", [rounded], to=7)

    def _broadcast(self, row: np.ndarray, like: gs.Tensor, name: str) -> gs.Variable:
        """A row, as often as another tensor has rows."""
        size = self._computed_by("Shape", f"{name}.size", [like], start=0, end=1)
        shape = self._computed_by("Concat", f"{name}.shape", [
            size, gs.Constant(f"{name}.one", np.array([1]))], axis=0)
        return self._computed_by("Expand", name, [gs.Constant(f"{name}.row", row), shape])

    def _copied_piece(self, selection: _Selection, name: str, source: gs.Tensor) -> gs.Variable:
        """The result of the selecting nodes on another source, with copies of these."""
        copies: dict[int, gs.Tensor] = {id(selection.source): source}
        for node in selection.piece.nodes:
            if not any(id(tensor) in copies for tensor in node.inputs):
                continue
            outputs = [gs.Variable(f"{name}.{tensor.name}", tensor.dtype)
                       for tensor in node.outputs]
            copies.update((id(tensor), own)
                          for tensor, own in zip(node.outputs, outputs, strict=True))
            self._graph.nodes.append(gs.Node(
                op=node.op, name=f"{name}.{node.name}", attrs=dict(node.attrs), outputs=outputs,
                inputs=[copies.get(id(tensor), tensor) for tensor in node.inputs]))
        result = copies[id(selection.piece.output)]
        assert isinstance(result, gs.Variable)
        return result

    def _computed_by(self, op: str, name: str, inputs: Sequence[gs.Tensor], **attrs: int) -> \
            gs.Variable:
        result = gs.Variable(name)
        self._graph.nodes.append(gs.Node(op=op, name=name, attrs=attrs, inputs=[*inputs],
                                         outputs=[result]))
        return result


@dataclass(frozen=True)
class _Probed:
    """What a subgraph does for one image; see `_Selection`."""

    count: int
    adds: bool
    keeps: bool
    columns: np.ndarray


def _probe(piece: Piece, source: gs.Tensor, sample: ImageSample) -> _Probed | None:
    """Run a subgraph on numbered elements; None if its result is not made of whole rows."""
    shape = sample.shape(source)
    if shape is None or len(shape) != 2:
        return None
    rows, columns = np.meshgrid(*map(np.arange, shape), indexing="ij")
    weights = {tensor.name: values_of(tensor).load() for tensor in piece.inputs
               if isinstance(tensor, gs.Constant)}

    def run(x: np.ndarray) -> np.ndarray:
        return np.asarray(piece.run({**sample.arrays, **weights,
                                     source.name: x.astype(np.float32)}), np.float64)

    added = run(np.zeros(shape))
    if added.ndim != 2 or added.shape[1] % shape[1]:
        return None
    numbers, places = (run(x + 1) - added for x in (rows, columns))
    from_rows, from_columns = np.rint(numbers), np.rint(places)
    count, there = added.shape[1] // shape[1], from_rows > 0
    if max(np.abs(numbers - from_rows).max(), np.abs(places - from_columns).max()) > 0.1 \
            or not there.any(1).any():
        return None
    place = from_columns[np.argmax(there.all(1))].astype(np.int64) - 1  # of a row from patches
    firsts = np.flatnonzero(place == 0)
    if len(firsts) != count or not np.array_equal(from_columns, np.where(there, place + 1, 0)):
        return None
    # The joined row that each column belongs to: columns of one have the same numbers.
    part = np.array([next((own for own, first in enumerate(firsts) if np.array_equal(
        from_rows[:, first], column)), -1) for column in from_rows.T])
    whole = part * shape[1] + place
    if not np.array_equal(np.sort(whole), np.arange(added.shape[1])):
        return None
    adds = bool(added.any() or not there.all())
    keeps = not adds and np.array_equal(whole, np.arange(len(whole))) and count == 1 \
        and np.array_equal(from_rows[:, 0], np.arange(1, shape[0] + 1))
    return _Probed(count, adds, keeps, whole)


def _number_rows(graph: gs.Graph) -> None:
    """Set the number of rows of all tensors."""
    for node in graph.nodes:
        rows: Iterable[str] = [_ROWS] if node.op == "Gather" and node.attrs["axis"] == 0 else [
            tensor.shape[0] for tensor in node.inputs
            if isinstance(tensor, gs.Variable) and not tensor.is_empty()
            and len(tensor.shape or ()) == 2]
        for tensor in node.outputs:
            if not tensor.is_empty():
                tensor.shape = [next(iter(rows)), tensor.shape[-1]]
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor.dtype is None:
            tensor.dtype = np.dtype(np.float32)


def _before_llmc(graph: gs.Graph) -> set[int]:
    """Ids of tensors that an llmc op depends on."""
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if is_llmc(node) or any(id(tensor) in found for tensor in node.outputs):
            found.update(id(tensor) for tensor in (*node.inputs, *node.outputs))
    return found


def _merge_equal(graph: gs.Graph, data: set[int]) -> None:
    """Merge equal nodes and constants that do not depend on pixels, such as each layer's."""
    known: dict[object, gs.Tensor] = {}
    merged: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        for index, tensor in enumerate(node.inputs):
            values = constant(tensor)
            if values is not None:
                tensor = known.setdefault((values.dtype.str, values.shape, values.tobytes()),
                                          tensor)
            node.inputs[index] = merged.get(id(tensor), tensor)
        if is_llmc(node) or len(node.outputs) != 1 or id(node.outputs[0]) in data:
            continue
        key = (node.op, repr(sorted(node.attrs.items())), *map(id, node.inputs))
        merged[id(node.outputs[0])] = known.setdefault(key, node.outputs[0])
    tidy(graph)
