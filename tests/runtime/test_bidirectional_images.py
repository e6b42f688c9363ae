"""Prompts with bidirectional attention within images, in one step whatever its budget."""

import numpy as np
import pytest
from image_models import (
    GREEDY,
    assert_generates,
    assert_image_diff,
    assert_scores,
    images,
    prompts_of,
    write_model,
)

import llmc
from llmc.runtime.core.input_embeds import InputEmbeds
from llmc.runtime.multimodal.items import MediaItem, PlaceholderRange
from llmc.runtime.prompts import MediaPrompt


@pytest.fixture(scope="module", params=[
    "gemma3", pytest.param("paligemma2", marks=pytest.mark.thorough)])
def model(request, tmp_path_factory):
    """A model of transformers with a window shorter than an image, and its case directory."""
    root = tmp_path_factory.mktemp(request.param)
    made = write_model(request.param, root / "hf")
    llmc.compile(root / "hf", root / "case")
    return made, root / "case"


def assert_all_generate(model, llm, prompts):
    for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert_generates(model, llm, prompt, completion)


# The budget of a step ends within an image; blocks are short; images do not fit into the cache.
@pytest.mark.parametrize("options", [
    {}, {"max_num_batched_tokens": 100, "max_batch_size": 4}, {"kv_cache_tokens": 304},
    {"encoder_cache_gb": 2e-5}, {"prefix_reuse": False}])
def test_prompts_generate_as_by_transformers(model, options):
    reference, case = model
    with llmc.LLM(case, **options) as llm:
        prompts = prompts_of(llm)
        assert_all_generate(reference, llm, [*prompts, *prompts[::-1]])
        for prompt in prompts:
            assert_all_generate(reference, llm, [prompt])


def test_prompt_logprobs_are_of_tokens_that_are_predicted(model):
    reference, case = model
    params = llmc.SamplingParams(max_tokens=1, prompt_logprobs=0)
    with llmc.LLM(case, max_num_batched_tokens=100, max_batch_size=4) as llm:
        prompts = prompts_of(llm)[1:]
        if llm.manifest.image.bidirectional == "prompt":
            with pytest.raises(llmc.LlmcError, match="a prompt with bidirectional attention"):
                llm.generate(prompts, params)
            return
        for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
            assert_scores(reference, llm, prompt, completion)


def test_a_found_prefix_may_end_within_an_image(model):
    reference, case = model
    with llmc.LLM(case) as llm:
        own = llm.processor.placeholders["image"]
        first, other = images(2)
        scheduler = llm._loops[0]._scheduler
        for text, image in ((f"see {own}", first), (f"see {own}", first), (f"see {own}", other),
                            (f"see {own} at length", first)):
            before = scheduler.hits
            assert_all_generate(reference, llm, [{"prompt": text, "images": [image]}])
            found = scheduler.hits - before
            assert image is first or found == 0


def test_completions_share_a_prompt_that_ends_within_an_image(model):
    reference, case = model
    with llmc.LLM(case) as llm:
        prompt = prompts_of(llm)[1]
        read = llm.media_prompt(prompt["prompt"], images=prompt["images"])
        stop = int(read.ranges[0].positions[-1])
        cut = MediaPrompt(read.token_ids[:stop + 1], read.ranges)
        single, = llm.generate([cut], GREEDY)
        for completion in llm.generate([cut, cut], GREEDY):
            assert completion.token_ids == single.token_ids
        assert_all_generate(reference, llm, [prompt])


def test_a_step_that_is_too_short_for_an_image_is_an_error(model):
    with llmc.LLM(model[1], max_num_batched_tokens=12, max_batch_size=4) as llm:
        prompt = prompts_of(llm)[1]
        with pytest.raises(llmc.LlmcError, match="bidirectional attention, so they must be in one "
                                                 "step.*max_num_batched_tokens of at least"):
            llm.generate([prompt, "fine"], GREEDY)
        assert len(llm.generate("fine", GREEDY)[0].token_ids) == 10


def test_diff_compares_images(model, tmp_path):
    assert_image_diff(model[1], tmp_path, "rows of image 1")


def embeds(*positions, keys=None):
    places = np.array(positions, np.int64)
    return InputEmbeds(places, keys or [bytes([own]) for own in positions])


def test_consecutive_rows_are_a_range():
    found = embeds(2, 3, 4, 9, 11, 12).seen_together("images", range(20))
    assert found.ranges.tolist() == [[2, 5], [11, 13]]
    assert [found.range_of(at) for at in (1, 2, 4, 5, 9, 12)] == \
        [None, (2, 5), (2, 5), None, None, (11, 13)]
    assert found.ranges_within(3, 12)[:, 1].tolist() == [5, 5, 0, 0, 0, 0, 0, 0, 13]
    assert found.longest_range == 3 and found.last_range_end == 13


def test_rows_of_audio_see_no_later_ones():
    places = [PlaceholderRange(MediaItem(kind, {"a": np.zeros(3)}, "", len(own)), own[0], len(own),
                               np.array(own)) for kind, own in (
        ("audio", [2, 3]), ("image", [4, 5, 6]), ("audio", [7]))]  # one after the other
    given = InputEmbeds.of_items(places, None)
    found = given.seen_together("images", range(9))
    assert found.ranges.tolist() == [[4, 7]]
    assert [own == other for own, other in zip(found.keys, given.keys, strict=True)] == \
        [True] * 2 + [False] * 3 + [True]


def test_rows_are_named_by_all_rows_of_their_range():
    one = embeds(2, 3, keys=[b"a", b"b"]).seen_together("images", range(9))
    other = embeds(2, 3, keys=[b"a", b"c"]).seen_together("images", range(9))
    assert one.key(2, 3) != other.key(2, 3)
    prompts = [embeds(2, 3).seen_together("prompt", ids) for ids in ([1] * 9, [1] * 9, [1] * 8)]
    assert prompts[0].ranges.tolist() == [[0, 9]]
    assert prompts[0].salt == prompts[1].salt != prompts[2].salt
