"""sum = x + residual; y = RMSNorm(sum).

ONNX Runtime's SkipSimplifiedLayerNormalization takes 1.2 to 2.9 times as long on CPUs as the two
ops of the body (1.32; 512 rows of 384 columns: 230 and 90 us).
"""

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
    float32_inputs=frozenset({"weight"}),
    reference=_reference,
    samples=norm_samples(residual=True, bias=False),
)
