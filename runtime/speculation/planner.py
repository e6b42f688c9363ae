"""How many drafts each sequence of a step gets."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmc.runtime.speculation.acceptance import AcceptanceRates, SequenceAcceptance
from llmc.runtime.speculation.config import MAX_DRAFTS
from llmc.runtime.speculation.drafter import Draft, Drafter
from llmc.runtime.speculation.engine_drafts import MATCH, EngineDrafter

_WEIGHT = 0.1  # of a new measurement in the moving average
_ASSUMED = 0.125  # cost of a draft, relative to a step
_MIN_GAIN = 1.02  # of expected tokens per second, below which nothing is drafted
_PATIENCE = 32  # steps without drafts of a sequence, after which its draft model ends


@dataclass
class SpeculationCounts:
    """Totals of a replica.

    Args:
        drafts: verifications.
        draft_tokens, accepted_tokens: drafts verified and accepted.
        accepted_per_position: accepted drafts by their position in a draft.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for position in range(accepted):
            self.accepted_per_position[position] += 1


class VerificationCosts:
    """Seconds of a step by batch size and drafts of each sequence.

    Uncommitted tokens count as drafts here; see `Step.num_uncommitted`.

    Args:
        seconds: by batch size, seconds with 0, 1, 2, … drafts, measured while loading.
        assumed: number of drafts. Without measurements, each is assumed to cost a fixed fraction of
            the step, until steps are measured while serving.
    """

    def __init__(self, seconds: Mapping[int, list[float]], assumed: int = 0) -> None:
        self._seconds = dict(seconds)
        self._sizes = sorted(seconds)
        self._assumed = assumed
        self._served: set[int] = set()  # batch sizes that were only assumed, and then measured

    def add(self, batch: int, drafts: int, seconds: float) -> None:
        """Record a step while serving."""
        row = self.of(batch) if self._assumed else self._seconds.get(batch, [])
        if drafts >= len(row):
            return
        if not self._assumed:
            row[drafts] += _WEIGHT * (seconds - row[drafts])
            return
        ratio = seconds / row[drafts]
        for count in range(len(row)):  # other numbers of drafts are likely as far off
            if batch not in self._served:
                row[count] *= ratio
            elif count == drafts or (count and drafts):
                row[count] *= 1 + (_WEIGHT if count == drafts else _WEIGHT / 2) * (ratio - 1)
        self._served.add(batch)

    def of(self, batch: int) -> list[float]:
        """Seconds with 0, 1, 2, … drafts of each of `batch` sequences.

        A size that was not measured has those of the next larger one; above the largest there are
        no drafts.
        """
        if self._assumed:
            return self._seconds.setdefault(batch, [
                1 + _ASSUMED * count for count in range(self._assumed + 1)])
        index = bisect_left(self._sizes, batch)
        return self._seconds[self._sizes[index]] if index < len(self._sizes) else [0.0]


