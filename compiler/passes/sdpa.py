"""Fuse scaled dot-product attention, and prove its mask causal.

Given:   Softmax(Q·Kᵀ · scale (softcap) + bias + mask) · V, from eager or sdpa attention, or
         Attention(Q, K, V, bias + mask) of ONNX
Result:  Sdpa(Q, K, V, bias) {scale, window, chunk, softcap, causal, layer}; Q, K, V are [batch,
         heads, seq, head_dim]

The frontend emits Sdpa itself if a model allows it. Otherwise the mask is evaluated, see mask.py.
It must be causal, optionally with a sliding window or chunks. In a model whose outputs are pooled
it may also show all keys, optionally within a distance. Anything else is refused. Other addends of
the scores, such as ALiBi, are the bias, which the attention pass checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import LAYOUT, cone, data_tensors, token_feeds
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    is_op,
    producer,
    replace,
    scalar,
)
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.passes.mask import MaskProver, Reach


@dataclass(frozen=True)
class _Sdpa:
    query: gs.Tensor
    key: gs.Tensor
    value: gs.Tensor
    output: gs.Tensor
    key_is_transposed: bool
    scale: float
    softcap: float
    reach: Reach
    biases: tuple[_Bias, ...] = ()


@dataclass(frozen=True)
class _Bias:
    """A term that is added to the scores before they are scaled by `factor`."""

    tensor: gs.Tensor
    factor: float


def sdpa(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass, and number the attention layers in graph order."""
    data = data_tensors(graph)
    masks = MaskProver(data, settings)
    standard = Rule("attention-op", frozenset({"Attention"}),
                    lambda node, settings: _check_attention(node, masks),
                    _rewrite)
    softmax = Rule("attention-decomposed", frozenset({"Softmax"}),
                   lambda node, settings: _check_softmax(graph, node, data, masks),
                   _rewrite)
    apply_rules(graph, [standard, softmax], settings, report)
    found = [node for node in graph.nodes if is_op(node, SDPA)]
    layers = [node.attrs["layer"] for node in found if node.attrs["causal"]]
    if any(node.attrs["layer"] < 0 for node in found) or len({*layers}) < len(layers):
        for layer, node in enumerate(found):
            node.attrs["layer"] = layer
    else:  # a hybrid model: number only its attention layers
        number = {layer: index for index, layer in enumerate(sorted({*layers}))}
        for node in found:
            node.attrs["layer"] = number.get(node.attrs["layer"], node.attrs["layer"])


def _check_attention(node: gs.Node, masks: MaskProver) -> _Sdpa | NoMatch:
    query, key, value = node.inputs[:3]
    if query.shape is None or len(query.shape) != 4:
        return NoMatch("Attention on 3-D inputs", node)
    if len(node.inputs) > 4 and any(not tensor.is_empty() for tensor in node.inputs[4:]):
        return NoMatch("Attention with a built-in KV cache; export without a cache", node)
    if len(node.outputs) > 1 and any(t.outputs for t in node.outputs[1:]):
        return NoMatch("Attention whose second output is used", node)
    mask = node.inputs[3] if len(node.inputs) > 3 and not node.inputs[3].is_empty() else None
    causal = bool(node.attrs.get("is_causal", 0))
    reach = masks.unmasked(causal, node)
    if mask is not None:
        reach = masks.reach([mask], causal)
    if isinstance(reach, NoMatch):
        return reach
    head_dim = query.shape[-1]
    scale = float(node.attrs.get("scale", 0.0) or head_dim**-0.5)
    bias = None if mask is None else masks.bias(mask)
    softcap = float(node.attrs.get("softcap", 0.0))
    return _Sdpa(query, key, value, node.outputs[0], False, scale, softcap, reach,
                 () if bias is None else (_Bias(bias, 1.0),))


