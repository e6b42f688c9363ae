"""Quantized weights with zero points or with act-order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.readers.decoder import Decoder
from llmc.compiler.quant.scheme import SMALLEST_GROUP
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError


def with_zeros(bits: int, codes: Weight, scales: Weight, zeros: np.ndarray) -> Stored:
    """A quantized weight with zero points.

    Symmetric if all zero points are in the middle; 8-bit if one exceeds the codes of 4 bits.

    Args:
        bits: of a code.
        codes: uint8 [out, in].
        scales: [out, groups].
        zeros: [out, groups].

    Raises:
        LlmcError: a zero point exceeds 255.
    """
    if (zeros == 2 ** (bits - 1)).all():
        return Stored(f"int{bits}", codes, scales)
    wide = 8 if zeros.max() >= 2 ** bits else bits
    if zeros.max() > 255:
        raise LlmcError(f"'{codes.name}' has a zero point of {zeros.max()}; the largest is 255: "
                        f"the checkpoint is damaged")
    return Stored(f"uint{wide}", codes, scales, Weight.of(zeros.astype(np.uint8)))


def keep_ordered(decoder: Decoder, module: str, stored: Stored, group_index: np.ndarray) -> None:
    """Make a weight whose columns are in activation order (act-order).

    Its columns are sorted by group if all groups have one size; else it is dequantized.

    Args:
        decoder: of the checkpoint.
        module: its name.
        stored: the weight, with columns in the checkpoint's order.
        group_index: [in], the group of each column.
    """
    counts = np.bincount(group_index, minlength=stored.scales.shape[1])
    if (counts == counts[0]).all() and counts[0] >= SMALLEST_GROUP:
        order = np.argsort(group_index, kind="stable")
        decoder.keep(module, replace(stored, codes=stored.codes.take_columns(order), order=order))
        return
    codes, scales, zeros = stored.codes, stored.scales, stored.zeros
    fixed = np.float32(2 ** (stored.bits - 1))

    def rows(start: int, stop: int) -> np.ndarray:
        zero = fixed if zeros is None else \
            zeros.rows(start, stop)[:, group_index].astype(np.float32)
        numbers: np.ndarray = (codes.rows(start, stop).astype(np.float32) - zero) \
            * scales.rows(start, stop)[:, group_index]
        return numbers

    decoder.keep_numbers(module, codes.shape, rows, "columns are in groups of several sizes, which "
                         "no kernel reads: they are read as float32, at four to eight times the "
                         "memory")
