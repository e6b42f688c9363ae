"""Programs of GPUs read audio as transformers does: by the NumPy interpreter.

The audio encoder runs on the host.
"""

from dataclasses import replace

import audio_models
import omni_models
import pytest
from audio_models import GREEDY, assert_generates, prompts_of
from schedule_interpreter import LIMITS, interpreted

import llmc
from llmc.artifacts.manifest import read_manifest

COMMON = ("glmasr", 1)  # the others are thorough; its encoder has an op that the program lacks
SHORT_STEPS = replace(LIMITS, max_tokens=24, max_slots=4)  # chunks end within clips


def models(names, common=None):
    """Names with a tp_size each."""
    return [pytest.param(*own, marks=[pytest.mark.thorough] * (own != common))
            for own in ((name, tp_size) for name in names for tp_size in (1, 2))]


@pytest.mark.parametrize(("name", "tp_size"), models(audio_models.MODELS, COMMON))
def test_clips_generate_as_transformers(name, tp_size, tmp_path):
    model = audio_models.write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size, target="cuda",
                 dtype="float32")
    assert len(read_manifest(tmp_path / "case").audio.steps) == 1
    with interpreted(tmp_path / "case", SHORT_STEPS) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)


@pytest.mark.parametrize(("name", "tp_size"), models(omni_models.MODELS))
def test_items_of_both_kinds_generate_as_transformers(name, tp_size, tmp_path):
    model = omni_models.write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size, target="cuda",
                 dtype="float32")
    with interpreted(tmp_path / "case", SHORT_STEPS) as llm:
        prompts = omni_models.prompts_of(name, 0.5 if name == "qwen3_omni_moe" else 0.0)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            omni_models.assert_generates(model, llm, prompt, completion)
