"""Partition a fused graph into one graph per rank, as Megatron does.

A plan says how each tensor lies over the ranks: the same on all (replicated), cut along its last
axis (sharded), or as a sum over ranks still to be taken (partial). Attention's projection and the
first GEMM of an MLP are cut by rows, the GEMM behind them by columns, the vocabulary by tokens. An
AllReduce goes in where a partial tensor meets something that needs its value, an AllGather behind
the LM head, and nothing anywhere else.

Heads are cut by KV group, unevenly where tp does not divide the groups. Where there are more ranks
than KV heads, ranks share a group: its queries are divided, its KV head is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from llmc import plugins
from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import consumers, describe, is_llmc, weight
from llmc.compiler.passes.packing import ATTENTION, lm_head
from llmc.errors import LlmcError


@dataclass(frozen=True)
class HeadShare:
    """One rank's heads: query heads `[start, stop)`, and for its KV heads their indices."""

    start: int
    stop: int
    kv_heads: tuple[int, ...]


def share_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> list[HeadShare]:
    """Divide query and KV heads among ranks, each rank's queries in whole groups of equal size."""
    group = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        counts = _balanced(num_kv_heads, tp_size)
        ends = np.cumsum(counts)
        return [HeadShare(int(end - n) * group, int(end) * group,
                          tuple(range(int(end - n), int(end))))
                for n, end in zip(counts, ends, strict=True)]
    shares = []
    for kv_head, ranks in enumerate(_balanced(tp_size, num_kv_heads)):
        start = kv_head * group
        for count in _balanced(group, ranks):
            shares.append(HeadShare(start, start + count, (kv_head,)))
            start += count
    return shares


def _balanced(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by at most one, the larger first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


@dataclass
class Plan:
    """How every node is divided.

    Args:
        columns: for a sharded tensor, per rank the columns of the whole that it holds.
        partial: ids of tensors that are sums over ranks.
        reduce: ids of partial tensors that an AllReduce must complete.
        sharded_nodes: ids of nodes that are cut.
        logits: the tensor that an AllGather must complete, with its columns in order.
    """

    tp_size: int
    columns: dict[int, list[np.ndarray]] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)
    reduce: set[int] = field(default_factory=set)
    sharded_nodes: set[int] = field(default_factory=set)
    shares: dict[int, list[HeadShare]] = field(default_factory=dict)
    gather: set[int] = field(default_factory=set)


def max_tp_size(graph: gs.Graph) -> int:
    """The largest tp_size that gives every rank a head of every layer."""
    return min(int(node.attrs["num_heads"]) for node in graph.nodes
               if is_llmc(node, *ATTENTION))


def partition(graph: gs.Graph, tp_size: int, model: str) -> list[gs.Graph]:
    """One graph per rank; for tp_size 1 the graph itself.

    Raises:
        LlmcError: tp_size is below 1 or above the number of heads.
    """
    return partition_all([graph], tp_size, model)[0]


def partition_all(graphs: Sequence[gs.Graph], tp_size: int, model: str) -> list[list[gs.Graph]]:
    """For each of a model's graphs, one per rank. What a rank has of a weight, its graphs share.

    Raises:
        LlmcError: see `partition`.
    """
    limit = min(map(max_tp_size, graphs))
    if not 1 <= tp_size <= limit:
        raise LlmcError(f"tp_size {tp_size} is not possible: {model!r} has {limit} attention "
                        f"heads; allowed: 1 to {limit}")
    if tp_size == 1:
        return [[graph] for graph in graphs]
    shards = [_Shards() for _ in range(tp_size)]
    parts = []
    for graph in graphs:
        plan = make_plan(graph, tp_size)
        parts.append([_rank_graph(graph, plan, rank, shards[rank]) for rank in range(tp_size)])
    return parts


def make_plan(graph: gs.Graph, tp_size: int) -> Plan:
    """Decide how each node is divided. See the module's docstring for the rules."""
    plan = Plan(tp_size)
    head = lm_head(graph) if graph.outputs[0].name == "logits" else None
    for node in graph.nodes:
        if is_llmc(node, "Embedding"):
            plan.sharded_nodes.add(id(node))
            plan.partial.add(id(node.outputs[0]))
        elif is_llmc(node, "GemmBiasAct", "GemmBiasRes", "GatedMLP"):
            _plan_gemm(graph, node, plan, is_head=node is head)
        elif is_llmc(node, *ATTENTION):
            divided = [id(tensor) in plan.columns for tensor in
                       node.inputs[:1 if node.op == "CausalAttention" else 3]]
            if any(divided) and not all(divided):
                raise LlmcError(f"{describe(node)} cannot be divided among chips, as not all of "
                                f"its inputs can; compile with --tp_size 1")
            if divided[0]:
                share = plan.shares[id(node.inputs[0])]
                dim = node.attrs["head_dim"]
                plan.sharded_nodes.add(id(node))
                plan.shares[id(node)] = share
                plan.columns[id(node.outputs[0])] = [
                    np.arange(s.start * dim, s.stop * dim) for s in share]
        elif node.op in ELEMENTWISE or _selects_rows(node):
            cut = next((plan.columns[id(t)] for t in node.inputs
                        if id(t) in plan.columns and id(t) not in plan.gather), None)
            if cut is not None:
                plan.sharded_nodes.add(id(node))
                plan.columns[id(node.outputs[0])] = cut
    for node in graph.nodes:
        for index, tensor in enumerate(node.inputs):
            if id(tensor) in plan.partial and not (
                    is_llmc(node, "GemmBiasRes") and index == 3
                    and id(node.outputs[0]) in plan.partial and len(consumers(graph, tensor)) == 1):
                plan.reduce.add(id(tensor))
    plan.reduce.update(id(t) for t in graph.outputs if id(t) in plan.partial)
    return plan


