"""Estimates of how likely drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterable

_DECAY = 0.9  # of earlier observations, per verification
_FORGET = 0.98  # of a sequence's observations, per token without drafts
_FORGET_ALL = 0.997  # of all sequences' observations, per step in which drafts did not pay off
_PRIOR = 2.0  # observations that an estimate from less specific ones counts as
_OPTIMISM = 0.8  # rate before any observation: high, so that drafts are tried
_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)


def _bucket(match: int) -> int:
    return sum(match > bound for bound in _BUCKETS)


class _Rate:
    """A moving average of the probability that a draft is accepted if all before it were."""

    def __init__(self) -> None:
        self._accepted = self._observed = 0.0

    def add(self, accepted: int, rejected: int) -> None:
        self._accepted = _DECAY * self._accepted + accepted
        self._observed = _DECAY * self._observed + accepted + rejected

    def forget(self, kept: float) -> None:
        """Keep this fraction of the observations."""
        self._accepted *= kept
        self._observed *= kept

    def of(self, prior: float) -> float:
        return (self._accepted + _PRIOR * prior) / (self._observed + _PRIOR)


class AcceptanceRates:
    """Acceptance rates of all sequences, by length of the match."""

    def __init__(self) -> None:
        self._rates = [_Rate() for _ in range(len(_BUCKETS) + 1)]

    def add(self, match: int, accepted: int, rejected: int) -> None:
        """Record a verification.

        Args:
            rejected: 1 if a draft was rejected, else 0.
        """
        self._rates[_bucket(match)].add(accepted, rejected)

    def forget(self, matches: Iterable[int]) -> None:
        """Note a step in which drafts with these matches did not pay off.

        Later sequences try again after many such steps: their drafts may be better.
        """
        for bucket in {_bucket(match) for match in matches}:
            self._rates[bucket].forget(_FORGET_ALL)

    def of(self, match: int) -> float:
        """Expected rate of a draft with this match, in a new sequence."""
        return self._rates[_bucket(match)].of(_OPTIMISM)


class SequenceAcceptance:
    """Acceptance rates of one sequence.

    Its average corrects that of all sequences; it counts less while nothing is drafted, so that a
    sequence whose drafts were rejected is tried again.
    """

    def __init__(self, rates: AcceptanceRates) -> None:
        self._rates, self._own = rates, _Rate()

    def add(self, match: int, accepted: int, rejected: int) -> None:
        """Record a verification; see `AcceptanceRates.add`."""
        self._rates.add(match, accepted, rejected)
        self._own.add(accepted, rejected)

    def miss(self, match: int) -> None:
        """Record that the engine found no drafts, where drafts with this match were expected."""
        self._rates.add(match, 0, 1)

    def skip(self) -> None:
        """Record a token without drafts."""
        self._own.forget(_FORGET)

    def of(self, match: int) -> float:
        """Expected rate of a draft with this match."""
        return self._own.of(self._rates.of(match))
