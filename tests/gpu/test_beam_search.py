"""Beam search on GPUs: the sequences, parents and scores of transformers."""

from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from beams import PROMPTS, assert_equal, search
from families import end_with

import llmc
from llmc.runtime.sampling.beam_search import log_softmax

KINDS = ["llama", "gpt2", "gemma2", "qwen3", "gpt_neox"]
LENGTH = 700
TOLERANCE = 1e-4  # of scores


def compile_tiny(kind, directory, targets=("cuda",), **changes):
    """Compile a tiny model to float32 case directories."""
    model = families.tiny_model(kind, **changes)
    hf = families.save(model, directory / "hf")
    for target in targets:
        llmc.compile(hf, directory / target, target=target,
                     max_seq_len=changes.get("max_position_embeddings"))
    return model


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A tiny Llama for prompts long enough for split-KV attention."""
    directory = tmp_path_factory.mktemp("long")
    model = compile_tiny("llama", directory, ("cpu", "cuda"), max_position_embeddings=LENGTH)
    for dtype in ("float16", "bfloat16"):
        llmc.compile(directory / "hf", directory / dtype, target="cuda", dtype=dtype)
    return directory, model


@pytest.fixture(scope="module")
def llm(extension, long):
    with llmc.LLM(long[0] / "cuda", max_batch_size=24) as loaded:
        yield loaded


@pytest.mark.parametrize("kind", KINDS)
def test_families_find_transformers_beams(extension, kind, tmp_path, monkeypatch):
    model = compile_tiny(kind, tmp_path)
    with llmc.LLM(tmp_path / "cuda", max_batch_size=24) as llm:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            prompts = [rng.integers(3, 101, rng.integers(1, 10)).tolist()
                       for _ in range([1, 3][seed % 2])]
            params = search(int(rng.choice([2, 4])), int(rng.integers(5, 16)),
                            length_penalty=float(rng.choice([1.0, 0.0, -1.0, 2.0])),
                            early_stopping=[False, True, "never"][seed % 3])
            plain = llm.beam_search(prompts, replace(params, ignore_eos=True)).output_ids
            ends = sorted({int(t) for t in rng.choice(plain.reshape(-1), rng.integers(0, 4))})
            end_with(llm, monkeypatch, ends)
            assert_equal(llm, model, prompts, params, ends, TOLERANCE)


@pytest.mark.parametrize("beam_width", [2, 4, 8])
def test_long_prompts_of_different_lengths(long, llm, beam_width):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 101, length).tolist() for length in (330, 3, 150)]
    assert_equal(llm, long[1], prompts, search(beam_width, 40, ignore_eos=True), (), TOLERANCE)


def test_consecutive_searches_may_differ_in_size(long, llm, monkeypatch):
    """Each has a separate CUDA graph; many EOS tokens need more candidates."""
    for ends, width, prompts in (((), 2, 3), ((), 4, 1), (range(40, 60), 8, 2), ((), 2, 3),
                                 ((7,), 4, 1), (range(40, 60), 8, 3)):
        end_with(llm, monkeypatch, ends)
        assert_equal(llm, long[1], PROMPTS[:prompts], search(width, 10), list(ends),
                     TOLERANCE)


def test_greedy_and_sampled_requests_between_searches(long, llm):
    """Device state of decoding does not affect a search, nor the reverse."""
    requests = [search(4, 9, ignore_eos=True), llmc.SamplingParams(max_tokens=20, ignore_eos=True),
                llmc.SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)]
    with llmc.LLM(long[0] / "cpu", max_batch_size=24) as host:
        expected = host.generate(PROMPTS, requests)
    for _ in range(3):
        assert llm.generate(PROMPTS, requests) == expected


def test_a_search_may_fill_the_cache(long, llm):
    full, short = [5] * (LENGTH - 4), [7, 8]
    beams = llm.beam_search([full, short], search(4, 30, ignore_eos=True))
    assert beams.sequence_length.tolist() == [[5] * 4, [30] * 4]
    for b, (prompt, length) in enumerate(((full, 5), (short, 30))):
        alone = assert_equal(llm, long[1], [prompt], search(4, length, ignore_eos=True), (),
                             TOLERANCE)
        np.testing.assert_allclose(beams.scores[b], alone.scores[0], rtol=TOLERANCE)


def test_processed_scores_are_computed_on_the_host(long, llm):
    params = search(4, 12, repetition_penalty=1.3, bad_words=[[7], [41, 36]], logit_bias={9: 1.5},
                    ignore_eos=True)
    assert_equal(llm, long[1], PROMPTS, params, (), TOLERANCE, repetition_penalty=1.3,
                 bad_words_ids=[[7], [41, 36]], sequence_bias={(9,): 1.5})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_16_bits_a_beam_s_score_is_that_of_its_tokens(extension, long, dtype):
    """Recomputed without beams: another row's KV cache would give other log-probabilities."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 101, length).tolist() for length in (300, 40)]
    with llmc.LLM(long[0] / dtype, max_batch_size=8) as llm:
        beams = llm.beam_search(prompts, search(4, 40, ignore_eos=True))
        for b, prompt in enumerate(prompts):
            for k in range(4):
                tokens = beams.output_ids[:40, b, k].tolist()
                logits = llm.logits(prompt + tokens)[len(prompt) - 1:-1]
                each = log_softmax(logits)[np.arange(40), tokens]
                near = {"float16": 2e-3, "bfloat16": 2e-2}[dtype] * np.ptp(logits) * 40**0.5
                assert abs(beams.cum_log_probs[b, k] - each.sum()) <= near, \
                    f"prompt {b}, beam {k}: {beams.cum_log_probs[b, k]}, read anew {each.sum()}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_two_ranks_find_the_same_beams(extension, long, tmp_path):
    llmc.compile(long[0] / "hf", tmp_path / "tp2", target="cuda", tp_size=2)
    with llmc.LLM(tmp_path / "tp2", max_batch_size=12) as llm:
        for _ in range(2):
            assert_equal(llm, long[1], PROMPTS, search(4, 16, ignore_eos=True), (), TOLERANCE)
