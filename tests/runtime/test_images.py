"""Prompts with images: compiled encoders and language models generate as transformers does."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from image_models import (
    GREEDY,
    MODELS,
    assert_generates,
    assert_image_diff,
    assert_scores,
    images,
    prompts_of,
    write_model,
)

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check.execute import run_chips
from llmc.compiler.frontend import export
from llmc.compiler.options import CompileOptions
from llmc.compiler.preflight import About, check_model
from llmc.runtime.engines import image_encoder

COMMON = ("llava",)  # the others are thorough


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.thorough] * (name not in COMMON)) for name in MODELS])
def test_families_generate_as_transformers(name, tp_size, tmp_path):
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size)
    with llmc.LLM(tmp_path / "case") as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """LLaVA as transformers' model, and its case directory."""
    folder = tmp_path_factory.mktemp("llava")
    made = write_model("llava", folder / "hf")
    llmc.compile(folder / "hf", folder / "case")
    return made, folder / "case"


# A chunk ends within an image; blocks are short; one image at a time fits into the cache.
@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 24, "max_batch_size": 4}, {"kv_cache_tokens": 304},
    {"encoder_cache_gb": 2e-5, "max_num_batched_tokens": 100}, {"prefix_reuse": False}])
def test_chunks_preemption_and_eviction_change_nothing(model, options):
    reference, case = model
    with llmc.LLM(case, **options) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts * 3, llm.generate(prompts * 3, GREEDY), strict=True):
            assert_generates(reference, llm, prompt, completion)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24, "max_batch_size": 4}])
def test_prompt_logprobs_are_of_tokens_and_not_of_rows(model, options):
    reference, case = model
    params = llmc.SamplingParams(max_tokens=2, prompt_logprobs=1)
    with llmc.LLM(case, **options) as llm:
        prompts = prompts_of(llm)[1:]
        llm.generate(prompts, GREEDY)  # blocks to share
        for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
            assert_scores(reference, llm, prompt, completion)


def cached(llm, prompt):
    return next(iter(llm.stream(prompt, GREEDY))).num_cached_tokens


def test_prefix_caching_distinguishes_images(model):
    one, other, _ = images(3)
    with llmc.LLM(model[1]) as llm:
        text = f"look at {llm.processor.placeholders['image']} and tell"
        assert cached(llm, {"prompt": text, "images": [one]}) == 0
        assert cached(llm, {"prompt": text, "images": [one.copy()]}) >= 64
        assert cached(llm, {"prompt": text, "images": [other]}) == 0


def test_an_image_is_encoded_once(model, monkeypatch):
    encoded = []
    real = image_encoder.MediaEncoder.encode
    monkeypatch.setattr(image_encoder.MediaEncoder, "encode",
                        lambda self, arrays: encoded.append(1) or real(self, arrays))
    with llmc.LLM(model[1], prefix_reuse=False) as llm:
        prompt = prompts_of(llm)[1]
        llm.generate([prompt] * 3, GREEDY)
        llm.generate(prompt, GREEDY)
        assert len(encoded) == 1
        llm.generate(prompts_of(llm)[2], GREEDY)  # the first of its images is the same
        assert len(encoded) == 3


def test_paths_bytes_token_ids_and_asyncio(model, tmp_path):
    _, case = model
    image, = images(1)
    image.save(tmp_path / "a.png")

    async def complete(text):
        async with llmc.AsyncLLM(case) as llm:
            return [piece.token_id async for piece in llm.stream(
                {"prompt": text, "images": [image]}, GREEDY)]

    with llmc.LLM(case) as llm:
        text = f"see {llm.processor.placeholders['image']} now"
        expected = llm.generate({"prompt": text, "images": [image]}, GREEDY)[0].token_ids
        for given in (tmp_path / "a.png", str(tmp_path / "a.png"),
                      (tmp_path / "a.png").read_bytes()):
            own, = llm.generate({"prompt": text, "images": [given]}, GREEDY)
            assert own.token_ids == expected
        ids = llm.tokenize(text)
        own, = llm.generate({"prompt_token_ids": ids, "images": [image]}, GREEDY)
        assert own.token_ids == expected
        assert [piece.token_id for piece in llm.stream(
            llm.media_prompt(text, images=[image]), GREEDY)] == list(expected)
    assert tuple(asyncio.run(complete(text))) == expected


def test_bad_input_is_named_and_leaves_other_prompts_alone(model, tmp_path):
    with llmc.LLM(model[1]) as llm:
        own = llm.processor.placeholders["image"]
        for prompt, message in (
                ({"prompt": own, "images": [b"no picture"]}, "image 0: "),
                ({"prompt": own, "images": [tmp_path / "absent.png"]}, "cannot be read"),
                ({"prompt": "none", "images": images(1)}, "give one placeholder per item"),
                ({"prompt": own, "audio": [b""]}, "takes no audio"),
                ({"prompt": own, "videos": [images(2)]}, "has videos, which llmc does not")):
            with pytest.raises(llmc.LlmcError, match=message):
                llm.generate([prompt, "fine"], GREEDY)
        with pytest.raises(llmc.LlmcError, match="part 0 of message 0 is a video, which llmc does"):
            llm.chat_prompt([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])
        assert len(llm.generate("fine", GREEDY)[0].token_ids) == 10


