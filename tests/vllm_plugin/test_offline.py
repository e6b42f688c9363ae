"""`vllm.LLM(CASE_DIR)`: llmc computes vLLM's schedules."""

import json
import math
import re

import pytest
import vllm
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm_cases import assert_own, case, own

MAX_TOKENS = 24
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                                 "prompt_lookup_min": 1, "prompt_lookup_max": 4}}


def load(tp_size=1, **options):
    return vllm.LLM(str(case(tp_size)), max_model_len=512, disable_log_stats=False, **options)


@pytest.fixture(scope="module")
def llm():
    llm = load(max_num_seqs=8)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def drafting():
    llm = load(max_num_seqs=8, max_num_batched_tokens=64, **DRAFTS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def both(llm, drafting):
    """vLLM without drafts and with drafts."""
    return llm, drafting


def ids(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy(llm, prompts, **wishes):
    wishes = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **wishes}
    return [list(made.outputs[0].token_ids)
            for made in llm.generate(ids(prompts), SamplingParams(**wishes), use_tqdm=False)]


def metric(llm, name, field="value"):
    return next(getattr(own, field) for own in llm.get_metrics() if own.name == name)


def test_tokens_equal_those_of_llmc(llm, prompts):
    assert_own(1, prompts, greedy(llm, prompts), MAX_TOKENS)


def test_vllm_counts_the_accepted_drafts(drafting):
    repeated = [[500 + i, 600 + i, 700 + i] * 5 for i in range(4)]
    before = {name: metric(drafting, f"vllm:spec_decode_num_{name}")
              for name in ("drafts", "draft_tokens", "accepted_tokens")}
    made = greedy(drafting, repeated)
    drafts, tokens, accepted = (metric(drafting, f"vllm:spec_decode_num_{name}") - value
                                for name, value in before.items())
    assert 0 < accepted <= tokens <= 4 * drafts
    assert drafts + accepted <= sum(map(len, made)) + 4 * len(made)
    assert sum(metric(drafting, "vllm:spec_decode_num_accepted_tokens_per_pos", "values")) == \
        before["accepted_tokens"] + accepted


def test_a_cached_prompt_whose_drafts_vllm_pads_has_the_same_tokens(drafting, prompts):
    prompt = [9, *prompts[5][:176]]  # all but the last token are full blocks
    first, again = (drafting.generate(ids([prompt]), SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0), use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == len(prompt) - 1
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("ahead", [False, True])
def test_two_workers_run_two_chips_and_their_tokens_are_llmc_s_own(prompts, ahead):
    llm = load(2, max_num_batched_tokens=64, max_num_seqs=4, async_scheduling=ahead)
    try:
        assert llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size == 2
        assert_own(2, prompts, greedy(llm, prompts), MAX_TOKENS)
    finally:
        llm.llm_engine.engine_core.shutdown()


SAMPLED = [
    dict(temperature=0.9), dict(temperature=0.7, top_k=20, top_p=0.9),
    dict(temperature=1.1, min_p=0.05), dict(repetition_penalty=1.3),
    dict(presence_penalty=1.5, frequency_penalty=0.7), dict(logit_bias={500: 12.0, 30: -50.0}),
    dict(min_tokens=MAX_TOKENS), dict(temperature=0.8, repetition_penalty=1.1, logit_bias={9: 5})]


def test_sampling_parameters_and_seeds_mean_what_they_mean_to_llmc(both, prompts):
    pairs = [(prompt, wish) for prompt in prompts[2:4] for wish in SAMPLED]
    wanted = own(1, [{"token_ids": prompt, "max_tokens": MAX_TOKENS, "seed": 7, **wish}
                     for prompt, wish in pairs])
    for llm in both:
        made = llm.generate(ids([prompt for prompt, _ in pairs]), [
            SamplingParams(max_tokens=MAX_TOKENS, seed=7, **{"temperature": 0, **wish})
            for _, wish in pairs], use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in made] == \
            [one["token_ids"] for one in wanted]


def test_bad_words_are_not_generated(both, prompts):
    word = both[0].get_tokenizer().decode(greedy(both[0], prompts[3:4])[0][1:2])
    plain, drafted = (llm.generate(ids(prompts[3:4]), SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, bad_words=[word]), use_tqdm=False)[0].outputs[0]
        for llm in both)
    assert word not in plain.text
    assert drafted.token_ids == plain.token_ids


def test_without_a_seed_runs_differ_from_request_to_request(llm, prompts):
    wish = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, n=3)
    (made,) = llm.generate(ids(prompts[3:4]), wish, use_tqdm=False)
    assert len({tuple(own.token_ids) for own in made.outputs}) == 3


