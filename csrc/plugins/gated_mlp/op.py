"""y = activation(x * Wg^T + bg) * (x * Wu^T + bu), with Wg above Wu in one weight [2 * I, K].

With an `out_scale`, y is divided by it and quantized to float8_e4m3fn.
"""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.lora import adaptable
from llmc.plugins.quantization import (
    cpu_product,
    linear,
    product,
    quantizable,
    rounds_output,
)
from llmc.plugins.roles import ByRows


def _gate(fields: Fields) -> str:
    return "\n".join(["gate, up = Split<axis=-1, num_outputs=2>(both)",
                      activation_text(fields["activation"], "gate", "active"),
                      "y = Mul(active, up)"])


def _body(fields: Fields, present: frozenset[str]) -> str:
    lines = [product(fields, present, "m")]
    lines.append("both = Add(m, bias)" if "bias" in present else "both = Identity(m)")
    return "\n".join([*lines, _gate(fields)])


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    bias = "bias" if "bias" in present else ""
    return f"{cpu_product(fields, present, 'both', added=bias)}\n{_gate(fields)}"


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    y = linear(fields, inputs)
    gate, up = np.split(y + inputs.get("bias", 0.0), 2, axis=-1)
    return [REFERENCE[fields["activation"]](gate) * up]


def _samples(rng: np.random.Generator) -> list[Sample]:
    made = []
    for index, activation in enumerate(("silu", "gelu_tanh", "gelu", "relu", "silu")):
        rows = 32 if index == 4 else 14
        inputs = {"x": rng.standard_normal((3, 10)).astype(np.float32),
                  "weight": rng.standard_normal((rows, 10)).astype(np.float32)}
        if index % 2:
            inputs["bias"] = rng.standard_normal(rows).astype(np.float32)
        made.append(Sample({"activation": activation}, inputs))
    return made


OP = adaptable(rounds_output(quantizable(Op(
    name="GatedMLP",
    version=1,
    inputs=("x", "weight", "bias?"),
    outputs=("y",),
    fields={"activation": "silu"},
    choices={"activation": tuple(REFERENCE)},
    shapes=lambda shapes, fields: [(*shapes["x"][:-1], int(shapes["weight"][0]) // 2)],
    dims=lambda fields, present: {
        "x": ("rows", "in"), "weight": ("2 * out", "in"), "bias": ("2 * out",)},
    shard=(ByRows(("weight", "bias"), stacked=2),),
    body=_body,
    bodies={"cpu": _cpu},
    reference=_reference,
    samples=_samples,
)), lambda fields, present: True))
