"""Pooling of packed tokens to one row per sequence.

Sequence b is in rows cu_seqlens[b] to cu_seqlens[b + 1].

    x               [num_tokens, hidden]
    cu_seqlens      int32 [batch + 1]
    y               [batch, hidden]

`kind` is `cls` (the first token), `last` (the last token) or `mean` (the mean of all tokens). The
row of a sequence without tokens is arbitrary.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape

KINDS = ("cls", "mean", "last")


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    return {"x": ("num_tokens", "hidden"), "cu_seqlens": ("batch_plus_1",)}


def _shapes(shapes: Mapping[str, Shape], fields: Fields) -> list[Shape]:
    ends = shapes["cu_seqlens"][0]
    return [(ends - 1 if isinstance(ends, int) else "batch", shapes["x"][-1])]


def _body(fields: Fields, present: frozenset[str]) -> str:
    lines = [
        "c0 = Constant<value_ints=[0]>()", "c1 = Constant<value_ints=[1]>()",
        "last = Constant<value_ints=[-1]>()", "int_max = Constant<value_ints=[2147483647]>()",
        "zero = Constant<value_int=0>()", "one = Constant<value_int=1>()",
        "cu = Cast<to=7>(cu_seqlens)",
        "starts = Slice(cu, c0, last)",
        "ends = Slice(cu, c1, int_max)",
        "num_tokens = Shape<start=0, end=1>(x)",
        "final = Sub(num_tokens, c1)",
    ]
    if fields["kind"] == "cls":
        return "\n".join([*lines, "row = Min(starts, final)", "y = Gather<axis=0>(x, row)"])
    if fields["kind"] == "last":
        return "\n".join([*lines, "before_end = Sub(ends, one)", "row = Max(before_end, zero)",
                          "y = Gather<axis=0>(x, row)"])
    return "\n".join([
        *lines,
        "lengths = Sub(ends, starts)",
        "longest = ReduceMax<keepdims=0>(lengths)",
        "step = Range(zero, longest, one)",
        "starts_column = Unsqueeze(starts, c1)",
        "beyond = Add(starts_column, step)",
        "pad = Min(beyond, final)",  # [batch, longest]: arbitrary for padding
        "padded = Gather<axis=0>(x, pad)",
        "lengths_column = Unsqueeze(lengths, c1)",
        "inside = Less(step, lengths_column)",
        "c2 = Constant<value_ints=[2]>()",
        "mask = Unsqueeze(inside, c2)",
        "nothing = Constant<value_float=0.0>()",
        "own = Where(mask, padded, nothing)",
        "total = ReduceSum<keepdims=0>(own, c1)",
        "at_least_one = Max(lengths_column, one)",
        "count = Cast<to=1>(at_least_one)",
        "y = Div(total, count)",
    ])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x, begins = inputs["x"].astype(np.float64), inputs["cu_seqlens"]
    each = [x[start:end] for start, end in pairwise(begins)]
    if fields["kind"] == "mean":
        return [np.stack([rows.mean(0) for rows in each])]
    return [np.stack([rows[0 if fields["kind"] == "cls" else -1] for rows in each])]


def _samples(rng: np.random.Generator) -> list[Sample]:
    return [Sample({"kind": kind}, {
        "x": rng.standard_normal((sum(lengths), 12)).astype(np.float32),
        "cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32)})
        for kind in KINDS for lengths in ((5, 1, 3), (4,), (1, 1))]


OP = Op(
    name="Pool",
    version=1,
    inputs=("x", "cu_seqlens"),
    outputs=("y",),
    fields={"kind": "mean"},
    choices={"kind": KINDS},
    shapes=_shapes,
    dims=_dims,
    body=_body,
    pools=True,
    integer_inputs=frozenset({"cu_seqlens"}),
    reference=_reference,
    samples=_samples,
)
