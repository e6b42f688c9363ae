"""Prompts with images: compiled encoders and language models generate as transformers does."""

import asyncio
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from image_models import MODELS, images, write_model

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.check.execute import run_chips
from llmc.compiler.check.images import read_prompt
from llmc.runtime.engines import media_encoders

GREEDY = llmc.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
COMMON = ("llava",)  # the others are thorough


def joined(arrays):
    """Arrays of several images as transformers' processors join them: padded to one size."""
    shape = np.max([own.shape[1:] for own in arrays], 0)
    axis = 0
    if len(shape) == 4:  # images of several tiles
        axis, shape = 1, shape[1:]
        arrays = [own[0] for own in arrays]
    padded = [np.pad(own, [(0, 0), *((0, size - had) for size, had in zip(
        shape, own.shape[1:], strict=True))]) for own in arrays]
    whole = np.concatenate(padded)
    return whole[None] if axis else whole


def expected(model, prompt, token, count=10):
    """Greedy tokens and their log-probabilities by transformers; `token` is that of rows."""
    arrays = [own.item.arrays for own in prompt.ranges]
    given = {name: torch.from_numpy(joined([own[name] for own in arrays]))
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
    real = media_encoders.MediaEncoder.encode
    monkeypatch.setattr(media_encoders.MediaEncoder, "encode",
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
                ({"prompt": own, "audio": [b""]}, "takes no audio")):
            with pytest.raises(llmc.LlmcError, match=message):
                llm.generate([prompt, "fine"], GREEDY)
        with pytest.raises(llmc.LlmcError, match="prompt_logprobs is given for a prompt with"):
            llm.generate(prompts_of(llm)[1], llmc.SamplingParams(prompt_logprobs=1))
        assert len(llm.generate("fine", GREEDY)[0].token_ids) == 10


def test_a_model_that_uses_rows_in_another_way_is_refused_before_the_export(tmp_path):
    write_model("gemma3", tmp_path)
    with pytest.raises(llmc.LlmcError, match="tokens of an image that see each other.*"
                                             "--language_model_only"):
        llmc.compile(tmp_path, tmp_path / "case")


def test_the_language_model_alone_is_compiled_on_request(model, tmp_path):
    hf = model[1].parent / "hf"
    with pytest.raises(llmc.LlmcError, match="'LlavaForConditionalGeneration' takes images, which "
                                             "target 'cuda' does not support"):
        llmc.compile(hf, tmp_path / "case", target="cuda")
    manifest = llmc.compile(hf, tmp_path / "case", language_model_only=True)
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
    with pytest.raises(llmc.LlmcError, match="not supported for a model with positions by axis"):
        read_prompt(manifest, case, None, [])


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
