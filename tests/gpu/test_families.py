"""Logits of all model families on the CUDA engine equal transformers', by dtype."""

import families
import pytest

import llmc


@pytest.mark.parametrize(("family", "changes"), [
    *((family, {}) for family in (*families.FAMILIES, *families.OWN_ATTENTION, *families.LATENT,
                                  *families.MIXTURES, *families.HYBRIDS)),
    ("gemma4_text", families.GEMMA4_LARGE), ("gemma4_text", families.GEMMA4_MOE),
    ("laguna", families.sizes_of("laguna")), ("apertus", families.UNPLANNED["apertus"]),
    ("hunyuan_v1_dense", families.FAMILIES["qwen3"])])  # QK norm after the rotary embedding
def test_logits_are_transformers(extension, family, changes, tmp_path):
    families.check_logits_on_gpu(
        family, tmp_path,
        lambda hf, case, dtype: llmc.compile(hf, case, target="cuda", dtype=dtype),
        ("float32", "float16", "bfloat16"), **changes)
