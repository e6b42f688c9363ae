"""Models with a recurrent state on a GPU: completions, preemption and beams equal transformers.
"""

import families
import numpy as np
import pytest

import llmc

RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(3, families.VOCAB, length).tolist()
           for length in (3, 7, 1, 9, 40, 5, 12, 2)]
COUNT = 10


def tokens(count=COUNT, **params):
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True, **params)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5_text", "lfm2", "mamba2"])
def test_concurrent_completions_and_beams(extension, family, tmp_path):
    """In float32; some requests are preempted and recomputed."""
    model = families.tiny_model(family)
    case = tmp_path / "case"
    llmc.compile(families.save(model, tmp_path / "hf"), case, target="cuda")
    expected = [families.greedy(model, prompt, COUNT) for prompt in PROMPTS]
    with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=16, kv_cache_tokens=80,
                  block_size=4) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        made = llm.generate([PROMPTS[5]], tokens(n=3, temperature=1.0, top_k=1))
        assert [own.token_ids for own in made] == [expected[5]] * 3
        best, = llm.generate(PROMPTS[:1], tokens(beam_width=3))
    assert best.token_ids == families.best_of_beams(model, PROMPTS[0], 3, COUNT)
