"""The model families: the logits of the engine beside those of transformers, dtype by dtype."""

import families
import pytest

import llmc


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_are_transformers(extension, family, tmp_path):
    families.check_logits_on_gpu(
        family, tmp_path,
        lambda hf, case, dtype: llmc.compile(hf, case, target="cuda", dtype=dtype),
        ("float32", "float16", "bfloat16"))
