"""Programs of GPUs read images as transformers does: by the NumPy interpreter."""

from dataclasses import replace

import numpy as np
import pytest
from declared_programs import build, schedules_of
from image_models import (
    GREEDY,
    MODELS,
    assert_generates,
    assert_image_diff,
    prompts_of,
    write_model,
)
from schedule_interpreter import LIMITS, Interpreters, interpreted

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check import diff as diff_module
from llmc.runtime.engines import host
from llmc.runtime.engines.cuda import step_arrays

COMMON = ("llava", 1)  # the others are thorough
# Chunks end within images.
SHORT_STEPS = replace(LIMITS, max_tokens=24, max_slots=4)
AHEAD = replace(SHORT_STEPS, ahead=2, max_drafts=15, proposes=True, prompt_lookup=True,
                drafts_ahead=True)

pytestmark = pytest.mark.extension


@pytest.mark.parametrize(("name", "tp_size"), [
    pytest.param(*own, marks=[pytest.mark.thorough] * (own != COMMON))
    for own in ((name, tp_size) for name in MODELS for tp_size in (1, 2))])
def test_families_generate_as_transformers(name, tp_size, tmp_path):
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size, target="cuda",
                 dtype="float32")
    with interpreted(tmp_path / "case", SHORT_STEPS) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)


@pytest.fixture(scope="module")
def by_axis(tmp_path_factory):
    """A model with positions by axis and deep rows after two layers, and its case directory."""
    root = tmp_path_factory.mktemp("qwen3_vl")
    model = write_model("qwen3_vl", root / "hf")
    llmc.compile(root / "hf", root / "case", tp_size=2, target="cuda", dtype="float32")
    return model, root / "case"


@pytest.fixture
def steps(monkeypatch):
    """Steps of the interpreted engine."""
    seen, real = [], host.HostSampling.submit
    monkeypatch.setattr(host.HostSampling, "submit",
                        lambda self, step: (seen.append(step), real(self, step))[1])
    return seen


def test_the_engine_accepts_the_steps_of_positions_by_axis(extension, by_axis, steps):
    model, case = by_axis
    with interpreted(case, SHORT_STEPS) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)
    manifest = read_manifest(case)
    for rank in range(2):
        program = build(extension, manifest, schedules_of(case, rank))
        for step in steps[:4]:
            rows = sum(count for *_, count in step.media_rows.tolist())
            width = manifest.embeds_width
            program.check_step(LIMITS.num_blocks, *step_arrays(replace(
                step.without_media(), embeds=np.zeros((rows, width), np.float32),
                deep_embeds=np.zeros((2, rows, width), np.float32))))


def test_drafts_of_steps_in_flight_have_positions_after_the_images(by_axis):
    """Of a step whose number of accepted drafts the host does not know yet."""
    _, case = by_axis
    params = llmc.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)
    with interpreted(case, SHORT_STEPS) as llm:
        plain = llm.generate(prompts_of(llm), params)
    with interpreted(case, AHEAD, speculate="ngram", num_speculative_tokens=3) as llm:
        drafted = llm.generate(prompts_of(llm), params)
        assert llm._loops[0].run(lambda _, engine: engine.resolved) > 4
        assert llm.metrics()["spec_decode_accepted_tokens"] > 4
    for own, other in zip(plain, drafted, strict=True):
        assert own.token_ids == other.token_ids
        assert [each.chosen for each in own.logprobs] == pytest.approx(
            [each.chosen for each in other.logprobs], abs=1e-4)


def test_diff_compares_images(by_axis, tmp_path, monkeypatch):
    _, case = by_axis
    monkeypatch.setattr(diff_module, "device_count", lambda: 8)
    monkeypatch.setattr(diff_module, "GpuReplica",
                        lambda manifest, case, placements, room: Interpreters(case))
    monkeypatch.setattr(diff_module, "MAX_LOGITS", 50)  # a chunk ends within an image
    assert_image_diff(case, tmp_path)