def _check_softmax(graph: gs.Graph, node: gs.Node, data: set[int], masks: MaskProver) -> \
        _Sdpa | NoMatch | None:
    """Match from the softmax up to Q·Kᵀ, and down to the product with V."""
    scores = node.inputs[0]
    if id(scores) not in data:
        return None
    rank = len(scores.shape or ())
    if node.attrs.get("axis", -1) not in (-1, rank - 1):
        return NoMatch("the softmax is not over the last axis", node)
    parts: list[gs.Tensor] = []
    factors: list[gs.Tensor] = []  # must be 1 for visible keys
    biases: list[_Bias] = []
    reshaped: list[gs.Node] = []
    scale, softcap = 1.0, 0.0
    while True:
        above = producer(scores)
        if above is None:
            return NoMatch("the softmax does not come from Q·Kᵀ", node)
        if above.op == "MatMul":
            break
        if above.op in ("Add", "Sub", "Mul", "Div", "Where"):
            operands = list(above.inputs)
            computed = [t for t in operands if id(t) in data]
            rest = [t for t in operands if id(t) not in data]
            if len(computed) != 1:
                return NoMatch("the scores are combined with other activations", above)
            number = scalar(rest[0]) if len(rest) == 1 else None
            if above.op == "Add" and _is_zero(rest[0]):
                pass  # the zero operand of torch.baddbmm
            elif above.op == "Add":
                parts.append(rest[0])
                bias = masks.bias(rest[0])
                if bias is not None and softcap:
                    return NoMatch("a bias is added to the scores before their soft-cap", above)
                biases += [_Bias(bias, scale)] if bias is not None else []
            elif above.op == "Where":
                parts.append(above.outputs[0])
            elif number is None and above.op == "Mul":
                factors.append(rest[0])
            elif number is None:
                return NoMatch("the scores are scaled by a value that is not constant", above)
            elif above.op == "Mul" and (tanh := producer(computed[0])) is not None \
                    and tanh.op == "Tanh":
                inner = producer(tanh.inputs[0])
                divisor = None if inner is None or len(inner.inputs) != 2 else \
                    scalar(inner.inputs[1])
                if inner is None or divisor is None or not np.isclose(
                        divisor if inner.op == "Div" else 1 / divisor, number):
                    return NoMatch("the tanh is not a soft-cap", above)
                if scale != 1.0 or softcap:
                    return NoMatch("the scores are scaled after their soft-cap", above)
                softcap, computed = number, [inner.inputs[0]]
            elif above.op == "Mul":
                scale *= number
            elif above.op == "Div" and operands[0] is computed[0]:
                scale /= number
            else:
                return NoMatch("this op on the scores is unsupported", above)
            scores = computed[0]
        elif above.op in ("Cast", "Identity") or _clamps_masked_scores(above):
            scores = above.inputs[0]
        elif above.op == "Reshape" and id(above.inputs[1]) not in data:
            reshaped.append(above)
            scores = above.inputs[0]
        else:
            return NoMatch("this op on the scores is unsupported", above)
    product, value = _weighted_sum(graph, node)
    if product is None:
        return NoMatch("the softmax is not multiplied by V", node)
    reach = masks.reach(parts, False, factors) if parts else masks.unmasked(False, node)
    if isinstance(reach, NoMatch):
        return reach
    query, key = above.inputs
    found = _Sdpa(query, key, value, product.outputs[0], True, scale, softcap, reach,
                  tuple(biases))
    if len(query.shape or ()) == 3:
        return _split_heads(graph, found, reshaped, data)
    return NoMatch("this op on the scores is unsupported", reshaped[0]) if reshaped else found


def _is_zero(tensor: gs.Tensor) -> bool:
    """Whether a tensor of any size is all zero."""
    above = producer(tensor)
    return scalar(tensor if above is None or above.op != "Expand" else above.inputs[0]) == 0


def _clamps_masked_scores(node: gs.Node) -> bool:
    """Whether a node only clamps masked scores to the lowest value of a dtype."""
    number = scalar(node.inputs[1]) if node.op == "Max" and len(node.inputs) == 2 else None
    return number is not None and number <= float(np.finfo(np.float16).min)


