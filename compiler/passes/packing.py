"""Convert [batch, seq] to packed tokens, and compute logits of selected tokens only.

Given:   [batch, seq, hidden] activations, logits of every token
Result:  [num_tokens, hidden] activations, the new tokens of all sequences concatenated; logits of
         the tokens in `logits_indices`; the vocabulary padded

This requires all ops except attention and recurrence to be row-wise; an error names any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import (
    BIDIRECTIONAL_RANGES,
    EMBED_IDS,
    EMBEDS,
    HIDDEN,
    INPUT_FEATURES,
    POOLED,
    ROTARY_POSITIONS,
)
from llmc.compiler.graph.names import ENCODER_OUTPUT, POSITION_IDS
from llmc.compiler.graph.notes import VocabularySize
from llmc.compiler.graph.probe import ELEMENTWISE, data_tensors
from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    constant,
    describe,
    is_llmc,
    is_op,
    knows_sequences,
    op_of,
    operands,
    producer,
    row_weights,
    shard_of,
    state_of,
    tidy,
    values_of,
)
from llmc.compiler.graph.sdpa import SDPA
from llmc.errors import LlmcError
from llmc.plugins.add_embeds.op import OP as ADD_EMBEDS
from llmc.plugins.norm_gemm.op import OP as NORM_GEMM
from llmc.plugins.roles import ByVocabulary

_LAST_AXIS = frozenset({"Gather", "Concat", "Slice", "Split", "Softmax"})


def pack(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Check that every node is row-wise, then remove the batch axis.

    Raises:
        LlmcError: a node is not row-wise, or attention was not fused; with the reasons.
    """
    _check_understood(graph)
    for node in graph.nodes:
        _check_row_wise(node)
        if node.op in _LAST_AXIS:
            _from_the_end(node)
        kept = state_of(node)
        for tensor in node.outputs:
            if tensor.shape is not None and len(tensor.shape) == 3 and not (
                    kept and tensor is kept[1]):
                tensor.shape = ("num_tokens", tensor.shape[-1])
        report.count("packed")
    used = {id(tensor) for node in graph.nodes for tensor in node.inputs}
    graph.inputs = [tensor for tensor in graph.inputs if id(tensor) in used]
    for tensor in graph.inputs:
        if tensor.name in (*POSITION_IDS, "input_ids", "token_type_ids", EMBED_IDS):
            tensor.shape = ("num_tokens",)
        elif tensor.name in (ENCODER_OUTPUT, HIDDEN, INPUT_FEATURES, ROTARY_POSITIONS,
                             BIDIRECTIONAL_RANGES):
            tensor.shape = ("num_tokens", tensor.shape[-1])


def _check_understood(graph: gs.Graph) -> None:
    """Raise on ops that no pass has replaced.

    Of several, it names one that reads activations before one that computes shapes.
    """
    unsupported = [node for node in graph.nodes if node.op not in _LAST_AXIS | ELEMENTWISE
                   and (not is_llmc(node) or is_op(node, SDPA))]
    if not unsupported:
        return
    data = data_tensors(graph)
    node = next((node for node in unsupported if node.op != "Shape"
                 and any(id(tensor) in data for tensor in node.inputs)), unsupported[0])
    raise LlmcError(
        f"{describe(node)} is unsupported: after all passes only llmc ops and row-wise ops may "
        f"be left; `llmc compile --verbose` prints what each pass refused, and why")


def _check_row_wise(node: gs.Node) -> None:
    if node.op in ELEMENTWISE:
        for tensor in node.inputs:
            values = constant(tensor)
            if values is not None and values.ndim and values.size > values.shape[-1]:
                raise LlmcError(f"{describe(node)} combines activations with a constant of shape "
                                f"{list(values.shape)}, so it is not row-wise; llmc cannot pack it")


def _from_the_end(node: gs.Node) -> None:
    """Write the last axis as -1, since the rank changes."""
    if node.op == "Slice":
        axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
        if axes is None or axes.size != 1 or int(axes.reshape(-1)[0]) not in (2, -1):
            raise LlmcError(f"{describe(node)} slices along tokens; llmc cannot pack it")
        node.inputs[3] = gs.Constant(f"{node.outputs[0].name}.axes", np.array([-1], np.int64))
        return
    if node.attrs.get("axis", 0) not in (2, -1):
        raise LlmcError(f"{describe(node)} works along tokens; llmc cannot pack it")
    node.attrs["axis"] = -1


