"""sum = x + residual; y = RMSNorm(sum)."""

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op
from llmc.plugins.normalization import norm_dims, norm_samples, normalize


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    total = inputs["x"].astype(float) + inputs["residual"]
    return [normalize(total, fields, inputs, centred=False), total]


OP = Op(
    name="AddRMSNorm",
    version=1,
    inputs=("x", "residual", "weight"),
    outputs=("y", "sum"),
    fields={"epsilon": 1e-6},
    shapes=lambda shapes, fields: [shapes["x"], shapes["x"]],
    dims=norm_dims,
    body=lambda fields, present: "sum = Add(x, residual)\n"
        f"y = RMSNormalization<axis=-1, epsilon={fields['epsilon']!r}>(sum, weight)",
    bodies={"cpu": lambda fields, present:
            "y, mean, scale, sum = com.microsoft.SkipSimplifiedLayerNormalization"
            f"<epsilon={fields['epsilon']!r}>(x, residual, weight)"},
    float32_inputs=frozenset({"weight"}),
    reference=_reference,
    samples=norm_samples(residual=True, bias=False),
)
