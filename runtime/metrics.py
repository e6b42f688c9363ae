"""Statistics of a loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmc.runtime.core.request import Token
from llmc.runtime.core.scheduler import Scheduler
from llmc.runtime.sampling.sampler import NonFiniteLogits
from llmc.runtime.speculation.planner import SpeculationCounts

_WINDOW = 4096  # number of latest times to keep
_ADAPTERS = "running_adapters", "waiting_adapters"
_RECENT = 10.0  # seconds over which throughput is measured


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of times in seconds; None without times."""

    p50: float | None
    p90: float | None
    p99: float | None

    @staticmethod
    def of(times: list[float]) -> Percentiles:
        if not times:
            return Percentiles(None, None, None)
        return Percentiles(*np.percentile(times, (50, 90, 99)).tolist())


class Metrics:
    """Counters and latest times of one loop, written by its thread, readable from any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self.generated = self.finished = self.nan_logits = 0
        self.first: deque[float] = deque(maxlen=_WINDOW)
        self.between: deque[float] = deque(maxlen=_WINDOW)
        self._recent: deque[tuple[float, int]] = deque()  # time and number of tokens

    def count(self, tokens: list[Token]) -> None:
        """Count generated tokens."""
        now = time.monotonic()
        with self._lock:
            generated = sum(token.token_id is not None for token in tokens)
            self.generated += generated
            self._recent.append((now, generated))
            while self._recent[0][0] < now - _RECENT:
                self._recent.popleft()
            for token in tokens:
                owner = token.owner
                (self.between if token.number > 1 else self.first).append(now - owner.latest)
                owner.latest = now
                self.finished += token.finish_reason is not None

    def failed(self, error: Exception) -> None:
        """Count a completion that ended with an error."""
        if isinstance(error, NonFiniteLogits):
            with self._lock:
                self.nan_logits += 1

    def read(self) -> dict[str, Any]:
        """Counters by name, and the two lists of times."""
        scheduler = self._scheduler
        blocks = scheduler.blocks
        running, waiting, free_blocks = scheduler.load()
        since = time.monotonic() - _RECENT
        counts = SpeculationCounts() if scheduler.drafts is None else scheduler.drafts.counts
        speculation = {f"spec_decode_{name}": value for name, value in (
            ("drafts", counts.drafts), ("draft_tokens", counts.draft_tokens),
            ("accepted_tokens", counts.accepted_tokens))}
        per_position = list(counts.accepted_per_position)
        with self._lock:
            recent = sum(count for when, count in self._recent if when >= since)
            return dict(running=running, waiting=waiting,
                        generated_tokens=self.generated, tokens_per_second=recent / _RECENT,
                        finished=self.finished, nan_logits=self.nan_logits,
                        preemptions=scheduler.preemptions, cache_queries=scheduler.queries,
                        cache_hits=scheduler.hits, blocks=blocks.num_blocks,
                        block_size=blocks.block_size, free_blocks=free_blocks, **speculation,
                        accepted_per_position=per_position,
                        max_loras=scheduler.limits.max_loras,
                        **dict(zip(_ADAPTERS, scheduler.adapter_names(), strict=True)),
                        first=list(self.first), between=list(self.between))


def together(loops: list[Metrics]) -> dict[str, Any]:
    """Aggregate the statistics of several loops; see `LLM.metrics`."""
    parts = [loop.read() for loop in loops]
    counts = {name: sum(part[name] for part in parts) for name in parts[0]
              if name not in ("first", "between", "blocks", "block_size", "free_blocks",
                              "accepted_per_position", "max_loras", *_ADAPTERS)}
    blocks = sum(part["blocks"] for part in parts)
    per_position = [sum(each) for each in
                    zip(*(part["accepted_per_position"] for part in parts), strict=True)]
    return {**counts, "spec_decode_accepted_tokens_per_pos": per_position,
            "max_loras": parts[0]["max_loras"],
            **{name: sorted({own for part in parts for own in part[name]}) for name in _ADAPTERS},
            "num_blocks": blocks, "block_size": parts[0]["block_size"],
            "cache_usage": 1 - sum(part["free_blocks"] for part in parts) / blocks,
            **{name: asdict(Percentiles.of([time for part in parts for time in part[times]]))
               for name, times in (("time_to_first_token", "first"),
                                   ("inter_token_latency", "between"))}}
