"""Distribution of heads and columns among ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.probe import ELEMENTWISE
from llmc.compiler.graph.rewrite import (
    consumers,
    fields_of,
    is_llmc,
    operand,
    operands,
    shard_of,
    values_of,
)
from llmc.compiler.quant.scheme import SMALLEST_GROUP
from llmc.plugins.roles import ByColumns, ByElements

_UNITS = (32, 16, 8, 4, 2)  # columns that stay together if whole groups cannot


@dataclass(frozen=True)
class HeadShare:
    """One rank's heads: query heads `[start, stop)` and the indices of its KV heads."""

    start: int
    stop: int
    kv_heads: tuple[int, ...]


def share_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> list[HeadShare]:
    """Divide query and KV heads among ranks, with whole query groups of equal size per rank."""
    group = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        counts = balanced(num_kv_heads, tp_size)
        ends = np.cumsum(counts)
        return [HeadShare(int(end - n) * group, int(end) * group,
                          tuple(range(int(end - n), int(end))))
                for n, end in zip(counts, ends, strict=True)]
    shares = []
    for kv_head, ranks in enumerate(balanced(tp_size, num_kv_heads)):
        start = kv_head * group
        for count in balanced(group, ranks):
            shares.append(HeadShare(start, start + count, (kv_head,)))
            start += count
    return shares


def balanced(total: int, parts: int) -> list[int]:
    """Divide `total` into `parts` that differ by at most one, larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def deal_columns(width: int, parts: int, together: int) -> list[np.ndarray]:
    """Divide columns among ranks.

    Args:
        width: number of columns.
        parts: number of ranks.
        together: columns that share a scale.

    Returns:
        Each part's columns: whole groups if possible, else equal parts, if they consist of groups
        that kernels support, else other parts that do, else even numbers of columns.
    """
    units = [unit for unit in (together, 1, *_UNITS) if unit <= together and width % unit == 0
             and width // unit >= parts]
    dealt = [np.split(np.arange(width), np.cumsum(balanced(width // unit, parts))[:-1] * unit)
             for unit in units]
    groups = [math.gcd(together, *map(len, columns)) for columns in dealt]
    place = next((place for place, size in enumerate(groups) if size >= SMALLEST_GROUP), None)
    if place is None:
        place = next((place for place, size in enumerate(groups) if size % 2 == 0), units.index(1))
    return dealt[place]


def columns_together(graph: gs.Graph, tensor: gs.Tensor, group_size: int) -> int:
    """The number of columns of a tensor that share a scale of its reader's weight.

    Readers are followed through elementwise ops. A weight without a storage format has groups of
    `group_size`.
    """
    found = [1]
    for user in consumers(graph, tensor):
        way = shard_of(user, ByColumns)
        if user is not None and way is not None and operand(user, way.x) is tensor:
            stored = values_of(operands(user)[way.inputs[0]]).stored
            found.append(stored.group_size if stored is not None else group_size)
        elif user is not None and (shard_of(user, ByElements) is not None or (
                not is_llmc(user) and (user.op in ELEMENTWISE or selects_rows(user)))):
            found.append(columns_together(graph, user.outputs[0], group_size))
    return max(found)


def head_columns(share: HeadShare, kinds: Sequence[tuple[int, int, bool]]) -> np.ndarray:
    """A rank's columns of a tensor of concatenated heads.

    Args:
        share: the rank's heads.
        kinds: for each kind: number of heads, their size, whether they are query heads.
    """
    first, parts = 0, []
    for count, dim, by_query in kinds:
        heads = range(share.start, share.stop) if by_query else share.kv_heads
        parts += [np.arange(first + h * dim, first + (h + 1) * dim) for h in heads]
        first += count * dim
    return np.concatenate(parts)


def is_linear(node: gs.Node, way: ByColumns) -> bool:
    fields = fields_of(node)
    return all(fields[name] == value for name, value in way.only_if.items())


def selects_columns(node: gs.Node) -> bool:
    """Whether a node is a Gather of constant columns, possibly repeated."""
    return node.op == "Gather" and node.attrs.get("axis", 0) == -1 \
        and isinstance(node.inputs[1], gs.Constant)


def selects_rows(node: gs.Node) -> bool:
    """Whether a node is the Gather of tokens whose logits are requested."""
    return node.op == "Gather" and node.attrs.get("axis", 0) == 0 \
        and not isinstance(node.inputs[0], gs.Constant)
