"""Attention of an image encoder that is decomposed because it has a mask of padding.

Given:   query, key, value [tiles, heads, patches, head_dim]; MatMul(query, Transpose(key)) → scale,
         mask → Softmax → MatMul(value)
Result:  Transpose, Reshape to rows [tiles · patches, heads · head_dim] → BidirectionalAttention
         (query, key, value, cu_seqlens) → Reshape, Transpose

The nodes between the products are run for images of several sizes. Every patch has to attend to all
patches of its tile. If the processor gives a mask, the last patches of a tile may be padding, to
which none attends. For targets with programs, padding is a segment after that of its tile then, and
its rows are arbitrary: an output of the graph, `PADDING_ROWS`, tells which. The program is refused
if rows of the prompt depend on these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import ImageSample, product
from llmc.compiler.graph.names import PADDING_ROWS, PIXEL_VALUES
from llmc.compiler.graph.probe import (
    ELEMENTWISE,
    Piece,
    close,
    cone,
    data_tensors,
    dependents,
    evaluated,
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
        padding: values of the mask, bool, for patches of padding; None: none is.
    """

    query: gs.Tensor
    key: gs.Tensor
    value: gs.Tensor
    product: gs.Node
    mask: gs.Tensor
    scale: float
    padding: bool | None = None


@dataclass(frozen=True)
class _Padded:
    """What a softmax with a mask of padding computes.

    Args:
        mask: number of the mask.
        padding: its values for patches of padding.
    """

    scale: float
    mask: int
    padding: bool


def image_softmax(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data, known = data_tensors(graph), dict[object, float | _Padded | None]()
    given = dependents(graph, map(id, graph.inputs))
    apply_rules(graph, [Rule("image-softmax", frozenset({"Softmax"}),
                             lambda node, settings: _check(graph, node, settings, data, given,
                                                           known),
                             _rewrite)], settings, report)


def _check(graph: gs.Graph, node: gs.Node, settings: Settings, data: set[int], given: set[int],
           known: dict[object, float | _Padded | None]) -> _Match | NoMatch:
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
        if not settings.target.runs_program:
            return NoMatch("its mask depends on values of the processor", node)
        place = "padded", piece.key, *(sample.shape(query) for sample in settings.image_samples)
        if place not in known:
            known[place] = _padded(piece, sources[0], query, masks, settings.image_samples)
        padded = known[place]
        if not isinstance(padded, _Padded):
            return NoMatch("its mask does not hide the last patches of each tile alone", node)
        return _Match(query, key, value, last, masks[padded.mask], padded.scale, padded.padding)
    mask = next((mask for mask in masks if all(
        _is_mask_of(sample.shape(mask), sample.shape(query))
        for sample in settings.image_samples)), None)
    if mask is None or not settings.image_samples:
        return NoMatch("there is no mask with an axis of tiles and one of patches", node)
    place = piece.key, *(sample.shape(query) for sample in settings.image_samples)
    if place not in known:
        known[place] = _scale(piece, sources[0], query, settings.image_samples)
    scale = known[place]
    if not isinstance(scale, float):
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


def _padded(piece: Piece, scores: gs.Tensor, query: gs.Tensor, masks: Sequence[gs.Tensor],
            samples: tuple[ImageSample, ...]) -> _Padded | None:
    """Determine the mask of a softmax of scaled scores; None if it is not one of padding."""
    scales = [1.0, *(value for value in magnitudes(piece) if value < _LARGEST_SCALE)]
    for index, mask in enumerate(masks):
        try:
            values = [evaluated(mask, sample.arrays) for sample in samples]
        except CannotEvaluate:
            continue
        for padding in (True, False):
            if all(_hides_last(own, own == padding, sample.shape(query))
                   for own, sample in zip(values, samples, strict=True)):
                scale = _masked_scale(piece, scores, query, scales, [
                    (sample, own != padding) for sample, own in zip(samples, values, strict=True)])
                if scale is not None:
                    return _Padded(scale, index, padding)
    return None


def _hides_last(mask: np.ndarray, hidden: np.ndarray, query: tuple[int, ...] | None) -> bool:
    """Whether a mask hides the same last patches of a tile from all patches, but not all."""
    if query is None or mask.dtype != np.bool_ or mask.ndim != 4 or mask.shape[2] == 0 \
            or (*mask.shape[:2], mask.shape[3]) != (query[0], 1, query[2]):
        return False
    counts = (~hidden[:, :, :1]).sum(-1, keepdims=True)
    return bool((counts > 0).all()) and np.array_equal(
        hidden, np.broadcast_to(np.arange(query[2]) >= counts, hidden.shape))


def _masked_scale(piece: Piece, scores: gs.Tensor, query: gs.Tensor, scales: Sequence[float],
                  seen: Sequence[tuple[ImageSample, np.ndarray]]) -> float | None:
    """Determine the scale of a softmax of scaled scores of visible patches; None: it is not that.
    """
    rng = np.random.default_rng(0)
    left = [*scales]
    for sample, visible in seen:
        tiles, _, patches, _ = sample.shape(query) or (0,) * 4
        x = rng.standard_normal((tiles, 1, patches, patches)).astype(np.float32)
        try:
            actual = piece.run({**sample.arrays, scores.name: x})
        except CannotEvaluate:
            return None
        left = [scale for scale in left if close(actual, _softmax(np.where(
            visible, scale * x, -np.inf)))]
    return left[0] if left and seen else None


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
        "cu_seqlens": _starts(graph, match.mask, f"{name}.cu_seqlens") if match.padding is None
        else _padded_starts(graph, match.mask, match.padding, f"{name}.cu_seqlens")}, [attended],
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


