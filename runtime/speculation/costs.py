"""Times of verifying steps, measured while loading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from llmc.errors import LlmcError
from llmc.runtime.core.step import EncoderOutputs, Engine, SamplingState, Step
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.speculation.config import SpeculationConfig
from llmc.runtime.speculation.planner import DraftPlanner, VerificationCosts

_PAST = 64  # positions before the measured steps
_DRAFTS = (0, 1, 3, 7, 11)  # numbers of drafts to measure; others are interpolated
_REPEATS = 2
_MAX_SECONDS = 1.0  # larger batches are left out once measuring has taken this long


def plan_drafts(engine: Engine, config: SpeculationConfig, max_seq_len: int, *,
                encodes: bool = False) -> DraftPlanner | None:
    """Create the planner of an engine; None if it verifies no drafts.

    Args: see `measure_costs`.

    Raises:
        LlmcError: the options ask for drafts that the engine does not verify.
    """
    most = engine.limits.max_drafts
    count = config.num_speculative_tokens
    if not most and config.method != "off":
        raise LlmcError(f"speculate '{config.method}' is unsupported for this model on its target; "
                        f"leave it out")
    if count is not None and config.method != "off" and count > most:
        raise LlmcError(f"num_speculative_tokens {count} exceeds {most}, the most drafts that this "
                        f"model verifies in a step")
    if not most:
        return None
    if count is not None:
        return DraftPlanner(count, VerificationCosts({}))
    if config.method == "off":  # only predicted outputs: not worth longer loading
        return DraftPlanner(None, VerificationCosts({}, assumed=most))
    costs = VerificationCosts(measure_costs(engine, max_seq_len, encodes=encodes))
    return DraftPlanner(None, costs)


def measure_costs(engine: Engine, max_seq_len: int, *, encodes: bool = False) -> \
        dict[int, list[float]]:
    """Run verifying steps on an idle engine; see `VerificationCosts`.

    A draft model proposes as many drafts as a step verifies. Steps write to the first blocks of the
    KV cache, which must not be in use.

    Args:
        max_seq_len: positions of a sequence.
        encodes: whether the model has an encoder.
    """
    limits = engine.limits
    past = min(_PAST, max_seq_len // 2)
    most = min(limits.max_drafts, max(_DRAFTS), max_seq_len - past - 1)
    blocks = -(-(past + 1 + most) // limits.block_size)
    largest = min(limits.max_slots, limits.num_blocks // blocks)
    counts = [count for count in _DRAFTS if count <= most]
    seconds: dict[int, list[float]] = {}
    start = time.monotonic()
    for batch in (2**power for power in range(largest.bit_length())):
        fitting = [count for count in counts if batch * count <= min(
            limits.max_draft_tokens, limits.max_tokens - batch, limits.max_logits - batch)]
        if time.monotonic() - start > _MAX_SECONDS or len(fitting) < 2:
            break
        tables = [list(range(index * blocks, (index + 1) * blocks)) for index in range(batch)]
        for index, table in enumerate(tables):  # one by one, as prompts may exceed a step
            _run(engine, [[0] * past], [0], [table], [index], [0], encodes)
        points = {count: min(_timed(engine, past, tables, count, encodes)
                                for _ in range(_REPEATS)) for count in fitting}
        seconds[batch] = _interpolated(points)
        if not any((1 + count) * points[0] > each for count, each in points.items() if count):
            break  # nor do drafts pay off in larger batches
    return seconds


def _timed(engine: Engine, past: int, tables: Sequence[Sequence[int]], count: int,
           encodes: bool) -> float:
    start, batch = time.perf_counter(), len(tables)
    _run(engine, [[0] * (1 + count)] * batch, [past] * batch, tables, range(batch),
         [count] * batch, encodes)
    return time.perf_counter() - start


def _run(engine: Engine, tokens: Sequence[Sequence[int]], past: Sequence[int],
         tables: Sequence[Sequence[int]], slots: Sequence[int], drafts: Sequence[int],
         encodes: bool) -> None:
    state = SamplingState(Sampler(SamplingParams()))
    new = not any(past)
    proposals = max(drafts) if engine.limits.proposes else None
    memory = EncoderOutputs.of([*slots], [1] * len(slots)) if encodes else None
    engine.collect(engine.submit(Step.of(
        tokens, past, tables, [*slots], num_drafts=drafts, memory=memory, propose=proposals,
        admit=dict.fromkeys(slots, state) if new else {},
        encode={slot: [0] for slot in slots} if new and encodes else {})))


def _interpolated(points: dict[int, float]) -> list[float]:
    """Seconds by every number of drafts; more drafts cost no less."""
    counts = sorted(points)
    seconds = [points[0]]
    for low, high in pairwise(counts):
        for count in range(low + 1, high + 1):
            part = (count - low) / (high - low)
            seconds.append(max(seconds[-1], points[low] + part * (points[high] - points[low])))
    return seconds
