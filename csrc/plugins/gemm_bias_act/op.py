"""y = activation(x * weight^T + bias), weight [out, in]; x may be of `x_dtype`."""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.lora import adaptable
from llmc.plugins.quantization import cpu_product, linear, product, quantizable
from llmc.plugins.roles import ByColumns, ByRows


def _body(fields: Fields, present: frozenset[str]) -> str:
    lines = [product(fields, present, "m")]
    lines.append("b = Add(m, bias)" if "bias" in present else "b = Identity(m)")
    return "\n".join([*lines, activation_text(fields["activation"], "b", "y")])


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    bias = "bias" if "bias" in present else ""
    if fields["activation"] == "none":
        return cpu_product(fields, present, "y", added=bias)
    return (f"{cpu_product(fields, present, 'b', added=bias)}\n"
            f"{activation_text(fields['activation'], 'b', 'y')}")


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    y = linear(fields, inputs)
    return [REFERENCE[fields["activation"]](y + inputs.get("bias", 0.0))]


def _samples(rng: np.random.Generator) -> list[Sample]:
    made = []
    for index, activation in enumerate(REFERENCE):
        inputs = {"x": rng.standard_normal((3, 10)).astype(np.float32),
                  "weight": rng.standard_normal((7, 10)).astype(np.float32)}
        if index % 2:
            inputs["bias"] = rng.standard_normal(7).astype(np.float32)
        made.append(Sample({"activation": activation}, inputs))
    return made


OP = adaptable(quantizable(Op(
    name="GemmBiasAct",
    version=1,
    inputs=("x", "weight", "bias?"),
    outputs=("y",),
    fields={"activation": "none"},
    choices={"activation": tuple(REFERENCE)},
    shapes=lambda shapes, fields: [(*shapes["x"][:-1], shapes["weight"][0])],
    dims=lambda fields, present: {
        "x": ("rows", "in"), "weight": ("out", "in"), "bias": ("out",)},
    shard=(ByColumns(("weight",), added=("bias",), only_if={"activation": "none"}),
           ByRows(("weight", "bias"))),
    body=_body,
    bodies={"cpu": _cpu},
    reference=_reference,
    samples=_samples,
), takes_rounded=True))
