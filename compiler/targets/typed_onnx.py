"""Export of 16-bit graphs as ONNX, for GPU targets."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc.artifacts.program import ELEMENTWISE  # always computed in float32 by the engine
from llmc.compiler.artifact import Placed, to_onnx


def typed_onnx(graph: gs.Graph, places: dict[str, Placed], target: str, dtype: str) -> \
        onnx.ModelProto:
    """Export with `to_onnx`, elementwise ONNX ops in float32. Changes the graph."""
    if dtype != "float32":
        _widen_elementwise(graph)
    return to_onnx(graph, places, target, dtype)


def _widen_elementwise(graph: gs.Graph) -> None:
    """Compute elementwise ONNX ops in float32, as the engine does.

    Given:   Mul(x, 2.0) with 16-bit x and float32 2.0
    Result:  Cast(Mul(Cast(x), 2.0))
    """
    nodes: list[gs.Node] = []
    for node in list(graph.nodes):
        if node.op not in ELEMENTWISE:
            nodes.append(node)
            continue
        for index, tensor in enumerate(node.inputs):
            if isinstance(tensor, gs.Variable) and tensor.dtype != bool:
                wide = gs.Variable(f"{node.outputs[0].name}.input_{index}", np.float32,
                                   tensor.shape)
                nodes.append(_float_cast(tensor, wide))
                node.inputs[index] = wide
        narrow = node.outputs[0]
        if narrow.dtype == bool:
            nodes.append(node)
            continue
        node.outputs = [gs.Variable(f"{narrow.name}.float32", np.float32, narrow.shape)]
        nodes += (node, _float_cast(node.outputs[0], narrow))
    graph.nodes.clear()
    graph.nodes.extend(nodes)


def _float_cast(source: gs.Variable, target: gs.Variable) -> gs.Node:
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(target.dtype))
    return gs.Node("Cast", f"{target.name}.cast", {"to": int(kind)}, [source], [target])
