"""FP4 (e2m1) weights of linear layers, NVFP4 and MXFP4, converted to int8 without loss.

NVFP4   uint8 [out, in / 2], weight_scale FP8 [out, in / 16], and a scale of the tensor
MXFP4   uint8 [out, in / 2], weight_scale [out, in / 32] in e8m0
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.words import map_rows
from llmc.compiler.quant.stored import Stored
from llmc.plugins.code_types import E2M1_NUMBERS
from llmc.plugins.quantization import unpack

# Twice the values of FP4 (e2m1), as int8 codes.
_FP4_TWICE = (2 * np.array(E2M1_NUMBERS)).astype(np.int64) + 128


def read_nvfp4(decoder: Decoder, module: str, packed: str, whole: str,
               combine: Callable[[np.ndarray, np.float32], np.ndarray]) -> None:
    """Make a weight in NVFP4, which has scales of 16 columns and one of the tensor."""
    rows, half = (*decoder.shape_of(f"{module}.{packed}"), 0, 0)[:2]
    codes = decoder.take(f"{module}.{packed}", (rows, half), "u")
    given = decoder.shape_of(f"{module}.{whole}")
    scale = decoder.scales(f"{module}.{whole}", given if given == (1,) else ()).load().flat[0]
    groups = decoder.whole_groups(f"{module}.{packed}", 2 * half, 16)
    # FP8 relative to the tensor's scale: in groups of very small values it underflows to 0.
    fine = decoder.scales(f"{module}.weight_scale", (rows, groups), may_vanish=True)
    decoder.note("NVFP4 weights are stored losslessly as int8, with twice the memory", module)
    decoder.keep(module, Stored(
        "int8", map_rows(fp4_codes(codes), (rows, 2 * half), np.uint8,
                         lambda block: _FP4_TWICE[block].astype(np.uint8)),
        map_rows(fine, fine.shape, np.float32,
                 lambda block: combine(block, scale) / np.float32(2))))


def read_mxfp4(decoder: Decoder, module: str) -> None:
    """Make a weight in MXFP4 from weight_packed and weight_scale."""
    rows, half = decoder.matrix(f"{module}.weight_packed")
    packed = decoder.take(f"{module}.weight_packed", (rows, half), "u")
    groups = decoder.whole_groups(f"{module}.weight_packed", 2 * half, 32)
    keep_mxfp4(decoder, module, packed, decoder.powers(f"{module}.weight_scale", (rows, groups)))


def keep_mxfp4(decoder: Decoder, module: str, packed: Weight, scales: Weight) -> None:
    """Make a linear layer's MXFP4 weight as int8, as no kernel reads MXFP4 there."""
    decoder.note("MXFP4 weights are stored losslessly as int8, with twice the memory", module)
    decoder.keep(module, Stored("mxfp4", fp4_codes(packed), scales).as_int8())


def fp4_codes(packed: Weight) -> Weight:
    """FP4 codes, one to a byte, from two in a byte, the first in the low bits."""
    rows, half = packed.shape
    return map_rows(packed, (rows, 2 * half), np.uint8, lambda block: unpack(block, 4))
