"""Input validation: invalid prompts, parameters and arguments are errors before any work."""

import dataclasses
import itertools
import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmc
from llmc import LlmcError, SamplingParams
from llmc.runtime.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def llm(case_tp1):
    with llmc.LLM(case_tp1, max_batch_size=4) as loaded:
        yield loaded


def tokens(count, **params):
    return SamplingParams(max_tokens=count, ignore_eos=True, **params)


@pytest.mark.parametrize("prompt", [
    (5, 6, 7), range(5, 8), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8),
    [np.int32(5), np.int64(6), 7], torch.tensor([5, 6, 7])])
def test_token_ids_may_be_any_integer_sequence(llm, prompt):
    expected = llm.generate([[5, 6, 7]], tokens(3))
    assert llm.generate(prompt, tokens(3)) == expected
    assert llm.generate([prompt], tokens(3)) == expected
    assert expected[0].prompt_token_ids == (5, 6, 7)


def test_prompts_may_be_any_sequence(llm):
    expected = [c.token_ids for c in llm.generate([[5, 6], [7, 8]], tokens(3))]
    for prompts in (([5, 6], [7, 8]), np.array([[5, 6], [7, 8]]), iter([[5, 6], (7, 8)]),
                    [np.array([5, 6]), [7, 8]]):
        assert [c.token_ids for c in llm.generate(prompts, tokens(3))] == expected
    assert llm.generate([]) == []


@pytest.mark.parametrize(("prompts", "message"), [
    ([[1.5, 2.0]], "prompt 0 has 1.5 in place of a token id; give whole numbers"),
    ([1.5, 2.0], "the prompt has 1.5 in place of a token id; give whole numbers"),
    ([[1, True]], "prompt 0 has True in place of a token id; give whole numbers"),
    ([[5], np.array([1.0])], "prompt 1 has 1.0 in place of a token id; give whole numbers"),
    ([[[5]]], "prompt 0 has [5] in place of a token id; give whole numbers"),
    ([["the"]], "prompt 0 has 'the' in place of a token id; give whole numbers"),
    ([b"abc"], "prompt 0 is b'abc'; give a list of token ids"),
    (b"abc", "prompts is b'abc'; give a text, a list of token ids, or a list of such prompts"),
    (["the", None], "prompt 1 is None; give a list of token ids"),
    (None, "prompts is None; give a text, a list of token ids, or a list of such prompts"),
    (3, "prompts is 3; give a text, a list of token ids, or a list of such prompts"),
    ({"text": "the"}, "the prompt has the keys 'text'; give 'prompt' with a text or "
                      "'prompt_token_ids', each with or without 'images' and 'audio', or "
                      "'prompt_embeds' with or without 'prompt_token_ids'"),
    ({"prompt": "the", "images": "a.png"}, "images of the prompt is 'a.png'; give a list"),
    ({5, 6}, "prompts is {5, 6}; give a text, a list of token ids, or a list of such prompts"),
    ([{"prompt_token_ids": "the"}], "prompt_token_ids of prompt 0 is 'the'; give a list of token "
                                    "ids"),
    ([[-1]], "token id -1 is not in the vocabulary of 300"),
    ([[300]], "token id 300 is not in the vocabulary of 300"),
    ([[10**30]], "token id 1000000000000000000000000000000 is not in the vocabulary of 300"),
    ([[]], "the prompt is empty; give at least one token"),
    (["the", ""], "the prompt is empty; give at least one token"),
    ("\ud800", "a prompt is not valid Unicode; write it as UTF-8"),
])
def test_an_invalid_prompt_is_refused(llm, prompts, message):
    for work in (llm.generate, llm.stream, llm.complete):  # before the first token
        with pytest.raises(LlmcError) as error:
            work(prompts)
        assert str(error.value) == message


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(max_tokens="4"), "max_tokens is '4'; give a whole number"),
    (dict(max_tokens=4.0), "max_tokens is 4.0; give a whole number"),
    (dict(max_tokens=True), "max_tokens is True; give a whole number"),
    (dict(max_tokens=None), "max_tokens is None; give a whole number"),
    (dict(top_k=10**5000), "top_k is a number of many digits; give a whole number below 2^64"),
    (dict(seed="1"), "seed is '1'; give a whole number, or None"),
    (dict(end_id=1.5), "end_id is 1.5; give a whole number, or None"),
    (dict(logprobs=False), "logprobs is False; give a whole number, or None"),
    (dict(temperature="hot"), "temperature is 'hot'; give a number"),
    (dict(temperature=True), "temperature is True; give a number"),
    (dict(top_p=[0.9]), "top_p is [0.9]; give a number"),
    (dict(ignore_eos=1), "ignore_eos is 1; give True or False"),
    (dict(stop=3), "stop is 3; give a text, or a list of texts"),
    (dict(stop=[b"x"]), "stop is [b'x']; give a text, or a list of texts"),
    (dict(stop=["\ud800"]), r"stop is ['\ud800']; give a text that is valid Unicode"),
    (dict(bad_words=[[1.5]]),
     "bad_words is [[1.5]]; give a text, or a list of texts and lists of token ids"),
    (dict(bad_words={"a": 1}),
     "bad_words is {'a': 1}; give a text, or a list of texts and lists of token ids"),
    (dict(logit_bias={"5": 1.0}),
     "logit_bias is {'5': 1.0}; give numbers by token id, such as {42: -1.5}"),
    (dict(logit_bias={5: "1"}),
     "logit_bias is {5: '1'}; give numbers by token id, such as {42: -1.5}"),
    (dict(logit_bias=[5]), "logit_bias is [5]; give numbers by token id, such as {42: -1.5}"),
    (dict(early_stopping="soon"), "early_stopping is 'soon'; give False, True or 'never'"),
    (dict(early_stopping=1), "early_stopping is 1; give False, True or 'never'"),
    (dict(presence_penalty=math.nan), "presence_penalty nan is not from -2 to 2; 0 is none"),
    (dict(repetition_penalty=1e-40),
     "repetition_penalty 1e-40 is not from 0.001 to 1000; 1 is none"),
    (dict(diversity_rate=math.inf), "diversity_rate inf is not from 0 to 1000000; 0 is none"),
    (dict(logit_bias={5: 1e39}),
     "the logit_bias 1e+39 of token 5 is neither a number of float32 nor -inf, which forbids it"),
    (dict(n=10**6, temperature=1.0), "n 1000000 is not from 1 to 65536"),
    (dict(logprobs=1001), "logprobs 1001 exceeds 1000; ask for fewer"),
    (dict(bad_words=["a"] * 1025), "bad_words has 1025 words; give at most 1024"),
    (dict(bad_words=["é" * 5000, [5] * 6385]),
     "bad_words has 16385 bytes and token ids in all; give at most 16384"),
    (dict(logit_bias=dict.fromkeys(range(16385), 1.0)),
     "logit_bias has 16385 tokens; give at most 16384, or a guided_grammar of what is allowed"),
])
def test_an_invalid_parameter_is_refused(arguments, message):
    with pytest.raises(LlmcError) as error:
        SamplingParams(**arguments)
    assert str(error.value) == message


