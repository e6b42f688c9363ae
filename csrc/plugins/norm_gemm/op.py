"""y = activation(norm(x) * weight^T + bias): a norm fused with the only GEMM that reads it.

The norm's weight and bias are folded into `weight` and `bias`, or are `norm_weight` and
`norm_bias`. `centred`: LayerNorm, otherwise RMSNorm. `gated`: the GEMM of GatedMLP, with a weight
[2 * out, in] and an optional `out_scale`. `row_sums` has the sum of each row of `weight`, with
which a kernel subtracts the mean after the product; a centred op without norm_weight has it.
"""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.lora import adaptable, adapter_product, normed_text, normed_x, takes_adapters
from llmc.plugins.normalization import normalize
from llmc.plugins.quantization import activations, product, quantizable, rounds_output


def _body(fields: Fields, present: frozenset[str]) -> str:
    lines = ["width = Shape<start=-1>(x)", "one = Constant<value_float=1.0>()",
             "flat = Expand(one, width)"]
    gain = "norm_weight" if "norm_weight" in present else "flat"
    lines += [f"n0 = {'LayerNormalization' if fields['centred'] else 'RMSNormalization'}"
              f"<axis=-1, epsilon={fields['epsilon']!r}>(x, {gain})",
              "n = Add(n0, norm_bias)" if "norm_bias" in present else "n = Identity(n0)",
              *(normed_text(present, "n", "lora_x") if takes_adapters(present) else ()),
              product(fields, present, "m", "n", "lora_x"),
              "b = Add(m, bias)" if "bias" in present else "b = Identity(m)"]
    if fields["gated"]:
        lines += ["gate, up = Split<axis=-1, num_outputs=2>(b)",
                  activation_text(fields["activation"], "gate", "active"), "y = Mul(active, up)"]
    else:
        lines.append(activation_text(fields["activation"], "b", "y"))
    return "\n".join(lines)


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    if fields["centred"] and not present & {"row_sums", "norm_weight"}:
        raise ValueError("a centred NormGemm needs row_sums")
    rows = "2 * out" if fields["gated"] else "out"
    return {"x": ("rows", "in"), "weight": (rows, "in"), "bias": (rows,), "row_sums": (rows,),
            "norm_weight": ("in",), "norm_bias": ("in",)}


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x = normalize(inputs["x"], fields, {"weight": inputs.get("norm_weight", 1.0),
                                        "bias": inputs.get("norm_bias", 0.0)},
                  centred=bool(fields["centred"]))
    y = activations(fields, x) @ inputs["weight"].astype(np.float64).T + inputs.get("bias", 0.0)
    y += adapter_product(inputs, normed_x(inputs, x))
    if fields["gated"]:
        gate, up = np.split(y, 2, axis=-1)
        return [REFERENCE[fields["activation"]](gate) * up]
    return [REFERENCE[fields["activation"]](y)]


def _samples(rng: np.random.Generator) -> list[Sample]:
    made = []
    for rows, centred, gated, activation, own in (
            (1, 0, 1, "silu", ()), (2, 1, 0, "gelu_tanh", ()), (5, 1, 1, "relu", ()),
            (3, 0, 0, "none", ()), (4, 0, 1, "silu", ("norm_weight",)),
            (4, 0, 1, "gelu", ("norm_weight",)),
            (3, 1, 0, "none", ("norm_weight", "norm_bias"))):
        inputs = {"x": rng.standard_normal((rows, 24)).astype(np.float32),
                  "weight": rng.standard_normal((32 if activation == "gelu" else 14, 24))
                  .astype(np.float32)}
        if centred:
            inputs["bias"] = rng.standard_normal(14).astype(np.float32)
            if not own:
                inputs["row_sums"] = inputs["weight"].sum(1)
        inputs.update({name: rng.standard_normal(24).astype(np.float32) for name in own})
        made.append(Sample({"centred": centred, "gated": gated, "activation": activation,
                            "epsilon": 1e-5}, inputs))
    return made


OP = adaptable(rounds_output(quantizable(Op(
    name="NormGemm",
    version=2,
    inputs=("x", "weight", "bias?", "row_sums?", "norm_weight?", "norm_bias?"),
    outputs=("y",),
    fields={"centred": 0, "epsilon": 1e-6, "activation": "none", "gated": 0},
    choices={"activation": tuple(REFERENCE), "centred": (0, 1), "gated": (0, 1)},
    shapes=lambda shapes, fields: [
        (*shapes["x"][:-1], int(shapes["weight"][0]) // (2 if fields["gated"] else 1))],
    dims=_dims,
    body=_body,
    float32_inputs=frozenset({"row_sums", "norm_weight", "norm_bias"}),
    reference=_reference,
    samples=_samples,
), row_sums="row_sums"), lambda fields, present: bool(fields["gated"])), norms=True)
