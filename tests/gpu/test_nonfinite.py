"""NaN logits on a GPU fail only their request."""

import pytest

import llmc


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request, extension, nan_hf, tmp_path_factory):
    case = tmp_path_factory.mktemp("cuda") / "case"
    llmc.compile(nan_hf, case, target="cuda", dtype=request.param, allow_nan=True)
    return case


@pytest.mark.parametrize("params", [
    dict(), dict(logprobs=1), dict(temperature=1, seed=1), dict(temperature=1, top_k=3, top_p=0.5),
    dict(repetition_penalty=1.2), dict(guided_choice=["fox"]), dict(beam_width=2),
    dict(prompt_logprobs=1)])
def test_nan_logits_fail_only_their_request(case, params):
    others = llmc.SamplingParams(max_tokens=20, ignore_eos=True)
    with llmc.LLM(case, kv_cache_tokens=512, block_size=16) as llm:
        expected = llm.generate([[5, 6]], others)[0].token_ids
        stream = llm.stream([[5, 6]], others)
        pieces = [next(stream)]
        for _ in range(3):
            with pytest.raises(llmc.LlmcError, match="NaN"):
                llm.generate([[5, 7]], llmc.SamplingParams(max_tokens=20, **params))
        pieces += stream
        assert tuple(piece.token_id for piece in pieces) == expected
        # NaN keys and values of failed requests stay in their blocks, which are reused.
        many = llm.generate([[5, 6]] * 16, others)
        assert {completion.token_ids for completion in many} == {expected}
        assert llm.metrics()["nan_logits"] == 3
