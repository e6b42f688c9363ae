"""Speech: tokens, segments and languages equal transformers' generate."""

import dataclasses
import json
import shutil

import ctranslate2
import numpy as np
import pytest
import soundfile
import speech
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from transformers import WhisperFeatureExtractor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import llmc
from llmc import LlmcError, SamplingParams
from llmc.cli import main
from llmc.compiler.check.diff import diff
from llmc.runtime.core.llm import _completions
from llmc.runtime.core.loop import Scheduling
from llmc.runtime.core.transcription import TranscriptionStream
from llmc.runtime.sampling.speech_fallback import SpeechOptions
from llmc.runtime.sampling.speech_rules import TimestampRules


@pytest.fixture(scope="module")
def loaded(tiny_speech):
    model, directory, case = tiny_speech
    with llmc.LLM(case) as llm:
        yield model, WhisperFeatureExtractor.from_pretrained(directory), llm


def truth(model, extractor, waveform, **options):
    """transformers' segments: start, end, tokens."""
    is_long = len(waveform) > extractor.n_samples
    features = extractor(waveform, sampling_rate=16_000, return_tensors="pt",
                         truncation=not is_long, padding="longest" if is_long else "max_length")
    with torch.no_grad():
        out = model.generate(features["input_features"], do_sample=False, return_segments=True,
                             **options)
    return [(float(own["start"]), float(own["end"]), own["tokens"].tolist())
            for own in out["segments"][0]]


def check(found, expected):
    assert [[*own.token_ids] for own in found.segments] == [tokens for _, _, tokens in expected]
    np.testing.assert_allclose([(own.start, own.end) for own in found.segments],
                               [own[:2] for own in expected], atol=1e-5)


@pytest.mark.parametrize(("language", "seconds", "seed", "beams", "task"), [
    ("en", 0.9, 0, 1, "transcribe"), ("de", 0.9, 1, 1, "translate"),
    (None, 0.4, 2, 1, "transcribe"), ("en", 2.6, 3, 1, "transcribe"),
    (None, 1.7, 0, 3, "transcribe")])
def test_segments_with_timestamps_are_those_of_transformers(language, seconds, seed, beams, task,
                                                            loaded):
    model, extractor, llm = loaded
    waveform = speech.sound(seconds, seed)
    expected = truth(model, extractor, waveform, language=language, task=task,
                     return_timestamps=True, num_beams=beams)
    params = None if beams == 1 else SamplingParams(
        beam_width=beams, max_tokens=speech.POSITIONS, temperature=0)
    found = llm.transcribe(waveform, language=language, task=task, timestamps=True, params=params)
    check(found, expected)
    assert found.duration == pytest.approx(seconds)
    assert found.language == (language or found.language) and found.language in ("en", "de")


def test_a_window_without_timestamps_is_one_segment(loaded):
    model, extractor, llm = loaded
    waveform = speech.sound(0.9, 3)
    expected = truth(model, extractor, waveform, language="en", task="transcribe",
                     return_timestamps=False, force_unique_generate_call=True)
    segment, = llm.transcribe(waveform, language="en").segments
    assert [*segment.token_ids] == [token for _, _, tokens in expected for token in tokens]
    assert (segment.start, segment.end) == (0, speech.WINDOW)


def test_log_probabilities_are_those_of_transformers_on_one_and_two_ranks(tiny_speech, loaded,
                                                                          tmp_path):
    model, directory, case = tiny_speech
    _, extractor, _ = loaded
    llmc.compile(directory, tmp_path / "tp2", tp_size=2)
    waveform = speech.sound(0.9, 1)
    features = extractor(waveform, sampling_rate=16_000, return_tensors="pt")["input_features"]
    for each in (case, tmp_path / "tp2"):
        with llmc.LLM(each) as llm:
            request = TranscriptionStream(llm.transcriber.run(
                waveform, "de", "transcribe", False, "", SamplingParams(
                    max_tokens=20, temperature=0, logprobs=0), None)).advance()
            done, = _completions([request], llm._stream([request], Scheduling()),
                                 lambda piece: None)
        tokens = [*request.prompt, *done.token_ids]
        with torch.no_grad():
            logits = model(input_features=features,
                           decoder_input_ids=torch.tensor([tokens[:-1]])).logits[0]
        chosen = torch.log_softmax(logits, -1)[range(len(request.prompt) - 1, len(tokens) - 1),
                                               list(done.token_ids)]
        np.testing.assert_allclose([own.chosen for own in done.logprobs], chosen, atol=1e-4)


