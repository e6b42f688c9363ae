"""Intermediate ops that mark where rows of images enter a model.

The frontend emits them; the input_embeds pass replaces them. They never reach an artifact, so they
have no function body and are not in the registry.

    TokenEmbeds   the output of the token embedding
    DeepEmbeds    a hidden state to which the image encoder's deep rows `index` are added
"""

from __future__ import annotations

from llmc.plugins import Op

TOKEN_EMBEDS = Op(
    name="TokenEmbeds",
    version=1,
    inputs=("x",),
    outputs=("y",),
    fields={},
    shapes=lambda shapes, fields: [shapes["x"]],
    body=None,
)

DEEP_EMBEDS = Op(
    name="DeepEmbeds",
    version=1,
    inputs=("x",),
    outputs=("y",),
    fields={"index": 0},
    shapes=lambda shapes, fields: [shapes["x"]],
    body=None,
)
