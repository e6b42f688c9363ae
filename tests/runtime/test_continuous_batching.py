"""Concurrent requests on models with unusual attention give transformers' tokens.

Requests share prompts, are preempted, or arrive late.
"""

import families
import numpy as np
import pytest
import torch

import llmc

RNG = np.random.default_rng(8)
SYSTEM = RNG.integers(3, families.VOCAB, 18).tolist()
PROMPTS = [(SYSTEM if n % 2 else []) + RNG.integers(3, families.VOCAB, length).tolist()
           for n, length in enumerate((3, 7, 1, 9, 24, 5, 12, 2))]
COUNT = 10


def talkative(family):
    """A model with different output for each prompt."""
    model = families.tiny_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
            elif name.endswith("weight"):  # a norm's
                parameter.add_(1)
    return model


def greedy(model, prompt):
    """Return transformers' greedy tokens."""
    known = list(prompt)
    while len(known) < len(prompt) + COUNT:
        known.append(int(families.reference_logits(model, known)[-1].argmax()))
    return tuple(known[len(prompt):])


@pytest.mark.parametrize("family", [
    "bloom", pytest.param("gemma4_text", marks=pytest.mark.thorough)])
def test_concurrent_requests_with_preemption_get_transformers_tokens(family, tmp_path):
    model = talkative(family)
    cases = families.compile_sizes(families.save(model, tmp_path / "hf"), tmp_path, [1, 2])
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({*expected}) == len(expected)
    params = llmc.SamplingParams(max_tokens=COUNT, ignore_eos=True)
    for case in cases.values():
        with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=7, kv_cache_tokens=48,
                      block_size=4) as llm:
            assert [each.token_ids for each in llm.generate(PROMPTS, params)] == expected
