"""8-bit weights with scales per tensor, row, group or block."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.words import map_rows
from llmc.compiler.quant.scheme import SMALLEST_GROUP
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError
from llmc.plugins.quantization import FLOAT8

TOKEN, ALL = "token", "all"  # granularity of activation scales
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def block_shape(decoder: Decoder, block: Any) -> tuple[int, int]:
    """Rows and columns of a block in a config: [128, 128], or 128x128 in older ones.

    Raises:
        LlmcError: it is neither.
    """
    try:
        rows, columns = map(int, block.split("x") if isinstance(block, str) else block)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise LlmcError(f"'{decoder.origin}' has weights in blocks of {block!r} according to its "
                        f"config; expected a number of rows and one of columns")
    return rows, columns


def read_float8(decoder: Decoder, module: str, suffix: str, block: tuple[int, int] | None,
                rounding: str = "") -> None:
    """Make a weight in FP8.

    Args:
        decoder: of the checkpoint.
        module: its name.
        suffix: of the tensor of its scales.
        block: rows and columns with a common scale; None: scales are not of blocks.
        rounding: TOKEN: activations are quantized to FP8 with a scale per token, or per group of
            a token if the weight is in blocks; ALL: with a static scale, if the module has one;
            "": they are not quantized.

    Raises:
        LlmcError: it is not in FP8, or one of its tensors is missing or damaged.
    """
    name = f"{module}.weight"
    if name not in decoder.left:
        raise LlmcError(f"'{decoder.origin}' has neither '{name}' nor '{name}_packed' for the "
                        f"scales '{module}.{suffix}'; the checkpoint is incomplete")
    if decoder.left[name].dtype != FP8:
        raise LlmcError(f"'{name}' in '{decoder.origin}' is {decoder.left[name].dtype} and has "
                        f"scales; expected FP8 (e4m3)")
    decoder.matrix(name)
    tensor = decoder.left.pop(name)

    def bits(block: np.ndarray) -> np.ndarray:
        found = block.view(np.uint8)
        if ((found & 0x7F) == 0x7F).any():
            raise LlmcError(f"'{name}' in '{decoder.origin}' has NaN among its weights; the "
                            f"checkpoint is damaged")
        return found

    codes = map_rows(tensor, tensor.shape, np.uint8, bits)
    fixed = [f"{module}.{own}" for own in ("input_scale", "activation_scale")
             if f"{module}.{own}" in decoder.left] if rounding == ALL else []
    scale = 0.0
    if fixed:
        given = decoder.shape_of(fixed[0])
        scale = float(decoder.scales(fixed[0], given if math.prod(given) == 1 else ())
                      .load().flat[0])
        if scale < 0:
            raise LlmcError(f"'{fixed[0]}' in '{decoder.origin}' is {scale}; a scale of "
                            f"activations is positive: the checkpoint is damaged")
    elif rounding == ALL:
        decoder.note("activations are not quantized as the checkpoint's config asks, as it has "
                     "no scale for them", module)
    keep_scaled(decoder, module, f"{module}.{suffix}", FLOAT8, codes, block,
                activation_dtype=FLOAT8 if fixed or rounding == TOKEN else "",
                activation_scale=scale)


def keep_scaled(decoder: Decoder, module: str, name: str, dtype: str, codes: Weight,
                block: tuple[int, int] | None, zeros: Weight | None = None,
                **activations: Any) -> None:
    """Make an 8-bit weight with scales per tensor, row, group or block.

    Args:
        decoder: of the checkpoint.
        module: its name.
        name: of the tensor of scales.
        dtype: a code type.
        codes: uint8 [out, in].
        block: rows and columns of a block; None: scales are not of blocks.
        zeros: zero points.
        activations: fields of `Stored` about activations; for blocks, they are per group.
    """
    rows, width = codes.shape
    shape = decoder.shape_of(name)
    height, size = block or (1, 1)
    if block and len(shape) == 2 and (shape[0] != rows or 1 in (rows, height)):
        scales = decoder.scales(name, (-(-rows // height), -(-width // size)))
        group = math.gcd(size, width)
        table = scales.load().repeat(size // group, 1)[:, :width // group]
        rounded = activations.get("activation_dtype", "")
        if activations.get("activation_scale"):
            decoder.note("activations are not quantized by a static scale as the checkpoint's "
                         "config asks: unsupported for weights in blocks", name)
            rounded = ""
        stored = Stored(dtype, codes, Weight(
            (rows, width // group), np.float32,
            lambda start, stop: table[np.arange(start, stop) // height], name),
            activation_dtype=rounded, rounds_groups=bool(rounded))
        decoder.keep(module, stored, "" if group >= SMALLEST_GROUP else
                     "rows are not divisible into groups that a kernel reads: they are read as "
                     "float32")
        return
    if shape in ((), (1,)) or (shape == (1, 1) and rows > 1):
        value = decoder.scales(name, shape).load().reshape(-1)[0]
        scales = Weight((rows, 1), np.float32,
                        lambda start, stop: np.full((stop - start, 1), value), name)
    elif len(shape) == 1:
        flat = decoder.scales(name, (rows,))
        scales = Weight((rows, 1), np.float32, lambda start, stop: flat.rows(start, stop)[:, None],
                        name)
    else:
        scales = decoder.scales(name, (rows, shape[1]))
        decoder.check_groups(name, width, shape[1])
    decoder.keep(module, Stored(dtype, codes, scales, zeros, **activations))
