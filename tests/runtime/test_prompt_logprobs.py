"""Prompt log-probabilities equal transformers' log-softmax for every way of computing a prompt."""

import dataclasses

import numpy as np
import pytest
import torch

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.errors import LlmcError
from llmc.runtime.core.prompt_scores import PromptScores
from llmc.runtime.replica import EngineConfig, cpu_limits
from llmc.runtime.sampling.sampler import Logprobs

LONG = [3 + 7 * index % 290 for index in range(60)]
SHORT = [9, 4, 200, 17]


@pytest.fixture(scope="module")
def llm(case_tp1):
    with llmc.LLM(case_tp1) as own:
        yield own


def expected(model, prompt):
    """float64 [len(prompt) - 1, vocab_size]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).numpy()


def check(model, completion, count):
    first, *others = completion.prompt_logprobs
    prompt = completion.prompt_token_ids
    assert first is None and len(others) == len(prompt) - 1
    for token, own, row in zip(prompt[1:], others, expected(model, [*prompt]), strict=True):
        assert abs(own.chosen - row[token]) < 1e-4
        assert abs(own.rank - 1 - (row > row[token]).sum()) <= (np.abs(row - row[token])
                                                                < 1e-4).sum() - 1
        assert len(own.top) == count
        for other, value in own.top:
            assert abs(value - row[other]) < 1e-4
        np.testing.assert_allclose([value for _, value in own.top],
                                   np.sort(row)[::-1][:count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompt_logprobs_are_transformers_log_softmax(llm, tiny_model, count):
    params = llmc.SamplingParams(prompt_logprobs=count, max_tokens=1)
    for completion in llm.generate([LONG, SHORT, [5]], params):
        check(tiny_model, completion, count)
        assert len(completion.token_ids) == 1 and completion.logprobs is None


def test_a_mixed_batch_gives_the_results_of_each_request_alone(llm, tiny_model):
    prompts = [LONG, LONG[:31], SHORT, LONG[5:], SHORT[::-1]]
    params = [llmc.SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=2),
              llmc.SamplingParams(max_tokens=8),
              llmc.SamplingParams(max_tokens=0, prompt_logprobs=0),
              llmc.SamplingParams(max_tokens=4, beam_width=2, repetition_penalty=1.5),
              llmc.SamplingParams(max_tokens=5, logprobs=1, temperature=1.0, seed=3)]
    for own, completion in zip(params, llm.generate(prompts, params), strict=True):
        alone = llm.generate([[*completion.prompt_token_ids]],
                             dataclasses.replace(own, prompt_logprobs=None))[0]
        assert completion.token_ids == alone.token_ids and completion.text == alone.text
        if own.prompt_logprobs is None:
            assert completion.prompt_logprobs is None
        else:
            check(tiny_model, completion, own.prompt_logprobs)


@pytest.fixture(scope="module")
def small_steps(case_tp2):
    """Steps of few tokens, and blocks for little more than one prompt."""
    with llmc.LLM(case_tp2, max_batch_size=4, max_num_batched_tokens=7, block_size=4,
                  kv_cache_tokens=128) as own:
        yield own


def test_chunks_preemption_and_several_ranks_give_every_row_once(small_steps, tiny_model):
    params = [llmc.SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=count)
              for count in (1, 3, 0, 2)]
    prompts = [LONG[:30], LONG[8:38], LONG[3:29], LONG[:30]]
    for own, completion in zip(params, small_steps.generate(prompts, params), strict=True):
        check(tiny_model, completion, own.prompt_logprobs)
    assert small_steps.metrics()["preemptions"]


def test_a_cached_prefix_is_recomputed_for_prompt_logprobs(llm, tiny_model):
    plain = llmc.SamplingParams(max_tokens=2)
    llm.generate([LONG], plain)
    before = llm.metrics()["cache_hits"]
    completion, = llm.generate([LONG], llmc.SamplingParams(max_tokens=2, prompt_logprobs=1))
    check(tiny_model, completion, 1)
    assert llm.metrics()["cache_hits"] == before
    assert llm.generate([LONG], plain)[0].token_ids == completion.token_ids
    assert llm.metrics()["cache_hits"] > before


def test_n_completions_share_the_rows_of_their_prompt(llm, tiny_model):
    params = llmc.SamplingParams(max_tokens=3, n=3, temperature=1.0, seed=1, prompt_logprobs=1)
    before = llm.metrics()["cache_hits"]
    completions = llm.generate([LONG], params)
    for completion in completions:
        check(tiny_model, completion, 1)
    assert [own.token_ids for own in completions] == [own.token_ids for own in llm.generate(
        [LONG], dataclasses.replace(params, prompt_logprobs=None))]
    assert llm.metrics()["cache_hits"] - before > 2 * 40  # the second and the third have forked


def test_prompt_logprobs_on_all_replicas(case_tp1, tiny_model):
    params = llmc.SamplingParams(max_tokens=1, n=4, temperature=1.0, prompt_logprobs=2)
    with llmc.LLM(case_tp1, device=[0, 1], max_batch_size=2) as llm:
        for completion in llm.generate([SHORT], params):
            check(tiny_model, completion, 2)


def test_more_prompt_logprobs_than_the_vocabulary_are_refused(llm):
    with pytest.raises(LlmcError, match="prompt_logprobs 301 exceeds the vocabulary of 300"):
        llm.generate([SHORT], llmc.SamplingParams(prompt_logprobs=301))


def test_nonfinite_logits_fail_their_request():
    scores = PromptScores([1, 2, 3], 1)
    scores.schedule(0, 3)
    rows = np.array([[0.0, 1.0, 2.0, 3.0], [0.0, np.nan, 1.0, 2.0]], np.float32)
    scores.extend([Logprobs.of_prompt(row, token, 1) for row, token in zip(rows, (2, 3),
                                                                           strict=True)])
    with pytest.raises(LlmcError, match="the logits at position 1 of the prompt are NaN"):
        scores.result()


def test_the_first_chunk_has_the_prompt_logprobs(llm):
    first, *others = llm.stream([SHORT], llmc.SamplingParams(max_tokens=4, prompt_logprobs=1))
    assert len(first.prompt_logprobs) == len(SHORT)
    assert all(piece.prompt_logprobs is None for piece in others)


@pytest.mark.parametrize("params", [{}, {"n": 2, "temperature": 1.0}, {"stop": ["e"]},
                                    {"prompt_logprobs": 1, "logprobs": 1}])
def test_max_tokens_0_computes_only_the_prompt(llm, params):
    before = llm.metrics()["generated_tokens"]
    completions = llm.generate([SHORT], llmc.SamplingParams(max_tokens=0, **params))
    assert len(completions) == params.get("n", 1)
    for own in completions:
        assert (own.token_ids, own.text, own.finish_reason) == ((), "", "length")
        assert own.logprobs is None and (own.prompt_logprobs is None) == (
            "prompt_logprobs" not in params)
    assert llm.metrics()["generated_tokens"] == before


@pytest.mark.parametrize(("vocab_size", "rows"), [(300, 512), (49152, 341), (152064, 110),
                                                  (262144, 64)])
def test_the_number_of_logits_per_step_is_bounded(case_tp1, vocab_size, rows):
    """64 MB of float32, but enough rows to avoid single-token chunks."""
    manifest = read_manifest(case_tp1)
    manifest = manifest.model_copy(update={"dims": manifest.dims.model_copy(
        update={"padded_vocab_size": vocab_size})})
    limits = cpu_limits(manifest, EngineConfig(4, 2048, kv_cache_tokens=64))
    assert limits.max_scored == rows
