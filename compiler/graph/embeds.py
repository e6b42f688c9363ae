"""An intermediate op that marks the output of a model's token embedding.

The frontend emits it; the input_embeds pass replaces it. It never reaches an artifact, so it has no
function body and is not in the registry.
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