def test_an_encoder_that_does_not_fit_is_refused_before_the_language_model_is_exported(
        tmp_path, monkeypatch):
    write_model("llava", tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_text(path.read_text().replace('"default"', '"full"'))
    monkeypatch.setattr(export, "_export_part", lambda *args, **named: pytest.fail("exported"))
    with pytest.raises(llmc.LlmcError, match="gives an image 65 tokens, the image encoder of "
                                             "'llava' 64 rows"):
        llmc.compile(tmp_path, tmp_path / "case")


def test_the_language_model_alone_is_compiled_on_request(model, tmp_path):
    about = About({"model_type": "llava"}, {}, False, media=("image",))
    with pytest.raises(llmc.LlmcError, match="'llava' takes images, which target 'tensorrt' does "
                                             "not support; compile with --target cpu or cuda"):
        check_model(CompileOptions(target="tensorrt"), about)
    manifest = llmc.compile(model[1].parent / "hf", tmp_path / "case", language_model_only=True)
    assert manifest.image is None and manifest.embeds_width is None
    with llmc.LLM(tmp_path / "case") as llm, \
            pytest.raises(llmc.LlmcError, match="takes neither images nor audio"):
        llm.generate({"prompt": "<image>", "images": images(1)})


@pytest.fixture(scope="module")
def by_axis(tmp_path_factory):
    """A model with positions by axis and deep rows after two layers, and its case directory."""
    root = tmp_path_factory.mktemp("qwen3_vl")
    model = write_model("qwen3_vl", root / "hf")
    llmc.compile(root / "hf", root / "case")
    return model, root / "case"


def test_prompts_generate_alone_and_in_company(by_axis):
    model, case = by_axis
    with llmc.LLM(case) as llm:
        prompts = prompts_of(llm)
        together = llm.generate([*prompts, *prompts[::-1]], GREEDY)
        for prompt, completion in zip([*prompts, *prompts[::-1]], together, strict=True):
            assert_generates(model, llm, prompt, completion)
        for prompt in prompts:
            assert_generates(model, llm, prompt, llm.generate([prompt], GREEDY)[0])


def test_prompts_are_read_in_chunks(by_axis):
    model, case = by_axis
    with llmc.LLM(case, max_num_batched_tokens=16, max_batch_size=4) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)


def test_a_found_prefix_keeps_its_positions(by_axis):
    model, case = by_axis
    with llmc.LLM(case) as llm:
        own = llm.processor.placeholders["image"]
        first, other = images(2)
        text = f"see {own} and say at length what is there"
        llm.generate([{"prompt": text, "images": [first]}], GREEDY)
        scheduler = llm._loops[0]._scheduler
        for given, found in ((first, True), (other, False)):
            prompt, before = {"prompt": f"{text} today", "images": [given]}, scheduler.hits
            completion, = llm.generate([prompt], GREEDY)
            assert (scheduler.hits > before) == found
            assert_generates(model, llm, prompt, completion)


def test_diff_runs_texts_alone(by_axis):
    model, case = by_axis
    manifest, ids = read_manifest(case), [5, 9, 33, 7, 11]
    chip, = run_chips(manifest, case, ids, {"logits"})
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(chip["logits"][:, :expected.shape[1]] - expected).max() < 1e-4


def test_diff_compares_images(by_axis, tmp_path):
    """Rows, also of deep layers, and layers at positions by axis."""
    _, case = by_axis
    assert_image_diff(case, tmp_path)


def test_drafts_have_positions_after_the_images(by_axis):
    _, case = by_axis
    with llmc.LLM(case, num_speculative_tokens=7) as llm:
        prompt = prompts_of(llm)[2]
        params = llmc.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True,
                                     presence_penalty=2)  # tokens that do not repeat
        plain, = llm.generate([prompt], params)
        drafted, = llm.generate([prompt], replace(params, prediction=list(plain.token_ids)))
        assert drafted.token_ids == plain.token_ids
        assert drafted.accepted_prediction_tokens > 0


def test_beams_continue_after_the_images(by_axis):
    model, case = by_axis
    with llmc.LLM(case) as llm:
        prompt = prompts_of(llm)[1]
        completion, = llm.generate([prompt], llmc.SamplingParams(
            max_tokens=6, beam_width=3, ignore_eos=True))
        read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
        arrays = {name: torch.from_numpy(array)
                  for name, array in read.ranges[0].item.arrays.items()}
        ids = torch.tensor([read.token_ids])
        with torch.no_grad():
            made = model.generate(
                ids, **arrays, mm_token_type_ids=(ids == model.config.image_token_id).int(),
                max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert np.array_equal(completion.token_ids, made[0, ids.shape[1]:])
