"""Find scaled dot-product attention and prove its mask causal.

Given:   Softmax(Q·Kᵀ · scale (softcap) + mask) · V, from eager or sdpa attention, or
         Attention(Q, K, V, mask) of ONNX
Result:  Sdpa(Q, K, V) {scale, window, softcap, causal, layer}; Q, K, V are [batch, heads, seq,
         head_dim]

The frontend emits Sdpa itself where a model lets it. Elsewhere the mask is evaluated at several
lengths and must be causal, perhaps with a sliding window; anything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE, LAYOUT, Piece, cone, data_tensors, token_feeds
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    constant,
    consumers,
    is_op,
    producer,
    replace,
    scalar,
)
from llmc.compiler.graph.sdpa import SDPA

_MASK_OPS = ELEMENTWISE | LAYOUT | frozenset({
    "Range", "ConstantOfShape", "Trilu", "CumSum", "GatherND", "ScatterND", "Shape", "Tile",
    "ReduceAll", "ReduceMax", "ReduceMin", "ReduceSum", "Size", "Mod", "Floor", "Ceil", "Pad",
    "GatherElements", "ScatterElements", "OneHot", "EyeLike", "NonZero", "Xor", "BitwiseAnd",
})


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
    """Run the pass, and number the layers of what it found in graph order."""
    data = data_tensors(graph)
    masks: dict[bytes, int | NoMatch] = {}
    standard = Rule("attention-op", frozenset({"Attention"}),
                    lambda node, settings: _check_attention(graph, node, data, masks, settings),
                    _rewrite)
    softmax = Rule("attention-decomposed", frozenset({"Softmax"}),
                   lambda node, settings: _check_softmax(graph, node, data, masks, settings),
                   _rewrite)
    apply_rules(graph, [standard, softmax], settings, report)
    found = [node for node in graph.nodes if is_op(node, SDPA)]
    if any(node.attrs["layer"] < 0 for node in found):
        for layer, node in enumerate(found):
            node.attrs["layer"] = layer


def _check_attention(graph: gs.Graph, node: gs.Node, data: set[int],
                     masks: dict[bytes, int | NoMatch], settings: Settings) -> _Sdpa | NoMatch:
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
        window = _prove_causal([mask], data, masks, settings, causal)
    if isinstance(window, NoMatch):
        return window
    head_dim = query.shape[-1]
    scale = float(node.attrs.get("scale", 0.0) or head_dim**-0.5)
    return _Sdpa(query, key, value, node.outputs[0], False, scale,
                 float(node.attrs.get("softcap", 0.0)), window)


def _check_softmax(graph: gs.Graph, node: gs.Node, data: set[int],
                   masks: dict[bytes, int | NoMatch], settings: Settings) -> _Sdpa | NoMatch | None:
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
            elif above.op == "Mul" and (producer(computed[0]) or above).op == "Tanh":
                inner = producer(producer(computed[0]).inputs[0])
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
    window = _prove_causal(parts, data, masks, settings, False)
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


def _prove_causal(parts: list[gs.Tensor], data: set[int], known: dict[bytes, int | NoMatch],
                  settings: Settings, causal: bool) -> int | NoMatch:
    """The sliding window (0 for none) if the parts together mask causally, by evaluating them."""
    pieces: list[Piece] = []
    for part in parts:
        piece = _mask_piece(part, data)
        if isinstance(piece, NoMatch):
            return piece
        pieces.append(piece)
    key = b"".join(piece.key for piece in pieces) + bytes([causal])
    if key not in known:
        known[key] = _evaluate_mask(pieces, settings, causal)
    return known[key]


def _mask_piece(part: gs.Tensor, data: set[int]) -> Piece | NoMatch:
    """What computes one part of the mask. A Where is run with zeros for scores."""
    if id(part) not in data:
        return cone(part, data, _MASK_OPS)
    where = producer(part)
    scores = [t for t in where.inputs if id(t) in data]
    conditions = [cone(t, data, _MASK_OPS) for t in where.inputs if id(t) not in data]
    bad = next((c for c in conditions if isinstance(c, NoMatch)), None)
    if bad is not None:
        return bad
    nodes = {id(n): n for c in conditions for n in c.nodes}
    inputs = {id(t): t for c in conditions for t in c.inputs}
    return Piece((*nodes.values(), where), (*inputs.values(), *scores), (part,))


def _evaluate_mask(pieces: list[Piece], settings: Settings, causal: bool) -> int | NoMatch:
    numbers = {int(v) for piece in pieces for node in piece.nodes for t in node.inputs
               if (a := constant(t)) is not None and a.size == 1 and a.dtype.kind in "iuf"
               and 1 < (v := abs(float(a.reshape(-1)[0]))) < settings.max_seq_len}
    lengths = sorted({1, 2, 7, min(64, settings.max_seq_len),
                      *(n + 2 for n in numbers if n + 2 <= min(settings.max_seq_len, 8192))})
    windows: set[int] = set()
    for length in lengths:
        allowed = np.ones((length, length), bool)
        if causal:
            allowed = np.tril(allowed)
        for piece in pieces:
            feeds = token_feeds(1, length)
            for tensor in piece.inputs:
                if tensor.name not in feeds:
                    feeds[tensor.name] = np.zeros((1, 1, length, length), np.float32)
            try:
                mask = piece.run(feeds)
            except RuntimeError as error:
                return NoMatch(f"the mask cannot be evaluated ({str(error)[:120]})", piece.output)
            try:
                mask = np.broadcast_to(mask, (1, mask.shape[1] if mask.ndim == 4 else 1,
                                              length, length))[0]
            except ValueError:
                return NoMatch(f"the mask has shape {list(mask.shape)}, not [1, 1, {length}, "
                               f"{length}]", piece.output)
            visible = mask if mask.dtype == bool else mask > -1e4
            if mask.dtype != bool and np.abs(mask[visible]).max(initial=0) > 0:
                return NoMatch("the mask adds a bias to the scores (ALiBi, relative positions), "
                               "which llmc::CausalAttention does not have", piece.output)
            if (visible != visible[:1]).any():
                return NoMatch("the mask differs between heads", piece.output)
            allowed &= visible[0]
        distance = np.subtract.outer(np.arange(length), np.arange(length))
        span = int(distance[allowed].max(initial=-1)) + 1
        if span < 1 or not np.array_equal(allowed, (distance >= 0) & (distance < span)):
            return NoMatch(f"the mask is not causal at length {length}", pieces[0].output)
        windows.add(0 if span == length else span)
    windows.discard(0)
    if len(windows) > 1:
        return NoMatch(f"the mask's window changes with the length: {sorted(windows)}",
                       pieces[0].output)
    return windows.pop() if windows else 0


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
