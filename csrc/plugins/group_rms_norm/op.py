"""RMSNorm over each of `groups` equal parts of a row: y = x · rsqrt(mean(x²) + epsilon) · weight.

    x, y    [num_tokens, hidden]
    weight  [hidden]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.roles import ByGroups


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    if fields["groups"] < 1:
        raise ValueError(f"groups {fields['groups']} is below 1")
    hidden = f"{fields['groups']} * width"
    return {"x": ("rows", hidden), "weight": (hidden,)}


def _body(fields: Fields, present: frozenset[str]) -> str:
    return "\n".join([
        "last = Constant<value_ints=[-1]>()",
        f"groups = Constant<value_ints=[{fields['groups']}]>()",
        "hidden = Shape(weight)", "width = Div(hidden, groups)",
        "groups_shape = Concat<axis=0>(last, groups, width)",
        "parts = Reshape(x, groups_shape)",
        "squares = Mul(parts, parts)",
        "mean_square = ReduceMean<keepdims=1>(squares, last)",
        f"epsilon = Constant<value_float={fields['epsilon']!r}>()",
        "above = Add(mean_square, epsilon)", "root = Sqrt(above)",
        "normed = Div(parts, root)",
        "shape = Shape(x)", "rows = Reshape(normed, shape)", "y = Mul(rows, weight)",
    ])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x = inputs["x"].astype(np.float64)
    groups = fields["groups"]
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    normed = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + fields["epsilon"])
    return [normed.reshape(x.shape) * inputs["weight"]]


def _samples(rng: np.random.Generator) -> list[Sample]:
    return [Sample({"groups": groups, "epsilon": epsilon},
                   {"x": rng.standard_normal((tokens, hidden)).astype(np.float32),
                    "weight": rng.standard_normal(hidden).astype(np.float32)})
            for tokens, groups, hidden, epsilon in ((3, 4, 16, 1e-5), (1, 1, 7, 1e-2),
                                                    (5, 3, 96, 1e-6))]


OP = Op(
    name="GroupRMSNorm",
    version=1,
    inputs=("x", "weight"),
    outputs=("y",),
    fields={"groups": 0, "epsilon": 1e-6},
    required=("groups",),
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=_dims,
    shard=(ByGroups("groups", ("weight",)),),
    body=_body,
    float32_inputs=frozenset({"weight"}),
    reference=_reference,
    samples=_samples,
)