def _nodes(graph: gs.Graph, name: str) -> Callable[..., gs.Variable]:
    """A function that adds a node: op, name of the result ("": `name`), inputs and attributes."""
    def computed(op: str, what: str, inputs: Sequence[gs.Tensor | np.ndarray | int],
                 **attrs: int) -> gs.Variable:
        made = gs.Variable(f"{name}.{what}" if what else name)
        given = [own if isinstance(own, gs.Tensor) else
                 gs.Constant(f"{made.name}.{index}", np.array(own)) for index, own in
                 enumerate(inputs)]
        graph.nodes.append(gs.Node(op=op, name=made.name, attrs=attrs, inputs=given,
                                   outputs=[made]))
        return made

    return computed


def _starts(graph: gs.Graph, mask: gs.Tensor, name: str) -> gs.Variable:
    """The first row of each tile and the number of rows, int32 [tiles + 1]."""
    computed = _nodes(graph, name)
    tiles, patches = (computed("Squeeze", f"{what}.size", [
        computed("Shape", f"{what}.axis", [mask], start=axis, end=axis + 1)])
        for what, axis in (("tiles", 0), ("patches", 3)))
    end = computed("Mul", "end", [computed("Add", "count", [tiles, 1]), patches])
    starts = computed("Cast", "", [computed("Range", "rows", [0, end, patches])], to=6)
    count = mask.shape[0]
    starts.dtype = np.dtype(np.int32)
    starts.shape = [count + 1 if isinstance(count, int) else f"({count})+(1)"]
    return starts


def _padded_starts(graph: gs.Graph, mask: gs.Tensor, padding: bool, name: str) -> gs.Variable:
    """First rows of each tile and of its padding, and the number of rows, int32 [2 · tiles + 1].

    Adds the output `PADDING_ROWS`.
    """
    computed = _nodes(graph, name)
    row = computed("Gather", "row", [mask, 0], axis=2)  # [tiles, 1, patches]
    hidden = row if padding else computed("Not", "hidden", [row])
    visible = computed("Cast", "visible", [computed("Not", "shown", [hidden])], to=7)
    lengths = computed("ReduceSum", "lengths", [visible, [2]], keepdims=0)  # [tiles, 1]
    tiles, patches = (computed("Squeeze", f"{what}.size", [
        computed("Shape", f"{what}.axis", [mask], start=axis, end=axis + 1)])
        for what, axis in (("tiles", 0), ("patches", 3)))
    end = computed("Mul", "end", [tiles, patches])
    firsts = computed("Unsqueeze", "firsts", [
        computed("Range", "rows", [0, end, patches]), [1]])  # [tiles, 1]
    pairs = computed("Concat", "pairs", [
        firsts, computed("Add", "ends", [firsts, lengths])], axis=1)
    starts = computed("Cast", "", [computed("Concat", "starts", [
        computed("Reshape", "flat", [pairs, [-1]]),
        computed("Unsqueeze", "last", [end, [0]])], axis=0)], to=6)
    count = mask.shape[0]
    starts.dtype = np.dtype(np.int32)
    starts.shape = [2 * count + 1 if isinstance(count, int) else f"({count})*(2)+(1)"]
    rows = gs.Variable(f"{PADDING_ROWS}{len(graph.outputs)}", bool,
                       [product([mask.shape[0], mask.shape[3]])])
    graph.nodes.append(gs.Node(op="Reshape", name=rows.name, outputs=[rows], inputs=[
        hidden, gs.Constant(f"{rows.name}.shape", np.array([-1]))]))
    graph.outputs.append(rows)
    return starts
