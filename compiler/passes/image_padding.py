"""Rows of zeros that an image encoder inserts after a norm, inserted before it.

Given:   Pad(LayerNorm(x)) along patches, [1, tiles, patches, width]
Result:  LayerNorm(Pad(x)) + rows, which are minus the norm's bias for inserted patches, else zero

A program embeds patches once, with inserted ones, and adds rows that the host computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import data_tensors
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    constant,
    consumers,
    is_op,
    operands,
    producer,
    replace,
    values_of,
)
from llmc.plugins.layer_norm.op import OP as LAYER_NORM


@dataclass(frozen=True)
class _Padding:
    node: gs.Node
    norm: gs.Node
    counts: tuple[int, int]  # patches, and those that are inserted after them


def image_padding(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    if settings.target.runs_program:
        data = data_tensors(graph)
        apply_rules(graph, [Rule("padding", frozenset({"Pad"}),
                                 lambda node, settings: _check(graph, node, data), _rewrite)],
                    settings, report)


def _check(graph: gs.Graph, node: gs.Node, data: set[int]) -> _Padding | NoMatch | None:
    x, norm = node.inputs[0], producer(node.inputs[0])
    if id(x) not in data or norm is None or not is_op(norm, LAYER_NORM):
        return None
    pads = constant(node.inputs[1])
    value = constant(node.inputs[2]) if len(node.inputs) > 2 and not node.inputs[2].is_empty() \
        else np.zeros(())
    shape = list(x.shape or ())
    if pads is None or value is None or value.any() or len(node.inputs) > 3 or len(shape) != 4 \
            or not all(isinstance(size, int) for size in shape) \
            or node.attrs.get("mode", "constant") != "constant" \
            or [index for index, count in enumerate(pads) if count] != [6] or pads[6] < 0:
        return NoMatch("it is not zeros after the patches of each tile", node)
    if len(consumers(graph, x)) > 1:
        return NoMatch("the norm has other readers", node)
    return _Padding(node, norm, (shape[2], int(pads[6])))


def _rewrite(graph: gs.Graph, match: _Padding, settings: Settings) -> None:
    node, norm, (patches, more) = match.node, match.norm, match.counts
    result, given = node.outputs[0], operands(norm)
    name, shape = result.name, [*node.inputs[0].shape[:2], patches + more, result.shape[-1]]
    padded = gs.Variable(f"{name}.padded", np.float32, shape)
    normed = gs.Variable(f"{name}.normed", np.float32, shape)
    attrs = norm.attrs
    graph.nodes.append(gs.Node(op="Pad", name=padded.name, attrs=node.attrs, outputs=[padded],
                               inputs=[given["x"], *node.inputs[1:]]))
    norm.outputs.clear()
    node.outputs.clear()
    replace(graph, LAYER_NORM, {**given, "x": padded}, [normed], attrs)
    bias = values_of(given["bias"]).load() if "bias" in given else np.zeros(shape[-1], np.float32)
    rows = np.where(np.arange(patches + more)[:, None] < patches, 0, -bias).astype(np.float32)
    graph.nodes.append(gs.Node(op="Add", name=name, outputs=[result], inputs=[
        normed, gs.Constant(f"{name}.rows", rows[None, None])]))
