"""Partition a fused graph into one graph per rank (Megatron).

A plan determines each tensor's distribution over ranks: replicated, sharded along its last axis, or
partial (a sum over ranks yet to be taken). Attention's projection and the first GEMM of an MLP are
cut by rows, the GEMM after them by columns, the vocabulary by tokens; experts by the columns
between their two GEMMs, or whole experts are distributed. An AllReduce is inserted where the value
of a partial tensor is needed, an AllGather after the LM head, and no other collectives.

Heads are cut by KV group, unevenly if tp_size does not divide the groups. If there are more ranks
than KV heads, ranks share a group: its queries are divided, its KV head is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    arranged,
    caches,
    consumers,
    describe,
    fields_of,
    is_llmc,
    is_op,
    op_of,
    operand,
    operands,
    part_of,
    reads,
    shard_of,
    state_of,
    values_of,
)
from llmc.compiler.graph.weights import Weight
from llmc.compiler.passes.packing import lm_head
from llmc.compiler.passes.regions import Region, find_regions
from llmc.compiler.passes.shares import (
    HeadShare,
    balanced,
    columns_together,
    deal_columns,
    head_columns,
    is_linear,
    selects_columns,
    selects_rows,
    share_heads,
)
from llmc.compiler.quant.scheme import SMALLEST_GROUP
from llmc.errors import LlmcError
from llmc.plugins.all_gather.op import OP as ALL_GATHER
from llmc.plugins.all_reduce.op import OP as ALL_REDUCE
from llmc.plugins.roles import (
    ByColumns,
    ByElements,
    ByExperts,
    ByGroups,
    ByHeads,
    ByInner,
    ByRows,
    ByStateHeads,
    ByVocabulary,
    Shard,
)

_EXPERTS_STEP = 64  # columns


@dataclass
class Plan:
    """The partitioning of every node.

    Args:
        tp_size: number of ranks.
        group_size: columns that stay together, as weights will be quantized in such groups.
        expert_parallel: whether ranks have whole experts.
        head: the LM head, which is always cut by tokens.
        region: tensors and nodes partitioned as a unit, determined first.
        ways: the sharding of each node that is cut, by id.
        columns: for a sharded tensor, each rank's columns of the whole.
        own: for experts, each rank's experts, or its columns between their GEMMs.
        shares: for a tensor of heads, and for attention, each rank's heads.
        partial: ids of tensors that are sums over ranks.
        reduce: ids of partial tensors that an AllReduce must complete.
        gather: ids of tensors that an AllGather must complete, with their columns in order.
    """

    tp_size: int
    group_size: int = 1
    expert_parallel: bool = False
    head: gs.Node | None = None
    region: Region = field(default_factory=Region)
    ways: dict[int, Shard] = field(default_factory=dict)
    columns: dict[int, list[np.ndarray]] = field(default_factory=dict)
    own: dict[int, list[np.ndarray]] = field(default_factory=dict)
    shares: dict[int, list[HeadShare]] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)
    reduce: set[int] = field(default_factory=set)
    gather: set[int] = field(default_factory=set)

    def is_cut(self, tensor: gs.Tensor | None) -> bool:
        return tensor is not None and id(tensor) in self.columns and id(tensor) not in self.gather


def tensor_parallel(graphs: Sequence[gs.Graph], settings: Settings, report: Report) -> \
        list[list[gs.Graph]]:
    """Run the pass.

    Returns:
        Each rank's graphs. For tp_size 1 they are the graphs themselves.

    Raises:
        LlmcError: tp_size is below 1 or above the number of heads.
    """
    ranks = [list(rank) for rank in zip(
        *partition_all(graphs, settings.options.tp_size, settings.model,
                       _group_size(graphs, settings),
                       settings.options.expert_parallel), strict=True)]
    for op in (ALL_REDUCE, ALL_GATHER):
        report.count(op.name, sum(is_op(node, op) for graph in ranks[0] for node in graph.nodes))
    return ranks


def _group_size(graphs: Sequence[gs.Graph], settings: Settings) -> int:
    """Columns that stay on one rank, so that groups keep a size that kernels support."""
    if settings.columns_together:
        return settings.columns_together
    if settings.options.scheme is not None and settings.options.scheme.group_size:
        return settings.options.scheme.group_size
    stored = any(isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)
                 and tensor._values.stored is not None
                 for graph in graphs for tensor in graph.tensors().values())
    quantized = settings.options.scheme or stored
    return max(SMALLEST_GROUP, settings.target.group_multiple) if quantized else 1


def max_tp_size(graph: gs.Graph) -> int:
    """The largest tp_size that gives every rank a head of every attention layer.

    Of a model without attention, a head or channel of every recurrent layer.
    """
    heads = [int(node.attrs["num_heads"]) for node in graph.nodes
             if shard_of(node, ByHeads) is not None]
    return min(heads or [int(node.attrs.get("num_v_heads", node.outputs[0].shape[-1]))
                         for node in graph.nodes if state_of(node) is not None])


def partition(graph: gs.Graph, tp_size: int, model: str) -> list[gs.Graph]:
    """One graph per rank; for tp_size 1 the graph itself.

    Raises:
        LlmcError: tp_size is below 1 or above the number of heads.
    """
    return partition_all([graph], tp_size, model)[0]


def partition_all(graphs: Sequence[gs.Graph], tp_size: int, model: str,
                  group_size: int = 1, expert_parallel: bool = False) -> list[list[gs.Graph]]:
    """Partition each of a model's graphs. A rank's graphs share its parts of common weights.

    Returns:
        For each graph, one per rank.

    Raises:
        LlmcError: see `partition`.
    """
    limits = [*map(max_tp_size, graphs)]
    limit = min(limits)
    if not 1 <= tp_size <= limit:
        owner = f"'{model}'" if limits[0] == limit or part_of(graphs[1], 1) == "encoder" \
            else f"the draft model of '{model}'"
        wrong = f"exceeds num_attention_heads {limit} of {owner}" if tp_size > 1 else "is below 1"
        raise LlmcError(f"tp_size {tp_size} {wrong}; allowed: 1 to {limit}")
    if expert_parallel and not any(shard_of(node, ByExperts) for graph in graphs
                                   for node in graph.nodes):
        raise LlmcError(f"expert_parallel is given, but '{model}' has no experts; leave it out")
    if tp_size == 1:
        return [[graph] for graph in graphs]
    shards = [_Shards() for _ in range(tp_size)]
    parts = []
    for graph in graphs:
        plan = make_plan(graph, tp_size, group_size, expert_parallel)
        parts.append([_rank_graph(graph, plan, rank, shards[rank]) for rank in range(tp_size)])
    return parts


def make_plan(graph: gs.Graph, tp_size: int, group_size: int = 1,
              expert_parallel: bool = False) -> Plan:
    """Plan the partitioning of each node, by the rules in the module's docstring.

    Raises:
        LlmcError: there are fewer experts, or columns of them, than ranks.
    """
    head = lm_head(graph) if graph.outputs[0].name == "logits" else None
    plan = Plan(tp_size, group_size, expert_parallel, head, find_regions(
        graph, tp_size, head, group_size))
    for node in graph.nodes:
        way = _choose(graph, node, plan)
        if way is not None:
            plan.ways[id(node)] = way
    for node in graph.nodes:
        for tensor in node.inputs:
            if id(tensor) in plan.partial and not _adds_partial(graph, node, tensor, plan) \
                    and not _stays_partial(graph, node, plan):
                plan.reduce.add(id(tensor))
    plan.reduce.update(id(t) for t in graph.outputs if id(t) in plan.partial)
    return plan


def _choose(graph: gs.Graph, node: gs.Node, plan: Plan) -> Shard | None:
    """The sharding of a node, recorded with its result in `plan`; None: replicated."""
    result = node.outputs[0]
    if selects_columns(node) and id(result) in plan.region.columns:
        plan.columns[id(result)] = plan.region.columns[id(result)]
        return ByElements()
    for way in _shardings(node):
        if isinstance(way, ByVocabulary):
            if values_of(operands(node)[way.table]).shape[0] < plan.tp_size:
                continue  # such as two token types
            plan.partial.add(id(result))
            return way
        if isinstance(way, ByExperts if plan.expert_parallel else ByInner):
            plan.own[id(node)] = _distribute_experts(node, way, plan)
            plan.partial.add(id(result))
            return way
        if isinstance(way, ByColumns) and plan.is_cut(operand(node, way.x)):
            if not is_linear(node, way):
                raise AssertionError(f"{describe(node)} reads a cut tensor but is not linear")
            plan.partial.add(id(result))
            return way
        if isinstance(way, ByRows):
            columns = _columns(graph, node, way, plan)
            if columns is not None:
                plan.columns[id(result)] = columns
                if node is plan.head:
                    plan.gather.add(id(result))
                return way
        if isinstance(way, ByHeads) and _takes_heads(node, way, plan):
            shares = plan.shares[id(node)]
            dim = result.shape[-1] // node.attrs["num_heads"]
            plan.columns[id(result)] = [np.arange(s.start * dim, s.stop * dim) for s in shares]
            return way
        if isinstance(way, ByStateHeads) and id(node) in plan.region.shares:
            plan.shares[id(node)] = plan.region.shares[id(node)]
            plan.columns[id(result)] = plan.region.columns[id(result)]
            return way
        if isinstance(way, ByElements | ByGroups):
            cut = next((t for t in node.inputs if plan.is_cut(t)), None)
            if cut is not None:
                plan.columns[id(result)] = plan.columns[id(cut)]
                if id(cut) in plan.shares:  # of normalized heads
                    plan.shares[id(result)] = plan.shares[id(cut)]
                return way
    if _stays_partial(graph, node, plan):
        plan.partial.add(id(result))
    return None


def _shardings(node: gs.Node) -> Sequence[Shard]:
    """The possible shardings of a node."""
    op = op_of(node)
    if op is not None:
        return op.shard
    return (ByElements(),) if node.op in ELEMENTWISE or selects_rows(node) else ()


def _distribute_experts(node: gs.Node, way: ByExperts | ByInner, plan: Plan) -> list[np.ndarray]:
    """Each rank's experts, or its columns between their GEMMs.

    Raises:
        LlmcError: there are fewer than ranks.
    """
    what, name, axis = ("experts", way.inputs[0], 0) if isinstance(way, ByExperts) else \
        ("columns in each of its experts", way.down, 2)
    count = values_of(operands(node)[name]).shape[axis]
    if count < plan.tp_size:
        raise LlmcError(f"{describe(node)} has {count} {what}, which {plan.tp_size} chips cannot "
                        f"share; give a tp_size of at most {count}")
    unit = next(unit for unit in (_inner_units(node, way, plan) if isinstance(way, ByInner) else
                                  [1]) if count % unit == 0 and count // unit >= plan.tp_size)
    return np.split(np.arange(count), np.cumsum(balanced(count // unit, plan.tp_size))[:-1] * unit)


def _inner_units(node: gs.Node, way: ByInner, plan: Plan) -> list[int]:
    """Candidates for the number of columns between two GEMMs that stay together, best first.

    These share a scale of the second weight, in multiples of the step of packed experts' kernels;
    else pairs.
    """
    stored = values_of(operands(node)[way.down]).stored
    size = stored.group_size if stored is not None else plan.group_size
    units = [unit for some in (size, plan.group_size) if some > 1
             for unit in (math.lcm(some, _EXPERTS_STEP), some)]
    return [*units, 2, 1] if units else [1]


def _takes_heads(node: gs.Node, way: ByHeads, plan: Plan) -> bool:
    """Whether attention's inputs are cut; its heads' shares are recorded in `plan`."""
    tensors = [operands(node)[name] for name in way.heads]
    divided = [plan.is_cut(tensor) for tensor in tensors]
    if any(divided) and not all(divided):
        raise LlmcError(f"{describe(node)} cannot be divided among chips, as not all of its "
                        f"inputs can; compile with --tp_size 1")
    if divided[0]:
        plan.shares[id(node)] = plan.region.shares.get(id(node)) or plan.shares[id(tensors[0])]
    return divided[0]


def _columns(graph: gs.Graph, node: gs.Node, way: ByRows, plan: Plan) -> list[np.ndarray] | None:
    """Each rank's columns of a node's result; None if the node is replicated."""
    result, tp_size = node.outputs[0], plan.tp_size
    width = values_of(operands(node)[way.inputs[0]]).shape[0] // way.stacked
    if node is plan.head:
        return list(np.arange(width).reshape(tp_size, -1))
    if id(result) in plan.region.columns:
        return plan.region.columns[id(result)]
    if not _can_be_cut(graph, result, plan):
        return None
    of_heads = _normed_heads(graph, result) or result
    users = consumers(graph, of_heads)
    attention = users[0] if len(users) == 1 else None
    heads = shard_of(attention, ByHeads)
    if attention is None or heads is None:
        if width < tp_size:
            return None
        return deal_columns(width, tp_size,
                            columns_together(graph, result, plan.group_size))
    name = next(name for name in heads.heads if operand(attention, name) is of_heads)
    fields = attention.attrs
    shares = share_heads(fields["num_heads"], fields["num_kv_heads"], tp_size)
    plan.shares[id(result)] = shares
    return [_head_columns(heads.heads[name], share, fields, width) for share in shares]


def _head_columns(kinds: str, share: HeadShare, fields: dict[str, int], width: int) -> np.ndarray:
    """A rank's columns of a tensor of these kinds of heads, concatenated, of this width."""
    counts = [fields["num_heads" if kind == "q" else "num_kv_heads"] for kind in kinds]
    dim = width // sum(counts)
    return head_columns(share, [(count, dim, kind == "q")
                                for count, kind in zip(counts, kinds, strict=True)])


