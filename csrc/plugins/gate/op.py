"""y = x * activation(gate), elementwise.

x, gate, y  [num_tokens, width]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.roles import Columns


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    return {"x": ("rows", "width"), "gate": ("rows", "width")}


def _body(fields: Fields, present: frozenset[str]) -> str:
    return activation_text(fields["activation"], "gate", "factor") + "\ny = Mul(x, factor)"


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x, gate = (inputs[name].astype(np.float64) for name in ("x", "gate"))
    return [x * REFERENCE[fields["activation"]](gate)]


def _samples(rng: np.random.Generator) -> list[Sample]:
    return [Sample({"activation": activation}, {
        name: rng.standard_normal((rows, width)).astype(np.float32) for name in ("x", "gate")})
        for rows, width, activation in ((3, 16, "sigmoid"), (1, 1040, "silu"), (5, 7, "none"),
                                        (2, 24, "gelu_tanh"))]


OP = Op(
    name="Gate",
    version=1,
    inputs=("x", "gate"),
    outputs=("y",),
    fields={"activation": "none"},
    choices={"activation": tuple(REFERENCE)},
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=_dims,
    columns=(Columns("x"), Columns("gate", activation="activation")),
    body=_body,
    reference=_reference,
    samples=_samples,
)
