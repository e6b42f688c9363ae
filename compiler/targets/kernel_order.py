"""Reordering of quantized weights at compile time, to the memory layout of GPU kernels.

llmc's CUDA engine reorders codes, scales and minima in place at load (Plugin::prepare). A TensorRT
engine cannot change its constants, so they are reordered before the build. TensorRT has no uint8
constants: four rows of bytes become one row of int32, with the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc.compiler.artifact import Placed, refer
from llmc.compiler.graph.rewrite import fields_of, op_of, operands, values_of
from llmc.compiler.graph.weights import Weight
from llmc.plugins.code_types import CODE_TYPES
from llmc.targets import TENSORRT

ROW_MULTIPLE = TENSORRT.row_multiple  # rows of bytes in a row of int32
_UNIT = 8  # codes of a unit, csrc/kernels/common/dequantize.cuh
_TILE = 16  # rows of a tile of experts, csrc/kernels/moe/experts.cuh
# Bit positions of the first four MXFP4 codes of a word (dequantize.cuh); the others: 16 higher
_MXFP4_BITS = (6, 7, 8, 15), (12, 13, 14, 21), (2, 3, 4, 11), (0, 1, 10, 9)

_Order = Callable[[Weight], Weight]


def in_kernel_order(graph: gs.Graph) -> dict[str, Weight]:
    """Reorder quantized weights with their scales, zeros and minima.

    Returns:
        By name: codes and zeros int32 [out / 4, bytes per row]; scales and minima float32
        [out, groups] in the memory order [groups, out]. Experts have a leading dimension
        [experts, …] and are tiled if their kernel reads tiles. MXFP4 scales are int32
        [experts, out / 4, groups].
    """
    reordered: dict[str, Weight] = {}
    for node in graph.nodes:
        op = op_of(node)
        if op is None or not op.packed(fields_of(node)):
            continue
        inputs = operands(node)
        for role in op.quantized:
            codes, groups = _orders(fields_of(node), values_of(inputs[role.weight]).shape)
            for name, order in ((role.weight, codes), (role.scale, groups), (role.zero, _as_it_is),
                                (role.minimum, groups)):
                if name in inputs:
                    reordered[inputs[name].name] = _as_words(order(values_of(inputs[name])))
    return reordered


def _orders(fields: Mapping[str, Any], shape: Sequence[int]) -> tuple[_Order, _Order]:
    """Return the reorderings of a weight's codes and of its scales."""
    bits = CODE_TYPES[fields["weight_dtype"]].bits
    *stack, height, row_bytes = shape
    width = row_bytes * 8 // bits
    if not stack:
        evens = partial(_each, order=partial(_even_first, bits=bits))
        return evens if width % _UNIT == 0 else _as_it_is, _turned
    if not _is_tiled(bits, fields["group_size"], height, width):
        return _as_it_is, _as_it_is
    scattered = fields["weight_dtype"] == "mxfp4"
    return partial(_each, order=partial(_in_tiles, bits=bits, scattered=scattered)), \
        partial(_each, order=_scales_in_tiles)


def _is_tiled(bits: int, group_size: int, height: int, width: int) -> bool:
    """Mirror experts_tiled() of csrc/kernels/moe/experts_pack.cu."""
    return group_size >= 32 and group_size & (group_size - 1) == 0 and width % group_size == 0 \
        and width % _step(bits) == 0 and height % _TILE == 0


def _step(bits: int) -> int:
    """Return the columns of a step of a tile."""
    return 64 if bits == 4 else 32


def _as_it_is(weight: Weight) -> Weight:
    return weight


def _each(weight: Weight, order: Callable[[np.ndarray], np.ndarray]) -> Weight:
    """Apply a reordering to each block of rows; of a stack, to each matrix."""
    return Weight(weight.shape, weight.dtype, lambda start, stop: order(
        weight.rows(start, stop)).reshape(stop - start, *weight.shape[1:]), weight.name)


def _turned(weight: Weight) -> Weight:
    """Reorder the memory of [out, groups] to that of [groups, out]; the shape stays."""
    return Weight(weight.shape, weight.dtype, lambda start, stop: np.ascontiguousarray(
        weight.load().T).reshape(weight.shape)[start:stop], weight.name)


def _even_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """Reorder each eight packed codes of a row: even ones first."""
    if bits == 8:
        units = codes.reshape(len(codes), -1, 4, 2)
        return units.swapaxes(2, 3).reshape(codes.shape)
    pairs = codes.reshape(len(codes), -1, 2, 2)
    low, high = pairs & 15, pairs >> 4
    even, odd = low[..., 0] | low[..., 1] << 4, high[..., 0] | high[..., 1] << 4
    return np.concatenate([even, odd], -1).reshape(codes.shape)


def _in_tiles(codes: np.ndarray, bits: int, scattered: bool) -> np.ndarray:
    """Tile packed codes [experts, out, bytes per row] by rows, and tiles by column steps.

    In a step, thread 4 g + t has rows g and g + 8, and 8 columns from 8 t; of 4 bits also 8 from
    32 + 8 t.
    """
    units = _even_first(codes, bits).view(f"<u{_UNIT * bits // 8}")
    if scattered:
        units = _scattered(units)
    experts, height, _ = codes.shape
    parts = units.reshape(experts, height // _TILE, 2, 8, -1, _step(bits) // 32, 4)
    return np.ascontiguousarray(parts.transpose(0, 1, 4, 3, 6, 2, 5)).view(np.uint8)


def _scattered(units: np.ndarray) -> np.ndarray:
    """Move the bits of words of 8 MXFP4 codes to the positions that kernels read."""
    words = np.zeros_like(units)
    for place in range(_UNIT):
        for bit, at in enumerate(_MXFP4_BITS[place % 4]):
            words |= (units >> 4 * place + bit & 1) << (at + place // 4 * 16) % 32
    return words


def _scales_in_tiles(scales: np.ndarray) -> np.ndarray:
    """Reorder each tile of scales [experts, out, groups] to [groups, rows]."""
    experts, height, groups = scales.shape
    return scales.reshape(experts, height // _TILE, _TILE, groups).swapaxes(2, 3)


def _as_words(weight: Weight) -> Weight:
    """View bytes [.., out, width] as int32 [.., out / 4, width]; other dtypes are unchanged."""
    if weight.dtype != np.uint8:
        return weight
    *stack, height, width = weight.shape
    shape = (*stack, height // ROW_MULTIPLE, width)
    each = 1 if stack else ROW_MULTIPLE

    def rows(start: int, stop: int) -> np.ndarray:
        block = weight.rows(start * each, stop * each)
        return block.reshape(-1).view(np.int32).reshape(stop - start, *shape[1:])

    return Weight(shape, np.int32, rows, weight.name)


def replace_initializers(model: onnx.ModelProto, weights: Mapping[str, Weight], location: str,
                         write: Callable[[np.ndarray], object]) -> None:
    """Replace initializers by these weights, as external data in the file `location`.

    Args:
        model: the model to change.
        weights: by name of the initializer.
        location: name of the file.
        write: appends a block to the file.
    """
    end = 0
    for tensor in model.graph.initializer:
        if tensor.name not in weights:
            continue
        weight = weights[tensor.name]
        tensor.dims[:] = weight.shape
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(weight.dtype)
        refer(tensor, location, Placed(end, weight.nbytes))
        for block in weight.blocks():
            write(block)
        end += weight.nbytes
