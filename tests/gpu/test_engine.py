"""Whole models on the engine: against transformers, itself, and the CPU target."""

import dataclasses

import families
import numpy as np
import pytest
import torch

import llmc

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTH = 700


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A tiny Llama and its case directories by dtype."""
    directory = tmp_path_factory.mktemp("engine")
    model = families.tiny_model("llama", max_position_embeddings=1024)
    hf = families.save(model, directory / "hf")
    for dtype in DTYPES:
        llmc.compile(hf, directory / dtype, target="cuda", dtype=dtype, max_seq_len=LENGTH)
    llmc.compile(hf, directory / "cpu", max_seq_len=LENGTH)
    return directory


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_continues_what_a_prompt_began(extension, compiled, dtype):
    """Long enough that attention divides a sequence among blocks."""
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, LENGTH).tolist()
    with llmc.LLM(compiled / dtype) as llm:
        expected = llm.logits(tokens)
        session = llm.session(2)
        session.extend([tokens[:30], tokens[:17]])
        worst = 0.0
        for past in range(30, LENGTH):
            rows = session.extend([[tokens[past]], [tokens[past - 13]]])
            worst = max(worst, np.abs(rows - expected[[past, past - 13]]).max())
    assert worst <= {"float32": 1e-5, "float16": 6e-3, "bfloat16": 5e-2}[dtype] * np.ptp(expected)


@pytest.mark.parametrize(("check_step", "skip_step"), [(1, 0), (7, 0), (64, 0), (4, 30)])
@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.8, top_k=40, top_p=0.9, seed=5)],
                         ids=["greedy", "sampled"])
def test_tokens_are_the_cpu_target_s_for_every_setting(extension, compiled, check_step, skip_step,
                                                       sampling):
    prompts = [[5, 6, 7], [8] * 40, [9, 10]]
    params = llmc.SamplingParams(max_tokens=50, ignore_eos=True, **sampling)
    with llmc.LLM(compiled / "cpu") as llm:
        expected = llm.generate(prompts, params)
        end = expected[0].token_ids[20]
    with llmc.LLM(compiled / "float32", check_step=check_step, skip_step=skip_step,
                  max_batch_size=2) as llm:
        assert llm.generate(prompts, params) == expected
        object.__setattr__(llm.manifest.tokenizer, "eos_token_ids", (end,))
        ending = dataclasses.replace(params, ignore_eos=False)
        for result, whole in zip(llm.generate(prompts, ending), expected, strict=True):
            wanted = list(whole.token_ids)
            stop = wanted.index(end) + 1 if end in wanted else len(wanted)
            assert list(result.token_ids) == wanted[:stop]


def test_too_little_memory_is_said_in_numbers(extension, compiled):
    with pytest.raises(llmc.LlmcError, match=r"no device memory for .*: \d+ MiB are needed"):
        llmc.LLM(compiled / "float32", max_batch_size=10**7)
