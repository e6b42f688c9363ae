"""LoRA adapters of requests: a mixin for every op that has a weight matrix [out, in].

A linear layer with adapters adds x · Aᵀ · B of each token's adapter to x · Wᵀ, before a bias, an
activation or a residual. `lora_ids`, int32 [rows], has the slot of each token's adapter; -1: none.
There are two forms of the matrices.

Rows, for bodies of standard ops. The adapters of all loaded slots are concatenated along their
ranks:

    lora_a      [lora_rows, in].
    lora_b      [lora_rows, out]; includes the adapters' scales.
    lora_owner  int32 [lora_rows], the slot that a row belongs to.

Row r of lora_a and of lora_b applies to the tokens with lora_ids equal to lora_owner[r], and to no
others, whatever their values are. lora_rows may be 0.

Slots, for kernels. A slot has a fixed place, with room for any adapter. A fused layer has a part
for each of its modules:

    lora_down   [parts, slots, rank, in].
    lora_up     [slots, out, rank]; includes the adapters' scales.
    lora_ranks  int32 [slots], a multiple of 8; the others of `rank` are ignored.
    lora_part   int32 [out], the part that each output multiplies; absent: there is one part.

All inputs of a form are present, or none. The x of adapters is not quantized. An op that normalizes
x may have `lora_gain` and `lora_shift`, float32 [in], by which adapters multiply a normalized x and
which they add to it: its weight has folded them. It then has no norm_weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape

ROW_INPUTS = ("lora_a", "lora_b", "lora_owner")
SLOT_INPUTS = ("lora_down", "lora_up", "lora_ranks")
LORA_INPUTS = (*ROW_INPUTS, "lora_ids", *SLOT_INPUTS, "lora_part")
NORM_INPUTS = ("lora_gain", "lora_shift")
RANK_MULTIPLE = 8  # of slots


def adaptable(op: Op, *, norms: bool = False) -> Op:
    """Return `op` with the optional inputs of adapters.

    Its bodies compute the product by `quantization.product` or `cpu_product`, and its reference by
    `quantization.linear` or `adapter_product`.

    Args:
        op: the op to extend.
        norms: whether it normalizes x.
    """
    more = NORM_INPUTS if norms else ()

    def dims(fields: Fields, present: frozenset[str]) -> Mapping[str, Shape]:
        assert op.dims is not None
        check_forms(op.name, present)
        if present & {*NORM_INPUTS} and "norm_weight" in present:
            raise ValueError(f"{op.name} takes lora_gain and lora_shift of a folded norm, not with "
                             f"norm_weight")
        known = op.dims(fields, present - {*LORA_INPUTS, *more})
        columns, rows = known["x"][-1], known["weight"][0]
        return {**known, "lora_a": ("lora_rows", columns), "lora_b": ("lora_rows", rows),
                "lora_owner": ("lora_rows",), "lora_ids": ("rows",),
                "lora_down": ("parts" if "lora_part" in present else 1, "slots", "rank", columns),
                "lora_up": ("slots", rows, "rank"), "lora_ranks": ("slots",),
                "lora_part": (rows,), "lora_gain": (columns,), "lora_shift": (columns,)}

    def samples(rng: np.random.Generator) -> list[Sample]:
        assert op.samples is not None
        plain = [*op.samples(rng)]
        chosen = {sample.fields.get("weight_dtype", ""): sample for sample in plain
                  if not sample.fields.get("x_dtype")}
        return [*plain, *(_adapted(rng, sample) for sample in chosen.values()),
                *(_in_slots(rng, sample, 1 + index % 2,
                            () if "norm_weight" in sample.inputs else more[:1 + index % 2])
                  for index, sample in enumerate(chosen.values()))]

    return dataclasses.replace(
        op, inputs=(*op.inputs, *(f"{name}?" for name in (*LORA_INPUTS, *more))),
        integer_inputs=op.integer_inputs | {"lora_owner", "lora_ids", "lora_ranks", "lora_part"},
        float32_inputs=op.float32_inputs | {*more}, coreless=op.coreless | {*ROW_INPUTS},
        dims=dims, samples=samples)


def check_forms(op_name: str, present: frozenset[str]) -> None:
    """Raise ValueError unless a node has all inputs of one form, or none of adapters."""
    given = present & {*LORA_INPUTS} - {"lora_part"}
    if given and given not in ({*ROW_INPUTS, "lora_ids"}, {*SLOT_INPUTS, "lora_ids"}):
        raise ValueError(f"{op_name} takes lora_ids with all of {', '.join(ROW_INPUTS)}, or with "
                         f"all of {', '.join(SLOT_INPUTS)}, or none, not {sorted(given)}")


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


def _in_slots(rng: np.random.Generator, sample: Sample, parts: int,
              more: tuple[str, ...]) -> Sample:
    """Return a sample with adapters in three slots; the first one's product overflows."""
    rows, columns = sample.inputs["x"].shape
    height = sample.inputs["weight"].shape[0]
    ids = rng.permutation(np.resize(np.array([1, -1, 2], np.int32), rows))
    inputs = slot_inputs(rng, ids, columns, height, [8, 8, 16], parts)
    inputs["lora_down"][:, 0] = np.copysign(3e38, inputs["lora_down"][:, 0])  # of no token
    inputs |= {name: rng.standard_normal(columns).astype(np.float32) for name in more}
    return Sample(sample.fields, {**sample.inputs, **inputs}, sample.tolerance)


