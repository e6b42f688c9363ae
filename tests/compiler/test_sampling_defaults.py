"""Sampling defaults of generation_config.json that a compiled model keeps, and notes on others."""

import math

import pytest

from llmc.compiler.sampling_defaults import read_sampling
from llmc.runtime.sampling.params import with_defaults


@pytest.mark.parametrize(("generation", "fields"), [
    ({}, None), ({"eos_token_id": 2, "max_length": 20, "do_sample": None}, None),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1},
     {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ({"temperature": 0.6}, {"temperature": 0.6}),
    ({"repetition_penalty": 1.3, "suppress_tokens": [5, 7, 400]},
     {"repetition_penalty": 1.3, "logit_bias": {5: -math.inf, 7: -math.inf}}),
])
def test_sampling_parameters_are_kept(generation, fields):
    sampling, _ = read_sampling(generation, 300, has_encoder=False)
    assert (sampling and sampling.fields()) == fields


@pytest.mark.parametrize(("generation", "note"), [
    ({"temperature": -1}, "temperature -1.0 is not from 0"), ({"top_p": "x"}, "top_p is 'x'; give"),
    ({"suppress_tokens": [-1]}, "suppress_tokens [-1] is not a list of token ids; ignored"),
    ({"suppress_tokens": 3}, "suppress_tokens 3 is not a list of token ids; ignored"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3 is not applied"),
    ({"num_beams": 4}, "num_beams 4 is not applied"),
    ({"bad_words_ids": [[1]]}, "bad_words_ids [[1]] is not applied"),
])
def test_ignored_sampling_defaults_are_reported(generation, note):
    sampling, (said,) = read_sampling(generation, 300, has_encoder=False)
    assert sampling is None and note in said and said.startswith("sampling defaults: ")


def test_kept_sampling_defaults_are_reported():
    _, notes = read_sampling({"temperature": 0.6, "num_beams": 1}, 300, has_encoder=False)
    assert notes == ["sampling defaults: temperature 0.6"]
    assert read_sampling({"bad_words_ids": [[1]]}, 300, has_encoder=True) == (None, [])


def test_request_parameters_override_model_defaults():
    defaults = {"temperature": 0.6, "top_k": 5, "logit_bias": {1: -math.inf, 2: -math.inf}}
    assert with_defaults({"temperature": 0.0, "logit_bias": {2: 1.0}}, defaults) == {
        "temperature": 0.0, "top_k": 5, "logit_bias": {1: -math.inf, 2: 1.0}}
    assert "temperature" not in with_defaults({"beam_width": 3}, defaults)
