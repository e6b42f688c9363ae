"""Times of verifying steps, measured while loading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.image_memory import PromptMemory
from llmc.runtime.core.step import (
    EncoderInput,
    EncoderOutputs,
    Engine,
    EngineLimits,
    SamplingState,
    Step,
)
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.speculation.config import SpeculationConfig
from llmc.runtime.speculation.planner import DraftPlanner, VerificationCosts

_PAST = 64  # positions before the measured steps
_DRAFTS = (0, 1, 3, 7, 11)  # numbers of drafts to measure; others are interpolated
_UNCOMMITTED = (22,)  # in addition with recurrent state, half of them uncommitted tokens
_REPEATS = 2
_MAX_SECONDS = 1.0  # larger batches are left out once measuring has taken this long


def plan_drafts(engine: Engine, config: SpeculationConfig, max_seq_len: int, vocab_size: int, *,
                source: EncoderInput | None = None) -> DraftPlanner | None:
    """Create the planner of an engine; None if it verifies no drafts.

    Args: see `measure_costs`.

    Raises:
        LlmcError: the options ask for drafts that the engine does not verify.
    """
    most = engine.limits.max_drafts
    count = config.num_speculative_tokens
    recomputes = engine.limits.keeps_states
    if not most and config.method != "off":
        remedy = "compile it again if an earlier release did, whose recurrent layers verify no " \
            "drafts, or leave it out" if recomputes else "leave it out"
        raise LlmcError(f"speculate '{config.method}' is unsupported for this model on its target; "
                        f"{remedy}")
    if count is not None and config.method != "off" and count > most:
        raise LlmcError(f"num_speculative_tokens {count} exceeds {most}, the most drafts that this "
                        f"model verifies in a step")
    if not most:
        return None
    if count is not None:
        return DraftPlanner(count, VerificationCosts({}), recomputes=recomputes)
    if config.method == "off":  # only predicted outputs: not worth longer loading
        costs = VerificationCosts({}, assumed=most * (1 + recomputes))
    else:
        costs = VerificationCosts(measure_costs(engine, max_seq_len, vocab_size, source=source))
    return DraftPlanner(None, costs, recomputes=recomputes)


def measure_costs(engine: Engine, max_seq_len: int, vocab_size: int, *,
                  source: EncoderInput | None = None) -> dict[int, list[float]]:
    """Run verifying steps on an idle engine; see `VerificationCosts`.

    The engine proposes as many drafts as a step verifies. Steps write to the first blocks of the
    KV cache, which must not be in use. With recurrent state, each sequence starts again before
    every measurement, as it continues only from its state.

    Args:
        max_seq_len: positions of a sequence.
        source: what the encoder reads, if there is one.
    """
    limits = engine.limits
    past, counts, most = min(_PAST, max_seq_len // 2), [*_DRAFTS], limits.max_drafts
    if limits.keeps_states:
        past, counts, most = 1, [*_DRAFTS, *_UNCOMMITTED], 2 * limits.max_drafts
    most = min(most, max(counts), max_seq_len - past - 1)
    blocks = -(-(past + 1 + most) // limits.block_size)
    largest = min(limits.max_slots, limits.num_blocks // blocks)
    counts = [count for count in counts if count <= most]
    seconds: dict[int, list[float]] = {}
    tokens = np.random.default_rng(0).integers(0, vocab_size, (largest, past + 1 + most))
    start = time.monotonic()
    for batch in (2**power for power in range(largest.bit_length())):
        fitting = [count for count in counts
                   if batch * (count - _uncommitted(limits, count)) <= limits.max_draft_tokens
                   and batch * (1 + count) <= min(limits.max_tokens, limits.max_logits)]
        if time.monotonic() - start > _MAX_SECONDS or len(fitting) < 2:
            break
        tables = [list(range(index * blocks, (index + 1) * blocks)) for index in range(batch)]
        if not limits.keeps_states:
            for index, table in enumerate(tables):  # one by one, as prompts may exceed a step
                _run(engine, tokens[index:index + 1, :past], [0], [table], [index], [0], source)
        points = {count: min(_timed(engine, past, tables, tokens, count, source)
                                for _ in range(_REPEATS)) for count in fitting}
        seconds[batch] = _interpolated(points)
        if not any((1 + count) * points[0] > each for count, each in points.items() if count):
            break  # nor do drafts pay off in larger batches
    return seconds


def _timed(engine: Engine, past: int, tables: Sequence[Sequence[int]], tokens: np.ndarray,
           count: int, source: EncoderInput | None) -> float:
    batch, uncommitted = len(tables), _uncommitted(engine.limits, count)
    if engine.limits.keeps_states:
        _run(engine, tokens[:batch, :1], [0] * batch, tables, range(batch), [0] * batch, source)

    def submit(past: int) -> int:
        return _submit(engine, tokens[:batch, past:past + 1 + count], [past] * batch, tables,
                       range(batch), [count - uncommitted] * batch, source, [uncommitted] * batch)

    if engine.limits.ahead > 1 and (not count or engine.limits.drafts_ahead):
        # Steps follow one another without the host.
        tickets = [submit(past), submit(past + engine.limits.keeps_states)]
        engine.collect(tickets[0])
        start = time.perf_counter()
        engine.collect(tickets[1])
    else:
        start = time.perf_counter()
        engine.collect(submit(past))
    return time.perf_counter() - start


def _uncommitted(limits: EngineLimits, count: int) -> int:
    """How many of `count` tokens in addition to the last are measured as uncommitted ones."""
    return count // 2 if limits.keeps_states else 0


def _run(engine: Engine, *step: Any) -> None:
    engine.collect(_submit(engine, *step))


def _submit(engine: Engine, tokens: np.ndarray, past: Sequence[int],
            tables: Sequence[Sequence[int]], slots: Sequence[int], drafts: Sequence[int],
            source: EncoderInput | None, uncommitted: Sequence[int] = ()) -> int:
    state = SamplingState(Sampler(SamplingParams()), prompt_lookup=engine.limits.prompt_lookup)
    new = not any(past)
    proposals = max(drafts) or None if engine.limits.proposes else None
    memory = None
    if isinstance(source, PromptMemory):
        memory = EncoderOutputs.of_images([*slots], [source.views[0]] * len(slots))
    elif source is not None:
        memory = EncoderOutputs.of([*slots], [1] * len(slots))
    return engine.submit(Step.of(
        tokens.tolist(), past, tables, [*slots], num_drafts=drafts, num_uncommitted=uncommitted,
        memory=memory, propose=proposals,
        admit=dict.fromkeys(slots, state) if new else {},
        encode=dict.fromkeys(slots, source) if new and source is not None else {}))


def _interpolated(points: dict[int, float]) -> list[float]:
    """Seconds by every number of drafts; more drafts cost no less."""
    counts = sorted(points)
    seconds = [points[0]]
    for low, high in pairwise(counts):
        for count in range(low + 1, high + 1):
            part = (count - low) / (high - low)
            seconds.append(max(seconds[-1], points[low] + part * (points[high] - points[low])))
    return seconds
