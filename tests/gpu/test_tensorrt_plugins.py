"""TensorRT plugins under a harness, compared with each op's float64 reference."""

import os

import numpy as np
import pytest
import torch
from on_device import DTYPES, describe, filled_of, in_kernel_order, tensors_of

from llmc import plugins
from llmc.compiler.targets.kernel_order import ROW_MULTIPLE
from llmc.plugins.attention.op import _sample

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
OPS = [op for op in plugins.registry().values() if op.body is not None and op.has_core]


@pytest.fixture(scope="module")
def harness(extension):
    if not hasattr(extension, "tensorrt"):
        pytest.skip("llmc-cuda was built without TENSORRT_ROOT")
    return extension.tensorrt.Harness(
        os.path.join(os.path.dirname(extension.__file__), "libllmc_plugins.so"))


@pytest.fixture(params=DTYPES)
def dtype(request, harness, extension):
    if request.param == "bfloat16" and float(extension.tensorrt.version) < 9:
        pytest.skip("TensorRT 8 has no bfloat16")
    return request.param


def check(harness, op, sample, dtype, in_place=True, narrow=True, repeats=1, step=None, more=None):
    """Run the plugin on inputs rounded to the dtype; return milliseconds.

    `in_place`: cache outputs are bound to the caches' memory. `step`: longest, reach and indirect,
    as in a plan. `more`: tensors that the reference does not get. Cache contents after a sequence
    are ignored: prefill kernels clear them.
    """
    fields = op.complete(sample.fields)
    made = tensors_of(op, fields, sample.inputs, dtype)
    tensors = {name: made[name].int() if narrow and made[name].dtype == torch.int64
               else made[name] for name in op.input_names if name in made}
    expected = op.reference(fields, {
        name: tensor.double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()
        for name, tensor in tensors.items()})
    exact = {name: getattr(torch, "int32" if kind == "int64" and narrow else kind)
             for name, kind in op.output_dtypes.items()}
    outputs = [tensors[name.removesuffix("_out")]
               if in_place and name.removesuffix("_out") in op.cache_inputs else
               torch.full(array.shape, float("nan"), device="cuda").to(
                   tensors[name.removesuffix("_out")].dtype
                   if name.removesuffix("_out") in op.cache_inputs
                   else exact.get(name, DTYPES[dtype]))
               for name, array in zip(op.outputs, expected, strict=True)]
    filled = None
    if op.attention is not None and op.cache_inputs:
        filled = filled_of(op, sample.inputs)
    untouched = {name: tensors[name].clone() for name in op.cache_inputs if name in tensors}
    tensors |= more or {}
    if fields.get("weight_dtype"):
        tensors |= {name: torch.from_numpy(weight.load()).cuda()
                    for name, weight in in_kernel_order(op, fields, sample.inputs).items()}
    milliseconds = harness.run(
        op.name, {**fields, "dtype": dtype, "present": " ".join(tensors)},
        [describe(tensor) for tensor in tensors.values()], [describe(t) for t in outputs], repeats,
        step)
    for tensor, array in zip(outputs, expected, strict=True):
        actual = tensor.double().cpu().numpy()
        assert np.isfinite(actual).all()
        if array.ndim == 4 and filled is not None:
            actual, array = actual[filled], array[filled]
        assert np.abs(actual - array).max() <= TOLERANCE[dtype] * np.abs(array).max()
    if not in_place:
        for name, tensor in untouched.items():
            assert torch.equal(tensors[name].float(), tensor.float())
    return milliseconds


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_s_samples(harness, op, dtype):
    for sample in op.samples(np.random.default_rng(0)):
        if op.lacking(sample.fields, sample.inputs) or op.rounded(sample.fields) \
                or sample.fields.get("out_scale") or "lora_down" in sample.inputs or any(
                array.shape[-2] % ROW_MULTIPLE for array in sample.inputs.values()
                if array.dtype == np.uint8):
            continue
        check(harness, op, sample, dtype)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize(("new", "past", "more"), [
    ((1,) * 4, (300, 0, 63, 1000), {}),
    ((130, 3, 64), (0, 50, 10), {}),
    ((1,) * 3, (300, 0, 1000), {"block_size": 16}),
    ((3, 1, 5), (5, 9, 0), {"norms": "qk", "window": 4}),
    ((1,) * 4, (300, 0, 63, 1000), {"kv_dtype": "float8_e4m3fn"}),
    ((130, 3, 64), (0, 50, 10), {"kv_dtype": "float8_e4m3fn"}),
], ids=["decode", "prefill", "paged", "mixed", "float8 decode", "float8 prefill"])
def test_attention_updates_its_caches(harness, new, past, more, in_place, dtype):
    sample = _sample(np.random.default_rng(1), new, past, 128, heads=8, kv_heads=2,
                     max_seq_len=2048, rotary_dim=128, **more)
    check(harness, plugins.registry()["CausalAttention"], sample, dtype, in_place)


