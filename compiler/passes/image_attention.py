"""Attention of an image encoder to rows of linear layers, rotated by the op.

Given:   x → GEMM → Reshape, Transpose, Slice, rotary embedding, Transpose, Reshape → query, key,
         value → BidirectionalAttention
Result:  x → GEMM → query, …; BidirectionalAttention(query, key, value, cu_seqlens, cos, sin) with
         rotary_by_row, cos and sin [num_patches, rotary_dim / 2]

The nodes before attention are run on numbered columns. The first patch of an image is at position 0
on all axes and is not rotated, so its result shows the columns of each head. Cosines and sines are
tensors that the graph computes from positions; they must rotate all patches of images of several
sizes in the same way as the nodes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.image_samples import ImageSample
from llmc.compiler.graph.names import PIXEL_VALUES
from llmc.compiler.graph.probe import ROTARY, Piece, close, data_tensors
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Rule,
    Settings,
    apply_rules,
    fields_of,
    op_of,
    operands,
    producer,
    replace,
    row_weights,
    values_of,
)
from llmc.compiler.passes.image_rows import between
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION

_MAX_COLUMNS = 1 << 20  # numbers that float32 distinguishes from their neighbors after a rotation
_TOLERANCE = 1e-5


_Place = tuple[int, int]  # of a value: number of the node, and of its output
_Kind = tuple[int, int]  # of a table: its width, and the distance of successive pairs


@dataclass(frozen=True)
class _Tables:
    """Cosines and sines, as columns of computed tensors with one row per patch.

    Args:
        cos, sin: the tensors.
        width: columns of each.
        step: distance of the columns of successive pairs.
        interleaved: whether pairs are neighboring elements of a head.
    """

    cos: gs.Tensor
    sin: gs.Tensor
    width: int
    step: int
    interleaved: bool


@dataclass(frozen=True)
class _Source:
    """Columns of the rows that an input of attention is computed from."""

    rows: gs.Tensor
    columns: np.ndarray
    tables: _Tables | None = None


@dataclass(frozen=True)
class _Match:
    node: gs.Node
    sources: Mapping[str, _Source]  # by input


def image_attention(graph: gs.Graph, settings: Settings, report: Report) -> None:
    """Run the pass."""
    data = data_tensors(graph)
    found: dict[tuple[bytes, int], _Found | NoMatch] = {}
    tables: dict[tuple[int, int, int], gs.Variable] = {}
    rule = Rule("image-attention", frozenset({ATTENTION.name}),
                lambda node, settings: _check(node, settings, data, found),
                lambda graph, match, settings: _rewrite(graph, match, tables))
    apply_rules(graph, [rule], settings, report)


def _check(node: gs.Node, settings: Settings, data: set[int],
           found: dict[tuple[bytes, int], _Found | NoMatch]) -> _Match | NoMatch | None:
    given = operands(node)
    if "cos" in given:
        return None
    dim, sources = int(fields_of(node)["head_dim"]), dict[str, _Source]()
    for name in ("query", "key", "value"):
        source = _source(given[name], dim, settings, data, found)
        if isinstance(source, NoMatch):
            return source
        sources[name] = source
    if all(source.rows is given[name] for name, source in sources.items()):
        return None  # nothing to do
    if sources["query"].tables != sources["key"].tables or sources["value"].tables is not None:
        return NoMatch("queries and keys are not rotated alike, or values are", node)
    return _Match(node, sources)


@dataclass(frozen=True)
class _Found:
    """The result for a subgraph: columns, and where its nodes compute cosines and sines."""

    columns: np.ndarray
    tables: tuple[_Place, _Place, int, int, bool] | None


def _source(tensor: gs.Tensor, dim: int, settings: Settings, data: set[int],
            found: dict[tuple[bytes, int], _Found | NoMatch]) -> _Source | NoMatch:
    """Determine the rows that an input is computed from.

    Layers have the same subgraphs, which are run once.
    """
    piece = between(tensor, data, ROTARY)
    if isinstance(piece, NoMatch):
        return piece
    rows = [border for border in piece.inputs if id(border) in data
            and border.name != PIXEL_VALUES]
    if len(rows) != 1 or len(rows[0].shape or ()) != 2 or not isinstance(rows[0].shape[1], int):
        return NoMatch(f"it is computed from {len(rows)} tensors, expected one with rows of "
                       f"patches", tensor)
    if not piece.nodes:
        return _Source(tensor, np.arange(tensor.shape[-1]))
    key = piece.key, dim
    if key not in found:
        found[key] = _probe(piece, rows[0], dim, settings, data)
    own = found[key]
    if isinstance(own, NoMatch):
        return own
    if own.tables is None:
        return _Source(rows[0], own.columns)
    cos, sin, width, step, interleaved = own.tables
    return _Source(rows[0], own.columns, _Tables(
        piece.nodes[cos[0]].outputs[cos[1]], piece.nodes[sin[0]].outputs[sin[1]], width, step,
        interleaved))


def _probe(piece: Piece, rows: gs.Tensor, dim: int, settings: Settings, data: set[int]) -> \
        _Found | NoMatch:
    samples = [(sample, shape) for sample in settings.image_samples
               if (shape := sample.shape(rows)) is not None]
    if len(samples) < len(settings.image_samples) or not samples:
        return NoMatch("the number of patches is not known", rows)
    width = int(rows.shape[1])
    if width > _MAX_COLUMNS:
        return NoMatch(f"it has {width} columns, more than {_MAX_COLUMNS}", rows)
    sample, shape = samples[0]
    numbers = np.broadcast_to(np.arange(1, width + 1, dtype=np.float32), shape)
    first = piece.run({**sample.arrays, rows.name: numbers})
    if first.ndim != 2 or len(first) != shape[0] or first.shape[1] % dim:
        return NoMatch("heads are not joined before attention", piece.output)
    columns = np.rint(first[0]).astype(np.int64) - 1
    if not close(first[:1], columns[None] + 1.0) or not ((columns >= 0) & (columns < width)).all():
        return NoMatch("the first patch is not at position 0, or its elements are scaled",
                       piece.output)
    rng = np.random.default_rng(0)
    drawn = [(sample, rng.standard_normal(shape).astype(np.float32)) for sample, shape in samples]
    results = [piece.run({**sample.arrays, rows.name: x}) for sample, x in drawn]
    if all(np.array_equal(result, x[:, columns])
           for result, (_, x) in zip(results, drawn, strict=True)):
        return _Found(columns, None)
    for interleaved in (False, True):
        tables = _tables(piece, rows, columns, dim, interleaved, samples, data)
        if tables is None:
            continue
        own_width, step = tables[2:]
        made = []
        for sample, x in drawn:
            cos, sin = (_columns(table, own_width, step, dim)
                        for table in _run_nodes(piece, rows, sample, tables[:2], x))
            made.append(_rotated(x[:, columns], dim, cos, sin, interleaved))
        if all(close(own, result, _TOLERANCE) for own, result in zip(made, results, strict=True)):
            return _Found(columns, (*tables, interleaved))
    return NoMatch("the nodes before attention are no rotary embedding", piece.output)


def _tables(piece: Piece, rows: gs.Tensor, columns: np.ndarray, dim: int, interleaved: bool,
            samples: Sequence[tuple[ImageSample, tuple[int, ...]]], data: set[int]) -> \
        tuple[_Place, _Place, int, int] | None:
    """Find tensors with the cosines and sines of an image's patches.

    Returns:
        For each the number of its node and of its output there; their width, and the distance of
        the columns of successive pairs. None if a table is absent.
    """
    candidates = [(number, index) for number, node in enumerate(piece.nodes)
                  for index, tensor in enumerate(node.outputs)
                  if id(tensor) not in data and not tensor.is_empty()]
    firsts = _firsts(dim, interleaved)
    seconds = firsts + (1 if interleaved else dim // 2)
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
    """The candidates that are a table [rows, dim / 2], or have it in their columns."""
    found: dict[_Kind, list[_Place]] = {}
    rows = len(table)
    for place, value in zip(candidates, values, strict=True):
        if value.dtype != np.float32 or value.ndim < 2 or len(value) != rows:
            continue
        width = value.size // rows
        for step in (1, 2) if width == dim else (1,) if width == dim // 2 else ():
            if close(_columns(value, width, step, dim), table, _TOLERANCE):
                found.setdefault((width, step), []).append(place)
    return found


def _firsts(dim: int, interleaved: bool) -> np.ndarray:
    """The first element of each pair of a head."""
    return np.arange(dim // 2) * (2 if interleaved else 1)


def _columns(table: np.ndarray, width: int, step: int, dim: int) -> np.ndarray:
    """A table with one column for each pair of elements."""
    return np.asarray(table.reshape(-1, width)[:, ::step][:, :dim // 2])


def _rotated(x: np.ndarray, dim: int, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> \
        np.ndarray:
    """Rows of heads rotated by tables [rows, dim / 2]."""
    heads, firsts = x.reshape(len(x), -1, dim), _firsts(dim, interleaved)
    seconds = firsts + (1 if interleaved else dim // 2)
    result = np.empty_like(heads)
    cos, sin = cos[:, None], sin[:, None]
    result[..., firsts] = heads[..., firsts] * cos - heads[..., seconds] * sin
    result[..., seconds] = heads[..., seconds] * cos + heads[..., firsts] * sin
    return np.asarray(result.reshape(x.shape))


def _run_nodes(piece: Piece, rows: gs.Tensor, sample: ImageSample,
               places: Sequence[_Place], x: np.ndarray) -> list[np.ndarray]:
    """Values of outputs of a subgraph's nodes."""
    outputs = tuple(piece.nodes[number].outputs[index] for number, index in places)
    return Piece(piece.nodes, piece.inputs, outputs).run_all({**sample.arrays, rows.name: x})


