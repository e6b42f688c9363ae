"""Attention between the frontend or the sdpa pass, which make it, and the attention pass, which
gives it its projections. It never reaches an artifact, so it has no body and no place in the
registry.
"""

from __future__ import annotations

from llmc.plugins import Op

SDPA = Op(
    name="Sdpa",
    version=1,
    # [batch, heads, seq, head_dim] of each; a bias of the scores; sinks [heads]
    inputs=("query", "key", "value", "bias?", "sinks?"),
    outputs=("out",),
    fields={"scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0, "causal": 1, "layer": -1},
    shapes=lambda shapes, fields: [(*shapes["query"][:-1], shapes["value"][-1])],
    body=None,
)
