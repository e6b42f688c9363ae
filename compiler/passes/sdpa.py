"""Find scaled dot-product attention and prove its mask causal.

Given:   Softmax(Q·Kᵀ · scale (softcap) + mask) · V, from eager or sdpa attention, or
         Attention(Q, K, V, mask) of ONNX
Result:  Sdpa(Q, K, V) {scale, window, softcap, causal, layer}; Q, K, V are [batch, heads, seq,
         head_dim]

The frontend emits Sdpa itself where a model lets it. Elsewhere the mask is evaluated, see mask.py,
and must be causal, perhaps with a sliding window; anything else is refused.
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
    consumers,
    is_op,
    producer,
    replace,
    scalar,
)
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.passes.mask import MaskProver


@dataclass(frozen=True)
class _Sdpa:
    query: gs.Tensor
    key: gs.Tensor
    value: gs.Tensor
    output: gs.Tensor
    key_is_transposed: bool
    scale: float
    softcap: float
    window: int


def sdpa(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass, and number the layers that attend, in graph order."""
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
    else:  # those of a hybrid that attend
        number = {layer: index for index, layer in enumerate(sorted({*layers}))}
        for node in found:
            node.attrs["layer"] = number.get(node.attrs["layer"], node.attrs["layer"])


def _check_attention(node: gs.Node, masks: MaskProver) -> _Sdpa | NoMatch:
    query, key, value = node.inputs[:3]
    if query.shape is None or len(query.shape) != 4:
        return NoMatch("Attention on 3-D inputs", node)
    if len(node.inputs) > 4 and any(not tensor.is_empty() for tensor in node.inputs[4:]):
        return NoMatch("Attention with a KV cache of its own; export without a cache", node)
    if len(node.outputs) > 1 and any(t.outputs for t in node.outputs[1:]):
        return NoMatch("Attention whose second output is used", node)
    mask = node.inputs[3] if len(node.inputs) > 3 and not node.inputs[3].is_empty() else None
    causal = bool(node.attrs.get("is_causal", 0))
    if mask is None and not causal:
        return NoMatch("Attention without a mask is not causal", node)
    window: int | NoMatch = 0
    if mask is not None:
        window = masks.window([mask], causal)
    if isinstance(window, NoMatch):
        return window
    head_dim = query.shape[-1]
    scale = float(node.attrs.get("scale", 0.0) or head_dim**-0.5)
    return _Sdpa(query, key, value, node.outputs[0], False, scale,
                 float(node.attrs.get("softcap", 0.0)), window)


def _check_softmax(graph: gs.Graph, node: gs.Node, data: set[int], masks: MaskProver) -> \
        _Sdpa | NoMatch | None:
    """Walk up from the softmax to Q·Kᵀ, and down to the product with V."""
    scores = node.inputs[0]
    if id(scores) not in data:
        return None
    rank = len(scores.shape or ())
    if node.attrs.get("axis", -1) not in (-1, rank - 1):
        return NoMatch("a softmax that is not over the last axis", node)
    parts: list[gs.Tensor] = []
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
                return NoMatch("the scores are combined with other data", above)
            number = scalar(rest[0]) if len(rest) == 1 else None
            if above.op == "Add":
                parts.append(rest[0])
            elif above.op == "Where":
                parts.append(above.outputs[0])
            elif number is None:
                return NoMatch("the scores are scaled by something that is not a number", above)
            elif above.op == "Mul" and (tanh := producer(computed[0])) is not None \
                    and tanh.op == "Tanh":
                inner = producer(tanh.inputs[0])
                divisor = None if inner is None or len(inner.inputs) != 2 else \
                    scalar(inner.inputs[1])
                if inner is None or divisor is None or not np.isclose(
                        divisor if inner.op == "Div" else 1 / divisor, number):
                    return NoMatch("a tanh that is not a soft-cap", above)
                if scale != 1.0 or softcap:
                    return NoMatch("scores are scaled after their soft-cap", above)
                softcap, computed = number, [inner.inputs[0]]
            elif above.op == "Mul":
                scale *= number
            elif above.op == "Div" and operands[0] is computed[0]:
                scale /= number
            else:
                return NoMatch("this op on the scores is not known", above)
            scores = computed[0]
        elif above.op in ("Cast", "Identity"):
            scores = above.inputs[0]
        else:
            return NoMatch("this op on the scores is not known", above)
    product, value = _weighted_sum(graph, node)
    if product is None:
        return NoMatch("the softmax is not multiplied with V", node)
    if not parts:
        return NoMatch("attention without a mask is not causal", node)
    window = masks.window(parts, False)
    if isinstance(window, NoMatch):
        return window
    query, key = above.inputs
    return _Sdpa(query, key, value, product.outputs[0], True, scale, softcap, window)


def _weighted_sum(graph: gs.Graph, node: gs.Node) -> tuple[gs.Node | None, gs.Tensor | None]:
    """The MatMul with V below a softmax, past casts and guards against rows that see nothing."""
    tensor = node.outputs[0]
    for _ in range(4):
        users = [user for user in consumers(graph, tensor) if user is not None
                 and user.op != "IsNaN"]
        if len(users) != 1:
            return None, None
        user = users[0]
        if user.op == "MatMul" and user.inputs[0] is tensor:
            return user, user.inputs[1]
        if user.op not in ("Where", "Cast", "Identity", "Dropout"):
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
    replace(graph, SDPA, {"query": match.query, "key": key, "value": match.value}, [match.output],
            {"scale": match.scale, "window": match.window, "softcap": match.softcap, "causal": 1,
             "layer": -1})