def _can_be_cut(graph: gs.Graph, tensor: gs.Tensor, plan: Plan) -> bool:
    """Whether a cut tensor reaches only reducing GEMMs, through attention or row-wise ops."""
    return all(user is not None and _takes_cut(graph, user, tensor, plan)
               for user in consumers(graph, tensor))


def _takes_cut(graph: gs.Graph, user: gs.Node, tensor: gs.Tensor, plan: Plan) -> bool:
    if user is plan.head or id(user.outputs[0]) in plan.region.columns:
        return False  # a low-rank layer: its second GEMM is cut by rows, or by tokens
    for way in _shardings(user):
        if isinstance(way, ByColumns):
            if operand(user, way.x) is tensor and is_linear(user, way) \
                    and sum(t is tensor for t in user.inputs) == 1:
                return True
        elif isinstance(way, ByHeads):
            if any(operand(user, name) is tensor for name in way.heads):
                return _can_be_cut(graph, user.outputs[0], plan)
        elif isinstance(way, ByElements | ByGroups) and (
                _follows(user, way, tensor) if isinstance(way, ByElements)
                else _normed_heads(graph, tensor) is user.outputs[0]):
            return _can_be_cut(graph, user.outputs[0], plan)
    return False


def _normed_heads(graph: gs.Graph, tensor: gs.Tensor) -> gs.Tensor | None:
    """The result of a norm of a tensor's heads, if only attention reads it."""
    users = consumers(graph, tensor)
    norm = users[0] if len(users) == 1 else None
    way = shard_of(norm, ByGroups)
    if norm is None or way is None or operand(norm, way.x) is not tensor:
        return None
    readers = consumers(graph, norm.outputs[0])
    attention = readers[0] if len(readers) == 1 else None
    heads = shard_of(attention, ByHeads)
    if attention is None or heads is None or not any(
            operand(attention, name) is norm.outputs[0] for name in heads.heads):
        return None
    return norm.outputs[0]


