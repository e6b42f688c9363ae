"""Weight quantization: a mixin for every op that has a weight matrix [out, in].

A quantized weight has groups of `group_size` values along a row. A value is (code - zero) · scale
with the scale and zero point of its group, or code · scale + minimum. Layout by attribute
`weight_dtype`:

    ""             weight [out, in], of the model's dtype; no scales.
    int4, uint4    weight uint8 [out, in / 2]: two codes per byte, the even column's in the low
                   nibble. int4 has code = value + 8, so its zero point is always 8; uint4 has
                   zero points or minima.
    int8, uint8    weight uint8 [out, in]. int8 has code = value + 128, so its zero point is always
                   128; uint8 has zero points or minima.
    float8_e4m3fn  weight uint8 [out, in], the bits of the values; zero point always 0. No NaN.
    mxfp4          weight uint8 [out, in / 2] as for int4; a code is the bits of an e2m1 value:
                   sign, 2 exponent bits, 1 mantissa bit; in groups of 32. Experts only.

    weight_scale   float32 [out, in / group_size]; not 0, may be negative. For mxfp4 uint8 (e8m0):
                   exponent bits, 127 for 1; never 255.
    weight_zero    for uint4: uint8 [out, ceil(in / group_size / 2)], rows packed as the weight's,
                   the last high nibble 0 if the number of groups is odd;
                   for uint8: uint8 [out, in / group_size].
    weight_min     for uint4 and uint8: float32 [out, in / group_size], instead of zero points. GGUF
                   has such weights. A kernel adds the minimum times the sum of x's group.
    weight_blocks  for float8_e4m3fn in groups of 128: the scales again, per block of 128 rows,
                   float32 [ceil(out / 128), groups], groups padded to a multiple of 4. For
                   kernels that multiply whole blocks; others use weight_scale.

Activations may be quantized too, by attribute `activation_dtype`:

    ""             x is multiplied as it is.
    float8_e4m3fn  for weights of that dtype: each row of the GEMM's input (for NormGemm after its
                   norm) becomes float8_e4m3fn values times a scale: `activation_scale` (static),
                   or if that is 0 (dynamic) the row's maximum magnitude over 448; with an
                   `activation_group_size`, which equals the weight's group_size, the maximum of
                   each group of a row. Independent of the number of rows and of the kernel.
                   Saturates at 448 times the scale.
    int8           for weights of that dtype with a scale per row, on CPUs: each row of the GEMM's
                   input becomes integers from -127 to 127 times a scale, the row's maximum
                   magnitude over 127 (dynamic).

One scale per row is a group_size of `in`. Blocks of 128 × 128 are groups of 128 whose scales are
repeated down the rows. The layout is also that of com.microsoft.MatMulNBits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmc.plugins import Fields, Op, Sample, Shape
from llmc.plugins.code_types import CODE_TYPES, E8M0_NUMBERS, LINEAR_CODE_TYPES
from llmc.plugins.lora import (
    LORA_INPUTS,
    adapter_product,
    adapter_text,
    cpu_adapter_text,
    takes_adapters,
)
from llmc.plugins.roles import Quantized

FLOAT8 = "float8_e4m3fn"
INT8 = "int8"
FLOAT8_MOST = 448.0
_INT8_MOST = 127.0
_LEAST_SCALE = 1e-30  # minimum activation scale: that of a zero row
_FIELDS = {"weight_dtype": "", "group_size": 0, "in_features": 0, "out_features": 0}
_ROUNDING_FIELDS = {"activation_dtype": "", "activation_scale": 0.0, "activation_group_size": 0}
BLOCK = 128  # rows and columns per scale of weight_blocks
ROUNDED_UNIT = 8  # columns that kernels store at once
_KERNEL_BLOCKS = (256, 128, 64, 32, 16)  # block sizes of CPU MatMulNBits
_INT8_DOT_PRODUCTS = 4  # MatMulNBits accuracy_level


def quantizable(op: Op, weight: str = "weight", row_sums: str = "", rounds: bool = True,
                takes_rounded: bool = False) -> Op:
    """Return `op` with its input `weight` quantizable.

    Its bodies compute the product by `product` or `cpu_product`, or get the matrix by `dequantize`.

    Args:
        op: the op to extend.
        weight: the input that may be quantized.
        row_sums: the input, if there is one, that has the sums of the weight's rows.
        rounds: whether activations may be quantized; its reference then gets the GEMM's input from
            `activations`.
        takes_rounded: whether x may be float8_e4m3fn, according to attribute `x_dtype`; its values
            are to be multiplied by `activation_scale`.
    """
    role = Quantized(weight, row_sums=row_sums, rounds=rounds,
                     blocks="weight_blocks" if rounds else "")

    def dims(fields: Fields, present: frozenset[str]) -> Mapping[str, Shape]:
        assert op.dims is not None and op.samples is not None and op.reference is not None
        known = dict(op.dims(fields, present))
        _check(op, fields, present)
        rows, columns = known[weight]
        if not fields["weight_dtype"]:
            return {**known, role.scale: (rows, "groups"), role.zero: (rows, "zeros"),
                    role.minimum: (rows, "groups"), **blocks_of("blocks", "block_groups")}
        per_byte, groups = _per_byte(fields), fields["in_features"] // fields["group_size"]
        known = {name: tuple(fields["in_features"] if dim == columns else dim for dim in shape)
                 for name, shape in known.items()}
        packed = -(-groups // per_byte)
        return {**known, weight: (rows, fields["in_features"] // per_byte),
                role.scale: (rows, groups), role.zero: (rows, packed),
                role.minimum: (rows, groups),
                **blocks_of(*blocks_shape(fields["out_features"], groups))}

    def blocks_of(*shape: int | str) -> dict[str, Shape]:
        return {role.blocks: shape} if role.blocks else {}

    def shapes(given: Mapping[str, Shape], fields: Fields) -> Sequence[Shape]:
        if not fields["weight_dtype"]:
            return op.shapes(given, fields)
        rows = given[weight][0]
        if rows != fields["out_features"]:
            raise ValueError(f"{op.name}'s {weight} has {rows} rows, out_features is "
                             f"{fields['out_features']}")
        return op.shapes({**given, weight: (rows, fields["in_features"])}, fields)

    def reference(fields: Fields, inputs: Mapping[str, Any]) -> Sequence[Any]:
        assert op.reference is not None
        if fields["weight_dtype"]:
            inputs = {**inputs, weight: dequantized(fields, inputs[weight], inputs[role.scale],
                                                    inputs.get(role.zero),
                                                    inputs.get(role.minimum))}
        return op.reference(fields, inputs)

    def samples(rng: np.random.Generator) -> Sequence[Sample]:
        assert op.samples is not None
        plain = op.samples(rng)
        kinds = (("int4", 32, ""), ("uint4", 16, "zero"), ("uint4", 32, "zero"), ("int8", 96, ""),
                 ("uint8", 12, "zero"), (FLOAT8, 48, ""), ("int4", 96, ""),
                 ("uint4", 32, "min"), ("uint8", 16, "min"), ("uint8", 12, "min"))
        made = [*plain, *(_quantized_sample(rng, plain[index % len(plain)], weight, *kind)
                          for index, kind in enumerate(kinds))]
        for index, size in enumerate((96, 48) if rounds else ()):
            sample = _quantized_sample(rng, plain[index % len(plain)], weight, FLOAT8, size, "")
            made += [Sample({**sample.fields, "activation_dtype": FLOAT8,
                             "activation_scale": scale}, sample.inputs)
                     for scale in (0.0, 0.0037137)]
            if takes_rounded:
                made.append(Sample({**made[-1].fields, "x_dtype": FLOAT8},
                                   {**sample.inputs, "x": _over(sample.inputs["x"], 0.0037137)}))
        for size, brings in ((32, ""), (BLOCK, "blocks")) if rounds else ():
            sample = _quantized_sample(rng, plain[size % len(plain)], weight, FLOAT8, size, brings)
            made.append(Sample({**sample.fields, "activation_dtype": FLOAT8,
                                "activation_group_size": size}, sample.inputs))
        return made

    return dataclasses.replace(
        op, inputs=(*op.inputs, f"{role.scale}?", f"{role.zero}?", f"{role.minimum}?",
                    *([f"{role.blocks}?"] if role.blocks else ())),
        fields={**op.fields, **_FIELDS, **(_ROUNDING_FIELDS if rounds else {}),
                **({"x_dtype": ""} if takes_rounded else {})},
        choices={**op.choices, "weight_dtype": ("", *LINEAR_CODE_TYPES),
                 **({"activation_dtype": ("", FLOAT8, INT8)} if rounds else {}),
                 **({"x_dtype": ("", FLOAT8)} if takes_rounded else {})},
        float32_inputs=op.float32_inputs | {role.scale, role.minimum} | {*blocks_of()},
        quantized=(role,),
        dims=dims, shapes=shapes, reference=reference, samples=samples)


def blocks_shape(out: int, groups: int) -> tuple[int, int]:
    """Return the shape of weight_blocks."""
    return -(-out // BLOCK), -(-groups // 4) * 4


def _per_byte(fields: Fields) -> int:
    return CODE_TYPES[fields["weight_dtype"]].per_byte


def _check(op: Op, fields: Fields, present: frozenset[str]) -> None:
    """Raises ValueError if attributes and inputs are inconsistent."""
    dtype, size, width = (fields[name] for name in ("weight_dtype", "group_size", "in_features"))
    if ("weight_scale" in present) != bool(dtype):
        raise ValueError(f"{op.name} needs weight_scale exactly with a weight_dtype")
    if ("weight_zero" in present) + ("weight_min" in present) != (
            bool(dtype) and CODE_TYPES[dtype].zero_point is None):
        raise ValueError(f"{op.name} needs weight_zero or weight_min exactly with weight_dtype "
                         f"uint4 or uint8")
    if dtype and (size < 1 or width < 1 or width % size or width % _per_byte(fields)):
        raise ValueError(f"{op.name} has in_features {width}, not divisible into groups of {size}")
    check_rounding(op.name, fields)
    scale = fields.get("activation_scale", 0.0)
    if scale < 0 or (scale and not fields["activation_dtype"]):
        raise ValueError(f"{op.name} takes an activation_scale above 0 with an activation_dtype, "
                         f"not {scale} with {fields['activation_dtype']!r}")
    if "weight_blocks" in present and (dtype, size) != (FLOAT8, BLOCK):
        raise ValueError(f"{op.name} takes weight_blocks with weight_dtype {FLOAT8} in groups of "
                         f"{BLOCK} only")
    if fields.get("x_dtype") and not scale:
        raise ValueError(f"{op.name} takes an x_dtype with an activation_scale above 0")


def check_rounding(name: str, fields: Fields) -> None:
    """Raises ValueError if the attributes for activation quantization are inconsistent."""
    dtype, own = fields.get("activation_dtype"), fields.get("activation_group_size", 0)
    if dtype == INT8:
        if fields["weight_dtype"] != INT8 or fields["group_size"] != fields["in_features"] \
                or own or fields["activation_scale"]:
            raise ValueError(f"{name} takes activation_dtype {INT8} with weight_dtype {INT8} and a "
                             f"scale per row and per token only")
        return
    if dtype and fields["weight_dtype"] != FLOAT8:
        raise ValueError(f"{name} takes activation_dtype with weight_dtype {FLOAT8} only, not "
                         f"{fields['weight_dtype']!r}")
    if own and (own != fields["group_size"] or not dtype or fields.get("activation_scale")):
        raise ValueError(f"{name} takes an activation_group_size equal to the weight's group_size, "
                         f"with an activation_dtype and no activation_scale, not {own}")


def activations(fields: Fields, x: np.ndarray) -> np.ndarray:
    """Return the GEMM's input float64 [..., in]: x as it is or quantized."""
    x = x.astype(np.float64)
    if not fields["activation_dtype"]:
        return x
    if fields["activation_dtype"] == INT8:
        scale = np.maximum(np.abs(x).max(-1, keepdims=True, initial=0) / _INT8_MOST, _LEAST_SCALE)
        rounded: np.ndarray = np.rint(x / scale) * scale
        return rounded
    size = fields["activation_group_size"] or x.shape[-1]
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // max(size, 1), size)
    scale = fields.get("activation_scale") or \
        np.maximum(np.abs(groups).max(-1, keepdims=True, initial=0) / FLOAT8_MOST, _LEAST_SCALE)
    numbers: np.ndarray = (groups if fields.get("x_dtype") else _over(groups, scale)) * scale
    return numbers.reshape(x.shape)


