"""Layers that are partitioned as a unit: gated or clipped attention, and recurrent layers.

Given:   linear layers → convolution, gates, group norms, attention or recurrence → linear layers
Result:  each rank's columns of every tensor between the linear layers: those of its heads, or an
         equal share if there are no heads

If any other op lies between, every rank computes all of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    consumers,
    fields_of,
    is_llmc,
    operand,
    producer,
    row_weights,
    shard_of,
    state_of,
)
from llmc.compiler.passes.shares import (
    HeadShare,
    columns_together,
    deal_columns,
    head_columns,
    is_linear,
    selects_columns,
    selects_rows,
    share_heads,
)
from llmc.plugins.roles import ByColumns, ByElements, ByGroups, ByHeads, ByStateHeads

_HEADS, _PACKED = "heads", "packed"  # contents of a tensor: all heads; packed Q, K and V


@dataclass
class Region:
    """Tensors and nodes that are partitioned as a unit.

    Args:
        columns: for each tensor, by id, each rank's columns of the whole.
        shares: for each node with heads, by id, each rank's heads.
    """

    columns: dict[int, list[np.ndarray]] = field(default_factory=dict)
    shares: dict[int, list[HeadShare]] = field(default_factory=dict)


def find_regions(graph: gs.Graph, tp_size: int, head: gs.Node | None,
                 group_size: int = 1) -> Region:
    """All regions of a graph that can be partitioned.

    Args:
        graph: of the whole model.
        tp_size: number of ranks.
        head: the LM head, which no region includes.
        group_size: columns that share a scale of a weight to be quantized.
    """
    found, seen = Region(), set[int]()
    for seed in graph.nodes:
        if id(seed) in seen or not (state_of(seed) or _is_gated(graph, seed)
                                    or _is_bounded(seed)):
            continue
        region = _RegionGrowth(graph, head)
        divides = region.spread(seed)
        seen |= region.nodes.keys()
        divided = region.divide(tp_size, group_size) if divides else None
        if divided is not None:
            found.columns.update(divided.columns)
            found.shares.update(divided.shares)
    return found


def _is_gated(graph: gs.Graph, node: gs.Node) -> bool:
    """Whether attention's result is multiplied by another computed value."""
    if shard_of(node, ByHeads) is None:
        return False
    users = consumers(graph, node.outputs[0])
    if len(users) == 1 and users[0] is not None and selects_rows(users[0]):  # in the last layer
        users = consumers(graph, users[0].outputs[0])
    return any(user is not None and user.op in ELEMENTWISE and not is_llmc(user)
               and sum(not isinstance(t, gs.Constant) for t in user.inputs) > 1
               for user in users)


def _is_bounded(node: gs.Node) -> bool:
    """Whether attention reads an elementwise function of a linear layer's result."""
    way = shard_of(node, ByHeads)
    makers = [producer(tensor) for name in way.heads if (tensor := operand(node, name)) is not None
              ] if way is not None else []
    return any(maker is not None and not is_llmc(maker) and maker.op in ELEMENTWISE
               for maker in makers)


class _RegionGrowth:
    """A region that grows from one node."""

    def __init__(self, graph: gs.Graph, head: gs.Node | None) -> None:
        self._graph, self._head = graph, head
        self.nodes: dict[int, gs.Node] = {}
        self._kind: dict[int, str] = {}
        self._tensors: dict[int, gs.Tensor] = {}

    def spread(self, seed: gs.Node) -> bool:
        """Add all nodes to be partitioned with `seed`; False if one cannot be."""
        stack: list[tuple[gs.Node, str]] = [(seed, _HEADS)]
        if state_of(seed) and shard_of(seed, ByStateHeads) is None:  # heads are the consumer's
            consumer = _consumer_with_heads(self._graph, seed)
            stack = [(consumer, _HEADS)] if consumer is not None else stack
        divides = True
        while stack:
            node, kind = stack.pop()
            if id(node) in self.nodes:
                continue
            self.nodes[id(node)] = node
            for tensor, own in _data(node, kind):
                if self._kind.setdefault(id(tensor), own) != own:
                    divides = False
                if id(tensor) in self._tensors:
                    continue
                self._tensors[id(tensor)] = tensor
                for other in (producer(tensor), *consumers(self._graph, tensor)):
                    if other is not None and _is_inside(other):
                        stack.append((other, own))
                    elif not self._is_border(other, tensor):
                        divides = False
        return divides

    def _is_border(self, node: gs.Node | None, tensor: gs.Tensor) -> bool:
        """Whether a node is a linear layer that computes the tensor, or one that reduces it."""
        if node is None or node is self._head:
            return False
        if any(tensor is made for made in node.outputs):
            return bool(row_weights(node))
        way = shard_of(node, ByColumns)
        return way is not None and operand(node, way.x) is tensor and is_linear(node, way) \
            and sum(t is tensor for t in node.inputs) == 1

    def divide(self, tp_size: int, group_size: int) -> Region | None:
        """Each rank's share; None if heads cannot be distributed, or groups would be cut."""
        keyed = [node for node in self.nodes.values()
                 if shard_of(node, ByStateHeads) or shard_of(node, ByHeads)]
        region = Region()
        if len(keyed) > 1:
            return None
        if keyed:
            counts = _counts(keyed[0])
            if tp_size > counts[0]:
                return None
            region.shares[id(keyed[0])] = share_heads(*counts, tp_size)
        for key, tensor in self._tensors.items():
            columns = self._divided(tensor, self._kind[key], keyed, region, tp_size, group_size)
            if columns is None:
                return None
            region.columns[key] = columns
        return region if all(_keeps_groups(node, region) and _keeps_selected(node, region)
                             for node in self.nodes.values()) else None

    def _divided(self, tensor: gs.Tensor, kind: str, keyed: Sequence[gs.Node], region: Region,
                 tp_size: int, group_size: int) -> list[np.ndarray] | None:
        width = tensor.shape[-1]
        if not keyed:  # independent channels
            if any(other.shape[-1] != width for other in self._tensors.values()) \
                    or width < tp_size:
                return None
            together = max(columns_together(self._graph, other, group_size)
                           for other in self._tensors.values())
            return deal_columns(width, tp_size, together)
        node, shares = keyed[0], region.shares[id(keyed[0])]
        if kind == _PACKED:
            return [head_columns(share, _groups(node)) for share in shares]
        heads = _counts(node)[0]
        if width % heads:
            return None
        each = width // heads
        return [np.arange(share.start * each, share.stop * each) for share in shares]


