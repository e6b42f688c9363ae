"""Patch embedding of an image encoder as a GEMM.

Given:   Conv(x [n, channels, *sizes], W [width, channels, *patch]), strides equal to the patch
Result:  Reshape, Transpose, Reshape of x to patches [n · patches, channels · patch]; GEMM;
         Reshape, Transpose to [n, width, *patches]. A Slice leaves out elements in no patch.

ONNX Runtime's convolution multiplies one image or patch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import Size, product
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    replace,
    reshaped,
    values_of,
    weight,
)
from llmc.plugins.gemm_bias_act.op import OP as GEMM


@dataclass(frozen=True)
class _Patches:
    node: gs.Node
    patch: tuple[int, ...]  # elements on each axis


def image_patches(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    apply_rules(graph, [Rule("patches", frozenset({"Conv"}), _check, _rewrite)], settings, report)


def _check(node: gs.Node, settings: Settings) -> _Patches | NoMatch:
    x, matrix = node.inputs[:2]
    values = weight(matrix)
    if values is None or x.shape is None:
        return NoMatch("the weight of the convolution or the shape of its input is not known", node)
    patch = tuple(values.shape[2:])
    if list(node.attrs.get("strides", ())) != list(patch) or node.attrs.get("group", 1) != 1 \
            or any(node.attrs.get("pads", ())) \
            or any(step != 1 for step in node.attrs.get("dilations", ())):
        return NoMatch("the convolution's windows overlap, or have gaps or padding", node)
    for sample in settings.image_samples:
        shape = sample.shape(x)
        if shape is None or any(size % step and not isinstance(known, int) for size, known, step in
                                zip(shape[2:], x.shape[2:], patch, strict=True)):
            return NoMatch(f"an axis of {list(x.shape)} is not known to be a multiple of the patch "
                           f"{list(patch)}", x)
    return _Patches(node, patch)


def _rewrite(graph: gs.Graph, match: _Patches, settings: Settings) -> None:
    node, patch = match.node, match.patch
    name, axes = node.outputs[0].name, len(match.patch)
    x = _whole_patches(graph, node.inputs[0], patch, name)
    width, channels = values_of(node.inputs[1]).shape[:2]
    counts: list[Size] = [size // step if isinstance(size, int) else f"(({size})//{step})"
                          for size, step in zip(x.shape[2:], patch, strict=True)]
    sizes = _Sizes(graph, x, name)
    axis_sizes = [sizes.of(axis, step) for axis, step in enumerate(patch, 2)]
    by_patch = x
    if any(count != 1 for count in counts):
        # [n, channels, count, step, …] → [n, count, …, channels, step, …]
        split = reshaped(graph, x, f"{name}.split", sizes.joined(
            [sizes.of(0), channels, *(size for pair in zip(axis_sizes, patch, strict=True)
                                      for size in pair)]), None)
        by_patch = gs.Variable(f"{name}.by_patch", x.dtype)
        order = [0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)]
        graph.nodes.append(gs.Node(op="Transpose", name=by_patch.name, attrs={"perm": order},
                                   inputs=[split], outputs=[by_patch]))
    elements = channels * int(np.prod(patch))
    rows: Size = product([x.shape[0], *counts])
    patches = reshaped(graph, by_patch, f"{name}.patches", np.array([-1, elements]),
                        [rows, elements])
    product_rows = gs.Variable(f"{name}.rows", x.dtype, [rows, width])
    matrix = gs.Constant(f"{node.inputs[1].name}/patches",
                         values_of(node.inputs[1]).reshape((width, elements)))
    bias = node.inputs[2] if len(node.inputs) > 2 and not node.inputs[2].is_empty() else None
    replace(graph, GEMM, {"x": patches, "weight": matrix, "bias": bias}, [product_rows])
    last = reshaped(graph, product_rows, f"{name}.grid", sizes.joined(
        [sizes.of(0), *axis_sizes, width]), [x.shape[0], *counts, width])
    result = node.outputs[0]
    node.outputs.clear()
    graph.nodes.append(gs.Node(op="Transpose", name=name, inputs=[last], outputs=[result],
                               attrs={"perm": [0, axes + 1, *range(1, axes + 1)]}))


def _whole_patches(graph: gs.Graph, x: gs.Tensor, patch: tuple[int, ...], name: str) -> gs.Tensor:
    """The part of each axis that patches cover."""
    sizes = [size - size % step if isinstance(size, int) else size
             for size, step in zip(x.shape[2:], patch, strict=True)]
    cut = [axis for axis, size in enumerate(sizes, 2) if size != x.shape[axis]]
    if not cut:
        return x
    result = gs.Variable(f"{name}.whole", x.dtype, [*x.shape[:2], *sizes])
    bounds = [gs.Constant(f"{result.name}.{what}", np.array(values)) for what, values in (
        ("starts", [0] * len(cut)), ("ends", [sizes[axis - 2] for axis in cut]), ("axes", cut))]
    graph.nodes.append(gs.Node(op="Slice", name=result.name, inputs=[x, *bounds],
                               outputs=[result]))
    return result


class _Sizes:
    """Sizes of the axes of a tensor, as elements of shapes."""

    def __init__(self, graph: gs.Graph, x: gs.Tensor, name: str) -> None:
        self._graph, self._x, self._name = graph, x, name
        self._made: dict[str, gs.Variable] = {}

    def of(self, axis: int, step: int = 1) -> int | gs.Tensor:
        """The size of an axis in steps; a tensor [1] if it depends on the image."""
        size = self._x.shape[axis]
        if isinstance(size, int):
            return size // step
        whole = self._computed("Shape", f"size.{axis}", [self._x], start=axis, end=axis + 1)
        if step == 1:
            return whole
        divisor = gs.Constant(f"{self._name}.step.{axis}", np.array([step]))
        return self._computed("Div", f"steps.{axis}", [whole, divisor])

    def joined(self, sizes: list[int | gs.Tensor]) -> gs.Tensor | np.ndarray:
        """A shape. One size that depends on the image is -1."""
        if sum(not isinstance(size, int) for size in sizes) <= 1:
            return np.array([size if isinstance(size, int) else -1 for size in sizes])
        name = f"joined.{len(sizes)}"
        parts = [gs.Constant(f"{self._name}.{name}.{index}", np.array([size]))
                 if isinstance(size, int) else size for index, size in enumerate(sizes)]
        return self._computed("Concat", name, parts, axis=0)

    def _computed(self, op: str, name: str, inputs: list[gs.Tensor], **attrs: int) -> gs.Variable:
        if name in self._made:
            return self._made[name]
        result = self._made[name] = gs.Variable(f"{self._name}.{name}", np.int64)
        self._graph.nodes.append(gs.Node(op=op, name=result.name, attrs=attrs, inputs=inputs,
                                         outputs=[result]))
        return result
