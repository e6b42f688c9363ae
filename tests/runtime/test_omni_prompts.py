"""Prompts with images and audio of one model generate as transformers does."""

import numpy as np
import omni_models
import pytest
from audio_models import clips
from image_models import images
from omni_models import GREEDY, MODELS, assert_generates, prompts_of, write_model

import llmc


@pytest.fixture
def model(tiny_omni):
    return tiny_omni


def test_items_of_both_kinds_generate_as_transformers(model):
    with llmc.LLM(model[1]) as llm:
        prompts = prompts_of("qwen2_5_omni")
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model[0], llm, prompt, completion)
