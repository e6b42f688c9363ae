"""y = x * weight^T + bias + residual, weight [out, in]; x may be of `x_dtype`."""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample
from llmc.plugins.lora import adaptable
from llmc.plugins.quantization import cpu_product, linear, product, quantizable
from llmc.plugins.roles import ByColumns


def _body(fields: Fields, present: frozenset[str]) -> str:
    lines, result = [product(fields, present, "m0")], "m0"
    for index, term in enumerate(("bias", "residual"), 1):
        if term in present:
            lines.append(f"m{index} = Add({result}, {term})")
            result = f"m{index}"
    return "\n".join([*lines, f"y = Identity({result})"])


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    """Use the residual as the C operand of Gemm, so that adding it is free."""
    if "residual" not in present:
        return cpu_product(fields, present, "y", added="bias" if "bias" in present else "")
    if "bias" not in present:
        return cpu_product(fields, present, "y", added="residual")
    return f"{cpu_product(fields, present, 'm', added='residual')}\ny = Add(m, bias)"


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    y = linear(fields, inputs)
    return [y + inputs.get("bias", 0.0) + inputs.get("residual", 0.0)]


def _samples(rng: np.random.Generator) -> list[Sample]:
    inputs = {"x": rng.standard_normal((3, 10)).astype(np.float32),
              "weight": rng.standard_normal((7, 10)).astype(np.float32)}
    bias = {"bias": rng.standard_normal(7).astype(np.float32)}
    residual = {"residual": rng.standard_normal((3, 7)).astype(np.float32)}
    return [Sample({}, {**inputs, **extra})
            for extra in ({}, bias, residual, {**bias, **residual})]


OP = adaptable(quantizable(Op(
    name="GemmBiasRes",
    version=1,
    inputs=("x", "weight", "bias?", "residual?"),
    outputs=("y",),
    fields={},
    shapes=lambda shapes, fields: [(*shapes["x"][:-1], shapes["weight"][0])],
    dims=lambda fields, present: {"x": ("rows", "in"), "weight": ("out", "in"), "bias": ("out",),
                                  "residual": ("rows", "out")},
    shard=(ByColumns(("weight",), added=("bias", "residual")),),
    body=_body,
    bodies={"cpu": _cpu},
    reference=_reference,
    samples=_samples,
), takes_rounded=True))
