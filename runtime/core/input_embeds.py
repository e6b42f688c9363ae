"""Rows that a prompt has in place of embeddings of its token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from llmc.artifacts.manifest import Bidirectional
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
        ranges: int64 [num_ranges, 2], first positions and those after the last of ranges of at
            least two tokens with bidirectional attention, ascending and disjoint.
        salt: bytes that identify what determines the contents of all blocks.
    """

    positions: np.ndarray
    keys: Sequence[bytes]
    rows: np.ndarray | None = None
    items: Sequence[PlaceholderRange] = ()
    rotary: RotaryPositions | None = None
    ranges: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    salt: bytes = b""

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

    def seen_together(self, kind: Bidirectional | None, tokens: Sequence[int]) -> InputEmbeds:
        """Add a prompt's ranges with bidirectional attention: of images, not of audio.

        A row then depends on all rows of its range, and so does its key.

        Args:
            kind: see `ImageEncoderProgram`.
            tokens: of the prompt.
        """
        if kind is None:
            return self
        if kind == "prompt":
            digest = hashlib.sha256(np.asarray(tokens, np.int64).tobytes() + b"".join(self.keys))
            return replace(self, salt=digest.digest(), ranges=np.array(
                [[0, len(tokens)]] if len(tokens) > 1 else [], np.int64).reshape(-1, 2))
        audio = [own.positions for own in self.items if own.item.modality == "audio"]
        is_audio = np.isin(self.positions, np.concatenate(audio)) if audio else \
            np.zeros(len(self.positions), np.bool_)
        borders = np.flatnonzero((np.diff(self.positions) != 1) | np.diff(is_audio)) + 1
        keys, ranges = list[bytes](), list[tuple[int, int]]()
        for first, stop in pairwise([0, *borders.tolist(), len(self.positions)]):
            if is_audio[first]:
                keys += self.keys[first:stop]
                continue
            own = hashlib.sha256(b"".join(self.keys[first:stop])).digest()
            keys += [own + index.to_bytes(4, "little") for index in range(stop - first)]
            if stop - first > 1:
                ranges.append((int(self.positions[first]), int(self.positions[stop - 1]) + 1))
        return replace(self, keys=keys, ranges=np.array(ranges, np.int64).reshape(-1, 2))

    @property
    def longest_range(self) -> int:
        """Number of tokens of the longest range."""
        return int(np.diff(self.ranges).max(initial=0))

    @property
    def last_range_end(self) -> int:
        """The position after the last range; 0 without any."""
        return int(self.ranges[-1, 1]) if len(self.ranges) else 0

    def range_of(self, position: int) -> tuple[int, int] | None:
        """The range that has a position."""
        index = int(np.searchsorted(self.ranges[:, 1], position, side="right"))
        if index == len(self.ranges) or self.ranges[index, 0] > position:
            return None
        start, stop = self.ranges[index].tolist()
        return start, stop

    def ranges_within(self, start: int, stop: int) -> np.ndarray:
        """Ranges of the tokens from `start` to `stop`, int32 [stop - start, 2]; see `Step`."""
        result = np.zeros((stop - start, 2), np.int32)
        for first, end in self.ranges.tolist():
            result[max(first - start, 0):max(end - start, 0)] = first, end
        return result

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
