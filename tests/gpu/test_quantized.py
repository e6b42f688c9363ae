"""Logits of quantized models for every GEMM path."""

from dataclasses import replace

import bench_model
import families
import numpy as np
import pytest
from schedule_interpreter import LIMITS as SMALL
from schedule_interpreter import Interpreters
from stepping import load

import llmc
from llmc.artifacts.program import read_program
from llmc.runtime.core.step import Step

ROWS = (1, 4, 9, 16, 17, 40, 100, 300)  # few, many, and enough rows that a weight is dequantized
FAMILIES = {"llama": {"intermediate_size": 192}, "gpt2": {"n_inner": 192},
            "qwen3": {"intermediate_size": 192}, "gemma2": {"intermediate_size": 192},
            "gpt_neox": {"intermediate_size": 192}}  # whole groups
LIMITS = replace(SMALL, num_blocks=64, block_size=16, max_tokens=512)
ROOM = dict(max_batch_size=4, max_tokens=512, kv_cache_tokens=2**12)


def steps():
    rng = np.random.default_rng(5)
    for rows in ROWS:
        blocks = list(range(-(-rows // 16)))
        yield Step.of([rng.integers(3, families.VOCAB, rows).tolist()], [0], [blocks], [0],
                      logits="all")


def on_gpu(case):
    engine = load(case, **ROOM)
    made = [engine.collect(engine.submit(step)).logits for step in steps()]
    engine.close()
    return made


def truth(case):
    interpreters = Interpreters(case, LIMITS)
    return [interpreters.compute(step) for step in steps()]


def off(actual, expected):
    """Return the maximum difference relative to the range."""
    return max(np.abs(own - right).max() / np.ptp(right)
               for own, right in zip(actual, expected, strict=True))


def compile_to(directory, hf, dtype, quantize, name="", **options):
    case = directory / "-".join([dtype, quantize, name, *options])
    llmc.compile(hf, case, target="cuda", dtype=dtype, quantize=quantize, max_seq_len=512,
                 **options)
    return case


@pytest.mark.parametrize("scheme", ["int4", "uint4", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(extension, family, scheme, tmp_path):
    model = families.tiny_model(family, max_position_embeddings=512, **FAMILIES[family])
    hf = families.save(model, tmp_path / "hf")

    def compiled(dtype, quantize):
        options = {} if quantize == "none" else dict(group_size=32, quantize_lm_head=quantize)
        return compile_to(tmp_path, hf, dtype, quantize, **options)

    exact = compiled("float32", scheme)
    right, plain = truth(exact), truth(compiled("float32", "none"))
    assert off(on_gpu(exact), right) < 1e-4
    for dtype in ("float16", "bfloat16"):
        allowed = 3 * off(on_gpu(compiled(dtype, "none")), plain)
        assert off(on_gpu(compiled(dtype, scheme)), right) <= allowed, dtype


@pytest.mark.parametrize("scheme", ["int4", "uint4", "int8", "fp8"])
def test_moe_logits(extension, scheme, tmp_path):
    hf = families.save(families.tiny_model("qwen3_moe", moe_intermediate_size=64,
                                           max_position_embeddings=512), tmp_path / "hf")
    check_mixture(lambda dtype: compile_to(tmp_path, hf, dtype, scheme, group_size=32))


def test_mxfp4_experts(extension, tmp_path):
    hf = families.save(families.tiny_model("gpt_oss", intermediate_size=128,
                                           max_position_embeddings=512), tmp_path / "hf")
    families.to_mxfp4(hf, tmp_path / "mxfp4", np.random.default_rng(6))
    check_mixture(lambda dtype: compile_to(tmp_path, tmp_path / "mxfp4", dtype, ""))


def check_mixture(compiled):
    """Check logits; in 16 bits a few tokens may be routed to other experts."""
    exact = compiled("float32")
    right = truth(exact)
    assert off(on_gpu(exact), right) < 1e-4
    for dtype, allowed in (("float16", 0.005), ("bfloat16", 0.04)):
        assert np.median(far(on_gpu(compiled(dtype)), right)) < allowed, dtype


def far(actual, expected):
    """Return each token's maximum difference relative to the range."""
    return np.concatenate([np.abs(own - right).max(-1) / np.ptp(right)
                           for own, right in zip(actual, expected, strict=True)])


@pytest.mark.parametrize("backend", [None, "cudnn", "vanilla"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_with_static_fp8_activations(extension, family, backend, tmp_path, monkeypatch):
    """Attention and gates quantize their outputs for the next projection."""
    model = families.tiny_model(family, max_position_embeddings=512, **FAMILIES[family])
    hf = families.save(model, tmp_path / "hf")
    static = families.to_static_fp8(hf, tmp_path / "static", {
        "o_proj": 0.0015, "down_proj": 0.0005, "_proj": 0.003})
    monkeypatch.setitem(ROOM, "attention_backend", backend)

    def compiled(hf, dtype):
        return compile_to(tmp_path, hf, dtype, "", name=hf.name)

    right, plain = truth(compiled(static, "float32")), truth(compiled(hf, "float32"))
    effect = np.median(far(plain, right))
    for dtype in ("float16", "bfloat16"):
        case = compiled(static, dtype)
        rounded = [node.fields["out_scale"] for node in read_program(
            case / "chip0" / "schedule.json").nodes if node.fields.get("out_scale")]
        assert len(rounded) == 2 * 3 - 1  # except the last attention: few rows are selected
        lost = np.median(far(on_gpu(compiled(hf, dtype)), plain))
        found = far(on_gpu(case), right)
        assert np.median(found) < lost + effect and found.max() < 5 * (lost + effect), dtype


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_logits_of_block_fp8_weights(extension, family, tmp_path):
    """Activations are unquantized or quantized in groups."""
    model = families.tiny_model(family, max_position_embeddings=512, hidden_size=256, head_dim=64,
                                num_attention_heads=4, num_key_value_heads=2, intermediate_size=384)
    hf = families.save(model, tmp_path / "hf")
    blocks = bench_model.in_blocks(hf, tmp_path / "blocks")

    def compiled(hf, dtype, **options):
        return compile_to(tmp_path, hf, dtype, "", name=hf.name, **options)

    alone = truth(compiled(blocks, "float32"))
    right = truth(compiled(blocks, "float32", quantize_activations=True))
    plain, effect = truth(compiled(hf, "float32")), np.median(far(alone, right))
    for dtype in ("float16", "bfloat16"):
        lost = far(on_gpu(compiled(hf, dtype)), plain)
        assert off(on_gpu(compiled(blocks, dtype)), alone) < 3 * lost.max(), dtype
        found = far(on_gpu(compiled(blocks, dtype, quantize_activations=True)), right)
        assert np.median(found) < np.median(lost) + effect, dtype
        assert found.max() < 5 * (np.median(lost) + effect), dtype


@pytest.mark.parametrize("form", ["blocks", "tokens"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_moe_logits_with_quantized_activations(extension, family, form, tmp_path):
    """Scales per group and per token."""
    model = families.tiny_model(
        family, max_position_embeddings=512, hidden_size=256, head_dim=64, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=384, moe_intermediate_size=128)
    hf = families.save(model, tmp_path / "hf")
    given = bench_model.in_blocks(hf, tmp_path / "blocks") if form == "blocks" else hf

    def compiled(hf, dtype, quantize="", **options):
        return compile_to(tmp_path, hf, dtype, quantize, name=hf.name, **options)

    def rounded(dtype):
        return compiled(given, dtype, "" if form == "blocks" else "fp8", quantize_activations=True)

    right, plain = truth(rounded("float32")), truth(compiled(hf, "float32", "none"))
    alone = truth(compiled(given, "float32", "" if form == "blocks" else "fp8"))
    effect = np.median(far(alone, right))
    for dtype in ("float16", "bfloat16"):
        lost = np.median(far(on_gpu(compiled(hf, dtype, "none")), plain))
        assert np.median(far(on_gpu(rounded(dtype)), right)) < lost + effect, dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_fp8_activations(extension, family, tmp_path):
    """An activation between two FP8 values may be rounded to either, also in later layers.

    This affects some tokens in float32 and all in 16 bits, by at most the quantization error.
    """
    model = families.tiny_model(family, max_position_embeddings=512, **FAMILIES[family])
    hf = families.save(model, tmp_path / "hf")

    def compiled(dtype, quantize="fp8", **options):
        return compile_to(tmp_path, hf, dtype, quantize, **options)

    exact = compiled("float32", quantize_activations=True)
    right, plain = truth(exact), truth(compiled("float32", "none"))
    effect = np.median(far(truth(compiled("float32")), right))
    found = far(on_gpu(exact), right)
    assert np.quantile(found, 0.2) < 1e-3 < effect / 3 and np.median(found) < effect
    for dtype in ("float16", "bfloat16"):
        lost = np.median(far(on_gpu(compiled(dtype, "none")), plain))
        found = far(on_gpu(compiled(dtype, quantize_activations=True)), right)
        assert np.median(found) < lost + effect and found.max() < 5 * (lost + effect), dtype
