"""Latent attention as the compiler finds it: when its cache is of latents, and when of heads."""

import families
import pytest

import llmc
from llmc.compiler.check.diff import diff
from llmc.runtime.manifest import read_manifest

TOKENS = [5, 17, 42, 9, 88, 3, 61]


def compiled(family, tmp_path, tp_size=1, **changes):
    model = families.tiny_model(family, **changes)
    case = tmp_path / "case"
    llmc.compile(families.save(model, tmp_path / "hf"), case, tp_size=tp_size)
    with llmc.LLM(case) as llm:
        families.assert_close(llm.logits(TOKENS), families.reference_logits(model, TOKENS))
    return read_manifest(case)


@pytest.mark.parametrize(("family", "row"), [
    ("deepseek_v2", 24), ("glm4_moe_lite", 24), ("minicpm3", 24), ("deepseek_v32", 24),
    ("hy_v4", 24), ("bailing_hybrid", 24)])  # with gates, and sinks or beside states
def test_a_latent_is_cached_in_the_place_of_heads(family, row, tmp_path):
    manifest = compiled(family, tmp_path, tp_size=2)
    assert {(cache.latent, cache.token_size) for chip in manifest.chips for cache in chip.cache} \
        == {(True, row)}
    assert [set(chip.num_heads) for chip in manifest.chips] == [{2}, {2}]
    assert "CausalAttention" not in manifest.ops


def test_heads_that_are_smaller_than_their_latent_are_cached_whole(tmp_path):
    """4 heads of 20 elements, keys and values, are 160; the row would be of 168."""
    manifest = compiled("minicpm3", tmp_path, kv_lora_rank=160)
    assert {(cache.latent, cache.token_size) for cache in manifest.chips[0].cache} == {(False, 160)}
    assert "LatentAttention" not in manifest.ops


def test_diff_compares_with_the_exported_layers(tmp_path):
    hf = families.save(families.tiny_model("minicpm3"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", tp_size=2)
    assert diff(tmp_path / "case", hf, bisect=True, tokens=2).verdict is None


@pytest.mark.parametrize("target", ["cuda", "tensorrt_rtx"])
def test_gpus_have_no_kernel_yet(target, tmp_path):
    hf = families.save(families.tiny_model("minicpm3"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=rf"^target '{target}' has no kernel for "
                                             r"llmc::LatentAttention yet, which .*--target cpu$"):
        llmc.compile(hf, tmp_path / "case", target=target)
