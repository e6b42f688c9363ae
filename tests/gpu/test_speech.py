"""Speech on GPUs: the transcriptions of the cpu target, the logits of transformers."""

from concurrent.futures import ThreadPoolExecutor

import ctranslate2
import numpy as np
import pytest
import speech

import llmc
from llmc import SamplingParams
from llmc.runtime.sampling.speech_fallback import SpeechOptions

pytestmark = pytest.mark.usefixtures("extension")
THRESHOLDS = SpeechOptions(logprob_threshold=-50.0, no_speech_threshold=0.9,
                           compression_ratio_threshold=9.0)


@pytest.fixture(scope="module")
def models(extension, tiny_speech, tmp_path_factory):
    """The same model on the CPU and on a GPU."""
    case = tmp_path_factory.mktemp("device") / "case"
    llmc.compile(tiny_speech[1], case, target="cuda")
    with llmc.LLM(tiny_speech[2]) as host, llmc.LLM(case) as device:
        yield host, device


@pytest.mark.parametrize("options", [
    {}, {"timestamps": True}, {"language": "de", "task": "translate"},
    {"timestamps": True, "options": THRESHOLDS}, {"prompt": "w30 w31", "language": "en"},
    {"timestamps": True, "params": SamplingParams(beam_width=3, max_tokens=20, temperature=0)},
    {"timestamps": True, "options": SpeechOptions(condition_on_prev_tokens=True)},
])
@pytest.mark.parametrize(("seconds", "seed"), [(0.4, 2), (0.9, 3), (2.6, 1)])
def test_transcriptions_are_those_of_the_cpu(options, seconds, seed, models):
    host, device = models
    waveform = speech.sound(seconds, seed)
    expected, found = (llm.transcribe(waveform, **options) for llm in (host, device))
    assert (found.text, found.language) == (expected.text, expected.language)
    assert [own.token_ids for own in found.segments] == [
        own.token_ids for own in expected.segments]
    np.testing.assert_allclose(
        [(own.avg_logprob or 0, own.no_speech_prob or 0) for own in found.segments],
        [(own.avg_logprob or 0, own.no_speech_prob or 0) for own in expected.segments], atol=1e-3)


def test_many_transcriptions_at_once_do_not_disturb_each_other(models):
    host, device = models
    waveforms = [speech.sound(0.9, seed) for seed in range(24)]
    expected = [host.transcribe(own, language="en", timestamps=seed % 2 == 0)
                for seed, own in enumerate(waveforms)]
    with ThreadPoolExecutor(len(waveforms)) as threads:
        found = [*threads.map(lambda given: device.transcribe(
            given[1], language="en", timestamps=given[0] % 2 == 0), enumerate(waveforms))]
    assert [own.text for own in found] == [own.text for own in expected]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_in_16_bits_transcribes(dtype, tiny_speech, tmp_path):
    llmc.compile(tiny_speech[1], tmp_path / "case", target="cuda", dtype=dtype)
    waveform = speech.sound(0.9, 3)
    with llmc.LLM(tmp_path / "case") as llm, llmc.LLM(tiny_speech[2]) as host:
        found, expected = (own.transcribe(waveform, language="en", params=SamplingParams(
            temperature=0, max_tokens=1)) for own in (llm, host))
        assert found.segments[0].token_ids == expected.segments[0].token_ids
        assert llm.transcribe(waveform, language="en", timestamps=True).segments


@pytest.mark.thorough
def test_real_weights_transcribe_as_on_the_cpu(tmp_path):
    ctranslate2.write_huggingface(ctranslate2.tiny_en(), tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "cpu")
    llmc.compile(tmp_path / "hf", tmp_path / "cuda", target="cuda", dtype="float16")
    with llmc.LLM(tmp_path / "cpu") as host, llmc.LLM(tmp_path / "cuda") as device:
        expected, found = (llm.transcribe(speech.SENTENCES, timestamps=True)
                           for llm in (host, device))
    assert found.text == expected.text
