"""When a window of speech is decoded again or skipped; the rules of transformers' generate."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.errors import LlmcError, shown

_TEMPERATURES = (0.0, 2.0)


@dataclass(frozen=True)
class SpeechOptions:
    """How windows of audio are decoded, beside the sampling parameters.

    A window is decoded with the sampling parameters. As long as a threshold says that the result is
    bad, it is decoded again at the next of `fallback_temperatures`. The last result is kept.

    Args:
        fallback_temperatures: temperatures in order, such as `(0.2, 0.4, 0.6, 0.8, 1.0)`.
        compression_ratio_threshold: a result is bad if zlib compresses its token ids by more, as
            repetitions are; Whisper's is 1.35. None: not checked.
        logprob_threshold: a result is bad if the mean log-probability of its tokens is lower;
            Whisper's is -1.0. None: not checked.
        no_speech_threshold: a window is skipped if the probability of no speech is higher and the
            mean log-probability is below logprob_threshold; Whisper's is 0.6. None: not checked.
        condition_on_prev_tokens: the decoder reads the text of earlier windows before each window,
            unless the one before was decoded at a temperature of 0.5 or more.

    Raises:
        LlmcError: an argument has a wrong type or is out of range.
    """

    fallback_temperatures: Sequence[float] = ()
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None
    condition_on_prev_tokens: bool = False

    def __post_init__(self) -> None:
        given = self.fallback_temperatures
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(
                _is_number(own) and _TEMPERATURES[0] < own <= _TEMPERATURES[1] for own in given):
            raise LlmcError(f"fallback_temperatures is {shown(given)}; give numbers above 0, at "
                            f"most 2, such as (0.2, 0.4, 0.6, 0.8, 1.0)")
        object.__setattr__(self, "fallback_temperatures", tuple(given))
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and not _is_number(value):
                raise LlmcError(f"{name} is {shown(value)}; give a number, or leave it out")
        if not isinstance(self.condition_on_prev_tokens, bool):
            raise LlmcError(f"condition_on_prev_tokens is {shown(self.condition_on_prev_tokens)}; "
                            f"give True or False")
        if given and self.compression_ratio_threshold is None and self.logprob_threshold is None:
            raise LlmcError("fallback_temperatures is given without a threshold; give "
                            "compression_ratio_threshold or logprob_threshold, or leave it out")
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise LlmcError("no_speech_threshold is given without logprob_threshold, which it "
                            "needs; give both, or leave it out")

    @property
    def may_reject(self) -> bool:
        """Whether the result of a window may be dropped."""
        return bool(self.fallback_temperatures) or self.no_speech_threshold is not None

    def is_bad(self, compression: float, avg_logprob: float | None) -> bool:
        """Whether a result is bad.

        Args:
            compression: see `compression_ratio`.
            avg_logprob: mean log-probability of the tokens, with `logprob_threshold`.
        """
        most = self.compression_ratio_threshold
        return (most is not None and compression > most) or self.is_unlikely(avg_logprob)

    def is_unlikely(self, avg_logprob: float | None) -> bool:
        """Whether the mean log-probability is below the threshold."""
        return self.logprob_threshold is not None and avg_logprob is not None and \
            avg_logprob < self.logprob_threshold

    def is_silence(self, avg_logprob: float | None, no_speech_prob: float | None) -> bool:
        """Whether a window without speech is skipped."""
        return self.no_speech_threshold is not None and no_speech_prob is not None and \
            no_speech_prob > self.no_speech_threshold and self.is_unlikely(avg_logprob)


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """Bytes of token ids relative to those that zlib makes of them; 0 without tokens."""
    size = int(math.log2(vocab_size) / 8) + 1
    raw = b"".join(token.to_bytes(size, "little") for token in token_ids)
    return len(raw) / len(zlib.compress(raw))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
