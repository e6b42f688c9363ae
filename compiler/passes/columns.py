"""Column selection as Gather, the only form that the engine has.

Given:   Slice, Split or Gather along the last axis, by constants
Result:  Gather(x, index) along the last axis for each output, index an int32 constant
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import Report, Settings, constant, scalar
from llmc.compiler.graph.weights import Weight


def columns(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    for node in list(graph.nodes):
        selections = _selected_columns(node)
        if selections is None:
            continue
        outputs = list(node.outputs)
        node.outputs.clear()
        place = graph.nodes.index(node)
        graph.nodes[place:place + 1] = [
            gs.Node(op="Gather", name=output.name, attrs={"axis": -1}, outputs=[output],
                    inputs=[node.inputs[0], _index(f"{output.name}.columns", index)])
            for output, index in zip(outputs, selections, strict=True)]
        report.count("columns", len(outputs))


def _index(name: str, index: np.ndarray) -> gs.Constant:
    return gs.Constant(name, Weight.of(index.astype(np.int32), name))


def _selected_columns(node: gs.Node) -> list[np.ndarray] | None:
    """The columns of each output of a node; None if the node does not select columns."""
    shape = node.inputs[0].shape if node.op in ("Slice", "Split", "Gather") else None
    if not shape or not isinstance(shape[-1], int):
        return None
    every, last = np.arange(shape[-1]), (-1, len(shape) - 1)
    if node.op == "Split":
        if node.attrs.get("axis", 0) not in last:
            return None
        widths = np.cumsum([int(output.shape[-1]) for output in node.outputs])
        return [*np.split(every, widths[:-1])]
    if node.op == "Gather":
        index = constant(node.inputs[1])
        if node.attrs.get("axis", 0) not in last or index is None or index.ndim != 1:
            return None
        return [every[index.astype(np.int64)]]
    bounds = [scalar(tensor) for tensor in node.inputs[1:]]
    start, end, axis, step = (*bounds, 1)[:4] if len(bounds) in (3, 4) else (None,) * 4
    if start is None or end is None or step is None or axis not in last:
        return None
    return [every[int(start):int(end):int(step)]]