def test_a_prompt_that_was_there_is_not_computed_again(llm, prompts):
    prompt = [7, *prompts[5]]
    first, again = (llm.generate(ids([prompt]), SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0), use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(("tp_size", "how"), [
    (1, dict(async_scheduling=False)), (1, dict(async_scheduling=True)),
    (2, {"speculative_config": DRAFTS["speculative_config"] | {
        "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 8, 2]]}})],
    ids=["in_turn", "ahead", "drafts"])
def test_prompts_are_read_in_chunks_and_who_is_preempted_gets_the_same_tokens(prompts, tp_size,
                                                                              how):
    longer = 48
    llm = load(tp_size, num_gpu_blocks_override=40, max_num_batched_tokens=32, max_num_seqs=8,
               enable_prefix_caching=False, **how)
    try:
        assert_own(tp_size, prompts, greedy(llm, prompts, max_tokens=longer), longer)
        assert metric(llm, "vllm:num_preemptions") > 0
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_the_compiled_draft_model_drafts(prompts):
    llm = load("draft", max_num_seqs=4, max_num_batched_tokens=48, speculative_config={
        "method": "draft", "num_speculative_tokens": 3})
    try:
        assert_own("draft", prompts, greedy(llm, prompts), MAX_TOKENS)
        drafts = metric(llm, "vllm:spec_decode_num_draft_tokens")
        # The draft model is the model.
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0.9 * drafts > 100
    finally:
        llm.llm_engine.engine_core.shutdown()


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                           "age": {"type": "integer", "minimum": 0,
                                                   "maximum": 120}},
          "required": ["name", "age"], "additionalProperties": False}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_structured_output_follows_its_grammar_beside_free_text(both, temperature):
    guides = [dict(json=SCHEMA), dict(regex=r"(\d{3}-\d{4} ){4}"),
              dict(choice=["red", "green"]), None]
    made, drafted = (llm.generate(["Describe a person:"] * 4, [
        SamplingParams(max_tokens=60, temperature=temperature, seed=1, structured_outputs=None
                       if guide is None else StructuredOutputsParams(**guide))
        for guide in guides], use_tqdm=False) for llm in both)
    assert [one.outputs[0].token_ids for one in drafted] == \
        [one.outputs[0].token_ids for one in made]
    person, number, colour, free = [one.outputs[0].text for one in made]
    assert set(json.loads(person)) == {"name", "age"}
    assert re.fullmatch(r"(\d{3}-\d{4} ){4}", number)
    assert colour in ("red", "green")
    assert len(made[3].outputs[0].token_ids) == 60 or free


def test_allowed_tokens_are_the_only_ones(llm, prompts):
    allowed = [31, 500, 4000, 49151]
    assert {token for tokens in greedy(llm, prompts[:3], allowed_token_ids=allowed)
            for token in tokens} <= set(allowed)


def test_logprobs_are_llmc_s_own_and_ranks_count_what_is_likelier(both, prompts):
    begins, wish = [prompts[3], [500, 600, 700] * 8], {"max_tokens": 12, "seed": 3, "logprobs": 4}
    wishes = [{**wish, "temperature": temperature} for temperature in (1.0, 0.5)]
    wanted = own(1, [{"token_ids": prompt, **own_wish}
                     for prompt, own_wish in zip(begins, wishes, strict=True)])
    for llm in both:
        other, *made = llm.generate(ids([prompts[4], *begins]), [
            SamplingParams(max_tokens=12, temperature=0), *(SamplingParams(**w) for w in wishes)],
            use_tqdm=False)
        assert other.outputs[0].logprobs is None
        for one, truth in zip(made, wanted, strict=True):
            assert list(one.outputs[0].token_ids) == truth["token_ids"]
            for place in zip(truth["token_ids"], one.outputs[0].logprobs, truth["logprobs"],
                             strict=True):
                assert_logprobs(*place)


def assert_logprobs(token, found, truth):
    top = dict(map(tuple, truth["top"]))
    assert found[token].logprob == pytest.approx(truth["chosen"], abs=1e-4)
    assert {key: value.logprob for key, value in found.items() if key in top} == \
        pytest.approx(top, abs=1e-4)
    likelier = [key for key, value in found.items() if value.logprob > found[token].logprob]
    assert found[token].rank == len(likelier) + 1 or found[token].rank > 4
    assert sum(math.exp(value.logprob) for value in found.values()) <= 1 + 1e-5


@pytest.mark.parametrize(("wish", "said"), [
    (dict(prompt_logprobs=0), "prompt_logprobs is not supported for a model compiled by llmc"),
    (dict(logprob_token_ids=[3]), "logprob_token_ids is not supported"),
    (dict(extra_args={"a": 1}), "extra_args is not supported"),
    (dict(allowed_token_ids=[3], min_tokens=2), "min_tokens cannot be combined with allowed"),
    (dict(structured_outputs=StructuredOutputsParams(choice=["a"]), bad_words=["a"]),
     "bad_words cannot be combined with structured_outputs"),
    (dict(repetition_penalty=2000.0), "repetition_penalty 2000.0 is not from 0.001 to 1000"),
])
def test_what_a_request_cannot_have_is_refused_by_name(llm, wish, said):
    with pytest.raises(VLLMValidationError, match=re.escape(said)):
        llm.generate("a", SamplingParams(**wish), use_tqdm=False)
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)


def test_beam_search_of_vllm_s_own_runs(llm):
    from vllm.sampling_params import BeamSearchParams

    (made,) = llm.beam_search([{"prompt": "The capital of France is"}],
                              BeamSearchParams(beam_width=3, max_tokens=5))
    assert len(made.sequences) == 3
