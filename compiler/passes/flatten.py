"""Keep the batch axis where an exporter flattens it for a GEMM.

Given:   Reshape(x, [batch · seq, n]) → row-wise nodes → Reshape(y, [batch, seq, m])
Result:  the row-wise nodes on [batch, seq, n]

A Gemm then has three dimensions, which ONNX does not allow. The GEMM pass, which calls this one,
replaces it at once.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    attends,
    constant,
    is_llmc,
    is_op,
    pools,
)
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.passes.fold import forward


def flatten(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Remove flattening reshapes and their inverses."""
    apply_rules(graph, [FLATTEN], settings, report)
    _restore_batch_axis(graph)
    apply_rules(graph, [UNFLATTEN], settings, report)


def _flattens(node: gs.Node, settings: Settings) -> gs.Node | NoMatch | None:
    """A Reshape of [batch, seq, …] to [batch · seq, n], which row-wise GEMMs do not need."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    shape = constant(node.inputs[1])
    rank = len(after) if after is not None else None if shape is None else shape.size
    if not node.inputs[0].inputs or rank != 2:
        return None  # on an input or a constant, or not to two dimensions
    if before is None or after is None:
        return NoMatch("the shapes around a possible flattening are unknown", node)
    if len(before) < 3 or list(before[:2]) != ["batch", "seq"]:
        return None  # not of tokens
    inner = before[2:]
    if not all(isinstance(dim, int) for dim in inner) or np.prod(inner) != after[-1]:
        return NoMatch(f"{list(before)} is flattened to {list(after)}; expected [batch · seq, n]",
                       node)
    return node


def _keep_batch_axis(graph: gs.Graph, node: gs.Node, settings: Settings) -> None:
    width = node.outputs[0].shape[-1]
    if len(node.inputs[0].shape) == 3:
        forward(node, graph)
        return
    node.inputs[1] = gs.Constant(f"{node.outputs[0].name}.shape", np.array([0, 0, width]))
    node.attrs = {"allowzero": 0}
    node.outputs[0].shape = ["batch", "seq", width]


def _unflattens(node: gs.Node, settings: Settings) -> gs.Node | None:
    """A Reshape that is now the identity, else None."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if not node.inputs[0].inputs or before is None or after is None:
        return None
    return node if len(before) == len(after) == 3 and before[-1] == after[-1] \
        and list(before[:2]) == ["batch", "seq"] else None


def _restore_batch_axis(graph: gs.Graph) -> None:
    """Set three-dimensional shapes after removed reshapes.

    Also where the exporter did not recognize an axis as the batch.
    """
    for node in graph.nodes:
        if not any(t.inputs and t.shape is not None and len(t.shape) == 3
                   and list(t.shape[:2]) == ["batch", "seq"] for t in node.inputs):
            continue
        if node.op in (*ELEMENTWISE, "MatMul", "Gemm") or _is_row_wise(node):
            for result in node.outputs:
                if result.shape is not None and len(result.shape) in (2, 3):
                    result.shape = ["batch", "seq", result.shape[-1]]


def _is_row_wise(node: gs.Node) -> bool:
    """Whether an llmc node works on each token separately."""
    return is_llmc(node) and not is_op(node, SDPA) and not attends(node) and not pools(node)


FLATTEN = Rule("flatten", frozenset({"Reshape"}), _flattens, _keep_batch_axis)
UNFLATTEN = Rule("unflatten", frozenset({"Reshape"}), _unflattens,
                 lambda graph, node, settings: forward(node, graph))
