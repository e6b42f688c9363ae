"""Models with a recurrent state on a GPU: completions, preemption and beams equal transformers.

Drafts do not change tokens.
"""

import families
import numpy as np
import pytest
from drafting import TestDrafter, assert_verified

import llmc
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.step import SamplingState, Step
from llmc.runtime.sampling.sampler import Sampler

RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(3, families.VOCAB, length).tolist()
           for length in (3, 7, 1, 9, 40, 5, 12, 2)]
COUNT = 10


def tokens(count=COUNT, **params):
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True, **params)


@pytest.fixture(scope="module", params=["falcon_h1", "qwen3_5_text", "lfm2", "mamba2",
                                        "kimi_linear"])
def compiled(extension, request, tmp_path_factory):
    """A model, its case directory, in float32, and transformers' greedy tokens."""
    root = tmp_path_factory.mktemp(request.param)
    model = families.tiny_model(request.param)
    llmc.compile(families.save(model, root / "hf"), root / "case", target="cuda")
    return model, root / "case", [families.greedy(model, prompt, COUNT) for prompt in PROMPTS]


def test_concurrent_completions_and_beams(compiled):
    """Some requests are preempted and recomputed."""
    model, case, expected = compiled
    with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=16, kv_cache_tokens=80,
                  block_size=4) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        made = llm.generate([PROMPTS[5]], tokens(n=3, temperature=1.0, top_k=1))
        assert [own.token_ids for own in made] == [expected[5]] * 3
        best, = llm.generate(PROMPTS[:1], tokens(beam_width=3))
    assert best.token_ids == families.best_of_beams(model, PROMPTS[0], 3, COUNT)


@pytest.mark.parametrize("budget", [2048, 16])  # steps without and with chunks of prompts
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_tokens_do_not_depend_on_drafts(compiled, kind, budget, monkeypatch):
    _, case, expected = compiled
    known = {tuple(prompt): own for prompt, own in zip(PROMPTS, expected, strict=True)}
    monkeypatch.setattr(loop_module, "NgramDrafter", lambda prompt, *_: TestDrafter(
        known[tuple(prompt)], kind, families.VOCAB))
    with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=budget, kv_cache_tokens=96,
                  block_size=4, speculate="ngram", num_speculative_tokens=4) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
        assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected
        made = llm.generate([PROMPTS[5]], tokens(n=3, temperature=1.0, top_k=1))
        assert [own.token_ids for own in made] == [expected[5]] * 3
        metrics = llm.metrics()
    assert_verified(metrics, kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "lfm2"])
def test_drafts_beside_a_long_prompt(extension, family, dtype, tmp_path):
    """Logits of drafts equal those of a prompt, whichever kernels a step takes."""
    lengths = {} if family == "mamba2" else {"max_position_embeddings": 512}
    hf_dir = families.save(families.tiny_model(family, **lengths), tmp_path / "hf")
    llmc.compile(hf_dir, tmp_path / "case", target="cuda", dtype=dtype, max_seq_len=512)
    own, other = (np.random.default_rng(4).integers(3, families.VOCAB, length).tolist()
                  for length in (40, 300))
    state = SamplingState(Sampler(llmc.SamplingParams()))

    def work(scheduler, engine):
        tables = [list(range(32)), list(range(32, 64))]

        def run(made):
            return engine.collect(engine.submit(made)).logits

        run(Step.of([own[:20]], [0], tables[:1], [0], admit={0: state}, logits="sampled"))
        beside = run(Step.of([own[20:24], other], [20, 0], tables, [0, 1], num_drafts=[3, 0],
                             admit={1: state}, logits="sampled"))
        rows = run(Step.of([other[:1], own[21:28]], [300, 21], tables[::-1], [1, 0],
                           num_drafts=[0, 3], num_uncommitted=[0, 3], logits="sampled"))
        after = run(Step.of([own[25:31]], [25], tables[:1], [0], num_drafts=[5],
                            logits="sampled"))
        return beside, rows, after

    with llmc.LLM(tmp_path / "case", max_batch_size=4, speculate="ngram",
                  num_speculative_tokens=5, prefix_reuse=False) as llm:
        beside, rows, after = llm._loops[0].run(work)
        whole, of_other = llm.logits(own), llm.logits([*other, other[0]])
    allowed = {"float32": 1e-3}.get(dtype, 0.15)  # of values up to 3
    np.testing.assert_allclose(beside, [*whole[20:24], of_other[299]], atol=allowed)
    np.testing.assert_allclose(rows, [of_other[300], *whole[24:28]], atol=allowed)
    np.testing.assert_allclose(after, whole[25:31], atol=allowed)
