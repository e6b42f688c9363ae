"""Average pooling of an image encoder's grid of patches as a GEMM, for targets with programs.

Given:   AveragePool(x [n, width, height, columns]), strides equal to the window [down, across]
Result:  Reshape, Transpose, Reshape of x to windows [n · windows, down · across · width]; GEMM by a
         matrix of 1 / (down · across); Reshape, Transpose to [n, width, height / down,
         columns / across]

A program gathers the patches of a window as those that an image token merges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import product
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    replace,
    reshaped,
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
        apply_rules(graph, [Rule("pools", frozenset({"AveragePool"}), _check, _rewrite)], settings,
                    report)


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
