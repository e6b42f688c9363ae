"""y = (x - mean(x)) * rsqrt(var(x) + epsilon) * weight + bias over the last axis."""

from llmc.plugins import Op
from llmc.plugins.normalization import norm_dims, norm_samples, normalize
from llmc.plugins.roles import Norm

OP = Op(
    name="LayerNorm",
    version=1,
    inputs=("x", "weight", "bias?"),
    outputs=("y",),
    fields={"epsilon": 1e-5},
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=norm_dims,
    norm=Norm(centred=True, bias="bias"),
    body=lambda fields, present:
        f"y = LayerNormalization<axis=-1, epsilon={fields['epsilon']!r}>"
        f"(x, weight{', bias' if 'bias' in present else ''})",
    float32_inputs=frozenset({"weight", "bias"}),
    reference=lambda fields, inputs: [normalize(inputs["x"], fields, inputs, centred=True)],
    samples=norm_samples(residual=False, bias=True),
)