def test_files_and_bytes_are_read_at_any_rate(loaded, tmp_path):
    _, _, llm = loaded
    waveform = speech.sound(0.9, 2, rate=8_000)
    soundfile.write(tmp_path / "sound.wav", np.stack([waveform, waveform], 1), 8_000)
    expected = llm.transcribe((tmp_path / "sound.wav").read_bytes(), language="en")
    assert llm.transcribe(tmp_path / "sound.wav", language="en") == expected
    assert llm.transcribe(str(tmp_path / "sound.wav"), language="en") == expected
    assert expected.duration == pytest.approx(0.9)


def fallbacks(llm, waveform, **fields):
    return llm.transcribe(waveform, language="en", timestamps=True,
                          options=SpeechOptions(**fields))


@pytest.mark.parametrize(("seconds", "fields"), [
    (2.6, {"logprob_threshold": -50.0, "no_speech_threshold": 0.9}),  # all is kept
    (2.6, {"logprob_threshold": 0.0, "no_speech_threshold": 1e-9}),  # all is silence
    (2.6, {"condition_on_prev_tokens": True}),
    (2.6, {"condition_on_prev_tokens": True, "logprob_threshold": -50.0,
           "compression_ratio_threshold": 9.0}),
])
def test_thresholds_and_earlier_text_are_those_of_transformers(seconds, fields, loaded):
    model, extractor, llm = loaded
    waveform = speech.sound(seconds, 3)
    expected = truth(model, extractor, waveform, language="en", task="transcribe",
                     return_timestamps=True, temperature=0.0, **fields)
    check(fallbacks(llm, waveform, **fields), expected)


@pytest.mark.parametrize("on_device", [False, True])
def test_thresholds_lie_where_those_of_transformers_do(on_device, loaded, monkeypatch):
    """Each window's values, found by bisection with transformers."""
    model, extractor, llm = loaded
    if on_device:  # the loop samples from logits, as for engines that sample on a device
        limits = llm._loops[0]._engine.limits
        monkeypatch.setattr(llm._loops[0]._engine, "limits",
                            dataclasses.replace(limits, applies_rules=False))
    waveform = speech.sound(0.9, 3)
    segment = fallbacks(llm, waveform, logprob_threshold=-50.0, no_speech_threshold=0.9,
                        compression_ratio_threshold=9.0).segments[0]

    def skips(logprob, no_speech):
        return not truth(model, extractor, waveform, language="en", task="transcribe",
                         return_timestamps=True, temperature=0.0, logprob_threshold=logprob,
                         no_speech_threshold=no_speech)

    mean, chance = segment.avg_logprob, segment.no_speech_prob
    assert 0 < chance < 1 and mean < 0
    assert skips(mean + 1e-3, chance * 0.999) and not skips(mean - 1e-3, chance * 0.999)
    assert not skips(mean + 1e-3, chance * 1.001)
    assert segment.compression_ratio == model._retrieve_compression_ratio(
        torch.tensor([*segment.token_ids, 1]), speech.VOCAB)


def test_a_bad_result_is_decoded_again_at_higher_temperatures(loaded):
    _, _, llm = loaded
    waveform = speech.sound(0.9, 3)
    found = fallbacks(llm, waveform, fallback_temperatures=(0.2, 0.4), logprob_threshold=0.0)
    assert {own.temperature for own in found.segments} == {0.4}
    good = fallbacks(llm, waveform, fallback_temperatures=(0.2, 0.4), logprob_threshold=-50.0)
    assert {own.temperature for own in good.segments} == {0.0}
    assert good.segments[0].token_ids == llm.transcribe(
        waveform, language="en", timestamps=True).segments[0].token_ids
    assert good.completion_tokens < found.completion_tokens


def test_device_engines_sample_speech_on_the_host(loaded, monkeypatch):
    _, _, llm = loaded
    waveform = speech.sound(1.7, 0)
    expected = llm.transcribe(waveform, timestamps=True)
    limits = llm._loops[0]._engine.limits
    monkeypatch.setattr(llm._loops[0]._engine, "limits",
                        dataclasses.replace(limits, applies_rules=False))
    assert llm.transcribe(waveform, timestamps=True) == expected