def select_tokens(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Select the rows whose logits are requested, after the last op that mixes tokens.

    Rows of images that are added later, too, are added to all tokens.

    Given:   attention or recurrence → row-wise nodes → logits
    Result:  attention or recurrence → Gather(rows of logits_indices) → row-wise nodes → logits

    Nodes that another output needs, such as the features for a draft model, keep all rows.
    """
    if not has_logits(graph):
        return
    kept = _needed(graph.outputs[1:])
    last = [node for node in graph.nodes
            if knows_sequences(node) or is_op(node, ADD_EMBEDS)][-1]  # it has an id of each token
    after: set[int] = {id(last.outputs[0])}
    nodes = []
    for node in graph.nodes:
        if node is not last and any(id(tensor) in after for tensor in node.inputs):
            if id(node) not in kept:
                nodes.append(node)
            after.update(id(tensor) for tensor in node.outputs)
    inside = {id(tensor) for node in nodes for tensor in node.outputs}
    indices = gs.Variable("logits_indices", np.int64, ("num_logits",))
    graph.inputs.append(indices)
    selected: dict[int, gs.Variable] = {}
    for node in nodes:
        for index, tensor in enumerate(node.inputs):
            if tensor.is_empty() or isinstance(tensor, gs.Constant) or id(tensor) in inside \
                    or tensor.name == EMBEDS:
                continue
            if id(tensor) not in selected:
                shape = None if tensor.shape is None else ("num_logits", *tensor.shape[1:])
                rows = gs.Variable(f"{tensor.name}.selected", tensor.dtype, shape)
                graph.nodes.append(gs.Node(op="Gather", name=rows.name, attrs={"axis": 0},
                                           inputs=[tensor, indices], outputs=[rows]))
                selected[id(tensor)] = rows
            node.inputs[index] = selected[id(tensor)]
        for tensor in node.outputs:
            if tensor.shape is not None:
                tensor.shape = ("num_logits", *tensor.shape[1:])
    report.count("select-tokens", len(selected))
    tidy(graph)


def _needed(tensors: Sequence[gs.Tensor]) -> set[int]:
    """Ids of the nodes that compute tensors."""
    needed: set[int] = set()
    waiting = [node for tensor in tensors for node in tensor.inputs]
    while waiting:
        node = waiting.pop()
        if id(node) not in needed:
            needed.add(id(node))
            waiting += [above for tensor in node.inputs for above in tensor.inputs]
    return needed


def has_logits(graph: gs.Graph) -> bool:
    """Whether a model's graph ends in logits of tokens instead of pooled rows."""
    return bool(graph.outputs[0].name != POOLED)


def head_weight(graph: gs.Graph) -> gs.Constant:
    """The LM head's matrix.

    Raises:
        LlmcError: see `lm_head`.
    """
    head = lm_head(graph)
    return operands(head)["weight"] if is_op(head, NORM_GEMM) \
        else next(iter(row_weights(head).values()))


def lm_head(graph: gs.Graph) -> gs.Node:
    """The linear layer that computes the logits, possibly fused with the norm before it.

    It is found from the output, past row-wise nodes and ops with one input, such as AllGather.

    Raises:
        LlmcError: the logits do not come from a linear layer.
    """
    tensor = graph.outputs[0]
    while True:
        node = producer(tensor)
        if node is not None and (row_weights(node) or is_op(node, NORM_GEMM)):
            return node
        computed = [] if node is None else [t for t in node.inputs
                                            if not isinstance(t, gs.Constant)]
        op = op_of(node)
        if node is None or (op is not None and len(op.inputs) > 1) or len(computed) != 1:
            raise LlmcError(f"the logits do not come from a linear layer but from "
                            f"{describe(node) if node else describe(tensor)}")
        tensor = computed[0]


def token_table(graph: gs.Graph) -> gs.Constant:
    """The token embedding table, [vocabulary, hidden size]."""
    return next(operands(node)[way.table] for node in graph.nodes
                if (way := shard_of(node, ByVocabulary)) is not None
                and operands(node)[way.ids].name == "input_ids")


def pad_vocabulary(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Pad the rows of the LM head, and of an embedding tied to it, with zeros.

    Given:   logits [num_logits, vocab_size]
    Result:  logits [num_logits, padded_vocab_size]; the runtime removes the padding
    """
    if not has_logits(graph):
        return
    head = lm_head(graph)
    weights = list(row_weights(head).values())
    rows = values_of(weights[0]).shape[0]
    report.note(VocabularySize(rows))
    padded = -(-rows // settings.vocab_multiple) * settings.vocab_multiple
    if padded == rows:
        return
    for tensor in weights:  # a tied embedding reads the same constant
        tensor._values = values_of(tensor).pad_rows(padded)
    report.count("padded", padded - rows)
    padding = list(head.outputs)  # and elementwise results of these
    while padding:
        tensor = padding.pop()
        if tensor.shape is not None:
            tensor.shape = (*tensor.shape[:-1], padded)
        padding.extend(result for node in tensor.outputs for result in node.outputs)
