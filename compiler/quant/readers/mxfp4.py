"""MXFP4 of gpt-oss, for linear layers and stacks of experts.

    weight_blocks   uint8 [out, in / 32, 16]; stacks have a leading axis
    weight_scales   e8m0: an exponent plus 127
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.compiler.quant.readers import Mark, Reader
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.readers.fp4 import fp4_codes, keep_mxfp4
from llmc.compiler.quant.readers.words import map_rows
from llmc.compiler.quant.stored import Stored


def read(decoder: Decoder, config: Mapping[str, Any]) -> bool:
    """Make the quantized weights; False: not in this format."""
    names = [name.removesuffix("_blocks") for name in decoder.left if name.endswith("_blocks")]
    ranks = {name: len(decoder.left[f"{name}_blocks"].shape) for name in names}
    if not names or any(rank != 4 and (rank != 3 or not name.endswith(".weight"))
                        for name, rank in ranks.items()):
        return False
    for name, rank in ranks.items():
        if rank == 4:
            _read_experts(decoder, name)
            continue
        rows, groups, size = decoder.left[f"{name}_blocks"].shape
        blocks = decoder.take(f"{name}_blocks", (rows, groups, 16), "u")
        packed = map_rows(blocks, (rows, groups * size), np.uint8,
                          lambda block: block.reshape(len(block), -1))
        keep_mxfp4(decoder, name.removesuffix(".weight"), packed,
                   decoder.powers(f"{name}_scales", (rows, groups)))
    return True


def _read_experts(decoder: Decoder, name: str) -> None:
    """Make a stack [experts, in, out] from one stored as [experts, out, in]."""
    count, rows, groups, _ = decoder.left[f"{name}_blocks"].shape
    blocks = decoder.take(f"{name}_blocks", (count, rows, groups, 16), "u")
    scales = decoder.powers(f"{name}_scales", (count, rows, groups))
    packed = blocks.reshape((count, rows, groups * 16)).reshape((count * rows, groups * 16))
    stored = Stored("mxfp4", fp4_codes(packed), scales.reshape((count * rows, groups)))
    decoder.made[name] = stored.weight(name).reshape((count, rows, groups * 32)).transpose()


READER = Reader(methods={"mxfp4": "MXFP4"}, read=read,
                marks=(Mark(r"_proj_(blocks|scales)", "MXFP4"),))
