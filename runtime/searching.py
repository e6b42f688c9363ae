"""What each step of a beam search gives to choose from: by the host from logits, or by GPUs.

Beam k of prompt b has cache row b * beam + k. Each prompt is read once, into its first beam's row;
then every beam has a token at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmc.runtime.attention.metadata import BeamStep, Memory, PackedBatch
from llmc.runtime.decoding.beam_search import Candidates, follow, log_softmax
from llmc.runtime.decoding.sampling import Sampler
from llmc.runtime.replica import Replica


class Steps(Protocol):
    """The steps of one search; candidates are [batch, beam, count]."""

    def begin(self) -> Candidates:
        """Read the prompts."""
        ...

    def go_on(self, tokens: np.ndarray, parents: np.ndarray, running: np.ndarray) -> Candidates:
        """Let the beams go on with tokens [batch, beam], each continuing the beam that `parents`
        says. What prompts that are not `running`, bool [batch], give means nothing.
        """
        ...


class HostSteps:
    """Candidates that the host chooses from logits, which samplers may change. See `Steps`.

    Args:
        prompts: token ids.
        samplers: each prompt's.
        beam, count: beams of a prompt, and candidates of each.
        room: positions of a cache row.
        memory: of each prompt, where an encoder read it.
    """

    def __init__(self, replica: Replica, prompts: Sequence[Sequence[int]],
                 samplers: Sequence[Sampler], beam: int, count: int, room: int,
                 memory: Memory | None = None) -> None:
        self._replica, self._prompts, self._samplers = replica, prompts, samplers
        self._beam, self._count, self._room, self._memory = beam, count, room, memory
        self._memory_of_beams = memory and memory.take(np.repeat(np.arange(len(prompts)), beam))
        self._lengths = np.array([len(prompt) for prompt in prompts])
        self._first_rows = np.arange(len(prompts))[:, None] * beam
        self._indirection = np.empty((len(prompts), beam, room), np.int32)
        self._indirection[:] = self._first_rows[:, :, None]
        self._written: np.ndarray | None = None
        self._histories: list[list[int]] = [[] for _ in range(len(prompts) * beam)]

    def begin(self) -> Candidates:
        logits = np.concatenate([
            self._replica.run(PackedBatch.prepare([prompt], [0], b * self._beam,
                                                  memory=self._memory and self._memory.take([b])))
            for b, prompt in enumerate(self._prompts)])
        return self._candidates(np.repeat(logits, self._beam, axis=0))

    def go_on(self, tokens: np.ndarray, parents: np.ndarray, running: np.ndarray) -> Candidates:
        chosen = tokens.reshape(-1).tolist()
        self._histories = [[*self._histories[row], token] for row, token in
                           zip((self._first_rows + parents).flat, chosen, strict=True)]
        self._indirection = follow(self._indirection, parents, self._written)
        self._written = np.minimum(self._lengths + len(self._histories[0]), self._room) - 1
        alive = running | self._replica.on_gpus  # there, a token for each is a faster step
        return self._candidates(self._replica.run(PackedBatch.prepare(
            [[token] if alive[row // self._beam] else [] for row, token in enumerate(chosen)],
            np.repeat(self._written, self._beam).tolist(),
            cache_indirection=self._indirection.reshape(len(chosen), self._room),
            memory=self._memory_of_beams)))

    def _candidates(self, logits: np.ndarray) -> Candidates:
        scores = np.stack([self._samplers[row // self._beam].process(own, self._histories[row])
                           for row, own in enumerate(log_softmax(logits))])
        return Candidates.of(scores, self._count).reshape(len(self._prompts), self._beam)


class DeviceSteps:
    """Candidates that GPUs choose, which keep the indirection too. See `Steps`, `HostSteps`."""

    def __init__(self, replica: Replica, prompts: Sequence[Sequence[int]], beam: int, count: int,
                 room: int, memory: Memory | None = None) -> None:
        self._replica, self._prompts = replica, prompts
        self._beam, self._count, self._room, self._memory = beam, count, room, memory
        self._memory_of_beams = memory and memory.take(np.repeat(np.arange(len(prompts)), beam))
        self._lengths = np.repeat(np.array([[len(prompt)] for prompt in prompts], np.int32), beam,
                                  axis=1)
        self._made = 0

    def begin(self) -> Candidates:
        parts = [self._replica.likeliest(
            PackedBatch.prepare([prompt], [0], b * self._beam,
                                memory=self._memory and self._memory.take([b])), self._count)
                 for b, prompt in enumerate(self._prompts)]
        return Candidates(*(np.repeat(np.stack([getattr(part, name) for part in parts]),
                                      self._beam, axis=1) for name in ("tokens", "log_probs")))

    def go_on(self, tokens: np.ndarray, parents: np.ndarray, running: np.ndarray) -> Candidates:
        self._made += 1
        return self._replica.follow(BeamStep(
            np.ascontiguousarray(tokens, np.int64), np.ascontiguousarray(parents, np.int32),
            np.minimum(self._lengths + self._made, self._room) - 1, self._lengths,
            self._count, self._memory_of_beams)).reshape(*tokens.shape)
