"""Quantized checkpoint formats: values equal the formats' documentation bitwise.

The decoders here process one value at a time.
"""

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import families
import image_models
import lora
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from schedule_interpreter import LIMITS, Interpreters, interpreted
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend.checkpoint import open_checkpoint
from llmc.compiler.quant.checkpoint import read_quantized
from llmc.compiler.targets import cpu, tensorrt
from llmc.errors import LlmcError
from llmc.runtime.core.step import Step

TOKENS = np.random.default_rng(3).integers(3, 100, 20).tolist()
STEP = Step.of([TOKENS], [0], [list(range(8))], [0], logits="all")
RNG = np.random.default_rng(11)
_BEGIN = RNG.bit_generator.state
FLIPPED = 5e-3  # effect of a few activations between two FP8 values
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def words(codes, bits, order=None):
    """Pack codes [rows, n] into int32 [rows, n · bits / 32]."""
    per_word = 32 // bits
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            place = column % per_word
            place = place if order is None else order.index(place)
            packed[row, column // per_word] |= np.uint32(int(codes[row, column]) << bits * place)
    return packed.view(np.int32)


def affine(codes, zeros, scales, belongs):
    """(code - zero) · scale in float32; zeros and scales [out, groups]."""
    wide = scales.astype(np.float32)[:, belongs]
    return ((codes.astype(np.int32) - zeros[:, belongs]).astype(np.float32) * wide)


def random_parts(shape, groups, bits, zeros="any"):
    rows = shape[0]
    codes = RNG.integers(0, 2 ** bits, shape)
    middle = np.full((rows, groups), 2 ** (bits - 1))
    chosen = {"middle": middle, "any": RNG.integers(0, 2 ** bits, (rows, groups)),
              "past": np.where(RNG.random((rows, groups)) < 0.2, 2 ** bits, middle)}[zeros]
    scales = (RNG.uniform(0.5, 1.5, (rows, groups)) * 0.25 / 2 ** bits)
    return codes, chosen, scales


def gptq(bits=4, zeros="any", form="gptq", order=False, group=32, listed=True):
    def make(name, weight):
        stem, width = name.removesuffix(".weight"), weight.shape[1]
        groups = -(-width // group)
        codes, zero, scales = random_parts(weight.shape, groups, bits, zeros)
        if form == "gptq":
            zero = np.maximum(zero, 1)  # 0 is stored as -1
        belongs = np.arange(width) // group
        if order:  # per layer; weights with the same input share it
            belongs = np.random.default_rng([width, *stem[13:15].encode()]).permutation(belongs)
        if order == "odd":
            belongs[belongs == 1] = 0
        scales = scales.astype(np.float16)
        listing = {f"{stem}.g_idx": belongs.astype(np.int32)} if listed else {}
        return {f"{stem}.qweight": np.ascontiguousarray(words(codes, bits).T),
                f"{stem}.qzeros": words(zero.T - (form == "gptq"), bits),
                f"{stem}.scales": np.ascontiguousarray(scales.T),
                **listing}, affine(codes, zero, scales, belongs)
    return dict(quant_method="gptq", bits=bits, group_size=group, checkpoint_format=form,
                desc_act=bool(order)), make


def auto_round(packing, made, **more):
    """AutoRound's config for tensors in another tool's format."""
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int",
            "sym": False, "autoround_version": "0.13.0", "packing_format": packing, **more}, made


def by_layer(one, other, chosen):
    """Write weights with `chosen` in their names with the other writer."""
    return lambda name, weight: (other if chosen in name else one)[1](name, weight)


def awq(group=32):
    def make(name, weight):
        stem, width = name.removesuffix(".weight"), weight.shape[1]
        codes, zero, scales = random_parts(weight.shape, width // group, 4)
        scales = scales.astype(np.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {f"{stem}.qweight": words(codes.T, 4, order),
                f"{stem}.qzeros": words(zero.T, 4, order),
                f"{stem}.scales": np.ascontiguousarray(scales.T)}, \
            affine(codes, zero, scales, np.arange(width) // group)
    return dict(quant_method="awq", bits=4, group_size=group, version="gemm"), make


def compressed(form, **arguments):
    return dict(quant_method="compressed-tensors", format=form, config_groups={
        "group_0": dict(targets=["Linear"], weights=arguments)}, ignore=["lm_head"])


def pack_quantized(bits=4, zeros="middle", group=32, order=False):
    def make(name, weight):
        width = weight.shape[1]
        size = group or width
        codes, zero, scales = random_parts(weight.shape, width // size, bits, zeros)
        scales = scales.astype(ml_dtypes.bfloat16)
        belongs = np.arange(width) // size
        belongs = RNG.permutation(belongs) if order else belongs
        tensors = {f"{name}_packed": words(codes, bits), f"{name}_scale": scales,
                   f"{name}_shape": np.array(weight.shape)}
        if zeros != "middle":
            tensors[f"{name}_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        if order:
            tensors[f"{name}_g_idx"] = belongs.astype(np.int32)
        return tensors, affine(codes, zero, scales, belongs)
    return compressed("pack-quantized", num_bits=bits, type="int", strategy="group",
                      group_size=group, symmetric=zeros == "middle"), make


# Config entries for dynamic per-token scales, and for a stored static scale.
DYNAMIC = dict(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
STATIC = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)


def input_scale(name):
    """Return a static scale that saturates some activations."""
    return next((scale for part, scale in (("o_proj", 0.0008), ("down_proj", 0.0002))
                 if part in name), 0.0015)


def float8(strategy, suffix="weight_scale", said=None, side=48, activations=None, fixed=""):
    def make(name, weight):
        stem, (rows, width) = name.removesuffix(".weight"), weight.shape
        codes = (weight * 100).astype(ml_dtypes.float8_e4m3fn)
        shape = {"tensor": (1,), "channel": (rows, 1),
                 "block": (-(-rows // side), -(-width // side))}[strategy]
        scales = RNG.uniform(0.001, 0.02, shape).astype(np.float32)
        full = scales.reshape(-1, 1) if strategy != "block" else np.array(
            [[scales[i // side, j // side] for j in range(width)] for i in range(rows)])
        tensors = {name: codes, f"{stem}.{suffix}": scales}
        if fixed:
            tensors[f"{stem}.{fixed}"] = np.array(input_scale(name), np.float32)
        return tensors, codes.astype(np.float32) * full
    said = said or compressed("float-quantized", num_bits=8, type="float", strategy=strategy,
                              block_structure=[side, side] if strategy == "block" else None)
    if activations is not None:
        said["config_groups"]["group_0"]["input_activations"] = activations
    return said, make


def int8(zeros=False):
    def make(name, weight):
        rows = len(weight)
        codes = RNG.integers(-128, 128, weight.shape)
        scales = RNG.uniform(0.0005, 0.002, (rows, 1)).astype(ml_dtypes.bfloat16)
        zero = RNG.integers(-128, 128, (rows, 1)) if zeros else np.zeros((rows, 1), int)
        tensors = {name: codes.astype(np.int8), f"{name}_scale": scales}
        if zeros:
            tensors[f"{name}_zero_point"] = zero.astype(np.int8)
        return tensors, affine(codes, zero, scales, np.zeros(weight.shape[1], int))
    return compressed("int-quantized", num_bits=8, type="int", strategy="channel"), make


def bitsandbytes(kind, nested=False, storage=np.uint8):
    """Table values in blocks of 64 of the flattened weight; or LLM.int8."""
    def make(name, weight):
        count, stem = weight.size, name.removesuffix(".weight")
        if kind == "int8":
            codes = RNG.integers(-127, 128, weight.shape).astype(np.int8)
            largest = RNG.uniform(0.1, 0.3, len(weight)).astype(np.float32)
            codes[3], largest[3] = 0, 0
            return {name: codes, f"{stem}.SCB": largest, f"{stem}.weight_format":
                    np.array(0, np.uint8)}, codes * (largest * np.float32(1 / 127))[:, None]
        table = np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
        codes = RNG.integers(0, 16, count).astype(np.uint8)
        blocks, state = -(-count // 64), dict(quant_type=kind, blocksize=64, dtype="bfloat16",
                                              shape=list(weight.shape))
        absmax = RNG.uniform(0.05, 0.2, blocks).astype(np.float32)
        tensors = {name: (codes[::2] << 4 | codes[1::2]).view(storage)[:, None],
                   f"{name}.absmax": absmax, f"{name}.quant_map": table}
        if nested:
            levels = np.sort(RNG.uniform(-0.05, 0.05, 256)).astype(np.float32)
            own = RNG.integers(0, 256, blocks).astype(np.uint8)
            scales = RNG.uniform(0.5, 1, -(-blocks // 32)).astype(np.float32)
            absmax = levels[own] * scales.repeat(32)[:blocks] + np.float32(0.11)
            state |= dict(nested_blocksize=32, nested_dtype="float32", nested_offset=0.11)
            tensors |= {f"{name}.absmax": own, f"{name}.nested_absmax": scales,
                        f"{name}.nested_quant_map": levels}
        tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = np.frombuffer(
            json.dumps(state).encode(), np.uint8).copy()
        return tensors, (table[codes] * absmax.repeat(64)[:count]).reshape(weight.shape)
    return dict(quant_method="bitsandbytes", load_in_8bit=kind == "int8",
                load_in_4bit=kind != "int8", bnb_4bit_quant_type=kind), make


def nvfp4():
    def make(name, weight):
        rows, width = weight.shape
        codes = RNG.integers(0, 16, weight.shape).astype(np.uint8)
        fine = RNG.uniform(1, 400, (rows, width // 16)).astype(ml_dtypes.float8_e4m3fn)
        whole = np.array([9876.5], np.float32)
        numbers = np.array([*FP4, *(-n for n in FP4)], np.float32)[codes]
        scales = fine.astype(np.float32) / whole
        return {f"{name}_packed": codes[:, ::2] | codes[:, 1::2] << 4, f"{name}_scale": fine,
                f"{name}_global_scale": whole}, numbers * scales.repeat(16, 1)
    return compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), make


def modelopt(algorithm):
    """NVIDIA ModelOpt: NVFP4 values with a multiplicative global scale."""
    def make(name, weight):
        if algorithm != "NVFP4":
            strategy = "channel" if "CHANNEL" in algorithm else "tensor"
            fixed = "input_scale" if strategy == "tensor" else ""
            tensors, truth = float8(strategy, fixed=fixed)[1](name, weight)
            scale = tensors[f"{name}_scale"]
            tensors[f"{name}_scale"] = scale.reshape(-1 if strategy == "channel" else ())
            return tensors, truth
        tensors, _ = nvfp4()[1](name, weight)
        whole = np.array(0.000123, np.float32)
        packed, fine = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(weight), -1)
        numbers = np.array([*FP4, *(-n for n in FP4)], np.float32)[codes]
        stem = name.removesuffix(".weight")
        return {name: packed, f"{name}_scale": fine, f"{name}_scale_2": whole,
                f"{stem}.input_scale": np.array(0.5, np.float32)}, \
            numbers * (fine.astype(np.float32) * whole).repeat(16, 1)
    return dict(quant_method="modelopt", quant_algo=algorithm), make


def mxfp4(blocks):
    def make(name, weight):
        rows, width = weight.shape
        codes = RNG.integers(0, 16, weight.shape).astype(np.uint8)
        bits = RNG.integers(118, 123, (rows, width // 32)).astype(np.uint8)
        bits[0] = 0, *bits[0, 1:]  # 2^-127, a subnormal number
        numbers = np.array([*FP4, *(-n for n in FP4)], np.float32)[codes]
        scales = np.array([[2.0 ** (int(b) - 127) for b in row] for row in bits], np.float32)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        tensors = {f"{name}_packed": packed, f"{name}_scale": bits} if not blocks else \
            {f"{name}_blocks": packed.reshape(rows, -1, 16), f"{name}_scales": bits}
        return tensors, numbers * scales.repeat(32, 1)
    return dict(quant_method="mxfp4") if blocks else compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), make


# weight_dtype after compiling; "" if dequantized.
FORMATS = {
    "gptq": (gptq(), "uint4"), "gptq-symmetric": (gptq(zeros="middle"), "int4"),
    "gptq-zero-16": (gptq(zeros="past"), "uint8"), "gptq-8-bits": (gptq(8), "uint8"),
    "gptq-v2": (gptq(form="gptq_v2"), "uint4"), "gptq-act-order": (gptq(order=True), "uint4"),
    "awq": (awq(), "uint4"),
    "auto-round": (auto_round("auto_round:auto_gptq", gptq(listed=False)[1]), "uint4"),
    "auto-round-symmetric": (auto_round(None, gptq(listed=False, zeros="middle")[1], sym=True,
                                        quant_method="intel/auto-round"), "int4"),
    "auto-round-older": (auto_round(None, gptq()[1], backend="auto_round:gptq:exllamav2"), "uint4"),
    "auto-round-v2": (auto_round("auto_round:gptqmodel", gptq(form="gptq_v2")[1]), "uint4"),
    "auto-round-awq": (auto_round("auto_round:auto_awq", awq()[1]), "uint4"),
    "w4a16": (pack_quantized(), "int4"), "w4a16-asymmetric": (pack_quantized(zeros="any"), "uint4"),
    "w4a16-channel": (pack_quantized(group=0), "int4"), "w8a16": (pack_quantized(8), "int8"),
    "w8a16-channel": (pack_quantized(8, "any", 0), "uint8"),
    "w4a16-g-idx": (pack_quantized(order=True), "int4"),
    "gptq-odd-groups": (gptq(order="odd"), ""),
    # Without g_idx; the last group of a row is smaller: 40 and 24 of 64 columns.
    "gptq-last-group": (gptq(group=40, listed=False), ""),
    "gptq-no-g-idx": (gptq(listed=False), "uint4"),
    "fp8-tensor": (float8("tensor"), "float8_e4m3fn"),
    "fp8-channel": (float8("channel"), "float8_e4m3fn"),
    "fp8-dynamic": (float8("channel", activations=DYNAMIC), "float8_e4m3fn"),
    "fp8-static": (float8("tensor", activations=STATIC, fixed="input_scale"), "float8_e4m3fn"),
    "fp8-block-compressed": (float8("block"), "float8_e4m3fn"),
    "fp8-block": (float8("block", "weight_scale_inv",
                         dict(quant_method="fp8", weight_block_size=[48, 48])), "float8_e4m3fn"),
    # Mistral: one scale, named like block scales in transformers.
    "fp8-no-block": (float8("tensor", "weight_scale_inv", dict(
        quant_method="fp8", weight_block_size=None, activation_scheme="static")), "float8_e4m3fn"),
    # AutoFP8 and transformers.
    "autofp8": (float8("tensor", said=dict(quant_method="fp8", activation_scheme="static"),
                       fixed="input_scale"), "float8_e4m3fn"),
    "fp8-static-transformers": (float8("tensor", "weight_scale_inv", dict(
        quant_method="fp8", weight_block_size=None, activation_scheme="static"),
        fixed="activation_scale"), "float8_e4m3fn"),
    "fp8-dynamic-transformers": (float8("tensor", "weight_scale_inv", dict(
        quant_method="fp8", weight_block_size=None, activation_scheme="dynamic")), "float8_e4m3fn"),
    "autofp8-dynamic": (float8("tensor", said=dict(
        quant_method="fp8", activation_scheme="dynamic")), "float8_e4m3fn"),
    "fp8-default-block": (float8("block", "weight_scale_inv", dict(quant_method="fp8"), side=128),
                          "float8_e4m3fn"),
    "modelopt-fp8": (modelopt("FP8"), "float8_e4m3fn"),
    "modelopt-fp8-channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "float8_e4m3fn"),
    "modelopt-nvfp4": (modelopt("NVFP4"), "int8"),
    "fbgemm": (float8("channel", said=dict(quant_method="fbgemm_fp8")), "float8_e4m3fn"),
    "nf4": (bitsandbytes("nf4"), ""), "nf4-nested": (bitsandbytes("nf4", nested=True), ""),
    "fp4-stored-wide": (bitsandbytes("fp4", storage=np.int16), ""),
    "llm-int8": (bitsandbytes("int8"), "int8"),
    "w8a8": (int8(), "int8"), "w8a8-asymmetric": (int8(True), "uint8"), "nvfp4": (nvfp4(), "int8"),
    "mxfp4": (mxfp4(False), "int8"), "mxfp4-blocks": (mxfp4(True), "int8"),
}


@pytest.fixture(autouse=True)
def same_numbers():
    """Seed random numbers independently of other tests."""
    RNG.bit_generator.state = _BEGIN


@pytest.fixture(scope="module")
def plain_hf(tmp_path_factory):
    model = families.tiny_model("llama", intermediate_size=96, num_hidden_layers=2)
    return families.save(model, tmp_path_factory.mktemp("plain") / "hf")


def is_projection(name, array):
    return name.endswith("_proj.weight")


def is_matrix_of_a_layer(name, array):
    module = name.removesuffix(".weight")
    return ".layers." in name and name != module and array.ndim == 2 \
        and not re.search(families.ROUTERS, module)


def write(plain, directory, kind, change=lambda tensors: None, of=is_projection):
    """Write a checkpoint in this format; return its dequantized weights, those `of` a kind."""
    said, make = FORMATS[kind][0] if isinstance(kind, str) else kind
    shutil.copytree(plain, directory)
    tensors, truth = {}, {}
    for name, array in load_file(plain / "model.safetensors").items():
        if of(name, array):
            stored, truth[name] = make(name, array)
            tensors.update(stored)
        else:
            tensors[name] = array
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return directory, truth


def without_scales_of_activations(tensors):
    for name in [name for name in tensors if name.endswith("input_scale")]:
        del tensors[name]


def decoded(directory):
    config = json.loads((directory / "config.json").read_text())
    return read_quantized(directory, config, lambda: open_checkpoint(directory, False))


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantized_values_are_bitwise_exact(kind, plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    found = decoded(directory)
    plain = load_file(plain_hf / "model.safetensors")
    assert found.tensors.keys() == plain.keys()
    for name, tensor in found.tensors.items():
        if name not in truth:
            assert np.array_equal(tensor.load(), plain[name])
            continue
        expected = truth[name].astype(np.float32)
        assert tensor.load().tobytes() == expected.tobytes(), name
        assert np.concatenate(list(tensor.blocks(5000))).tobytes() == expected.tobytes(), name
        assert (tensor.stored.dtype if tensor.stored else "") == FORMATS[kind][1]
    assert any("are read as float32" in note for note in found.notes) == (FORMATS[kind][1] == "")


def transformers_logits(plain, truth, activations=False, scales=None, group=0):
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    state = model.state_dict()
    state.update({name: torch.tensor(array.astype(np.float32)) for name, array in truth.items()})
    model.load_state_dict(state)
    if activations:
        families.round_tokens(model, scales, group)
    return families.reference_logits(model, TOKENS)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kind", ["gptq", "awq", "auto-round", "w4a16", "fp8-tensor", "fp8-block",
                                  "w8a8", "mxfp4-blocks", "modelopt-nvfp4", "fp8-no-block",
                                  "llm-int8"])
def test_merged_and_sharded_weights_keep_their_scales(kind, tp_size, plain_hf, tmp_path,
                                                      monkeypatch):
    """Queries, keys and values are merged, as are gate and up."""
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", tp_size=tp_size)
    expected = transformers_logits(plain_hf, truth)
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), expected, 1e-5)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    assert {form.dtype for form in forms.values()} == {FORMATS[kind][1]}
    assert sum("qkv" in name or "gate_up" in name for name in forms) == 4


@pytest.mark.parametrize(("family", "kind", "dtype", "target"), [
    ("gpt_oss", "MXFP4", "mxfp4", "cuda"),
    *(pytest.param(*own, marks=pytest.mark.thorough) for own in (
        ("qwen3_moe", "fp8-channel", "float8_e4m3fn", "cuda"),
        ("qwen3_moe", "fp8-default-block", "float8_e4m3fn", "cuda"),
        ("qwen3_moe", "w4a16", "int4", "cpu"), ("qwen3_moe", "w4a16", "int4", "cuda"),
        ("gpt_oss", "MXFP4", "int8", "cpu")))])
def test_quantized_experts_take_adapters(family, kind, dtype, target, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    size = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    model = families.tiny_model(family, **{size: 128})
    plain = families.save(model, tmp_path / "plain")
    if kind == "MXFP4":
        numbers = families.to_mxfp4(plain, tmp_path / "hf", np.random.default_rng(6))
        with torch.no_grad():
            for name, array in numbers.items():
                model.get_parameter(name).copy_(torch.from_numpy(array))
    else:
        _, truth = write(plain, tmp_path / "hf", kind)
        model = AutoModelForCausalLM.from_pretrained(
            write_numbers(plain, truth, tmp_path / "numbers"), dtype=torch.float32).eval()
    case, params = tmp_path / "case", llmc.SamplingParams(
        max_tokens=5, temperature=0, ignore_eos=True, logprobs=0)
    llmc.compile(tmp_path / "hf", case, tp_size=2, target=target, enable_lora=True)
    forms = read_manifest(case).chips[0].quantization
    assert {form.dtype for name, form in forms.items() if "experts" in name} == {dtype}
    tensors, adapted = lora.adapt_experts(model, (0, 2), rank=3)
    llmc.compile_adapter(lora.save(tmp_path / "peft", {}, tensors=tensors, r=3,
                                   target_parameters=lora.EXPERTS), case, tmp_path / "adapter")
    load = llmc.LLM if target == "cpu" else functools.partial(
        interpreted, limits=replace(LIMITS, max_loras=2, max_lora_rank=8))
    with load(case, max_lora_rank=8, adapters={"own": tmp_path / "adapter"}) as llm:
        with_adapter, without = llm.generate([TOKENS[:5]] * 2, params, adapter=["own", None])
    lora.assert_generates(adapted, with_adapter, 1e-4)
    lora.assert_generates(model, without, 1e-4)


@pytest.mark.parametrize(("name", "kind"), [
    ("llava", "fp8-block"),
    *(pytest.param(*own, marks=pytest.mark.thorough) for own in (
        ("llava", "awq"), ("qwen3_vl", "fp8-block"), ("qwen3_vl", "w4a16"), ("qwen3_vl", "gptq"),
        ("mistral3", "fp8-no-block"), ("gemma3", "w4a16"), ("qwen3_vl_moe", "fp8-block")))])
def test_encoders_of_quantized_checkpoints_keep_16_bits(name, kind, tmp_path, monkeypatch):
    """As published: the config lists the linear layers that are not quantized."""
    image_models.write_model(name, tmp_path / "plain", intermediate_size=96)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    said, make = FORMATS[kind][0]
    kept = sorted({own.removesuffix(".weight") for own, array in plain.items()
                   if own.endswith(".weight") and not is_of_the_language_model(own, array)})
    listed = "ignore" if "config_groups" in said else "modules_to_not_convert"
    directory, truth = write(tmp_path / "plain", tmp_path / "hf", ({**said, listed: kept}, make),
                             of=is_of_the_language_model)
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", tp_size=2)
    model = AutoModelForImageTextToText.from_pretrained(
        write_numbers(tmp_path / "plain", truth, tmp_path / "numbers")).eval()
    with llmc.LLM(tmp_path / "case") as llm:
        prompts = image_models.prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, image_models.GREEDY),
                                      strict=True):
            image_models.assert_generates(model, llm, prompt, completion)
    assert {form.dtype for form in read_manifest(tmp_path / "case").chips[0].quantization.values()
            } == {FORMATS[kind][1]}


def is_of_the_language_model(name, array):
    return "language_model" in name and is_projection(name, array)


@pytest.mark.parametrize(("kind", "tp_size"), [("gptq-act-order", 1), ("awq", 2),
                                               ("fp8-block", 1)])
def test_quantized_layers_take_adapters(kind, tp_size, plain_hf, tmp_path, monkeypatch):
    """With act-order the activations that an adapter reads are permuted too."""
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", tp_size=tp_size, enable_lora=True)
    model = AutoModelForCausalLM.from_pretrained(plain_hf, dtype=torch.float32).eval()
    model.load_state_dict({**model.state_dict(), **{
        name: torch.tensor(array.astype(np.float32)) for name, array in truth.items()}})
    factors = lora.make(model, lora.linear_layers(model))
    llmc.compile_adapter(lora.save(tmp_path / "peft", factors), tmp_path / "case",
                         tmp_path / "adapter")
    params = llmc.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    with llmc.LLM(tmp_path / "case", adapters={"own": tmp_path / "adapter"}) as llm:
        adapted, plain = llm.generate([TOKENS] * 2, params, adapter=["own", None])
    lora.assert_generates(lora.merged(model, factors), adapted, 2e-5)
    lora.assert_generates(model, plain, 2e-5)


@pytest.mark.parametrize(("target", "tp_size"), [("cpu", 1), ("cpu", 2), ("cuda", 1)])
def test_quantized_embedding_tables_are_read(target, tp_size, plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", "nf4-nested")
    llmc.compile(directory, tmp_path / "case", tp_size=tp_size, target=target, dtype="float32")
    assert not read_manifest(tmp_path / "case").chips[0].quantization
    if target == "cpu":
        with llmc.LLM(tmp_path / "case") as llm:
            families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 1e-5)


@pytest.mark.parametrize(("kind", "tp_size"), [
    ("gptq", 1), ("awq", 2), ("w4a16-asymmetric", 2), ("w8a16-channel", 1), ("nvfp4", 2),
    ("w4a16-g-idx", 1), ("fp8-block", 2), ("modelopt-nvfp4", 1)])
def test_experts_keep_their_scales(kind, tp_size, tmp_path, monkeypatch):
    """Each tensor of an expert is quantized; a rank has some columns of each."""
    plain = families.save(families.tiny_model(
        "qwen3_moe", moe_intermediate_size=96, num_hidden_layers=2), tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", kind)
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", tp_size=tp_size)
    expected = transformers_logits(write_numbers(plain, truth, tmp_path / "numbers"), {})
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), expected, 1e-5)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    packed = {form.dtype for name, form in forms.items() if "expert" in name}
    assert packed == ({FORMATS[kind][1]} if kind not in ("w4a16-g-idx", "fp8-block") else set())


def apart(stacks, transposed, in_turns):
    """Split stacked expert tensors into one linear weight per expert."""
    tensors = {}
    for name, stack in stacks.items():
        found = re.fullmatch(r"(.*experts)\.(gate_up|down)_proj(_bias)?", name)
        if found is None:
            tensors[name] = stack
            continue
        owner, part, bias = found.groups()
        for index, own in enumerate(stack):
            own = own.T if transposed and not bias else own
            gate, up = (own[::2], own[1::2]) if in_turns else np.split(own, 2)
            parts = {"down": own} if part == "down" else {"gate": gate, "up": up}
            tensors |= {f"{owner}.{index}.{kind}_proj.{'bias' if bias else 'weight'}":
                        np.ascontiguousarray(array) for kind, array in parts.items()}
    return tensors


def together(parts, transposed, in_turns):
    """Stack per-expert weights."""
    stacks, count = {}, 4
    for name, array in parts.items():
        owner, _, rest = name.partition(".experts.")
        if not rest.startswith(("0.up", "0.down")):
            stacks |= {} if rest else {name: array}
            continue
        gate, up, down = (
            [parts[f"{owner}.experts.{i}.{kind}_proj.weight"] for i in range(count)]
            for kind in ("gate", "up", "down"))
        both = np.stack([gate, up], 2).reshape(count, -1, array.shape[1]) if in_turns else \
            np.concatenate([gate, up], 1)
        part, stack = ("gate_up", both) if rest.startswith("0.up") else ("down", np.stack(down))
        stacks[f"{owner}.experts.{part}_proj"] = stack.swapaxes(1, 2) if transposed else stack
    return stacks


@pytest.mark.parametrize(("family", "sizes", "transposed", "in_turns"), [
    ("gpt_oss", {"intermediate_size": 96}, True, True),
    ("llama4_text", {"intermediate_size": 64}, True, False),
    ("gemma4_text", {**families.GEMMA4_MOE, "intermediate_size": 96, "moe_intermediate_size": 64,
                     "num_hidden_layers": 2, "layer_types": ["sliding_attention",
                                                             "full_attention"]}, False, False)])
def test_experts_stored_as_linear_layers_are_stacked(family, sizes, transposed, in_turns, tmp_path,
                                                     monkeypatch):
    """Tools that quantize linear layers replace stacked experts by linear layers."""
    plain = families.save(families.tiny_model(family, **sizes), tmp_path / "plain")
    single = tmp_path / "single"
    shutil.copytree(plain, single)
    save_file(apart(load_file(plain / "model.safetensors"), transposed, in_turns),
              single / "model.safetensors")
    directory, truth = write(single, tmp_path / "hf", "w4a16")
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", tp_size=2)
    expected = transformers_logits(plain, together(truth, transposed, in_turns))
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), expected, 1e-5)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    assert {form.dtype for name, form in forms.items() if "expert" in name} == {"int4"}


@pytest.mark.parametrize(("block", "static"), [(48, False), (128, False), (None, False),
                                               (None, True)])
def test_stacks_of_experts_in_fp8_have_scales_of_each(block, static, tmp_path, monkeypatch):
    """As saved by transformers, with two scales for gate and up."""
    plain = families.save(families.tiny_model("gemma4_text", **{
        **families.GEMMA4_MOE, "intermediate_size": 96, "moe_intermediate_size": 48,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
        tmp_path / "plain")

    def make(name, stack):
        if stack.ndim == 2:
            return float8("block" if block else "tensor", "weight_scale_inv", {}, block or 1)[
                1](name, stack)
        (count, rows, width), halves = stack.shape, 2 if "gate_up" in name else 1
        height, size = block or rows, block or width
        shape = max(-(-rows // height), halves), -(-width // size)
        height = min(height, rows // halves)
        codes = (stack * 100).astype(ml_dtypes.float8_e4m3fn)
        scales = RNG.uniform(0.001, 0.02, (count, *shape)).astype(np.float32)
        more = {f"{name}_activation_scale": np.full(count, 0.01, np.float32)} if static else {}
        return {name: codes, f"{name}_scale_inv": scales, **more}, codes.astype(np.float32) \
            * scales.repeat(height, 1).repeat(size, 2)[:, :rows, :width]

    said = dict(quant_method="fp8", weight_block_size=block and [block, block],
                activation_scheme="static" if static else "dynamic")
    directory, truth = write(
        plain, tmp_path / "hf", (said, make),
        of=lambda name, array: is_projection(name, array) or name.endswith(("_up_proj", "n_proj")))
    read = decoded(directory).tensors
    assert sum(array.ndim == 3 for array in truth.values()) == 4
    for name, numbers in truth.items():
        assert read[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", quantize="none")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain, truth), 1e-5)


def test_a_stack_of_experts_in_fp8_without_its_scales_is_refused(tmp_path):
    plain = families.save(families.tiny_model(
        "gemma4_text", **{**families.GEMMA4_MOE, "num_hidden_layers": 2, "layer_types": [
            "sliding_attention", "full_attention"]}), tmp_path / "plain")
    directory, _ = write(
        plain, tmp_path / "hf", (dict(quant_method="fp8"), lambda name, stack: (
            {name: stack.astype(ml_dtypes.float8_e4m3fn),
             f"{name}_scale_inv": np.ones(4, np.float32)}, stack)),
        of=lambda name, array: name.endswith("experts.down_proj"))
    with pytest.raises(LlmcError, match=r"experts.down_proj' .* its scales \[4\]; expected"):
        decoded(directory)


@pytest.mark.parametrize("value", [None, [0.1, 0.2]])
def test_a_scale_of_activations_that_is_missing_or_several_is_refused(value, plain_hf, tmp_path):
    name = "model.layers.1.mlp.down_proj.input_scale"

    def change(tensors):
        del tensors[name]
        if value is not None:
            tensors[name] = np.array(value, np.float32)

    directory, _ = write(plain_hf, tmp_path / "hf", "fp8-static", change)
    with pytest.raises(llmc.LlmcError, match=rf"{name}.*(incomplete|\[2\], expected \[\])"):
        llmc.compile(directory, tmp_path / "case")


def check_rounded(logits_of):
    """Assert expected logits for one of a few random weights.

    For others a value may be between two FP8 values, which may change the routing.
    """
    errors = []
    for draw in range(3):
        found, expected = logits_of(draw)
        errors.append(np.abs(found - expected).max() / np.ptp(expected))
        if errors[-1] < 1e-5:
            return
    raise AssertionError(errors)


IN_BLOCKS = dict(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic")


@pytest.mark.parametrize(("kind", "tp_size", "rounds"), [
    ("fp8-dynamic", 1, True), ("blocks", 1, True), ("blocks", 2, True),
    ("blocks", 2, False)])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_expert_activations_are_quantized_as_the_checkpoint_asks(family, kind, tp_size, rounds,
                                                                 tmp_path):
    """Per block if requested."""
    blocks = kind == "blocks"
    if blocks:
        kind = float8("block", "weight_scale_inv", IN_BLOCKS, side=32)
    plain = families.save(families.tiny_model(
        family, num_hidden_layers=2, intermediate_size=128, moe_intermediate_size=128),
        tmp_path / "plain")

    def logits(draw):
        own = tmp_path / str(draw)
        directory, truth = write(plain, own / "hf", kind)
        said = []
        manifest = llmc.compile(directory, own / "case", target="cuda", tp_size=tp_size,
                                progress=said.append, quantize_activations=blocks and rounds)
        forms = {(form.activation_dtype, form.activation_group_size)
                 for name, form in manifest.chips[0].quantization.items() if "experts" in name}
        assert forms == {("float8_e4m3fn" if rounds else "", 32 if blocks and rounds else 0)}
        assert any("give --quantize_activations" in text for text in said) != rounds
        return Interpreters(own / "case").compute(STEP), transformers_logits(
            write_numbers(plain, truth, own / "numbers"), {}, rounds, group=32 if blocks else 0)

    check_rounded(logits)


def test_unquantized_activations_of_floating_point_weights_are_reported(tmp_path):
    """A rank's columns of the output projection are not a supported group."""
    plain = families.save(families.tiny_model("llama", num_hidden_layers=2, intermediate_size=128),
                          tmp_path / "plain")
    directory, _ = write(plain, tmp_path / "hf", float8("block", "weight_scale_inv", IN_BLOCKS,
                                                        side=32))
    for tp_size in (2, 4):
        said = []
        llmc.compile(directory, tmp_path / f"tp{tp_size}", target="cuda", tp_size=tp_size,
                     progress=said.append, quantize_activations=True)
        assert any("activations of 2 linear layers stay in float32, though" in text
                   for text in said) == (tp_size == 4)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["blocks", "fp8-dynamic", "fp8-static"])
def test_unquantized_activations_of_mixed_merged_weights_are_reported(kind, target, tmp_path):
    """Queries, keys and values are merged: some unquantized, or with different scales."""
    plain = families.save(families.tiny_model("llama", num_hidden_layers=2, intermediate_size=128),
                          tmp_path / "plain")

    def change(tensors):
        for name in [name for name in tensors if "v_proj." in name]:
            if name.endswith("input_scale"):
                tensors[name] = np.array(tensors[name] * 2, np.float32)
            elif kind != "fp8-static" and name.endswith(".weight"):
                tensors[name] = load_file(plain / "model.safetensors")[name]
            elif kind != "fp8-static":
                del tensors[name]

    form = float8("block", "weight_scale_inv", IN_BLOCKS, side=32) if kind == "blocks" else kind
    for name, changes in (("whole", {}), ("unlike", {"change": change})):
        said = []
        llmc.compile(write(plain, tmp_path / name, form, **changes)[0], tmp_path / f"{name}-case",
                     target=target, progress=said.append, quantize_activations=kind == "blocks")
        assert any("activations of 2 linear layers stay in float32, though" in text
                   for text in said) == (name == "unlike")


# Families with per-expert checkpoint tensors.
SEPARATE = ("qwen2_moe", "mixtral", "olmoe", "minimax_m2", "ernie4_5_moe", "dots1", "phimoe",
            "hunyuan_v1_moe", "afmoe", "cohere2_moe", "exaone_moe", "flex_olmo", "flint", "hy_v3",
            "laguna", "mellum", "solar_open", "lfm2_moe", "nemotron_h")


@pytest.mark.thorough
@pytest.mark.parametrize("family", SEPARATE)
def test_every_moe_family_quantizes_activations(family, tmp_path):
    planned = {**families.MIXTURES, **families.HYBRIDS}
    sizes = planned.get(family) or families.sizes_of(family)
    sizes = sizes | {name: 64 for name in (*sizes, "moe_intermediate_size")
                     if "intermediate_size" in name}
    plain = families.save(families.tiny_model(family, **sizes), tmp_path / "plain")
    kind = float8("block", "weight_scale_inv", IN_BLOCKS, side=32)

    def logits(draw):
        own = tmp_path / str(draw)
        directory, truth = write(plain, own / "hf", kind, of=is_matrix_of_a_layer)
        manifest = llmc.compile(directory, own / "case", target="cuda", quantize_activations=True)
        forms = manifest.chips[0].quantization.values()
        assert {form.activation_group_size for form in forms} == {32}
        return Interpreters(own / "case").compute(STEP), transformers_logits(
            write_numbers(plain, truth, own / "numbers"), {}, True, group=32)

    check_rounded(logits)


@pytest.mark.parametrize(("kind", "target", "options", "says"), [
    ("fp8-static", "cuda", {}, True), ("fp8-dynamic", "cpu", {}, True),
    ("fp8-dynamic", "cuda", {}, False), ("fp8-default-block", "cpu", {}, False),
    ("fp8-default-block", "cpu", {"quantize_activations": True}, True)])
def test_unquantized_expert_activations_are_reported(kind, target, options, says, tmp_path):
    """Static scales, and dequantized weights."""
    plain = families.save(families.tiny_model(
        "qwen3_moe", moe_intermediate_size=64, num_hidden_layers=2), tmp_path / "plain")
    directory, _ = write(plain, tmp_path / "hf", kind)
    said = []
    llmc.compile(directory, tmp_path / "case", target=target, progress=said.append, **options)
    assert any("the experts of 2 layers stay in" in text for text in said) == says


@pytest.mark.parametrize(("kind", "options", "says"), [
    ("fp8-dynamic", {}, True), ("fp8-default-block", {}, False),
    ("fp8-default-block", {"quantize_activations": True}, True), ("fp8-channel", {}, False)])
def test_unquantized_activations_of_mla_up_projections_are_reported(kind, options, says, tmp_path):
    plain = families.save(families.tiny_model("deepseek_v3", kv_lora_rank=64, num_hidden_layers=2),
                          tmp_path / "plain")
    directory, _ = write(plain, tmp_path / "hf", kind)
    said = []
    llmc.compile(directory, tmp_path / "case", progress=said.append, **options)
    assert any("activations of 4 MLA up-projections" in text for text in said) == says


@pytest.mark.parametrize(("family", "kind"), [
    ("mamba2", "gptq"), ("mamba2", "fp8-dynamic"), ("lfm2", "w4a16"), ("lfm2", "fp8-channel")])
def test_quantized_projections_of_one_norm_are_merged(family, kind, tmp_path):
    changes = {"intermediate_size": 96} if family == "lfm2" else {}
    plain = families.save(families.tiny_model(family, **changes), tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", kind)
    manifest = llmc.compile(directory, tmp_path / "case", target="cuda")
    found, = (report.matches for report in manifest.passes if report.name == "projections")
    assert found == {"projections": 3}
    rounds = kind == "fp8-dynamic"
    families.assert_close(Interpreters(tmp_path / "case").ranks[0].run(TOKENS, 0),
                          transformers_logits(plain, truth, rounds), FLIPPED if rounds else 1e-5)
    assert {form.dtype for form in manifest.chips[0].quantization.values()} == {FORMATS[kind][1]}


def write_numbers(plain, truth, directory):
    """Write the checkpoint with dequantized weights, one tensor per expert."""
    shutil.copytree(plain, directory)
    tensors = load_file(plain / "model.safetensors")
    tensors.update({name: array.astype(np.float32) for name, array in truth.items()})
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(("strategy", "said", "rounds"), [
    ("channel", DYNAMIC, True), ("tensor", DYNAMIC, True), ("block", DYNAMIC, False),
    ("channel", {**DYNAMIC, "dynamic": False}, False),
    ("channel", {**DYNAMIC, "strategy": "tensor"}, False), ("channel", {}, False)])
def test_activations_are_quantized_dynamically_as_the_checkpoint_asks(strategy, said, rounds,
                                                                      target, plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", float8(strategy, side=32, activations=said))
    llmc.compile(directory, tmp_path / "case", target=target)
    if target == "cuda":
        found = Interpreters(tmp_path / "case").compute(STEP)
    else:
        with llmc.LLM(tmp_path / "case") as llm:
            found = llm.logits(TOKENS)
    families.assert_close(found, transformers_logits(plain_hf, truth, rounds),
                          FLIPPED if rounds else 1e-5)
    manifest = read_manifest(tmp_path / "case")
    forms = manifest.chips[0].quantization.values()
    assert {form.activation_dtype for form in forms} == {"float8_e4m3fn" if rounds else ""}
    if target == "cuda":
        found, = (report.matches for report in manifest.passes if report.name == "norm_gemm")
        assert found == {"norm-gemm": 5}


def rounding_outputs(kind):
    said, make = kind
    group = said["config_groups"]["group_0"] | {"output_activations": STATIC}
    return said | {"config_groups": {"group_0": group}}, make


def rounding(kind, activations):
    said, make = kind
    group = said["config_groups"]["group_0"] | {"input_activations": activations}
    return said | {"config_groups": {"group_0": group}}, make


@pytest.mark.parametrize(("kind", "said"), [
    (float8("tensor", activations={**DYNAMIC, "strategy": "tensor"}),
     r"activations are not quantized as .* \(8 bits, float, tensor, dynamic\): '.*' and 13 more"),
    (rounding(pack_quantized(), DYNAMIC), r"activations .* \(8 bits, float, token, dynamic\)"),
    (rounding(pack_quantized(), {**DYNAMIC, "type": "int"}), r"activations .* \(8 bits, int"),
    (rounding(int8(), {**DYNAMIC, "type": "int"}), r"activations .* \(8 bits, int, token, dynamic"),
    (rounding_outputs(float8("channel", activations=DYNAMIC)),
     r"outputs of layers are not quantized as .* asks \(8 bits, float, tensor, static\)"),
    ("fp8-no-block", "activations are not quantized as .* asks, as it has no scale for"),
    (float8("block", "weight_scale_inv", dict(
        quant_method="fp8", weight_block_size=[48, 48], activation_scheme="static"),
        fixed="input_scale"), ".* not quantized by a static scale .* weights in blocks"),
    (float8("block", "weight_scale_inv", dict(
        quant_method="fp8", weight_block_size=[48, 48], scale_fmt="ue8m0")),
     r"scales of quantized activations are not rounded to powers of two .* \(scale_fmt ue8m0\)"),
    *[(kind, "") for kind in ("fp8-dynamic", "fp8-static", "fp8-channel", "w8a8", "modelopt-fp8")]])
def test_unsupported_activation_quantization_is_reported(kind, said, plain_hf, tmp_path):
    notes = decoded(write(plain_hf, tmp_path / "hf", kind)[0]).notes
    if said:
        assert len(notes) == 1 and re.match(said, notes[0]), notes
    else:
        assert not notes


@pytest.mark.parametrize("named", [True, False])
def test_modelopt_layers_follow_their_quantization_algorithm(named, plain_hf, tmp_path):
    """Layers absent from the config are identified by their scales: row scales are per token."""
    by_token, fixed = "FP8_PER_CHANNEL_PER_TOKEN", "FP8"

    def of(name):
        return by_token if "mlp" in name else fixed

    listed = {name.removesuffix(".weight"): {"quant_algo": of(name)}
              for name in load_file(plain_hf / "model.safetensors") if "_proj" in name}
    said = dict(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=listed
                if named else {str(key): {"quant_algo": key} for key in (by_token, fixed)})
    directory, truth = write(plain_hf, tmp_path / "hf", (
        said, lambda name, weight: modelopt(of(name))[1](name, weight)))
    found = decoded(directory)
    for name, numbers in truth.items():
        stored = found.tensors[name].stored
        assert found.tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
        assert (stored.activation_dtype, stored.activation_scale) == (
            "float8_e4m3fn", 0 if "mlp" in name else np.float32(input_scale(name))), name
    assert not found.notes


GROUPED = dict(num_bits=8, type="float", strategy="group", group_size=32, dynamic=True)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kind", [
    float8("block", "weight_scale_inv", dict(quant_method="fp8", weight_block_size=[32, 32],
                                             activation_scheme="dynamic"), side=32),
    float8("block", side=32, activations=GROUPED)], ids=["transformers", "compressed-tensors"])
def test_activation_groups_are_quantized_if_the_checkpoint_and_option_ask(kind, tp_size, target,
                                                                          tmp_path):
    plain = families.save(families.tiny_model(
        "llama", intermediate_size=192, num_hidden_layers=2), tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", kind)

    def logits(case, **options):
        said = []
        manifest = llmc.compile(directory, case, target=target, tp_size=tp_size,
                                progress=said.append, **options)
        forms = manifest.chips[0].quantization.values()
        if target == "cuda":
            found = Interpreters(case).compute(STEP)
        else:
            with llmc.LLM(case) as llm:
                found = llm.logits(TOKENS)
        return found, {form.activation_group_size for form in forms}, " ".join(said)

    found, groups, said = logits(tmp_path / "as_it_is")
    families.assert_close(found, transformers_logits(plain, truth), 1e-5)
    assert groups == {0} and "give --quantize_activations" in said
    found, groups, said = logits(tmp_path / "rounded", quantize_activations=True)
    families.assert_close(found, transformers_logits(plain, truth, True, group=32), FLIPPED)
    assert groups == {32} and "--quantize_activations" not in said


@pytest.mark.parametrize(("kind", "said"), [
    (float8("block", side=32), "no block-wise FP8 weights"),
    (float8("block", side=32, activations={**GROUPED, "group_size": 64}), "no block-wise FP8"),
    (float8("block", side=32, activations={**GROUPED, "dynamic": False}), "no block-wise FP8"),
    ("w4a16", "no block-wise FP8"), ("fp8-channel", "no block-wise FP8")])
def test_activations_stay_unquantized_without_a_checkpoint_scheme(kind, said, plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", kind)
    with pytest.raises(llmc.LlmcError, match=said):
        llmc.compile(directory, tmp_path / "case", quantize_activations=True)
    with pytest.raises(llmc.LlmcError, match="without quantize fp8"):
        llmc.compile(directory, tmp_path / "case", quantize_activations=True, quantize="none")
    assert not (tmp_path / "case").exists()


def test_layers_with_a_shared_weight_share_its_block_scales(tmp_path):
    plain = families.save(families.tiny_model(
        "zamba2", hidden_size=128, attention_head_dim=64, mamba_headdim=32, intermediate_size=256),
        tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", "fp8-default-block")
    llmc.compile(directory, tmp_path / "case", target="cuda")
    families.assert_close(Interpreters(tmp_path / "case").ranks[0].run(TOKENS, 0),
                          transformers_logits(plain, truth), 1e-5)
    names = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    assert any(name.endswith("_blocks") for name in names)


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("kind", ["gptq", "awq", "llm-int8", "nf4"])
def test_a_quantized_conv1d_weight_has_the_linear_layout(kind, square, tmp_path, monkeypatch):
    plain = families.save(families.tiny_model("gpt2", n_layer=2), tmp_path / "plain")
    said, make = FORMATS[kind][0]

    def turned(name, weight):
        tensors, truth = make(name, np.ascontiguousarray(weight.T))
        return tensors, np.ascontiguousarray(truth.T)

    directory, truth = write(plain, tmp_path / "hf", (said, turned), of=lambda name, array: (
        name.endswith("attn.c_proj.weight") if square else ".c_" in name and array.ndim == 2))
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain, truth), 1e-5)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    assert len(forms) == (0 if kind == "nf4" else len(truth)) and len(truth) == 2 * (4 - 3 * square)


def test_activation_group_sizes_without_a_kernel_are_refused(tmp_path):
    plain = families.save(families.tiny_model(
        "llama", hidden_size=96, intermediate_size=192, num_hidden_layers=1), tmp_path / "plain")
    directory, _ = write(plain, tmp_path / "hf", float8("block", "weight_scale_inv", dict(
        quant_method="fp8", weight_block_size=[96, 96]), side=96))
    llmc.compile(directory, tmp_path / "cpu", quantize_activations=True)
    with pytest.raises(llmc.LlmcError, match=r"groups of 96; .* support groups of 32, 64, 128"):
        llmc.compile(directory, tmp_path / "case", target="cuda", quantize_activations=True)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_block_scales_are_stored_for_kernels_that_use_them(target, tmp_path):
    plain = families.save(families.tiny_model(
        "llama", hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64), tmp_path / "plain")
    kind = float8("block", "weight_scale_inv", dict(quant_method="fp8"), side=128)
    directory, _ = write(plain, tmp_path / "hf", kind)
    said = []
    llmc.compile(directory, tmp_path / "case", target=target, quantize_activations=True,
                 progress=said.append)
    weights = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    blocks = {name: array for name, array in weights.items() if name.endswith("_blocks")}
    assert len(blocks) == (4 if target == "cuda" else 0)
    assert any("4 linear layers multiply FP8 by FP8" in text for text in said) == bool(blocks)
    for name, array in blocks.items():
        scales = weights[name.removesuffix("_blocks") + "_scale"]
        assert (array[:, :scales.shape[1]].repeat(128, 0)[:len(scales)] == scales).all()
        assert not array[:, scales.shape[1]:].any() and array.shape[1] % 4 == 0


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(("kind", "tp_size"), [
    ("fp8-static", 1), ("fp8-static", 2), ("autofp8", 1), ("fp8-static-transformers", 1),
    ("modelopt-fp8", 1)])
def test_static_activation_scales_are_used(kind, tp_size, target, tmp_path):
    plain = families.save(families.tiny_model(
        "llama", intermediate_size=192, num_hidden_layers=2), tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", kind)
    said = []
    manifest = llmc.compile(directory, tmp_path / "case", target=target, tp_size=tp_size,
                            progress=said.append)
    assert not any("left out" in text for text in said)
    if target == "cuda":
        found = Interpreters(tmp_path / "case").compute(STEP)
    else:
        with llmc.LLM(tmp_path / "case") as llm:
            found = llm.logits(TOKENS)
    scales = {name.removesuffix(".weight"): input_scale(name) for name in truth}
    families.assert_close(found, transformers_logits(plain, truth, True, scales), FLIPPED)
    forms = manifest.chips[0].quantization
    assert {np.float32(form.activation_scale) for form in forms.values()} == {
        np.float32(scale) for scale in scales.values()}
    assert sum("qkv" in name or "gate_up" in name for name in forms) == 4


@pytest.mark.parametrize("kind", ["fp8-dynamic-transformers", "autofp8-dynamic", "fbgemm",
                                  "modelopt-fp8-channel"])
def test_activations_are_dynamic_without_a_static_scale(kind, plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    manifest = llmc.compile(directory, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        found = llm.logits(TOKENS)
    families.assert_close(found, transformers_logits(plain_hf, truth, True), FLIPPED)
    assert {(form.activation_dtype, form.activation_scale)
            for form in manifest.chips[0].quantization.values()} == {("float8_e4m3fn", 0.0)}


def test_layers_with_different_activation_scales_are_not_merged(plain_hf, tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2

    directory, _ = write(plain_hf, tmp_path / "hf", "fp8-static", change)
    manifest = llmc.compile(directory, tmp_path / "case")
    assert [name for name, form in manifest.chips[0].quantization.items()
            if not form.activation_dtype] == ["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan, np.inf])
def test_an_invalid_activation_scale_is_refused(value, plain_hf, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.input_scale"][()] = value

    directory, _ = write(plain_hf, tmp_path / "hf", "fp8-static", change)
    with pytest.raises(llmc.LlmcError, match=r"down_proj.input_scale.*damaged"):
        llmc.compile(directory, tmp_path / "case")


@pytest.mark.parametrize(("target", "tp_size", "kept"), [
    ("cpu", 1, 8), ("cpu", 2, 4), ("cuda", 1, 0)])
def test_act_order_columns_are_permuted_unless_sharded(target, tp_size, kept, plain_hf, tmp_path,
                                                       monkeypatch):
    directory, truth = write(plain_hf, tmp_path / "hf", "gptq-act-order")
    monkeypatch.setattr(cpu, "BODIES", "")
    said = []
    llmc.compile(directory, tmp_path / "case", target=target, tp_size=tp_size,
                 progress=said.append)
    assert len(read_manifest(tmp_path / "case").chips[0].quantization) == kept
    assert any(f"no kernels for {8 - kept} of" in text for text in said) == (kept < 8)
    expected = transformers_logits(plain_hf, truth)
    if target == "cuda":
        found = Interpreters(tmp_path / "case").compute(STEP)
    else:
        with llmc.LLM(tmp_path / "case") as llm:
            found = llm.logits(TOKENS)
    families.assert_close(found, expected, 1e-5)


def test_the_cpu_target_s_kernels_read_quantized_checkpoints(plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", "awq")
    llmc.compile(directory, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 0.03)


@pytest.mark.parametrize("tp_size", [1, 3])
@pytest.mark.parametrize("kind", ["awq", "gptq-act-order", "fp8-channel", "fp8-block"])
def test_mla_up_projections_keep_their_quantization(kind, tp_size, tmp_path):
    plain = families.save(families.tiny_model(
        "minicpm3", hidden_size=96, intermediate_size=288, num_hidden_layers=2, q_lora_rank=96,
        kv_lora_rank=96, qk_nope_head_dim=88, v_head_dim=96), tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", kind)
    llmc.compile(directory, tmp_path / "case", tp_size=tp_size)
    assert any("kv_b_proj" in name for name in truth)
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain, truth),
                              1e-5 if "fp8" in kind else 0.03)
    forms = read_manifest(tmp_path / "case").chips[-1].quantization
    kept = {form.dtype for name, form in forms.items() if name.endswith(("key_up", "value_up"))}
    # Act-order formats have no columns to permute.
    assert kept == (set() if kind == "gptq-act-order" else {FORMATS[kind][1]})


BLOCKS = float8("block", "weight_scale_inv", dict(quant_method="fp8", weight_block_size=[32, 32]),
                side=32)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gptq", "gptq-zero-16", "awq", "w4a16", "w4a16-channel", "w8a16",
                                  "fp8-tensor", "fp8-no-block", "modelopt-fp8", BLOCKS, "w8a8",
                                  "w8a8-asymmetric", "mxfp4"],
                         ids=lambda kind: kind if isinstance(kind, str) else "fp8-blocks-of-32")
def test_the_cuda_program_keeps_quantized_weights(kind, tp_size, plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", kind, without_scales_of_activations)
    llmc.compile(directory, tmp_path / "case", target="cuda", tp_size=tp_size)
    families.assert_close(Interpreters(tmp_path / "case").compute(STEP),
                          transformers_logits(plain_hf, truth), 1e-5)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    dtype = FORMATS[kind][1] if isinstance(kind, str) else "float8_e4m3fn"
    assert {form.dtype for form in forms.values()} == {dtype}
    merged = [name for name in forms if "qkv" in name or "gate_up" in name]
    assert len(merged) == 4 and not any(name.endswith(".normed") for name in forms)


def build_nothing(work, options):
    if "plan" in work:
        Path(work["plan"]).touch()
    return {"version": "8.6.0", "gpu": "a GPU", "compute_capability": "9.0"}


@pytest.mark.parametrize(("target", "kind"), [
    ("cuda", "nvfp4"), ("tensorrt", "nvfp4"), ("cuda", "modelopt-nvfp4")])
def test_weights_without_a_gpu_kernel_are_dequantized_with_a_note(target, kind, plain_hf, tmp_path,
                                                                  monkeypatch):
    monkeypatch.setattr(tensorrt, "_build", build_nothing)
    monkeypatch.setattr(tensorrt, "plugin_library", lambda: "")
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    said = []
    llmc.compile(directory, tmp_path / "case", target=target, progress=said.append)
    assert any(f"the {target} target has no kernels for 8 of the checkpoint's quantized "
               f"weights: they are dequantized to float32" in text for text in said)
    assert read_manifest(tmp_path / "case").quantization is None
    if target == "cuda":
        families.assert_close(Interpreters(tmp_path / "case").compute(STEP),
                              transformers_logits(plain_hf, truth), 1e-5)


def test_a_checkpoint_is_dequantized_with_an_option(plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", "awq")
    llmc.compile(directory, tmp_path / "case", quantize="none")
    assert read_manifest(tmp_path / "case").quantization is None
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 1e-5)


def test_an_unquantized_module_does_not_affect_its_neighbors(plain_hf, tmp_path, monkeypatch):
    """If only some merged weights are quantized, all are dequantized."""
    name = "model.layers.0.self_attn.k_proj.weight"
    plain = load_file(plain_hf / "model.safetensors")[name]

    def undo(tensors):
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]
        tensors[name] = plain

    directory, truth = write(plain_hf, tmp_path / "hf", "w4a16", undo)
    truth[name] = plain
    monkeypatch.setattr(cpu, "BODIES", "")
    llmc.compile(directory, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 1e-5)
    refusals = [text for report in read_manifest(tmp_path / "case").passes
                if report.name == "quantize" for text in report.refusals]
    assert len(refusals) == 1 and "have different storage formats" in refusals[0]


def test_a_quantize_config_file_is_read(plain_hf, tmp_path):
    """hf_quant_config.json instead of config.json; NVFP4 and FP8 in one checkpoint."""
    first, second = FORMATS["modelopt-nvfp4"][0], FORMATS["modelopt-fp8"][0]

    def make(name, weight):
        return (first if "mlp" in name else second)[1](name, weight)

    directory, truth = write(plain_hf, tmp_path / "hf", ({}, make))
    said = {"producer": {"name": "modelopt"}, "quantization": {
        "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": {
            name.removesuffix(".weight"): {"quant_algo": "NVFP4" if "mlp" in name else "FP8"}
            for name in truth}}}
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
        assert tensors[name].stored.dtype == ("int8" if "mlp" in name else "float8_e4m3fn")


def test_config_groups_select_quantized_layers(plain_hf, tmp_path):
    """Attention has dynamic scales, other layers static ones, and one layer weights only.

    compressed-tensors selects them by targets: names, patterns of names, classes.
    """
    alone = "model.layers.1.mlp.down_proj"
    kinds = {"token": FORMATS["fp8-dynamic"][0], "all": FORMATS["fp8-static"][0],
             "none": FORMATS["fp8-tensor"][0]}
    targets = {"none": [alone], "all": ["Linear"], "token": ["re:.*self_attn.*"]}
    said = kinds["all"][0] | {"config_groups": {
        name: kinds[name][0]["config_groups"]["group_0"] | {"targets": own}
        for name, own in targets.items()}}

    def kind_of(name):
        return "token" if "self_attn" in name else "none" if name.startswith(alone) else "all"

    directory, truth = write(plain_hf, tmp_path / "hf", (
        said, lambda name, weight: kinds[kind_of(name)][1](name, weight)))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        stored = tensors[name].stored
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
        rounds = stored.activation_dtype, stored.activation_scale
        assert rounds == {"token": ("float8_e4m3fn", 0), "none": ("", 0), "all": (
            "float8_e4m3fn", np.float32(input_scale(name)))}[kind_of(name)], name


def test_ambiguous_config_groups_must_agree(plain_hf, tmp_path):
    said, make = FORMATS["fp8-dynamic"][0]
    one = said["config_groups"]["group_0"] | {"targets": ["re:.*attn.*"]}
    for alike in (True, False):
        other = one | {"targets": ["re:.*self_attn.*", "FusedLinear"]} | (
            {} if alike else {"output_activations": STATIC})
        directory, truth = write(plain_hf, tmp_path / f"hf{alike}", (
            said | {"config_groups": {"a": one, "b": other}}, make))
        read = decoded(directory)
        rounds = {read.tensors[name].stored.activation_dtype for name in truth}
        assert rounds == {"float8_e4m3fn" if alike else ""}
        assert [note[-11:] for note in read.notes] == ([] if alike else ["and 13 more"])


def test_an_invalid_target_pattern_is_reported(plain_hf, tmp_path):
    said, make = FORMATS["fp8-dynamic"][0]
    group = said["config_groups"]["group_0"]
    said = said | {"config_groups": {"a": group, "b": group | {"targets": ["re:*mlp"]}}}
    directory, _ = write(plain_hf, tmp_path / "hf", (said, make))
    with pytest.raises(LlmcError, match=r"'\*mlp' in targets of .* is not a regular expression"):
        decoded(directory)


@pytest.mark.parametrize("name", [
    "self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale",
    "self_attn.v_proj.output_scale", "self_attn.prob_output_scale"])
def test_unused_scales_are_ignored_with_a_note(name, plain_hf, tmp_path):
    """KV cache scales, as named by several tools."""
    scales = {f"model.layers.{layer}.{name}": np.array([0.03], np.float32) for layer in range(2)}
    directory, truth = write(plain_hf, tmp_path / "hf", "fp8-static",
                             lambda tensors: tensors.update(scales))
    read = decoded(directory)
    assert truth.keys() < read.tensors.keys() and not any(name in own for own in read.tensors)
    assert any(f"by these, are ignored: 'model.layers.0.{name}' and 1 more" in note
               for note in read.notes)


CACHES_ALONE = [
    dict(quant_method="compressed-tensors", format="dense", config_groups={},
         kv_cache_scheme=dict(num_bits=8, type="float", strategy="tensor")),
    dict(quant_method="modelopt", quant_algo=None, kv_cache_quant_algo="FP8"),
    dict(quant_method="modelopt", kv_cache_scheme=dict(num_bits=8, type="float", dynamic=False))]


def write_caches_alone(said, plain, directory, stored):
    scales = {f"model.layers.{layer}.self_attn.k_scale": np.array([0.03], np.float32)
              for layer in range(2)} if stored else {}
    return write(plain, directory, (said, lambda name, weight: ({name: weight}, weight)),
                 lambda tensors: tensors.update(scales))[0]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("said", CACHES_ALONE)
def test_weights_beside_an_fp8_kv_cache_scheme_stay_unquantized(said, stored, plain_hf, tmp_path):
    directory = write_caches_alone(said, plain_hf, tmp_path / "hf", stored)
    read, plain = decoded(directory), load_file(plain_hf / "model.safetensors")
    assert read.tensors.keys() == plain.keys()
    note, = read.notes
    assert "activations and caches" in note if stored else "--kv_dtype alone decides" in note
    assert all(np.array_equal(tensor.load(), plain[name]) for name, tensor in read.tensors.items())


@pytest.mark.parametrize(("kind", "key", "value", "said"), [
    ("w4a16", "kv_cache_scheme", STATIC, "8 bits, float, tensor, static"),
    ("w4a16", "kv_cache_scheme", {**STATIC, "dynamic": True}, "8 bits, float, tensor, dynamic"),
    ("autofp8", "kv_cache_scheme", "static", "static"),
    ("modelopt-nvfp4", "kv_cache_quant_algo", "FP8", "FP8")])
def test_an_unused_kv_cache_scheme_is_reported(kind, key, value, said, plain_hf, tmp_path):
    """Without cache scales, which llmc reports anyway."""
    own, make = FORMATS[kind][0]
    for more in ({}, {key: value}):
        directory, _ = write(plain_hf, tmp_path / f"hf{len(more)}", ({**own, **more}, make))
        found = [note for note in decoded(directory).notes if note.startswith("KV caches")]
        assert found == [f"KV caches are not quantized as the checkpoint's config asks ({said}): "
                         f"--kv_dtype alone decides"] * len(more)


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("beside", [True, False])
def test_weights_beside_an_fp8_kv_cache_scheme_can_be_quantized(beside, scheme, plain_hf, tmp_path):
    """With the cache scheme in the config or in ModelOpt's separate file."""
    directory = write_caches_alone(CACHES_ALONE[0], plain_hf, tmp_path / "hf", stored=True)
    if beside:
        shutil.copy(plain_hf / "config.json", directory)
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {
            "quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    for hf in (directory, plain_hf):
        llmc.compile(hf, tmp_path / f"case-{hf.name}", quantize=scheme)
    weights, plain = (load_file(tmp_path / f"case-{hf.name}" / "chip0" / "weights.safetensors")
                      for hf in (directory, plain_hf))
    assert weights.keys() == plain.keys()
    assert all(np.array_equal(weights[name], plain[name]) for name in plain)


def test_quantized_weights_with_a_kv_cache_scheme_alone_are_refused(plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", (CACHES_ALONE[0], FORMATS["w4a16"][0][1]))
    with pytest.raises(LlmcError, match="compressed-tensors, packed.* does not name the method"):
        decoded(directory)


@pytest.mark.parametrize("method", ["auto-round", "gptq"])
def test_a_checkpoint_may_mix_4_and_8_bits(method, plain_hf, tmp_path):
    """With different group sizes."""
    four, eight = gptq(listed=False), gptq(8, group=16, listed=False)
    more = {"bits": 8, "group_size": 16}
    said = auto_round("auto_round:auto_gptq", None, extra_config={"model.layers.1.mlp": more})[0] \
        if method == "auto-round" else four[0] | {"dynamic": {"+:.*layers.1.mlp.*": more}}
    directory, truth = write(plain_hf, tmp_path / "hf",
                             (said, by_layer(four, eight, "layers.1.mlp")))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
        assert tensors[name].stored.dtype == ("uint8" if "layers.1.mlp" in name else "uint4"), name


def ruled(rules, one, other, chosen):
    """Write modules matching a pattern with the other writer, with GPTQModel's rules."""
    said, _ = one
    return said | {"dynamic": rules}, lambda name, weight: (
        other if re.search(chosen, name) else one)[1](name, weight)


MLP = r".*\.mlp\..*"


@pytest.mark.parametrize("kind", [
    # 64 columns in groups of 40 and 24, other modules in 32; and the reverse.
    ruled({MLP: {"group_size": 40}}, gptq(listed=False), gptq(listed=False, group=40), "mlp"),
    ruled({f"+:{MLP}": {"group_size": 32}}, gptq(listed=False, group=40), gptq(listed=False),
          "mlp"),
    ruled({f"+:{MLP}": {"group_size": -1}}, gptq(listed=False), gptq(listed=False, group=96),
          "mlp"),
    # The first match counts; missing keys are the defaults.
    ruled({"+:.*down_proj": {"bits": 8, "sym": False}, MLP: {"group_size": 40}, ".*": {}},
          gptq(listed=False), gptq(listed=False, group=40), "gate_proj|up_proj"),
    ruled({MLP: {"bits": 8, "group_size": 16}}, gptq(order=True), gptq(8, group=16, order=True),
          "mlp"),
    ruled({MLP: {"desc_act": False}}, gptq(order=True), gptq(listed=False), "mlp"),
    ruled({"mlp": {"group_size": 40}, "+:.*layers.1.mlp": {"sym": True}},  # a prefix
          gptq(listed=False), gptq(listed=False, zeros="middle"), "layers.1.mlp"),
    ruled({MLP: {"group_size": 16}}, awq(), awq(16), "mlp"),
    ({"dynamic": None} | gptq()[0], gptq()[1]),
    (auto_round("auto_round:auto_gptq", None, extra_config={
        "model.layers.0.mlp.up_proj": {"group_size": 40},
        r"layers\.1\.mlp": {"group_size": 40}})[0],
     ruled({}, gptq(listed=False), gptq(listed=False, group=40), r"0.mlp.up|1\.mlp")[1]),
])
def test_dynamic_config_rules_are_applied(kind, plain_hf, tmp_path):
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


@pytest.mark.parametrize("rule", ["-:.*down_proj", r"-:model\.layers\.\d+\.mlp\.down_proj$"])
def test_modules_excluded_by_a_rule_stay_unquantized(rule, plain_hf, tmp_path):
    said, make = gptq(8, order=True)
    rules = {rule: {}, "+:.*": {"group_size": 32}}
    directory, truth = write(plain_hf, tmp_path / "hf", (said | {"dynamic": rules}, make),
                             of=lambda name, array: is_projection(name, array)
                             and "down_proj" not in name)
    llmc.compile(directory, tmp_path / "case", quantize="none")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 1e-5)


@pytest.mark.parametrize(("kind", "said"), [
    (ruled({r"-:.*layers.1.*k_proj": {}}, gptq(), gptq(), "mlp"),
     r"has 'model.layers.1.self_attn.k_proj' quantized, which .* rule '-:.*k_proj' excludes"),
    (ruled({r"-:.*k_proj": {}}, awq(), awq(), "mlp"), "k_proj' quantized, which .* excludes"),
    (ruled({MLP: {"desc_act": True}}, gptq(listed=False), gptq(listed=False), "mlp"),
     "has no tensor '.*mlp.*g_idx', .* config has desc_act"),
    (ruled({MLP: {"group_size": 64}}, gptq(listed=False), gptq(listed=False), "mlp"),
     r"mlp.*scales' in .* has \d groups for \d+ columns, but its config has group_size 64"),
    (ruled({MLP: {"group_size": -1}}, gptq(listed=False), gptq(listed=False), "mlp"),
     "mlp.*scales' in .* group_size -1"),
    (ruled({MLP: {"adapter": {"name": "lora"}}}, gptq(), gptq(), "mlp"),
     r"mlp.*' in .* has a separate adapter \{'name': 'lora'\} .* llmc does not read"),
    (ruled({MLP: {"format": "gptq_v2"}}, gptq(), gptq(), "mlp"), "has a separate format 'gptq_v2'"),
    (ruled({MLP: {"bits": 3}}, gptq(), gptq(2), "mlp"), "mlp.* codes of 2 bits; llmc reads"),
    (ruled({"+:*mlp": {}}, gptq(), gptq(), "mlp"), r"'\*mlp' in rules of .* is not a regular"),
    (({"format": "gemv", "checkpoint_format": "gemv"} | awq()[0], awq()[1]), "quantized by AWQ"),
])
def test_contradictory_or_unsupported_rules_are_refused(kind, said, plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", kind)
    with pytest.raises(LlmcError, match=said):
        decoded(directory)


@pytest.mark.parametrize(("kind", "said"), [
    ((gptq()[0] | {"sym": True}, gptq()[1]), r"zero point of \d+, .* sym true, which implies 8"),
    # Version 2 stores 8, which is 9 in version 1.
    ((gptq()[0] | {"sym": True}, gptq(form="gptq_v2", zeros="middle")[1]), "zero point of 9, but"),
    ((gptq(8)[0] | {"sym": True}, gptq(8)[1]), "sym true, which implies 128"),
    ((gptq()[0] | {"dynamic": {MLP: {"sym": True}}}, gptq()[1]), "mlp.*qzeros' .* sym true"),
    ((awq()[0] | {"zero_point": False}, awq()[1]), "zero_point false, which implies 8"),
    *[((kind[0] | {"sym": value}, kind[1]), "") for kind, value in (
        (gptq(), False), (gptq(zeros="middle"), True), (gptq(8, zeros="middle"), True),
        (gptq(form="gptq_v2", zeros="middle"), True))]])
def test_symmetric_zero_points_are_verified(kind, said, plain_hf, tmp_path):
    """Readers may ignore zero points, so other values would be a different model."""
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    if said:
        with pytest.raises(LlmcError, match=said):
            decoded(directory)
        return
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


@pytest.mark.parametrize("kind", ["gptq", "awq", "w4a16"])
def test_a_weight_stored_quantized_and_unquantized_is_refused(kind, plain_hf, tmp_path):
    name = f"{Q}.weight"
    directory, _ = write(plain_hf, tmp_path / "hf", kind, lambda tensors: tensors.update(
        {name: load_file(plain_hf / "model.safetensors")[name]}))
    with pytest.raises(LlmcError, match=f"has '{name}' both quantized and not quantized"):
        decoded(directory)


@pytest.mark.parametrize("value", [0, 0.5])
def test_an_extra_zero_bias_is_ignored(value, plain_hf, tmp_path):
    """For every layer, as written by older tools; a nonzero one is refused."""
    def change(tensors):
        for name in [name for name in tensors if name.endswith(".scales")]:
            tensors[name.replace("scales", "bias")] = np.zeros(tensors[name].shape[1], np.float16)
        tensors[f"{Q}.bias"][5] = value

    directory, truth = write(plain_hf, tmp_path / "hf", "gptq", change)
    if value:
        with pytest.raises(LlmcError, match=f"has a tensor '{Q}.bias' .* does not use"):
            llmc.compile(directory, tmp_path / "case", quantize="none")
        return
    llmc.compile(directory, tmp_path / "case", quantize="none")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 1e-5)


@pytest.mark.parametrize("more", [
    {"bits": 2}, {"act_bits": 8}, {"data_type": "nv_fp"}, {"packing_format": "auto_round:mlx"},
    {"packing_format": None}, {"rotation_config": {"block_size": 32}},
    {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 4, "act_bits": 8}}}])
def test_unsupported_auto_round_formats_are_refused_by_name(more, plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", auto_round(
        "auto_round:auto_gptq", gptq(listed=False)[1], **more))
    with pytest.raises(LlmcError, match="is quantized by AutoRound"):
        decoded(directory)


@pytest.mark.parametrize("more", [
    {"format": "gptq_v2"}, {"format": "gptq_v2", "checkpoint_format": "GPTQ_V2"},
    {"checkpoint_format": "gptq_v2", "rotation": None, "adapter": None}])
def test_every_gptq_version_key_is_read(more, plain_hf, tmp_path):
    said, make = gptq(form="gptq_v2")
    del said["checkpoint_format"]
    directory, truth = write(plain_hf, tmp_path / "hf", (said | more, make))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


@pytest.mark.parametrize(("kind", "more", "said"), [
    (gptq(), {"format": "gptq_v2"}, "has checkpoint_format gptq and format gptq_v2 in its config"),
    (gptq(), {"format": "marlin", "checkpoint_format": None}, "is quantized by GPTQ"),
    (gptq(), {"rotation": "hadamard"}, "is rotated .rotation 'hadamard' in its config"),
    (awq(), {"rotation": "random"}, "is rotated .rotation 'random' in its config"),
    (gptq(), {"adapter": {"name": "lora", "rank": 8}}, "adapter .adapter .*'rank': 8.* in its")])
def test_contradictory_or_unsupported_gptq_configs_are_refused(kind, more, said, plain_hf,
                                                               tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", (kind[0] | more, kind[1]))
    with pytest.raises(LlmcError, match=said):
        decoded(directory)


def test_unsupported_bit_widths_are_refused_with_the_layer(plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", (gptq()[0], by_layer(gptq(), gptq(2), "up")))
    with pytest.raises(LlmcError, match="up_proj' in .* has codes of 2 bits; llmc reads 4 and 8"):
        decoded(directory)


def test_block_and_row_scales_are_distinguished_by_shape(plain_hf, tmp_path):
    block, row = FORMATS["fp8-block-compressed"][0], FORMATS["fp8-channel"][0]
    both = block[0] | dict(config_groups={"a": row[0]["config_groups"]["group_0"],
                                          "b": block[0]["config_groups"]["group_0"]})
    directory, truth = write(plain_hf, tmp_path / "hf", (
        both, lambda name, weight: (block if "mlp" in name else row)[1](name, weight)))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


def test_block_sizes_follow_their_config_group(plain_hf, tmp_path):
    large, small = float8("block", side=32), float8("block", side=16)
    said = large[0] | {"config_groups": {
        "a": large[0]["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]},
        "b": small[0]["config_groups"]["group_0"]}}
    directory, truth = write(plain_hf, tmp_path / "hf", (
        said, by_layer(small, large, "self_attn")))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


def arguing(kind, **arguments):
    """A compressed-tensors format with additional weight settings."""
    said, make = kind
    group = said["config_groups"]["group_0"]
    return said | {"config_groups": {"group_0": group | {
        "weights": group["weights"] | arguments}}}, make


@pytest.mark.parametrize("kind", [
    arguing(pack_quantized(), actorder="weight"), arguing(pack_quantized(), actorder="static"),
    arguing(pack_quantized(group=0), actorder="group"),
    (gptq(listed=False)[0] | {"desc_act": True, "static_groups": True}, gptq(listed=False)[1]),
    (gptq(listed=False, group=96)[0] | {"desc_act": True, "group_size": -1},
     gptq(listed=False, group=96)[1])])
def test_columns_in_natural_order_need_no_g_idx(kind, plain_hf, tmp_path):
    """With one group, and with static groups."""
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


@pytest.mark.parametrize("asymmetric", ["Linear", "re:.*(q|k)_proj"])
def test_zero_points_follow_the_config_group(asymmetric, plain_hf, tmp_path):
    some, others = pack_quantized(zeros="any"), pack_quantized()
    own, of_others = (kind[0]["config_groups"]["group_0"] for kind in (some, others))
    said = others[0] | {"config_groups": {
        "a": own | {"targets": [asymmetric]},
        "b": of_others | {"targets": ["re:.*(v|o|gate|up|down)_proj"
                                      if asymmetric == "Linear" else "Linear"]}}}

    def make(name, weight):
        return (some if re.search("[qk]_proj", name) else others)[1](name, weight)

    directory, truth = write(plain_hf, tmp_path / "hf", (said, make))
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
    directory, _ = write(plain_hf, tmp_path / "missing", (said, make),
                         lambda tensors: tensors.pop(f"{Q}.weight_zero_point"))
    with pytest.raises(LlmcError, match="has no tensor '.*q_proj.weight_zero_point'"):
        decoded(directory)


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(("kind", "change", "said"), [
    ("awq", lambda t: t.pop(f"{Q}.scales"), "has no tensor '.*q_proj.scales', which"),
    ("w4a16", lambda t: t.update({f"{Q}.weight_scale": np.ones((3, 2), np.float32)}),
     r"weight_scale' in .* is float32 \[3, 2\], expected \[64, 2\]"),
    ("gptq", lambda t: t[f"{Q}.scales"].__setitem__((0, 3), np.nan), "a scale that is NaN"),
    ("fp8-channel", lambda t: t[f"{Q}.weight_scale"].__setitem__((5, 0), 0), "infinite or 0"),
    ("fp8-block", lambda t: t.update({f"{Q}.weight_scale_inv": np.ones((1, 1), np.float32)}),
     r"expected \[2, 2\]"),
    ("fp8-channel", lambda t: t[f"{Q}.weight"].view(np.uint8).__setitem__((5, 0), 127),
     "has NaN among its weights"),
    ("mxfp4", lambda t: t[f"{Q}.weight_scale"].__setitem__((5, 0), 255), "a scale that is NaN"),
    ("mxfp4-blocks", lambda t: t.pop(f"{Q}.weight_scales"), "has no tensor '.*weight_scales'"),
    ("gptq-act-order", lambda t: t[f"{Q}.g_idx"].__setitem__(3, 99), "does not assign each of"),
    ("w4a16", lambda t: [t.pop(name) for name in list(t) if "weight_scale" in name],
     "no tensor named '.*.weight_scale'"),
    ("w8a8", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].astype(np.float32)}),
     "is float32 and has scales; expected FP8"),
    # Four groups of 16, but 32 in the config.
    ("w4a16", lambda t: t.update({f"{Q}.weight_scale": np.ones((64, 4), ml_dtypes.bfloat16)}),
     "has 4 groups for 64 columns, but its config has group_size 32"),
    ("awq", lambda t: t.update({f"{Q}.scales": np.ones((1, 64), np.float16)}),
     r"q_proj.qzeros' in .* is int32 \[2, 8\], expected \[1, 8\]"),
    ("modelopt-nvfp4", lambda t: t.pop(f"{Q}.weight"), "has no tensor '.*q_proj.weight'"),
    ("nf4", lambda t: t.update({f"{Q}.weight.quant_state.bitsandbytes__nf4": np.ones(
        5, np.uint8)}), "is no state of bitsandbytes"),
    ("nf4", lambda t: t.update({f"{Q}.weight.quant_state.bitsandbytes__nf4": np.frombuffer(
        b'{"shape": [64, 64], "blocksize": 0, "quant_type": "nf4"}', np.uint8)}), "sizes are"),
    ("nf4", lambda t: [t.pop(name) for name in list(t) if "quant_state" in name],
     "no tensor named '.*.quant_state.bitsandbytes__nf4'"),
    ("nf4", lambda t: t.update({f"{Q}.weight": np.ones((9, 1), np.uint8)}),
     r"is \[9, 1\], its state is of \[64, 64\] values of 4 bits"),
    ("nf4-nested", lambda t: t.pop(f"{Q}.weight.nested_absmax"), "has no tensor '.*nested_absmax'"),
    ("nf4", lambda t: t[f"{Q}.weight.quant_map"].__setitem__(3, np.nan), "a number that is NaN"),
    ("nf4-nested", lambda t: t[f"{Q}.weight.quant_map"].__setitem__(3, np.inf), "quant_map' in"),
    ("llm-int8", lambda t: t[f"{Q}.SCB"].__setitem__(5, np.nan), "a scale that is NaN"),
    ("llm-int8", lambda t: t.update({f"{Q}.weight_format": np.array(1, np.uint8)}), "row-major"),
    ("modelopt-nvfp4", lambda t: t.update({f"{Q}.pre_quant_scale": np.ones(64, np.float32)}),
     "pre_quant_scale"),
    ("w4a16-asymmetric", lambda t: t.pop(f"{Q}.weight_zero_point"),
     "has no tensor '.*q_proj.weight_zero_point', which .* config has symmetric false"),
    (arguing(int8(True), symmetric=False), lambda t: t.pop(f"{Q}.weight_zero_point"),
     "has no tensor '.*q_proj.weight_zero_point'"),
    ("gptq-act-order", lambda t: t.pop(f"{Q}.g_idx"),
     "has no tensor '.*q_proj.g_idx', .* config has desc_act"),
    (arguing(pack_quantized(order=True), actorder="group"), lambda t: t.pop(f"{Q}.weight_g_idx"),
     "has no tensor '.*q_proj.weight_g_idx', .* config has actorder group"),
    ("w4a16-g-idx", lambda t: t.update({f"{Q}.weight_g_idx": np.zeros(63, np.int32)}),
     r"weight_g_idx' in .* is int32 \[63\], expected \[64\]"),
    *[(kind, lambda t, name=f"{Q}.{name}": t.update({name: np.ones((64, 33), np.uint8)}),
       "has rows of 66 columns, which groups of (16|32) do not divide")
      for kind, name in (("nvfp4", "weight_packed"), ("modelopt-nvfp4", "weight"),
                         ("mxfp4", "weight_packed"))],
    ("nvfp4", lambda t: t.pop(f"{Q}.weight_global_scale"), "has no tensor '.*weight_global_scale'"),
    ("modelopt-nvfp4", lambda t: t.pop(f"{Q}.weight_scale_2"), "has no tensor '.*weight_scale_2'"),
    ("w4a16", lambda t: t.pop(f"{Q}.weight_packed"),
     "has neither '.*q_proj.weight' nor '.*q_proj.weight_packed' for the scales '.*weight_scale'"),
    ("gptq", lambda t: t.pop(f"{Q}.qweight"), "q_proj.g_idx'.* of GPTQ, without the other"),
    # One scale per row, but groups in the config; 4 bits, but 8 in the config.
    ("w4a16", lambda t: t.update({f"{Q}.weight_scale": np.ones((64, 1), ml_dtypes.bfloat16)}),
     "has 1 group for 64 columns, but its config has group_size 32"),
    ("w8a16", lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:, ::2].copy()}),
     "has codes of 4 bits, its config has num_bits 8"),
    ("fp8-channel", lambda t: t.update({f"{Q}.bitmask": t.pop(f"{Q}.weight").view(np.uint8)}),
     "has sparse weights .tensor '.*q_proj.bitmask'"),
    ("w4a16", lambda t: t.update({f"{Q}.weight_scale": np.array(1, np.float32)}),
     r"weight_scale' in .* is float32 \[\], expected \[64, 1\]"),
    *[(kind, lambda t, name=f"{Q}.{name}": t.update({name: t[name].reshape(-1)}),
       rf"{name}' in .*({dtype} \[\d+\], expected a matrix|has shape \[\d+\], its weight_shape)")
      for kind, name, dtype in (
          ("gptq", "qweight", "int32"), ("awq", "qweight", "int32"), ("w8a8", "weight", "int8"),
          ("fp8-channel", "weight", "float8_e4m3fn"), ("fp8-block", "weight", "float8_e4m3fn"),
          ("w4a16", "weight_packed", "int32"), ("mxfp4", "weight_packed", "uint8"))],
    *[(kind, lambda t, name=f"{Q}.{name}", dtype=dtype: t.update({name: t[name].view(dtype)}),
       f"{name}' in .* has codes packed in {dtype.__name__}; llmc reads them in int32")
      for kind, name, dtype in (
          ("gptq", "qweight", np.int16), ("gptq", "qweight", np.int8),
          ("awq", "qweight", np.int64))],
])
def test_missing_or_damaged_tensors_are_named(kind, change, said, plain_hf, tmp_path):
    """With one error, before the export."""
    directory, _ = write(plain_hf, tmp_path / "hf", kind, change)
    with pytest.raises(LlmcError, match=said):
        llmc.compile(directory, tmp_path / "case")
    assert not (tmp_path / "case").exists()


@pytest.mark.parametrize("read", ["as numbers", "merged", "of an expert"])
def test_fp8_nan_is_named(read, plain_hf, tmp_path):
    """For quantized and for dequantized weights.

    Weights are dequantized by an option, by an unquantized neighbor, or without a kernel.
    """
    name = f"{Q}.weight"
    if read == "of an expert":
        plain_hf = families.save(families.tiny_model(
            "qwen3_moe", moe_intermediate_size=96, num_hidden_layers=2), tmp_path / "plain")
        name = "model.layers.1.mlp.experts.2.down_proj.weight"

    def change(tensors):
        tensors[name].view(np.uint8)[5, 0] = 255
        if read == "merged":
            other = name.replace("q_proj", "k_proj")
            tensors[other] = tensors[other].astype(np.float32)
            del tensors[f"{other}_scale"]

    directory, _ = write(plain_hf, tmp_path / "hf", "fp8-channel", change)
    with pytest.raises(LlmcError, match=f"'{name}' in .* has NaN among its weights"):
        llmc.compile(directory, tmp_path / "case", quantize="none" if read == "as numbers" else "")
    assert not (tmp_path / "case").exists()


@pytest.mark.parametrize("said", ["32x32", [32, 32]])
def test_older_block_configs_are_read(said, plain_hf, tmp_path):
    kind = arguing(float8("block", side=32, activations=GROUPED), block_structure=said)
    directory, truth = write(plain_hf, tmp_path / "hf", kind)
    tensors = decoded(directory).tensors
    for name, numbers in truth.items():
        assert tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name
        assert tensors[name].stored.rounds_groups


@pytest.mark.parametrize(("kind", "said"), [
    *[(arguing(float8("block", side=32), block_structure=block), "has weights in blocks of")
      for block in ([0, 0], "32", None, 32)],
    ((dict(quant_method="fp8", weight_block_size="48"), FORMATS["fp8-block"][0][1]),
     "has weights in blocks of '48'"),
    *[((pack_quantized()[0] | more, pack_quantized()[1]), "is quantized by compressed-tensors")
      for more in ({"config_groups": [1]}, {"config_groups": {"group_0": {"weights": 4}}},
                   {"transform_config": "rotated"})]])
def test_an_invalid_quantization_config_is_refused(kind, said, plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", kind)
    with pytest.raises(LlmcError, match=said):
        decoded(directory)


@pytest.mark.parametrize("beside", [True, False])
def test_a_config_group_for_attention_alone_is_reported(beside, plain_hf, tmp_path):
    """As in compressed-tensors, with and without quantized weights."""
    said, make = FORMATS["w4a16"][0] if beside else (
        compressed("dense"), lambda name, weight: ({name: weight}, weight))
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": STATIC}
    groups = {**(said["config_groups"] if beside else {}), "attention": attention}
    directory, truth = write(plain_hf, tmp_path / "hf", ({**said, "config_groups": groups}, make))
    read = decoded(directory)
    assert read.notes == ("activations are not quantized as the checkpoint's config asks (8 bits, "
                          "float, tensor, static): 'LlamaAttention'",)
    for name, numbers in truth.items():
        assert read.tensors[name].load().tobytes() == numbers.astype(np.float32).tobytes(), name


@pytest.mark.parametrize(("width", "tp_size", "zeros", "dtype"), [
    (63, 1, "middle", "int8"), (63, 1, "any", "uint8"), (66, 2, "middle", "int8"),
    (66, 2, "any", "uint8"), (257, 1, "middle", "int8"), (257, 1, "any", "")])
def test_4_bit_codes_of_odd_columns_are_packed_in_bytes(width, tp_size, zeros, dtype, tmp_path,
                                                        monkeypatch):
    """For a rank and for a whole row; not for groups of one column."""
    plain = families.save(families.tiny_model("llama", intermediate_size=width,
                                              num_hidden_layers=1), tmp_path / "plain")
    directory, truth = write(plain, tmp_path / "hf", pack_quantized(zeros=zeros, group=0))
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(directory, tmp_path / "case", tp_size=tp_size)
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain, truth), 1e-5)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    assert [form.dtype for name, form in forms.items() if "down_proj" in name] == [dtype] * bool(
        dtype)


def test_quantized_weights_are_not_requantized(plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", "w4a16")
    with pytest.raises(LlmcError, match="is quantized by compressed-tensors.*; leave out --quant"):
        llmc.compile(directory, tmp_path / "case", quantize="int8")


@pytest.mark.parametrize("kind", ["nvfp4", "modelopt-nvfp4"])
def test_nvfp4_groups_with_a_zero_scale_are_zeros(kind, plain_hf, tmp_path):
    """Tools write them for values that are small relative to the maximum."""
    name = f"{Q}.weight"
    directory, truth = write(plain_hf, tmp_path / "hf", kind, lambda tensors: tensors[
        f"{name}_scale"].__setitem__((5, 1), 0))
    truth[name][5, 16:32] = 0
    read = decoded(directory).tensors[name]
    assert np.array_equal(read.load(), truth[name]) and read.stored.dtype == "int8"
    llmc.compile(directory, tmp_path / "case")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(TOKENS), transformers_logits(plain_hf, truth), 0.05)


def test_a_reference_that_transformers_cannot_load_is_named_by_method(plain_hf, tmp_path):
    directory, _ = write(plain_hf, tmp_path / "hf", "modelopt-nvfp4")
    llmc.compile(directory, tmp_path / "case")
    with pytest.raises(LlmcError, match=r"cannot load .* quantized by NVIDIA ModelOpt \(NVFP4\): "
                                        "give the original, unquantized model"):
        diff(tmp_path / "case", directory, tokens=4)