def test_a_window_is_encoded_once(loaded, monkeypatch):
    _, _, llm = loaded
    counts = []
    engine = llm._loops[0]._engine
    submit = engine.submit
    monkeypatch.setattr(engine, "submit",
                        lambda step: counts.append(len(step.encode)) or submit(step))
    found = llm.transcribe(speech.sound(0.9, 11), timestamps=True, options=SpeechOptions(
        fallback_temperatures=(0.2, 0.4), logprob_threshold=0.0, no_speech_threshold=1.0))
    windows = found.audio_tokens // 50
    assert sum(counts) == windows and len(counts) > 5 * windows


@pytest.mark.parametrize(("seconds", "timestamps"), [(0.9, False), (1.7, True), (2.6, False)])
def test_chunks_are_the_parts_of_the_result(seconds, timestamps, loaded):
    _, _, llm = loaded
    waveform = speech.sound(seconds, 3)
    *chunks, last = llm.stream_transcription(waveform, language="en", timestamps=timestamps)
    result = llm.transcribe(waveform, language="en", timestamps=timestamps)
    assert last.result == result and not last.text
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(own for chunk in chunks for own in chunk.segments) == result.segments
    assert timestamps or len([chunk for chunk in chunks if chunk.text]) > 1


@pytest.mark.parametrize(("fields", "match"), [
    ({"fallback_temperatures": (0.2,)}, "without a threshold"),
    ({"fallback_temperatures": (0.0,), "logprob_threshold": -1}, "give numbers above 0"),
    ({"fallback_temperatures": "0.2", "logprob_threshold": -1}, "give numbers above 0"),
    ({"logprob_threshold": "x"}, "logprob_threshold is 'x'; give a number"),
    ({"no_speech_threshold": 0.6}, "without logprob_threshold, which it needs"),
    ({"condition_on_prev_tokens": 1}, "give True or False"),
])
def test_invalid_options_are_refused(fields, match):
    with pytest.raises(LlmcError, match=match):
        SpeechOptions(**fields)


def test_a_prompt_precedes_the_start_token(loaded):
    model, extractor, llm = loaded
    waveform = speech.sound(0.9, 1)
    expected = truth(model, extractor, waveform, language="en", task="transcribe",
                     return_timestamps=True, prompt_ids=torch.tensor([66, 30, 31]))
    found = llm.transcribe(waveform, language="en", timestamps=True, prompt="w30 w31")
    check(found, expected[-len(found.segments):])


def test_timestamp_rules_are_those_of_transformers():
    class Config:
        no_timestamps_token_id, eos_token_id, max_initial_timestamp_index = 9, 5, 4

    theirs, ours = WhisperTimeStampLogitsProcessor(Config, 1), TimestampRules(10, 5, 4)
    rng = np.random.default_rng(0)
    for count in [0] * 20 + [*rng.integers(1, 7, 300)]:
        tokens = rng.choice([2, 3, *range(10, 20)], count).tolist()
        scores = rng.normal(size=20).astype(np.float32)
        expected = theirs(torch.tensor([[0, *tokens]]), torch.tensor(scores[None]).clone())[0]
        ours.apply(scores, tokens)
        np.testing.assert_array_equal(scores, expected.numpy())


@pytest.mark.parametrize(("work", "match"), [
    (lambda llm: llm.transcribe(speech.sound(0.5, 0), language="fr"),
     "language 'fr' is not supported; supported: de, en"),
    (lambda llm: llm.transcribe(speech.sound(0.5, 0), task="sing"),
     "task is 'sing'; give transcribe or translate"),
    (lambda llm: llm.transcribe(np.zeros(0, np.float32)), r"the waveform is float32 \[0\]; give"),
    (lambda llm: llm.transcribe(np.full(99, np.nan, np.float32)), "give finite"),
    (lambda llm: llm.transcribe(np.zeros(3 * 3600 * 16_000, np.float32)),
     "the audio is 10800 s long, above 3600 s, the limit; split it"),
    (lambda llm: llm.transcribe(b"no audio"), "8 bytes are no audio"),
    (lambda llm: llm.transcribe("/nowhere.wav"), "'/nowhere.wav' cannot be read"),
    (lambda llm: llm.transcribe(7), "audio is 7; give a path"),
    (lambda llm: llm.transcribe(speech.sound(0.5, 0), prompt=5), "prompt is 5; give a text"),
    (lambda llm: llm.generate("w5"), "reads audio and no text; use transcribe"),
    (lambda llm: llm.transcribe(speech.sound(0.5, 0), prompt=" ".join(["w20"] * 99),
                                language="en", params=SamplingParams(beam_width=99)),
     "beam_width 99 exceeds max_batch_size"),
])
def test_invalid_input_is_refused(work, match, loaded):
    with pytest.raises(LlmcError, match=match) as caught:
        work(loaded[2])
    assert "\n" not in str(caught.value)


