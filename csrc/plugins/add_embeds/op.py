"""y[i] = x[i] + embeds[embed_ids[i]] where embed_ids[i] >= 0, else x[i].

An image encoder may have further rows, which are added to hidden states of its tokens.

x, y       [num_tokens, hidden]
embeds     [num_embeds, hidden]; num_embeds is at least 1
embed_ids  int32 [num_tokens], rows of embeds; -1: none
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op
from llmc.plugins.input_embeds.op import OP as INPUT_EMBEDS


def _body(fields: Fields, present: frozenset[str]) -> str:
    return "\n".join([
        "zero64 = Constant<value_int=0>()", "zero = Cast<to=6>(zero64)",
        "last = Constant<value_ints=[-1]>()",
        "given = GreaterOrEqual(embed_ids, zero)", "column = Unsqueeze(given, last)",
        "safe = Max(embed_ids, zero)", "rows = Gather<axis=0>(embeds, safe)",
        "sum = Add(x, rows)", "y = Where(column, sum, x)"])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x, embeds = (inputs[name].astype(np.float64) for name in ("x", "embeds"))
    ids = inputs["embed_ids"]
    return [x + np.where(ids[:, None] >= 0, embeds[np.maximum(ids, 0)], 0.0)]


OP = Op(
    name="AddEmbeds",
    version=1,
    inputs=INPUT_EMBEDS.inputs,
    outputs=INPUT_EMBEDS.outputs,
    fields={},
    shapes=INPUT_EMBEDS.shapes,
    dims=INPUT_EMBEDS.dims,
    body=_body,
    integer_inputs=INPUT_EMBEDS.integer_inputs,
    reference=_reference,
    samples=INPUT_EMBEDS.samples,
    tolerance=1e-6,
)
