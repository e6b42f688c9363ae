"""Tensors on a GPU as llmc's CUDA extension takes them."""

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def describe(tensor):
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
