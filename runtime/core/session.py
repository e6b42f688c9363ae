"""Step by step access to a model, for checks and experiments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.errors import LlmcError, shown
from llmc.runtime.core.image_memory import NO_IMAGES, PromptMemory
from llmc.runtime.core.loop import Loop
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.core.scheduler import Scheduler, SlotLease
from llmc.runtime.core.step import EncoderInput, EncoderOutputs, Engine, Step
from llmc.runtime.prompts import read_token_ids
from llmc.runtime.sampling.params import listed


class Session:
    """A batch of sequences that the caller extends.

    It holds slots and KV-cache blocks until it is closed, or until other sequences need them.

    Args:
        batch_size: number of sequences.
        sources: encoder prompts, token ids of each sequence; encoder-decoder models only.
    """

    def __init__(self, loop: Loop, reader: InputProcessor, batch_size: int,
                 sources: Sequence[Sequence[int]] | None = None) -> None:
        self._lease: SlotLease | None = None
        self._loop, self._reader = loop, reader
        self._past = [0] * batch_size
        self._sources: Sequence[EncoderInput] | None = \
            [NO_IMAGES] * batch_size if reader.manifest.memory else None
        if sources is not None:
            self._sources = rows = _rows(sources, "source", batch_size)
            for source in rows:
                reader.check_prompt(source)

    def extend(self, tokens: Sequence[Sequence[int]], all_logits: bool = False) -> np.ndarray:
        """Append tokens to every sequence.

        Args:
            tokens: new token ids of each sequence.
            all_logits: return logits of every new token, not only of each sequence's last.

        Returns:
            float32 logits, [batch, vocab_size] or, with `all_logits`, [num_tokens, vocab_size].

        Raises:
            LlmcError: the number of rows is not the batch size; a sequence would exceed the KV
                cache; or the session's blocks were taken by other sequences.
        """
        rows = _rows(tokens, "row", len(self._past))
        for new, past in zip(rows, self._past, strict=True):
            self._reader.check_tokens(new, past)
        return self._loop.run(lambda scheduler, engine:
                              self._extend(scheduler, engine, rows, all_logits))

    def close(self) -> None:
        """Free its slots and blocks."""
        if self._lease is not None:
            self._loop.end(self._lease)

    def __del__(self) -> None:
        self.close()

    def _extend(self, scheduler: Scheduler, engine: Engine, rows: list[list[int]],
                all_logits: bool) -> np.ndarray:
        fresh = not any(self._past)
        if fresh and self._lease is None:
            self._lease = scheduler.lease(len(rows))
        if self._lease is None or not self._lease.slots:
            raise LlmcError("the KV cache of this session was freed for other requests; open "
                            "another session" if not fresh else
                            f"{len(rows)} slots for this session exceed the free ones; close "
                            f"other sessions, or load the model with a larger max_batch_size")
        if not scheduler.extend(self._lease, [past + len(new) for past, new in
                                              zip(self._past, rows, strict=True)]):
            raise LlmcError("the tokens of this session exceed the free blocks of the KV cache; "
                            "load the model with a larger kv_cache_tokens")
        encode = dict(zip(self._lease.memory, self._sources, strict=True)) \
            if self._sources is not None and fresh else {}
        done = [0] * len(rows)
        collected: list[list[np.ndarray]] = [[] for _ in rows]
        while any(count < len(new) for count, new in zip(done, rows, strict=True)):
            step, counts = self._step(engine, rows, done, all_logits, encode)
            logits = engine.collect(engine.submit(step)).logits
            assert logits is not None
            encode = {}
            start = 0
            for row, count in counts.items():
                done[row] += count
                num_logits = count if all_logits else int(done[row] == len(rows[row]))
                collected[row].append(logits[start:start + num_logits])
                start += num_logits
        self._past = [past + len(new) for past, new in zip(self._past, rows, strict=True)]
        return np.concatenate([part for parts in collected for part in parts if len(part)])

    def _step(self, engine: Engine, rows: list[list[int]], done: list[int], all_logits: bool,
              encode: dict[int, EncoderInput]) -> tuple[Step, dict[int, int]]:
        """The largest possible next step, and its number of tokens by row, in its order."""
        assert self._lease is not None
        limits = engine.limits
        budget = min(limits.max_tokens, limits.max_logits) if all_logits else limits.max_tokens
        counts = {}
        for row in sorted(range(len(rows)), key=lambda row: (len(rows[row]) - done[row] > 1, row)):
            count = min(len(rows[row]) - done[row], budget)
            if count:
                counts[row] = count
                budget -= count
        counts = dict(sorted(counts.items(), key=lambda pair: (pair[1] > 1, pair[0])))
        memory = None
        if self._sources is not None:
            sources = [self._sources[row] for row in counts]
            rows_of_memory = [self._lease.memory[row] for row in counts]
            views = [own.views[0] for own in sources if isinstance(own, PromptMemory)]
            memory = EncoderOutputs.of_images(rows_of_memory, views) if views else \
                EncoderOutputs.of(rows_of_memory, [len(own) for own in sources])
        return Step.of(
            [rows[row][done[row]:done[row] + count] for row, count in counts.items()],
            [self._past[row] + done[row] for row in counts],
            [self._lease.tables[row].blocks for row in counts],
            [self._lease.slots[row] for row in counts],
            sample=[index for index, (row, count) in enumerate(counts.items())
                    if done[row] + count == len(rows[row])],
            logits="all" if all_logits else "sampled", encode=encode, memory=memory), counts


def _rows(value: object, name: str, count: int) -> list[list[int]]:
    """Read the token ids of `count` sequences."""
    try:
        rows = listed(value)
    except TypeError:
        raise LlmcError(f"{name}s is {shown(value)}; give a list of token ids for each "
                        f"sequence") from None
    if len(rows) != count:
        raise LlmcError(f"there are {len(rows)} {name}s for batch_size {count}; give one for each "
                        f"sequence")
    return [read_token_ids(row, f"{name} {index}") for index, row in enumerate(rows)]