def _follows(user: gs.Node, way: ByElements, tensor: gs.Tensor) -> bool:
    """Whether elements of a node's result depend only on those of one tensor."""
    if is_llmc(user):
        return operand(user, way.x) is tensor and sum(t is tensor for t in user.inputs) == 1
    return selects_rows(user) or all(
        t is tensor or (isinstance(t, gs.Constant) and t.values.size == 1) for t in user.inputs)


def _stays_partial(graph: gs.Graph, node: gs.Node, plan: Plan) -> bool:
    """Whether a node is linear in partial sums that no other node reads.

    Its result is then partial too: it selects rows, adds only partial sums, or multiplies one by a
    replicated tensor.
    """
    sums = [tensor for tensor in node.inputs if id(tensor) in plan.partial]
    if not sums or any(len(consumers(graph, tensor)) > 1 for tensor in sums):
        return False
    others = [tensor for tensor in node.inputs if id(tensor) not in plan.partial]
    return (selects_rows(node) and sums[0] is node.inputs[0]) \
        or (node.op == "Add" and not is_llmc(node) and not others) \
        or (node.op == "Mul" and not is_llmc(node) and len(others) == 1
            and not plan.is_cut(others[0]))


def _adds_partial(graph: gs.Graph, node: gs.Node, tensor: gs.Tensor, plan: Plan) -> bool:
    """Whether a partial tensor is added to another sum, which is reduced instead."""
    way = plan.ways.get(id(node))
    return isinstance(way, ByColumns) and any(operand(node, name) is tensor for name in way.added) \
        and len(consumers(graph, tensor)) == 1


