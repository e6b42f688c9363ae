"""GPU programs of latent attention on interpreters give transformers' tokens.

Requests are concurrent and preempted, share prefixes, or use beams.
"""

import dataclasses

import families
import numpy as np
import pytest
from schedule_interpreter import LIMITS, interpreted

import llmc

RNG = np.random.default_rng(8)
SYSTEM = RNG.integers(3, families.VOCAB, 18).tolist()
PROMPTS = [SYSTEM + RNG.integers(3, families.VOCAB, length).tolist() for length in (3, 7, 5)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_concurrent_requests_shared_prefixes_and_beams_equal_transformers(tp_size, tmp_path):
    model = families.tiny_model("deepseek_v3")
    hf = families.save(model, tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", tp_size=tp_size)
    limits = dataclasses.replace(LIMITS, num_blocks=24, max_tokens=7, max_slots=3)
    with interpreted(tmp_path / "case", limits) as llm:
        for _ in range(2):
            got = llm.generate(PROMPTS, llmc.SamplingParams(max_tokens=6, ignore_eos=True))
            assert [own.token_ids for own in got] == [
                families.greedy(model, prompt, 6) for prompt in PROMPTS]
        assert llm.metrics()["cache_hits"] > 0
        beams = llm.generate(PROMPTS[:1], llmc.SamplingParams(max_tokens=6, ignore_eos=True,
                                                              beam_width=3))
    assert beams[0].token_ids == families.best_of_beams(model, PROMPTS[0], 3, 6)
