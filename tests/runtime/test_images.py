"""Prompts with images: compiled encoders and language models generate as transformers does."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from image_models import MODELS, images, write_model

import llmc

GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
COMMON = ("llava",)  # the others are thorough


def expected(model, prompt, token, count=10):
    """Greedy tokens and their log-probabilities by transformers; `token` is that of rows."""
    arrays = [own.item.arrays for own in prompt.ranges]
    given = {name: torch.from_numpy(np.concatenate([own[name] for own in arrays]))
             for name in (arrays[0] if arrays else ())}
    ids = torch.tensor([prompt.token_ids])
    kinds = {name: (ids == token).int() for name in ("mm_token_type_ids", "token_type_ids")
             if given and name in inspect.signature(model.forward).parameters}
    with torch.no_grad():
        made = model.generate(ids, **given, **kinds, max_new_tokens=count, do_sample=False,
                              eos_token_id=None, pad_token_id=0, output_logits=True,
                              return_dict_in_generate=True)
    return made.sequences[0, ids.shape[1]:].tolist(), \
        [float(logits[0].double().log_softmax(-1).max()) for logits in made.logits]


def assert_generates(model, llm, prompt, completion, tolerance=1e-4):
    """As transformers does; `prompt` has `prompt` and `images`."""
    inputs = llm.processor.description.image
    token = inputs.placeholder_id if inputs.row_token_id is None else inputs.row_token_id
    read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
    tokens, logprobs = expected(model, read, token, len(completion.token_ids))
    assert list(completion.token_ids) == tokens
    assert [own.chosen for own in completion.logprobs] == pytest.approx(logprobs, abs=tolerance)


def prompts_of(llm):
    """Prompts with 0, 1 and 3 images of odd sizes."""
    own = llm.processor.placeholders["image"]
    return [{"prompt": "hello there", "images": []},
            {"prompt": f"see {own} now", "images": images(1)},
            {"prompt": f"a {own} b {own} d {own} c", "images": images(3)}]


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


def test_drafts_have_positions_after_the_images(by_axis):
    _, case = by_axis
    with llmc.LLM(case, num_speculative_tokens=7) as llm:
        prompt = prompts_of(llm)[2]
        params = llmc.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
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
