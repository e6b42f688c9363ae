"""Margins of sampled tokens.

Logits differ by rounding between processors and batches. If a test compares tokens exactly, each
margin must exceed rounding. A test whose prompts or seeds are nearer to a tie fails on every
processor instead of on some.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llmc.runtime.sampling.beam_search import BeamSearch, Candidates, expand
from llmc.runtime.sampling.sampler import Sampler, _candidates, _random_numbers

# Rounding moves logits by some 1e-6 of their range, and cumulative probabilities likewise.
GREEDY = 1e-4  # of the logits' range, between the token and the next best
DRAWN = 2e-5  # between the random number and the nearest sum of probabilities
BEAMS = 2e-5  # between one sum of log-probabilities and the next best


def guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse tokens that the host samples with a smaller margin."""
    choose = Sampler.__call__

    def check(self: Sampler, logits: np.ndarray, tokens: Sequence[int]) -> int:
        chosen = choose(self, logits, tokens)
        assert self.params.temperature == 0 or self.params.seed is not None, (
            "a draw without a seed is another each time; give this test's requests one")
        margin, least = margin_of(self, logits, tokens)
        assert margin >= least, (
            f"token {len(tokens)} is {chosen} by {margin:.1e}, less than {least}: another "
            f"processor may choose another; take another prompt or seed for this test")
        return chosen

    monkeypatch.setattr(Sampler, "__call__", check)


def margin_of(sampler: Sampler, logits: np.ndarray, tokens: Sequence[int]) -> tuple[float, float]:
    """Return the margin of the next token and the required one."""
    scores = sampler.process(logits, tokens)
    allowed = np.sort(scores[np.isfinite(scores)])
    if len(allowed) < 2 or len(tokens) in sampler._forced:
        return np.inf, 0
    if sampler.params.temperature == 0:
        return float(allowed[-1] - allowed[-2]) / float(np.ptp(logits)), GREEDY
    _, weights = _candidates(scores, sampler.params)
    block, place = divmod(len(tokens), 256)
    sums = np.cumsum(weights)[:-1] / weights.sum()
    number = _random_numbers(sampler.seed, block)[place]
    return float(np.abs(sums - number).min(initial=1)), DRAWN


def guard_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse beams that a search keeps with a smaller margin."""
    step = BeamSearch.step

    def check(self: BeamSearch, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
        _, _, sums = expand(candidates, self.cum_log_probs, self._diversity_rate)
        # The first dropped candidate counts too; a finished beam admits one more.
        best = np.sort(sums[self.running])[:, ::-1][:, :self.candidates + 1]
        margin = float((best[:, :-1] - best[:, 1:]).min(where=best[:, 1:] > -1e8, initial=1))
        assert margin >= BEAMS, (
            f"beams are chosen by {margin:.1e}, less than {BEAMS}: another processor may order "
            f"them otherwise; take other prompts for this test")
        return step(self, candidates)

    monkeypatch.setattr(BeamSearch, "step", check)
