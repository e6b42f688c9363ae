"""Prompt log-probabilities on a GPU equal transformers' log-softmax."""

import numpy as np
import pytest
import torch

import llmc

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(3, 290, length).tolist() for length in (50, 1, 7, 33, 2, 18)]


@pytest.fixture(scope="module")
def case(extension, tiny_hf, tmp_path_factory):
    case = tmp_path_factory.mktemp("cuda") / "case"
    llmc.compile(tiny_hf, case, target="cuda", dtype="float32")
    return case


@pytest.mark.parametrize("options", [
    {}, {"max_batch_size": 2, "max_num_batched_tokens": 5, "block_size": 4}, {"check_step": 6}])
def test_prompt_logprobs_are_transformers_log_softmax(case, tiny_model, options):
    params = [llmc.SamplingParams(max_tokens=index % 3 * 3, prompt_logprobs=count, logprobs=1)
              for index, count in enumerate((0, 1, 5, 20, 3, None))]
    with llmc.LLM(case, **options) as llm:
        for own, completion in zip(params, llm.generate(PROMPTS, params), strict=True):
            if own.prompt_logprobs is None:
                assert completion.prompt_logprobs is None
            else:
                check(tiny_model, completion, own.prompt_logprobs)


def check(model, completion, count):
    prompt = [*completion.prompt_token_ids]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].double(), -1).numpy()
    first, *others = completion.prompt_logprobs
    assert first is None
    for token, own, row in zip(prompt[1:], others, rows, strict=True):
        assert abs(own.chosen - row[token]) < 1e-3
        near = (np.abs(row - row[token]) < 2e-3).sum() - 1
        assert abs(own.rank - 1 - (row > row[token]).sum()) <= near
        np.testing.assert_allclose([value for _, value in own.top], np.sort(row)[::-1][:count],
                                   rtol=0, atol=1e-3)
