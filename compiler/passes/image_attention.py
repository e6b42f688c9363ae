"""Attention of an image encoder to rows of linear layers, normalized and rotated by the op.

Given:   x → GEMM → Reshape, Transpose, Slice, RMSNorm of each head, rotary embedding, Transpose,
         Reshape → query, key, value → BidirectionalAttention
Result:  x → GEMM → query, …; BidirectionalAttention(query, key, value, cu_seqlens, cos, sin,
         q_norm, k_norm) with rotary_by_row, cos and sin [num_patches, rotary_dim / 2]
         If heads of values have a norm, it is a GroupRMSNorm before attention.

The nodes before attention are run on numbered columns, without norms. A patch at position 0 on all
axes, or a class token, is not rotated, so its result shows the columns of each head. Cosines and
sines are tensors that the graph computes from positions, or constants with the rows of one tile;
they must rotate all patches of images of several sizes in the same way as the nodes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import ImageSample
from llmc.compiler.graph.names import PIXEL_VALUES
from llmc.compiler.graph.probe import ELEMENTWISE, ROTARY, Piece, close, data_tensors
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    fields_of,
    is_op,
    op_of,
    operands,
    producer,
    replace,
    row_weights,
    scalar,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.image_rows import between
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION
from llmc.plugins.group_rms_norm.op import OP as GROUP_RMS_NORM
from llmc.plugins.rms_norm.op import OP as RMS_NORM

_MAX_COLUMNS = 1 << 20  # numbers that float32 distinguishes from their neighbors after a rotation
_TOLERANCE = 1e-5


# Of a value: number of the node, and of its output; -1 is the first input, -2 the second.
_Place = tuple[int, int]
_Kind = tuple[int, int]  # of a table: its width, and the distance of successive pairs
# Which elements of a head are pairs: i and i + dim / 2; neighbors; or those of the first type in
# each half of the head, which is of one axis. Heads of the last are put in the order of the first.
_Layout = Literal["halves", "neighbors", "axes"]
_LAYOUTS: tuple[_Layout, ...] = ("halves", "neighbors", "axes")


@dataclass(frozen=True)
class _Tables:
    """Cosines and sines, as columns of tensors with a row for each patch, or for each of a tile.

    Args:
        cos, sin: the tensors.
        width: columns of each.
        step: distance of the columns of successive pairs.
        layout: of the pairs in a head.
    """

    cos: gs.Tensor
    sin: gs.Tensor
    width: int
    step: int
    layout: _Layout


@dataclass(frozen=True)
class _Source:
    """Columns of the rows that an input of attention is computed from.

    Args:
        norm: RMSNorm of each head, before the rotary embedding.
    """

    rows: gs.Tensor
    columns: np.ndarray
    tables: _Tables | None = None
    norm: gs.Node | None = None


@dataclass(frozen=True)
class _Match:
    node: gs.Node
    sources: Mapping[str, _Source]  # by input


def image_attention(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    known, data = _Known(), data_tensors(graph)
    tables: dict[tuple[int, int, int], gs.Variable] = {}
    rule = Rule("image-attention", frozenset({ATTENTION.name}),
                lambda node, settings: _check(node, settings, data, known),
                lambda graph, match, settings: _rewrite(graph, match, tables))
    apply_rules(graph, [rule], settings, report)


def _check(node: gs.Node, settings: Settings, data: set[int], known: _Known) -> \
        _Match | NoMatch | None:
    given = operands(node)
    if "cos" in given or "q_norm" in given:
        return None
    dim, sources = int(fields_of(node)["head_dim"]), dict[str, _Source]()
    for name in ("query", "key", "value"):
        source = _source(given[name], dim, settings, data, known)
        if isinstance(source, NoMatch):
            return source
        sources[name] = source
    if all(source.rows is given[name] for name, source in sources.items()):
        return None  # nothing to do
    query, key, value = (sources[name] for name in ("query", "key", "value"))
    if query.tables != key.tables or value.tables is not None:
        return NoMatch("queries and keys are not rotated alike, or values are", node)
    if len({_epsilon(source) for source in (query, key)}) > 1:
        return NoMatch("queries and keys are not normalized alike", node)
    return _Match(node, sources)


def _epsilon(source: _Source) -> float | None:
    """That of its norm; None: it has none."""
    return None if source.norm is None else float(fields_of(source.norm)["epsilon"])


@dataclass(frozen=True)
class _Found:
    """The result for a subgraph: columns, and where its nodes compute cosines and sines."""

    columns: np.ndarray
    tables: tuple[_Place, _Place, int, int, _Layout] | None


@dataclass(frozen=True)
class _Known:
    """What layers share.

    Args:
        found: results for subgraphs, which are run once, and sizes of heads.
        constants: by value.
    """

    found: dict[tuple[bytes, int], _Found | NoMatch] = field(default_factory=dict)
    constants: dict[tuple[object, ...], gs.Tensor] = field(default_factory=dict)

    def shared(self, tensor: gs.Tensor) -> gs.Tensor:
        """The first constant of these values; a computed tensor itself."""
        if not isinstance(tensor, gs.Constant):
            return tensor
        return self.constants.setdefault((*tensor.shape, tensor.values.tobytes()), tensor)


def _source(tensor: gs.Tensor, dim: int, settings: Settings, data: set[int], known: _Known) -> \
        _Source | NoMatch:
    """Determine the rows that an input is computed from."""
    piece = between(tensor, data, ROTARY, through=lambda node: _is_head_norm(node, dim))
    if isinstance(piece, NoMatch):
        return piece
    norms = [node for node in piece.nodes if is_op(node, RMS_NORM)]
    if len(norms) > 1:
        return NoMatch("its heads have several norms", tensor)
    norm = norms[0] if norms else None
    rows = [border for border in piece.inputs if id(border) in data
            and border.name != PIXEL_VALUES]
    if len(rows) != 1 or len(rows[0].shape or ()) != 2 or not isinstance(rows[0].shape[1], int):
        return NoMatch(f"it is computed from {len(rows)} tensors, expected one with rows of "
                       f"patches", tensor)
    if not piece.nodes:
        return _Source(tensor, np.arange(tensor.shape[-1]))
    key = piece.key, dim
    if key not in known.found:
        known.found[key] = _probe(piece, rows[0], dim, norm, settings, data)
    own = known.found[key]
    if isinstance(own, NoMatch):
        return own
    if own.tables is None:
        return _Source(rows[0], own.columns, norm=norm)
    cos, sin, width, step, layout = own.tables
    return _Source(rows[0], own.columns, _Tables(
        known.shared(_tensor(piece, cos)), known.shared(_tensor(piece, sin)), width, step,
        layout), norm)


def _is_head_norm(node: gs.Node, dim: int) -> bool:
    """Whether a node normalizes rows of one head."""
    return is_op(node, RMS_NORM) and operands(node)["weight"].shape[-1] == dim


def _tensor(piece: Piece, place: _Place) -> gs.Tensor:
    number, index = place
    node = piece.nodes[number]
    return node.outputs[index] if index >= 0 else node.inputs[-1 - index]


def _probe(nodes: Piece, rows: gs.Tensor, dim: int, norm: gs.Node | None, settings: Settings,
           data: set[int]) -> _Found | NoMatch:
    """Determine what nodes before attention do.

    Args:
        norm: of them.
    """
    gain = np.random.default_rng(1).uniform(0.5, 2, dim).astype(np.float32)
    weights = {} if norm is None else {operands(norm)["weight"].name: gain}
    piece = nodes.without([] if norm is None else [norm])
    samples = [(sample, shape) for sample in settings.image_samples
               if (shape := sample.shape(rows)) is not None]
    if len(samples) < len(settings.image_samples) or not samples:
        return NoMatch("the number of patches is not known", rows)
    width = int(rows.shape[1])
    if width > _MAX_COLUMNS:
        return NoMatch(f"it has {width} columns, more than {_MAX_COLUMNS}", rows)
    samples = [(replaced(sample, arrays={**sample.arrays, **weights}), shape)
               for sample, shape in samples]
    sample, shape = samples[0]
    numbers = np.broadcast_to(np.arange(1, width + 1, dtype=np.float32), shape)
    columns = _unrotated(piece.run({**sample.arrays, rows.name: numbers}), shape, dim)
    if columns is None:
        return NoMatch("heads are not joined before attention, no patch is at position 0, or "
                       "elements are scaled", piece.output)
    rng = np.random.default_rng(0)
    drawn = [(sample, rng.standard_normal(shape).astype(np.float32)) for sample, shape in samples]
    results = [nodes.run({**sample.arrays, rows.name: x}) for sample, x in drawn]
    given = [x[:, columns] if norm is None else _normed(x[:, columns], gain, norm)
             for _, x in drawn]
    if all(close(result, own, _TOLERANCE) if norm else np.array_equal(result, own)
           for result, own in zip(results, given, strict=True)):
        return _Found(columns, None)
    for layout in _LAYOUTS:
        order = _order(layout, dim)
        if order is None:
            continue
        tables = _tables(piece, rows, columns, dim, layout, samples, data)
        if tables is None:
            continue
        own_width, step = tables[2:]
        made = []
        for (sample, x), own in zip(drawn, given, strict=True):
            cos, sin = (_columns(table, own_width, step, dim)
                        for table in _run_nodes(piece, rows, sample, tables[:2], x))
            count = len(x) // len(cos)
            made.append(_rotated(_by_heads(own, order), dim, np.tile(cos, (count, 1)),
                                 np.tile(sin, (count, 1)), layout))
        if all(close(own, _by_heads(result, order), _TOLERANCE)
               for own, result in zip(made, results, strict=True)):
            return _Found(_by_heads(columns[None], order)[0], (*tables, layout))
    return NoMatch("the nodes before attention are no rotary embedding", piece.output)


def _order(layout: _Layout, dim: int) -> np.ndarray | None:
    """The elements of a head in the order that attention rotates; None: it has no such pairs."""
    if layout != "axes":
        return np.arange(dim)
    if dim % 4:
        return None
    return np.arange(dim).reshape(2, 2, dim // 4).swapaxes(0, 1).reshape(-1)


def _by_heads(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows with the elements of each head in an order."""
    return np.asarray(x.reshape(len(x), -1, len(order))[:, :, order].reshape(x.shape))


