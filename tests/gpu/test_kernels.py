"""Every kernel against its op's float64 reference, on fresh random inputs and poisoned outputs."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_device import (
    DTYPES,
    TOLERANCE,
    check,
    describe,
    tensors_of,
)

from llmc import plugins
from llmc.plugins.activations import REFERENCE as ACTIVATIONS
from llmc.plugins.attention.op import _sample
from llmc.plugins.bidirectional_attention.op import _sample as bidirectional_sample
from llmc.plugins.cached_attention.op import _reading
from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.pool.op import KINDS
from llmc.plugins.quantization import BLOCK, blocks_shape, dequantized, pack

OPS = [op for op in plugins.registry().values() if op.body is not None and op.has_core]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_s_samples(extension, op, dtype):
    for sample in op.samples(np.random.default_rng(0)):
        if op.lacking(sample.fields, sample.inputs):
            continue
        check(extension, op, sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("op", ["CausalAttention", "BidirectionalAttention"])
def test_attention_refuses_an_unsupported_head_dim(extension, op):
    with pytest.raises(extension.CudaError, match=f"{op}'s head_dim 12 is not a multiple of 8"):
        extension.make_plugin(op, {"num_heads": 4, "num_kv_heads": 4, "head_dim": 12})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "dim", "heads", "kv_heads", "more"), [
    ((130, 3, 64), 64, 8, 8, {}),
    ((130, 3, 64), 64, 8, 8, {"biased": 100}),
    ((512,), 128, 4, 2, {"biased": 128, "scale": 1.0}),
    ((7, 0, 33), 256, 6, 1, {}),
    ((20, 9), 72, 4, 2, {"biased": 4}),
    ((1,) * 16, 64, 16, 16, {"starts": range(0, 8192, 512), "lens": range(1, 512, 32)}),
    ((1,) * 6, 64, 8, 8, {"starts": (600,) * 3 + (0,) * 3, "lens": (500,) * 3 + (77,) * 3}),
    ((1,), 80, 6, 1, {"starts": (40,), "lens": (1000,), "biased": 30}),
    ((5, 1, 0, 9), 96, 4, 4, {"starts": (0, 0, 90, 60), "lens": (60, 60, 1, 30)}),
    ((130, 3, 0, 64, 200), 32, 4, 4, {}),
    ((300, 17, 65), 64, 4, 2, {"window": 40, "rotary_dim": 64}),
    ((300, 17, 65), 80, 4, 2, {"window": 7, "rotary_dim": 32, "interleaved": 1}),
    ((70, 129), 128, 4, 2, {"rotary_dim": 128, "normed": True, "softcap": 5.0}),
    ((70, 129), 256, 3, 1, {"rotary_dim": 256, "normed": True, "norm_after_rotary": 1,
                            "window": 100}),
])
def test_attention_in_both_directions(extension, new, dim, heads, kv_heads, more, dtype):
    sample = bidirectional_sample(np.random.default_rng(1), new, dim, heads=heads,
                                  kv_heads=kv_heads, **more)
    check(extension, plugins.registry()["BidirectionalAttention"], sample.fields, sample.inputs,
          dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64])  # on tensor cores, and not
def test_sequences_are_independent_of_one_with_nan(extension, dim, dtype):
    op = plugins.registry()["BidirectionalAttention"]
    sample = bidirectional_sample(np.random.default_rng(2), (5, 70, 9), dim)
    fields = op.complete(sample.fields)
    tensors = tensors_of(op, fields, sample.inputs, dtype)
    expected, = op.reference(fields, {
        name: tensor.cpu().numpy() if name == "cu_seqlens" else tensor.double().cpu().numpy()
        for name, tensor in tensors.items()})
    for name in ("query", "key", "value"):
        tensors[name][5:75] = float("nan")
    out = torch.empty(expected.shape, device="cuda", dtype=DTYPES[dtype])
    given = [describe(tensors[name]) if name in tensors else (0, "float32", [])
             for name in op.input_names]
    extension.run_op(op.name, dict(fields), given, [describe(out)])
    actual = out.double().cpu().numpy()
    for rows in (slice(5), slice(75, None)):
        assert np.abs(actual[rows] - expected[rows]).max() < TOLERANCE[dtype] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "hidden"), [
    ((512, 1, 33, 64), 1024), ((3, 2), 1), ((2000,), 4100), ((1,) * 300, 384)])
def test_pooling_of_long_and_many_sequences(extension, lengths, hidden, kind, dtype):
    x = np.random.default_rng(0).standard_normal((sum(lengths), hidden)).astype(np.float32)
    check(extension, plugins.registry()["Pool"], {"kind": kind}, {
        "x": x, "cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32)}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [1, 20, 400])
@pytest.mark.parametrize(("new", "past", "dim", "heads", "kv_heads", "more"), [
    ((1,) * 4, (300, 0, 63, 1000), 64, 8, 8, {}),
    ((1,) * 5, (90, 90, 90, 7, 7), 64, 8, 8, {"block_size": 16}),
    ((130, 3, 64), (0, 50, 10), 64, 8, 2, {}),
    ((7, 0, 70), (5, 90, 90), 96, 4, 4, {"block_size": 16, "window": 40}),
    ((1, 1, 1), (65, 130, 900), 256, 4, 1, {"window": 100, "softcap": 5.0, "rotary_dim": 256}),
    ((20, 9), (5, 0), 72, 4, 2, {"block_size": 8, "norms": "qk"}),
])
def test_attention_with_a_bias_by_distance(extension, new, past, dim, heads, kv_heads, more, biased,
                                           dtype):
    sample = _sample(np.random.default_rng(1), new, past, dim, heads=heads, kv_heads=kv_heads,
                     max_seq_len=1024, biased=biased, **more)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "past", "dim", "heads", "kv_heads", "more"), [
    ((1,) * 4, (300, 0, 63, 1000), 128, 8, 2, {}),
    ((1,) * 2, (700, 64), 64, 4, 4, {}),
    ((1,), (2000,), 96, 6, 1, {}),
    ((1, 1), (511, 3), 256, 4, 2, {}),
    ((1, 1, 1), (65, 130, 900), 80, 16, 2, {"window": 100}),
    ((1,), (500,), 64, 71, 1, {}),
    ((1,) * 64, tuple(range(64)), 64, 4, 2, {"softcap": 5.0}),
    ((130, 3, 64), (0, 50, 10), 128, 8, 2, {}),
    ((65, 1, 200), (0, 0, 300), 64, 4, 4, {"window": 70}),
    ((100,), (0,), 256, 4, 2, {"softcap": 5.0}),
    ((33, 70), (5, 0), 96, 4, 2, {}),
    ((33, 70), (5, 0), 80, 4, 2, {}),
    ((20, 9), (5, 0), 72, 4, 2, {}),
    ((1,) * 3, (300, 0, 1000), 128, 8, 2, {"block_size": 16}),
    ((1,) * 2, (511, 64), 64, 4, 4, {"block_size": 256, "window": 100}),
    ((130, 3, 64), (0, 50, 10), 128, 8, 2, {"block_size": 32}),
    ((20, 9), (5, 0), 72, 4, 2, {"block_size": 8}),
    ((30, 1, 9), (50, 300, 300), 128, 8, 2, {"block_size": 16}),
    ((7, 0, 70), (5, 90, 90), 96, 4, 4, {"block_size": 16, "window": 40}),
    ((1,) * 4, (300, 0, 63, 1000), 128, 8, 2, {"by_axis": True, "norms": "qk"}),
    ((1,) * 40, tuple(range(0, 1000, 25)), 64, 4, 2, {"by_axis": True, "block_size": 16}),
    ((130, 3, 64), (0, 50, 10), 128, 8, 2, {"by_axis": True, "block_size": 32}),
    ((30, 1, 9), (50, 300, 300), 256, 4, 1, {"by_axis": True, "block_size": 16, "norms": "qk"}),
    ((20, 9), (5, 0), 72, 4, 2, {"by_axis": True}),
    # Bidirectional ranges: sequence, start and end.
    ((130, 3, 64), (0, 50, 10), 128, 8, 2, {"block_size": 32, "ranges": (
        (0, 20, 110), (0, 120, 130), (2, 8, 60))}),
    ((200, 70), (0, 100), 64, 4, 2, {"window": 30, "ranges": ((0, 0, 100), (1, 60, 140))}),
    ((200, 70), (0, 100), 64, 4, 2, {"window": 30, "windowed_ranges": 0, "block_size": 16,
                                     "ranges": ((0, 0, 100), (1, 60, 140))}),
    ((300, 9), (0, 5), 256, 4, 1, {"window": 64, "norms": "qk", "ranges": ((0, 10, 266),)}),
    ((90, 9), (0, 5), 72, 4, 2, {"softcap": 5.0, "sinks": True, "ranges": ((0, 3, 80),)}),
    ((80,), (3,), 512, 2, 1, {"windowed_ranges": 0, "window": 8, "ranges": ((0, 2, 83),)}),
])
def test_attention(extension, new, past, dim, heads, kv_heads, more, dtype):
    sample = _sample(np.random.default_rng(1), new, past, dim, heads=heads, kv_heads=kv_heads,
                     max_seq_len=2048, rotary_dim=dim, **more)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 16, 65, 300, 1025, 4096])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)],
                         ids=["MHA", "GQA", "MQA"])
def test_decoding_reads_positions_through_the_block_table(extension, heads, kv_heads, dim, length,
                                                          dtype):
    """Sequences of two lengths, their blocks in any order."""
    past = (length - 1,) * 4 + ((length - 1) // 2,) * 2
    sample = _sample(np.random.default_rng(length), (1,) * 6, past, dim, heads=heads,
                     kv_heads=kv_heads, max_seq_len=-(-length // 16) * 16, rotary_dim=dim,
                     block_size=16)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 24, 80, 200])
def test_results_are_independent_of_batch_layout(extension, batch, dtype):
    """The number of warps per block and of KV splits depends on the batch."""
    sample = _sample(np.random.default_rng(batch), (1,) * batch, (333,) * batch, 64, heads=8,
                     kv_heads=4, max_seq_len=400, rotary_dim=64, block_size=16, window=200)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("past", [
    (5000,) + (20,) * 6, (30,) * 15 + (3000,), (100,) * 16 + (1500, 2000), (50,) * 40 + (3000,),
    (40,) * 129 + (2000,), (10,) * 290 + (1047, 1048), tuple(range(0, 3000, 97)), (0,) * 20],
    ids=lambda past: f"{len(past)}, to {max(past)}")
@pytest.mark.parametrize(("heads", "kv_heads", "more"), [
    (8, 2, {}), (4, 1, {"window": 1500}), (24, 2, {"softcap": 5.0})], ids=str)
def test_kv_is_split_for_sequences_of_different_lengths(extension, heads, kv_heads, more, past,
                                                        dtype):
    """Long sequences are split for any number of others."""
    sample = _sample(np.random.default_rng(len(past)), (1,) * len(past), past, 64, heads=heads,
                     kv_heads=kv_heads, max_seq_len=-(-max(past) // 64) * 64 + 64, rotary_dim=64,
                     block_size=64, **more)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "past", "variant"), [
    ((1, 1, 1), (40, 3, 0), {}), ((1,) * 3, (900, 20, 700), {"window": 400}),
    ((1,) * 4, (70, 70, 70, 9), {"block_size": 16}), ((1, 1), (30, 8), {"block_size": 16}),
    ((1, 1), (40, 9), {"norms": "qk", "dim": 128, "kv_heads": 1}), ((1,), (33,), {"dim": 24}),
    ((70, 3, 1), (0, 0, 0), {}), ((70, 3, 1), (0, 80, 300), {"softcap": 3.0}),
    ((40, 1), (0, 60), {"dim": 96, "window": 30}), ((9, 5), (20, 0), {"dim": 24}),
    ((20, 9), (5, 0), {"block_size": 16}), ((6, 2), (7, 7), {"block_size": 16}),
    ((5, 1), (9, 20), {"biased": 16}),
])
def test_attention_over_float8_caches(extension, new, past, variant, dtype):
    room = 1024 if max(past) > 300 else 512 if max(past) > 100 else 128
    sample = _sample(np.random.default_rng(5), new, past, variant.get("dim", 64), heads=4,
                     **{"max_seq_len": room, "kv_dtype": "float8_e4m3fn", "rotary_dim": 16}
                     | {key: value for key, value in variant.items() if key != "dim"})
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out"), [
    (1, 1024, 3072), (2, 2048, 100), (3, 576, 960), (8, 4096, 4096), (16, 2048, 100), (9, 104, 37),
    (17, 576, 64), (64, 576, 1536), (5, 1001, 7), (1, 104, 37), (1, 8192, 16000), (1, 2056, 37),
    (4, 4096, 200), (2, 8200, 130), (1, 8200, 2600),
    (7, 4096, 6144), (12, 14336, 2048), (24, 4096, 1100), (18, 64, 17924), (6, 520, 16964),
])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP", "NormGemm",
                                  "NormGemm, gated"])
def test_linear(extension, name, rows, width, out, dtype):
    rng = np.random.default_rng(2)
    gated = name in ("GatedMLP", "NormGemm, gated")
    name, *_ = name.split(", ")
    count = 2 * out if gated else out
    inputs = {"x": rng.standard_normal((rows, width)) * 2 + 0.5,
              "weight": rng.standard_normal((count, width)) / width**0.5,
              "bias": rng.standard_normal(count)}
    fields = {} if name == "GemmBiasRes" else {"activation": "gelu_tanh"}
    if name == "GemmBiasRes":
        inputs["residual"] = rng.standard_normal((rows, out))
    if name == "NormGemm":
        fields |= {"centred": 1, "epsilon": 1e-5, "gated": int(gated)}
        inputs["row_sums"] = torch.from_numpy(inputs["weight"]).to(DTYPES[dtype]).double() \
            .sum(1).numpy()
    # By a GEMV, by Hopper's kernel for few rows, by cuBLASLt.
    firsts = [()] if dtype == "float32" or rows > 24 else [(True, True), (True, False), (False,)]
    check(extension, plugins.registry()[name], fields, inputs, dtype, firsts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "group"), [
    (1, 4096, 100, 128), (2, 512, 37, 64), (8, 1536, 64, 32), (9, 576, 200, 96),
    (16, 8192, 50, 8192), (3, 14336, 33, 128), (5, 1056, 40, 352), (1, 64, 5000, 64),
    (17, 512, 64, 32), (64, 768, 96, 128), (200, 1024, 300, 128), (4, 60, 30, 12), (1, 32, 16, 32),
    (2, 14336, 36, 128), (4, 2048, 8500, 2048), (3, 896, 44, 128), (4, 14336, 72, 128),
    (7, 4096, 1100, 128), (12, 1152, 17924, 128), (16, 2080, 260, 2080), (9, 4096, 512, 256),
    (24, 4096, 1100, 128), (18, 1152, 17924, 128), (22, 2080, 260, 2080), (20, 2304, 300, 256),
    (16, 2112, 260, 2112), (6, 2304, 300, 768), (8, 1920, 68, 384),
    (136, 2080, 1000, 2080), (256, 4096, 200, 128), (300, 576, 72, 96), (390, 14336, 80, 128),
    (520, 1056, 40, 352), (700, 192, 2064, 64), (1024, 512, 136, 32)])
@pytest.mark.parametrize(("stored", "brings"), [
    ("int4", ""), ("uint4", "zero"), ("uint4", "min"), ("int8", ""), ("uint8", "zero"),
    ("uint8", "min"), ("float8_e4m3fn", "")])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasAct, plain", "GemmBiasRes", "GatedMLP",
                                  "NormGemm", "NormGemm, weighted", "NormGemm, weighted gated"])
def test_linear_with_a_quantized_weight(extension, name, stored, brings, rows, width, out, group,
                                        dtype, out_scale=0.0):
    rng = np.random.default_rng(4)
    name, _, more = name.partition(", ")
    weighted, plain = "weighted" in more, more == "plain"
    gated = name == "GatedMLP" or "gated" in more
    bits, count = CODE_TYPES[stored].bits, 2 * out if gated else out
    fields = {"weight_dtype": stored, "group_size": group, "in_features": width,
              "out_features": count}
    codes = rng.integers(0, 2 ** bits, (count, width), dtype=np.uint8)
    if stored == "float8_e4m3fn":
        codes &= 0xBF  # excluding NaN
    scale = rng.uniform(0.5, 1, (count, width // group)) / (2 ** bits * width**0.5)
    inputs = {"x": rng.standard_normal((rows, width)) + 0.3, "weight": pack(codes, bits),
              "bias": rng.standard_normal(count), "weight_scale": scale.astype(np.float32)}
    if brings == "zero":
        inputs["weight_zero"] = pack(rng.integers(0, 2 ** bits, scale.shape, dtype=np.uint8), bits)
    elif brings == "min":
        inputs["weight_min"] = (-scale * 2 ** bits * rng.uniform(0.4, 0.6, scale.shape)) \
            .astype(np.float32)  # so that rows have a mean near 0
    if name == "GemmBiasRes":
        inputs["residual"] = rng.standard_normal((rows, out))
    elif not plain:
        fields["activation"] = "silu"
    if out_scale:
        fields["out_scale"] = out_scale
    if weighted:
        fields |= {"gated": int(gated), "epsilon": 1e-5}
        inputs["norm_weight"] = rng.uniform(0.5, 2, width).astype(np.float32)
    elif name == "NormGemm":
        fields |= {"centred": 1, "epsilon": 1e-5}
        inputs["row_sums"] = dequantized(fields, inputs["weight"], inputs["weight_scale"],
                                         inputs.get("weight_zero"), inputs.get("weight_min")).sum(1)
    # By a GEMV or Hopper's kernel for few rows; quantized or dequantized. Normalized rows have all
    # of these variants too.
    firsts = [()]
    if dtype != "float32" and width % 32 == group % 32 == 0:
        firsts = [*itertools.product([True, False], repeat=2)]
        firsts += [(False, *own) for own in firsts] if weighted else []
    check(extension, plugins.registry()[name], fields, inputs, dtype, firsts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "width", "out"), [
    (24, 4096, 1100), (100, 2048, 2000), (12, 14336, 2048), (60, 4096, 6144),  # by clusters
    (20, 5120, 17924), (6, 5120, 17924), (11, 5120, 17924),  # by all blocks, evenly
    (150, 2048, 17920), (260, 1024, 17920), (450, 8192, 1024)])  # whole, and by clusters
@pytest.mark.parametrize(("stored", "name"), [("int4", "GatedMLP"), ("int8", "GemmBiasRes")])
def test_tiles_of_packed_weights_are_distributed(extension, name, stored, rows, width, out, dtype):
    test_linear_with_a_quantized_weight(extension, name, stored, "", rows, width,
                                          out // 2 if name == "GatedMLP" else out, 128, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["GemmBiasAct", "NormGemm, weighted"])
def test_blocks_process_many_tiles_of_a_packed_weight(extension, name, dtype):
    test_linear_with_a_quantized_weight(extension, name, "int4", "", 7, 1024, 130000, 128, dtype)


# Error of FP8 sums, and of values rounded to the other of two adjacent FP8 values.
FLOAT8 = 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "group"), [
    (1, 4096, 512, 4096), (5, 576, 96, 576), (1, 192, 4232, 192), (8, 1088, 9000, 1088),
    (16, 8256, 200, 8256), (12, 832, 8600, 832), (17, 1024, 64, 1024), (32, 2176, 4488, 2176),
    (30, 272, 48, 272), (64, 14336, 128, 14336), (130, 512, 1000, 512),
    (256, 2048, 96, 2048), (300, 1024, 264, 1024), (7, 512, 37, 512), (40, 60, 30, 60),
    (3, 512, 64, 128), (20, 16416, 32, 16416), (2, 64, 40, 64), (2, 14336, 136, 14336),
    (4, 2048, 4296, 2048), (3, 8192, 200, 8192)])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP", "NormGemm",
                                  "NormGemm, gated", "NormGemm, RMS", "NormGemm, RMS, gated"])
def test_linear_with_fp8_activations(extension, name, rows, width, out, group, dtype):
    # Quantized by a GEMV or before it; then a GEMV, Hopper's kernel or cuBLASLt, scaled by it or
    # after it; or dequantized.
    firsts = [()] if dtype == "float32" else [*itertools.product([True, False], repeat=4)]
    check(extension, *linear_of_fp8(name, rows, width, out, group), dtype, firsts, FLOAT8)


def linear_of_fp8(name, rows, width, out, group, **more):
    """Return an op, attributes and inputs."""
    rng = np.random.default_rng(5)
    name, *kind = name.split(", ")
    gated = name == "GatedMLP" or "gated" in kind
    count = 2 * out if gated else out
    fields = {"weight_dtype": "float8_e4m3fn", "activation_dtype": "float8_e4m3fn",
              "group_size": group, "in_features": width, "out_features": count, **more}
    scale = rng.uniform(0.5, 1, (count, width // group)) / width**0.5
    inputs = {"x": rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-1, 2, (rows, 1)),
              "weight": rng.integers(0, 256, (count, width), dtype=np.uint8) & 0xBF,
              "bias": rng.standard_normal(count), "weight_scale": scale.astype(np.float32)}
    if name == "GemmBiasRes":
        inputs["residual"] = rng.standard_normal((rows, out))
    else:
        fields["activation"] = "silu"
    if name == "NormGemm":
        fields |= {"centred": int(not gated and "RMS" not in kind), "gated": int(gated),
                   "epsilon": 1e-5}
        inputs["norm_weight"] = rng.uniform(0.5, 2, width)
        if "RMS" not in kind:  # otherwise the kernel for few rows normalizes and quantizes them
            inputs["norm_bias"] = rng.uniform(-1, 1, width)
    if fields.get("x_dtype"):
        inputs["x"] = np.clip(inputs["x"] / fields["activation_scale"], -448, 448)
    return plugins.registry()[name], fields, inputs


FIXED = {"activation_scale": 0.03}
GIVEN = {**FIXED, "x_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "group"), [
    (1, 4096, 512, 4096), (2, 14336, 136, 14336), (4, 2048, 4296, 2048), (5, 576, 96, 576),
    (8, 1088, 9000, 1088), (16, 8256, 200, 8256), (17, 1024, 64, 1024), (30, 272, 48, 272),
    (64, 14336, 128, 14336), (130, 512, 1000, 512), (300, 1024, 264, 1024), (40, 64, 32, 64),
    (3, 512, 64, 128), (200, 512, 264, 128)])
@pytest.mark.parametrize(("name", "more"), [
    ("GemmBiasRes", FIXED), ("NormGemm, RMS", FIXED), ("NormGemm, gated", FIXED),
    ("GemmBiasRes", GIVEN), ("GemmBiasAct", GIVEN), ("GatedMLP", {"out_scale": 0.5}),
    ("NormGemm, RMS, gated", {**FIXED, "out_scale": 0.5}),
    ("NormGemm, gated", {**FIXED, "out_scale": 0.5})])
def test_linear_with_static_fp8_activations(extension, name, more, rows, width, out, group, dtype):
    firsts = [()] if dtype == "float32" else [*itertools.product([True, False], repeat=4)]
    check(extension, *linear_of_fp8(name, rows, width, out, group, **more), dtype, firsts, FLOAT8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "group"), [
    (1, 4096, 512, 128), (2, 14336, 136, 128), (3, 896, 72, 128), (4, 2048, 4296, 128),
    (5, 640, 192, 128), (8, 1152, 9088, 128), (16, 8320, 200, 128), (17, 1024, 64, 128),
    (30, 384, 48, 128), (32, 2176, 4480, 128), (33, 512, 256, 128), (64, 14336, 128, 128),
    (130, 512, 1000, 128), (256, 2048, 96, 128), (301, 1024, 264, 128), (1027, 256, 384, 128),
    (2050, 384, 136, 128), (7, 512, 37, 128), (2, 192, 40, 64), (40, 96, 64, 32)])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP", "NormGemm",
                                  "NormGemm, gated", "NormGemm, RMS", "NormGemm, RMS, gated"])
def test_linear_with_grouped_fp8_activations(extension, name, rows, width, out, group, dtype):
    """Quantized by a GEMV or before; then a GEMV, Hopper's kernel or cuBLASLt; or dequantized."""
    op, fields, inputs = linear_of_fp8(name, rows, width, out, group, activation_group_size=group)
    if group == BLOCK:
        in_blocks(fields, inputs)
    firsts = [()] if dtype == "float32" else [*itertools.product([True, False], repeat=3)]
    check(extension, op, fields, inputs, dtype, firsts, FLOAT8)


