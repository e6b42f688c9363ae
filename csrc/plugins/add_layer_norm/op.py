"""sum = x + residual; y = LayerNorm(sum).

ONNX Runtime's SkipLayerNormalization takes 2 to 9 times as long on CPUs as the two ops of the body
(1.32; 512 rows of 384 columns: 1,056 and 150 us).
"""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op
from llmc.plugins.normalization import norm_dims, norm_samples, normalize


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    total = inputs["x"].astype(float) + inputs["residual"]
    return [normalize(total, fields, inputs, centred=True), total]


def _bias(present: frozenset[str]) -> str:
    return ", bias" if "bias" in present else ""


OP = Op(
    name="AddLayerNorm",
    version=1,
    inputs=("x", "residual", "weight", "bias?"),
    outputs=("y", "sum"),
    fields={"epsilon": 1e-5},
    shapes=lambda shapes, fields: [shapes["x"], shapes["x"]],
    dims=norm_dims,
    body=lambda fields, present: "sum = Add(x, residual)\n"
        f"y = LayerNormalization<axis=-1, epsilon={fields['epsilon']!r}>"
        f"(sum, weight{_bias(present)})",
    float32_inputs=frozenset({"weight", "bias"}),
    reference=_reference,
    samples=norm_samples(residual=True, bias=True),
)
