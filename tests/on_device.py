"""GPU tensors in the form of llmc's CUDA extension, or of a TensorRT plan; checks of kernels."""

import itertools

import numpy as np
import onnx_graphsurgeon as gs
import torch

from llmc import plugins
from llmc.compiler.graph.rewrite import arranged
from llmc.compiler.graph.weights import Weight
from llmc.compiler.targets import kernel_order

# Relative to the reference's largest value, for one rounding of inputs and outputs to the dtype.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
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


def check_codes(codes, expected, tolerance):
    """Assert FP8 values at most one code from the expected values within a tolerance."""
    actual = codes.double().cpu().numpy()
    assert np.isfinite(actual).all()
    error = np.abs(actual - expected)
    allowed = tolerance * np.abs(expected).max(initial=0) + np.abs(expected) / 8 + 2.0**-9
    assert (error <= allowed).all(), f"{(error - allowed).max()} too much"
    assert (error == 0).mean() > 0.6


def check(extension, op, fields, inputs, dtype, firsts=((),), least=0.0, unlike=None):
    """Run the kernel on inputs rounded to the dtype, and compare with the reference.

    Attention runs leading sequences of one token as decode and as prefill, and prefill by the
    library too if it supports it. Column inputs are also slices of wider rows, aligned and not.
    Outputs with a declared dtype are exact, or as in float32.

    Args:
        firsts: the choice between two kernels for each decision, instead of timing.
        least: the minimum tolerance.
        unlike: attributes with a larger tolerance.
    """
    fields = op.complete(fields)
    tensors = tensors_of(op, fields, inputs, dtype)
    arrays = {
        name: tensor.double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()
        for name, tensor in tensors.items()}
    expected = op.reference(fields, arrays)
    others = () if unlike is None else op.reference(op.complete(unlike), arrays)
    ways, filled = [(0, 0, 0)] * len(firsts), None
    if op.attention is not None and op.cache_inputs:
        new = np.diff(inputs["cu_seqlens"])
        ones = next((i for i, count in enumerate(new) if count != 1), len(new))
        total = inputs["past_lens"] + new
        rest = slice(ones, None) if ones < len(new) else slice(None)
        lengths = int(new[rest].max()), int(total[rest].max())
        ways = [(0, 0, 0), (ones, 0, 0), (ones, *lengths), (0, int(new.max()), int(total.max()))]
        filled = filled_of(op, inputs)
        for name in op.cache_inputs:  # cache contents after a sequence are irrelevant
            poisoned = tensors[name].float()
            poisoned[torch.from_numpy(~filled).cuda()] = float("nan")
            tensors[name].copy_(poisoned)
        firsts = [()] * len(ways)
    if op.state is not None:  # leading single tokens, as decode too
        new = np.diff(inputs["cu_seqlens"])
        ones = next((i for i, count in enumerate(new) if count != 1), len(new))
        ways = [(0, 0, 0), *([(ones, 0, 0)] if ones else [])]
        firsts = [()] * len(ways)
    beside = [(), (8, 16), (3, 2)] if {role.input for role in op.columns} & {*tensors} else [()]
    for around, ((num_decode, longest, reach), choices) in itertools.product(
            beside, [*zip(ways, firsts, strict=True)]):
        if choices or op.state:  # a quantized weight is repacked in place, a state is written
            tensors = tensors_of(op, fields, inputs, dtype)
        among = {role.input: among_columns(tensors[role.input], *around) for role in op.columns
                 if around and role.input in tensors}
        pitches = [among[name].stride(0) if name in among else 0 for name in op.input_names]
        coded = {name: in_code_order(tensors[name]) for name in op.rounded(fields)}
        given = [describe({**tensors, **among, **coded}[name]) if name in tensors
                 else (0, "float32", []) for name in op.input_names]
        kinds = [op.made_dtypes(fields).get(name, dtype) for name in op.outputs]
        outputs = [tensors[name.removesuffix("_out")] if name.removesuffix("_out") in tensors else
                   torch.full(array.shape, -1 if kind == "int64" else float("nan"),
                              device="cuda").to(getattr(torch, kind))
                   for name, array, kind in zip(op.outputs, expected, kinds, strict=True)]
        extension.run_op(op.name, dict(fields), given, [describe(t) for t in outputs], num_decode,
                         longest=longest, reach=reach, firsts=list(choices), pitches=pitches,
                         adapters=any(name.endswith("lora_down") for name in tensors))
        for tensor, array, kind in zip(outputs, expected, kinds, strict=True):
            if kind == "float8_e4m3fn" and tensor.dim() == 2:
                check_codes(in_code_order(tensor, back=True), array,
                            max(TOLERANCE[dtype], least))
                continue
            actual = tensor.double().cpu().numpy()
            if tensor.dim() == 4 and filled is not None:
                actual, array = actual[filled], array[filled]
            assert np.isfinite(actual).all()
            error = np.abs(actual - array)
            allowed = max(TOLERANCE.get(kind, 0), least) * np.abs(array).max(initial=0)
            assert not error.size or error.max() <= allowed, \
                f"{error.max()} at {np.unravel_index(error.argmax(), error.shape)} of {error.shape}"
            for other in others:
                assert np.square(error).mean() < np.square(other - array).mean() / 2
