"""Intermediate op for scaled dot-product attention.

The frontend or the sdpa pass emits it; the attention pass replaces it, together with its
projections. It never reaches an artifact, so it has no function body and is not in the registry.
"""

from __future__ import annotations

from llmc.plugins import Op

SDPA = Op(
    name="Sdpa",
    version=1,
    # each [batch, heads, seq, head_dim]; bias is added to the scores; sinks [heads]
    inputs=("query", "key", "value", "bias?", "sinks?"),
    outputs=("out",),
    fields={"scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0, "causal": 1, "layer": -1},
    shapes=lambda shapes, fields: [(*shapes["query"][:-1], shapes["value"][-1])],
    body=None,
)
