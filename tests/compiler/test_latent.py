"""Latent attention in the compiler: latent cache, or cache of keys and values."""

import families
import numpy as np
import pytest
from schedule_interpreter import Interpreters

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check.diff import diff

TOKENS = [5, 17, 42, 9, 88, 3, 61]


def compiled(family, tmp_path, tp_size=1, **changes):
    model = families.tiny_model(family, **changes)
    case = tmp_path / "case"
    llmc.compile(families.save(model, tmp_path / "hf"), case, tp_size=tp_size)
    with llmc.LLM(case) as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))
    return read_manifest(case)


@pytest.mark.parametrize(("family", "row"), [
    ("deepseek_v2", 24), ("glm4_moe_lite", 24), ("deepseek_v32", 24),
    pytest.param("minicpm3", 24, marks=pytest.mark.thorough),
    ("hy_v4", 24),  # with gates, and sinks or, the next, beside states
    pytest.param("bailing_hybrid", 24, marks=pytest.mark.thorough)])
def test_the_latent_is_cached_instead_of_keys_and_values(family, row, tmp_path):
    manifest = compiled(family, tmp_path, tp_size=2)
    assert {(cache.latent, cache.token_size) for chip in manifest.chips for cache in chip.cache} \
        == {(True, row)}
    assert [set(chip.num_heads) for chip in manifest.chips] == [{2}, {2}]
    assert "CausalAttention" not in manifest.ops


def test_keys_and_values_smaller_than_the_latent_are_cached(tmp_path):
    """Keys and values of 4 heads have 160 elements, the latent row 168."""
    manifest = compiled("minicpm3", tmp_path, kv_lora_rank=160)
    assert {(cache.latent, cache.token_size) for cache in manifest.chips[0].cache} == {(False, 160)}
    assert "LatentAttention" not in manifest.ops


def test_diff_compares_with_the_exported_layers(tmp_path):
    hf = families.save(families.tiny_model("minicpm3"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", tp_size=2)
    assert diff(tmp_path / "case", hf, bisect=True, tokens=2).verdict is None


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3", "hy_v4"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_schedule_gives_transformers_logits(family, tp_size, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 tp_size=tp_size)
    ranks = Interpreters(tmp_path / "case")
    for own in ranks._on_all(lambda rank: np.concatenate(
            [rank.run(TOKENS[:4], 0), rank.run(TOKENS[4:5], 4), rank.run(TOKENS[5:], 5)])):
        families.assert_close(own, families.reference_logits(model, TOKENS))


def test_caches_of_float8_are_refused(tmp_path):
    hf = families.save(families.tiny_model("minicpm3"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="unsupported by llmc::LatentAttention; leave"):
        llmc.compile(hf, tmp_path / "case", target="cuda", kv_dtype="float8_e4m3fn")


def test_tensorrt_rtx_has_no_kernel_yet(tmp_path):
    pytest.importorskip("tensorrt_rtx")
    hf = families.save(families.tiny_model("minicpm3"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=r"^target 'tensorrt_rtx' has no kernel for "
                                             r"llmc::LatentAttention \(.*--target cpu$"):
        llmc.compile(hf, tmp_path / "case", target="tensorrt_rtx")