def test_numpy_scalars_are_accepted_as_numbers():
    params = SamplingParams(
        max_tokens=np.int64(4), temperature=np.float32(0.5), top_p=1, ignore_eos=np.bool_(True),
        stop=np.array(["a", "b"]), bad_words=[np.array([1, 2])],
        logit_bias={np.int32(5): np.int8(1)})
    assert params == SamplingParams(max_tokens=4, temperature=0.5, ignore_eos=True,
                                    stop=["a", "b"], bad_words=[[1, 2]], logit_bias={5: 1.0})
    assert {type(getattr(params, name)) for name in ("max_tokens", "temperature", "top_p",
                                                     "ignore_eos")} == {int, float, bool}
    assert all(type(token) is int for token in params.bad_words[0])


def test_help_describes_every_field():
    shown = " ".join((SamplingParams.__doc__ or "").split())
    for field in dataclasses.fields(SamplingParams):
        assert f" {field.name}: " in shown
    assert max(map(len, (SamplingParams.__doc__ or "").splitlines())) <= 100


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(device="0"), "device is '0'; give a list of numbers such as [0, 1]"),
    (dict(device=0), "device is 0; give a list of numbers such as [0, 1]"),
    (dict(device=["0"]), "device is ['0']; give a list of numbers such as [0, 1]"),
    (dict(device=[True]), "device is [True]; give a list of numbers such as [0, 1]"),
    (dict(max_batch_size="4"), "max_batch_size is '4'; give a whole number"),
    (dict(max_batch_size=2.0), "max_batch_size is 2.0; give a whole number"),
    (dict(max_batch_size=0), "max_batch_size 0 is below 1; give 1 or more"),
    (dict(max_batch_size=10**7),
     "max_batch_size 10000000 is above 65536; give at most that, further sequences wait"),
    (dict(check_step=None), "check_step is None; give a whole number"),
    (dict(check_step=0), "check_step 0 is below 1; give 1 or more"),
    (dict(skip_step=-1), "skip_step -1 is below 0; give 0 or more"),
])
def test_an_invalid_model_argument_is_refused(case_tp1, arguments, message):
    with pytest.raises(LlmcError) as error:
        llmc.LLM(case_tp1, **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("case_dir", [None, 3, b"case", ["case"]])
def test_an_invalid_path_is_refused(case_dir):
    with pytest.raises(LlmcError, match="^case_dir is .*; give the output directory of `llmc"):
        llmc.LLM(case_dir)


@pytest.mark.parametrize(("work", "message"), [
    (lambda llm: llm.logits("text"), "token_ids is 'text'; give a list of token ids"),
    (lambda llm: llm.logits([5.0]),
     "token_ids has 5.0 in place of a token id; give whole numbers"),
    (lambda llm: llm.logits([]), "the prompt is empty; give at least one token"),
    (lambda llm: llm.session("2"), "batch_size is '2'; give a whole number"),
    (lambda llm: llm.session(9), "batch_size 9 is not from 1 to max_batch_size 4"),
    (lambda llm: llm.session(2).extend([[5]]),
     "there are 1 rows for batch_size 2; give one for each sequence"),
    (lambda llm: llm.session(2).extend([5, 6]), "row 0 is 5; give a list of token ids"),
    (lambda llm: llm.session(1).extend(5),
     "rows is 5; give a list of token ids for each sequence"),
    (lambda llm: llm.session(1).extend([[]]), "the prompt is empty; give at least one token"),
    (lambda llm: llm.generate("the", {"max_tokens": 3}),
     "params is {'max_tokens': 3}; give SamplingParams(…), or one for each prompt"),
    (lambda llm: llm.generate("the", [None]),
     "params is [None]; give SamplingParams(…), or one for each prompt"),
    (lambda llm: llm.beam_search(None, SamplingParams(beam_width=2)),
     "prompts is None; give a text, a list of token ids, or a list of such prompts"),
    (lambda llm: llm.chat_prompt(3),
     'messages is 3; give a list like [{"role": "user", "content": "…"}]'),
])
def test_an_invalid_method_argument_is_refused(llm, work, message):
    with pytest.raises(LlmcError) as error:
        work(llm)
    assert str(error.value) == message
    assert llm.generate([[5]], tokens(1))


def test_a_closed_model_says_so(case_tp1):
    llm = llmc.LLM(case_tp1)
    session = llm.session(1)
    llm.close()
    llm.close()
    for work in (lambda: llm.generate("the"), lambda: next(llm.stream("the")),
                 lambda: llm.logits([5]), lambda: session.extend([[5]]),
                 lambda: llm.beam_search("the", SamplingParams(beam_width=2))):
        with pytest.raises(LlmcError, match="^this LLM is closed$"):
            work()


NUMBERS = st.integers(-2, 70) | st.integers() | st.floats() | st.floats(0, 1)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | st.binary(max_size=3) | \
    st.just("\ud800")
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4)
                      | st.dictionaries(st.text(max_size=3) | st.integers(0, 400), inner,
                                        max_size=3), max_leaves=6)