class _Shards:
    """A rank's constants; equal cuts of one constant are shared."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, bytes], gs.Constant] = {}

    def cut(self, tensor: gs.Tensor, axis: int, index: np.ndarray) -> gs.Constant:
        values = values_of(tensor)
        key = (id(tensor._values), str(axis), index.tobytes())
        if key not in self._made:
            shard = values.take(index, axis)
            if shard is not values:
                shard.divided = shard.divided or axis == 0
            if values.stored is not None and values.stored.order is None and shard.stored is None:
                raise LlmcError(f"'{tensor.name}' is quantized in groups of "
                                f"{values.stored.group_size} along its {values.shape[1]} columns, "
                                f"which this tp_size would cut; give another, such as 1")
            self._made[key] = gs.Constant(tensor.name, shard)
        return self._made[key]

    def whole(self, tensor: gs.Constant) -> gs.Constant:
        key = (id(tensor._values), "whole", b"")
        if key not in self._made:
            self._made[key] = gs.Constant(tensor.name, tensor._values)
        return self._made[key]


def _rank_graph(graph: gs.Graph, plan: Plan, rank: int, shards: _Shards) -> gs.Graph:
    """The graph of one rank."""
    tensors: dict[int, gs.Tensor] = {}
    nodes: list[gs.Node] = []

    def tensor(original: gs.Tensor) -> gs.Tensor:
        if original.is_empty():
            return gs.Variable.empty()
        if isinstance(original, gs.Constant):
            return shards.whole(original)
        if id(original) not in tensors:
            shape = list(original.shape) if original.shape is not None else None
            if id(original) in plan.columns and shape:
                shape[-1] = len(plan.columns[id(original)][rank])
            tensors[id(original)] = gs.Variable(original.name, original.dtype, shape)
        return tensors[id(original)]

    for node in graph.nodes:
        inputs = [tensor(t) for t in node.inputs]
        outputs = [tensor(t) for t in node.outputs]
        attrs = dict(node.attrs)
        way, op = plan.ways.get(id(node)), op_of(node)
        if way is not None and op is not None:
            changed, fields = _cut(node, way, plan, rank, shards)
            attrs |= fields
            given = dict(zip(op.input_names, inputs, strict=False)) | changed
            inputs = arranged(op, given)
        elif op is None and id(node.outputs[0]) in plan.columns:
            inputs = [_cut_vector(whole, own, node, plan, rank, shards)
                      for whole, own in zip(node.inputs, inputs, strict=True)]
        copy = gs.Node(op=node.op, name=node.name, domain=node.domain, attrs=attrs, inputs=inputs,
                       outputs=outputs)
        nodes.append(copy)
        result = node.outputs[0]
        collective = ALL_REDUCE if id(result) in plan.reduce else \
            ALL_GATHER if id(result) in plan.gather else None
        if collective:
            part = gs.Variable(f"{result.name}.part", result.dtype, outputs[0].shape)
            copy.outputs[0] = part
            whole = gs.Variable(result.name, result.dtype, result.shape)
            tensors[id(result)] = whole
            nodes.append(gs.Node(op=collective.name, name=f"{node.name}.{collective.name}",
                                 domain="llmc", attrs={"tp_size": plan.tp_size}, inputs=[part],
                                 outputs=[whole]))
    ranked = gs.Graph(nodes=nodes, inputs=[tensor(t) for t in graph.inputs],
                      outputs=[tensor(t) for t in graph.outputs], opset=graph.opset)
    for node in ranked.nodes:
        for cache in (*(cache for pair in caches(node) for cache in pair), *reads(ranked, node)):
            cache.shape = (cache.shape[0], node.attrs["num_kv_heads"], *cache.shape[2:])
    for whole, node in ((whole, tensors[id(whole.outputs[0])].inputs[0]) for whole in graph.nodes
                        if state_of(whole) is not None and id(whole) in plan.ways):
        _cut_state(node, whole.outputs[0].shape[-1])
    return ranked


def _cut_state(node: gs.Node, width: int) -> None:
    """Reduce the state of a rank's node to its share of `width` columns."""
    op, state = op_of(node), state_of(node)
    assert op is not None and op.state is not None and state is not None
    for tensor in state:
        shape = list(tensor.shape)
        shape[op.state.axis] = shape[op.state.axis] * node.outputs[0].shape[-1] // width
        tensor.shape = shape