def in_blocks(fields, inputs):
    scale, rows = inputs["weight_scale"][::BLOCK], fields["out_features"]
    inputs["weight_scale"] = scale.repeat(BLOCK, 0)[:rows]
    inputs["weight_blocks"] = np.zeros(blocks_shape(rows, scale.shape[1]), np.float32)
    inputs["weight_blocks"][:, :scale.shape[1]] = scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1e-7, 1e7])
@pytest.mark.parametrize(("rows", "width", "out", "group"), [
    (1, 4096, 512, 128), (2, 14336, 136, 128), (3, 896, 72, 128), (4, 2048, 4296, 128),
    (7, 512, 37, 128), (40, 640, 192, 128), (1, 4096, 1100, 4096), (2, 14336, 40, 14336),
    (3, 576, 200, 576), (4, 64, 4232, 64), (4, 8256, 200, 8256)])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP", "NormGemm, RMS",
                                  "NormGemm, RMS, gated"])
def test_linear_with_fp8_weights_only(extension, name, rows, width, out, group, size, dtype):
    """Few rows are computed in float16, without overflow."""
    if dtype == "float16" and size != 1:
        pytest.skip("float16 has no such numbers")
    op, fields, inputs = linear_of_fp8(name, rows, width, out, group, activation_dtype="")
    inputs["x"] *= size
    inputs["bias"] *= size
    if name == "GemmBiasRes":
        inputs["residual"] *= size
    if name == "GatedMLP":
        fields["activation"] = "relu"
    if group == BLOCK:
        in_blocks(fields, inputs)
    firsts = [()] if dtype == "float32" else [*itertools.product([True, False], repeat=2)]
    check(extension, op, fields, inputs, dtype, firsts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out_scale"), [
    *((rows, 0.001) for rows in (1, 3, 4, 8, 16, 40, 300)), (200, 0.02), (2000, 0.02)])
