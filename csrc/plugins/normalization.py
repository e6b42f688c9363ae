"""NumPy reference and samples of the norm ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmc.plugins import Fields, Sample, Shape


def normalize(x: np.ndarray, fields: Fields, inputs: Mapping[str, Any], *, centred: bool) -> \
        np.ndarray:
    """Return RMSNorm, or LayerNorm if `centred`, over the last axis, in float64."""
    x = x.astype(np.float64)
    if centred:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + fields["epsilon"]) * inputs["weight"]
    return np.asarray(y + inputs.get("bias", 0.0))


def norm_dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    """`Op.dims` of the norm ops."""
    return {"x": ("rows", "hidden"), "residual": ("rows", "hidden"), "weight": ("hidden",),
            "bias": ("hidden",)}


def norm_samples(*, residual: bool, bias: bool) -> Callable[[np.random.Generator], list[Sample]]:
    """Samples of odd and even widths, with and without each optional input."""

    def samples(rng: np.random.Generator) -> list[Sample]:
        made = []
        for tokens, width, epsilon in ((3, 16, 1e-5), (1, 7, 1e-2), (5, 96, 1e-6)):
            inputs = {"x": rng.standard_normal((tokens, width)).astype(np.float32)}
            if residual:
                inputs["residual"] = rng.standard_normal((tokens, width)).astype(np.float32)
            inputs["weight"] = rng.standard_normal(width).astype(np.float32)
            made.append(Sample({"epsilon": epsilon}, inputs))
            if bias:
                shift = rng.standard_normal(width).astype(np.float32)
                made.append(Sample({"epsilon": epsilon}, {**inputs, "bias": shift}))
        return made

    return samples