def test_a_plugin_runs_again_and_again(harness):
    """On one stream: per-stream GEMM algorithms and counters stay valid."""
    sample = _sample(np.random.default_rng(1), (1,), (900,), 64, heads=4, kv_heads=4,
                     max_seq_len=1024, rotary_dim=64)
    assert check(harness, plugins.registry()["CausalAttention"], sample, "float16",
                 repeats=20) < 1.0


@pytest.mark.parametrize("new", [(130, 3, 64), (1, 1, 64), (1, 1, 1)],
                         ids=["prompts", "mixed", "decoding"])
def test_step_facts_are_passed_in_a_separate_input(harness, new, dtype):
    """Lengths for cuDNN, and the number of decoding sequences.

    Under Polygraphy a step has no host facts.
    """
    op = plugins.registry()["CausalAttention"]
    sample = _sample(np.random.default_rng(1), new, (0, 50, 10), 128, heads=8, kv_heads=2,
                     max_seq_len=2048, rotary_dim=128)
    filled = [past + fresh for past, fresh in zip((0, 50, 10), new, strict=True)]
    check(harness, op, sample, dtype, step=(max(new), max(filled), new.count(1) if new[0] == 1
                                            else 0))
    device = {"llmc_step": torch.zeros(16, dtype=torch.int32, device="cuda")}
    check(harness, op, sample, dtype, more=device)


def test_plugin_outputs_can_be_watched(harness, extension):
    """Only in the requested step."""
    x, weight = torch.randn(3, 8, device="cuda").half(), torch.ones(8, device="cuda")
    out = torch.empty_like(x)
    arguments = ("RMSNorm", {"makes": "hidden_states.3", "present": "x weight"},
                 [describe(x), describe(weight)], [describe(out)])
    watch, idle = extension.tensorrt.Watch(), extension.tensorrt.Watch()
    harness.run(*arguments, watch=watch)
    harness.run(*arguments, step=(3, 3, 0))
    harness.run(*arguments)
    [(name, shape, data)] = watch.values()
    assert (name, shape) == ("hidden_states.3", [3, 8]) and idle.values() == []
    assert np.array_equal(np.frombuffer(data, np.float32).reshape(shape), out.float().cpu().numpy())


def test_64_bit_ids(harness, extension):
    if float(extension.tensorrt.version) < 9:
        pytest.skip("TensorRT 8 has no int64")
    op = plugins.registry()["Embedding"]
    for sample in op.samples(np.random.default_rng(0)):
        if sample.fields.get("weight_dtype"):
            continue  # of rows of partial words
        check(harness, op, sample, "float16", narrow=False)


def test_a_collective_without_a_communicator_is_refused(harness, extension):
    x = torch.zeros(2, 8, dtype=torch.float16, device="cuda")
    with pytest.raises(extension.CudaError, match="a collective needs a communicator"):
        harness.run("AllReduce", {"tp_size": 2}, [describe(x)], [describe(x.clone())])
