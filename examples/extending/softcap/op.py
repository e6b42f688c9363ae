"""y = cap · tanh(x / cap), element by element.

    x, y  [num_tokens, width]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    return {"x": ("rows", "width")}


def _body(fields: Fields, present: frozenset[str]) -> str:
    return f"""cap = Constant <value_float = {fields["cap"]}> ()
small = Div(x, cap)
bounded = Tanh(small)
y = Mul(bounded, cap)"""


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x = inputs["x"].astype(np.float64)
    return [fields["cap"] * np.tanh(x / fields["cap"])]


def _samples(rng: np.random.Generator) -> list[Sample]:
    return [Sample({"cap": cap}, {"x": 40 * rng.standard_normal((3, 16)).astype(np.float32)})
            for cap in (30.0, 2.5)]


OP = Op(
    name="Softcap",
    version=1,
    inputs=("x",),
    outputs=("y",),
    fields={"cap": 30.0},
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=_dims,
    body=_body,
    reference=_reference,
    samples=_samples,
)
