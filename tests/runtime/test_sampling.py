"""Logits processors and filters equal transformers'; samples follow the distribution."""

import dataclasses
import inspect
import math
import pydoc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chisquare
from transformers.generation import logits_process as hf

import llmc
from llmc.runtime.sampling import logits_processors
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.beam_search import log_softmax as log_softmax_rows
from llmc.runtime.sampling.sampler import (
    Logprobs,
    NonFiniteLogits,
    Sampler,
    SamplingParams,
    probabilities,
)

VOCAB = 24
# A grid, so that logits are often equal and never nearly equal.
GRID = st.integers(-320, 320).map(lambda n: n / 16)
ROWS = hnp.arrays(np.float32, VOCAB, elements=st.one_of(GRID, st.just(-math.inf))) \
    .filter(lambda row: row.max() > -math.inf)
FLOATS = hnp.arrays(np.float32, VOCAB, elements=st.floats(-50, 50, width=32))
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
SHARES = st.floats(0.01, 0.99)
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def theirs(processor, scores, context=()):
    """Return a row after a processor of transformers."""
    ids = torch.tensor([context], dtype=torch.int64)
    return processor(ids, torch.from_numpy(scores.copy())[None])[0].numpy()


def cut(scores, kept):
    """Return the row with all but the kept tokens masked."""
    result = np.full_like(scores, -np.inf)
    result[kept] = scores[kept]
    return result


def log_softmax(scores):
    shifted = scores - scores.max()
    return shifted - math.log(np.exp(shifted).sum())


def no_edge(sums, mass):
    """Assume that no cumulative probability is within rounding of the limit."""
    assume(np.abs(np.cumsum(sums) - mass).min() > 1e-9)


@DTYPES
@given(row=FLOATS, context=TOKENS, penalty=st.floats(0.1, 5))
def test_repetition_penalty(dtype, row, context, penalty):
    scores = row.astype(dtype)
    logits_processors.repetition_penalty(scores, np.array(context, np.int64), penalty)
    expected = theirs(hf.RepetitionPenaltyLogitsProcessor(penalty), row.astype(dtype), context)
    np.testing.assert_array_equal(scores, expected)


@DTYPES
@given(row=FLOATS, biases=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20, width=32),
                                          min_size=1))
def test_logit_bias(dtype, row, biases):
    scores = row.astype(dtype)
    logits_processors.logit_bias(scores, np.array(list(biases)),
                          np.array(list(biases.values()), np.float32))
    expected = theirs(hf.SequenceBiasLogitsProcessor({(t,): b for t, b in biases.items()}),
                      row.astype(dtype))
    np.testing.assert_array_equal(scores, expected)


@given(row=FLOATS, context=TOKENS, data=st.data())
def test_bad_words(row, context, data):
    """Sequences of any length, some started in the context."""
    words = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
                               min_size=1, max_size=6))
    for size in data.draw(st.lists(st.integers(0, 4), max_size=3)):
        words.append([*context[max(0, len(context) - size):], data.draw(st.integers(0, VOCAB - 1))])
    scores = row.copy()
    logits_processors.BadWords(words)(scores, np.array(context, np.int64))
    np.testing.assert_array_equal(scores, theirs(hf.NoBadWordsLogitsProcessor(words), row, context))


