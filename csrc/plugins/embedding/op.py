"""y = table[input_ids] * scale + position_table[position_ids].

With `vocab_sharded` the table has the vocabulary's rows from `vocab_start` on. Other ids give
zeros.

With adapters, column input_ids of lora_a, times lora_b, is added to a token's row of the table: a
table is a linear layer of one-hot vectors, whose weight is the table's transpose. See
llmc.plugins.lora for the inputs of both forms; lora_a is [lora_rows, vocab], and lora_down
[1, slots, rank, vocab].
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.lora import (
    ROW_INPUTS,
    SELECT,
    SLOT_INPUTS,
    adapter_product,
    check_forms,
    slot_expand_text,
    slot_inputs,
    takes_adapters,
)
from llmc.plugins.quantization import dequantize, quantizable
from llmc.plugins.roles import ByVocabulary


def _body(fields: Fields, present: frozenset[str]) -> str:
    lines = []
    ids = "input_ids"
    if fields["vocab_sharded"]:
        lines += [
            f"start = Constant<value_int={fields['vocab_start']}>()",
            "zero = Constant<value_int=0>()",
            "ids64 = Cast<to=7>(input_ids)",  # int32 on the tensorrt target
            "shifted = Sub(ids64, start)",
            "rows = Shape<start=0, end=1>(table)",
            "above = GreaterOrEqual(shifted, zero)",
            "below = Less(shifted, rows)",
            "mine = And(above, below)",
            "safe = Where(mine, shifted, zero)",
            "last = Constant<value_ints=[-1]>()",
            "column = Unsqueeze(mine, last)",
            "nothing = Constant<value_float=0.0>()",
        ]
        ids = "safe"
    lines += _rows(fields, present, ids)
    result = "e0"
    if takes_adapters(present):
        lines += [*_adapters(present, ids), "e_adapted = Add(e0, e_lora)"]
        result = "e_adapted"
    if fields["vocab_sharded"]:
        lines.append(f"e1 = Where(column, {result}, nothing)")
        result = "e1"
    if fields["scale"] != 1.0:
        lines += [f"scale = Constant<value_float={fields['scale']!r}>()",
                  f"e2 = Mul({result}, scale)"]
        result = "e2"
    if "position_table" in present:
        lines += ["p = Gather<axis=0>(position_table, position_ids)", f"y = Add({result}, p)"]
    else:
        lines.append(f"y = Identity({result})")
    return "\n".join(lines)


def _adapters(present: frozenset[str], ids: str) -> list[str]:
    """Return ONNX text for e_lora, the adapters' product of columns `ids`."""
    if "lora_down" in present:
        return [f"lora_columns = Gather<axis=3>(lora_down, {ids})",
                "lora_all = Transpose<perm=[0, 1, 3, 2]>(lora_columns)",
                f"lora_leading = Shape({ids})", *slot_expand_text(present, "e_lora")]
    return [f"lora_columns = Gather<axis=1>(lora_a, {ids})",
            "lora_all = Transpose<perm=[1, 0]>(lora_columns)", *SELECT,
            "e_lora = MatMul(lora_hidden, lora_b)"]


def _rows(fields: Fields, present: frozenset[str], ids: str) -> list[str]:
    """Return ONNX text for e0, rows `ids` of the table."""
    if not fields["weight_dtype"]:
        return [f"e0 = Gather<axis=0>(table, {ids})"]
    lines = [f"{part} = Gather<axis=0>({whole}, {ids})" for part, whole in (
        ("codes", "table"), ("scales", "weight_scale"), ("zeros", "weight_zero"),
        ("minima", "weight_min")) if whole in present]
    return [*lines, dequantize(fields, present, "e0", "codes", "scales", "zeros", "minima")]


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    if ("position_ids" in present) != ("position_table" in present):
        raise ValueError("Embedding takes position_ids and position_table together")
    check_forms("Embedding", present)
    return {"input_ids": ("num_tokens",), "table": ("vocab", "hidden"),
            "position_ids": ("num_tokens",), "position_table": ("positions", "hidden"),
            "lora_a": ("lora_rows", "vocab"), "lora_b": ("lora_rows", "hidden"),
            "lora_owner": ("lora_rows",), "lora_ids": ("num_tokens",),
            "lora_down": (1, "slots", "rank", "vocab"), "lora_up": ("slots", "hidden", "rank"),
            "lora_ranks": ("slots",)}


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    ids = inputs["input_ids"] - fields["vocab_start"] * fields["vocab_sharded"]
    table = inputs["table"].astype(np.float64)
    mine = (ids >= 0) & (ids < len(table))
    rows = table[np.where(mine, ids, 0)]
    rows = rows + adapter_product(inputs, ids[..., None] == np.arange(len(table)))
    y = np.where(mine[..., None], rows, 0) * fields["scale"]
    if "position_table" in inputs:
        y = y + inputs["position_table"].astype(np.float64)[inputs["position_ids"]]
    return [y]


