"""Latent attention, and chunked attention with queries scaled by position, equal transformers.

The latent cache has one row for all heads, while ranks have some heads; chunks have 8 positions.
Chunked prefill, concurrent requests, beams and shared prefixes give transformers' tokens.
"""

import families
import numpy as np
import pytest

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.inspection import summarize

LATENT, CHUNKED = FAMILIES = ("deepseek_v3", "llama4_text")
RNG = np.random.default_rng(8)
SYSTEM = RNG.integers(3, families.VOCAB, 18).tolist()
PROMPTS = [(SYSTEM if n % 2 else []) + RNG.integers(3, families.VOCAB, length).tolist()
           for n, length in enumerate((3, 7, 24, 9))]
COUNT = 10


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return families.tiny_model(request.param)


@pytest.fixture(scope="module")
def cases(model, tmp_path_factory):
    hf = families.save(model, tmp_path_factory.mktemp("model") / "hf")
    return families.compile_sizes(hf, tmp_path_factory.mktemp("cases"), [1, 3])


@pytest.fixture(params=[1, 3])
def case(cases, request):
    return cases[request.param]


@pytest.fixture(scope="module")
def expected(model):
    return [families.greedy(model, prompt, COUNT) for prompt in PROMPTS]


def tokens(**params):
    return llmc.SamplingParams(max_tokens=COUNT, ignore_eos=True, **params)


@pytest.mark.parametrize("model", [LATENT], indirect=True)
def test_each_rank_caches_all_latents_and_has_some_heads(cases):
    manifest = read_manifest(cases[3])
    assert [chip.num_heads[0] for chip in manifest.chips] == [2, 1, 1]
    for chip in manifest.chips:
        assert [*chip.caches] == ["latent_cache_0", "latent_cache_1", "latent_cache_2"]
        assert {(cache.num_kv_heads, cache.head_dim) for cache in chip.cache} == {(1, 16 + 8)}
    ups = [chip.weight_bytes for chip in manifest.chips]
    assert ups[0] > ups[1]
    assert [chip["token_bytes"] for chip in summarize(manifest)["chips"]] == [3 * 24 * 4] * 3


@pytest.mark.parametrize("block_size", [1, 4])
def test_concurrent_requests_with_preemption_get_transformers_tokens(case, expected, block_size):
    with llmc.LLM(case, max_batch_size=3, max_num_batched_tokens=7, kv_cache_tokens=48,
                  block_size=block_size) as llm:
        got = families.ask_at_once(llm, PROMPTS, lambda index: tokens())
    assert [got[n][0].token_ids for n in range(len(PROMPTS))] == expected


def test_a_shared_prefix_is_computed_once(case, expected):
    with llmc.LLM(case, block_size=4) as llm:
        for _ in range(2):
            assert [own.token_ids for own in llm.generate(PROMPTS, tokens())] == expected
        assert llm.metrics()["cache_hits"] > 0


def test_beams_are_transformers(case, model):
    with llmc.LLM(case, block_size=4) as llm:
        got = llm.generate(PROMPTS[:3], tokens(beam_width=3))
    assert [own.token_ids for own in got] == [
        families.best_of_beams(model, prompt, 3, COUNT) for prompt in PROMPTS[:3]]


def test_a_session_continues_by_several_tokens(case, model):
    with llmc.LLM(case) as llm:
        session = llm.session(2)
        session.extend([PROMPTS[2][:10], PROMPTS[3][:3]])
        got = session.extend([PROMPTS[2][10:], PROMPTS[3][3:]])
    wanted = [families.reference_logits(model, PROMPTS[n])[-1] for n in (2, 3)]
    families.assert_close(got, np.stack(wanted))