def _unrotated(result: np.ndarray, shape: tuple[int, ...], dim: int) -> np.ndarray | None:
    """The columns [columns] that a row that is not rotated has, of columns numbered from 1.

    None: there is no such row.
    """
    if result.ndim != 2 or len(result) != shape[0] or result.shape[1] % dim:
        return None
    rounded = np.rint(result)
    right = (np.abs(result - rounded) <= _TOLERANCE * shape[1]) & (rounded > 0) & (
        rounded <= shape[1])
    found = np.flatnonzero(right.all(1))
    return rounded[found[0]].astype(np.int64) - 1 if len(found) else None


def _normed(x: np.ndarray, gain: np.ndarray, norm: gs.Node) -> np.ndarray:
    """Rows with each head normalized."""
    heads = x.reshape(len(x), -1, len(gain)).astype(np.float64)
    mean = (heads ** 2).mean(-1, keepdims=True)
    normed = heads / np.sqrt(mean + fields_of(norm)["epsilon"]) * gain
    return np.asarray(normed.reshape(x.shape), np.float32)


def _tables(piece: Piece, rows: gs.Tensor, columns: np.ndarray, dim: int, layout: _Layout,
            samples: Sequence[tuple[ImageSample, tuple[int, ...]]], data: set[int]) -> \
        tuple[_Place, _Place, int, int] | None:
    """Find tensors with the cosines and sines of an image's patches.

    Returns:
        For each the number of its node and of its output there; their width, and the distance of
        the columns of successive pairs. None if a table is absent.
    """
    candidates = [(number, index) for number, node in enumerate(piece.nodes)
                  for index, tensor in (
                      *((-1 - index, own) for index, own in enumerate(node.inputs)
                        if isinstance(own, gs.Constant) and not isinstance(own._values, Weight)),
                      *enumerate(node.outputs))
                  if id(tensor) not in data and not tensor.is_empty()]
    firsts, seconds = _pairs(dim, layout)
    order = _order(layout, dim)
    assert order is not None
    firsts, seconds = order[firsts], order[seconds]  # in the order of the nodes
    # By table: places of values that are right for all samples.
    places: list[dict[_Kind, list[_Place]]] = [{}, {}]
    for index, (sample, shape) in enumerate(samples):
        ones = np.zeros(shape, np.float32)
        ones[:, columns.reshape(-1, dim)[:, firsts].reshape(-1)] = 1  # of each pair, (1, 0)
        turned = piece.run({**sample.arrays, rows.name: ones}).reshape(shape[0], -1, dim)[:, 0]
        values = _run_nodes(piece, rows, sample, candidates, ones)
        for found, table in zip(places, (turned[:, firsts], turned[:, seconds]), strict=True):
            right = _places(candidates, values, table, dim)
            for kind in [*found] if index else right:
                found[kind] = [place for place in right.get(kind, ())
                               if not index or place in found[kind]]
    # The last of each are what the nodes read: earlier ones may be in another order of patches.
    both = [(found[-1], places[1][kind][-1], *kind) for kind, found in places[0].items()
            if found and places[1].get(kind)]
    return max(both, default=None)


