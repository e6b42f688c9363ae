"""AllReduce and AllGather between the rank threads of one process."""

from __future__ import annotations

import threading

import numpy as np

from llmc.errors import LlmcError


class Aborted(Exception):
    """Raised in a rank that stops because another one failed."""


_NOTHING = np.empty(0)


class Communicator:
    """Collectives of `size` threads. They combine in rank order, so results are deterministic.

    Each call has one barrier. Ranks alternate between two sets of slots, since a rank can be at
    most one call ahead.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: tuple[list[np.ndarray], list[np.ndarray]] = ([_NOTHING] * size,
                                                                  [_NOTHING] * size)
        self._calls = [0] * size

    def all_reduce(self, rank: int, array: np.ndarray) -> np.ndarray:
        """Return the sum over ranks, as a separate array for each rank."""
        parts = self.exchange(rank, array, array.shape)
        total = parts[0] + parts[1] if self.size > 1 else parts[0].copy()
        for part in parts[2:]:
            total += part
        return total

    def all_gather(self, rank: int, array: np.ndarray) -> np.ndarray:
        """Concatenate the arrays of all ranks along the last axis."""
        return np.concatenate(self.exchange(rank, array, array.shape[:-1]), axis=-1)

    def exchange(self, rank: int, array: np.ndarray, alike: tuple[int, ...]) -> list[np.ndarray]:
        """Return the arrays of all ranks.

        Args:
            alike: leading dimensions that all arrays share.

        Raises:
            LlmcError: an array has another shape.
        """
        slots = self._slots[self._calls[rank] % 2]
        self._calls[rank] += 1
        slots[rank] = array
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None
        parts = list(slots)
        mismatch = next((part.shape for part in parts if part.shape[:len(alike)] != alike
                         or part.ndim != array.ndim), None)
        if mismatch is not None:
            raise LlmcError(f"chips combine {list(array.shape)} and {list(mismatch)}, which are "
                            f"not of one model; compile the model again")
        return parts

    def abort(self) -> None:
        """Wake all waiting ranks; their calls raise `Aborted`."""
        self._barrier.abort()

    def reset(self) -> None:
        """Make an aborted communicator usable again, when no rank is in a call."""
        self._barrier.reset()
        self._calls = [0] * self.size
