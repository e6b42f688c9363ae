"""Prompts with audio: compiled encoders and language models generate as transformers does."""

import base64

import numpy as np
import pytest
import soundfile
from audio_models import (
    GREEDY,
    MODELS,
    WINDOW,
    assert_audio_diff,
    assert_generates,
    clips,
    hours,
    prompts_of,
    write_model,
)
from click.testing import CliRunner

import llmc
from llmc.cli import main
from llmc.runtime.engines import image_encoder


@pytest.fixture
def model(tiny_audio):
    return tiny_audio


def test_clips_generate_as_transformers(model):
    with llmc.LLM(model[1]) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model[0], llm, prompt, completion)


@pytest.mark.thorough
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_families_generate_as_transformers(name, tp_size, tmp_path):
    model = write_model(name, tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size)
    with llmc.LLM(tmp_path / "case") as llm:
        prompts = prompts_of(llm)
        if name != "qwen2_audio":  # which reads one window of a clip
            own = llm.processor.placeholders["audio"]
            prompts.append({"prompt": f"{own}{own}", "audio": clips(2, longer=3.2)})
        for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert_generates(model, llm, prompt, completion)
    assert_audio_diff(tmp_path / "case", tmp_path)


# A chunk ends within a clip; blocks are short; one clip at a time fits into the cache.
@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 24, "max_batch_size": 4},
    {"encoder_cache_gb": 1e-5, "max_num_batched_tokens": 100}])
def test_chunks_and_eviction_change_nothing(model, options):
    reference, case = model
    with llmc.LLM(case, **options) as llm:
        prompts = prompts_of(llm)
        for prompt, completion in zip(prompts * 2, llm.generate(prompts * 2, GREEDY), strict=True):
            assert_generates(reference, llm, prompt, completion)


def test_clips_are_encoded_once_and_told_apart_in_cached_prefixes(model, monkeypatch):
    encoded = []
    real = image_encoder.MediaEncoder.encode
    monkeypatch.setattr(image_encoder.MediaEncoder, "encode",
                        lambda self, arrays: encoded.append(1) or real(self, arrays))

    def cached(prompt):
        return next(iter(llm.stream(prompt, GREEDY))).num_cached_tokens

    one, other, _ = clips()
    other = np.pad(other, (0, len(one) - len(other)))  # as many rows
    with llmc.LLM(model[1]) as llm:
        text = f"listen to {llm.processor.placeholders['audio']} and tell"
        assert cached({"prompt": text, "audio": [one]}) == 0
        assert cached({"prompt": text, "audio": [one.copy()]}) >= 30
        assert len(encoded) == 1
        rows = len(llm.media_prompt(text, audio=[one]).ranges[0].positions)
        assert len(llm.media_prompt(text, audio=[other]).ranges[0].positions) == rows
        assert cached({"prompt": text, "audio": [other]}) < rows
        assert len(encoded) == 2


def test_files_urls_pairs_with_a_rate_and_chats(model, tmp_path):
    clip, = clips(1)
    soundfile.write(tmp_path / "a.wav", clip, 16_000, subtype="FLOAT")
    data = (tmp_path / "a.wav").read_bytes()
    with llmc.LLM(model[1]) as llm:
        own = llm.processor.placeholders["audio"]
        text = f"hear {own} now"
        given = llm.generate({"prompt": text, "audio": [clip]}, GREEDY)[0].token_ids
        url = "data:audio/wav;base64," + base64.b64encode(data).decode()
        for each in (tmp_path / "a.wav", data, url, (clip, 16_000), (clip.astype(float), 16_000)):
            assert llm.generate({"prompt": text, "audio": [each]}, GREEDY)[0].token_ids == given
        half = llm.media_prompt(own, audio=[(clip[::2], 8_000)])  # resampled to as many frames
        assert len(half) == len(llm.media_prompt(own, audio=[clip]))
        ids = llm.tokenize(text)
        assert llm.generate({"prompt_token_ids": ids, "audio": [clip]}, GREEDY)[0].token_ids \
            == given


def test_bad_audio_is_named_and_leaves_other_prompts_alone(model):
    with llmc.LLM(model[1]) as llm:
        own = llm.processor.placeholders["audio"]
        long = np.zeros(16_000 * WINDOW + 1, np.float32)
        for prompt, message in (
                ({"prompt": own, "audio": [b"no audio"]}, "audio clip 0: 8 bytes are no audio"),
                ({"prompt": own, "audio": [long]}, "takes at most 2 s; split it"),
                ({"prompt": own, "audio": [hours()]}, "audio clip 0: the audio is longer than 2 s"),
                ({"prompt": own, "audio": [np.zeros(0, np.float32)]}, "the audio has no samples"),
                ({"prompt": own, "audio": [(np.zeros(0), 8_000)]}, "the audio has no samples"),
                ({"prompt": own, "audio": ["http://example.com/a.wav"]}, "as only data: URLs are"),
                ({"prompt": own, "audio": [(clips(1)[0], 10)]}, "its rate is 10"),
                ({"prompt": own, "audio": [np.zeros((2, 9))]}, "an array of mono samples"),
                ({"prompt": "a", "audio": clips(1)}, "0 placeholders"),
                ({"prompt": own, "images": [b""]}, "this model takes no images"),
                ({"prompt": own + own, "audio": clips(1)}, "2 placeholders")):
            with pytest.raises(llmc.LlmcError, match=message):
                llm.generate([prompt, "hello"], GREEDY)
        assert len(llm.generate("hello", GREEDY)[0].token_ids) == 10


def test_run_takes_audio_in_prompts(model, tmp_path):
    soundfile.write(tmp_path / "a.wav", clips(1)[0], 16_000)
    with llmc.LLM(model[1]) as llm:
        own = llm.processor.placeholders["audio"]
        expected, = llm.generate({"prompt": f"{own} a", "audio": [tmp_path / "a.wav"]},
                                 llmc.SamplingParams(max_tokens=5, temperature=0))
    arguments = ["run", str(model[1]), "--audio", str(tmp_path / "a.wav"), "--prompt", f"{own} a",
                 "--max_tokens", "5", "--temperature", "0"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert expected.text in result.output
    result = CliRunner().invoke(main, [*arguments, "--language", "en"])
    assert "--language is given, but 'Qwen2AudioForConditionalGeneration'" in result.output




def test_run_refuses_bad_audio_by_one_sentence(model, tmp_path):
    with llmc.LLM(model[1]) as llm:
        own = llm.processor.placeholders["audio"]
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 16_000)
    (tmp_path / "none.wav").write_bytes(b"no audio")
    (tmp_path / "hours.flac").write_bytes(hours())
    for path, text, message in (
            (tmp_path / "empty.wav", own, "audio clip 0: the audio has no samples"),
            (tmp_path / "none.wav", own, "audio clip 0: 8 bytes are no audio"),
            (tmp_path / "hours.flac", own, "audio clip 0: the audio is longer than 2 s"),
            ("https://example.com/a.wav", own, "is not read, as only data: URLs are"),
            (tmp_path / "hours.flac", "none", "the audio is longer than 2 s")):
        result = CliRunner().invoke(main, ["run", str(model[1]), "--audio", str(path), "--prompt",
                                           text])
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1], result.stderr


def test_diff_compares_clips(model, tmp_path):
    assert_audio_diff(model[1], tmp_path)
