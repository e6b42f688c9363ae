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
    assert_scores,
    prompts_of,
    write_model,
)
from PIL import Image
from schedule_interpreter import (
    LIMITS,
    Interpreters,
    interpreted,
    interpreted_image_encoder,
)

import llmc
from llmc.artifacts.manifest import PROCESSOR, read_manifest
from llmc.artifacts.program import read_image_program
from llmc.compiler.check import diff as diff_module
from llmc.compiler.check import media as check_media
from llmc.runtime.engines import host, image_encoder
from llmc.runtime.engines.cuda import step_arrays
from llmc.runtime.engines.cuda_image_encoder import declare_image_program, limits_of
from llmc.runtime.multimodal.processor import read_processor

COMMON = ("llava", 1)  # the others are thorough
# Tokens of a step for bidirectional attention within an image or the whole prompt.
STEPS = {"gemma4_large": 80, "paligemma": 80, "paligemma2": 80}
# Encoders that the host runs as a whole: they have overlapping windows (got_ocr2) or attend to
# patches of padding (mllama).
ON_HOST = {"got_ocr2", "mllama"}
# Encoders whose rows the host orders or assembles from those of the device.
ROWS_ON_HOST = {"llava_next", "llava_onevision", "qwen2_5_vl", "exaone4_5"}
# Chunks end within images, but for those with bidirectional attention.
SHORT_STEPS = replace(LIMITS, max_tokens=24, max_slots=4)
AHEAD = replace(SHORT_STEPS, ahead=2, max_drafts=15, proposes=True, prompt_lookup=True,
                drafts_ahead=True)

pytestmark = pytest.mark.extension


@pytest.mark.parametrize(("name", "tp_size"), [
    pytest.param(*own, marks=[pytest.mark.thorough] * (own != COMMON))
    for own in ((name, tp_size) for name in MODELS for tp_size in (1, 2))])
def test_families_generate_as_transformers(extension, name, tp_size, tmp_path):
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size, target="cuda",
                 dtype="float32")
    manifest = read_manifest(tmp_path / "case")
    steps = [step.path for step in manifest.image.steps]
    assert steps == ["chip0/image.onnx", *(["chip0/image.json"] * (name not in ON_HOST)),
                     *(["chip0/image_rows.onnx"] * (name in ROWS_ON_HOST))]
    if name not in ON_HOST:
        program, _ = read_image_program(manifest, tmp_path / "case")
        declare_image_program(extension.Program(**limits_of(program, 512, 128, 64)), program)
    with interpreted(tmp_path / "case", replace(
            SHORT_STEPS, max_tokens=STEPS.get(name, SHORT_STEPS.max_tokens))) as llm:
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


def test_the_engine_accepts_the_program_of_an_encoder(extension, by_axis):
    """Its tensors and nodes are declared without a GPU; wrong ones are refused."""
    _, case = by_axis
    manifest = read_manifest(case)
    assert [step.path for step in manifest.image.steps] == ["chip0/image.onnx", "chip0/image.json"]
    program, stored = read_image_program(manifest, case)
    limits = limits_of(program, 512, 128, 64)
    numbers, weights = declare_image_program(extension.Program(**limits), program)
    assert len(numbers) == len(program.tensors) and weights.keys() == stored.keys()
    for name, dtype, shape, words in (
            ("pixels", "float32", [-1, 8], "unknown input of an image encoder 'pixels'"),
            ("cos", "float16", [-1, 8], "is of float16 and has 2 axes, expected float32"),
            ("merged_rows.1", "int64", [-1], "merged_rows.1 is of int64")):
        with pytest.raises(extension.CudaError, match=words):
            extension.Program(**limits).add_array(name, dtype, shape)
    declared = extension.Program(**limits)
    patches = declared.add_array("patches", "float32", [-1, 8])
    value = declared.add_value("float32", [-1, 8], 0, False)
    with pytest.raises(extension.CudaError, match="is patches, which only an input 'x' takes"):
        declared.add_node("Add", {}, [value, patches], [value])
    with pytest.raises(extension.CudaError, match="0 outputs"):
        declared.set_outputs([])


def test_what_depends_on_an_image_s_size_is_computed_once(by_axis, monkeypatch):
    _, case = by_axis
    manifest = read_manifest(case)
    assert manifest.image.reshaped == {"patches": "pixel_values"}
    encoder = interpreted_image_encoder(manifest, case)
    seen, real = [], encoder._run_session
    monkeypatch.setattr(encoder, "_run_session",
                        lambda *given: (seen.append(given), real(*given))[1])
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
                for size in ((64, 96), (64, 96), (96, 64), (64, 96))]
    items = read_processor(case / PROCESSOR).process_images(pictures)
    for item in items:
        fresh = interpreted_image_encoder(manifest, case)
        np.testing.assert_array_equal(encoder.encode(item), fresh.encode(item))
    assert len(seen) == 2
    monkeypatch.setattr(image_encoder, "_MOST", 0)
    for item in items:
        encoder.encode(item)
    assert len(seen) == 2 + 2  # one size is kept


def test_prompt_logprobs_are_of_tokens_and_not_of_rows(by_axis):
    model, case = by_axis
    with interpreted(case, SHORT_STEPS) as llm:
        prompt = prompts_of(llm)[1]
        completion, = llm.generate([prompt], llmc.SamplingParams(max_tokens=1, prompt_logprobs=2))
        assert_scores(model, llm, prompt, completion)


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


@pytest.mark.thorough
def test_the_engine_accepts_the_steps_of_bidirectional_ranges(extension, tmp_path, steps):
    model = write_model("gemma3", tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", target="cuda", dtype="float32")
    with interpreted(tmp_path / "case", SHORT_STEPS) as llm:
        prompt = prompts_of(llm)[1]
        completion, = llm.generate([prompt], GREEDY)
        assert_generates(model, llm, prompt, completion)
    manifest = read_manifest(tmp_path / "case")
    program = build(extension, manifest, schedules_of(tmp_path / "case", 0))
    step = next(own for own in steps if len(own.bidirectional_ranges))
    rows = sum(count for *_, count in step.media_rows.tolist())
    given = replace(step.without_media(),
                    embeds=np.zeros((rows, manifest.embeds_width), np.float32))
    program.check_step(LIMITS.num_blocks, *step_arrays(given))
    beyond = given.bidirectional_ranges.copy()
    beyond[beyond[:, 1] > 0, 1] = step.past_lens[0] + step.num_tokens + 1
    with pytest.raises(extension.CudaError, match="has the range .* expected one of its position"):
        program.check_step(LIMITS.num_blocks,
                           *step_arrays(replace(given, bidirectional_ranges=beyond)))


def test_diff_compares_images(by_axis, tmp_path, monkeypatch):
    _, case = by_axis
    monkeypatch.setattr(diff_module, "device_count", lambda: 8)
    monkeypatch.setattr(diff_module, "GpuReplica",
                        lambda manifest, case, placements, room: Interpreters(case))
    monkeypatch.setattr(check_media, "load_image_encoder", interpreted_image_encoder)
    monkeypatch.setattr(diff_module, "MAX_LOGITS", 50)  # a chunk ends within an image
    assert_image_diff(case, tmp_path)