def _rewrite(graph: gs.Graph, match: _Match, tables: dict[tuple[int, int, int], gs.Variable]) -> \
        None:
    node, output = match.node, match.node.outputs[0]
    attrs = dict(node.attrs)
    inputs = {**operands(node), **{name: _projected(graph, source, f"{output.name}.{name}")
                                   for name, source in match.sources.items()}}
    used = match.sources["query"].tables
    if used is not None:
        dim = int(attrs["head_dim"])
        attrs |= {"rotary_dim": dim, "interleaved": int(used.interleaved), "rotary_by_row": 1}
        inputs |= {name: _table(graph, tensor, used, dim, tables)
                   for name, tensor in (("cos", used.cos), ("sin", used.sin))}
    node.outputs.clear()
    replace(graph, ATTENTION, inputs, [output], attrs)


def _table(graph: gs.Graph, tensor: gs.Tensor, used: _Tables, dim: int,
           tables: dict[tuple[int, int, int], gs.Variable]) -> gs.Variable:
    """A table [num_patches, dim / 2], which layers share."""
    key = id(tensor), used.width, used.step
    if key in tables:
        return tables[key]
    name, count = f"{tensor.name}.table", tensor.shape[0] if tensor.shape else None
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


def _projected(graph: gs.Graph, source: _Source, name: str) -> gs.Tensor:
    """The columns of rows, by a separate GEMM if they come from a linear layer."""
    rows, columns = source.rows, source.columns
    if np.array_equal(columns, np.arange(rows.shape[1])):
        return rows
    result = gs.Variable(name, np.float32, [rows.shape[0], len(columns)])
    gemm = producer(rows)
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
