"""Flatten parallel hidden states, as of hyper-connections, into one row.

Given:   h [batch, seq, streams, hidden]; x = ReduceSum(Mul(weights, h)) over streams → a layer →
         h' = Add(Mul(weights', y), h)
Result:  h [batch, seq, streams * hidden] and row-wise nodes; x a sum of slices, y repeated

Layouts are determined by probing, see graph/columns.py.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import LAYOUT, data_tensors
from llmc.compiler.graph.rewrite import Report, Settings, is_llmc, is_op, producer
from llmc.compiler.passes.row_layout import bring_into_rows
from llmc.plugins.rms_norm.op import OP as RMS_NORM


def streams(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass.

    Raises:
        LlmcError: an op between the layers is not row-wise.
    """
    sums = [node for node in graph.nodes if node.op == "ReduceSum"
            and [*(node.inputs[0].shape or ())][:2] == ["batch", "seq"]
            and len(node.inputs[0].shape) == 4 and node.outputs[0].shape is not None
            and len(node.outputs[0].shape) == 3]
    report.count("sum", len(sums))
    if not sums:
        return
    bring_into_rows(graph, _region(graph, sums), "parallel hidden states were")


def _region(graph: gs.Graph, sums: list[gs.Node]) -> list[gs.Node]:
    """All nodes connected with these, up to llmc ops other than norms, without layout ops."""
    data = data_tensors(graph)
    inside = {id(node): node for node in sums}
    stack = list(sums)
    while stack:
        node = stack.pop()
        near = [user for tensor in node.outputs for user in tensor.outputs]
        if not is_llmc(node):
            near += [above for tensor in node.inputs if id(tensor) in data
                     and (above := producer(tensor)) is not None and not is_llmc(above)]
        for other in near:
            if id(other) not in inside:
                inside[id(other)] = other
                if not is_llmc(other) or is_op(other, RMS_NORM):
                    stack.append(other)
    return [node for node in graph.nodes if id(node) in inside
            and node.op not in (LAYOUT - {"Cast"}) | {"Shape", "Size"}]