def slot_inputs(rng: np.random.Generator, ids: np.ndarray, columns: int, rows: int,
                ranks: list[int], parts: int = 1) -> dict[str, np.ndarray]:
    """Return random adapters in slots for a test; parts take turns among the outputs."""
    slots, rank = len(ranks), max(*ranks, RANK_MULTIPLE)
    made = {"lora_ids": ids.astype(np.int32),
            "lora_down": rng.standard_normal((parts, slots, rank, columns)).astype(np.float32),
            "lora_up": rng.standard_normal((slots, rows, rank)).astype(np.float32),
            "lora_ranks": np.array(ranks, np.int32)}
    if parts > 1:
        made["lora_part"] = np.resize(np.arange(parts, dtype=np.int32), rows)
    return made


# ONNX text for lora_hidden, the elements of lora_all [rows, lora_rows] that are of a row's slot.
SELECT = ("lora_last = Constant<value_ints=[-1]>()",
           "lora_column = Unsqueeze(lora_ids, lora_last)",
           "lora_own = Equal(lora_column, lora_owner)", "lora_none = Constant<value_float=0.0>()",
           "lora_hidden = Where(lora_own, lora_all, lora_none)")


def takes_adapters(present: frozenset[str]) -> bool:
    """Whether a node has adapters, of either form."""
    return bool(present & {"lora_a", "lora_down"})


def adapter_text(present: frozenset[str], made: str, x: str) -> list[str]:
    """Return lines of ONNX text for `made`, the adapters' product, in standard ops."""
    if "lora_down" in present:
        return _slot_text(present, made, x)
    return ["lora_at = Transpose<perm=[1, 0]>(lora_a)", f"lora_all = MatMul({x}, lora_at)",
            *SELECT, f"{made} = MatMul(lora_hidden, lora_b)"]


def _slot_text(present: frozenset[str], made: str, x: str) -> list[str]:
    return [
        "lora_flat_last = Constant<value_ints=[-1]>()",
        "lora_in = Shape<start=3, end=4>(lora_down)",
        f"lora_leading = Shape<end=-1>({x})",
        "lora_flat = Concat<axis=0>(lora_flat_last, lora_in)",
        f"lora_rows_x = Reshape({x}, lora_flat)",  # [rows, in]
        "lora_turned_down = Transpose<perm=[0, 1, 3, 2]>(lora_down)",
        "lora_all = MatMul(lora_rows_x, lora_turned_down)",  # [parts, slots, rows, rank]
        *slot_expand_text(present, made)]