TOKEN_IDS = st.lists(st.integers(0, 299), max_size=6)
PARAMS = st.fixed_dictionaries({}, optional={
    field.name: VALUES | NUMBERS for field in dataclasses.fields(SamplingParams)})


@settings(deadline=None, max_examples=200,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=VALUES | TOKEN_IDS | st.lists(TOKEN_IDS | st.text(max_size=4), max_size=3),
       params=PARAMS | st.just({}))
def test_any_value_gives_a_completion_or_an_llmc_error(llm, prompts, params):
    try:
        for piece in itertools.islice(llm.stream(prompts, SamplingParams(**params)), 8):
            assert 0 <= piece.token_id < 300
    except LlmcError as error:
        assert "\n" not in str(error)


def test_sequences_are_created_when_a_row_is_free(llm, monkeypatch):
    """For n completions and many prompts, sequences exist for the slots and one more.

    A caller that does not read gets no more.
    """
    made = []
    monkeypatch.setattr("llmc.runtime.core.request.Sampler",
                        lambda *arguments: made.append(1) or Sampler(*arguments))
    monkeypatch.setattr("llmc.runtime.core.loop._UNREAD_IN_ALL", 3)
    for prompts, count in (([[5]], 2**16), ([[5]] * 200, 1)):
        made.clear()
        stream = llm.stream(prompts, tokens(1, n=count, temperature=1.0))
        next(stream)
        time.sleep(0.1)
        # A step adds 4 tokens to fewer than 3 unread ones; these were taken, these kept,
        # and then those in slots and the next one.
        assert 1 < len(made) <= 2 * (2 + 4) + 4 + 1
        assert next(stream)
        stream.close()


def test_a_waiting_prompt_takes_little_memory(llm):
    llm.stream([[5]] * 10, tokens(1))
    tracemalloc.start()
    stream = llm.stream([[5, 6, 7]] * 20_000, tokens(1))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 420 * 20_000 and peak < 800 * 20_000
    stream.close()