def _consumer_with_heads(graph: gs.Graph, node: gs.Node) -> gs.Node | None:
    """The op with heads that reads a convolution's result."""
    return next((user for user in consumers(graph, node.outputs[0])
                 if shard_of(user, ByStateHeads) is not None), None)


def _is_inside(node: gs.Node) -> bool:
    return any(shard_of(node, way) is not None
               for way in (ByStateHeads, ByHeads, ByElements, ByGroups)) \
        or (not is_llmc(node) and (node.op in ELEMENTWISE or selects_rows(node)
                                   or selects_columns(node)))


def _data(node: gs.Node, kind: str) -> list[tuple[gs.Tensor, str]]:
    """A node's partitioned tensors and their contents; `kind` are those of one of them."""
    heads, states = shard_of(node, ByHeads), shard_of(node, ByStateHeads)
    result = node.outputs[0]
    if states is not None:
        given = [(operand(node, states.packed), _PACKED),
                 *((operand(node, name), _HEADS) for name in states.rows), (result, _HEADS)]
    elif heads is not None:
        given = [*((operand(node, name), _HEADS if kinds == "q" else _PACKED)
                   for name, kinds in heads.heads.items()), (result, _HEADS)]
    elif is_llmc(node):
        way = shard_of(node, ByElements) or shard_of(node, ByGroups)
        assert way is not None
        given = [(operand(node, way.x), kind), (result, kind)]
    elif selects_rows(node) or selects_columns(node):
        given = [(node.inputs[0], kind), (result, kind)]
    else:
        given = [(tensor, kind) for tensor in (*node.inputs, result)]
    return [(tensor, own) for tensor, own in given
            if tensor is not None and not tensor.is_empty() and not isinstance(tensor, gs.Constant)]


def _counts(node: gs.Node) -> tuple[int, int]:
    """The numbers of heads and of their groups."""
    fields, way = fields_of(node), shard_of(node, ByStateHeads)
    names = (way.heads, way.groups) if way is not None else ("num_heads", "num_kv_heads")
    return int(fields[names[0]]), int(fields[names[1]])


def _groups(node: gs.Node) -> list[tuple[int, int, bool]]:
    """For queries, keys and values: number of heads, their size, whether they are Q heads."""
    fields, way = fields_of(node), shard_of(node, ByStateHeads)
    heads, groups = _counts(node)
    if way is None:
        dim = fields["head_dim"]
        return [(heads, dim, True), (groups, dim, False), (groups, dim, False)]
    return [(groups, fields[way.key_dim], False)] * 2 + [(heads, fields[way.value_dim], True)]


def _keeps_groups(node: gs.Node, region: Region) -> bool:
    """Whether each rank has whole groups of a group norm."""
    way = shard_of(node, ByGroups)
    if way is None:
        return True
    result = node.outputs[0]
    each = result.shape[-1] // fields_of(node)[way.groups]
    return all(len(columns) % each == 0 and columns[0] % each == 0
               for columns in region.columns[id(result)])


def _keeps_selected(node: gs.Node, region: Region) -> bool:
    """Whether each rank has the columns from which it selects."""
    if not selects_columns(node):
        return True
    index = node.inputs[1].values
    return all(np.isin(index[made], given).all() for given, made in zip(
        *(region.columns[id(t)] for t in (node.inputs[0], node.outputs[0])), strict=True))
