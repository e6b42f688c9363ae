"""GPU tensors in the form of llmc's CUDA extension, or of a TensorRT plan."""

import numpy as np
import onnx_graphsurgeon as gs
import torch

from llmc import plugins
from llmc.compiler.graph.rewrite import arranged
from llmc.compiler.graph.weights import Weight
from llmc.compiler.targets import kernel_order

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def tensors_of(op, fields, inputs, dtype):
    """Return a sample's inputs, floating-point ones in the op's dtypes for `dtype`."""
    kinds = dict.fromkeys(op.float32_inputs, torch.float32)
    kinds |= dict.fromkeys(op.rounded(fields), torch.float8_e4m3fn)
    if fields.get("kv_dtype"):
        kinds |= dict.fromkeys(op.cache_inputs, getattr(torch, fields["kv_dtype"]))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).cuda()
               for name, array in inputs.items()}
    return {name: tensor.to(kinds.get(name, DTYPES[dtype])) if tensor.is_floating_point()
            else tensor for name, tensor in tensors.items()}


def in_kernel_order(op, fields, inputs):
    """Return quantized weights, scales and zero points in a plan's layout."""
    names = {name for role in op.quantized
             for name in (role.weight, role.scale, role.zero, role.minimum)}
    given = {name: gs.Constant(name, Weight.of(array)) if name in names else gs.Variable(name)
             for name, array in inputs.items()}
    node = gs.Node(op.name, op.name, fields, arranged(op, given), [gs.Variable("y")],
                   domain=plugins.DOMAIN)
    return kernel_order.in_kernel_order(gs.Graph(nodes=[node]))


def among_columns(tensor, before, behind):
    """Return the values as columns of wider rows, surrounded by NaN."""
    rows, width = tensor.shape
    wide = torch.full((rows, before + width + behind), float("nan"), dtype=tensor.dtype,
                      device=tensor.device)
    wide[:, before:before + width] = tensor
    return wide[:, before:before + width]


def in_code_order(codes, back=False):
    """Permute codes to the kernels' order, even columns of eight first, or back."""
    order = [0, 4, 1, 5, 2, 6, 3, 7] if back else [0, 2, 4, 6, 1, 3, 5, 7]
    units = codes.view(torch.uint8).reshape(-1, 8)[:, order]
    return units.reshape(codes.shape).contiguous().view(codes.dtype)


def describe(tensor):
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def filled_of(op, inputs):
    """Return which cache elements are filled after the op, bool of the caches' shapes."""
    filled = np.zeros(inputs[min(op.cache_inputs)].shape, bool)
    size = filled.shape[2]
    table = inputs.get("block_table", np.arange(len(filled))[:, None])
    for row, length in enumerate(inputs["past_lens"] + np.diff(inputs["cu_seqlens"])):
        for position in range(length):
            filled[table[row, position // size], :, position % size] = True
    return filled
