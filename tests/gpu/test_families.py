"""The model families: the logits of the engine beside those of transformers, dtype by dtype."""

import families
import pytest

import llmc

# Those that the engine has ops for: of others norms are over all heads.
MIXTURES = [family for family in families.MIXTURES if family not in ("olmoe", "minimax_m2")]


@pytest.mark.parametrize(("family", "changes"), [
    *((family, {}) for family in (*families.FAMILIES, *MIXTURES)),
    ("hunyuan_v1_dense", families.FAMILIES["qwen3"])])  # norms behind the rotary embedding
def test_logits_are_transformers(extension, family, changes, tmp_path):
    families.check_logits_on_gpu(
        family, tmp_path,
        lambda hf, case, dtype: llmc.compile(hf, case, target="cuda", dtype=dtype),
        ("float32", "float16", "bfloat16"), **changes)
