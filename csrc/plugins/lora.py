"""LoRA adapters of requests: a mixin for every op that has a weight matrix [out, in].

A linear layer with adapters adds x · Aᵀ · B of each token's adapter to x · Wᵀ, before a bias, an
activation or a residual. The adapters of all loaded slots are concatenated along their ranks:

    lora_a      [lora_rows, in].
    lora_b      [lora_rows, out]; includes the adapters' scales.
    lora_owner  int32 [lora_rows], the slot that a row belongs to.
    lora_ids    int32 [rows], the slot of each token's adapter; -1: none.

Row r of lora_a and of lora_b applies to the tokens with lora_ids equal to lora_owner[r], and to no
others, whatever their values are. lora_rows may be 0. All four inputs are present, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape

LORA_INPUTS = ("lora_a", "lora_b", "lora_owner", "lora_ids")


def adaptable(op: Op) -> Op:
    """Return `op` with the optional inputs of adapters.

    Its bodies compute the product by `quantization.product` or `cpu_product`, and its reference by
    `quantization.linear`.
    """
    def dims(fields: Fields, present: frozenset[str]) -> Mapping[str, Shape]:
        assert op.dims is not None
        given = present & {*LORA_INPUTS}
        if given and len(given) < len(LORA_INPUTS):
            raise ValueError(f"{op.name} takes all of {', '.join(LORA_INPUTS)}, or none, not "
                             f"{sorted(given)}")
        known = op.dims(fields, present - given)
        columns, rows = known["x"][-1], known["weight"][0]
        return {**known, "lora_a": ("lora_rows", columns), "lora_b": ("lora_rows", rows),
                "lora_owner": ("lora_rows",), "lora_ids": ("rows",)}

    def samples(rng: np.random.Generator) -> list[Sample]:
        assert op.samples is not None
        plain = [*op.samples(rng)]
        chosen = {sample.fields.get("weight_dtype", ""): sample for sample in plain
                  if not sample.fields.get("x_dtype")}
        return [*plain, *(_adapted(rng, sample) for sample in chosen.values())]

    return dataclasses.replace(
        op, inputs=(*op.inputs, *(f"{name}?" for name in LORA_INPUTS)),
        integer_inputs=op.integer_inputs | {"lora_owner", "lora_ids"},
        coreless=op.coreless | {*LORA_INPUTS}, dims=dims, samples=samples)


def _adapted(rng: np.random.Generator, sample: Sample) -> Sample:
    """Return a sample with adapters of rank 2 in two slots; the first one's product overflows."""
    rows, columns = sample.inputs["x"].shape
    height = sample.inputs["weight"].shape[0]
    owner = np.array([0, 0, 1, 1], np.int32)
    left = rng.standard_normal((4, columns)).astype(np.float32)
    left[owner == 0] = np.copysign(3e38, left[owner == 0])  # of no token
    return Sample(sample.fields, {
        **sample.inputs, "lora_a": left,
        "lora_b": rng.standard_normal((4, height)).astype(np.float32), "lora_owner": owner,
        "lora_ids": rng.permutation(np.resize(np.array([1, -1], np.int32), rows))},
        sample.tolerance)


_SELECT = ("lora_last = Constant<value_ints=[-1]>()",
           "lora_column = Unsqueeze(lora_ids, lora_last)",
           "lora_own = Equal(lora_column, lora_owner)", "lora_none = Constant<value_float=0.0>()",
           "lora_hidden = Where(lora_own, lora_all, lora_none)")


def adapter_text(made: str, x: str) -> list[str]:
    """Return lines of ONNX text for `made`, the adapters' product, in standard ops."""
    return ["lora_at = Transpose<perm=[1, 0]>(lora_a)", f"lora_all = MatMul({x}, lora_at)",
            *_SELECT, f"{made} = MatMul(lora_hidden, lora_b)"]


def cpu_adapter_text(made: str, x: str, added: str) -> list[str]:
    """Return lines of ONNX text for `made`, the adapters' product plus `added`, if not empty.

    ONNX Runtime computes the selection once for all layers.
    """
    return [f"lora_all = Gemm<transB=1>({x}, lora_a)", *_SELECT,
            f"{made} = Gemm(lora_hidden, lora_b{', ' if added else ''}{added})"]


def adapter_product(inputs: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray | float:
    """Return the adapters' product, float64 [rows, out]; 0 without adapters."""
    if "lora_a" not in inputs:
        return 0.0
    own = inputs["lora_ids"][..., None] == inputs["lora_owner"]
    hidden = np.where(own, x.astype(np.float64) @ inputs["lora_a"].astype(np.float64).T, 0.0)
    delta: np.ndarray = hidden @ inputs["lora_b"].astype(np.float64)
    return delta