def _cut_vector(whole: gs.Tensor, replicated: gs.Tensor, node: gs.Node, plan: Plan, rank: int,
                shards: _Shards) -> gs.Tensor:
    """A rank's part of a constant with an element per column of a node's result."""
    if not isinstance(whole, gs.Constant) or whole.shape[-1:] != node.outputs[0].shape[-1:]:
        return replicated
    if selects_columns(node):  # indices relative to the rank's columns of the input
        given, made = (plan.columns[id(t)][rank] for t in (node.inputs[0], node.outputs[0]))
        return gs.Constant(whole.name, np.argmax(whole.values[made, None] == given, axis=1))
    return shards.cut(whole, len(whole.shape) - 1, plan.columns[id(node.outputs[0])][rank])


def _cut(node: gs.Node, way: Shard, plan: Plan, rank: int, shards: _Shards) -> \
        tuple[dict[str, gs.Tensor | None], dict[str, int]]:
    """A rank's inputs and attributes of a node that differ from the whole node's."""
    inputs: dict[str, gs.Tensor | None] = {}
    fields: dict[str, int] = {}

    def cut(names: Sequence[str], axis: int, index: np.ndarray) -> None:
        for name in names:
            whole = operand(node, name)
            if whole is not None:
                inputs[name] = shards.cut(whole, axis, index)

    if isinstance(way, ByRows):
        rows = plan.columns[id(node.outputs[0])][rank]
        height = values_of(operands(node)[way.inputs[0]]).shape[0] // way.stacked
        cut(way.inputs, 0, np.concatenate([rows + height * i for i in range(way.stacked)]))
    elif isinstance(way, ByColumns):
        cut(way.inputs, 1, plan.columns[id(operands(node)[way.x])][rank])
    elif isinstance(way, ByInner):
        own = plan.own[id(node)][rank]
        rows = np.stack([2 * own, 2 * own + 1], 1).reshape(-1) if fields_of(node)[way.paired] \
            else own
        cut(way.up, 1, rows)
        cut([way.down], 2, own)
    elif isinstance(way, ByExperts):
        own = plan.own[id(node)][rank]
        fields = {way.start: int(own[0]), way.sharded: 1}
        cut(way.inputs, 0, own)
    elif isinstance(way, ByHeads):
        share = plan.shares[id(node)][rank]
        fields = {"num_heads": share.stop - share.start, "num_kv_heads": len(share.kv_heads)}
        cut(way.per_head, 0, np.arange(share.start, share.stop))
    elif isinstance(way, ByStateHeads):
        share = plan.shares[id(node)][rank]
        fields = {way.heads: share.stop - share.start, way.groups: len(share.kv_heads)}
        cut(way.per_head, 0, np.arange(share.start, share.stop))
    elif isinstance(way, ByGroups):
        own, whole = plan.columns[id(node.outputs[0])][rank], node.outputs[0].shape[-1]
        fields = {way.groups: fields_of(node)[way.groups] * len(own) // whole}
        cut(way.vectors, 0, own)
    elif isinstance(way, ByVocabulary):
        counts = balanced(values_of(operands(node)[way.table]).shape[0], plan.tp_size)
        start = sum(counts[:rank])
        fields = {way.start: start, way.sharded: 1}
        cut([way.table], 0, np.arange(start, start + counts[rank]))
    else:
        cut(way.vectors, 0, plan.columns[id(node.outputs[0])][rank])
    if rank and isinstance(way, ByColumns | ByVocabulary | ByInner):  # only rank 0 adds these
        for name in way.added:
            tensor = operand(node, name)
            if id(tensor) not in plan.partial or id(tensor) in plan.reduce:
                inputs[name] = None
    return inputs, fields
