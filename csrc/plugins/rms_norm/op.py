"""y = x * rsqrt(mean(x^2) + epsilon) * weight over the last axis."""

from llmc.plugins import Op
from llmc.plugins.normalization import norm_dims, norm_samples, normalize
from llmc.plugins.roles import Norm

OP = Op(
    name="RMSNorm",
    version=1,
    inputs=("x", "weight"),
    outputs=("y",),
    fields={"epsilon": 1e-6},
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=norm_dims,
    norm=Norm(centred=False),
    body=lambda fields, present:
        f"y = RMSNormalization<axis=-1, epsilon={fields['epsilon']!r}>(x, weight)",
    float32_inputs=frozenset({"weight"}),
    reference=lambda fields, inputs: [normalize(inputs["x"], fields, inputs, centred=False)],
    samples=norm_samples(residual=False, bias=False),
)
