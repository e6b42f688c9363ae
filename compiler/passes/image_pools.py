"""Average pooling of an image encoder's patches as a GEMM, for targets with programs.

Given:   AveragePool(x [n, width, height, columns]), strides equal to the window [down, across]
Result:  Reshape, Transpose, Reshape of x to windows [n · windows, down · across · width]; GEMM by a
         matrix of 1 / (down · across); Reshape, Transpose to [n, width, height / down,
         columns / across]

Given:   MatMul(means [1, rows, patches], Where(padding, 0, x [1, patches, width])), where each row
         of `means` has as many elements that are not zero, all equal
Result:  TopK of `means` without padding → Gather of x → Reshape to [1, rows, count · width]; GEMM
         by a matrix of that element

A program gathers the patches of a window as those that an image token merges. The rows of `means`
are computed for images of several sizes. Last rows may be zero if the prompt does not take them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import product
from llmc.compiler.graph.probe import data_tensors, evaluated
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    producer,
    replace,
    reshaped,
    scalar,
)
from llmc.compiler.graph.weights import Weight
from llmc.plugins.gemm_bias_act.op import OP as GEMM


@dataclass(frozen=True)
class _Pool:
    node: gs.Node
    window: tuple[int, int]  # rows and columns of patches


def image_pools(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    if settings.target.runs_program:
        data = data_tensors(graph)
        apply_rules(graph, [
            Rule("pools", frozenset({"AveragePool"}), _check, _rewrite),
            Rule("means", frozenset({"MatMul"}),
                 lambda node, settings: _check_means(node, settings, data), _rewrite_means),
        ], settings, report)


def _check(node: gs.Node, settings: Settings) -> _Pool | NoMatch:
    shape, window = list(node.inputs[0].shape or ()), tuple(node.attrs["kernel_shape"])
    if list(node.attrs.get("strides", ())) != list(window) or any(node.attrs.get("pads", ())) \
            or node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") \
            or any(step != 1 for step in node.attrs.get("dilations", ())):
        return NoMatch("the windows overlap, or have gaps or padding", node)
    if len(shape) != 4 or not all(isinstance(size, int) for size in shape[1:]) \
            or any(size % step for size, step in zip(shape[2:], window, strict=True)):
        return NoMatch(f"{shape} is not [n, width, height, columns] of whole windows "
                       f"{list(window)}", node)
    return _Pool(node, (window[0], window[1]))


@dataclass(frozen=True)
class _Means:
    """Rows that are means of patches.

    Args:
        matrix: [1, rows, patches].
        padding: of patches, bool [1, patches, 1]; None: none is.
        hides: values of `padding` for patches of padding.
        x: [1, patches, width].
        count: patches of each mean.
        factor: of each patch.
    """

    node: gs.Node
    matrix: gs.Tensor
    padding: gs.Tensor | None
    hides: bool
    x: gs.Tensor
    count: int
    factor: float


def _check_means(node: gs.Node, settings: Settings, data: set[int]) -> _Means | NoMatch | None:
    matrix, x = node.inputs
    if id(matrix) in data or id(x) not in data or isinstance(matrix, gs.Constant):
        return None  # attention, or a linear layer
    padding, hides = None, True
    masking = producer(x)
    if masking is not None and masking.op == "Where":
        zero = [scalar(tensor) == 0 for tensor in masking.inputs[1:]]
        if any(zero) and id(masking.inputs[0]) not in data:
            padding, hides, x = masking.inputs[0], zero[0], masking.inputs[1 + zero[0]]
    if len(x.shape or ()) != 3 or x.shape[0] != 1 or not isinstance(x.shape[2], int) \
            or len(matrix.shape or ()) != 3 \
            or (padding is not None and list(padding.shape or ()) != [1, x.shape[1], 1]):
        return NoMatch(f"{list(matrix.shape or ())} and {list(x.shape or ())} are not [1, rows, "
                       f"patches] and [1, patches, width]", node)
    found: set[tuple[int, float]] = set()
    for sample in settings.image_samples:
        try:
            means = evaluated(matrix, sample.arrays)
            hidden = None if padding is None else evaluated(padding, sample.arrays) == hides
        except CannotEvaluate:
            return NoMatch("its rows cannot be computed for an image", matrix)
        if hidden is not None:
            means = np.where(hidden.swapaxes(1, 2), 0, means)
        counts = (means[0] != 0).sum(-1)
        known = np.count_nonzero(counts)
        if counts[known:].any() or (known < len(counts) and (
                sample.num_rows is None or sample.num_rows > known)):
            return NoMatch("rows of the prompt have no patches", matrix)
        found |= {(int(count), float(value)) for count in {*counts[:known].tolist()}
                  for value in np.unique(means[means != 0])}
    if len(found) != 1:
        return NoMatch("its rows are not means of as many patches each", matrix)
    (count, factor), = found
    return _Means(node, matrix, padding, hides, x, count, factor)


def _rewrite_means(graph: gs.Graph, match: _Means, settings: Settings) -> None:
    result, x, count = match.node.outputs[0], match.x, match.count
    name, width = result.name, int(x.shape[2])

    def computed(op: str, what: str, inputs: list[gs.Tensor], **attrs: object) -> gs.Variable:
        made = gs.Variable(f"{name}.{what}")
        graph.nodes.append(gs.Node(op=op, name=made.name, attrs=attrs, inputs=inputs,
                                   outputs=[made]))
        return made

    matrix = match.matrix
    if match.padding is not None:
        row = computed("Transpose", "row", [match.padding], perm=[0, 2, 1])
        hidden = row if match.hides else computed("Not", "hidden", [row])
        matrix = computed("Where", "means", [
            hidden, gs.Constant(f"{name}.zero", np.array(0, np.float32)), matrix])
    values, index = (gs.Variable(f"{name}.{what}") for what in ("values", "index"))
    graph.nodes.append(gs.Node(op="TopK", name=index.name, attrs={"axis": -1},
                               inputs=[matrix, gs.Constant(f"{name}.count", np.array([count]))],
                               outputs=[values, index]))
    patches = reshaped(graph, x, f"{name}.patches", [-1, width], [x.shape[1], width])
    gathered = computed("Gather", "gathered", [
        patches, reshaped(graph, index, f"{name}.flat", [-1])], axis=0)
    joined = reshaped(graph, gathered, f"{name}.joined", [1, -1, count * width],
                      [1, result.shape[1], count * width])
    joined.dtype = np.dtype(np.float32)
    mean = Weight.of(np.tile(np.eye(width, dtype=np.float32) * match.factor, (1, count)),
                     f"{name}.mean")
    match.node.outputs.clear()
    replace(graph, GEMM, {"x": joined, "weight": gs.Constant(mean.name, mean)}, [result])


def _rewrite(graph: gs.Graph, match: _Pool, settings: Settings) -> None:
    x, result = match.node.inputs[0], match.node.outputs[0]
    name, (down, across) = result.name, match.window
    count, width, height, columns = x.shape
    high, wide, patches = height // down, columns // across, down * across
    mean = Weight.of(np.tile(np.eye(width, dtype=np.float32) / patches, (1, patches)),
                     f"{name}.mean")
    match.node.outputs.clear()
    split = reshaped(graph, x, f"{name}.split", [-1, width, high, down, wide, across])
    windows = gs.Variable(f"{name}.windows", x.dtype)
    graph.nodes.append(gs.Node(op="Transpose", name=windows.name, inputs=[split],
                               outputs=[windows], attrs={"perm": [0, 2, 4, 3, 5, 1]}))
    joined = reshaped(graph, windows, f"{name}.joined", [-1, patches * width],
                      [product([count, high, wide]), patches * width])
    pooled = gs.Variable(f"{name}.rows", x.dtype, [joined.shape[0], width])
    replace(graph, GEMM, {"x": joined, "weight": gs.Constant(mean.name, mean)}, [pooled])
    grid = reshaped(graph, pooled, f"{name}.grid", [-1, high, wide, width])
    graph.nodes.append(gs.Node(op="Transpose", name=name, inputs=[grid], outputs=[result],
                               attrs={"perm": [0, 3, 1, 2]}))