def _plan_gemm(graph: gs.Graph, node: gs.Node, plan: Plan, is_head: bool) -> None:
    result = node.outputs[0]
    if id(node.inputs[0]) in plan.columns:  # behind a cut tensor: cut by columns, sum later
        plan.sharded_nodes.add(id(node))
        if node.op == "GemmBiasAct" and node.attrs.get("activation", "none") != "none":
            raise AssertionError(f"activation behind a partial sum in {node.name}")
        plan.partial.add(id(result))
        return
    width = weight(node.inputs[1]).shape[0] // (2 if node.op == "GatedMLP" else 1)
    if is_head:
        plan.sharded_nodes.add(id(node))
        plan.gather.add(id(result))
        size = width // plan.tp_size
        plan.columns[id(result)] = [np.arange(r * size, (r + 1) * size)
                                    for r in range(plan.tp_size)]
        return
    if node.op == "GemmBiasRes" or not _ends_in_gemms(graph, result):
        return  # replicated
    users = consumers(graph, result)
    attention = users[0] if len(users) == 1 and is_llmc(users[0], *ATTENTION) else None
    if attention is not None:
        heads, kv_heads, dim = (attention.attrs[key] for key in
                                ("num_heads", "num_kv_heads", "head_dim"))
        shares = share_heads(heads, kv_heads, plan.tp_size)
        plan.shares[id(result)] = shares
        if attention.op == "CausalAttention":
            plan.columns[id(result)] = [
                np.concatenate([_heads(range(s.start, s.stop), dim),
                                _heads(s.kv_heads, dim, heads),
                                _heads(s.kv_heads, dim, heads + kv_heads)]) for s in shares]
        else:
            plan.columns[id(result)] = [
                _heads(range(s.start, s.stop) if attention.inputs[0] is result else s.kv_heads, dim)
                for s in shares]
    else:
        if width < plan.tp_size:
            return
        ends = np.cumsum(_balanced(width, plan.tp_size))
        starts = np.concatenate([[0], ends[:-1]])
        plan.columns[id(result)] = [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
    plan.sharded_nodes.add(id(node))


def _heads(heads: range | tuple[int, ...], dim: int, offset: int = 0) -> np.ndarray:
    return np.concatenate([np.arange((h + offset) * dim, (h + offset + 1) * dim) for h in heads])


def _ends_in_gemms(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """Whether a cut tensor only reaches GEMMs, through attention or one-input row-wise ops."""
    for user in consumers(graph, tensor):
        if is_llmc(user, "GemmBiasAct", "GemmBiasRes"):
            if user.inputs[0] is not tensor or user.attrs.get("activation", "none") != "none" \
                    or any(t is tensor for t in user.inputs[1:]):
                return False
        elif is_llmc(user, *ATTENTION):
            if not _ends_in_gemms(graph, user.outputs[0]):
                return False
        elif user is None or is_llmc(user) or not (
                _selects_rows(user) or _one_input(user, tensor)) \
                or not _ends_in_gemms(graph, user.outputs[0]):
            return False
    return True


def _selects_rows(node: gs.Node) -> bool:
    """The Gather of the tokens whose logits are wanted."""
    return node.op == "Gather" and node.attrs.get("axis", 0) == 0 \
        and not isinstance(node.inputs[0], gs.Constant)


def _one_input(node: gs.Node, tensor: gs.Tensor) -> bool:
    return node.op in ELEMENTWISE and all(
        t is tensor or (isinstance(t, gs.Constant) and t.values.size == 1) for t in node.inputs)


class _Shards:
    """A rank's constants: equal cuts of one constant are one constant."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, bytes], gs.Constant] = {}

    def cut(self, tensor: gs.Tensor, axis: int, index: np.ndarray) -> gs.Constant:
        values = weight(tensor)
        key = (id(tensor._values), str(axis), index.tobytes())
        if key not in self._made:
            shard = values.take_rows(index) if axis == 0 else values.take_columns(index)
            self._made[key] = gs.Constant(tensor.name, shard)
        return self._made[key]

    def whole(self, tensor: gs.Constant) -> gs.Constant:
        key = (id(tensor._values), "whole", b"")
        if key not in self._made:
            self._made[key] = gs.Constant(tensor.name, tensor._values)
        return self._made[key]


def _rank_graph(graph: gs.Graph, plan: Plan, rank: int, shards: _Shards) -> gs.Graph:
    """The graph of one rank."""
    made: dict[int, gs.Tensor] = {}
    nodes: list[gs.Node] = []

    def tensor(original: gs.Tensor) -> gs.Tensor:
        if original.is_empty():
            return gs.Variable.empty()
        if isinstance(original, gs.Constant):
            return shards.whole(original)
        if id(original) not in made:
            shape = list(original.shape) if original.shape is not None else None
            if id(original) in plan.columns and shape:
                shape[-1] = len(plan.columns[id(original)][rank])
            made[id(original)] = gs.Variable(original.name, original.dtype, shape)
        return made[id(original)]

    for node in graph.nodes:
        inputs = [tensor(t) for t in node.inputs]
        outputs = [tensor(t) for t in node.outputs]
        attrs = dict(node.attrs)
        if id(node) in plan.sharded_nodes and is_llmc(node):
            _CUT[node.op](node, plan, rank, shards, inputs, outputs, attrs)
        copy = gs.Node(op=node.op, name=node.name, domain=node.domain, attrs=attrs, inputs=inputs,
                       outputs=outputs)
        nodes.append(copy)
        result = node.outputs[0]
        collective = "AllReduce" if id(result) in plan.reduce else \
            "AllGather" if id(result) in plan.gather else None
        if collective:
            part = gs.Variable(f"{result.name}.part", result.dtype, outputs[0].shape)
            copy.outputs[0] = part
            whole = gs.Variable(result.name, result.dtype, result.shape)
            made[id(result)] = whole
            nodes.append(gs.Node(op=collective, name=f"{node.name}.{collective}", domain="llmc",
                                 attrs={"tp_size": plan.tp_size}, inputs=[part],
                                 outputs=[whole]))
    ranked = gs.Graph(nodes=nodes, inputs=[tensor(t) for t in graph.inputs],
                      outputs=[tensor(t) for t in graph.outputs], opset=graph.opset)
    _resize_caches(ranked)
    return ranked


def _resize_caches(graph: gs.Graph) -> None:
    for node in graph.nodes:
        if is_llmc(node, "CausalAttention"):
            for cache in (*node.inputs[1:3], *node.outputs[1:3]):
                cache.shape = (cache.shape[0], node.attrs["num_kv_heads"], *cache.shape[2:])


def _cut_embedding(node, plan, rank, shards, inputs, outputs, attrs) -> None:
    rows = weight(node.inputs[1]).shape[0]
    counts = _balanced(rows, plan.tp_size)
    start = sum(counts[:rank])
    inputs[1] = shards.cut(node.inputs[1], 0, np.arange(start, start + counts[rank]))
    attrs.update(vocab_start=start, vocab_sharded=1)
    if rank:
        del inputs[2:]  # rank 0 adds the positions


def _cut_attention(node, plan, rank, shards, inputs, outputs, attrs) -> None:
    share = plan.shares[id(node)][rank]
    attrs.update(num_heads=share.stop - share.start, num_kv_heads=len(share.kv_heads))
    bias = plugins.registry()[node.op].input_names.index("distance_bias")
    if len(inputs) > bias:
        inputs[bias] = shards.cut(node.inputs[bias], 0, np.arange(share.start, share.stop))


def _cut_gemm(node, plan, rank, shards, inputs, outputs, attrs) -> None:
    if id(node.inputs[0]) in plan.columns:  # by columns; rank 0 adds bias and residual
        columns = plan.columns[id(node.inputs[0])][rank]
        inputs[1] = shards.cut(node.inputs[1], 1, columns)
        partial_residual = len(node.inputs) > 3 and id(node.inputs[3]) in plan.partial \
            and id(node.inputs[3]) not in plan.reduce
        if rank:
            residual = inputs[3:] if partial_residual else []
            del inputs[2:]
            if residual:
                inputs.extend([gs.Variable.empty(), *residual])
        return
    rows = plan.columns[id(node.outputs[0])][rank]
    if node.op == "GatedMLP":
        rows = np.concatenate([rows, rows + weight(node.inputs[1]).shape[0] // 2])
    for index in range(1, len(node.inputs)):
        inputs[index] = shards.cut(node.inputs[index], 0, rows)


_CUT = {
    "Embedding": _cut_embedding,
    "CausalAttention": _cut_attention,
    "BidirectionalAttention": _cut_attention,
    "GemmBiasAct": _cut_gemm,
    "GemmBiasRes": _cut_gemm,
    "GatedMLP": _cut_gemm,
}
