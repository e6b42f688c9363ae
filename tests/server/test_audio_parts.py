"""Audio in requests: each interface, OpenAI's client, images beside it, bad audio, large bodies."""

import base64
import io

import audio_models
import media_case
import numpy as np
import pytest
import soundfile
from server_process import serving

import llmc

CHAT = "/v1/chat/completions"
LARGE = 300_000  # bytes


@pytest.fixture(scope="module")
def server(tiny_omni):
    with serving(tiny_omni[1], "--max_request_bytes", 100_000,
                 "--max_media_request_bytes", LARGE) as own:
        yield own


def wav(samples, rate=16_000):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


CLIP, OTHER = (wav(own) for own in audio_models.clips(2))


def spoken(data):
    return {"type": "input_audio", "input_audio": {
        "data": base64.b64encode(data).decode(), "format": "wav"}}


def url(data):
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def ask(server, *content):
    """Return status and body of a chat completion."""
    status, _, body = server.post(CHAT, {
        "messages": [{"role": "user", "content": [*content]}], "max_tokens": 6, "temperature": 0})
    return status, body


def test_parts_of_both_interfaces_give_the_answer_of_the_library(server, tiny_omni):
    text = {"type": "text", "text": "what is said?"}
    params = llmc.SamplingParams(max_tokens=6, temperature=0)
    with llmc.LLM(tiny_omni[1]) as llm:
        expected = []
        for data in (CLIP, OTHER):
            prompt = llm.chat_prompt([{"role": "user", "content": [
                {"type": "audio", "audio": data}, text]}])
            expected.append((llm.generate([prompt], params)[0].text, len(prompt)))
    for part in (spoken(CLIP), {"type": "audio_url", "audio_url": {"url": url(CLIP)}}):
        status, body = ask(server, part, text)
        assert (status, body["choices"][0]["message"]["content"],
                body["usage"]["prompt_tokens"]) == (200, *expected[0])
    answer = server.client.chat.completions.create(
        model="tiny", max_tokens=6, temperature=0,
        messages=[{"role": "user", "content": [spoken(OTHER), text]}])
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected[1]


def test_models_name_audio(server):
    assert server.client.models.list().data[0].input_modalities == [
        "text", "image", "audio"]


def test_a_message_has_images_and_audio(server, tiny_omni):
    url, text = media_case.data_url(media_case.picture()), {"type": "text", "text": "and?"}
    status, body = ask(server, {"type": "image_url", "image_url": {"url": url}}, spoken(CLIP), text)
    with llmc.LLM(tiny_omni[1]) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": [
            {"type": "image", "image": url}, {"type": "audio", "audio": CLIP}, text]}])
        expected, = llm.generate([prompt], llmc.SamplingParams(max_tokens=6, temperature=0))
    assert (status, body["choices"][0]["message"]["content"],
            body["usage"]["prompt_tokens"]) == (200, expected.text, len(prompt))


def test_bad_audio_is_an_error_of_the_request(server):
    for part, message in (
            (spoken(b"no audio"), "are no audio"),
            (spoken(wav(audio_models.clips(1, longer=2.0)[0])), "longer than 3 s, the limit"),
            (spoken(wav(np.zeros(0))), "audio clip 0: the audio has no samples"),
            (spoken(audio_models.hours()), "audio clip 0: the audio is longer than 3 s"),
            ({"type": "audio_url", "audio_url": {"url": "http://example.com/a.wav"}},
             "allows no http URLs"),
            ({"type": "input_audio", "input_audio": {"data": "?"}}, "invalid base64"),
            ({"type": "image_url", "image_url": {"url": "data:,"}}, "data: URL")):
        status, body = ask(server, part)
        assert status == 400 and message in body["error"]["message"], body
    assert ask(server, {"type": "text", "text": "hello"})[0] == 200


def test_bodies_with_audio_may_be_larger(server):
    padding = {"type": "text", "text": " " * 10}
    clip = wav(audio_models.clips(1)[0])  # 88 kB, 117 kB in base64
    assert len(clip) > 80_000 and ask(server, spoken(clip), padding)[0] == 200
    status, body = ask(server, spoken(clip + bytes(LARGE)))
    assert status == 413 and f"more than {LARGE} bytes" in body["error"]["message"]
    status, _, body = server.post("/v1/completions", {"prompt": "a" * 200_000})
    assert status == 413 and "more than 100000 bytes" in body["error"]["message"]


def test_more_clips_than_the_limit_and_placeholders_in_text_are_refused(server, tiny_audio):
    status, body = ask(server, *[spoken(wav(np.zeros(800)))] * 5)
    assert status == 400 and "has 5 audio clips, this server takes at most 4 in a prompt" in \
        body["error"]["message"]
    with llmc.LLM(tiny_audio[1]) as llm:
        own = llm.processor.placeholders["audio"]
    status, body = ask(server, spoken(CLIP), {"type": "text", "text": f"{own} and more"})
    assert status == 400 and f"2 placeholders '{own}' for 1 audio clips" in body["error"]["message"]


def test_clips_of_other_rates_and_channels_are_taken(server):
    for data in (wav(np.zeros((4410, 2), np.float32), 44_100), wav(np.zeros(800), 8_000)):
        assert ask(server, spoken(data))[0] == 200