@given(row=FLOATS, generated=TOKENS, least=st.integers(1, 20),
       ends=st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_min_tokens(row, generated, least, ends):
    scores = row.copy()
    logits_processors.min_tokens(scores, len(generated), least, np.array(ends))
    processor = hf.MinNewTokensLengthLogitsProcessor(3, least, torch.tensor(ends))
    np.testing.assert_array_equal(scores, theirs(processor, row, [1, 2, 3, *generated]))


@given(row=FLOATS, generated=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_penalty(row, generated, presence, frequency):
    """OpenAI's: logit - count · frequency - (count > 0) · presence."""
    scores = row.astype(np.float64)
    logits_processors.presence_and_frequency_penalty(scores, generated, presence, frequency)
    counts = Counter(generated)
    expected = [float(x) - counts[token] * frequency - (counts[token] > 0) * presence
                for token, x in enumerate(row)]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-12)


@DTYPES
@given(row=ROWS, value=st.floats(0.01, 100))
def test_temperature(dtype, row, value):
    weights = logits_processors.weights(row.astype(dtype), value)
    expected = torch.from_numpy(theirs(hf.TemperatureLogitsWarper(value), row.astype(np.float64)))
    np.testing.assert_allclose(weights / weights.sum(), expected.softmax(-1), rtol=1e-9)


@DTYPES
@given(row=ROWS, count=st.integers(1, VOCAB + 5))
def test_top_k(dtype, row, count):
    scores = row.astype(dtype)
    np.testing.assert_array_equal(cut(scores, logits_processors.top_k(scores, count)),
                                  theirs(hf.TopKLogitsWarper(count), scores))


@pytest.mark.parametrize("count", [1, 7, 50, 400, 3000, 5000])
def test_top_k_of_a_large_vocabulary(count):
    row = np.random.default_rng(0).standard_normal(4999).astype(np.float32).round(2)
    np.testing.assert_array_equal(cut(row, logits_processors.top_k(row, count)),
                                  theirs(hf.TopKLogitsWarper(count), row))


@given(row=ROWS, share=SHARES)
def test_min_p(row, share):
    scores = row.astype(np.float64)
    assume(np.abs(np.exp(scores - scores.max()) - share).min() > 1e-9)
    kept = logits_processors.min_p(logits_processors.weights(scores), share)
    np.testing.assert_array_equal(cut(scores, kept),
                                  theirs(hf.MinPLogitsWarper(share), scores))


@given(row=ROWS, mass=SHARES)
def test_top_p(row, mass):
    """Of equal tokens at the cutoff, those with the lowest ids are kept.

    transformers keeps as many, but in sort order.
    """
    scores = row.astype(np.float64)
    chances = np.exp(log_softmax(scores))
    no_edge(np.sort(chances)[::-1], mass)
    ours = cut(scores, logits_processors.top_p(logits_processors.weights(scores), mass))
    expected = theirs(hf.TopPLogitsWarper(mass), scores)
    np.testing.assert_array_equal(np.sort(ours), np.sort(expected))
    edge = ours[ours > -np.inf].min()
    np.testing.assert_array_equal(ours[scores != edge], expected[scores != edge])
    ties = ours[scores == edge] > -np.inf
    assert ties.tolist() == sorted(ties, reverse=True)


@given(row=ROWS, mass=SHARES)
def test_typical_p(row, mass):
    scores = row.astype(np.float64)
    logs = log_softmax(scores)
    chances = np.exp(logs)
    distance = np.abs(logs + chances @ np.maximum(logs, -1e3))
    no_edge(chances[np.argsort(distance)], mass)
    ours = cut(scores, logits_processors.typical_p(logits_processors.weights(scores), mass))
    np.testing.assert_array_equal(ours, theirs(hf.TypicalLogitsWarper(mass), scores))


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([5, 300, 3000]),
       width=st.floats(0.1, 10), temperature=st.floats(0.1, 3), top_k=st.integers(1, 3000),
       top_p=SHARES, min_p=st.floats(0.001, 0.5), typical_p=SHARES, penalty=st.floats(0.5, 2),
       presence=st.floats(-2, 2))
def test_all_together_in_transformers_order(seed, size, width, temperature, top_k, top_p, min_p,
                                            typical_p, penalty, presence):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(size) * width
    prompt, generated = rng.integers(0, size, 7).tolist(), rng.integers(0, size, 5).tolist()
    bias = {int(t): float(np.float32(rng.normal())) for t in rng.integers(0, size, 4)}
    words = [[generated[-1], int(rng.integers(size))], [int(rng.integers(size))]]
    params = SamplingParams(
        min_tokens=9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        typical_p=typical_p, repetition_penalty=penalty, presence_penalty=presence,
        logit_bias=bias)
    chances = probabilities(
        Sampler(params, 0, prompt, [3], words).process(logits, generated), params)
    context = [*prompt, *generated]
    penalties = torch.zeros(size, dtype=torch.float64)
    penalties[generated] = presence
    scores = logits
    for processor in (
            hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            hf.RepetitionPenaltyLogitsProcessor(penalty), lambda _, row: row - penalties,
            hf.NoBadWordsLogitsProcessor(words),
            hf.MinNewTokensLengthLogitsProcessor(7, 9, torch.tensor([3])),
            hf.TemperatureLogitsWarper(temperature), hf.TopKLogitsWarper(top_k),
            hf.TopPLogitsWarper(top_p), hf.MinPLogitsWarper(min_p),
            hf.TypicalLogitsWarper(typical_p)):
        scores = theirs(processor, scores, context)
    expected = torch.from_numpy(scores).softmax(-1).numpy()
    np.testing.assert_array_equal(chances > 0, expected > 0)
    np.testing.assert_allclose(chances, expected, rtol=1e-9, atol=0)


