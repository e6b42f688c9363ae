"""Intermediate ops for scaled dot-product attention.

The frontend or the sdpa pass emits them; the attention pass replaces them, together with their
projections. They never reach an artifact, so they have no function body and are not in the
registry.
"""

from __future__ import annotations

from llmc.plugins import Op

# Values of `bidirectional`: whether the sliding window hides tokens of the query's range, too.
WINDOWED, WHOLE = "windowed", "whole"

SDPA = Op(
    name="Sdpa",
    version=1,
    # each [batch, heads, seq, head_dim]; bias is added to the scores; sinks [heads]
    # bidirectional: kind of ranges, such as images, with bidirectional attention; "": none
    inputs=("query", "key", "value", "bias?", "sinks?"),
    outputs=("out",),
    fields={"scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0, "causal": 1, "layer": -1,
            "bidirectional": ""},
    shapes=lambda shapes, fields: [(*shapes["query"][:-1], shapes["value"][-1])],
    body=None,
)

# Keys (index 0) or values (1) of a layer of the model in a draft model's graph, [batch,
# num_kv_heads, seq, head_dim]. Queries see `window` positions; 0: all.
MODEL_CACHE = Op(
    name="ModelCache",
    version=1,
    inputs=(),
    outputs=("out",),
    fields={"layer": 0, "index": 0, "window": 0},
    shapes=lambda shapes, fields: [],
    body=None,
)
