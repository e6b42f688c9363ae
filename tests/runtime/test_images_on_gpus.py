"""Programs of GPUs read images as transformers does: by the NumPy interpreter."""

from dataclasses import replace

import pytest
from image_models import GREEDY, MODELS, assert_generates, prompts_of, write_model
from schedule_interpreter import LIMITS, interpreted

import llmc

COMMON = (("llava", 1), ("qwen3_vl", 2))  # the others are thorough
# Chunks end within images.
SHORT_STEPS = replace(LIMITS, max_tokens=24, max_slots=4)

pytestmark = pytest.mark.extension


@pytest.mark.parametrize(("name", "tp_size"), [
    pytest.param(*own, marks=[pytest.mark.thorough] * (own not in COMMON))
    for own in ((name, tp_size) for name in MODELS for tp_size in (1, 2))])
def test_families_generate_as_transformers(name, tp_size, tmp_path):
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size, target="cuda",
                 dtype="float32")
    with interpreted(tmp_path / "case", SHORT_STEPS) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)