class SequenceDrafts:
    """Drafts of one sequence.

    Args:
        drafter: proposes them.

    Attributes:
        pending: drafts of the next step.
        unread: number of drafts in steps that are in flight.
        idle: number of steps since the sequence had drafts.
    """

    def __init__(self, drafter: Drafter, rates: AcceptanceRates,
                 counts: SpeculationCounts) -> None:
        self._drafter, self._counts = drafter, counts
        self._acceptance = SequenceAcceptance(rates)
        self._draft: Draft | None = None
        self.idle = _PATIENCE
        self._in_flight: deque[Draft | None] = deque()  # by step
        self._seen = 0  # generated tokens that the drafter knows
        self._accepted_predicted = self._rejected_predicted = 0
        self._from_prediction = False  # the drafts verified last

    @property
    def pending(self) -> list[int]:
        return [] if self._draft is None else self._draft.tokens

    @property
    def unread(self) -> int:
        return sum(len(draft.tokens) for draft in self._in_flight if draft is not None)

    @property
    def engine(self) -> EngineDrafter | None:
        """Its drafter, if the engine drafts."""
        return self._drafter if isinstance(self._drafter, EngineDrafter) else None

    @property
    def prompt_lookup(self) -> bool:
        """Whether the engine drafts by prompt lookup."""
        return self.engine is not None and self.engine.prompt_lookup

    @property
    def ahead(self) -> bool:
        """Whether the next step may be submitted before those in flight are read."""
        engine = self.engine
        return engine is not None and (engine.ahead or not (self.unread or engine.waits))

    def expected_rate(self) -> float:
        """Expected acceptance rate of the draft model's drafts."""
        return self._acceptance.of(MATCH)

    def propose(self, tokens: Sequence[int], count: int) -> Draft | None:
        """Draft after these generated tokens."""
        if len(tokens) > self._seen:
            self._drafter.extend(tokens[self._seen:])
            self._seen = len(tokens)
        return self._drafter.draft(count)

    def rate(self, draft: Draft) -> float:
        """Expected acceptance rate of a draft."""
        return self._acceptance.of(draft.match)

    def submit(self, draft: Draft | None) -> None:
        """Set the drafts of the next step."""
        self._draft = draft
        self.idle = self.idle + 1 if draft is None else 0
        if draft is None:
            self._acceptance.skip()

    def shorten(self, count: int) -> None:
        """Keep the first `count` drafts."""
        if self._draft is not None and count < len(self._draft.tokens):
            self._draft = replace(self._draft, tokens=self._draft.tokens[:count]) if count else None

    def start(self) -> None:
        """Note that the next step, with the pending drafts, is submitted."""
        self._in_flight.append(self._draft)
        self._draft = None

    def drop(self) -> None:
        """Forget pending drafts, and steps in flight."""
        self.submit(None)
        self._in_flight.clear()
        if self.engine is not None:
            self.engine.reset()

    def proposed(self, tokens: Sequence[int], match: int) -> None:
        """Record the drafts that the engine proposed in the step that was verified last.

        Args:
            tokens: drafts of the next step.
            match: number of tokens that agree with their source.
        """
        assert self.engine is not None
        self.engine.propose(tokens, match)
        following = self._in_flight[0] if self._in_flight else None
        if following is not None:
            self._in_flight[0] = replace(
                following, missing=max(len(following.tokens) - len(tokens), 0))

    def verified(self, sampled: int) -> int:
        """Record the tokens sampled by the oldest step; return the number of rejected drafts."""
        draft = self._in_flight.popleft()
        self._from_prediction = draft is not None and draft.predicted
        if draft is None:
            return 0
        drafted = len(draft.tokens)
        accepted = min(sampled - 1, draft.found)
        if not draft.found:
            self._acceptance.miss(draft.match)
            return drafted - (sampled - 1)
        self._acceptance.add(draft.match, accepted, int(accepted < drafted))
        self._counts.add(draft.found, accepted)
        if draft.predicted:
            self._accepted_predicted += accepted
            self._rejected_predicted += drafted - accepted
        return drafted - (sampled - 1)

    def prediction_tokens(self, dropped: int = 0) -> tuple[int, int]:
        """Tokens drafted from the caller's prediction that were accepted and rejected.

        Args:
            dropped: tokens sampled last that are not part of the completion. All but the last were
                accepted drafts; they count as rejected.
        """
        drafts = max(dropped - 1, 0) if self._from_prediction else 0
        return self._accepted_predicted - drafts, self._rejected_predicted + drafts


