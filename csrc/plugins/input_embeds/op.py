"""y[i] = embeds[embed_ids[i]] where embed_ids[i] >= 0, else x[i].

A prompt may have rows in place of embeddings of its token ids: embeddings that the caller gives, or
the result of an image encoder.

x, y       [num_tokens, hidden], embeddings of token ids
embeds     [num_embeds, hidden]; num_embeds is at least 1
embed_ids  int32 [num_tokens], rows of embeds; -1: none
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    return {"x": ("num_tokens", "hidden"), "embeds": ("num_embeds", "hidden"),
            "embed_ids": ("num_tokens",)}


def _body(fields: Fields, present: frozenset[str]) -> str:
    return "\n".join([
        "zero64 = Constant<value_int=0>()", "zero = Cast<to=6>(zero64)",
        "last = Constant<value_ints=[-1]>()",
        "given = GreaterOrEqual(embed_ids, zero)", "column = Unsqueeze(given, last)",
        "safe = Max(embed_ids, zero)", "rows = Gather<axis=0>(embeds, safe)",
        "y = Where(column, rows, x)"])


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    x, embeds = (inputs[name].astype(np.float64) for name in ("x", "embeds"))
    ids = inputs["embed_ids"]
    return [np.where(ids[:, None] >= 0, embeds[np.maximum(ids, 0)], x)]


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(num_tokens: int, num_embeds: int, hidden: int) -> Sample:
        return Sample({}, {
            "x": rng.standard_normal((num_tokens, hidden)).astype(np.float32),
            "embeds": rng.standard_normal((num_embeds, hidden)).astype(np.float32),
            "embed_ids": rng.integers(-1, num_embeds, num_tokens).astype(np.int32)})

    return [sample(9, 3, 6), sample(1, 1, 40), sample(7, 5, 7)]


OP = Op(
    name="InputEmbeds",
    version=1,
    inputs=("x", "embeds", "embed_ids"),
    outputs=("y",),
    fields={},
    shapes=lambda shapes, fields: [shapes["x"]],
    dims=_dims,
    body=_body,
    integer_inputs=frozenset({"embed_ids"}),
    reference=_reference,
    samples=_samples,
    tolerance=0.0,
)
