"""Audio features in NumPy: transformers' feature extractors.

| class | features | difference from transformers |
| --- | --- | --- |
| WhisperFeatureExtractor | log-mel (Slaney), [feature_size, frames] | 1e-6; torch path: 2e-5 |
| Gemma3nAudioFeatureExtractor | log-mel (HTK), [frames, feature_size] | 1e-6 |
| Gemma4AudioFeatureExtractor | the same, causal, with a mask of whole frames | none |

Settings have the names and the defaults of that class. `dither`, which adds random noise, is
refused: the features of an item are its cache key.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from llmc.errors import LlmcError
from llmc.runtime.multimodal.audio import Waveform

Floats = NDArray[np.float64]
Positive = Annotated[int, Field(gt=0, lt=1 << 20)]
_SLANEY_LINEAR_HZ = 1000.0  # linear below, logarithmic above
_WHISPER_FLOOR, _WHISPER_RANGE = 1e-10, 8.0
_GEMMA_MAX_SAMPLES, _GEMMA_MULTIPLE = 480_000, 128  # of its __call__


class FeatureExtractor(BaseModel):
    """Base of all feature extractors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    feature_size: Positive
    sampling_rate: Positive = 16_000
    padding_value: float = 0.0
    dither: float = 0.0

    @field_validator("dither")
    @classmethod
    def _check_dither(cls, value: float) -> float:
        if value:
            raise ValueError(f"dither is {value}; only 0 is supported")
        return value

    def max_samples(self) -> int:
        """Samples of the longest waveform that the class does not truncate."""
        raise NotImplementedError

    def check_length(self, waveform: Waveform, max_samples: int | None = None) -> None:
        """Refuse a waveform that transformers would truncate, and an empty one.

        Args:
            max_samples: None: that of the class.

        Raises:
            LlmcError: it has no samples, or more than `max_samples`.
        """
        most = self.max_samples() if max_samples is None else max_samples
        if not len(waveform):
            raise LlmcError("the audio has no samples; give one that has any")
        if len(waveform) > most:
            raise LlmcError(f"the audio has {len(waveform) / self.sampling_rate:.1f} s, this model "
                            f"takes at most {most / self.sampling_rate:g} s; split it")