def test_a_causal_lm_does_not_transcribe(case_tp1):
    with llmc.LLM(case_tp1) as llm, \
            pytest.raises(LlmcError, match="does not transcribe speech; give an encoder-decoder"):
        llm.transcribe(speech.sound(0.5, 0))


def test_commands_of_text_refuse_a_model_of_audio(tiny_speech):
    case = str(tiny_speech[2])
    for arguments, match in (
            (("bench", "--batch_size", "1", "--input_output_len", "4,2", "--runs", "1"),
             "; measure it with --audio SECONDS"),
            (("run", "--prompt", "w5"), "reads audio and no text; use transcribe")):
        result = CliRunner().invoke(main, [arguments[0], "--case_dir", case, *arguments[1:]])
        assert result.exit_code == 2 and match in result.stderr
    assert "encoder: 2 layers" in CliRunner().invoke(main, ["inspect", case]).stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("audio")
    for name, seconds in (("a", 0.9), ("b", 1.8)):
        soundfile.write(root / f"{name}.wav", speech.sound(seconds, 3), 16_000, subtype="FLOAT")
    (root / "bad.wav").write_bytes(b"no audio")
    return root


def invoke(*arguments):
    return CliRunner().invoke(main, [str(own) for own in arguments])


def test_run_prints_text_and_segments_of_audio(tiny_speech, files, loaded):
    _, _, case = tiny_speech
    expected = loaded[2].transcribe(files / "b.wav", language="en")
    result = invoke("run", case, "--audio", files / "b.wav", "--language", "en")
    assert result.exit_code == 0 and result.stdout == f"{expected.text}\n"
    assert "1.80 s of audio in" in result.stderr
    lines = invoke("run", case, "--audio", files / "b.wav", "--language", "en",
                   "--timestamps").stdout.splitlines()
    assert len(lines) == len(expected.segments)
    assert lines[0] == f"[00:00:{expected.segments[0].start:06.3f} --> " \
        f"00:00:{expected.segments[0].end:06.3f}] {expected.segments[0].text.strip()}"
    found, = json.loads(invoke("run", case, "--audio", files / "b.wav", "--language", "en",
                               "--json").stdout)["transcriptions"]
    assert found["text"] == expected.text and found["language"] == "en"
    assert [own["start"] for own in found["segments"]] == [own.start for own in expected.segments]


def test_run_transcribes_the_other_files_if_one_is_damaged(tiny_speech, files):
    _, _, case = tiny_speech
    given = [part for name in ("a", "bad", "b") for part in ("--audio", files / f"{name}.wav")]
    result = invoke("run", case, *given, "--json")
    assert result.exit_code == 1 and "1 of 3 audio files failed" in result.stderr
    found = json.loads(result.stdout.splitlines()[0])["transcriptions"]
    assert [("error" in own, "text" in own) for own in found] == [
        (False, True), (True, False), (False, True)]
    alone = invoke("run", case, "--audio", files / "bad.wav")
    assert alone.exit_code == 2 and alone.stderr.startswith("error: 8 bytes are no audio (Format ")
    assert "object at" not in alone.stderr


def test_a_file_that_is_given_twice_is_transcribed_twice(tiny_speech, files):
    found = json.loads(invoke("run", tiny_speech[2], *("--audio", files / "a.wav") * 2,
                              "--json").stdout)["transcriptions"]
    assert len(found) == 2 and found[0] == found[1]


def test_drafts_of_text_do_not_change_a_transcription(tiny_speech, files):
    plain, drafted = (invoke("run", tiny_speech[2], "--audio", files / "a.wav", "--speculate", own)
                      for own in ("off", "ngram"))
    assert drafted.exit_code == 0 and drafted.stdout == plain.stdout != ""


