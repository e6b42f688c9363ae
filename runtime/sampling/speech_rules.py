"""Rules of the tokens that a decoder of speech generates: timestamps, and the first token.

They are those of transformers' SuppressTokensAtBeginLogitsProcessor and
WhisperTimeStampLogitsProcessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FORBIDDEN = -np.inf


@dataclass(frozen=True)
class TimestampRules:
    """Timestamps come in pairs around texts, and do not decrease.

    A timestamp is generated where all timestamps together are more likely than any text token.

    Args:
        begin: the first timestamp's token id; the token before it is never generated.
        end_token: EOS token; tokens of text have lower ids.
        max_initial: highest index of the first timestamp; None: any.
    """

    begin: int
    end_token: int
    max_initial: int | None = None

    def apply(self, scores: np.ndarray, tokens: Sequence[int]) -> None:
        """Forbid tokens after these generated ones."""
        scores[self.begin - 1] = _FORBIDDEN
        last = bool(tokens) and tokens[-1] >= self.begin
        penultimate = len(tokens) < 2 or tokens[-2] >= self.begin
        if last and penultimate:
            scores[self.begin:] = _FORBIDDEN
        elif last:
            scores[:self.end_token] = _FORBIDDEN
        latest = next((token for token in reversed(tokens) if token >= self.begin), None)
        if latest is not None:
            scores[self.begin:latest + (0 if last and not penultimate else 1)] = _FORBIDDEN
        if not tokens:
            scores[:self.begin] = _FORBIDDEN
            if self.max_initial is not None:
                scores[self.begin + self.max_initial + 1:] = _FORBIDDEN
        if self._prefers_timestamp(scores):
            scores[:self.begin] = _FORBIDDEN

    def _prefers_timestamp(self, scores: np.ndarray) -> bool:
        stamps = scores[self.begin:]
        peak = stamps.max(initial=_FORBIDDEN)
        if not np.isfinite(peak):
            return False
        total = peak + np.log(np.exp(stamps - peak).sum())
        return bool(total > scores[:self.begin].max(initial=_FORBIDDEN))


@dataclass(frozen=True)
class SpeechRules:
    """All rules of one completion.

    Args:
        first_forbidden: tokens that are not the first.
        first_allowed: the only tokens that may be the first; empty: any.
        timestamps: None: text without timestamps.
        processed_logprobs: log-probabilities are of the logits after all processors.
    """

    first_forbidden: tuple[int, ...] = ()
    first_allowed: tuple[int, ...] = ()
    timestamps: TimestampRules | None = None
    processed_logprobs: bool = False

    @property
    def need_logits(self) -> bool:
        """Whether an engine that samples on a device returns logits, for the host to sample."""
        return bool(self.first_allowed) or self.timestamps is not None or self.processed_logprobs

    def apply(self, scores: np.ndarray, tokens: Sequence[int]) -> None:
        """Forbid tokens after these generated ones, in scores [vocab_size]."""
        if not tokens and self.first_allowed:
            allowed = scores[list(self.first_allowed)]
            scores[:] = _FORBIDDEN
            scores[list(self.first_allowed)] = allowed
        if not tokens and self.first_forbidden:
            scores[list(self.first_forbidden)] = _FORBIDDEN
        if self.timestamps is not None:
            self.timestamps.apply(scores, tokens)
