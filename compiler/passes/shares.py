"""How heads and columns are dealt out among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import fields_of
from llmc.plugins.roles import ByColumns


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