def test_float32_transformers_filters_model_logits_identically(tiny_model):
    """On the logits of 60 positions."""
    with torch.no_grad():
        rows = tiny_model(input_ids=torch.arange(5, 65)[None]).logits[0]
    for row in rows.numpy():
        weights = logits_processors.weights(row)
        for kept, expected in (
                (logits_processors.top_k(row, 20), hf.TopKLogitsWarper(20)),
                (logits_processors.top_p(weights, 0.9), hf.TopPLogitsWarper(0.9)),
                (logits_processors.min_p(weights, 0.05), hf.MinPLogitsWarper(0.05)),
                (logits_processors.typical_p(weights, 0.8), hf.TypicalLogitsWarper(0.8))):
            np.testing.assert_array_equal(cut(row, kept), theirs(expected, row))


LOGITS = np.random.default_rng(1).standard_normal(40).astype(np.float32) * 2
PARAMS = SamplingParams(temperature=0.9, top_k=30, top_p=0.97, min_p=0.004, typical_p=0.96,
                        repetition_penalty=1.2, seed=3)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("by", ["token", "sample"])
def test_samples_follow_the_exact_distribution(by, count):
    """Random numbers are keyed by token index and sequence seed."""
    prompt = [4, 9, 9]
    if by == "token":
        # The prompt's penalty is applied first, or it would include generated tokens.
        logits = Sampler(PARAMS, 0, prompt).process(LOGITS, [])
        sampler = Sampler(replace(PARAMS, repetition_penalty=1.0))
        drawn = [sampler(logits, range(number)) for number in range(count)]
    else:
        drawn = [Sampler(PARAMS, sample, prompt)(LOGITS, []) for sample in range(count)]
    scores = LOGITS.astype(np.float64)
    for processor in (hf.RepetitionPenaltyLogitsProcessor(1.2), hf.TemperatureLogitsWarper(0.9),
                      hf.TopKLogitsWarper(30), hf.TopPLogitsWarper(0.97),
                      hf.MinPLogitsWarper(0.004), hf.TypicalLogitsWarper(0.96)):
        scores = theirs(processor, scores, prompt)
    chances = torch.from_numpy(scores).softmax(-1).numpy()
    counts = np.bincount(drawn, minlength=len(chances))
    possible = chances > 0
    assert 10 < possible.sum() < 30 and not counts[~possible].any()
    assert chisquare(counts[possible], chances[possible] * count).pvalue > 1e-3


def test_the_random_number_of_a_token_is_philox_of_seed_and_count():
    """The token is the first whose cumulative probability exceeds it, in a large vocabulary."""
    logits = np.random.default_rng(2).standard_normal(5000).astype(np.float32) * 3
    sampler = Sampler(SamplingParams(temperature=0.7, seed=2**64 - 1), sample=6)
    exact = logits.astype(np.float64) / 0.7
    below = np.cumsum(np.exp(exact - exact.max()))
    for count in (0, 1, 255, 256, 1000, 4095):
        number = np.random.Philox(key=5, counter=count).random_raw() * 2.0**-64
        assert sampler(logits, range(count)) == np.searchsorted(below, number * below[-1], "right")


@given(row=FLOATS, token=st.integers(0, VOCAB - 1), count=st.integers(0, VOCAB))
def test_logprobs(row, token, count):
    logprobs = Logprobs.of(row, token, count)
    expected = torch.from_numpy(row).double().log_softmax(-1).numpy()
    assert abs(logprobs.chosen - expected[token]) < 1e-12
    top = sorted(range(VOCAB), key=lambda other: (-row[other], other))[:count]
    assert [other for other, _ in logprobs.top] == top
    np.testing.assert_allclose([x for _, x in logprobs.top], expected[top], atol=1e-12)


def test_temperature_0_takes_the_most_likely_allowed_token():
    logits = np.array([1, 5, 4, 3], np.float32)
    assert Sampler(SamplingParams())(logits, []) == 1
    assert Sampler(SamplingParams(), bad_words=[[1]])(logits, []) == 2
    assert Sampler(SamplingParams(frequency_penalty=0.6))(logits, [1, 1, 2]) == 1
    assert Sampler(SamplingParams(frequency_penalty=1.0))(logits, [1, 1, 2]) == 1
    assert Sampler(SamplingParams(frequency_penalty=1.2))(logits, [1, 1, 2]) == 3
    np.testing.assert_array_equal(logits, [1, 5, 4, 3])


@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("params", [dict(), dict(temperature=1), dict(presence_penalty=1)])
def test_nan_and_infinite_logits_are_never_sampled(wrong, params):
    logits = np.array([1, 5, wrong, 3], np.float32)
    with pytest.raises(NonFiniteLogits, match="the logits after 2 generated tokens are NaN"):
        Sampler(SamplingParams(**params))(logits, [1, 1])
    masked = np.array([1, 5, -math.inf, 3], np.float32)
    assert Sampler(SamplingParams())(masked, []) == 1
    assert np.isnan(Candidates.of(log_softmax_rows(logits), 2).log_probs).all()