class DraftPlanner:
    """Chooses the drafts of a step.

    Args:
        count: drafts of each sequence; None: as many as pay off.
        costs: of steps, for `count` None.
        recomputes: whether the next step computes accepted drafts again, as with recurrent state.

    Attributes:
        counts: totals of all sequences.
        costs: see the argument.
    """

    def __init__(self, count: int | None, costs: VerificationCosts, *,
                 recomputes: bool = False) -> None:
        self._count, self.costs, self._recomputes = count, costs, recomputes
        self._rates, self.counts = AcceptanceRates(), SpeculationCounts()

    def sequence(self, drafter: Drafter) -> SequenceDrafts:
        """Start a sequence's drafts."""
        return SequenceDrafts(drafter, self._rates, self.counts)

    def plan(self, candidates: Sequence[tuple[SequenceDrafts, Sequence[int], int]], batch: int,
             room: int) -> None:
        """Set the drafts of each sequence that may have some in the next step.

        Args:
            candidates: drafts of sequences, their generated tokens, and the most drafts that each
                may have.
            batch: sequences that decode in the step.
            room: drafts of all sequences together.
        """
        seconds = self.costs.of(batch)
        most = self._count or self._most(seconds)
        if self._count is None and not self._may_pay(seconds):
            most = 0
        drafts = [drafts.propose(tokens, min(most, limit)) if min(most, limit) > 0 else None
                  for drafts, tokens, limit in candidates]
        length, least = most, 0.0
        if self._count is None:
            given = [(own.rate(draft), len(draft.tokens)) for (own, _, _), draft in
                     zip(candidates, drafts, strict=True) if draft]
            length = self._best(given, batch, seconds)
            least = self._least(given, length, batch, seconds)
        declined = []
        for (own, _, _), draft in zip(candidates, drafts, strict=True):
            kept = min(len(draft.tokens), length, room) if draft else 0
            if draft and least and _expected(own.rate(draft), kept) < least:
                kept = 0
            room -= kept
            own.submit(replace(draft, tokens=draft.tokens[:kept]) if draft and kept else None)
            if draft and not kept:
                declined.append(draft.match)
        if self._count is None:
            self._rates.forget(declined)

    def num_proposals(self, sequences: Sequence[SequenceDrafts]) -> int | None:
        """Number of drafts that the engine should propose for the next step.

        None: its draft model need not run, as drafts do not pay off in these sequences, or in as
        many; it has then lost them, see `EngineDrafter`.

        Args:
            sequences: those of the step that it drafts for, all in the same way.
        """
        following = [own for own in sequences if own.engine is not None and not own.engine.lost]
        if self._count is not None:
            return self._count if following else None
        seconds = self.costs.of(len(sequences))
        most = self._most(seconds)
        if sequences and sequences[0].prompt_lookup:  # costs little, and `plan` chooses drafts
            return most if self._may_pay(seconds) else None
        best = self._best([(own.expected_rate(), most) for own in following], len(sequences),
                          seconds)
        if best:
            return best
        if sequences and self._may_pay(seconds):
            self._rates.forget([MATCH])
        return 0 if any(own.idle < _PATIENCE for own in following) else None

    def _most(self, seconds: Sequence[float]) -> int:
        """The most drafts whose cost is known."""
        return (len(seconds) - 1) // (1 + self._recomputes)

    def _may_pay(self, seconds: Sequence[float]) -> bool:
        """Whether drafts pay off if all are accepted."""
        return any((1 + count) * seconds[0] > _MIN_GAIN * self._cost(seconds, count, count)
                   for count in range(1, self._most(seconds) + 1))

    def _cost(self, seconds: Sequence[float], count: int, accepted: float) -> float:
        """Seconds of a step among steps with equally many drafts.

        Args:
            accepted: mean number of drafts that are accepted, at most `count`.
        """
        extra = count + accepted * self._recomputes
        low = int(extra)
        high = min(low + 1, len(seconds) - 1)
        return seconds[low] + (extra - low) * (seconds[high] - seconds[low])

    def _least(self, drafts: Sequence[tuple[float, int]], length: int, batch: int,
               seconds: Sequence[float]) -> float:
        """Expected accepted drafts of a sequence below which its drafts cost more than they gain.

        Args:
            drafts: see `_best`.
            length: number of drafts of each sequence.
            batch: sequences that decode in the step.
            seconds: see `VerificationCosts.of`.
        """
        if not length:
            return 0.0
        expected = batch + sum(_expected(rate, min(length, own)) for rate, own in drafts)
        cost = self._cost(seconds, length, expected / batch - 1)
        return (cost - seconds[0]) / batch * expected / cost

    def _best(self, drafts: Sequence[tuple[float, int]], batch: int,
              seconds: Sequence[float]) -> int:
        """The number of drafts with the most expected tokens per second.

        Args:
            drafts: acceptance rate and length of each draft.
            seconds: see `VerificationCosts.of`.
        """
        best, most = 0, _MIN_GAIN * batch / seconds[0] if seconds[0] else 0.0
        expected = float(batch)
        longest = max((length for _, length in drafts), default=0)
        for count in range(1, 1 + min(self._most(seconds), longest)):
            expected += sum(rate**count for rate, length in drafts if length >= count)
            cost = self._cost(seconds, count, expected / batch - 1)
            if expected / cost > most:
                best, most = count, expected / cost
        return best


def _expected(rate: float, count: int) -> float:
    """Expected number of accepted drafts among `count` of a sequence."""
    return sum(rate**position for position in range(1, count + 1))
