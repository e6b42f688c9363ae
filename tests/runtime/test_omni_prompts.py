"""Prompts with images and audio of one model generate as transformers does."""

import json

import numpy as np
import pytest
import soundfile
from audio_models import assert_audio_diff, clips
from image_models import assert_image_diff, images
from omni_models import GREEDY, MODELS, assert_generates, marks_of, prompts_of, write_model
from processor_checkpoints import speech_of

import llmc
from llmc.compiler.check.answers import answers
from llmc.errors import LlmcError


@pytest.fixture
def model(tiny_omni):
    return tiny_omni


# The defaults; and chunks that end within items, of prompts that take turns.
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24, "max_batch_size": 4}])
def test_items_of_both_kinds_generate_as_transformers(model, options):
    with llmc.LLM(model[1], **options) as llm:
        prompts = prompts_of("qwen2_5_omni")
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model[0], llm, prompt, completion)


def test_other_items_under_the_same_tokens_are_told_apart_in_cached_prefixes(model):
    def cached(pictures, sounds):
        prompt = {"prompt": f"{image} and {audio} and so on", "images": pictures, "audio": sounds}
        result = next(iter(llm.stream(prompt, GREEDY)))
        return result.num_cached_tokens

    audio, image = marks_of("qwen2_5_omni")
    clip, shorter = clips(2)
    other = np.pad(shorter, (0, len(clip) - len(shorter)))  # as many rows
    picture, = images(1)
    with llmc.LLM(model[1]) as llm:
        rows = [len(own.positions) for own in llm.media_prompt(
            f"{image}{audio}", images=[picture], audio=[clip]).ranges]
        assert cached([picture], [clip]) == 0
        whole = cached([picture.copy()], [clip.copy()])
        assert whole > sum(rows)
        assert rows[0] < cached([picture], [other]) < whole - rows[1]
        assert cached([picture.transpose(0)], [clip]) < rows[0]


def test_the_model_that_speaks_is_left_out_with_a_note(model, tmp_path):
    notes = []
    write_model("qwen2_5_omni", tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", language_model_only=True,
                 progress=notes.append)
    assert [str(note) for note in notes if "speech" in note] == [
        "output of speech is not supported: only the thinker of 'qwen2_5_omni' is compiled, "
        "without talker"]
    with llmc.LLM(tmp_path / "case") as llm:
        completion, = llm.generate("hello there", GREEDY)
        assert llm.processor is None
    with llmc.LLM(model[1]) as llm:  # the language model is the same
        assert llm.generate("hello there", GREEDY)[0].token_ids == completion.token_ids


def test_videos_are_refused_by_name(model):
    with llmc.LLM(model[1]) as llm, pytest.raises(LlmcError, match="is a video, which llmc does"):
        llm.chat_prompt([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])


def assert_answers(prompts, case, directory):
    """`llmc eval --task answers` scores as transformers."""
    lines = []
    for number, prompt in enumerate(prompts):
        files = {key: [directory / f"{number}-{index}.{suffix}" for index in range(
            len(prompt.get(key, ())))] for key, suffix in (("images", "png"), ("audio", "wav"))}
        for path, image in zip(files["images"], prompt.get("images", ()), strict=True):
            image.save(path)
        for path, clip in zip(files["audio"], prompt.get("audio", ()), strict=True):
            soundfile.write(path, clip, 16_000, subtype="FLOAT")
        lines.append({"prompt": prompt["prompt"], "answer": "two words",
                      **{key: list(map(str, paths)) for key, paths in files.items()}})
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = answers(case, data=directory / "data.jsonl", hf_dir=case.parent / "hf", max_tokens=3)
    assert report.verdict is None and report.count == len(lines), report
    assert abs(report.scores[1].difference) < 1e-5
    assert all(own.llmc == own.transformers for own in report.answers)


def test_answers_about_both_kinds_score_as_transformers(model, tmp_path):
    assert_answers(prompts_of("qwen2_5_omni")[-1:], model[1], tmp_path)


@pytest.mark.thorough
def test_diff_compares_images_between_the_tokens_of_the_chat_template(model, tmp_path):
    assert_image_diff(model[1], tmp_path, "rows of image 1")


@pytest.mark.thorough
def test_diff_compares_images_and_clips_of_one_prompt(model, tmp_path):
    images(1)[0].save(tmp_path / "0.png")
    assert_audio_diff(model[1], tmp_path, [tmp_path / "0.png"])


@pytest.mark.thorough
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_families_generate_as_transformers(name, tp_size, tmp_path):
    # Qwen3-Omni's encoder reads padding of a clip below 1 s, unless it is alone.
    longer = 0.5 if name == "qwen3_omni_moe" else 0.0
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size)
    with llmc.LLM(tmp_path / "case") as llm:
        prompts = prompts_of(name, longer)
        for seconds in (0.23, 5.3 if name == "qwen3_omni_moe" else 2.9):  # alone
            prompts.append({"prompt": f"{marks_of(name)[0]}?", "audio": [speech_of(seconds)]})
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)
    if tp_size == 1 and name != "qwen2_5_omni":
        assert_answers(prompts_of(name, longer), tmp_path / "case", tmp_path)
        assert_image_diff(tmp_path / "case", tmp_path, "rows of image 1")