@pytest.mark.parametrize(("stored", "brings"), [("int4", ""), ("uint4", "zero"), ("int8", ""),
                                                ("float8_e4m3fn", "")])
def test_gated_mlp_with_quantized_weights_quantizes_its_output(extension, stored, brings, rows,
                                                               out_scale, dtype):
    """Most or few values exceed FP8; tolerances are relative to the remaining range."""
    test_linear_with_a_quantized_weight(extension, "GatedMLP", stored, brings, rows, 1024, 1408,
                                          128, dtype, out_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("name", ["GatedMLP", "NormGemm"])
def test_gated_mlp_quantizes_its_output(extension, name, rows, dtype):
    rng = np.random.default_rng(rows)
    inputs = {"x": rng.standard_normal((rows, 1024)),
              "weight": rng.standard_normal((2816, 1024)) / 32}
    fields = {"activation": "silu", "out_scale": 0.005, **({"gated": 1} if name == "NormGemm"
                                                           else {})}
    check(extension, plugins.registry()[name], fields, inputs, dtype,
          [*itertools.product([True, False], repeat=2)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "past", "dim", "heads", "kv_heads", "more"), [
    ((1,) * 4, (300, 0, 63, 1000), 128, 8, 2, {}),
    ((1,), (2000,), 96, 6, 1, {}),
    ((1, 1), (511, 3), 256, 4, 2, {"sinks": True}),
    ((1,) * 40, (1900, *range(39)), 64, 8, 2, {"block_size": 16}),
    ((1,) * 3, (300, 0, 1000), 128, 8, 2, {"block_size": 16, "kv_dtype": "float8_e4m3fn"}),
    ((130, 3, 64), (0, 50, 10), 128, 8, 2, {}),
    ((65, 1, 200), (0, 0, 300), 64, 4, 4, {"window": 70}),
    ((33, 70), (5, 0), 80, 4, 2, {}),
    ((1, 1, 130, 64), (700, 3, 0, 300), 128, 8, 2, {"block_size": 16}),
    ((30, 1, 9), (50, 300, 300), 256, 8, 2, {"block_size": 16, "kv_dtype": "float8_e4m3fn"}),
])
def test_attention_quantizes_its_output(extension, new, past, dim, heads, kv_heads, more, dtype):
    sample = _sample(np.random.default_rng(1), new, past, dim, heads=heads, kv_heads=kv_heads,
                     max_seq_len=2048, rotary_dim=dim, **more)
    check(extension, plugins.registry()["CausalAttention"], {**sample.fields, "out_scale": 0.002},
          sample.inputs, dtype)


RANDOM = settings(max_examples=40, deadline=None, derandomize=True,
                  suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS, DTYPE = st.integers(1, 64), st.sampled_from(list(DTYPES))
HEADS = st.sampled_from([(4, 4), (8, 2), (6, 1), (12, 4), (71, 1)])  # MHA, GQA, MQA


@RANDOM
@given(rows=ROWS, width=st.integers(1, 3000), dtype=DTYPE, seed=st.integers(0, 99),
       name=st.sampled_from(["RMSNorm", "LayerNorm", "AddRMSNorm", "AddLayerNorm"]))
def test_any_norm(extension, rows, width, dtype, seed, name):
    rng = np.random.default_rng(seed)
    op = plugins.registry()[name]
    inputs = {key: rng.standard_normal((rows, width) if key in ("x", "residual") else width) + 0.3
              for key in op.input_names}
    check(extension, op, {"epsilon": 1e-5}, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4096, 5000, 8192, 8199, 12288, 32768])
@pytest.mark.parametrize("name", ["RMSNorm", "AddLayerNorm"])
def test_norm_of_long_rows(extension, name, width, dtype):
    rng = np.random.default_rng(width)
    op = plugins.registry()[name]
    inputs = {key: rng.standard_normal((3, width) if key in ("x", "residual") else width) + 0.3
              for key in op.input_names}
    check(extension, op, {"epsilon": 1e-5}, inputs, dtype)


def test_a_row_too_long_to_normalize_is_refused(extension):
    inputs = {"x": np.ones((1, 32776)), "weight": np.ones(32776)}
    with pytest.raises(extension.CudaError, match="a norm of rows of 32776 elements: at most"):
        check(extension, plugins.registry()["RMSNorm"], {"epsilon": 1e-5}, inputs, "float16")


@RANDOM
@given(rows=ROWS, width=st.integers(1, 1500), out=st.integers(1, 700), dtype=DTYPE,
       seed=st.integers(0, 99), name=st.sampled_from(["GemmBiasAct", "GemmBiasRes", "GatedMLP"]),
       activation=st.sampled_from(["none", "relu", "gelu", "gelu_tanh", "silu"]))
def test_any_linear(extension, rows, width, out, dtype, seed, name, activation):
    rng = np.random.default_rng(seed)
    count = 2 * out if name == "GatedMLP" else out
    inputs = {"x": rng.standard_normal((rows, width)),
              "weight": rng.standard_normal((count, width)) / width**0.5,
              "bias": rng.standard_normal(count)}
    if name == "GemmBiasRes":
        inputs["residual"] = rng.standard_normal((rows, out))
    check(extension, plugins.registry()[name],
          {} if name == "GemmBiasRes" else {"activation": activation}, inputs, dtype)


def experts_of(rng, tokens, hidden, inner, num_experts, top_k, biased=False, favoured=0, others=0,
               residual=False, **fields):
    """Return attributes and inputs of Experts.

    Each token has `top_k` experts. `favoured` ones are every token's first; `others` belong to
    another rank.
    """
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    every = num_experts + others
    experts = np.stack([np.concatenate([np.arange(favoured), favoured + rng.permutation(
        every - favoured)])[:top_k] for _ in range(tokens)])
    both = inner * (1 + fields.get("gated", 1))
    inputs = {"x": normal(tokens, hidden), "experts": experts,
              "scores": rng.uniform(0.1, 1.5, (tokens, top_k)).astype(np.float32),
              "gate_up": normal(num_experts, both, hidden) / hidden**0.5 * 2,
              "down": normal(num_experts, hidden, inner) / inner**0.5}
    if biased:
        inputs |= {"gate_up_bias": normal(num_experts, both),
                   "down_bias": normal(num_experts, hidden)}
    if residual:
        inputs["residual"] = normal(tokens, hidden)
    if others:
        fields |= {"sharded": 1, "first_expert": others // 2}
    return {"top_k": top_k, **fields}, inputs


def check_experts(extension, fields, inputs, dtype, **more):
    """Check the kernels for few tokens, and those for many if supported."""
    ways = dtype != "float32" and not any(size % 8 for size in inputs["down"].shape[1:])
    check(extension, plugins.registry()["Experts"], fields, inputs, dtype,
          ((True,), (False,)) if ways else ((),), **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "inner", "num_experts", "top_k", "more"), [
    (1, 2048, 768, 12, 8, {}), (4, 2048, 768, 16, 4, {"biased": True}), (1, 72, 40, 3, 1, {}),
    (16, 72, 40, 5, 2, {"favoured": 1}), (17, 72, 40, 60, 8, {"favoured": 2}),
    (128, 72, 40, 128, 8, {}), (300, 264, 136, 5, 2, {"favoured": 1, "biased": True}),
    (200, 128, 64, 3, 3, {}), (513, 64, 200, 8, 2, {"favoured": 2}), (1, 8, 8, 1, 1, {}),
    (40, 2880, 360, 8, 4, {"biased": True, "alpha": 1.702, "limit": 1.5, "up_offset": 1.0}),
    (33, 100, 36, 5, 2, {"biased": True}), (7, 64, 24, 3, 8, {"others": 11, "biased": True}),
    (90, 64, 24, 3, 2, {"others": 11}), (1, 64, 24, 3, 2, {"others": 9}),
    (50, 64, 24, 6, 2, {"gated": 0, "activation": "relu2", "biased": True}),
    (9, 64, 48, 6, 2, {"scale_input": 1, "biased": True}),
    (2, 4096, 1024, 3, 2, {}), (20, 64, 64, 1000, 2, {}),
    (700, 72, 264, 3, 2, {"favoured": 1, "biased": True}), (1500, 16, 24, 1000, 2, {}),
    (3000, 16, 136, 60, 8, {"others": 20, "biased": True}),
    (400, 328, 72, 2, 1, {"gated": 0, "activation": "gelu", "biased": True}),
    (600, 64, 392, 2, 2, {"scale_input": 1, "limit": 1.5}),
    # Experts summed by the second GEMM: nearly all of 132 SMs have as many tiles.
    (1, 2048, 72, 9, 8, {"others": 7, "biased": True}), (1, 2104, 40, 3, 1, {"residual": True}),
    (2, 2072, 328, 64, 8, {"biased": True, "residual": True}), (1, 2048, 8, 2, 2, {"others": 90}),
    (4, 2048, 136, 128, 8, {"others": 60, "residual": True, "scale_input": 1}),
    (5, 72, 40, 6, 2, {"residual": True}), (90, 72, 40, 6, 2, {"residual": True, "others": 3}),
])
def test_experts(extension, tokens, hidden, inner, num_experts, top_k, more, dtype):
    rng = np.random.default_rng(tokens)
    fields, inputs = experts_of(rng, tokens, hidden, inner, num_experts, top_k, **more)
    check_experts(extension, fields, inputs, dtype)


def packed_experts(rng, stored, group_size, fields, inputs):
    """Replace the weights by random codes."""
    bits, (count, hidden, inner) = CODE_TYPES[stored].bits, inputs["down"].shape
    inputs = dict(inputs)
    for name in ("gate_up", "down"):
        _, rows, width = inputs[name].shape
        codes = rng.integers(0, 2 ** bits, (count * rows, width), dtype=np.uint8)
        if stored == "float8_e4m3fn":
            codes &= 0xBF
        shape = count * rows, width // group_size
        size = {"mxfp4": 3, "float8_e4m3fn": 0.7}.get(stored, 2 ** bits / 3.5) * width ** 0.5
        inputs[name] = pack(codes, bits)
        inputs[f"{name}_scale"] = (rng.uniform(0.5, 1.5, shape) / size).astype(np.float32)
        if stored == "mxfp4":
            inputs[f"{name}_scale"] = rng.integers(-2, 1, shape).astype(np.uint8) + np.uint8(
                127 - np.log2(size))
        if CODE_TYPES[stored].zero_point is None:
            zeros = rng.integers(2 ** bits // 3, 2 ** bits * 2 // 3, shape, dtype=np.uint8)
            inputs[f"{name}_zero"] = pack(zeros, bits)
        inputs |= {own: inputs[own].reshape(count, rows, -1)
                   for own in (name, f"{name}_scale", f"{name}_zero") if own in inputs}
    return {**fields, "weight_dtype": stored, "group_size": group_size, "in_features": hidden,
            "inner_features": inner}, inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stored", "group_size"), [
    ("int4", 128), ("int4", 64), ("uint4", 32), ("int8", 64), ("uint8", 32), ("float8_e4m3fn", 128),
    ("mxfp4", 32)])
