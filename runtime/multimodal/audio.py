"""Audio from untrusted bytes, as a mono waveform at a model's rate.

| step | by | equal to |
| --- | --- | --- |
| decoding of WAV, FLAC, MP3, OGG (Vorbis, Opus), AIFF | libsndfile (soundfile) | transformers |
| channels to one | mean | transformers' `load_audio` |
| resampling | soxr, quality HQ | transformers' `load_audio`, `librosa.load` |

Both packages are imported on first use: text needs none.
"""

from __future__ import annotations

import math
from io import BytesIO
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError, reason_of
from llmc.installation import install_command

Waveform = NDArray[np.float32]  # [samples], within ±1
MAX_SECONDS = 3600.0
_MAX_SAMPLES = 3600 * 48_000  # of a channel, before resampling: 691 MB
MIN_RATE, MAX_RATE = 1_000, 384_000  # Hz
_BLOCK = 1 << 16  # frames per read: a header's length is not trusted


def load_audio(data: bytes, sampling_rate: int, max_seconds: float = MAX_SECONDS) -> Waveform:
    """Decode and resample audio.

    Args:
        data: a file.
        sampling_rate: rate of the result in Hz.
        max_seconds: limit of its duration; decoding ends there.

    Raises:
        LlmcError: it is no audio, is damaged, has no samples or exceeds a limit; or soundfile is
            not installed.
    """
    waveform, rate = _decode(data, max_seconds)
    return resample(waveform, rate, sampling_rate)


def resample(waveform: Waveform, rate: int, sampling_rate: int) -> Waveform:
    """Resample to ceil(samples * sampling_rate / rate) samples.

    Raises:
        LlmcError: soxr is not installed.
    """
    if rate == sampling_rate:
        return waveform
    size = math.ceil(len(waveform) * sampling_rate / rate)
    result = np.zeros(size, np.float32)
    resampled = _import("soxr").resample(waveform, rate, sampling_rate, quality="soxr_hq")[:size]
    result[:len(resampled)] = resampled
    return result


def _decode(data: bytes, max_seconds: float) -> tuple[Waveform, int]:
    """Decode to one channel.

    Returns:
        The waveform and its rate.
    """
    soundfile = _import("soundfile")
    try:
        file = soundfile.SoundFile(BytesIO(data))
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        # soundfile's own text names the object that it was given.
        reason = getattr(error, "error_string", None) or reason_of(error)
        raise LlmcError(f"{len(data)} bytes are no audio ({reason.rstrip('.')}); give a file in "
                        f"one of the formats WAV, FLAC, MP3, OGG or AIFF") from error
    with file:
        rate = file.samplerate
        if not MIN_RATE <= rate <= MAX_RATE:
            raise LlmcError(f"the audio has {rate} samples per second, expected {MIN_RATE} to "
                            f"{MAX_RATE}; resample it")
        most = min(int(max_seconds * rate), _MAX_SAMPLES)
        blocks, size = [], 0
        while True:
            try:
                block = file.read(_BLOCK, dtype="float32", always_2d=True)
            except (soundfile.SoundFileError, RuntimeError) as error:
                raise LlmcError(f"the audio cannot be decoded ({reason_of(error)}); give a whole "
                                f"file") from error
            if not len(block):
                break
            size += len(block)
            if size > most:
                raise LlmcError(f"the audio is longer than {most / rate:g} s, the limit; split it")
            blocks.append(block.mean(axis=1))
    if not size:
        raise LlmcError("the audio has no samples; give one that has any")
    waveform = np.concatenate(blocks)
    if not np.isfinite(waveform).all():
        raise LlmcError("the audio has samples that are no finite numbers; encode it again")
    return waveform, rate


def _import(name: str) -> ModuleType:
    try:
        return __import__(name)
    except (ModuleNotFoundError, OSError) as error:  # OSError: soundfile finds no libsndfile
        raise LlmcError(f"audio needs {name} ({reason_of(error)}); install it with: "
                        f"{install_command('multimodal')}") from error
