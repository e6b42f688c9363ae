"""Real-time factor of transcriptions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.multimodal.audio import MAX_SECONDS
from llmc.runtime.sampling.params import SamplingParams

TOKENS_PER_SECOND = 3  # of audio: English speech of 150 words a minute has 3.3 tokens of Whisper


@dataclass(frozen=True)
class SpeechRow:
    """Medians over the runs of one number of concurrent transcriptions.

    Args:
        batch: transcriptions at once.
        audio_seconds: length of each.
        latency_ms: until all are finished.
        real_time_factor: time relative to the length of all audio.
        tokens_per_sec: generated tokens of all.
    """

    batch: int
    audio_seconds: float
    latency_ms: float
    real_time_factor: float
    tokens_per_sec: float


def parse_batches(batch_size: str) -> list[int]:
    """Parse `"1;4"`.

    Raises:
        LlmcError: a part is not a positive integer.
    """
    try:
        batches = [int(part) for part in batch_size.split(";")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise LlmcError(f'--batch_size is "{batch_size}"; write it like "1;4"')
    return batches


def measure_speech(llm: LLM, batch: int, seconds: float, *, runs: int = 3,
                   warmup: int = 1) -> SpeechRow:
    """Transcribe `batch` times noise of `seconds` at once, `runs` times.

    Noise has no words, so each window of the model gets TOKENS_PER_SECOND tokens of any text.

    Raises:
        LlmcError: the model does not transcribe, or `seconds` is out of range.
    """
    encoder = llm.transcriber.require()
    if not 0 < seconds <= MAX_SECONDS:
        raise LlmcError(f"--audio is {seconds:g} seconds; give more than 0, at most "
                        f"{MAX_SECONDS:g}")
    extractor = llm.transcriber.extractor
    language = next(iter(encoder.speech.languages), None) if encoder.speech else None
    rng = np.random.default_rng(0)
    audio = rng.standard_normal((batch, int(seconds * extractor.sampling_rate)), np.float32) / 10
    windows = range(0, audio.shape[1], extractor.max_samples())

    def transcribe(waveform: np.ndarray) -> int:
        tokens = 0
        for start in windows:
            window = waveform[start:start + extractor.max_samples()]
            count = max(round(TOKENS_PER_SECOND * len(window) / extractor.sampling_rate), 1)
            tokens += llm.transcribe(window, language=language, params=SamplingParams(
                max_tokens=count, ignore_eos=True, temperature=0)).completion_tokens
        return tokens

    times, tokens = list[float](), 0
    with ThreadPoolExecutor(batch) as threads:
        for _ in range(warmup + runs):
            start = time.perf_counter()
            tokens = sum(threads.map(transcribe, audio))
            times.append(time.perf_counter() - start)
    latency = statistics.median(times[warmup:])
    return SpeechRow(batch, seconds, latency * 1e3, latency / (batch * seconds), tokens / latency)


def speech_columns(row: SpeechRow) -> Sequence[str]:
    """Cells of a table's row: batch, audio(s), latency(ms), real-time factor, tokens/s."""
    return (str(row.batch), f"{row.audio_seconds:g}", f"{row.latency_ms:.2f}",
            f"{row.real_time_factor:.4f}", f"{row.tokens_per_sec:.2f}")
