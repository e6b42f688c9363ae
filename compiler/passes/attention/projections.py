"""Inputs of attention, as GEMMs of the linear layers that compute them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    fields_of,
    is_llmc,
    merge_constants,
    op_of,
    operands,
    producer,
    replace,
    row_weights,
    scalar,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.attention.heads import Branch


def projection(graph: gs.Graph, branch: Branch, columns: np.ndarray, output: gs.Tensor) -> \
        gs.Tensor:
    """The given columns of a projection, in order; by a separate GEMM unless they are all."""
    rows, gemm = columns.reshape(-1), producer(branch.projected)
    if np.array_equal(rows, np.arange(branch.projected.shape[-1])):
        return branch.projected
    shape = [*branch.projected.shape[:-1], len(rows)]
    part = gs.Variable(f"{branch.projected.name}.{int(rows[0])}.{output.name}", np.float32, shape)
    op, weights = op_of(gemm), row_weights(gemm)
    if gemm is None or op is None or not weights:
        return gathered(graph, branch.projected, rows, part)
    cut = {name: gs.Constant(f"{tensor.name}.{part.name}", values_of(tensor).take_rows(rows))
           for name, tensor in weights.items()}
    replace(graph, op, {**operands(gemm), **cut}, [part], gemm.attrs)
    return part


def gathered(graph: gs.Graph, of: gs.Tensor, columns: np.ndarray, part: gs.Variable) -> \
        gs.Variable:
    """`part` as a Gather of columns, for sources other than linear layers."""
    part.inputs.clear()
    graph.nodes.append(gs.Node(
        op="Gather", name=part.name, attrs={"axis": -1}, outputs=[part],
        inputs=[of, gs.Constant(f"{part.name}.index", columns)]))
    return part


def _joined(graph: gs.Graph, sources: Sequence[gs.Tensor]) -> gs.Tensor:
    """Tensors concatenated along the last axis."""
    if len(sources) == 1:
        return sources[0]
    shape = [*sources[0].shape[:-1], sum(int(source.shape[-1]) for source in sources)] \
        if all(source.shape for source in sources) else None
    joined = gs.Variable(".".join(source.name for source in sources), np.float32, shape)
    graph.nodes.append(gs.Node(op="Concat", name=joined.name, attrs={"axis": -1},
                               inputs=[*sources], outputs=[joined]))
    return joined


def without_head_axis(graph: gs.Graph, source: gs.Tensor) -> gs.Tensor:
    """The result of a linear layer on `[batch, 1, seq, width]` without the head axis."""
    gemm = producer(source)
    op = op_of(gemm)
    if gemm is None or op is None or not row_weights(gemm) or len(source.shape or ()) != 4:
        return source
    name, x = next((name, tensor) for name, tensor in operands(gemm).items()
                   if not isinstance(tensor, gs.Constant))
    tokens = under_head_axis(x)
    if tokens is None:
        return source
    flat = gs.Variable(f"{source.name}.tokens", np.float32,
                       [*tokens.shape[:-1], source.shape[-1]])
    replace(graph, op, {**operands(gemm), name: tokens}, [flat], gemm.attrs)
    return flat


def under_head_axis(x: gs.Tensor) -> gs.Tensor | None:
    """The `[batch, seq, width]` under a view as [batch, 1, seq, width], or None."""
    view = producer(x)
    return view.inputs[0] if len(x.shape or ()) == 4 and x.shape[1] == 1 and view is not None \
        and view.op in ("Reshape", "Unsqueeze") and len(view.inputs[0].shape or ()) == 3 else None


def merged_projection(graph: gs.Graph, branches: Sequence[Branch], output: gs.Tensor) -> gs.Tensor:
    """One GEMM for queries, keys and values, with their common elementwise op.

    Else a concatenation of them.
    """
    rows = [branches[0].heads.columns.reshape(-1),
            *(branch.heads.distinct.reshape(-1) for branch in branches[1:])]
    width = sum(map(len, rows))
    name = f"{output.name}.qkv"
    shape = [*output.shape[:-1], width] if output.shape else None
    qkv = gs.Variable(name, dtype=np.float32, shape=shape)
    common = _common_elementwise(branches)
    gemms = [gemm for branch in branches if len(branch.sources) == 1
             and row_weights(gemm := _linear_layer(branch, common)) and gemm is not None]
    if len(gemms) < len(branches) or not all(_can_merge(gemm, gemms[0]) for gemm in gemms):
        parts: list[gs.Tensor] = []
        flat = {id(source): without_head_axis(graph, source)
                for source in {id(source): source for branch in branches
                               for source in branch.sources}.values()}
        for branch, index in zip(branches, rows, strict=True):
            of = _joined(graph, [flat[id(source)] for source in branch.sources])
            if of.shape and np.array_equal(index, np.arange(of.shape[-1])):
                parts.append(of)
                continue
            part = gs.Variable(f"{of.name}.{len(parts)}.{name}", np.float32,
                               [*of.shape[:-1], len(index)] if of.shape else None)
            parts.append(gathered(graph, of, index, part))
        graph.nodes.append(gs.Node(op="Concat", name=name, attrs={"axis": -1}, inputs=parts,
                                   outputs=[qkv]))
        return qkv
    op = op_of(gemms[0])
    assert op is not None
    stacked = {given: merge_constants(
        gemms, given, Weight.concat([values_of(operands(gemm)[given]).take_rows(index)
                                     for gemm, index in zip(gemms, rows, strict=True)]),
        "qkv_proj", output) for given in row_weights(gemms[0])}
    product = qkv if common is None else gs.Variable(f"{name}.before", np.float32, shape)
    replace(graph, op, {**operands(gemms[0]), **stacked}, [product], gemms[0].attrs)
    if common is not None:
        graph.nodes.append(gs.Node(op=common.op, name=name, attrs=dict(common.attrs),
                                   inputs=[product, *common.inputs[1:]], outputs=[qkv]))
    return qkv


def _linear_layer(branch: Branch, common: gs.Node | None) -> gs.Node | None:
    """The linear layer of a branch's source, also through the common elementwise op."""
    maker = producer(branch.projected)
    return maker if common is None or maker is None else producer(maker.inputs[0])


def _common_elementwise(branches: Sequence[Branch]) -> gs.Node | None:
    """The elementwise op with equal constants that computes every branch's source, or None."""
    nodes = [producer(branch.projected) for branch in branches if len(branch.sources) == 1]
    forms = {None if node is None or is_llmc(node) or node.op not in ELEMENTWISE else
             (node.op, repr(sorted(node.attrs.items())),
              *("" if tensor.is_empty() else scalar(tensor) for tensor in node.inputs[1:]))
             for node in nodes}
    form = forms.pop() if len(forms) == 1 and len(nodes) == len(branches) else None
    return nodes[0] if form is not None and None not in form else None


def _can_merge(gemm: gs.Node, first: gs.Node) -> bool:
    """Whether linear layers differ only in their rows."""
    weights, others = row_weights(gemm), row_weights(first)
    return gemm.op == first.op and fields_of(gemm) == fields_of(first) \
        and list(weights) == list(others) \
        and all(tensor is operands(first).get(name) for name, tensor in operands(gemm).items()
                if name not in weights)
