"""RMSNorm over each of `groups` equal parts of a row, with an optional gate.

    y = x * rsqrt(mean(x^2) + epsilon) * weight * activation(gate)

With `gate_first`, x is multiplied by the gate before the norm.

    x, gate, y  [num_tokens, hidden]
    weight      [hidden]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.roles import ByGroups, Columns

ACTIVATIONS = ("none", "silu", "sigmoid")  # of gates


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    if fields["groups"] < 1:
        raise ValueError(f"groups {fields['groups']} is below 1")
    if "gate" not in present and (fields["gate_first"] or fields["activation"] != "none"):
        raise ValueError("GroupRMSNorm has no gate, so it takes no activation and no gate_first")
    hidden = f"{fields['groups']} * width"
    return {"x": ("rows", hidden), "weight": (hidden,), "gate": ("rows", hidden)}


def _body(fields: Fields, present: frozenset[str]) -> str:
    gated, first = "gate" in present, fields["gate_first"]
    lines = [activation_text(fields["activation"], "gate", "factor")] if gated else []
    lines.append("given = Mul(x, factor)" if gated and first else "given = Identity(x)")
    return "\n".join([
        *lines,
        "last = Constant<value_ints=[-1]>()",
        f"groups = Constant<value_ints=[{fields['groups']}]>()",
        "hidden = Shape(weight)", "width = Div(hidden, groups)",
        "groups_shape = Concat<axis=0>(last, groups, width)",
        "parts = Reshape(given, groups_shape)",
        "squares = Mul(parts, parts)",
        "mean_square = ReduceMean<keepdims=1>(squares, last)",
        f"epsilon = Constant<value_float={fields['epsilon']!r}>()",
        "above = Add(mean_square, epsilon)", "root = Sqrt(above)",
        "normed = Div(parts, root)",
        "shape = Shape(x)", "rows = Reshape(normed, shape)", "weighed = Mul(rows, weight)",
        "y = Mul(weighed, factor)" if gated and not first else "y = Identity(weighed)",
    ])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x = inputs["x"].astype(np.float64)
    factor = REFERENCE[fields["activation"]](inputs["gate"].astype(np.float64)) \
        if "gate" in inputs else 1.0
    if fields["gate_first"]:
        x, factor = x * factor, 1.0
    groups = fields["groups"]
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    normed = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + fields["epsilon"])
    return [normed.reshape(x.shape) * inputs["weight"] * factor]


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(tokens: int, groups: int, hidden: int, epsilon: float, gated: bool = False,
               **fields: int | str) -> Sample:
        inputs = {"x": rng.standard_normal((tokens, hidden)).astype(np.float32),
                  "weight": rng.standard_normal(hidden).astype(np.float32)}
        if gated:
            inputs["gate"] = rng.standard_normal((tokens, hidden)).astype(np.float32)
        return Sample({"groups": groups, "epsilon": epsilon, **fields}, inputs)

    return [
        sample(3, 4, 16, 1e-5), sample(1, 1, 7, 1e-2), sample(5, 3, 96, 1e-6),
        sample(3, 4, 64, 1e-6, gated=True, activation="silu"),
        sample(2, 3, 21, 1e-5, gated=True, activation="sigmoid"),
        sample(4, 2, 48, 1e-5, gated=True, activation="silu", gate_first=1),
        sample(1, 1, 40, 1e-5, gated=True, gate_first=1),
    ]


OP = Op(
    name="GroupRMSNorm",
    version=2,
    inputs=("x", "weight", "gate?"),
    outputs=("y",),
    fields={"groups": 0, "epsilon": 1e-6, "activation": "none", "gate_first": 0},
    required=("groups",),
    choices={"activation": ACTIVATIONS, "gate_first": (0, 1)},
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=_dims,
    shard=(ByGroups("groups", ("weight",)),),
    columns=(Columns("gate", activation="activation"),),
    body=_body,
    float32_inputs=frozenset({"weight"}),
    reference=_reference,
    samples=_samples,
)
