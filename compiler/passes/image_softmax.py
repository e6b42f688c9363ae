"""Attention of an image encoder that is decomposed because it has a mask of padding.

Given:   query, key, value [tiles, heads, patches, head_dim]; MatMul(query, Transpose(key)) → scale,
         mask → Softmax → MatMul(value)
Result:  Transpose, Reshape to rows [tiles · patches, heads · head_dim] → BidirectionalAttention
         (query, key, value, cu_seqlens) → Reshape, Transpose

The nodes between the products are run for images of several sizes. Every patch has to attend to all
patches of its tile, and the mask may not depend on values of inputs: the processor gives no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import ImageSample, product
from llmc.compiler.graph.names import PIXEL_VALUES
from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    Piece,
    close,
    cone,
    data_tensors,
    dependents,
    magnitudes,
)
from llmc.compiler.graph.rewrite import (
    CannotEvaluate,
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    consumers,
    producer,
    replace,
    reshaped,
)
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION

_LARGEST_SCALE = 1e4  # of scores; larger constants mask them


@dataclass(frozen=True)
class _Match:
    """Queries, keys and values [tiles, heads, patches, head_dim], and what is made of them.

    Args:
        mask: not of pixels, [tiles, 1, …, patches].
    """

    query: gs.Tensor
    key: gs.Tensor
    value: gs.Tensor
    product: gs.Node
    mask: gs.Tensor
    scale: float


def image_softmax(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data, known = data_tensors(graph), dict[object, float | None]()
    given = dependents(graph, map(id, graph.inputs))
    apply_rules(graph, [Rule("image-softmax", frozenset({"Softmax"}),
                             lambda node, settings: _check(graph, node, settings, data, given,
                                                           known),
                             _rewrite)], settings, report)


def _check(graph: gs.Graph, node: gs.Node, settings: Settings, data: set[int], given: set[int],
           known: dict[object, float | None]) -> _Match | NoMatch:
    weights = node.outputs[0]
    users = consumers(graph, weights)
    last = users[0] if len(users) == 1 else None
    if last is None or last.op != "MatMul" or last.inputs[0] is not weights:
        return NoMatch("its result is not multiplied by values", node)
    piece = cone(weights, data, ELEMENTWISE | {"Softmax"}, borders_at={
        id(tensor) for each in graph.nodes if each.op == "MatMul" for tensor in each.outputs})
    if isinstance(piece, NoMatch):
        return piece
    sources = [tensor for tensor in piece.inputs if id(tensor) in data
               and tensor.name != PIXEL_VALUES]
    first = producer(sources[0]) if len(sources) == 1 else None
    turned = producer(first.inputs[1]) if first is not None and first.op == "MatMul" else None
    if first is None or turned is None or turned.op != "Transpose" \
            or list(turned.attrs.get("perm", ())) != [0, 1, 3, 2]:
        return NoMatch("scores are not a product of queries and transposed keys", node)
    query, key, value = first.inputs[0], turned.inputs[0], last.inputs[1]
    shape = list(query.shape or ())
    if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int) \
            or any(list(tensor.shape or ()) != shape for tensor in (key, value)) \
            or not (isinstance(shape[0], int) or isinstance(shape[2], int)):
        return NoMatch(f"queries, keys and values are {shape}, "
                       f"{list(key.shape or ())} and {list(value.shape or ())}; expected "
                       f"[tiles, heads, patches, head_dim]", node)
    masks = _masks(piece, data)
    if any(id(mask) in given for mask in masks):
        return NoMatch("its mask depends on values of the processor", node)
    mask = next((mask for mask in masks if all(
        _is_mask_of(sample.shape(mask), sample.shape(query))
        for sample in settings.image_samples)), None)
    if mask is None or not settings.image_samples:
        return NoMatch("there is no mask with an axis of tiles and one of patches", node)
    place = piece.key, *(sample.shape(query) for sample in settings.image_samples)
    if place not in known:
        known[place] = _scale(piece, sources[0], query, settings.image_samples)
    scale = known[place]
    if scale is None:
        return NoMatch("patches do not attend to all patches of their tile", node)
    return _Match(query, key, value, last, mask, scale)


def _masks(piece: Piece, data: set[int]) -> list[gs.Tensor]:
    """Tensors that nodes on scores read beside these."""
    return [tensor for node in piece.nodes if id(node.outputs[0]) in data for tensor in node.inputs
            if isinstance(tensor, gs.Variable) and id(tensor) not in data]


def _is_mask_of(mask: tuple[int, ...] | None, query: tuple[int, ...] | None) -> bool:
    """Whether a shape is [tiles, 1, …, patches], that of queries [tiles, heads, patches, …]."""
    return mask is not None and query is not None and len(mask) == 4 \
        and (*mask[:2], mask[3]) == (query[0], 1, query[2])


def _scale(piece: Piece, scores: gs.Tensor, query: gs.Tensor,
           samples: tuple[ImageSample, ...]) -> float | None:
    """Determine the scale of a softmax of scaled scores; None if it is not that."""
    rng = np.random.default_rng(0)
    scales = [1.0, *(value for value in magnitudes(piece) if value < _LARGEST_SCALE)]
    for sample in samples:
        tiles, _, patches, _ = sample.shape(query) or (0,) * 4
        # One head: masks are the same for all.
        x = rng.standard_normal((tiles, 1, patches, patches)).astype(np.float32)
        try:
            actual = piece.run({**sample.arrays, scores.name: x})
        except CannotEvaluate:
            return None
        scales = [scale for scale in scales if close(actual, _softmax(scale * x))]
        if not scales:
            return None
    return scales[0]


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _rewrite(graph: gs.Graph, match: _Match, settings: Settings) -> None:
    result = match.product.outputs[0]
    match.product.outputs.clear()
    name, shape = result.name, match.query.shape
    tiles, heads, patches, dim = shape
    rows = [_as_rows(graph, tensor, f"{name}.{what}") for what, tensor in (
        ("query", match.query), ("key", match.key), ("value", match.value))]
    attended = gs.Variable(f"{name}.attended", result.dtype, rows[0].shape)
    replace(graph, ATTENTION, {
        "query": rows[0], "key": rows[1], "value": rows[2],
        "cu_seqlens": _starts(graph, match.mask, f"{name}.cu_seqlens")}, [attended],
        {"num_heads": heads, "num_kv_heads": heads, "head_dim": dim, "scale": match.scale})
    sizes = [tiles, patches, heads, dim]
    by_tile = reshaped(graph, attended, f"{name}.by_tile",
                       [size if isinstance(size, int) else -1 for size in sizes], sizes)
    graph.nodes.append(gs.Node(op="Transpose", name=name, attrs={"perm": [0, 2, 1, 3]},
                               inputs=[by_tile], outputs=[result]))


def _as_rows(graph: gs.Graph, tensor: gs.Tensor, name: str) -> gs.Variable:
    tiles, heads, patches, dim = tensor.shape
    by_patch = gs.Variable(f"{name}.by_patch", tensor.dtype, [tiles, patches, heads, dim])
    graph.nodes.append(gs.Node(op="Transpose", name=by_patch.name, attrs={"perm": [0, 2, 1, 3]},
                               inputs=[tensor], outputs=[by_patch]))
    return reshaped(graph, by_patch, f"{name}.rows", [-1, heads * dim],
                    [product([tiles, patches]), heads * dim])


def _starts(graph: gs.Graph, mask: gs.Tensor, name: str) -> gs.Variable:
    """The first row of each tile and the number of rows, int32 [tiles + 1]."""
    def computed(op: str, what: str, inputs: list[gs.Tensor], **attrs: int) -> gs.Variable:
        made = gs.Variable(f"{name}.{what}" if what else name)
        graph.nodes.append(gs.Node(op=op, name=made.name, attrs=attrs, inputs=inputs,
                                   outputs=[made]))
        return made

    zero, one = (gs.Constant(f"{name}.{what}", np.array(value))
                 for what, value in (("first", 0), ("more", 1)))
    tiles, patches = (computed("Squeeze", f"{what}.size", [
        computed("Shape", f"{what}.axis", [mask], start=axis, end=axis + 1)])
        for what, axis in (("tiles", 0), ("patches", 3)))
    end = computed("Mul", "end", [computed("Add", "count", [tiles, one]), patches])
    starts = computed("Cast", "", [computed("Range", "rows", [zero, end, patches])], to=6)
    count = mask.shape[0]
    starts.dtype = np.dtype(np.int32)
    starts.shape = [count + 1 if isinstance(count, int) else f"({count})+(1)"]
    return starts