def test_temperatures_next_to_0_and_n_without_sampling_are_allowed():
    assert SamplingParams(n=3).n == 3 and SamplingParams(temperature=1e-5).temperature == 1e-5
    for tiny in (1e-8, 5e-324):
        params = SamplingParams(temperature=tiny, seed=1)
        assert params.temperature == 1e-6
        assert Sampler(params)(np.array([1, 5, 4.9, 3], np.float32), []) == 1


def test_the_signature_has_plain_types_and_help_lists_the_fields():
    signature = inspect.signature(SamplingParams)
    assert [*signature.parameters] == [field.name for field in dataclasses.fields(SamplingParams)]
    assert signature.parameters["max_tokens"].annotation is int
    assert signature.parameters["seed"].annotation == int | None
    shown = pydoc.render_doc(SamplingParams, renderer=pydoc.plaintext)
    assert "Annotated" not in shown.split("__annotations__")[0]
    assert "max_tokens: Maximum number of new tokens" in shown
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        SamplingParams(max_token=3)


def test_params_are_equal_and_hash_by_value():
    one = SamplingParams(stop="END", bad_words=["a", [1, 2]], logit_bias={1: 2.0})
    two = SamplingParams(stop=["END"], bad_words=("a", (1, 2)), logit_bias={1: 2.0})
    assert one == two and hash(one) == hash(two)
    assert one.stop == ("END",) and one.bad_words == ("a", (1, 2))


@pytest.mark.parametrize(("arguments", "match"), [
    (dict(max_tokens=-1), "max_tokens -1 is below 0"),
    (dict(min_tokens=5, max_tokens=4), "min_tokens 5 is not from 0 to max_tokens 4"),
    (dict(min_tokens=-1), "min_tokens -1"),
    (dict(temperature=-1.0), "temperature -1.0 is not from 0 to 1000000; 0 is greedy"),
    (dict(temperature=math.nan), "temperature nan is not from 0 to 1000000"),
    (dict(temperature=math.inf), "temperature inf is not from 0 to 1000000"),
    (dict(top_k=-2), "top_k -2 is below 0; 0 keeps all"),
    (dict(top_p=0.0), "top_p 0.0 is not above 0 and at most 1"),
    (dict(top_p=1.5), "top_p 1.5 is not above 0 and at most 1"),
    (dict(top_p=math.nan), "top_p nan"),
    (dict(typical_p=0.0), "typical_p 0.0 is not above 0 and at most 1"),
    (dict(min_p=-0.1), "min_p -0.1 is not from 0 to 1"),
    (dict(min_p=1.1), "min_p 1.1 is not from 0 to 1"),
    (dict(repetition_penalty=0.0), "repetition_penalty 0.0 is not from 0.001 to 1000"),
    (dict(presence_penalty=2.5), "presence_penalty 2.5 is not from -2 to 2"),
    (dict(frequency_penalty=-3.0), "frequency_penalty -3.0 is not from -2 to 2"),
    (dict(bad_words=[""]), "a bad word is empty"),
    (dict(bad_words=[[]]), "a bad word is empty"),
    (dict(logit_bias={7: math.nan}), "logit_bias nan of token 7"),
    (dict(logit_bias={7: math.inf}), "logit_bias inf of token 7"),
    (dict(seed=-1), "seed -1 is not from 0"),
    (dict(seed=2**64), r"give a whole number below 2\^64"),
    (dict(n=0), "n 0 is not from 1 to 65536"),
    (dict(stop=[""]), "a stop string is empty"),
    (dict(stop=["x"] * 65), "there are 65 stop strings; give at most 64"),
    (dict(logprobs=-1), "logprobs -1 is below 0"),
    (dict(prompt_logprobs=-1), "prompt_logprobs -1 is below 0"),
    (dict(prompt_logprobs=1001), "prompt_logprobs 1001 exceeds 1000"),
    (dict(prompt_logprobs=1, beam_width=2), "prompt_logprobs 1 does not go with beam_width 2"),
    (dict(max_tokens=0, beam_width=2), "max_tokens 0 does not go with beam_width 2"),
])
def test_out_of_range_values_are_refused(arguments, match):
    with pytest.raises(llmc.LlmcError, match=match) as refusal:
        SamplingParams(**arguments)
    assert "\n" not in str(refusal.value)