def linear(fields: Fields, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return x · weightᵀ with the products of adapters, float64 [..., out]."""
    y: np.ndarray = activations(fields, inputs["x"]) @ inputs["weight"].astype(np.float64).T
    return y + adapter_product(inputs, inputs["x"])


def _over(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Return x / scale rounded to float8_e4m3fn, in the dtype of x."""
    import ml_dtypes
    codes = np.clip(x / scale, -FLOAT8_MOST, FLOAT8_MOST).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(x.dtype)


def rounds_output(op: Op, rounds: Callable[[Fields, frozenset[str]], bool]) -> Op:
    """Return `op` with its first output in float8_e4m3fn if attribute `out_scale` is above 0.

    The output's width must be a multiple of `ROUNDED_UNIT`; `rounds` says for which attributes and
    inputs this is supported.
    """
    def reference(fields: Fields, inputs: Mapping[str, Any]) -> Sequence[Any]:
        assert op.reference is not None
        made, *others = op.reference(fields, inputs)
        return [_over(made, fields["out_scale"]) if fields["out_scale"] else made, *others]

    def samples(rng: np.random.Generator) -> list[Sample]:
        assert op.samples is not None
        plain = [*op.samples(rng)]
        made = [Sample({**sample.fields, "out_scale": 0.0125}, sample.inputs) for sample in plain
                if rounds({**op.fields, **sample.fields}, frozenset(sample.inputs))
                and _width(sample) % ROUNDED_UNIT == 0]
        return [*plain, *made[:4]]

    def _width(sample: Sample) -> int:
        given = {name: array.shape for name, array in sample.inputs.items()}
        return int(op.shapes(given, {**op.fields, **sample.fields})[0][-1])

    def dims(fields: Fields, present: frozenset[str]) -> Mapping[str, Shape]:
        assert op.dims is not None
        scale = fields["out_scale"]
        if scale < 0 or (scale and not rounds(fields, present)):
            raise ValueError(f"{op.name} takes an out_scale above 0 where its output may be "
                             f"quantized, not {scale} with {sorted(present)}")
        return op.dims(fields, present)

    def shapes(given: Mapping[str, Shape], fields: Fields) -> Sequence[Shape]:
        made = op.shapes(given, fields)
        width = made[0][-1]
        if fields.get("out_scale") and isinstance(width, int) and width % ROUNDED_UNIT:
            raise ValueError(f"{op.name} takes an out_scale for multiples of {ROUNDED_UNIT} "
                             f"columns, not {width}")
        return made

    return dataclasses.replace(op, fields={**op.fields, "out_scale": 0.0}, rounds=rounds,
                               dims=dims, shapes=shapes, reference=reference, samples=samples)


def dequantized(fields: Fields, weight: np.ndarray, scale: np.ndarray,
                zero: np.ndarray | None, minimum: np.ndarray | None = None) -> np.ndarray:
    """Return the matrix float64 [out, in] of a quantized weight."""
    own = CODE_TYPES[fields["weight_dtype"]]
    bits = own.bits
    zeros: np.ndarray | int = own.zero_point or 0
    if zero is not None:
        zeros = unpack(zero, bits)[:, :scale.shape[1]]
        zeros = zeros.astype(np.float64).repeat(fields["group_size"], 1)
    codes = unpack(weight, bits)
    codes = np.array(own.numbers)[codes] if own.numbers else codes.astype(np.float64)
    if own.scale_dtype != "float32":
        scale = np.array(E8M0_NUMBERS)[scale]
    matrix: np.ndarray = (codes - zeros) * scale.astype(np.float64).repeat(fields["group_size"], 1)
    if minimum is not None:
        matrix += minimum.astype(np.float64).repeat(fields["group_size"], 1)
    return matrix


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of codes uint8 [rows, n] to [rows, ceil(n · bits / 8)]."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    packed: np.ndarray = codes[:, ::2] | codes[:, 1::2] << 4
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack rows of codes to [rows, 8 / bits · n]."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def _unpack_lines(fields: Fields, name: str, codes: str) -> list[str]:
    """Return ONNX text that unpacks `name` to `codes`, uint8 [rows, n]."""
    if _per_byte(fields) == 1:
        return [f"{codes} = Identity({name})"]
    return [f"{codes}_mask = Constant<value = uint8[1] {{15}}>()",
            f"{codes}_four = Constant<value = uint8[1] {{4}}>()",
            f"{codes}_last = Constant<value_ints=[-1]>()",
            f"{codes}_flat = Constant<value_ints=[0, -1]>()",
            f"{codes}_even = BitwiseAnd({name}, {codes}_mask)",
            f'{codes}_odd = BitShift<direction="RIGHT">({name}, {codes}_four)',
            f"{codes}_evens = Unsqueeze({codes}_even, {codes}_last)",
            f"{codes}_odds = Unsqueeze({codes}_odd, {codes}_last)",
            f"{codes}_pairs = Concat<axis=-1>({codes}_evens, {codes}_odds)",
            f"{codes} = Reshape({codes}_pairs, {codes}_flat)"]


def dequantize(fields: Fields, present: frozenset[str], made: str, weight: str = "weight",
               scale: str = "weight_scale", zero: str = "weight_zero",
               minimum: str = "weight_min", folds: bool = False) -> str:
    """Return ONNX text for `made`, the dequantized weight float32 [rows, in].

    With `folds`, only ops that ONNX Runtime constant-folds when it loads the model.
    """
    dtype, size = fields["weight_dtype"], fields["group_size"]
    own = CODE_TYPES[dtype]
    if own.numbers:
        # ONNX has no bit cast. ONNX Runtime would run DequantizeLinear in every step, but
        # constant-folds this when it loads the model.
        numbers = ", ".join(map(repr, own.numbers))
        lines = [*_unpack_lines(fields, weight, f"{made}_stored"),
                 f"{made}_numbers = Constant<value_floats=[{numbers}]>()",
                 f"{made}_bits = Cast<to=6>({made}_stored)",
                 f"{made}_codes = Gather<axis=0>({made}_numbers, {made}_bits)",
                 f"{made}_groups = Constant<value_ints=[0, -1, {size}]>()",
                 f"{made}_flat = Constant<value_ints=[0, -1]>()",
                 f"{made}_last = Constant<value_ints=[-1]>()",
                 f"{made}_grouped = Reshape({made}_codes, {made}_groups)"]
        if own.scale_dtype != "float32":
            powers = ", ".join(map(repr, E8M0_NUMBERS))
            lines += [f"{made}_powers = Constant<value_floats=[{powers}]>()",
                      f"{made}_exponents = Cast<to=6>({scale})",
                      f"{made}_power = Gather<axis=0>({made}_powers, {made}_exponents)"]
            scale = f"{made}_power"
        return "\n".join([*lines, f"{made}_scale = Unsqueeze({scale}, {made}_last)",
                          f"{made}_scaled = Mul({made}_grouped, {made}_scale)",
                          f"{made} = Reshape({made}_scaled, {made}_flat)"])
    lines = _unpack_lines(fields, weight, f"{made}_codes")
    if "weight_zero" in present:
        groups = fields["in_features"] // size
        lines += [*_unpack_lines(fields, zero, f"{made}_all_zeros"),
                  f"{made}_first = Constant<value_ints=[0]>()",
                  f"{made}_end = Constant<value_ints=[{groups}]>()",
                  f"{made}_axis = Constant<value_ints=[1]>()",
                  f"{made}_zeros = Slice({made}_all_zeros, {made}_first, {made}_end, {made}_axis)"]
    else:
        lines += [f"{made}_shape = Shape({scale})",
                  f"{made}_zeros = ConstantOfShape<value = uint8[1] {{{own.zero_point or 0}}}>"
                  f"({made}_shape)"]
    result = f"{made}_above" if "weight_min" in present else made
    if folds:
        lines += [f"{made}_each = Constant<value_ints=[0, -1, {size}]>()",
                  f"{made}_rows = Constant<value_ints=[0, -1]>()",
                  f"{made}_inner = Constant<value_ints=[-1]>()",
                  f"{made}_wide = Cast<to=1>({made}_codes)",
                  f"{made}_wide_zeros = Cast<to=1>({made}_zeros)",
                  f"{made}_wide_groups = Reshape({made}_wide, {made}_each)",
                  f"{made}_zero_column = Unsqueeze({made}_wide_zeros, {made}_inner)",
                  f"{made}_scale_column = Unsqueeze({scale}, {made}_inner)",
                  f"{made}_numbers = Sub({made}_wide_groups, {made}_zero_column)",
                  f"{made}_products = Mul({made}_numbers, {made}_scale_column)",
                  f"{result} = Reshape({made}_products, {made}_rows)"]
    else:
        lines.append(f"{result} = DequantizeLinear<axis=1, block_size={size}>"
                     f"({made}_codes, {scale}, {made}_zeros)")
    if "weight_min" in present:
        lines += [f"{made}_groups = Constant<value_ints=[0, -1, {size}]>()",
                  f"{made}_flat = Constant<value_ints=[0, -1]>()",
                  f"{made}_last = Constant<value_ints=[-1]>()",
                  f"{made}_grouped = Reshape({made}_above, {made}_groups)",
                  f"{made}_min = Unsqueeze({minimum}, {made}_last)",
                  f"{made}_sums = Add({made}_grouped, {made}_min)",
                  f"{made} = Reshape({made}_sums, {made}_flat)"]
    return "\n".join(lines)


def rounded(fields: Fields, x: str, own: str = "x") -> tuple[list[str], str]:
    """Return ONNX text for the GEMM's input, and its name.

    The name is that of x if activations are not quantized; otherwise it starts with `own`.
    """
    if not fields["activation_dtype"]:
        return [], x
    fixed, made = fields.get("activation_scale", 0.0), f"{own}_rounded"
    if fields["activation_dtype"] == INT8:
        return [*_row_scale(x, f"{own}_scale", _INT8_MOST), f"{own}_scaled = Div({x}, {own}_scale)",
                f"{own}_codes = Round({own}_scaled)", f"{made} = Mul({own}_codes, {own}_scale)"], \
            made
    if fields.get("x_dtype"):
        return [f"{own}_scale = Constant<value_floats=[{fixed!r}]>()",
                f"{own}_numbers = Cast<to=1>({x})", f"{made} = Mul({own}_numbers, {own}_scale)"], \
            made
    size, before, behind = fields["activation_group_size"], [], []
    if size:
        before = [f"{own}_each = Constant<value_ints=[-1, {size}]>()",
                  f"{own}_groups = Reshape({x}, {own}_each)"]
        behind = [f"{own}_shape = Shape({x})", f"{own}_whole = Reshape({made}, {own}_shape)"]
        x = f"{own}_groups"
    scale = [f"{own}_scale = Constant<value_floats=[{fixed!r}]>()"] if fixed else \
        _row_scale(x, f"{own}_scale", FLOAT8_MOST)
    return [*before, *scale, f"{own}_scaled = Div({x}, {own}_scale)",
            f"{own}_codes = Cast<to=17>({own}_scaled)", f"{own}_numbers = Cast<to=1>({own}_codes)",
            f"{made} = Mul({own}_numbers, {own}_scale)", *behind], f"{own}_whole" if size else made


def _row_scale(x: str, made: str, most: float) -> list[str]:
    """Return ONNX text for the scale of each row: its maximum magnitude over `most`."""
    return [f"{made}_most = Constant<value_floats=[{most}]>()",
            f"{made}_least = Constant<value_floats=[{_LEAST_SCALE!r}]>()",
            f"{made}_last = Constant<value_ints=[-1]>()",
            f"{made}_sizes = Abs({x})",
            f"{made}_largest = ReduceMax<keepdims=1>({made}_sizes, {made}_last)",
            f"{made}_steps = Div({made}_largest, {made}_most)",
            f"{made} = Max({made}_steps, {made}_least)"]


def product(fields: Fields, present: frozenset[str], made: str, x: str = "x",
            adapted: str = "") -> str:
    """Return ONNX text for `made` = x · weightᵀ, quantized or not, in standard ops.

    It includes the products of adapters, which multiply `adapted`; empty: x.
    """
    if takes_adapters(present):
        return "\n".join([product(fields, present - {*LORA_INPUTS}, f"{made}_base", x),
                          *adapter_text(present, f"{made}_lora", adapted or x),
                          f"{made} = Add({made}_base, {made}_lora)"])
    lines, x = rounded(fields, x)
    matrix = "weight"
    if fields["weight_dtype"]:
        matrix = "matrix"
        lines.append(dequantize(fields, present, matrix))
    return "\n".join([*lines, f"wt = Transpose<perm=[1, 0]>({matrix})",
                      f"{made} = MatMul({x}, wt)"])


def cpu_activation_block(dtype: str, group_size: int) -> int:
    """Return how many activations share a scale in ONNX Runtime's int8 CPU kernels.

    0 if those kernels do not support the weight's format: activations are multiplied as they are.
    """
    fixed = CODE_TYPES[dtype].zero_point
    block = next((block for block in _KERNEL_BLOCKS if group_size % block == 0), 0)
    return 0 if dtype == FLOAT8 or (fixed is None and block != group_size) else block


def cpu_product(fields: Fields, present: frozenset[str], made: str, x: str = "x",
                added: str = "") -> str:
    """Return ONNX text like `product`'s for ONNX Runtime on a CPU, including `added`.

    `added` is [out] or [rows, out]. The products of adapters are added likewise.

    Activations are quantized to int8 per block: other accuracy levels are slower than float32 from
    2 rows on, for 8-bit weights by far (ONNX Runtime 1.32).

    Codes with a minimum are multiplied as signed ones, with the minimum moved accordingly: the
    error of quantized activations is in proportion to the multiplied numbers, and codes from 0 on
    are about three times as large as the weight.
    """
    if "lora_down" in present:
        lines = [product(fields, present, "product" if added else made, x)]
        return "\n".join([*lines, *([f"{made} = Add(product, {added})"] if added else [])])
    if "lora_a" in present:
        adapted = f"{made}_adapted"
        return "\n".join([*cpu_adapter_text(adapted, x, added), cpu_product(
            fields, present - {"lora_a"}, made, x, adapted)])
    dtype, size = fields["weight_dtype"], fields["group_size"]
    width, height = fields["in_features"], fields["out_features"]
    if not dtype or dtype == FLOAT8:  # constant-folded to float32
        lines, x = rounded(fields, x)
        lines += [dequantize(fields, present, "matrix")] if dtype else []
        operands = ", ".join([x, "matrix" if dtype else "weight", *([added] if added else [])])
        return "\n".join([*lines, f"{made} = Gemm<transB=1>({operands})"])
    if fields["activation_dtype"] == INT8:
        lines = _integer_product("product" if added else made, x)
        return "\n".join([*lines, *([f"{made} = Add(product, {added})"] if added else [])])
    bits = CODE_TYPES[dtype].bits
    block = cpu_activation_block(dtype, size)
    if not block:
        lines = [product(fields, present, "product" if added else made, x)]
        return "\n".join([*lines, *([f"{made} = Add(product, {added})"] if added else [])])
    lines = [f"blocks_shape = Constant<value_ints=[0, {width // block}, {block * bits // 8}]>()",
             "blocks = Reshape(weight, blocks_shape)"]
    scale, zero = "weight_scale", ["weight_zero"] if "weight_zero" in present else []
    if block != size:
        scale = "scales"
        lines += ["last = Constant<value_ints=[-1]>()",
                  f"times = Constant<value_ints=[1, 1, {size // block}]>()",
                  "flat = Constant<value_ints=[0, -1]>()",
                  "scale_column = Unsqueeze(weight_scale, last)",
                  "scale_blocks = Expand(scale_column, times)",
                  "scales = Reshape(scale_blocks, flat)"]
    if "weight_min" in present:
        groups = width // size
        lines += [f"center = Constant<value_float={float(2 ** (bits - 1))}>()",
                  "centers = Mul(weight_scale, center)",
                  "center_value = Add(weight_min, centers)",
                  f"groups_shape = Constant<value_ints=[0, {groups}, {size}]>()",
                  f"x_groups = Reshape({x}, groups_shape)",
                  "last = Constant<value_ints=[-1]>()",
                  "x_sums = ReduceSum<keepdims=0>(x_groups, last)",
                  f"above = Gemm<transB=1>(x_sums, center_value{', ' if added else ''}{added})"]
        added = "above"
    given = ", ".join([x, "blocks", scale, *zero])
    lines.append(f"{'product' if added else made} = com.microsoft.MatMulNBits<K={width}, "
                 f"N={height}, bits={bits}, block_size={block}, "
                 f"accuracy_level={_INT8_DOT_PRODUCTS}>({given})")
    return "\n".join([*lines, *([f"{made} = Add(product, {added})"] if added else [])])


def _integer_product(made: str, x: str) -> list[str]:
    """Return ONNX text for `made` = x · weightᵀ as ONNX Runtime multiplies integers.

    Its kernel takes one scale for all rows of x, so each row is divided by its own maximum before,
    and multiplied by it after. Few ops, as a short text spends most of its time between them. Rows
    of zeros have the codes of 0 / 0, which are finite. The weight is signed: unsigned ones take
    three times as long with AVX-512 VNNI (ONNX Runtime 1.32).
    """
    return ["x_last = Constant<value_ints=[-1]>()",
            f"x_sizes = Abs({x})",
            "x_most = ReduceMax<keepdims=1>(x_sizes, x_last)",
            f"x_scaled = Div({x}, x_most)",
            f"x_step = Constant<value = float {{{1 / _INT8_MOST!r}}}>()",
            "x_zero = Constant<value = uint8 {128}>()",
            "x_codes = QuantizeLinear(x_scaled, x_step, x_zero)",
            "wide = Cast<to=6>(weight)",
            "center = Constant<value = int32 {128}>()",
            "centered = Sub(wide, center)",
            "signed = Cast<to=3>(centered)",
            "columns = Transpose<perm=[1, 0]>(signed)",
            "flat = Constant<value_ints=[-1]>()",
            "column_scales = Reshape(weight_scale, flat)",
            "unscaled = com.microsoft.MatMulIntegerToFloat(x_codes, columns, x_step, "
            "column_scales, x_zero)",
            f"{made} = Mul(unscaled, x_most)"]


def _quantized_sample(rng: np.random.Generator, plain: Sample, weight: str, dtype: str,
                      group_size: int, brings: str) -> Sample:
    """Return a sample with its weight replaced by random codes.

    x has multiples of 1/64 with a 127 in each block of 16, so that a body may quantize it to int8
    without error.
    """
    bits, width = CODE_TYPES[dtype].bits, 3 * BLOCK if brings == "blocks" else 96
    height = plain.inputs[weight].shape[0]
    groups = width // group_size
    fields = {**plain.fields, "weight_dtype": dtype, "group_size": group_size,
              "in_features": width, "out_features": height}
    codes = rng.integers(0, 2 ** bits, (height, width), dtype=np.uint8)
    inputs = {**plain.inputs, weight: pack(codes, bits),
              "weight_scale": (rng.choice([-1, 1], (height, groups))
                               * rng.uniform(0.01, 0.02, (height, groups))).astype(np.float32)}
    if dtype == FLOAT8:
        inputs[weight] = codes & 0xBF  # no NaN
    if brings == "zero":
        inputs["weight_zero"] = pack(
            rng.integers(0, 2 ** bits, (height, groups), dtype=np.uint8), bits)
    elif brings == "blocks":
        inputs["weight_scale"] = inputs["weight_scale"][::BLOCK].repeat(BLOCK, 0)[:height]
        blocks = inputs["weight_blocks"] = np.zeros(blocks_shape(height, groups), np.float32)
        blocks[:, :groups] = inputs["weight_scale"][::BLOCK]
    elif brings == "min":
        inputs["weight_min"] = rng.uniform(-0.3, 0.1, (height, groups)).astype(np.float32)
    for name, array in plain.inputs.items():
        across = plain.inputs[weight].shape[1:]
        if name not in ("x", weight) and array.ndim and array.shape[-1:] == across:
            inputs[name] = rng.standard_normal((*array.shape[:-1], width)).astype(np.float32)
    if "x" in inputs:
        x = rng.integers(-100, 100, (len(inputs["x"]), width))
        x[:, ::16] = 127
        inputs["x"] = (x / 64).astype(np.float32)
    if "row_sums" in inputs:
        inputs["row_sums"] = dequantized(fields, inputs[weight], inputs["weight_scale"],
                                         inputs.get("weight_zero"),
                                         inputs.get("weight_min")).sum(1).astype(np.float32)
    return Sample(fields, inputs)


