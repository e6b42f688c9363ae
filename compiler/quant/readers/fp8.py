"""FP8 with scales per block, row or tensor.

    blocks   weight [out, in], weight_scale_inv [out / 128, in / 128]
    tensor   Mistral's and AutoFP8's: the scale of activations is in activation_scale or
             input_scale; if absent, scales are dynamic per token
    rows     FBGEMM's: input_scale_ub, an upper bound of dynamic scales, is ignored
    experts  stacks have a leading axis; their scales are <stack>_scale_inv
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers import Mark, Reader
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.eight_bits import ALL, TOKEN, block_shape, read_float8
from llmc.errors import LlmcError


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights.

    Activations without a stored scale are quantized dynamically: per token, or per group of a token
    if the weight is in blocks.
    """
    block = config.get("weight_block_size", (128, 128))
    block = block and block_shape(decoder, block)
    inverse = any(name.endswith(".weight_scale_inv") for name in decoder.left)
    suffix = "weight_scale_inv" if inverse or config.get("weight_block_size") else "weight_scale"
    rounding = ALL if config.get("activation_scheme") == "static" else TOKEN
    stacks = [name for name in (owner.removesuffix("_scale_inv") for owner in decoder.left
                                if re.search(r"_proj_scale_inv$", owner)) if name in decoder.left]
    for name in stacks:
        _read_experts(decoder, name, block, rounding)
    linear = any(name.endswith(f".{suffix}") for name in decoder.left)
    for module in decoder.modules(suffix) if linear or not stacks else ():
        read_float8(decoder, module, suffix, block, rounding)
        if config.get("scale_fmt") == "ue8m0" and rounding == TOKEN:
            decoder.note("scales of quantized activations are not rounded to powers of two as the "
                         "checkpoint's config asks (scale_fmt ue8m0)", module)
    return True


def _read_experts(decoder: Decoder, name: str, block: tuple[int, int] | None,
                  rounding: str) -> None:
    """Make a stack [num_experts, out, in] in transformers' layout, expert by expert.

    An expert has two halves with separate scales if a block is at least as high as both.

    Raises:
        LlmcError: the tensors are not a stack and its scales.
    """
    shape = decoder.shape_of(name)
    scaled = decoder.shape_of(f"{name}_scale_inv")
    if len(shape) != 3 or len(scaled) != 3:
        raise LlmcError(f"tensor '{name}' in '{decoder.origin}' is {list(shape)} and its scales "
                        f"{list(scaled)}; expected [num_experts, out, in] and one scale matrix per "
                        f"expert")
    count, rows, width = shape
    halves = 2 if scaled[1] == 2 and (block is None or block[0] >= rows) and rows % 2 == 0 else 1
    weight = decoder.take(name, shape, "V").reshape((count * rows, width))
    scales = decoder.take(f"{name}_scale_inv", (count, *scaled[1:]), "fV") \
        .reshape((count * scaled[1], scaled[2]))
    fixed = decoder.left.pop(f"{name}_activation_scale", None)
    weights = []
    for part in range(count * halves):
        module = f"{name}.{part // halves}"
        for own, source, height in (("weight", weight, rows // halves),
                                    ("weight_scale_inv", scales, scaled[1] // halves)):
            decoder.left[f"{module}.{own}"] = source.take_rows(
                np.arange(part * height, (part + 1) * height))
        if fixed is not None:
            decoder.left[f"{module}.activation_scale"] = Weight.of(
                fixed.load().reshape(-1)[part // halves])
        read_float8(decoder, module, "weight_scale_inv", block, rounding)
        weights.append(decoder.made.pop(f"{module}.weight"))
    decoder.made[name] = Weight.stack([
        Weight.concat(weights[first:first + halves]) for first in range(0, len(weights), halves)])


READER = Reader(methods={"fp8": "FP8", "fbgemm_fp8": "FBGEMM FP8"}, read=read,
                marks=(Mark(r"\.weight_scale_inv", "FP8 in blocks"),))
