"""Constant folding."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import Piece
from llmc.compiler.graph.rewrite import constant, tidy

MAX_ELEMENTS = 1 << 20  # of a constant in memory


def _is_small(values: np.ndarray | None) -> bool:
    return values is not None and values.size <= MAX_ELEMENTS


def fold_constants(graph: gs.Graph) -> int:
    """Evaluate all nodes with only small constant inputs, in one run.

    Returns:
        The number of folded nodes.
    """
    _constant_nodes(graph)
    foldable: list[gs.Node] = []
    known: set[int] = set()
    for node in graph.nodes:
        reads = [tensor for tensor in node.inputs if not tensor.is_empty()]
        plain = node.domain in (None, "", "ai.onnx") and not any(True for _ in node.subgraphs())
        if plain and reads and all(id(t) in known or _is_small(constant(t)) for t in reads):
            foldable.append(node)
            known.update(id(tensor) for tensor in node.outputs)
    inside = {id(node) for node in foldable}
    frontier = tuple(tensor for node in foldable for tensor in node.outputs
                     if any(id(user) not in inside for user in tensor.outputs)
                     and not isinstance(tensor.dtype, int))  # numpy has no bfloat16
    if not frontier:
        return 0
    for tensor, array in zip(frontier, Piece(tuple(foldable), (), frontier).run_all({}),
                             strict=True):
        if array.size <= MAX_ELEMENTS:
            tensor.inputs.clear()
            tensor.to_constant(array)
    tidy(graph)
    return len(foldable)


def _constant_nodes(graph: gs.Graph) -> None:
    """Convert Constant nodes to constants."""
    for node in graph.nodes:
        if node.op != "Constant":
            continue
        (attribute, value), = node.attrs.items()
        if attribute == "value":
            array = np.array(value.values)
        elif attribute in ("value_int", "value_ints"):
            array = np.array(value, dtype=np.int64)
        elif attribute in ("value_float", "value_floats"):
            array = np.array(value, dtype=np.float32)
        else:
            continue
        node.outputs[0].to_constant(array)
        node.inputs.clear()
        node.outputs.clear()
    tidy(graph)