@pytest.mark.parametrize(("tokens", "hidden", "inner", "num_experts", "top_k", "more"), [
    (1, 2048, 768, 12, 8, {}), (16, 384, 128, 5, 2, {"favoured": 1, "biased": True}),
    (300, 256, 384, 5, 2, {"biased": True, "alpha": 1.702, "limit": 1.5, "up_offset": 1.0}),
    (7, 128, 128, 3, 8, {"others": 11, "biased": True}), (40, 128, 256, 60, 8, {}),
    (9, 128, 128, 6, 2, {"scale_input": 1, "gated": 0, "activation": "relu2"}),
    (3, 128, 128, 6, 2, {"residual": True, "biased": True}),
])
def test_quantized_experts(extension, tokens, hidden, inner, num_experts, top_k, more, stored,
                           group_size, dtype):
    rng = np.random.default_rng(tokens)
    fields, inputs = packed_experts(rng, stored, group_size, *experts_of(
        rng, tokens, hidden, inner, num_experts, top_k, **more))
    check_experts(extension, fields, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group_size", "rounded"), [(128, 128), (128, 0), (64, 64), (32, 0)])
@pytest.mark.parametrize(("tokens", "hidden", "inner", "num_experts", "top_k", "more"), [
    (1, 2048, 768, 12, 8, {}), (16, 384, 128, 5, 2, {"favoured": 1, "biased": True}),
    (300, 256, 384, 5, 2, {"biased": True, "alpha": 1.702, "limit": 1.5, "up_offset": 1.0}),
    (7, 128, 128, 3, 8, {"others": 11, "biased": True}), (40, 128, 256, 60, 8, {}),
    (9, 128, 128, 6, 2, {"scale_input": 1, "gated": 0, "activation": "relu2"}),
    (3, 128, 128, 6, 2, {"residual": True, "biased": True}), (2, 1152, 640, 64, 7, {"others": 9}),
    (700, 384, 256, 3, 2, {"favoured": 1, "others": 2}), (60, 640, 128, 8, 4, {}),
])
def test_experts_quantize_their_activations(extension, tokens, hidden, inner, num_experts, top_k,
                                            more, group_size, rounded, dtype):
    rng = np.random.default_rng(tokens)
    fields, inputs = packed_experts(rng, "float8_e4m3fn", group_size, *experts_of(
        rng, tokens, hidden, inner, num_experts, top_k, **more))
    # Values near the middle of two codes may be rounded to the other one.
    check_experts(extension, fields | {"activation_dtype": "float8_e4m3fn",
                                       "activation_group_size": rounded}, inputs, dtype,
                  least=5e-2, unlike=fields)


@pytest.mark.parametrize(("stored", "group_size", "hidden", "inner"), [
    ("int4", 48, 96, 48), ("mxfp4", 32, 96, 32), ("uint8", 32, 40 * 32, 32), ("int8", 12, 24, 36)])
def test_quantized_experts_of_any_size(extension, stored, group_size, hidden, inner):
    rng = np.random.default_rng(hidden)
    fields, inputs = packed_experts(rng, stored, group_size,
                                    *experts_of(rng, 11, hidden, inner, 4, 2))
    check(extension, plugins.registry()["Experts"], fields, inputs, "bfloat16")


@pytest.mark.parametrize("stored", ["", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize(("tokens", "more"), [(1, {}), (6, {"others": 11, "biased": True}),
                                              (40, {"residual": True}), (700, {"favoured": 1})])
def test_kernel_choice_does_not_depend_on_the_timed_routing(extension, tokens, more, stored):
    rng = np.random.default_rng(tokens)
    fields, inputs = experts_of(rng, tokens, 384, 256, 9, 3, **more)
    if stored:
        fields, inputs = packed_experts(rng, stored, 128, fields, inputs)
    check(extension, plugins.registry()["Experts"], fields, inputs, "bfloat16")


@RANDOM
@given(tokens=st.integers(1, 128), hidden=st.sampled_from([16, 72, 264]), dtype=DTYPE,
       inner=st.sampled_from([8, 40, 136]), num_experts=st.sampled_from([3, 5, 60, 128]),
       top_k=st.sampled_from([1, 2, 8]), biased=st.booleans(), favoured=st.integers(0, 2),
       gated=st.sampled_from([1, 1, 0]), scale_input=st.sampled_from([0, 0, 1]),
       others=st.sampled_from([0, 0, 5]), residual=st.booleans(), limit=st.sampled_from([0.0, 1.5]),
       activation=st.sampled_from(list(ACTIVATIONS)), seed=st.integers(0, 99))
def test_any_experts(extension, tokens, hidden, inner, num_experts, top_k, dtype, seed, favoured,
                     others, **more):
    top_k = min(top_k, num_experts + others)
    fields, inputs = experts_of(np.random.default_rng(seed), tokens, hidden, inner, num_experts,
                                top_k, favoured=min(favoured, top_k), others=others, up_offset=0.5,
                                **more)
    check_experts(extension, fields, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "num_experts", "fields"), [
    (1, 128, {"top_k": 8, "normalize": 1}), (70, 60, {"top_k": 4}), (5, 3, {"top_k": 1}),
    (33, 256, {"top_k": 8, "score": "sigmoid", "groups": 8, "top_groups": 4, "normalize": 1,
               "group_score": "top2", "epsilon": 1e-20, "scale": 2.5, "biased": True}),
    (9, 160, {"top_k": 6, "groups": 8, "top_groups": 3, "scale": 16.0}),
    (17, 384, {"top_k": 8, "score": "sigmoid", "biased": True}),
    (4, 1024, {"top_k": 32, "score": "sqrtsoftplus", "normalize": 1}),
    (6, 1000, {"top_k": 12, "groups": 100, "top_groups": 50}),
    (12, 16, {"top_k": 2, "score": "sparsemixer", "jitter": 0.01}), (2, 32, {"top_k": 32})])
def test_routes(extension, tokens, num_experts, fields, dtype):
    rng = np.random.default_rng(tokens)
    fields = {**fields}
    inputs = {"logits": rng.standard_normal((tokens, num_experts)) * 2}
    if fields.pop("biased", False):
        inputs["bias"] = rng.standard_normal(num_experts)
    check(extension, plugins.registry()["Route"], fields, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sparsemixer"])
def test_equal_routing_scores_select_the_first_experts(extension, score, dtype):
    logits = np.round(np.random.default_rng(3).standard_normal((40, 200)))
    check(extension, plugins.registry()["Route"], {"top_k": 6, "score": score, "jitter": 0.01},
          {"logits": logits}, dtype)


@pytest.mark.parametrize(("fields", "shape", "match"), [
    ({"top_k": 33}, (2, 64), "top_k 33 is not from 1 to 32"),
    ({"top_k": 2}, (2, 1025), "1025 experts: at most 1024 are supported"),
    ({"top_k": 5, "groups": 4, "top_groups": 2}, (2, 8), "too few for top_k 5 of 2 groups")])
def test_invalid_routes_are_refused(extension, fields, shape, match):
    with pytest.raises(extension.CudaError, match=match):
        extension.shapes("Route", fields, [shape, ()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "past", "dim", "heads", "kv_heads", "more"), [
    ((1,) * 4, (300, 0, 63, 1000), 64, 64, 8, {}), ((1,), (2000,), 64, 8, 1, {"window": 128}),
    ((130, 3, 64), (0, 50, 10), 64, 8, 2, {}), ((65, 1, 200), (0, 0, 300), 128, 4, 4, {}),
    ((1, 1, 70, 5), (300, 9, 0, 200), 64, 8, 2, {"block_size": 16, "window": 128}),
    ((1, 1, 20), (9, 900, 5), 72, 4, 2, {"block_size": 8, "softcap": 4.0}),
    ((20, 9), (5, 0), 72, 4, 2, {"biased": 30}), ((1,) * 200, (40,) * 200, 64, 4, 4, {}),
])
def test_attention_with_sinks(extension, new, past, dim, heads, kv_heads, more, dtype):
    sample = _sample(np.random.default_rng(1), new, past, dim, heads=heads, kv_heads=kv_heads,
                     max_seq_len=2048, rotary_dim=dim, sinks=True, **more)
    sample.inputs["sinks"] += np.arange(heads) % 3 * 3  # some weigh more than all keys
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "past", "dim", "more"), [
    ((1,) * 4, (300, 0, 63, 1000), 64, {"rotary_dim": 64}),
    ((130, 3, 64), (0, 50, 10), 128, {"rotary_dim": 64}),
    ((1, 1, 70, 5), (300, 9, 0, 200), 128, {"rotary_dim": 128, "block_size": 16}),
    ((20, 1), (5, 0), 72, {"rotary_dim": 40, "interleaved": 1}), ((5, 1), (5, 9), 256, {}),
])
def test_attention_with_qk_norm_after_the_rotary_embedding(extension, new, past, dim, more, dtype):
    """The order matters if cos and sin are scaled, as in YaRN."""
    sample = _sample(np.random.default_rng(1), new, past, dim, max_seq_len=2048, norms="qk",
                     norm_after_rotary=1, **more)
    for name in {"cos", "sin"} & {*sample.inputs}:
        sample.inputs[name] *= 1.3
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@RANDOM
@given(data=st.data(), heads=HEADS, dim=st.sampled_from([64, 80, 96, 128, 256]), dtype=DTYPE,
       decode=st.booleans(), window=st.sampled_from([0, 0, 1, 33, 500]), sinks=st.booleans(),
       softcap=st.sampled_from([0.0, 0.0, 5.0]), rotary=st.booleans(),
       where=st.sampled_from([{}, {}, {"block_size": 16}, {"block_size": 64}, {"block_size": 8}]),
       seed=st.integers(0, 99))
def test_any_attention(extension, data, heads, dim, dtype, decode, window, softcap, rotary, sinks,
                       where, seed):
    length = data.draw(st.integers(1, 4096), label="length")
    most = max(1, 2**23 // (length * heads[1] * dim))
    batch = data.draw(st.integers(1, min(64 if decode else 4, most)), label="batch")
    new = [1] * batch if decode else data.draw(
        st.lists(st.integers(1, min(length, 150)), min_size=batch, max_size=batch), label="new")
    past = [data.draw(st.integers(0, length - count), label="past") for count in new]
    more = where | ({"rotary_dim": dim} if rotary else {})
    sample = _sample(np.random.default_rng(seed), new, past, dim, *heads, window=window,
                     softcap=softcap, max_seq_len=-(-length // 64) * 64, sinks=sinks, **more)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@RANDOM
@given(new=st.lists(st.integers(1, 400), min_size=1, max_size=3), seed=st.integers(0, 99),
       heads=st.sampled_from([(1, 1), (4, 4), (8, 2), (7, 1), (6, 2), (16, 1), (71, 1), (20, 2)]),
       dim=st.sampled_from([64, 128, 256]), dtype=st.sampled_from(["float16", "bfloat16"]),
       block_size=st.sampled_from([16, 32, 64, 128, 512]),
       window=st.sampled_from([0, 0, 1, 40, 300]), sinks=st.booleans(),
       run=st.sampled_from([1, 2, 3, 4, 1000]))
def test_prefill_over_contiguous_and_scattered_blocks(extension, new, heads, dim, dtype, block_size,
                                                      window, sinks, run, seed):
    rng = np.random.default_rng(seed)
    past = rng.integers(0, 1000, len(new)).tolist()
    sample = _sample(rng, new, past, dim, *heads, window=window, max_seq_len=1536, sinks=sinks,
                     rotary_dim=dim, block_size=block_size)
    table = np.arange(sample.inputs["block_table"].size, dtype=np.int32)
    runs = np.split(table, range(run, len(table), run))
    order = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    sample.inputs["block_table"] = order.reshape(len(new), -1)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


def logits_of(kind, rows, vocab, stride):
    """Logits that are hard to order; padding after the vocabulary has the maximum."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((rows, stride)) * 4
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[:] = 1.5
    elif kind == "zeros":
        logits = -np.abs(logits)
        logits[:, ::3], logits[:, ::6] = 0.0, -0.0
    elif kind == "-inf":
        logits[rng.random(logits.shape) < 0.5] = -np.inf
        logits[:, vocab // 2] = 1
    elif kind == "a peak":
        logits[:, vocab // 2] = 80
    logits[:, vocab:] = 1e4
    return torch.from_numpy(logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "zeros", "-inf", "a peak"])
@pytest.mark.parametrize(("rows", "vocab", "stride", "count"), [
    (4, 101, 128, 6), (1, 1, 64, 1), (2, 101, 101, 101), (3, 4097, 4160, 40), (8, 32000, 32000, 12),
    (4, 128256, 128256, 7), (64, 50257, 50304, 72), (1, 300007, 300007, 5)])
def test_candidates_are_the_top_k_tokens_in_order(extension, rows, vocab, stride, count, kind,
                                                  dtype):
    logits = logits_of(kind, rows, vocab, stride).to(DTYPES[dtype]).cuda()
    tokens = torch.full((rows, count), -7, dtype=torch.int32, device="cuda")
    log_probs = torch.full((rows, count), float("nan"), device="cuda")
    extension.candidates([describe(t) for t in (tokens, log_probs, logits)], vocab)
    seen = logits[:, :vocab].double().cpu().numpy()
    expected = np.lexsort((np.broadcast_to(np.arange(vocab), seen.shape), -seen))[:, :count]
    wrong = np.argwhere(tokens.cpu().numpy() != expected)
    assert not len(wrong), f"row {wrong[0][0]}, candidate {wrong[0][1]} of {len(wrong)} wrong ones"
    shifted = seen - seen.max(axis=1, keepdims=True)
    truth = np.take_along_axis(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)),
                               expected, axis=1)
    np.testing.assert_allclose(log_probs.cpu().numpy(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("new", "past", "more"), [
    ((1, 1, 70, 5), (300, 9, 0, 200), {}), ((1, 300), (1000, 100), {"window": 90}),
    ((1,) * 5 + (2, 130), (33,) * 5 + (400, 0), {"softcap": 5.0})])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_a_mixed_step_runs_prefill_and_decode_attention(extension, new, past, more, block_size,
                                                        dtype):
    sample = _sample(np.random.default_rng(3), new, past, 128, heads=8, kv_heads=2,
                     max_seq_len=1024, rotary_dim=128, block_size=block_size, **more)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("more", [
    {}, {"softcap": 5.0}, {"sinks": True}, {"norms": "qk"}, {"scaled": True},
    {"kv_dtype": "float8_e4m3fn"}, {"window": 90}, {"heads": 7, "kv_heads": 1},
    {"heads": 6, "kv_heads": 6}], ids=str)
@pytest.mark.parametrize(("length", "past", "members", "dim", "block_size"), [
    (16, (20, 40), (0, 1), 64, 16), (512, (512, 600, 530), (0, 1, 2), 128, 16),
    (256, (300, 255, 700, 256), (1, -1, 0, 2), 128, 32), (1040, (1100,) * 20, range(20), 128, 16),
    (96, (100,) * 300, range(300), 64, 32), (320, (330, 4000), (1, 0), 256, 64),
    (2048, (2048, 2050), (0, 1), 64, 128), (64, (64,) * 7, (-1, 0, 1, 2, -1, 3, -1), 256, 16)])
def test_a_shared_prefix_is_read_once(extension, length, past, members, dim, block_size, more,
                                      dtype):
    op, rng = plugins.registry()["CausalAttention"], np.random.default_rng(5)
    sample = _sample(rng, (1,) * len(past), past, dim, max_seq_len=-(-max(past) // 128) * 128 + 128,
                     rotary_dim=dim, block_size=block_size,
                     **{"heads": 8, "kv_heads": 2} | more)
    table = sample.inputs["block_table"]
    first = [*members].index(0)
    for sequence, member in enumerate(members):
        if member >= 0:
            table[sequence, :length // block_size] = table[first, :length // block_size]
    fields = op.complete(sample.fields)
    tensors = tensors_of(op, fields, sample.inputs, dtype)
    expected = op.reference(fields, {
        name: tensor.double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()
        for name, tensor in tensors.items()})[0]
    out = torch.full(expected.shape, float("nan"), dtype=DTYPES[dtype], device="cuda")
    outputs = [out, tensors["key_cache"], tensors["value_cache"]]
    given = [describe(tensors[name]) if name in tensors else (0, "float32", [])
             for name in op.input_names]
    extension.run_op(op.name, dict(fields), given, [describe(t) for t in outputs], len(past),
                     own_from=[length if member >= 0 else 0 for member in members])
    error = np.abs(out.double().cpu().numpy() - expected).max()
    assert error <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("raw", [False, True], ids=["given", "raw"])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("new", "k_heads", "v_heads", "k_dim", "v_dim"), [
    ([300], 2, 4, 128, 128), ([1, 1, 64, 128, 511], 1, 2, 64, 72), ([191, 1, 400], 1, 3, 256, 40),
    ([129, 500], 2, 2, 96, 32), ([128], 1, 2, 16, 8)])
def test_linear_attention_of_long_prompts(extension, new, k_heads, v_heads, k_dim, v_dim, dtype,
                                          rule, raw):
    """Sequences cross chunk edges, with and without an initial state.

    Decay and beta are activated, or raw outputs of a linear layer (`raw`).
    """
    rng, total, batch = np.random.default_rng(0), sum(new), len(new)
    delta = rule == "gated_delta"
    fields = dict(num_k_heads=k_heads, num_v_heads=v_heads, k_head_dim=k_dim, v_head_dim=v_dim,
                  update_rule=rule, scale=k_dim ** -0.5, l2norm=int(delta))
    qkv = rng.standard_normal((total, 2 * k_heads * k_dim + v_heads * v_dim)) / (1 if delta else 4)
    inputs = {"qkv": qkv, "decay": -rng.uniform(0, 0.5, (total, v_heads)) ** 2,
              "state": rng.standard_normal((batch, v_heads, k_dim, v_dim)) / 4,
              "beta": rng.uniform(0, 1, (total, v_heads)), "skip": rng.standard_normal(v_heads)}
    if raw:
        fields |= {"decay_activation": "softplus", "beta_activation": "sigmoid"}
        inputs |= {name: rng.standard_normal((total, v_heads)) for name in ("decay", "beta")}
        inputs |= {"decay_bias": rng.uniform(-6, -2, v_heads), "beta_bias": np.ones(v_heads),
                   "decay_rate": -rng.uniform(0.5, 4, v_heads)}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs |= {"cu_seqlens": np.cumsum([0, *new], dtype=np.int32),
               "past_lens": np.array([7 * (i % 2) for i in range(batch)], np.int32)}
    check(extension, plugins.registry()["GatedLinearAttention"], fields, inputs, dtype, least=1e-3)


@pytest.mark.parametrize("per_channel", [0, 1])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 128), (64, 32), (200, 33), (37, 20)])
def test_states_are_stored_before_drafts(extension, k_dim, v_dim, dtype, rule, per_channel):
    """After one token, all tokens, at the edge of a tile of tokens, and without a state before."""
    rng, new, commits = np.random.default_rng(0), [5, 1, 3, 40, 33, 16], [1, 1, 3, 16, 20, 15]
    k_heads, v_heads = 2, 4
    fields = dict(num_k_heads=k_heads, num_v_heads=v_heads, k_head_dim=k_dim, v_head_dim=v_dim,
                  update_rule=rule, scale=k_dim ** -0.5, l2norm=1, decay_per_channel=per_channel)
    inputs = {"qkv": rng.standard_normal((sum(new), 2 * k_heads * k_dim + v_heads * v_dim)),
              "decay": -rng.uniform(0, 0.5, (sum(new), v_heads * (k_dim if per_channel else 1))),
              "state": rng.standard_normal((8, v_heads, k_dim, v_dim)),
              "beta": rng.uniform(0, 1, (sum(new), v_heads))}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs |= {"cu_seqlens": np.cumsum([0, *new], dtype=np.int32),
               "past_lens": np.array([7, 3, 0, 9, 0, 1], np.int32),
               "state_slots": np.array([3, 0, 7, 1, 2, 5], np.int32),
               "commit_lens": np.array(commits, np.int32)}
    check(extension, plugins.registry()["GatedLinearAttention"], fields, inputs, dtype)


# Decode, prefill and both, on every kernel: in pieces, for prompts, by token.
_STEPS = [
    ((1,) * 4, (300, 0, 63, 1000), 64, {"block_size": 16}),
    ((1,) * 3, (4000, 1, 255), 128, {"block_size": 32, "norms": "qk", "rotary_dim": 128}),
    ((1,) * 9, (90,) * 9, 256, {"block_size": 16}),
    ((130, 3, 64), (0, 50, 10), 64, {"block_size": 16}),
    ((200, 70), (63, 300), 128, {"block_size": 16, "norms": "qk", "rotary_dim": 64}),
    ((97,), (310,), 256, {"block_size": 64, "heads": 6, "kv_heads": 1}),
    ((1, 1, 50, 9), (65, 900, 90, 64), 128, {"block_size": 16}),
    ((70, 7), (5, 90), 96, {"block_size": 8}),
    ((20, 9), (5, 60), 72, {"norms": "qk"}),
    ((1, 40, 5), (200, 64, 128), 64, {"softcap": 3.0}),
    ((1,) * 5, (300, 0, 63, 1000, 16), 512, {"block_size": 16, "heads": 16, "norms": "qk"}),
    ((1, 90, 7), (130, 63, 300), 512, {"block_size": 32, "rotary_dim": 128}),
    ((1, 20), (70, 33), 480, {"heads": 3, "kv_heads": 1, "block_size": 16}),
]


def _of_step(new, past, dim, more, **changes):
    longest = max(n + p for n, p in zip(new, past, strict=True))
    more = {"heads": 8, "kv_heads": 2, "max_seq_len": -(-longest // 64) * 64, **more}
    return _sample(np.random.default_rng(3), new, past, dim, **{**more, **changes})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [
    {"chunk": 64}, {"chunk": 40, "scaled": True}, {"chunk": 100, "window": 30, "sinks": True},
    {"norms": "qkv"}, {"norms": "v", "scaled": True}, {"by_key": True}], ids=str)
@pytest.mark.parametrize(("new", "past", "dim", "more"), _STEPS)
def test_attention_in_chunks_of_scaled_queries_and_normed_values(extension, new, past, dim, more,
                                                                 changes, dtype):
    if "by_key" in changes and dim > 256:
        pytest.skip("scores with a bias have no kernel for this head_dim")
    sample = _of_step(new, past, dim, more, **changes)
    check(extension, plugins.registry()["CausalAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [
    {}, {"window": 50}, {"chunk": 64, "scaled": True}, {"kv_dtype": "float8_e4m3fn"}], ids=str)
@pytest.mark.parametrize(("new", "past", "dim", "more"), _STEPS)
def test_attention_over_another_layer_s_cache(extension, new, past, dim, more, changes, dtype):
    sample = _reading(_of_step(new, past, dim, more, **changes))
    check(extension, plugins.registry()["CachedAttention"], sample.fields, sample.inputs, dtype)


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "k_heads", "v_heads", "k_dim", "v_dim"), [
    ([70, 3, 1], 2, 4, 128, 128), ([1, 1, 1], 4, 4, 128, 64), ([300], 2, 2, 128, 32),
    ([40], 1, 2, 256, 40), ([20, 5], 2, 2, 200, 33), ([17, 33], 1, 3, 37, 20)])
def test_linear_attention_with_per_channel_decay(extension, new, k_heads, v_heads, k_dim, v_dim,
                                                 dtype, rule):
    rng, total, batch = np.random.default_rng(0), sum(new), len(new)
    fields = dict(num_k_heads=k_heads, num_v_heads=v_heads, k_head_dim=k_dim, v_head_dim=v_dim,
                  update_rule=rule, scale=k_dim ** -0.5, l2norm=1, decay_per_channel=1)
    inputs = {"qkv": rng.standard_normal((total, 2 * k_heads * k_dim + v_heads * v_dim)),
              "decay": -rng.uniform(0, 0.5, (total, v_heads * k_dim)),
              "state": rng.standard_normal((batch, v_heads, k_dim, v_dim)),
              "beta": rng.uniform(0, 1, (total, v_heads))}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs |= {"cu_seqlens": np.cumsum([0, *new], dtype=np.int32),
               "past_lens": np.array([7 * (i % 2) for i in range(batch)], np.int32)}
    check(extension, plugins.registry()["GatedLinearAttention"], fields, inputs, dtype)
