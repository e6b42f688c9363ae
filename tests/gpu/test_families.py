"""The model families: the logits of the engine beside those of transformers, dtype by dtype."""

import families
import numpy as np
import pytest
import torch

import llmc

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTH, PROMPTS = 40, (25, 13)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_are_transformers(extension, family, tmp_path):
    """In 16 bits no further from the float32 truth than twice what transformers is."""
    try:
        hf = families.save(families.tiny_model(family), tmp_path / "hf")
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers has no {family}: {error}")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, (2, LENGTH)).tolist()
    truth = families.logits_on_gpu(hf, tokens, torch.float32)
    span = np.ptp(truth)
    for name, dtype in DTYPES.items():
        llmc.compile(hf, tmp_path / name, target="cuda", dtype=name)
        with llmc.LLM(tmp_path / name) as llm:
            session = llm.session(2)
            rows = [session.extend([t[:n] for t, n in zip(tokens, PROMPTS, strict=True)])]
            for step in range(LENGTH - max(PROMPTS)):
                rows.append(session.extend(
                    [[t[n + step]] for t, n in zip(tokens, PROMPTS, strict=True)]))
        ends = [np.arange(n - 1, n + LENGTH - max(PROMPTS)) for n in PROMPTS]
        ours, exact, theirs = (
            np.stack(rows, 1), *(np.stack([x[i, end] for i, end in enumerate(ends)])
                                 for x in (truth, families.logits_on_gpu(hf, tokens, dtype))))
        allowed = 1e-5 * span if name == "float32" else 2 * np.abs(theirs - exact).max()
        assert np.abs(ours - exact).max() <= allowed, name
