"""Round-to-nearest quantization."""

from __future__ import annotations

import numpy as np

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant.codes import check_finite, encode, in_pieces, scales_of
from llmc.compiler.quant.scheme import Scheme
from llmc.compiler.quant.stored import Stored
from llmc.errors import LlmcError
from llmc.plugins.code_types import CODE_TYPES


def quantize(weight: Weight, scheme: Scheme, name: str) -> Stored:
    """Quantize a matrix by rounding to nearest.

    Every block is read once for codes, once for scales and once for zero points. The result is
    bit-identical on every processor.

    Args:
        weight: [out, in].
        scheme: to quantize by.
        name: of the matrix in errors.

    Raises:
        LlmcError: the group size does not divide the row; on reading, see `check_finite`.
    """
    rows, width = weight.shape
    size = scheme.group_size_for(width)
    if size is None:
        raise LlmcError(f"group_size {scheme.group_size} does not divide the rows of '{name}', "
                        f"which have {width} columns on a chip; give another --group_size")
    if width % 2:
        raise LlmcError(f"'{name}' has rows of {width} columns; quantization needs an even number")
    shape = (rows, width // size)

    def grouped(start: int, stop: int) -> np.ndarray:
        block = weight.rows(start, stop).astype(np.float32).reshape(stop - start, shape[1], size)
        check_finite(block, scheme.dtype, name)
        return block

    def codes(start: int, stop: int) -> np.ndarray:
        block = grouped(start, stop)
        scales, zeros = scales_of(block, scheme.dtype)
        return encode(block, scales, zeros, scheme.dtype).reshape(stop - start, width)

    def scales(start: int, stop: int) -> np.ndarray:
        return scales_of(grouped(start, stop), scheme.dtype)[0]

    def zeros(start: int, stop: int) -> np.ndarray:
        return scales_of(grouped(start, stop), scheme.dtype)[1].astype(np.uint8)

    return Stored(
        scheme.dtype, Weight((rows, width), np.uint8, in_pieces(codes, width), name),
        Weight(shape, np.float32, in_pieces(scales, width), name),
        Weight(shape, np.uint8, in_pieces(zeros, width), name)
        if CODE_TYPES[scheme.dtype].zero_point is None else None,
        activation_dtype=scheme.activation_dtype)
