"""Weights in fewer bits as kernels of GPUs read them, where nothing rearranges them at load.

llmc's own engine brings codes, scales and minima into that order in place when it has loaded them
(Plugin::prepare). A TensorRT engine keeps its constants, so these come in it already. TensorRT has
no constants of bytes either: four rows of them are one of int32, the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from llmc.compiler.artifact import Placed, refer
from llmc.compiler.graph.rewrite import fields_of, op_of, operands, values_of
from llmc.compiler.graph.weights import Weight
from llmc.plugins.quantization import CODES

ROW_MULTIPLE = 4  # rows in one of int32
_UNIT = 8  # codes that lie together, csrc/kernels/packed.cuh


def in_kernel_order(graph: gs.Graph) -> dict[str, Weight]:
    """What takes the place of weights in fewer bits, of their scales, zeros and minima, by name:
    codes and zeros int32 [out / 4, bytes of a row], scales and minima float32 [out, groups] in
    whose memory the rows of a group lie side by side.
    """
    made: dict[str, Weight] = {}
    for node in graph.nodes:
        op = op_of(node)
        if op is None or not op.packed(fields_of(node)):
            continue
        given = operands(node)
        bits = CODES[fields_of(node)["weight_dtype"]][0]
        width = fields_of(node)["in_features"]
        order = partial(_even_first, bits=bits) if width % _UNIT == 0 else None
        for role in op.quantized:
            weight, scale = given[role.weight], given[role.scale]
            made[weight.name] = _as_words(values_of(weight), order)
            made[scale.name] = _turned(values_of(scale))
            if role.zero in given:
                made[given[role.zero].name] = _as_words(values_of(given[role.zero]))
            if role.minimum in given:
                made[given[role.minimum].name] = _turned(values_of(given[role.minimum]))
    return made


def _even_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of packed codes, of every eight the even ones first."""
    if bits == 8:
        units = codes.reshape(len(codes), -1, 4, 2)
        return units.swapaxes(2, 3).reshape(codes.shape)
    pairs = codes.reshape(len(codes), -1, 2, 2)
    low, high = pairs & 15, pairs >> 4
    even, odd = low[..., 0] | low[..., 1] << 4, high[..., 0] | high[..., 1] << 4
    return np.concatenate([even, odd], -1).reshape(codes.shape)


def _as_words(weight: Weight, order: Callable[[np.ndarray], np.ndarray] | None = None) -> Weight:
    """Bytes [out, width], perhaps in another order, as int32 [out / 4, width]."""
    height, width = weight.shape

    def rows(start: int, stop: int) -> np.ndarray:
        block = weight.rows(start * ROW_MULTIPLE, stop * ROW_MULTIPLE)
        block = block if order is None else order(block)
        return block.reshape(-1).view(np.int32).reshape(stop - start, width)

    return Weight((height // ROW_MULTIPLE, width), np.int32, rows, weight.name)


def _turned(weight: Weight) -> Weight:
    """[out, groups] whose memory is that of [groups, out]."""
    return Weight(weight.shape, weight.dtype, lambda start, stop: np.ascontiguousarray(
        weight.load().T).reshape(weight.shape)[start:stop], weight.name)


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