def _split_heads(graph: gs.Graph, found: _Sdpa, reshaped: Sequence[gs.Node], data: set[int]) -> \
        _Sdpa | NoMatch:
    """Convert attention on [batch * heads, seq, head_dim] to the tensors before the reshape.

    Values may have four dimensions already; then the output has too.
    """
    transpose = producer(found.key)
    if transpose is None or transpose.op != "Transpose":
        return NoMatch("the keys are not transposed", found.key)
    joined = [found.query, transpose.inputs[0]]
    users: list[gs.Node | None] = []
    if len(found.value.shape or ()) != 4:
        joined.append(found.value)
        users = consumers(graph, found.output)
        users = users if len(users) == 1 else [None]
    above = [producer(tensor) for tensor in joined]
    between = [*above, *users, *reshaped]
    for node in between:
        if node is None or node.op != "Reshape" or not _joins_heads(node, data):
            return NoMatch("heads and batch are not merged as [batch * heads, …]",
                           node or found.output)
    query, key, *values = (node.inputs[0] for node in above if node is not None)
    value, output = (values[0], users[0].outputs[0]) if values and users[0] is not None else \
        (found.value, found.output)
    return dataclasses.replace(found, query=query, key=key, value=value, output=output,
                               key_is_transposed=False)


def _joins_heads(node: gs.Node, data: set[int]) -> bool:
    """Whether a Reshape is between [batch, heads, m, n] and [batch * heads, m, n]."""
    shapes = [tensor.shape or () for tensor in (node.inputs[0], node.outputs[0])]
    four: Sequence[int | str] | None = next((shape for shape in shapes if len(shape) == 4), None)
    if four is None or {len(shape) for shape in shapes} != {3, 4} or not isinstance(four[1], int):
        return False
    batch, seq = 2, 3
    rows, columns = (dim if isinstance(dim, int) else seq for dim in four[2:])
    split, joined = (batch, four[1], rows, columns), (batch * four[1], rows, columns)
    given, expected = (split, joined) if len(shapes[0]) == 4 else (joined, split)
    piece = cone(node.outputs[0], data, LAYOUT, borders_at={id(node.inputs[0])})
    if isinstance(piece, NoMatch):
        return False
    feeds = {**token_feeds(batch, seq), node.inputs[0].name: np.zeros(given, np.float32)}
    return piece.run(feeds).shape == expected


def _weighted_sum(graph: gs.Graph, node: gs.Node) -> tuple[gs.Node | None, gs.Tensor | None]:
    """The MatMul with V after a softmax, past casts and guards against fully masked rows."""
    tensor = node.outputs[0]
    for _ in range(4):
        users = [user for user in consumers(graph, tensor) if user is not None
                 and user.op != "IsNaN"]
        if len(users) != 1:
            return None, None
        user = users[0]
        if user.op == "MatMul" and user.inputs[0] is tensor:
            return user, user.inputs[1]
        if user.op not in ("Where", "Cast", "Identity", "Dropout", "Reshape"):
            return None, None
        tensor = user.outputs[0]
    return None, None


def _rewrite(graph: gs.Graph, match: _Sdpa, settings: Settings) -> None:
    key = match.key
    if match.key_is_transposed:
        shape = None if key.shape is None else [*key.shape[:-2], key.shape[-1], key.shape[-2]]
        rank = len(key.shape) if key.shape is not None else 4
        straight = gs.Variable(f"{match.output.name}.key", dtype=key.dtype, shape=shape)
        graph.nodes.append(gs.Node(op="Transpose", name=straight.name, inputs=[key],
                                   outputs=[straight],
                                   attrs={"perm": [*range(rank - 2), rank - 1, rank - 2]}))
        key = straight
    replace(graph, SDPA, {"query": match.query, "key": key, "value": match.value,
                          "bias": _sum(graph, match)}, [match.output],
            {"scale": match.scale, "window": match.reach.window, "chunk": match.reach.chunk,
             "softcap": match.softcap, "causal": int(match.reach.causal), "layer": -1})


def _sum(graph: gs.Graph, match: _Sdpa) -> gs.Tensor | None:
    """The sum of the biases, each times its factor."""
    total: gs.Tensor | None = None
    for index, bias in enumerate(match.biases):
        name, term = f"{match.output.name}.bias.{index}", bias.tensor
        if bias.factor != 1.0:
            factor = gs.Constant(f"{name}.factor", np.array(bias.factor, np.float32))
            term = gs.Variable(f"{name}.scaled", np.float32)
            graph.nodes.append(gs.Node(op="Mul", name=term.name, inputs=[bias.tensor, factor],
                                       outputs=[term]))
        if total is not None:
            both = gs.Variable(f"{name}.sum", np.float32)
            graph.nodes.append(gs.Node(op="Add", name=both.name, inputs=[total, term],
                                       outputs=[both]))
            term = both
        total = term
    return total
