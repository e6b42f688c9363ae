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
from llmc.plugins.attention.op import _LENGTHS

KINDS = ("cls", "mean", "last")


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    return {"x": ("num_tokens", "hidden"), "cu_seqlens": ("batch_plus_1",)}


def _shapes(shapes: Mapping[str, Shape], fields: Fields) -> list[Shape]:
    ends = shapes["cu_seqlens"][0]
    return [(ends - 1 if isinstance(ends, int) else "batch", shapes["x"][-1])]


def _body(fields: Fields, present: frozenset[str]) -> str:
    last_row = ["num_tokens = Shape<start=0, end=1>(x)", "final = Sub(num_tokens, c1)"]
    if fields["kind"] == "cls":
        return "\n".join([*_LENGTHS, *last_row, "row = Min(starts, final)",
                          "y = Gather<axis=0>(x, row)"])
    if fields["kind"] == "last":
        return "\n".join([*_LENGTHS, "before_end = Sub(ends, one)", "row = Max(before_end, zero)",
                          "y = Gather<axis=0>(x, row)"])
    return "\n".join([*_LENGTHS, *_mean("y")])


def _mean(made: str, own: str = "") -> list[str]:
    """Return ONNX text for the mean of each sequence; `own` as in attention's `_places`."""
    zero, one, c1 = f"zero{own}", f"one{own}", f"c1{own}"
    constants = [f"{zero} = Constant<value_int=0>()", f"{one} = Constant<value_int=1>()",
                 f"{c1} = Constant<value_ints=[1]>()"] if own else []
    return [
        *constants,
        "num_tokens = Shape<start=0, end=1>(x)",
        f"final = Sub(num_tokens, {c1})",
        f"step = Range({zero}, longest, {one})",
        f"starts_column = Unsqueeze(starts, {c1})",
        "beyond = Add(starts_column, step)",
        "pad = Min(beyond, final)",  # [batch, longest]: arbitrary for padding
        "padded = Gather<axis=0>(x, pad)",
        f"lengths_column = Unsqueeze(lengths, {c1})",
        "inside = Less(step, lengths_column)",
        "c2 = Constant<value_ints=[2]>()",
        "mask = Unsqueeze(inside, c2)",
        "nothing = Constant<value_float=0.0>()",
        "own = Where(mask, padded, nothing)",
        f"total = ReduceSum<keepdims=0>(own, {c1})",
        f"at_least_one = Max(lengths_column, {one})",
        "count = Cast<to=1>(at_least_one)",
        f"{made} = Div(total, count)",
    ]


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    """Average sequences of one length, such as a single one, without copies."""
    if fields["kind"] != "mean":
        return None
    return "\n".join([
        *_LENGTHS, "shortest = ReduceMin<keepdims=0>(lengths)", "even = Equal(shortest, longest)",
        "y = If(even) <then_branch = whole () => (float[b, h] y_whole) {",
        "batch = Shape(lengths)", "width = Shape<start=1, end=2>(x)",
        "any_number = Constant<value_ints=[-1]>()", "second = Constant<value_ints=[1]>()",
        "longest_1d = Reshape(longest, any_number)",
        "whole_shape = Concat<axis=0>(batch, longest_1d, width)",
        "x_whole = Reshape<allowzero=1>(x, whole_shape)",
        "y_whole = ReduceMean<keepdims=0>(x_whole, second)",
        "}, else_branch = padded () => (float[b, h] y_padded) {",
        *_mean("y_padded", "_own"), "}>"])


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
    bodies={"cpu": _cpu},
    pools=True,
    integer_inputs=frozenset({"cu_seqlens"}),
    reference=_reference,
    samples=_samples,
)
