"""Mixture of experts: y = residual + sum of score * down(act(gate) * up) per token.

    x             [num_tokens, hidden]
    experts       int64 [num_tokens, top_k], the output of Route
    scores        float32 [num_tokens, top_k]
    gate_up       [num_experts, 2 * inner, hidden]; row 2j is the gate of column j, row 2j + 1 its
                  up. So both are at hand in a kernel's epilogue, a shard of the columns is
                  contiguous, and com.microsoft.MoE has the same layout. Without `gated`
                  [num_experts, inner, hidden]
    down          [num_experts, hidden, inner]
    gate_up_bias  [num_experts, 2 * inner] or [num_experts, inner], in the order of gate_up's rows
    down_bias     [num_experts, hidden]
    residual      [num_tokens, hidden]; optional
    y             [num_tokens, hidden]

act is `activation`; silu is z * sigmoid(`alpha` * z). `up_offset` is added to up. A `limit` other
than 0 clamps gates from above and ups on both sides. With `scale_input` the score multiplies x, not
the result. With `sharded` these are the model's experts from `first_expert` on, and others
contribute nothing.

With `weight_dtype` both weights are quantized as in llmc.plugins.quantization, with one group size:
uint8 [num_experts, rows, …], with scales and optional zeros per group; in_features is hidden,
inner_features is inner. The tensor core kernels of GPUs take groups of a power of two from 32 on,
columns that are multiples of 64 (8 bits: 32), and rows that are multiples of 16; other shapes use a
slower kernel.

With an `activation_dtype`, and optionally an `activation_group_size`, the activations of both GEMMs
are quantized as in llmc.plugins.quantization, with dynamic scales.

With adapters, each of `gate_up` and `down` is a linear layer with one matrix per expert, whose
adapters have one pair of matrices per expert (llmc.plugins.lora). `lora_ids` are of tokens. Of the
form in rows:

    gate_up_lora_a      [gate_up_lora_rows, num_experts, hidden]
    gate_up_lora_b      [gate_up_lora_rows, num_experts, rows of gate_up]
    gate_up_lora_owner  int32 [gate_up_lora_rows]
    down_lora_a, down_lora_b, down_lora_owner  likewise, [.., inner] and [.., hidden]

Of the form in slots, with expert i as part i:

    gate_up_lora_down   [num_experts, slots, rank, hidden]
    gate_up_lora_up     [slots, num_experts * rows of gate_up, rank]
    gate_up_lora_ranks  int32 [slots]
    down_lora_down, down_lora_up, down_lora_ranks  likewise
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.activations import REFERENCE, activation_text
from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.lora import (
    ROW_INPUTS,
    SLOT_INPUTS,
    adapter_product,
    adapter_text,
    cpu_adapter_text,
    slot_inputs,
)
from llmc.plugins.quantization import (
    FLOAT8,
    activations,
    check_rounding,
    dequantize,
    dequantized,
    pack,
    rounded,
)
from llmc.plugins.roles import ByExperts, ByInner, Quantized

STACKS = ("gate_up", "down")
_QMOE_DTYPES = ("int4", "uint4", "int8", "uint8")
_ROLES = tuple(Quantized(name, f"{name}_scale", f"{name}_zero", "", rounds=True)
               for name in STACKS)
_IN_ROWS, _IN_SLOTS = (tuple(f"{stack}_{name}" for stack in STACKS for name in names)
                       for names in (ROW_INPUTS, SLOT_INPUTS))
_INT8_DOT_PRODUCTS = 4  # accuracy level of QMoE


_BLOCKS = (16, 32, 64, 128)  # of QMoE


def _inner(fields: Fields, present: frozenset[str], both: str) -> str:
    """Return ONNX text for `mid` [rows, inner] from `both` [rows, 2 * inner]."""
    if not fields["gated"]:
        return _activated(fields, both, "mid")
    lines = ["pairs_shape = Constant<value_ints=[0, -1, 2]>()",
             f"pairs = Reshape({both}, pairs_shape)",
             "first = Constant<value_int=0>()", "second = Constant<value_int=1>()",
             "gate_all = Gather<axis=2>(pairs, first)", "up_all = Gather<axis=2>(pairs, second)"]
    gate, up = "gate_all", "up_all"
    if fields["limit"]:
        lines += [f"limit = Constant<value_float={fields['limit']!r}>()", "least = Neg(limit)",
                  "gate = Min(gate_all, limit)", "up_bounded = Clip(up_all, least, limit)"]
        gate, up = "gate", "up_bounded"
    if fields["up_offset"]:
        lines += [f"offset = Constant<value_float={fields['up_offset']!r}>()",
                  f"up = Add({up}, offset)"]
        up = "up"
    return "\n".join([*lines, _activated(fields, gate, "active"), f"mid = Mul(active, {up})"])


def _activated(fields: Fields, x: str, y: str) -> str:
    if fields["activation"] == "silu" and fields["alpha"] != 1.0:
        return "\n".join([f"{y}_alpha = Constant<value_float={fields['alpha']!r}>()",
                          f"{y}_steep = Mul({x}, {y}_alpha)", f"{y}_gate = Sigmoid({y}_steep)",
                          f"{y} = Mul({x}, {y}_gate)"])
    return activation_text(fields["activation"], x, y)


def _body(fields: Fields, present: frozenset[str]) -> str:
    """Loop over the experts that any token is routed to."""
    return "\n".join([*_loop(fields, present), *_result(present)])


def _loop(fields: Fields, present: frozenset[str], *, on_cpu: bool = False,
          only: str = "") -> list[str]:
    """Return lines for `sum`, rows without the residual.

    Args:
        fields: attributes.
        present: inputs.
        on_cpu: compute adapters as the cpu target does.
        only: the tensor of `_adapted_pairs`, to leave out the pairs of other tokens; "": all.
    """
    biases = [f"{name}_own = Gather<axis=0>({name}, e)" if name in present else ""
              for name in ("gate_up_bias", "down_bias")]
    scaled_rows = ["column = Unsqueeze(score, last)", "rows = Mul(x_own, column)"]
    rounding, rows = rounded(fields, "rows", "input")
    mid_rounding, mid = rounded(fields, "mid", "between")
    adapted = "lora_ids" in present
    both, made = ("both_base", "made_base") if adapted else ("both", "made")
    loop = "\n".join(filter(None, [
        "again = Identity(condition)",
        "e = Gather<axis=0>(hit, i)",
        "mine = Equal(flat_experts, e)",
        "places = NonZero(mine)",
        "place = Squeeze(places, first_axis)",  # in [num_tokens * top_k]
        "token = Div(place, top_k)",
        "x_own = Gather<axis=0>(x_rows, token)",
        "score = Gather<axis=0>(flat_scores, place)",
        *(scaled_rows if fields["scale_input"] else ["rows = Identity(x_own)"]),
        *_own_weights(fields, present),
        *biases,
        *rounding,
        f"{both} = Gemm<transB=1>({rows}, gate_up_own"
        f"{', gate_up_bias_own' if 'gate_up_bias' in present else ''})",
        *(["ids_own = Gather<axis=0>(lora_rows_ids, token)",
           *_add_adapters(present, "gate_up", "rows", both, "both", on_cpu=on_cpu)]
          if adapted else []),
        _inner(fields, present, "both"),
        *mid_rounding,
        f"{made} = Gemm<transB=1>({mid}, down_own"
        f"{', down_bias_own' if 'down_bias' in present else ''})",
        *(_add_adapters(present, "down", "mid", made, "made", on_cpu=on_cpu) if adapted else []),
        *(["weighted = Identity(made)"] if fields["scale_input"] else
          ["column = Unsqueeze(score, last)", "weighted = Mul(made, column)"]),
        "token_column = Unsqueeze(token, last)",
        'sum_out = ScatterND<reduction="add">(sum_in, token_column, weighted)',
    ]))
    return [
        # Leading dimensions are flattened to rows, and restored at the end.
        "last = Constant<value_ints=[-1]>()",
        "first_axis = Constant<value_ints=[0]>()",
        *(["lora_rows_ids = Reshape(lora_ids, last)"] if adapted else []),
        "width = Shape<start=-1>(x)",
        "rows_shape = Concat<axis=0>(last, width)",
        "x_rows = Reshape(x, rows_shape)",
        "all_experts = Reshape(experts, last)",
        "flat_scores = Reshape(scores, last)",
        f"top_k = Constant<value_int={fields['top_k']}>()",
        *(_adapted_pairs(fields["top_k"]) if only else []),
        *_local(fields, only),
        "hit, hit_first, hit_inverse, hit_counts = Unique(there)",
        "count = Size(hit)",
        "true = Constant<value = bool {1}>()",
        "nothing = Constant<value_float=0.0>()",
        "x_shape = Shape(x_rows)",
        "none = Expand(nothing, x_shape)",
        "sum = Loop(count, true, none) <body = each (int64 i, bool condition, float[n, h] sum_in) "
        f"=> (bool again, float[n, h] sum_out) {{\n{loop}\n}}>",
    ]


def _add_adapters(present: frozenset[str], stack: str, x: str, base: str, made: str, *,
                  on_cpu: bool) -> list[str]:
    """Return lines for `made`, `base` plus the adapters' product of rows `x` for expert `e`.

    The matrices of one expert are those of a linear layer.
    """
    if f"{stack}_lora_down" in present:
        lines = [
            f"lora_down_own = Gather<axis=0>({stack}_lora_down, e)",
            "lora_axis = Constant<value_ints=[0]>()",
            "lora_down = Unsqueeze(lora_down_own, lora_axis)",
            f"lora_stack_shape = Shape({stack}_lora_up)",
            "lora_stack_slots, lora_stack_rows, lora_stack_rank = "
            "Split<num_outputs=3>(lora_stack_shape)",
            f"lora_count = Shape<end=1>({stack}_lora_down)",
            "lora_each = Div(lora_stack_rows, lora_count)",
            "lora_up_shape = Concat<axis=0>(lora_stack_slots, lora_count, lora_each, "
            "lora_stack_rank)",
            f"lora_ups = Reshape({stack}_lora_up, lora_up_shape)",
            "lora_up = Gather<axis=1>(lora_ups, e)",
            f"lora_ranks = Identity({stack}_lora_ranks)", "lora_ids = Identity(ids_own)",
            *adapter_text(frozenset({"lora_down"}), "lora_made", x),
            f"{made} = Add({base}, lora_made)"]
    else:
        lines = [
            f"lora_a = Gather<axis=1>({stack}_lora_a, e)",
            f"lora_b = Gather<axis=1>({stack}_lora_b, e)",
            f"lora_owner = Identity({stack}_lora_owner)", "lora_ids = Identity(ids_own)",
            *(cpu_adapter_text(made, x, base) if on_cpu else
              [*adapter_text(frozenset({"lora_a"}), "lora_made", x),
               f"{made} = Add({base}, lora_made)"])]
    return [re.sub(r"(?<!\w)lora_(\w+)", rf"{stack}_adapter_\1", line) for line in lines]


def _result(present: frozenset[str], rows: str = "sum") -> list[str]:
    """Return lines for y from the rows of sums."""
    added = "residual" in present
    return ["y_shape = Shape(x)", f"{'moved' if added else 'y'} = Reshape({rows}, y_shape)",
            *(["y = Add(residual, moved)"] if added else [])]


def _widths(fields: Fields) -> dict[str, int]:
    """Columns of each quantized weight."""
    return {"gate_up": fields["in_features"], "down": fields["inner_features"]}


def _own_weights(fields: Fields, present: frozenset[str]) -> list[str]:
    """Return lines for `gate_up_own` and `down_own`, the matrices of expert `e`."""
    if not fields["weight_dtype"]:
        return [f"{name}_own = Gather<axis=0>({name}, e)" for name in ("gate_up", "down")]
    lines = []
    for name, width in _widths(fields).items():
        zero = {"weight_zero"} if f"{name}_zero" in present else set()
        lines += [f"{name}{part}_e = Gather<axis=0>({name}{part}, e)"
                  for part in ("", "_scale", *(["_zero"] if zero else []))]
        lines.append(dequantize({**fields, "in_features": width}, frozenset(zero), f"{name}_own",
                                f"{name}_e", f"{name}_scale_e", f"{name}_zero_e"))
    return lines


def _local(fields: Fields, only: str) -> list[str]:
    """Return lines for `flat_experts`, local indices, and for `there`, the local ones.

    Of pairs for which `only` is false, indices are -1.
    """
    if only:
        return ["nowhere = Constant<value_int=-1>()",
                f"flat_experts = Where({only}, all_experts, nowhere)",
                f"there = Compress<axis=0>(all_experts, {only})"]
    if not fields["sharded"]:
        return ["flat_experts = Identity(all_experts)", "there = Identity(all_experts)"]
    return [f"start = Constant<value_int={fields['first_expert']}>()",
            "zero = Constant<value_int=0>()",
            "flat_experts = Sub(all_experts, start)",
            "count_one = Shape<end=1>(down)",
            "not_before = GreaterOrEqual(flat_experts, zero)",
            "not_behind = Less(flat_experts, count_one)",
            "inside = And(not_before, not_behind)",
            "there = Compress<axis=0>(flat_experts, inside)"]


def _cpu(fields: Fields, present: frozenset[str]) -> str | None:
    """Use com.microsoft.MoE, or QMoE, where it computes the same.

    These kernels take no adapters, so the loop computes the tokens that have one.
    """
    if "gate_up_lora_down" in present:
        return None
    kernel = _kernel(fields, present)
    if "lora_ids" not in present:
        return None if kernel is None else "\n".join([*kernel, *_result(present)])
    if kernel is None:
        return "\n".join([*_loop(fields, present, on_cpu=True), *_result(present)])
    return "\n".join([
        *_loop(fields, present, on_cpu=True, only="adapted_pairs"),
        *_renamed(kernel, "kernel"),
        "both_sums = Where(adapted_column, sum, kernel_sum)",
        *_result(present, "both_sums")])


def _renamed(lines: Sequence[str], prefix: str) -> list[str]:
    """Return lines with a prefix before the name of each tensor that they make."""
    made = "|".join(re.escape(line.partition(" = ")[0]) for line in lines)
    return [re.sub(rf"\b({made})\b", rf"{prefix}_\1", line) for line in lines]


def _adapted_pairs(top_k: int) -> list[str]:
    """Return lines for `adapted_pairs`, whether each token's adapter may change experts.

    Also `adapted_column` [num_tokens, 1], of each token.
    """
    return [
        *(f"{stack}_count = Size({stack}_lora_owner)" for stack in STACKS),
        "adapters_count = Add(gate_up_count, down_count)",
        "has_rows = Cast<to=9>(adapters_count)",
        "long_ids = Cast<to=7>(lora_rows_ids)", "no_slot = Constant<value_int=-1>()",
        "has_slot = Greater(long_ids, no_slot)", "adapted = And(has_slot, has_rows)",
        "adapted_column = Unsqueeze(adapted, last)",
        f"adapted_repeats = Constant<value_ints=[1, {top_k}]>()",
        "adapted_grid = Tile(adapted_column, adapted_repeats)",
        "adapted_pairs = Reshape(adapted_grid, last)"]


def _kernel(fields: Fields, present: frozenset[str]) -> list[str] | None:
    """Return lines for `sum` by com.microsoft.MoE, or QMoE, which read weights in place.

    They route by themselves, by the softmax of the top_k of their input. The input is the
    logarithms of the scores, which all have one sign, and the sum of the scores is restored
    afterwards. Where scores multiply x, there is one row per token and expert.
    """
    if fields["activation"] != "silu" or not fields["gated"] or fields["sharded"]:
        return None
    top_k = 1 if fields["scale_input"] else fields["top_k"]
    first, second = (name if name in present else "" for name in ("gate_up_bias", "down_bias"))
    limit = f", swiglu_limit={fields['limit']!r}" if fields["limit"] else ""
    kernel, given = "MoE<", f"gate_up, {first}, down, {second}"
    if fields["weight_dtype"]:
        size = fields["group_size"]
        if size not in _BLOCKS or fields["weight_dtype"] not in _QMOE_DTYPES:
            return None
        zeros = ", , , , gate_up_zero, down_zero" if "gate_up_zero" in present else ""
        given = f"gate_up, gate_up_scale, {first}, down, down_scale, {second}{zeros}"
        kernel = (f"QMoE<expert_weight_bits={CODE_TYPES[fields['weight_dtype']].bits}, "
                  f"block_size={size}, accuracy_level={_INT8_DOT_PRODUCTS}, ")
    return [
        "last = Constant<value_ints=[-1]>()",
        "width = Shape<start=-1>(x)",
        "rows_shape = Concat<axis=0>(last, width)",
        f"chosen_shape = Constant<value_ints=[-1, {top_k}]>()",
        "chosen = Reshape(experts, chosen_shape)",
        "weights = Reshape(scores, chosen_shape)",
        *(_scaled_rows(fields["top_k"]) if fields["scale_input"] else [
            "rows = Reshape(x, rows_shape)",
            "least = Constant<value_float=1e-30>()",
            "sizes = Abs(weights)",
            "positive = Max(sizes, least)",
            "logits = Log(positive)"]),
        "num_tokens = Shape<end=1>(rows)",
        "num_experts = Shape<end=1>(down)",
        "grid = Concat<axis=0>(num_tokens, num_experts)",
        "never = Constant<value_float=-1e30>()",
        "nowhere = Expand(never, grid)",
        "router = ScatterElements<axis=-1>(nowhere, chosen, logits)",
        f"mean = com.microsoft.{kernel}k={top_k}, normalize_routing_weights=1, "
        f'activation_type="swiglu", swiglu_fusion=1, activation_alpha={fields["alpha"]!r}, '
        f"activation_beta={fields['up_offset']!r}{limit}>"
        f"(rows, router, {given.rstrip(', ')})",
        *(["token_count = Shape<end=1>(grouped)",
           "made_shape = Concat<axis=0>(token_count, slots, last)",
           "made = Reshape(mean, made_shape)", "sum = ReduceSum<keepdims=0>(made, second)"]
          if fields["scale_input"] else
          ["total = ReduceSum<keepdims=1>(weights, last)", "sum = Mul(mean, total)"]),
    ]


def _scaled_rows(top_k: int) -> list[str]:
    """Return lines for `rows` [num_tokens * top_k, hidden], x times each score."""
    return ["second = Constant<value_ints=[1]>()", f"slots = Constant<value_ints=[{top_k}]>()",
            "x_rows = Reshape(x, rows_shape)", "x_column = Unsqueeze(x_rows, second)",
            "slots_shape = Concat<axis=0>(last, slots, second)",
            "slot_scores = Reshape(scores, slots_shape)", "grouped = Mul(x_column, slot_scores)",
            "rows = Reshape(grouped, rows_shape)", "logits = Sub(weights, weights)"]


def _dims(fields: Fields, present: frozenset[str]) -> dict[str, Shape]:
    both: int | str = "2 * inner" if fields["gated"] else "inner"
    hidden: int | str = "hidden"
    packed: dict[str, Shape] = {}
    if fields["weight_dtype"]:
        hidden, inner = _check_packed(fields, present)
        both, size = inner * (1 + fields["gated"]), fields["group_size"]
        per_byte = CODE_TYPES[fields["weight_dtype"]].per_byte
        for name, rows, width in (("gate_up", both, hidden), ("down", hidden, inner)):
            packed |= {name: ("experts", rows, width // per_byte),
                       f"{name}_scale": ("experts", rows, width // size),
                       f"{name}_zero": ("experts", rows, -(-width // size // per_byte))}
    elif any(role.scale in present or role.zero in present for role in _ROLES):
        raise ValueError("Experts takes scales and zeros with a weight_dtype only")
    check_rounding("Experts", fields)
    _check_adapters(present)
    inner_width: int | str = fields["inner_features"] if fields["weight_dtype"] else "inner"
    adapters: dict[str, Shape] = {"lora_ids": ("num_tokens",)}
    for stack, outputs, columns in (("gate_up", both, hidden), ("down", hidden, inner_width)):
        own = f"{stack}_lora_rows"
        adapters |= {f"{stack}_lora_a": (own, "experts", columns),
                     f"{stack}_lora_b": (own, "experts", outputs),
                     f"{stack}_lora_owner": (own,),
                     f"{stack}_lora_down": ("experts", "slots", f"{stack}_rank", columns),
                     f"{stack}_lora_up": ("slots", f"{stack}_outputs", f"{stack}_rank"),
                     f"{stack}_lora_ranks": ("slots",)}
    return {"x": ("num_tokens", hidden), "experts": ("num_tokens", fields["top_k"]),
            **adapters,
            "scores": ("num_tokens", fields["top_k"]), "gate_up": ("experts", both, hidden),
            "down": ("experts", hidden, "inner"), "gate_up_bias": ("experts", both),
            "down_bias": ("experts", hidden), "residual": ("num_tokens", hidden),
            **{name: ("experts", both, "groups") for role in _ROLES
               for name in (role.scale, role.zero)}, **packed}


def _shapes(shapes: Mapping[str, Shape], fields: Fields) -> Sequence[Shape]:
    """Return the output's shape.

    Raises:
        ValueError: adapters in slots have other outputs than the experts' weights have rows.
    """
    for stack in STACKS:
        up, weight = shapes.get(f"{stack}_lora_up"), shapes[stack]
        outputs = [dim for dim in weight[:2] if isinstance(dim, int)]
        if up is not None and len(outputs) == 2 and up[1] != outputs[0] * outputs[1]:
            raise ValueError(f"Experts' {stack}_lora_up is {list(up)}, expected "
                             f"{outputs[0] * outputs[1]} outputs")
    return [shapes["x"]]


def _check_adapters(present: frozenset[str]) -> None:
    """Raise ValueError unless a node has all inputs of one form of adapters, or none."""
    given = present & {*_IN_ROWS, *_IN_SLOTS, "lora_ids"}
    if given and given not in ({*_IN_ROWS, "lora_ids"}, {*_IN_SLOTS, "lora_ids"}):
        raise ValueError(f"Experts takes lora_ids with all of {', '.join(_IN_ROWS)}, or with all "
                         f"of {', '.join(_IN_SLOTS)}, or none, not {sorted(given)}")


def _check_packed(fields: Fields, present: frozenset[str]) -> tuple[int, int]:
    """Return hidden and inner of quantized weights.

    Raises:
        ValueError: attributes and inputs are inconsistent.
    """
    size, sizes = fields["group_size"], (fields["in_features"], fields["inner_features"])
    own = CODE_TYPES[fields["weight_dtype"]]
    if own.group_size not in (None, size):
        raise ValueError(f"Experts in {fields['weight_dtype']} need groups of {own.group_size}, "
                         f"not {size}")
    brings = own.zero_point is None
    for role in _ROLES:
        if role.scale not in present or (role.zero in present) != brings:
            raise ValueError(f"Experts takes scales with weight_dtype, and zeros with uint4 and "
                             f"uint8 only; {role.weight} differs")
    if size < 1 or any(width < 1 or width % size or width % 2 for width in sizes):
        raise ValueError(f"Experts has in_features and inner_features {sizes}, not divisible into "
                         f"groups of {size}")
    return sizes


def _reference(fields: Fields, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    wide = {name: array.astype(np.float64) for name, array in inputs.items() if name != "experts"}
    for name, width in _widths(fields).items() if fields["weight_dtype"] else ():
        def flat(array: np.ndarray) -> np.ndarray:
            return array.reshape(-1, array.shape[-1])

        zero = inputs.get(f"{name}_zero")
        wide[name] = dequantized(
            {**fields, "in_features": width}, flat(inputs[name]), flat(inputs[f"{name}_scale"]),
            None if zero is None else flat(zero)).reshape(*inputs[name].shape[:2], width)
    shape = wide["x"].shape
    x, experts, scores = (array.reshape(-1, array.shape[-1]) for array in (
        wide["x"], inputs["experts"], wide["scores"]))
    y = np.zeros(x.shape)
    for (token, slot), expert in np.ndenumerate(experts):
        own = expert - fields["first_expert"] * fields["sharded"]
        if not 0 <= own < len(wide["down"]):
            continue
        score = scores[token, slot]
        row = x[token] * score if fields["scale_input"] else x[token]
        adapter = int(inputs["lora_ids"].reshape(-1)[token]) if "lora_ids" in inputs else -1
        both = wide["gate_up"][own] @ activations(fields, row) + _adapter_product(
            inputs, "gate_up", own, adapter, row)
        if "gate_up_bias" in wide:
            both = both + wide["gate_up_bias"][own]
        mid = _inner_reference(fields, both)
        made = wide["down"][own] @ activations(fields, mid) + _adapter_product(
            inputs, "down", own, adapter, mid)
        if "down_bias" in wide:
            made = made + wide["down_bias"][own]
        y[token] += made if fields["scale_input"] else score * made
    return [y.reshape(shape) + wide.get("residual", 0.0)]


def _adapter_product(inputs: Mapping[str, np.ndarray], stack: str, expert: int, slot: int,
                     x: np.ndarray) -> np.ndarray | float:
    """Return the product of the adapter in `slot` for an expert, float64 [out], of x [in]."""
    if slot < 0:
        return 0.0
    own = {"lora_ids": np.array([slot], np.int32)}
    if f"{stack}_lora_down" in inputs:
        down, up = inputs[f"{stack}_lora_down"], inputs[f"{stack}_lora_up"]
        own |= {"lora_down": down[expert:expert + 1],
                "lora_up": up.reshape(len(up), len(down), -1, up.shape[2])[:, expert],
                "lora_ranks": inputs[f"{stack}_lora_ranks"]}
    else:
        own |= {f"lora_{part}": inputs[f"{stack}_lora_{part}"][:, expert] for part in "ab"}
        own["lora_owner"] = inputs[f"{stack}_lora_owner"]
    made = adapter_product(own, x[None])
    assert isinstance(made, np.ndarray)
    return np.asarray(made[0])


def _inner_reference(fields: Fields, both: np.ndarray) -> np.ndarray:
    def act(z: np.ndarray) -> np.ndarray:
        if fields["activation"] == "silu":
            return np.asarray(z / (1 + np.exp(-fields["alpha"] * z)))
        return REFERENCE[fields["activation"]](z)

    if not fields["gated"]:
        return act(both)
    gate, up = both[::2], both[1::2]
    if fields["limit"]:
        gate, up = np.minimum(gate, fields["limit"]), np.clip(up, -fields["limit"], fields["limit"])
    return np.asarray(act(gate) * (up + fields["up_offset"]))


def _samples(rng: np.random.Generator) -> list[Sample]:
    def sample(tokens: int, num_experts: int, top_k: int, biases: str = "",
               others: int = 0, residual: bool = False,
               **fields: int | float | str) -> Sample:
        """A sample; `others` experts belong to other ranks."""
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        hidden, inner = 16, 8
        both = inner * (1 + int(fields.get("gated", 1)))
        experts = np.stack([rng.permutation(num_experts + others)[:top_k] for _ in range(tokens)])
        inputs = {"x": normal(tokens, hidden), "experts": experts,
                  "scores": rng.uniform(0.1, 1.5, (tokens, top_k)).astype(np.float32),
                  "gate_up": normal(num_experts, both, hidden),
                  "down": normal(num_experts, hidden, inner)}
        if "up" in biases:
            inputs["gate_up_bias"] = normal(num_experts, both)
        if "down" in biases:
            inputs["down_bias"] = normal(num_experts, hidden)
        if residual:
            inputs["residual"] = normal(tokens, hidden)
        return Sample({"top_k": top_k, **fields}, inputs)

    def packed(dtype: str, size: int, plain: Sample) -> Sample:
        """A sample with random codes. A body may quantize its activations to 8 bits."""
        own, width = CODE_TYPES[dtype], 32
        bits = own.bits
        inputs = {**plain.inputs, **{name: rng.standard_normal(
            (len(plain.inputs[name]), width)).astype(np.float32)
            for name in ("x", "residual") if name in plain.inputs}}
        experts = len(plain.inputs["down"])
        for name, rows in (("gate_up", 2 * width), ("down", width)):
            shape = experts * rows, width // size
            codes = rng.integers(0, 2 ** bits, (experts * rows, width), np.uint8)
            if dtype == FLOAT8:
                codes &= 0xBF  # no NaN
            inputs[name] = pack(codes, bits)
            inputs[f"{name}_scale"] = rng.uniform(0.01, 0.02, shape).astype(np.float32) \
                if own.scale_dtype == "float32" else rng.integers(118, 122, shape, np.uint8)
            if own.zero_point is None:
                inputs[f"{name}_zero"] = pack(rng.integers(0, 2 ** bits, shape, np.uint8), bits)
            for part in (name, f"{name}_scale", f"{name}_zero"):
                if part in inputs:
                    inputs[part] = inputs[part].reshape(experts, rows, -1)
            if f"{name}_bias" in inputs:
                inputs[f"{name}_bias"] = rng.standard_normal((experts, rows)).astype(np.float32)
        return Sample({**plain.fields, "weight_dtype": dtype, "group_size": size,
                       "in_features": width, "inner_features": width}, inputs, 0.03)

    def adapted(plain: Sample, *, slots: bool) -> Sample:
        """A sample with adapters in three slots, one of them of no token, and tokens without."""
        inputs = dict(plain.inputs)
        tokens, experts = len(inputs["x"]), len(inputs["down"])
        hidden, inner = inputs["x"].shape[1], plain.fields.get("inner_features", 8)
        ids = np.resize(np.array([1, -1, 2], np.int32), tokens)
        for stack, rows, width in (("gate_up", inputs["gate_up"].shape[1], hidden),
                                   ("down", hidden, inner)):
            if slots:
                made = slot_inputs(rng, ids, width, experts * rows, [8, 8, 16], experts)
                made["lora_down"] *= 0.3
                del made["lora_ids"], made["lora_part"]
            else:
                made = {"lora_a": 0.3 * rng.standard_normal((4, experts, width)),
                        "lora_b": rng.standard_normal((4, experts, rows))}
                made = {name: array.astype(np.float32) for name, array in made.items()}
                made["lora_owner"] = np.array([0, 1, 1, 2], np.int32)
            inputs |= {f"{stack}_{name}": array for name, array in made.items()}
        return Sample(plain.fields, {**inputs, "lora_ids": ids}, plain.tolerance)

    plain = [
        packed("int4", 16, sample(1, 4, 2)),
        packed("uint4", 32, sample(9, 4, 2, "up down")),
        packed("int8", 32, sample(5, 4, 3, "down", alpha=1.702, limit=1.5, up_offset=1.0)),
        packed("uint8", 16, sample(3, 5, 2, activation="gelu_tanh")),
        packed("int4", 32, sample(8, 3, 3, "up down", others=5, first_expert=2, sharded=1)),
        packed("float8_e4m3fn", 32, sample(4, 4, 2, residual=True)),
        packed("float8_e4m3fn", 32, sample(5, 4, 2, activation_dtype=FLOAT8,
                                           activation_group_size=32)),
        packed("float8_e4m3fn", 16, sample(3, 4, 3, "up down", activation_dtype=FLOAT8)),
        packed("mxfp4", 32, sample(5, 4, 3, "up down", alpha=1.702, limit=1.5, up_offset=1.0)),
        packed("mxfp4", 32, sample(1, 3, 3, others=5, first_expert=2, sharded=1)),
        sample(1, 4, 2),
        sample(9, 4, 2),
        sample(1, 4, 3, "down", residual=True),
        sample(6, 4, 2, residual=True),
        sample(5, 3, 3, "up down", others=5, residual=True, first_expert=2, sharded=1),
        sample(5, 6, 6, "up down"),
        sample(7, 5, 3, "up down", alpha=1.702, limit=1.5, up_offset=1.0),
        sample(4, 8, 1, "down", activation="gelu_tanh"),
        sample(6, 4, 2, activation="relu2", gated=0),
        sample(3, 4, 2, "up", gated=0, activation="gelu"),
        sample(5, 4, 1, scale_input=1),
        sample(6, 5, 3, "up down", scale_input=1),
        sample(8, 3, 3, "up down", others=5, first_expert=2, sharded=1),
        sample(2, 3, 2, others=4, first_expert=4, sharded=1),
    ]
    return [*plain, *(adapted(own, slots=slots) for slots in (False, True) for own in (
        sample(6, 4, 2, "up down", residual=True), sample(1, 4, 2), sample(5, 4, 2, scale_input=1),
        sample(4, 4, 2, activation="relu2", gated=0),
        sample(8, 3, 3, "up down", others=5, first_expert=2, sharded=1),
        packed("int4", 16, sample(3, 4, 2)), packed("float8_e4m3fn", 32, sample(
            5, 4, 2, activation_dtype=FLOAT8, activation_group_size=32))))]


OP = Op(
    name="Experts",
    version=3,
    inputs=("x", "experts", "scores", "gate_up", "down", "gate_up_bias?", "down_bias?",
            "gate_up_scale?", "gate_up_zero?", "down_scale?", "down_zero?", "residual?",
            *(f"{name}?" for name in (*_IN_ROWS, "lora_ids", *_IN_SLOTS))),
    outputs=("y",),
    fields={"top_k": 0, "activation": "silu", "gated": 1, "alpha": 1.0, "limit": 0.0,
            "up_offset": 0.0, "scale_input": 0, "first_expert": 0, "sharded": 0,
            "weight_dtype": "", "group_size": 0, "in_features": 0, "inner_features": 0,
            "activation_dtype": "", "activation_group_size": 0},
    required=("top_k",),
    choices={"activation": tuple(REFERENCE), "gated": (0, 1), "scale_input": (0, 1),
             "sharded": (0, 1), "weight_dtype": ("", *CODE_TYPES),
             "activation_dtype": ("", FLOAT8)},
    shapes=_shapes,
    dims=_dims,
    shard=(ByExperts(("gate_up", "down", "gate_up_bias", "down_bias"), "first_expert", "sharded"),
           ByInner(("gate_up", "gate_up_bias"), "down", paired="gated", added=("down_bias",))),
    body=_body,
    bodies={"cpu": _cpu},
    integer_inputs=frozenset({"experts", "lora_ids", *(
        f"{stack}_lora_{name}" for stack in STACKS for name in ("owner", "ranks"))}),
    coreless=frozenset(_IN_ROWS),
    float32_inputs=frozenset({"scores", "gate_up_scale", "down_scale"}),
    quantized=_ROLES,
    reference=_reference,
    samples=_samples,
)