@pytest.mark.parametrize(("arguments", "match"), [
    (("--language", "en"), "--language is given without --audio"),
    (("--audio", "x.wav", "--chat"), "--chat is given with --audio"),
    (("--audio", "x.wav", "--adapter", "a"), "--adapter is given with --audio"),
    (("--audio", "x.wav", "--n", "2"), "n is 2, but audio has one transcription"),
    (("--audio", "x.wav", "--prompt", "a", "--prompt", "b"), "2 prompts are given with --audio"),
    (("--audio", "x.wav", "--fallback_temperatures", "a"), "expected numbers; give a list such"),
    (("--audio", "x.wav", "--no_speech_threshold", "0.6"), "without logprob_threshold"),
    (("--audio", "x.wav", "--language", "fr"), "language 'fr' is not supported"),
    (("--audio", "x.wav"), "'x.wav' cannot be read (No such file or directory); give"),
])
def test_run_refuses_wrong_options_of_audio(arguments, match, tiny_speech):
    result = invoke("run", tiny_speech[2], *arguments)
    assert result.exit_code == 2 and match in result.stderr
    assert result.stderr.startswith("error: ")


def test_bench_measures_the_real_time_factor(tiny_speech, case_tp1):
    row, = json.loads(invoke("bench", tiny_speech[2], "--audio", 1.5, "--batch_size", 2, "--runs",
                             1, "--json").stdout)
    assert row["batch"] == 2 and row["audio_seconds"] == 1.5
    assert row["real_time_factor"] == pytest.approx(row["latency_ms"] / 3000)
    assert "real-time" in invoke("bench", tiny_speech[2], "--audio", 1, "--batch_size", 1,
                                 "--runs", 1).stdout
    for case, seconds, match in ((tiny_speech[2], 0, "--audio is 0 seconds; give more than 0"),
                                 (case_tp1, 1, "does not transcribe speech")):
        refused = invoke("bench", case, "--audio", seconds)
        assert refused.exit_code == 2 and match in refused.stderr


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    paths = [folder / f"{seconds}.wav" for seconds in (0.5, 2.5)]
    for index, path in enumerate(paths):
        soundfile.write(path, speech.sound(float(path.stem), index), 16_000, subtype="FLOAT")
    return paths


@pytest.mark.parametrize("tp_size", [1, 2])
def test_diff_compares_audio(tiny_speech, sounds, tp_size, tmp_path):
    case = tiny_speech[2]
    if tp_size > 1:
        case = tmp_path / "case"
        llmc.compile(tiny_speech[1], case, tp_size=tp_size)
    report = diff(case, tiny_speech[1], audio=sounds)
    assert report.verdict is None, report
    assert {f"{name} (audio {index})" for index in range(2) for name in (
        "memory_key_0", "memory_value_2", "hidden_states.0", "hidden_states.2", "logits")} <= {
            own.name for own in report.layers}


def test_diff_finds_weights_of_another_model_of_audio(tiny_speech, sounds, tmp_path):
    shutil.copytree(tiny_speech[1], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = "model.decoder.layers.1.encoder_attn.v_proj.weight"
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = diff(tiny_speech[2], tmp_path / "hf", audio=sounds[:1])
    assert report.first_layer == "memory_value_1 (audio 0)" and name in report.verdict
    assert {own.name for own in report.weights} == {name}


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "--audio is absent, but the model is 'WhisperForConditionalGeneration', which transc"),
    (["--audio", "SOUND", "--tokens", "4"], "--tokens is not supported for 'WhisperFor"),
    (["--audio", "none.wav"], "'none.wav' cannot be read")])
def test_diff_refuses_what_does_not_apply_to_speech(tiny_speech, sounds, arguments, message):
    result = invoke("diff", tiny_speech[2], "--reference", tiny_speech[1], *(
        sounds[0] if own == "SOUND" else own for own in arguments))
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.thorough
def test_real_weights_transcribe_as_transformers_does(tmp_path):
    model = ctranslate2.write_huggingface(ctranslate2.tiny_en(), tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path / "hf")
    waveform, rate = soundfile.read(speech.SENTENCES, dtype="float32")
    assert rate == 16_000
    with llmc.LLM(tmp_path / "case") as llm:
        found = llm.transcribe(speech.SENTENCES, timestamps=True)
        check(found, truth(model, extractor, waveform, return_timestamps=True))
        assert "over the lazy dog" in found.text
        with pytest.raises(LlmcError, match="the model has one language only; leave it out"):
            llm.transcribe(waveform, language="de")
