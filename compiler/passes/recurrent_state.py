"""Add recurrent state to layers, and convert their surroundings to rows.

Given:   Convolution and Recurrence; around them, up to linear layers, ops in layouts by heads or
         channels: transposes, reshapes, splits; per-head norms; gates
Result:  CausalConv1d and GatedLinearAttention, each with its state, and row-wise nodes on
         [batch, seq, width]; linear layers compute the columns that these read, in their order

Layouts are determined by probing, see graph/columns.py.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import LAYOUT, data_tensors
from llmc.compiler.graph.recurrence import CONVOLUTION, RECURRENCE
from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    describe,
    fields_of,
    graph_input,
    is_llmc,
    is_op,
    operands,
    producer,
    replace,
    tidy,
    weight,
)
from llmc.compiler.passes.row_layout import bring_into_rows
from llmc.errors import LlmcError
from llmc.plugins.causal_conv1d.op import OP as CAUSAL_CONV1D
from llmc.plugins.linear_attention.op import OP as LINEAR_ATTENTION
from llmc.plugins.rms_norm.op import OP as RMS_NORM

_OTHERS = ("Shape", "Size")  # of computed tensors, read by reshapes


def states(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass.

    Raises:
        LlmcError: an op around a layer with recurrent state is not row-wise.
    """
    found = [node for node in graph.nodes if is_op(node, CONVOLUTION, RECURRENCE)]
    report.matches.update({"convolution": 0, "recurrence": 0})
    if not found:
        return
    bring_into_rows(graph, _region(graph, found), "a layer with recurrent state was")
    found = [node for node in graph.nodes if is_op(node, CONVOLUTION, RECURRENCE)]
    for number, node in enumerate(found):
        _with_state(graph, node, number)
        report.count(node.op.lower())
    tidy(graph)


def _region(graph: gs.Graph, found: list[gs.Node]) -> list[gs.Node]:
    """The nodes around these, below and above, up to llmc ops other than norms.

    Layout ops are left out.
    """
    inside = {id(node): node for node in found}
    stack = list(found)
    while stack:
        node = stack.pop()
        if is_llmc(node) and not is_op(node, CONVOLUTION, RECURRENCE, RMS_NORM):
            continue
        for user in (user for tensor in node.outputs for user in tensor.outputs):
            if id(user) not in inside:
                inside[id(user)] = user
                stack.append(user)
    stack = list(inside.values())
    data = data_tensors(graph)
    while stack:
        for tensor in stack.pop().inputs:
            above = producer(tensor)
            if above is not None and id(tensor) in data and not is_llmc(above) \
                    and id(above) not in inside:
                inside[id(above)] = above
                stack.append(above)
    return [node for node in graph.nodes if id(node) in inside
            and node.op not in (LAYOUT - {"Cast"}) | {*_OTHERS}]


def _with_state(graph: gs.Graph, node: gs.Node, number: int) -> None:
    """Replace a marker node with the op that takes and returns its recurrent state.

    Raises:
        LlmcError: a weight of the layer is computed.
    """
    fields, given = fields_of(node), operands(node)
    for name in ("weight", "bias", "skip"):
        if name in given and weight(given[name]) is None:
            raise LlmcError(f"a layer with recurrent state was not recognized: its {name} is "
                            f"computed, expected a weight ({describe(node)})")
    op, shape = CAUSAL_CONV1D, [fields.get("kernel_size", 1) - 1, node.outputs[0].shape[-1]]
    if is_op(node, RECURRENCE):
        op, shape = LINEAR_ATTENTION, [fields[name] for name in (
            "num_v_heads", "k_head_dim", "v_head_dim")]
    name = f"state_{number}"
    before, after = (gs.Variable(own, np.float32, ("batch", *shape))
                     for own in (name, f"{name}_out"))
    graph.inputs.append(before)
    graph.outputs.append(after)
    inputs = {own.removesuffix("_sequences"): tensor for own, tensor in given.items()}
    if is_op(node, RECURRENCE):
        _name_packed(given["qkv_sequences"])
        inputs |= _decay(inputs["decay"], fields["num_v_heads"])
    replace(graph, op, {
        **inputs, "state": before, "cu_seqlens": graph_input(graph, "cu_seqlens",
                                                            ("batch_plus_1",)),
        "past_lens": graph_input(graph, "past_lens", ("batch",)),
        "commit_lens": graph_input(graph, "commit_lens", ("batch",))},
        [node.outputs[0], after], node.attrs)


def _decay(decay: gs.Tensor, heads: int) -> dict[str, gs.Tensor]:
    """Split logarithmic decays that are a value times a weight per head into these two."""
    node = producer(decay)
    for rate, rest in (node.inputs, node.inputs[::-1]) if node is not None and node.op == "Mul" \
            else ():
        if weight(rate) is not None and tuple(rate.shape) == (heads,) and \
                not isinstance(rest, gs.Constant):
            return {"decay": rest, "decay_rate": rate}
    return {}


def _name_packed(tensor: gs.Tensor) -> None:
    """Rename packed queries, keys and values.

    Ranks have a share of each of them, so the tensor is not comparable with the exported graph's.
    """
    while not tensor.name.endswith(".qkv"):
        tensor.name += ".qkv"
        node = producer(tensor)
        if not is_op(node, CONVOLUTION, CAUSAL_CONV1D):
            break
        tensor = node.inputs[0]
