"""Weights in fewer bits as kernels of GPUs read them, where nothing rearranges them at load.

llmc's own engine brings codes, scales and minima into that order in place when it has loaded them
(Plugin::prepare). A TensorRT engine keeps its constants, so these come in it already. TensorRT has
no constants of bytes either: four rows of them are one of int32, the same memory.
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

ROW_MULTIPLE = TENSORRT.row_multiple  # rows in one of int32
_UNIT = 8  # codes that lie together, csrc/kernels/common/dequantize.cuh
_TILE = 16  # rows of experts that lie together, csrc/kernels/moe/experts.cuh
# Where the bits of the first four codes of MXFP4 in a word are; of others 16 further: likewise
_MXFP4_BITS = (6, 7, 8, 15), (12, 13, 14, 21), (2, 3, 4, 11), (0, 1, 10, 9)

_Order = Callable[[Weight], Weight]


def in_kernel_order(graph: gs.Graph) -> dict[str, Weight]:
    """What takes the place of weights in fewer bits, of their scales, zeros and minima, by name:
    codes and zeros int32 [out / 4, bytes of a row], scales and minima float32 [out, groups] in
    whose memory the rows of a group lie side by side. Of experts these are stacks, [experts, ..],
    in tiles where kernels read such; scales of MXFP4 are int32 [experts, out / 4, groups].
    """
    made: dict[str, Weight] = {}
    for node in graph.nodes:
        op = op_of(node)
        if op is None or not op.packed(fields_of(node)):
            continue
        given = operands(node)
        for role in op.quantized:
            codes, groups = _orders(fields_of(node), values_of(given[role.weight]).shape)
            for name, order in ((role.weight, codes), (role.scale, groups), (role.zero, _as_it_is),
                                (role.minimum, groups)):
                if name in given:
                    made[given[name].name] = _as_words(order(values_of(given[name])))
    return made


def _orders(fields: Mapping[str, Any], shape: Sequence[int]) -> tuple[_Order, _Order]:
    """What brings the codes, and the scales, of a weight of this shape into the order."""
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
    """experts_tiled() of csrc/kernels/moe/experts_pack.cu."""
    return group_size >= 32 and group_size & (group_size - 1) == 0 and width % group_size == 0 \
        and width % _step(bits) == 0 and height % _TILE == 0


def _step(bits: int) -> int:
    """Columns of a tile that lie together."""
    return 64 if bits == 4 else 32


def _as_it_is(weight: Weight) -> Weight:
    return weight


def _each(weight: Weight, order: Callable[[np.ndarray], np.ndarray]) -> Weight:
    """The same bytes, of each row in another order; of a stack, of each matrix."""
    return Weight(weight.shape, weight.dtype, lambda start, stop: order(
        weight.rows(start, stop)).reshape(stop - start, *weight.shape[1:]), weight.name)


def _turned(weight: Weight) -> Weight:
    """[out, groups] whose memory is that of [groups, out]."""
    return Weight(weight.shape, weight.dtype, lambda start, stop: np.ascontiguousarray(
        weight.load().T).reshape(weight.shape)[start:stop], weight.name)


def _even_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of packed codes, of every eight the even ones first."""
    if bits == 8:
        units = codes.reshape(len(codes), -1, 4, 2)
        return units.swapaxes(2, 3).reshape(codes.shape)
    pairs = codes.reshape(len(codes), -1, 2, 2)
    low, high = pairs & 15, pairs >> 4
    even, odd = low[..., 0] | low[..., 1] << 4, high[..., 0] | high[..., 1] << 4
    return np.concatenate([even, odd], -1).reshape(codes.shape)


def _in_tiles(codes: np.ndarray, bits: int, scattered: bool) -> np.ndarray:
    """Packed codes [experts, out, bytes of a row] in tiles of rows, a tile in steps of columns; in
    a step thread 4 g + t has rows g and g + 8, columns from 8 t and, of 4 bits, from 32 + 8 t on.
    """
    units = _even_first(codes, bits).view(f"<u{_UNIT * bits // 8}")
    if scattered:
        units = _scattered(units)
    experts, height, _ = codes.shape
    parts = units.reshape(experts, height // _TILE, 2, 8, -1, _step(bits) // 32, 4)
    return np.ascontiguousarray(parts.transpose(0, 1, 4, 3, 6, 2, 5)).view(np.uint8)


def _scattered(units: np.ndarray) -> np.ndarray:
    """Words of 8 codes of MXFP4 with their bits where kernels look for them."""
    made = np.zeros_like(units)
    for place in range(_UNIT):
        for bit, at in enumerate(_MXFP4_BITS[place % 4]):
            made |= (units >> 4 * place + bit & 1) << (at + place // 4 * 16) % 32
    return made


def _scales_in_tiles(scales: np.ndarray) -> np.ndarray:
    """[experts, out, groups], of each tile group by group, those of its rows side by side."""
    experts, height, groups = scales.shape
    return scales.reshape(experts, height // _TILE, _TILE, groups).swapaxes(2, 3)


def _as_words(weight: Weight) -> Weight:
    """Bytes [.., out, width] as int32 [.., out / 4, width]; numbers as they are."""
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
    """Let the model's initializers of these names be these weights, external data of the file
    `location`, to which they are written one after the other.
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
