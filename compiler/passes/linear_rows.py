"""Linear layers of an encoder of audio on [rows, width], without axes of windows and frames.

Given:   GemmBiasAct(x, W, b), x [windows, frames, in]
Result:  Reshape(x, [-1, in]) → GemmBiasAct → Reshape to [windows, frames, out]
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import product
from llmc.compiler.graph.rewrite import Report, Settings, is_op, operands, values_of
from llmc.plugins.gemm_bias_act.op import OP as GEMM


def linear_rows(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    for node in [node for node in graph.nodes if is_op(node, GEMM)]:
        x, y = node.inputs[0], node.outputs[0]
        if x.shape is not None and len(x.shape) == 2:
            continue
        width, columns = values_of(operands(node)["weight"]).shape
        known = x.shape is not None and None not in x.shape
        count = product(x.shape[:-1]) if known else f"{y.name}.count"
        rows = gs.Variable(f"{y.name}.x_rows", x.dtype, [count, columns])
        made = gs.Variable(f"{y.name}.rows", y.dtype, [count, width])
        axes, shape = gs.Variable(f"{y.name}.axes"), gs.Variable(f"{y.name}.shape")
        node.inputs[0], node.outputs[0] = rows, made
        graph.nodes += [
            gs.Node("Reshape", rows.name, inputs=[x, gs.Constant(
                f"{rows.name}.shape", np.array([-1, columns]))], outputs=[rows]),
            gs.Node("Shape", axes.name, {"start": 0, "end": -1}, [x], [axes]),
            gs.Node("Concat", shape.name, {"axis": 0}, [axes, gs.Constant(
                f"{y.name}.width", np.array([width]))], [shape]),
            gs.Node("Reshape", f"{y.name}.view", inputs=[made, shape], outputs=[y])]
        report.count("rows")
