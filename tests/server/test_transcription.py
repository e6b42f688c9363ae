"""Speech over HTTP, by a server process."""

import io
import json

import openai
import pytest
import soundfile
import speech
from server_process import serving

import llmc


@pytest.fixture(scope="module")
def speech_server(tiny_speech):
    with serving(tiny_speech[2]) as own:
        yield own


@pytest.fixture(scope="module")
def expected(tiny_speech):
    with llmc.LLM(tiny_speech[2]) as llm:
        yield llm.transcribe(wav(1.8), language="en", timestamps=True)


def wav(seconds):
    file = io.BytesIO()
    soundfile.write(file, speech.sound(seconds, 1), 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def create(speech_server, response_format, **fields):
    return speech_server.client.audio.transcriptions.create(
        model="tiny", file=("sound.wav", wav(1.8)), language="en",
        response_format=response_format, **fields)


def test_the_formats_have_the_text_and_its_times(speech_server, expected):
    assert speech_server.client.models.list().data[0].input_modalities == ["audio"]
    answer = create(speech_server, "json")
    assert answer.text == expected.text and answer.usage.seconds == pytest.approx(1.8)
    assert create(speech_server, "text").strip() == expected.text
    verbose = create(speech_server, "verbose_json", timestamp_granularities=["segment"])
    assert verbose.text == expected.text and verbose.language == "en"
    assert [(own.start, own.end, own.text, tuple(own.tokens)) for own in verbose.segments] == [
        (own.start, own.end, own.text, own.token_ids) for own in expected.segments]
    first = expected.segments[0]
    stamp = f"00:00:{int(first.start):02}%s{round(first.start % 1 * 1000):03} --> 00:00:"
    srt, vtt = create(speech_server, "srt"), create(speech_server, "vtt")
    assert srt.startswith(f"1\n{stamp % ','}") and first.text.strip() in srt
    assert vtt.startswith(f"WEBVTT\n\n{stamp % '.'}") and first.text.strip() in vtt
    assert srt.count(" --> ") == vtt.count(" --> ") == len(expected.segments)


@pytest.mark.parametrize("response_format", ["json", "text"])
def test_a_stream_has_the_text_in_parts(response_format, speech_server, tiny_speech):
    with llmc.LLM(tiny_speech[2]) as llm:
        expected = llm.transcribe(wav(0.8), language="en")
    *deltas, done = speech_server.client.audio.transcriptions.create(
        model="tiny", file=("sound.wav", wav(0.8)), language="en", stream=True,
        response_format=response_format)
    assert {own.type for own in deltas} == {"transcript.text.delta"} and len(deltas) > 1
    assert "".join(own.delta for own in deltas) == expected.text
    assert (done.type, done.text) == ("transcript.text.done", expected.text)
    assert done.usage.output_tokens == expected.completion_tokens
    assert done.usage.input_tokens == expected.prompt_tokens + 50  # rows of the encoder
    assert done.usage.input_token_details.audio_tokens == 50


def test_long_audio_is_streamed_by_windows(speech_server, expected):
    *deltas, done = speech_server.client.audio.transcriptions.create(
        model="tiny", file=("sound.wav", wav(1.8)), language="en", stream=True)
    assert "".join(own.delta for own in deltas) == expected.text == done.text


def test_thresholds_and_a_seed_decide_what_is_decoded_again(speech_server):
    bad = {"fallback_temperatures": [0.5, 1.0], "logprob_threshold": 0.0, "seed": 1}
    answers = [create(speech_server, "verbose_json", extra_body=bad) for _ in range(2)]
    assert answers[0].text == answers[1].text
    assert {own.temperature for own in answers[0].segments} == {1.0}
    assert all(own.avg_logprob < 0 and own.compression_ratio > 0 for own in answers[0].segments)
    good = create(speech_server, "verbose_json", extra_body={**bad, "logprob_threshold": -50.0})
    assert good.text == create(speech_server, "json").text
    silent = create(speech_server, "json", extra_body={
        "logprob_threshold": 0.0, "no_speech_threshold": 0.0})
    assert silent.text == ""


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # openai's, of a type
def test_a_translation_has_another_task(speech_server, tiny_speech):
    with llmc.LLM(tiny_speech[2]) as llm:
        expected = llm.transcribe(wav(0.8), task="translate")
    answer = speech_server.client.audio.translations.create(
        model="tiny", file=("sound.wav", wav(0.8)), response_format="json")
    assert answer.text == expected.text


@pytest.mark.parametrize(("fields", "param", "match"), [
    ({"file": ("a.wav", b"no audio at all")}, None, "15 bytes are no audio"),
    ({"file": ("a.wav", b"")}, "file", "the form has no file"),
    ({"language": "fr"}, "language", "language 'fr' is not supported; supported: de, en"),
    ({"response_format": "xml"}, "response_format", "response_format: Input should be"),
    ({"temperature": 3}, "temperature", "temperature: Input should be less"),
    ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "Input should be 'segment"),
    ({"stream": True, "response_format": "srt"}, "stream", "does not go with response_format srt"),
    ({"stream": True, "file": ("a.wav", b"no audio")}, None, "8 bytes are no audio"),
    ({"extra_body": {"no_speech_threshold": 0.6}}, None, "without logprob_threshold"),
    ({"extra_body": {"fallback_temperatures": [3]}}, "fallback_temperatures", "less than or equal"),
    ({"model": "other"}, "model", "unknown model 'other'"),
])
def test_wrong_fields_are_refused(fields, param, match, speech_server):
    given = {"model": "tiny", "file": ("sound.wav", wav(0.5))} | fields
    with pytest.raises(openai.APIStatusError, match=match) as caught:
        speech_server.client.audio.transcriptions.create(**given)
    assert caught.value.status_code in (400, 404) and caught.value.param == param


@pytest.mark.parametrize(("body", "kind", "status", "match"), [
    (b"{}", "application/json", 415, "expected multipart/form-data"),
    (b"--x\r\nno end", "multipart/form-data; boundary=x", 400, "no complete multipart form"),
    (b"--x--\r\n", "multipart/form-data", 400, "no complete multipart form"),
    (b"--x\r\nA: b\r\n\r\n1\r\n--x--\r\n", "multipart/form-data; boundary=x", 400, "has no name"),
])
def test_a_body_that_is_no_form_is_refused(body, kind, status, match, speech_server):
    got, _, answer = speech_server.post("/v1/audio/transcriptions", body, **{"content-type": kind})
    assert got == status and match in answer["error"]["message"]


def test_other_endpoints_refuse_a_model_of_audio(speech_server):
    status, _, answer = speech_server.post("/v1/completions", {"prompt": "w5"})
    assert status == 400 and "reads audio and no text" in answer["error"]["message"]


def test_the_description_has_forms(speech_server):
    described = json.loads(speech_server.get("/openapi.json"))
    body = described["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]
    assert [*body["content"]] == ["multipart/form-data"]


def test_a_causal_lm_refuses_audio(client):
    with pytest.raises(openai.BadRequestError, match="does not transcribe speech"):
        client.audio.transcriptions.create(model="tiny", file=("sound.wav", wav(0.5)))