def _places(candidates: Sequence[_Place], values: Sequence[np.ndarray], table: np.ndarray,
            dim: int) -> dict[_Kind, list[_Place]]:
    """The candidates that are a table [rows, dim / 2], or have it in their columns.

    Constants may have the rows of one of several tiles.
    """
    found: dict[_Kind, list[_Place]] = {}
    rows = len(table)
    for place, value in zip(candidates, values, strict=True):
        if value.dtype != np.float32 or value.ndim < 2:
            continue
        for width, steps in ((dim, (1, 2)), (dim // 2, (1,))):
            count = value.size // width  # rows of a tile
            if count * width != value.size or not count or rows % count \
                    or (place[1] >= 0 and count != rows):
                continue
            for step in steps:
                tile = _columns(value, width, step, dim)
                if close(np.tile(tile, (rows // count, 1)), table, _TOLERANCE):
                    found.setdefault((width, step), []).append(place)
    return found


def _pairs(dim: int, layout: _Layout) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second element of each pair of a head, in the order of attention."""
    numbers = np.arange(dim // 2)
    if layout == "neighbors":
        return 2 * numbers, 2 * numbers + 1
    return numbers, numbers + dim // 2


def _columns(table: np.ndarray, width: int, step: int, dim: int) -> np.ndarray:
    """A table with one column for each pair of elements."""
    return np.asarray(table.reshape(-1, width)[:, ::step][:, :dim // 2])


def _rotated(x: np.ndarray, dim: int, cos: np.ndarray, sin: np.ndarray, layout: _Layout) -> \
        np.ndarray:
    """Rows of heads rotated by tables [rows, dim / 2]."""
    heads, (firsts, seconds) = x.reshape(len(x), -1, dim), _pairs(dim, layout)
    result = np.empty_like(heads)
    cos, sin = cos[:, None], sin[:, None]
    result[..., firsts] = heads[..., firsts] * cos - heads[..., seconds] * sin
    result[..., seconds] = heads[..., seconds] * cos + heads[..., firsts] * sin
    return np.asarray(result.reshape(x.shape))


def _run_nodes(piece: Piece, rows: gs.Tensor, sample: ImageSample,
               places: Sequence[_Place], x: np.ndarray) -> list[np.ndarray]:
    """Values of outputs and constant inputs of a subgraph's nodes."""
    tensors = [_tensor(piece, place) for place in places]
    computed = tuple(own for own in tensors if not isinstance(own, gs.Constant))
    values = iter(Piece(piece.nodes, piece.inputs, computed, piece.bypass).run_all(
        {**sample.arrays, rows.name: x}) if computed else ())
    return [own.values if isinstance(own, gs.Constant) else next(values) for own in tensors]


def _rewrite(graph: gs.Graph, match: _Match, tables: dict[tuple[int, int, int], gs.Variable]) -> \
        None:
    node, output = match.node, match.node.outputs[0]
    attrs = dict(node.attrs)
    inputs = {**operands(node), **{name: _projected(graph, source, f"{output.name}.{name}")
                                   for name, source in match.sources.items()}}
    used = match.sources["query"].tables
    if used is not None:
        dim = int(attrs["head_dim"])
        attrs |= {"rotary_dim": dim, "interleaved": int(used.layout == "neighbors"),
                  "rotary_by_row": 1}
        inputs |= {name: _table(graph, tensor, used, dim, inputs, tables)
                   for name, tensor in (("cos", used.cos), ("sin", used.sin))}
    query, key, value = (match.sources[name].norm for name in ("query", "key", "value"))
    if query is not None and key is not None:
        attrs["norm_epsilon"] = float(fields_of(query)["epsilon"])
        order = None if used is None else _order(used.layout, int(attrs["head_dim"]))
        inputs |= {name: _ordered(operands(norm)["weight"], order)
                   for name, norm in (("q_norm", query), ("k_norm", key))}
    if value is not None:
        inputs["value"] = _normed_values(graph, inputs["value"], value, f"{output.name}.normed")
    node.outputs.clear()
    replace(graph, ATTENTION, inputs, [output], attrs)


def _ordered(weight: gs.Tensor, order: np.ndarray | None) -> gs.Tensor:
    """Elements of a weight in an order."""
    if order is None or np.array_equal(order, np.arange(len(order))):
        return weight
    return gs.Constant(f"{weight.name}/axes", values_of(weight).take_rows(order))


def _normed_values(graph: gs.Graph, rows: gs.Tensor, norm: gs.Node, name: str) -> gs.Tensor:
    """Rows with each head of values normalized."""
    gain = values_of(operands(norm)["weight"])
    count = int(rows.shape[1]) // gain.shape[0]
    result = gs.Variable(name, np.float32, [*rows.shape])
    replace(graph, GROUP_RMS_NORM, {"x": rows, "weight": gs.Constant(
        f"{name}.weight", gain.take_rows(np.tile(np.arange(gain.shape[0]), count)))}, [result],
        {"groups": count, "epsilon": float(fields_of(norm)["epsilon"])})
    return result


def _table(graph: gs.Graph, tensor: gs.Tensor, used: _Tables, dim: int,
           inputs: Mapping[str, gs.Tensor], tables: dict[tuple[int, int, int], gs.Variable]) -> \
        gs.Variable:
    """A table [num_patches, dim / 2], which layers share.

    Args:
        inputs: of attention.
    """
    key = id(tensor), used.width, used.step
    if key in tables:
        return tables[key]
    if isinstance(tensor, gs.Constant):
        tables[key] = _repeated(graph, _columns(tensor.values, used.width, used.step, dim),
                                inputs, f"{tensor.name}.table")
        return tables[key]
    name, count = f"{tensor.name}.table", inputs["query"].shape[0]
    rows = gs.Variable(f"{name}.rows" if used.width > dim // 2 else name, np.float32,
                       [count, used.width])
    graph.nodes.append(gs.Node(
        op="Reshape", name=rows.name, outputs=[rows],
        inputs=[tensor, gs.Constant(f"{name}.shape", np.array([-1, used.width]))]))
    tables[key] = rows
    if used.width > dim // 2:
        tables[key] = gs.Variable(name, np.float32, [count, dim // 2])
        bounds = [gs.Constant(f"{name}.{what}", np.array([value])) for what, value in (
            ("start", 0), ("end", dim // 2 * used.step), ("axis", 1), ("step", used.step))]
        graph.nodes.append(gs.Node(op="Slice", name=name, inputs=[rows, *bounds],
                                   outputs=[tables[key]]))
    return tables[key]


def _repeated(graph: gs.Graph, tile: np.ndarray, inputs: Mapping[str, gs.Tensor], name: str) -> \
        gs.Variable:
    """The rows of a tile, for each tile of attention with these inputs."""
    def computed(op: str, what: str, given: list[gs.Tensor], **attrs: int) -> gs.Variable:
        made = gs.Variable(f"{name}.{what}" if what else name)
        graph.nodes.append(gs.Node(op=op, name=made.name, attrs=attrs, inputs=given,
                                   outputs=[made]))
        return made

    def known(what: str, value: object) -> gs.Constant:
        return gs.Constant(f"{name}.{what}", np.array(value))

    end = computed("Gather", "end", [inputs["cu_seqlens"], known("last", -1)], axis=0)
    numbers = computed("Range", "numbers", [known("first", 0), computed(
        "Cast", "count", [end], to=7), known("more", 1)])
    rows = computed("Mod", "rows", [numbers, known("size", len(tile))])
    result = computed("Gather", "", [gs.Constant(f"{name}.tile", tile), rows], axis=0)
    result.dtype, result.shape = np.dtype(np.float32), [inputs["query"].shape[0], tile.shape[1]]
    return result


def _projected(graph: gs.Graph, source: _Source, name: str) -> gs.Tensor:
    """The columns of rows, by a separate GEMM if they come from a linear layer."""
    rows, columns = source.rows, source.columns
    if np.array_equal(columns, np.arange(rows.shape[1])):
        return rows
    result = gs.Variable(name, np.float32, [rows.shape[0], len(columns)])
    node = producer(rows)
    if node is not None and node.op in ELEMENTWISE and all(
            scalar(tensor) is not None for tensor in node.inputs[1:]):  # such as bounds
        own = _projected(graph, _Source(node.inputs[0], columns), f"{name}.{node.op}")
        graph.nodes.append(gs.Node(op=node.op, name=name, attrs=node.attrs, outputs=[result],
                                   inputs=[own, *node.inputs[1:]]))
        return result
    gemm = node
    op, weights = op_of(gemm), row_weights(gemm)
    if gemm is None or op is None or not weights:
        graph.nodes.append(gs.Node(
            op="Gather", name=name, attrs={"axis": -1}, outputs=[result],
            inputs=[rows, gs.Constant(f"{name}.columns", columns)]))
        return result
    cut = {given: gs.Constant(f"{tensor.name}.{name}", values_of(tensor).take_rows(columns))
           for given, tensor in weights.items()}
    replace(graph, op, {**operands(gemm), **cut}, [result], gemm.attrs)
    return result
