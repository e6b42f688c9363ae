"""AllReduce and AllGather between the rank threads of one process."""

from __future__ import annotations

import threading

import numpy as np

from llmc.errors import LlmcError


class Aborted(Exception):
    """Another rank failed; this one stops."""


_NOTHING = np.empty(0)


class Communicator:
    """Combines arrays of `size` threads, in rank order, so that results do not depend on timing.

    One barrier a call: ranks write to two sets of slots in turn, and nobody can be two calls ahead.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: tuple[list[np.ndarray], list[np.ndarray]] = ([_NOTHING] * size,
                                                                  [_NOTHING] * size)
        self._calls = [0] * size

    def all_reduce(self, rank: int, array: np.ndarray) -> np.ndarray:
        """The sum over ranks; every rank gets an array of its own."""
        parts = self.exchange(rank, array, array.shape)
        total = parts[0] + parts[1] if self.size > 1 else parts[0].copy()
        for part in parts[2:]:
            total += part
        return total

    def all_gather(self, rank: int, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks joined along the last axis."""
        return np.concatenate(self.exchange(rank, array, array.shape[:-1]), axis=-1)

    def exchange(self, rank: int, array: np.ndarray, alike: tuple[int, ...]) -> list[np.ndarray]:
        """What every rank brought; the shapes of all begin like this.

        Raises:
            LlmcError: one does not.
        """
        slots = self._slots[self._calls[rank] % 2]
        self._calls[rank] += 1
        slots[rank] = array
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None
        parts = list(slots)
        odd = next((part.shape for part in parts if part.shape[:len(alike)] != alike
                    or part.ndim != array.ndim), None)
        if odd is not None:
            raise LlmcError(f"chips combine {list(array.shape)} and {list(odd)}, which are not "
                            f"of one model; compile the model again")
        return parts

    def abort(self) -> None:
        """Wake all ranks that wait; their calls raise `Aborted`."""
        self._barrier.abort()

    def reset(self) -> None:
        """Make an aborted communicator usable again, when no rank is inside."""
        self._barrier.reset()
        self._calls = [0] * self.size
