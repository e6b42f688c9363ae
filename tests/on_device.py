"""Tensors on a GPU as llmc's CUDA extension takes them."""

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def tensors_of(op, fields, inputs, dtype):
    """A sample's inputs, floating ones in the dtype that the op takes them in beside `dtype`."""
    kinds = dict.fromkeys(op.float32_inputs, torch.float32)
    if fields.get("kv_dtype"):
        kinds |= dict.fromkeys(op.cache_inputs, getattr(torch, fields["kv_dtype"]))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).cuda()
               for name, array in inputs.items()}
    return {name: tensor.to(kinds.get(name, DTYPES[dtype])) if tensor.is_floating_point()
            else tensor for name, tensor in tensors.items()}


def among_columns(tensor, before, behind):
    """The same numbers among the columns of wider rows, with none beside them."""
    rows, width = tensor.shape
    wide = torch.full((rows, before + width + behind), float("nan"), dtype=tensor.dtype,
                      device=tensor.device)
    wide[:, before:before + width] = tensor
    return wide[:, before:before + width]


def describe(tensor):
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