def _samples(rng: np.random.Generator) -> list[Sample]:
    table = rng.standard_normal((11, 6)).astype(np.float32)
    ids = rng.integers(0, 11, 7)
    positions = {"position_ids": rng.integers(0, 5, 7),
                 "position_table": rng.standard_normal((5, 6)).astype(np.float32)}
    adapters = {"lora_a": rng.standard_normal((3, 11)).astype(np.float32),
                "lora_b": rng.standard_normal((3, 6)).astype(np.float32),
                "lora_owner": np.array([0, 0, 1], np.int32),
                "lora_ids": np.array([0, 1, -1, 0, 1, -1, 0], np.int32)}
    return [
        Sample({}, {"input_ids": ids, "table": table}),
        Sample({"scale": 2.5}, {"input_ids": ids, "table": table, **positions, **adapters}),
        Sample({"vocab_start": 4, "vocab_sharded": 1}, {
            "input_ids": ids, "table": table[4:9], **adapters,
            "lora_a": adapters["lora_a"][:, 4:9]}),
        Sample({"scale": 2.5}, {"input_ids": ids, "table": table, **positions}),
        Sample({"scale": 0.5, "vocab_start": 4, "vocab_sharded": 1},
               {"input_ids": ids, "table": table[4:9], **positions}),
    ]


def _in_slots(rng: np.random.Generator, sample: Sample) -> Sample:
    """Return a sample with adapters in three slots; the last has rank 0."""
    ids, table = sample.inputs["input_ids"], sample.inputs["table"]
    slots = slot_inputs(rng, np.resize([0, 1, -1, 2], len(ids)), len(table),
                        sample.fields.get("in_features", table.shape[1]), [8, 16, 0])
    return Sample(sample.fields, {**sample.inputs, **slots}, max(sample.tolerance, 1e-5))


def _adaptable(op: Op) -> Op:
    """Return `op` with the inputs of adapters, of both forms; its samples have them in rows."""
    inputs = (*ROW_INPUTS, "lora_ids", *SLOT_INPUTS)

    def samples(rng: np.random.Generator) -> list[Sample]:
        assert op.samples is not None
        given = [*op.samples(rng)]
        plain = [sample for sample in given if "lora_ids" not in sample.inputs]
        kinds = {(sample.fields.get("weight_dtype"), sample.fields.get("vocab_sharded")): sample
                 for sample in plain}
        return [*given, *(_in_slots(rng, sample) for sample in kinds.values())]

    return replace(op, samples=samples, inputs=(*op.inputs, *(f"{name}?" for name in inputs)),
                   integer_inputs=op.integer_inputs | {"lora_owner", "lora_ids", "lora_ranks"},
                   coreless=op.coreless | {*ROW_INPUTS})


OP = _adaptable(quantizable(Op(
    name="Embedding",
    version=1,
    inputs=("input_ids", "table", "position_ids?", "position_table?"),
    outputs=("y",),
    fields={"scale": 1.0, "vocab_start": 0, "vocab_sharded": 0},
    choices={"vocab_sharded": (0, 1)},
    shapes=lambda shapes, fields: [(*shapes["input_ids"], shapes["table"][-1])],
    dims=_dims,
    shard=(ByVocabulary("input_ids", "table", "vocab_start", "vocab_sharded",
                        added=("position_ids", "position_table")),),
    body=_body,
    integer_inputs=frozenset({"input_ids", "position_ids"}),
    reference=_reference,
    samples=_samples,
    tolerance=1e-6,
), "table", rounds=False))
