"""A minimal scheduler for engine tests.

Sequences run in the given order, with scattered blocks, fixed chunks and a fixed number of
in-flight steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc.artifacts.manifest import read_manifest
from llmc.runtime.core.step import LAST, SamplingState, Step
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.sampling.sampler import Logprobs, Sampler

# Sampling parameters of one batch, greedy and random.
MIXED = [
    dict(), dict(repetition_penalty=1.4), dict(presence_penalty=0.8, frequency_penalty=0.4),
    dict(logit_bias={7: 3.0, 9: -2.5, 11: float("-inf")}, logprobs=3),
    dict(min_tokens=12, logprobs=0), dict(bad_words=[[5], [8, 8], [10, 6, 7]], logprobs=20),
    dict(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.3, min_tokens=4,
         bad_words=[[3, 4], [30]], logit_bias={20: 1.5}, logprobs=5)]
SAMPLED = [dict(temperature=0.9, min_p=0.02), dict(temperature=1.2, typical_p=0.8),
           dict(temperature=0.8, top_k=30, top_p=0.9), dict(temperature=1.0), dict(),
           dict(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01, typical_p=0.9),
           dict(temperature=1.5, top_p=0.8)]


def load(case, device=0, rank=0, **options: Any) -> CudaEngine:
    """Load the engine of one rank and prepare it."""
    manifest = read_manifest(case)
    given = {"max_batch_size": 4, "max_tokens": 128, **options}
    engine = CudaEngine(manifest, manifest.chips[rank], case, device, **given)
    if manifest.tp_size == 1:
        engine.allocate(engine.measure())
    return engine


@dataclass
class Sequence_:
    slot: int
    prompt: list[int]
    sampler: Sampler
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    fed: int = 0
    asked: int = 0  # tokens of submitted steps
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)
    begun: tuple[int, ...] = ()

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.begun]


class Stepper:
    """Submits steps to an engine."""

    def __init__(self, engine: Any, seed: int = 0) -> None:
        self.engine, self.limits = engine, engine.limits
        self._rng = np.random.default_rng(seed)
        self.free = self._rng.permutation(min(self.limits.num_blocks, 4096)).tolist()

    def grow(self, blocks: list[int], length: int) -> None:
        while len(blocks) * self.limits.block_size < length:
            blocks.append(self.free.pop())

    def generate(self, prompts: Sequence[Sequence[int]], params: Any, *, chunk: int = 10**6,
                 ahead: int = 2, begun: Sequence[Sequence[int]] = (), arrive: int = 10**6) -> \
            list[Sequence_]:
        """Return max_tokens tokens after each prompt, ignoring EOS.

        At most `arrive` prompts are admitted in a step. Their first `begun` tokens are given.
        """
        listed = params if isinstance(params, list) else [params] * len(prompts)
        all_ = [Sequence_(i, list(prompt), sampler_of(own, prompt), own.max_tokens,
                          begun=tuple(begun[i]) if begun else ())
                for i, (prompt, own) in enumerate(zip(prompts, listed, strict=True))]
        waiting, under_way = deque(all_), deque()
        slots = self._rng.permutation(self.limits.max_slots).tolist()
        running: list[Sequence_] = []
        while waiting or running or under_way:
            running = [own for own in running if own.asked < own.max_tokens]
            for _ in range(arrive):
                if not waiting or not slots:
                    break
                running.append(waiting.popleft())
                running[-1].slot = slots.pop()
            made = self._step(running, chunk) if running else None
            if made is not None:
                step, chosen = made
                under_way.append((self.engine.submit(step), chosen))
            while len(under_way) > (ahead if made is not None else 0):
                ticket, chosen = under_way.popleft()
                sampled = self.engine.collect(ticket)
                for own, token, logprob in zip(chosen, sampled.tokens.tolist(), sampled.logprobs,
                                               strict=True):
                    own.tokens.append(token)
                    own.logprobs.append(logprob)
                    if len(own.tokens) == own.max_tokens:
                        slots.append(own.slot)
                        self.free.extend(own.blocks)
        return all_

    def _step(self, running: list[Sequence_], chunk: int) -> tuple[Step, list[Sequence_]]:
        room, rows = self.limits.max_tokens, []
        for own in running:
            left = len(own.known) - own.fed
            count = min(left, chunk, room - sum(len(new) for _, new in rows)) if left > 0 else 1
            if count < 1 or sum(len(new) for _, new in rows) + count > room:
                continue
            new = own.known[own.fed:own.fed + count] if left > 0 else [LAST]
            rows.append((own, new))
        rows.sort(key=lambda row: len(row[1]) > 1)
        admit = {own.slot: SamplingState(own.sampler, own.begun) for own, _ in rows if not own.fed}
        past, sample = [], []
        for index, (own, new) in enumerate(rows):
            past.append(own.fed)
            own.fed += len(new)
            self.grow(own.blocks, own.fed)
            if own.fed >= len(own.known):
                sample.append(index)
                own.asked += 1
        return Step.of([new for _, new in rows], past, [own.blocks for own, _ in rows],
                       [own.slot for own, _ in rows], sample=sample, admit=admit), \
            [rows[index][0] for index in sample]

    def logits(self, rows: Sequence[Sequence[int]], reads: Sequence[Sequence[int]]) -> \
            list[np.ndarray]:
        """Return logits [length, vocab]; step i has reads[i][b] tokens of sequence b."""
        tables: list[list[int]] = [[] for _ in rows]
        past = [0] * len(rows)
        made: list[list[np.ndarray]] = [[] for _ in rows]
        for counts in reads:
            order = sorted((b for b, count in enumerate(counts) if count),
                           key=lambda b: counts[b] > 1)
            for b in order:
                self.grow(tables[b], past[b] + counts[b])
            step = Step.of([rows[b][past[b]:past[b] + counts[b]] for b in order],
                           [past[b] for b in order], [tables[b] for b in order], order,
                           logits="all")
            logits = self.engine.collect(self.engine.submit(step)).logits
            for index, b in enumerate(order):
                made[b].append(logits[step.cu_seqlens[index]:step.cu_seqlens[index + 1]])
                past[b] += counts[b]
        for table in tables:
            self.free.extend(table)
        return [np.concatenate(own) for own in made]


def sampler_of(params: SamplingParams, prompt: Sequence[int]) -> Sampler:
    return Sampler(params, 0, prompt, [1, 2], params.bad_words or ())
