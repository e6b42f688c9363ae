"""Whole models with an FP8 KV cache, compared with the NumPy interpreter."""

import families
import numpy as np
import pytest
from schedule_interpreter import Interpreter

import llmc

PROMPTS = [[5, 6, 7], [8] * 40, [9, 10]]
GREEDY = llmc.SamplingParams(max_tokens=12, ignore_eos=True)


def compile(family, tmp_path, **options):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", kv_dtype="float8_e4m3fn", **options)
    return tmp_path / "case"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_tokens_and_logits_equal_the_program_interpreter(extension, family, tmp_path):
    """Prompts, decoding in CUDA graphs, and logits of continued prompts."""
    case = compile(family, tmp_path)
    with llmc.LLM(case) as llm:
        made = llm.generate(PROMPTS, GREEDY)
        logits = llm.logits(PROMPTS[1])
    for prompt, completion in zip(PROMPTS, made, strict=True):
        assert tuple(completion.token_ids) == Interpreter(case).greedy(prompt, 12)
    families.assert_close(logits, Interpreter(case).run(PROMPTS[1], 0), 1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_are_near_the_program_interpreter(extension, dtype, tmp_path):
    case = compile("llama", tmp_path, dtype=dtype)
    with llmc.LLM(case) as llm:
        logits = llm.logits(PROMPTS[1])
        session = llm.session(1)
        session.extend([PROMPTS[1][:-1]])
        step = session.extend([PROMPTS[1][-1:]])
    expected = Interpreter(case).run(PROMPTS[1], 0)
    tolerance = {"float16": 0.02, "bfloat16": 0.1}[dtype]
    families.assert_close(logits, expected, tolerance)
    families.assert_close(step, expected[-1:], tolerance)


def test_beams_share_float8_caches(extension, tmp_path):
    """The score of the best of two beams equals the sum of its tokens' log-probabilities."""
    case = compile("llama", tmp_path)
    with llmc.LLM(case) as llm:
        beams = llm.beam_search(PROMPTS, llmc.SamplingParams(max_tokens=6, beam_width=2,
                                                             ignore_eos=True))
        for row, prompt in enumerate(PROMPTS):
            tokens = beams.output_ids[:6, row, 0].tolist()
            logits = llm.logits([*prompt, *tokens[:-1]])[len(prompt) - 1:].astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            total = chances[np.arange(6), tokens].sum()
            np.testing.assert_allclose(beams.cum_log_probs[row, 0], total, rtol=1e-3)
