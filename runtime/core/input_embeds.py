"""Rows that a prompt has in place of embeddings of its token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(eq=False)
class InputEmbeds:
    """Rows of a prompt: embeddings that the caller gave, or results of an encoder.

    Args:
        positions: int64 [n], ascending positions in the prompt.
        keys: of each row, bytes that identify its contents in names of cached blocks.
        rows: float32 [n, width]; None: not encoded yet.
    """

    positions: np.ndarray
    keys: Sequence[bytes]
    rows: np.ndarray | None = None

    @staticmethod
    def of(positions: np.ndarray, rows: np.ndarray) -> InputEmbeds:
        """Rows that are known, identified by their values."""
        return InputEmbeds(positions, [hashlib.sha256(row).digest() for row in rows], rows)

    @cached_property
    def _places(self) -> list[int]:
        places: list[int] = self.positions.tolist()
        return places

    def within(self, start: int, stop: int) -> slice:
        """The rows at positions from `start` to `stop`."""
        first, last = np.searchsorted(self.positions, (start, stop)).tolist()
        return slice(first, last)

    def key(self, start: int, stop: int) -> bytes:
        """Bytes that identify the rows at positions from `start` to `stop`; empty without any."""
        own = self.within(start, stop)
        return b"".join(place.to_bytes(8, "little") + key for place, key in zip(
            self._places[own], self.keys[own], strict=True))