def slot_expand_text(present: frozenset[str], made: str) -> list[str]:
    """Return lines of ONNX text for `made` [*lora_leading, out], the product of adapters in slots.

    It is made of lora_all [parts, slots, rows, rank], the products of each row and slot with
    lora_down.
    """
    of_outputs = ["lora_turned = Transpose<perm=[1, 0, 2]>(lora_hidden)"]
    if "lora_part" in present:
        of_outputs = ["lora_parts = Cast<to=7>(lora_part)",
                      "lora_own_parts = Gather(lora_hidden, lora_parts)",
                      "lora_turned = Transpose<perm=[1, 0, 2]>(lora_own_parts)"]
    return [
        "lora_none = Constant<value_float=0.0>()", "lora_zero = Constant<value_int=0>()",
        "lora_one = Constant<value_int=1>()", "lora_first = Constant<value_ints=[0]>()",
        "lora_second = Constant<value_ints=[1]>()", "lora_later = Constant<value_ints=[1, 2]>()",
        "lora_last = Constant<value_ints=[-1]>()",
        "lora_slots = Shape<start=1, end=2>(lora_down)",
        "lora_rank = Shape<start=2, end=3>(lora_down)",
        "lora_whole = Concat<axis=0>(lora_leading, lora_last)",
        "lora_rows_ids = Reshape(lora_ids, lora_last)",
        "lora_num_slots = Squeeze(lora_slots, lora_first)",
        "lora_num_ranks = Squeeze(lora_rank, lora_first)",
        "lora_numbers = Range(lora_zero, lora_num_slots, lora_one)",
        "lora_steps = Range(lora_zero, lora_num_ranks, lora_one)",
        "lora_ids_long = Cast<to=7>(lora_rows_ids)", "lora_slot = Max(lora_ids_long, lora_zero)",
        "lora_slot_column = Unsqueeze(lora_slot, lora_last)",
        "lora_number_rows = Unsqueeze(lora_numbers, lora_later)",
        "lora_own = Equal(lora_number_rows, lora_slot_column)",  # [slots, rows, 1]
        "lora_mine = Where(lora_own, lora_all, lora_none)",
        "lora_hidden = ReduceSum<keepdims=0>(lora_mine, lora_second)",
        *of_outputs,  # [rows, out or 1, rank]
        "lora_mine_up = Gather(lora_up, lora_slot)",
        "lora_products = Mul(lora_mine_up, lora_turned)",
        "lora_ranks_long = Cast<to=7>(lora_ranks)",
        "lora_mine_ranks = Gather(lora_ranks_long, lora_slot)",
        "lora_rank_cells = Unsqueeze(lora_mine_ranks, lora_later)",
        "lora_used = Less(lora_steps, lora_rank_cells)",
        "lora_useful = Where(lora_used, lora_products, lora_none)",
        "lora_sums = ReduceSum<keepdims=0>(lora_useful, lora_last)",
        "lora_ids_column = Unsqueeze(lora_ids_long, lora_last)",
        "lora_has = GreaterOrEqual(lora_ids_column, lora_zero)",
        "lora_rows_made = Where(lora_has, lora_sums, lora_none)",
        f"{made} = Reshape(lora_rows_made, lora_whole)"]


def normed_text(present: frozenset[str], normed: str, made: str) -> list[str]:
    """Return lines of ONNX text for `made`, the adapters' x from a normalized one."""
    gained = "Identity({})" if "lora_gain" not in present else "Mul({}, lora_gain)"
    shifted = "Identity({})" if "lora_shift" not in present else "Add({}, lora_shift)"
    return [f"{made}_gained = {gained.format(normed)}",
            f"{made} = {shifted.format(f'{made}_gained')}"]


def cpu_adapter_text(made: str, x: str, added: str) -> list[str]:
    """Return lines of ONNX text for `made`, the adapters' product plus `added`, if not empty.

    ONNX Runtime computes the selection once for all layers.
    """
    return [f"lora_all = Gemm<transB=1>({x}, lora_a)", *SELECT,
            f"{made} = Gemm(lora_hidden, lora_b{', ' if added else ''}{added})"]


def adapter_product(inputs: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray | float:
    """Return the adapters' product, float64 [rows, out]; 0 without adapters."""
    if "lora_down" in inputs:
        return _slot_product(inputs, x.astype(np.float64))
    if "lora_a" not in inputs:
        return 0.0
    own = inputs["lora_ids"][..., None] == inputs["lora_owner"]
    hidden = np.where(own, x.astype(np.float64) @ inputs["lora_a"].astype(np.float64).T, 0.0)
    delta: np.ndarray = hidden @ inputs["lora_b"].astype(np.float64)
    return delta


def _slot_product(inputs: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    ids, down, up = inputs["lora_ids"].reshape(-1), inputs["lora_down"], inputs["lora_up"]
    leading, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    parts = inputs.get("lora_part", np.zeros(up.shape[1], np.int32))
    delta = np.zeros((len(x), up.shape[1]))
    for slot in np.unique(ids[ids >= 0]):
        rank, rows = inputs["lora_ranks"][slot], ids == slot
        for part in np.unique(parts):
            hidden = x[rows] @ down[part, slot, :rank].astype(np.float64).T
            delta[np.ix_(rows, parts == part)] = \
                hidden @ up[slot][parts == part, :rank].astype(np.float64).T
    return delta.reshape(*leading, up.shape[1])


def normed_x(inputs: Mapping[str, np.ndarray], normed: np.ndarray) -> np.ndarray:
    """Return the adapters' x from a normalized one."""
    x: np.ndarray = normed * inputs.get("lora_gain", 1.0) + inputs.get("lora_shift", 0.0)
    return x
