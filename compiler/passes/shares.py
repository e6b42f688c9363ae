"""How heads and columns are dealt out among ranks."""

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

_UNITS = (32, 16, 8, 4, 2)  # columns that chips may share in place of those that share a scale


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
    """`total` in `parts` that differ by at most one, the larger first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def deal_columns(width: int, parts: int, together: int) -> list[np.ndarray]:
    """The columns of each part, where so many share a scale: in whole groups, else as many each, if
    that leaves parts of groups that kernels have, else in such parts, else in even numbers.
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
    """How many columns of a tensor share a scale of the weight that multiplies it, or what is made
    of it element by element; a weight has groups of `group_size` if it is not stored in others.
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
    """What a rank has of a tensor that holds heads one behind the other: of each kind how many
    there are, their size, and whether queries choose them, or KV heads.
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
    """A Gather of columns that are known, some perhaps often."""
    return node.op == "Gather" and node.attrs.get("axis", 0) == -1 \
        and isinstance(node.inputs[1], gs.Constant)


def selects_rows(node: gs.Node) -> bool:
    """The Gather of the tokens whose logits are wanted."""
    return node.op == "Gather" and node.attrs.get("axis", 0) == 0 \
        and not isinstance(node.inputs[0], gs.Constant)
