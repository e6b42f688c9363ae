"""The language model of a multimodal model computes logits as the whole model does."""

import copy

import pytest
from multimodal_models import tiny_model

from llmc.compiler.frontend.logits_head import match_head
from llmc.errors import LlmcError


def test_a_scale_that_the_whole_model_does_not_apply_is_taken_out():
    model = tiny_model("aya_vision")
    text = copy.deepcopy(model.config.text_config)
    assert text.logit_scale == 0.0625
    match_head(model, text)
    assert text.logit_scale == 1.0


def test_a_cap_that_both_apply_stays():
    model = tiny_model("gemma4")
    text = copy.deepcopy(model.config.text_config)
    match_head(model, text)
    assert text.final_logit_softcapping == model.config.text_config.final_logit_softcapping


def test_other_logits_are_refused():
    model = tiny_model("llava")
    forward = model.forward

    def doubled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(LlmcError, match="'llava' computes logits otherwise than its language "
                                        "model 'llama'"):
        match_head(model, copy.deepcopy(model.config.text_config))
