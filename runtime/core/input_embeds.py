"""Rows that a prompt has in place of embeddings of its token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmc.runtime.multimodal.items import PlaceholderRange
from llmc.runtime.multimodal.rotary_positions import RotaryPositions


@dataclass(eq=False)
class InputEmbeds:
    """Rows of a prompt: embeddings that the caller gave, or results of an encoder.

    Args:
        positions: int64 [n], ascending positions in the prompt.
        keys: of each row, bytes that identify its contents in names of cached blocks.
        rows: float32 [n, width]; None: the rows of `items`, which the engine encodes.
        items: positions of images and audio clips, in order.
        rotary: positions by axis of the sequence, if the model has them.
    """

    positions: np.ndarray
    keys: Sequence[bytes]
    rows: np.ndarray | None = None
    items: Sequence[PlaceholderRange] = ()
    rotary: RotaryPositions | None = None

    @staticmethod
    def of(positions: np.ndarray, rows: np.ndarray) -> InputEmbeds:
        """Rows that are known, identified by their values."""
        return InputEmbeds(positions, [hashlib.sha256(row).digest() for row in rows], rows)

    @staticmethod
    def of_items(items: Sequence[PlaceholderRange],
                 rotary: RotaryPositions | None) -> InputEmbeds:
        """Rows of images and audio, identified by what the encoder reads."""
        items = sorted(items, key=lambda own: own.offset)
        keys = [bytes.fromhex(own.item.digest) + index.to_bytes(4, "little")
                for own in items for index in range(len(own.positions))]
        return InputEmbeds(np.concatenate([own.positions for own in items]), keys, items=items,
                           rotary=rotary)

    def items_within(self, start: int, stop: int) -> Iterator[tuple[int, PlaceholderRange]]:
        """Number and place of each item with a row at positions from `start` to `stop`."""
        for index, own in enumerate(self.items):
            first, last = np.searchsorted(own.positions, (start, stop)).tolist()
            if first < last:
                yield index, own

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