class WhisperFeatureExtractor(FeatureExtractor):
    """Log-mel spectrogram, scaled so that its maximum minus 8 decades is the minimum."""

    feature_extractor_type: Literal["WhisperFeatureExtractor"]
    feature_size: Positive = 80
    hop_length: Positive = 160
    chunk_length: Positive = 30  # seconds
    n_fft: Positive = 400

    def max_samples(self) -> int:
        return self.chunk_length * self.sampling_rate

    def window(self, waveform: Waveform) -> Waveform:
        """Pad a waveform to the window of `chunk_length` seconds.

        Raises:
            LlmcError: it is empty or longer.
        """
        self.check_length(waveform)
        padded = np.full(self.max_samples(), self.padding_value, np.float32)
        padded[:len(waveform)] = waveform
        return padded

    def features(self, waveform: Waveform) -> NDArray[np.float32]:
        """Compute the features of a waveform of any length, as it is.

        Returns:
            [feature_size, len(waveform) // hop_length].
        """
        half = self.n_fft // 2
        if len(waveform) <= half:  # the reflection below needs more
            raise LlmcError(f"the audio has {len(waveform)} samples, at least {half + 1} are "
                            f"needed; give a longer one")
        padded = np.pad(waveform.astype(np.float64), half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[::self.hop_length]
        frames = frames[:len(waveform) // self.hop_length]
        power = np.abs(np.fft.rfft(frames * _hann(self.n_fft), axis=-1)) ** 2
        mel = np.log10(np.maximum(self._filters.T @ power.T, _WHISPER_FLOOR))
        mel = np.maximum(mel, mel.max(initial=-np.inf) - _WHISPER_RANGE)
        scaled: NDArray[np.float32] = ((mel + 4.0) / 4.0).astype(np.float32)
        return scaled

    @cached_property
    def _filters(self) -> Floats:
        return _mel_filters(1 + self.n_fft // 2, self.feature_size, 0.0, 8000.0,
                            self.sampling_rate, "slaney")


class GemmaAudioFeatureExtractor(FeatureExtractor):
    """Log-mel spectrogram of Universal Speech Models."""

    feature_size: Positive = 128
    frame_length_ms: float = Field(gt=0)
    hop_length_ms: float = Field(10.0, gt=0)
    min_frequency: float = 0.0
    max_frequency: float
    preemphasis: float
    preemphasis_htk_flavor: bool = True
    fft_overdrive: bool
    input_scale_factor: float = 1.0
    mel_floor: float = Field(gt=0)
    per_bin_mean: tuple[float, ...] | None = None
    per_bin_stddev: tuple[float, ...] | None = None

    @property
    def _frame_length(self) -> int:
        return round(self.sampling_rate * self.frame_length_ms / 1000.0)

    @property
    def _hop_length(self) -> int:
        return round(self.sampling_rate * self.hop_length_ms / 1000.0)

    @property
    def _fft_length(self) -> int:
        return 1 << (math.ceil(math.log2(self._frame_length)) + int(self.fft_overdrive))

    def max_samples(self) -> int:
        return _GEMMA_MAX_SAMPLES

    def features(self, waveform: Waveform) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Compute the features of a waveform.

        Returns:
            Features of [frames, feature_size], and which frames are of audio.

        Raises:
            LlmcError: it is empty, shorter than a frame, or longer than 30 s.
        """
        self.check_length(waveform)
        padding = -len(waveform) % _GEMMA_MULTIPLE
        samples = np.pad(waveform, (0, padding), constant_values=self.padding_value)
        mask = np.arange(len(samples)) < len(waveform)
        if self.input_scale_factor != 1.0:
            samples = samples * self.input_scale_factor
        samples, mask = self._prepend(samples, mask)
        size = self._frame_length + 1
        if len(samples) < size:
            raise LlmcError(f"the audio has {len(waveform)} samples, which is less than a frame of "
                            f"{size}; give a longer one")
        frames = np.lib.stride_tricks.sliding_window_view(samples, size)[::self._hop_length]
        spectrum = np.fft.rfft(self._emphasize(frames) * self._window, n=self._fft_length)
        mel = self._log(np.abs(spectrum) @ self._filters)
        if self.per_bin_mean is not None:
            mel = mel - np.array(self.per_bin_mean)
        if self.per_bin_stddev is not None:
            mel = mel / np.array(self.per_bin_stddev)
        return self._masked(mel.astype(np.float32), mask)

    def _emphasize(self, frames: NDArray[Any]) -> NDArray[Any]:
        factor = self.preemphasis
        if factor <= 0.0:
            return frames[:, :-1]
        if not self.preemphasis_htk_flavor:
            emphasized: NDArray[Any] = frames[:, 1:] - factor * frames[:, :-1]
            return emphasized
        return np.concatenate([frames[:, :1] * (1.0 - factor),
                               frames[:, 1:-1] - factor * frames[:, :-2]], axis=-1)

    @property
    def _window(self) -> NDArray[np.float32]:
        return _hann(self._frame_length).astype(np.float32)

    @cached_property
    def _filters(self) -> Floats:
        return _mel_filters(self._fft_length // 2 + 1, self.feature_size, self.min_frequency,
                            self.max_frequency, self.sampling_rate, "htk")

    def _prepend(self, samples: Waveform, mask: NDArray[np.bool_]) -> \
            tuple[Waveform, NDArray[np.bool_]]:
        raise NotImplementedError

    def _log(self, mel: Floats) -> Floats:
        raise NotImplementedError

    def _masked(self, mel: NDArray[np.float32], mask: NDArray[np.bool_]) -> \
            tuple[NDArray[np.float32], NDArray[np.bool_]]:
        raise NotImplementedError


class Gemma3nAudioFeatureExtractor(GemmaAudioFeatureExtractor):
    feature_extractor_type: Literal["Gemma3nAudioFeatureExtractor"]
    frame_length_ms: float = Field(32.0, gt=0)
    min_frequency: float = 125.0
    max_frequency: float = 7600.0
    preemphasis: float = 0.97
    fft_overdrive: bool = True
    mel_floor: float = Field(1e-5, gt=0)

    @property
    def _window(self) -> NDArray[np.float32]:
        """Computed in float32, as transformers does."""
        angles = 2 * np.pi * np.arange(self._frame_length, dtype=np.float32) / self._frame_length
        return (0.5 * (1 - np.cos(angles))).astype(np.float32)

    def _prepend(self, samples: Waveform, mask: NDArray[np.bool_]) -> \
            tuple[Waveform, NDArray[np.bool_]]:
        return samples, mask

    def _log(self, mel: Floats) -> Floats:
        logarithm: Floats = np.log(np.maximum(mel, self.mel_floor))
        return logarithm

    def _masked(self, mel: NDArray[np.float32], mask: NDArray[np.bool_]) -> \
            tuple[NDArray[np.float32], NDArray[np.bool_]]:
        return mel, mask[::self._hop_length][:len(mel)]


class Gemma4AudioFeatureExtractor(GemmaAudioFeatureExtractor):
    feature_extractor_type: Literal["Gemma4AudioFeatureExtractor"]
    frame_length_ms: float = Field(20.0, gt=0)
    max_frequency: float = 8000.0
    preemphasis: float = 0.0
    fft_overdrive: bool = False
    mel_floor: float = Field(1e-3, gt=0)

    def _prepend(self, samples: Waveform, mask: NDArray[np.bool_]) -> \
            tuple[Waveform, NDArray[np.bool_]]:
        """Center the first frame at the first sample."""
        half = self._frame_length // 2
        return np.pad(samples, (half, 0)), np.pad(mask, (half, 0))

    def _log(self, mel: Floats) -> Floats:
        logarithm: Floats = np.log(mel + self.mel_floor)
        return logarithm

    def _masked(self, mel: NDArray[np.float32], mask: NDArray[np.bool_]) -> \
            tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """A frame is of audio if its last sample is; others are zero."""
        whole = mask[np.arange(len(mel)) * self._hop_length + self._frame_length]
        return mel * whole[:, None], whole


AnyFeatureExtractor = Annotated[
    WhisperFeatureExtractor | Gemma3nAudioFeatureExtractor | Gemma4AudioFeatureExtractor,
    Field(discriminator="feature_extractor_type")]
FEATURE_EXTRACTORS: dict[str, type[FeatureExtractor]] = {
    own.__name__: own for own in (WhisperFeatureExtractor, Gemma3nAudioFeatureExtractor,
                                  Gemma4AudioFeatureExtractor)}


@lru_cache(maxsize=4)
def _hann(length: int) -> Floats:
    """The periodic Hann window."""
    return np.hanning(length + 1)[:-1]


def _mel_filters(num_bins: int, num_filters: int, low: float, high: float, rate: int,
                 scale: Literal["slaney", "htk"]) -> Floats:
    """Triangular filters: [num_bins, num_filters]; Slaney's have equal areas."""
    to_mel, to_hertz = (_slaney_mel, _slaney_hertz) if scale == "slaney" else (_htk_mel, _htk_hertz)
    ends = to_mel(np.array([low, high]))
    edges = to_hertz(np.linspace(ends[0], ends[1], num_filters + 2))
    bins = np.linspace(0, rate // 2, num_bins)
    slopes = edges[None] - bins[:, None]
    widths = np.diff(edges)
    filters: Floats = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1],
                                                 slopes[:, 2:] / widths[1:]))
    return filters * (2.0 / (edges[2:] - edges[:-2])) if scale == "slaney" else filters


def _htk_mel(hertz: Floats) -> Floats:
    mel: Floats = 2595.0 * np.log10(1.0 + hertz / 700.0)
    return mel


def _htk_hertz(mel: Floats) -> Floats:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def _slaney_mel(hertz: Floats) -> Floats:
    ratio = np.maximum(hertz, _SLANEY_LINEAR_HZ) / _SLANEY_LINEAR_HZ
    return np.where(hertz < _SLANEY_LINEAR_HZ, 3.0 * hertz / 200.0,
                    15.0 + np.log(ratio) * (27.0 / np.log(6.4)))


def _slaney_hertz(mel: Floats) -> Floats:
    return np.where(mel < 15.0, 200.0 * mel / 3.0,
                    _SLANEY_LINEAR_HZ * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)))
