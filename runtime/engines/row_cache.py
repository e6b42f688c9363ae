"""Blocks of a KV cache whose sequences lie in rows.

GroupQueryAttention wants a sequence's positions one after the other, so each slot has a row of all
positions. A block that is full is also kept beside the rows, and copied into the row of another
sequence that shares it, which costs far less than computing it. First tokens do not wait for that:
decode steps keep a few of those blocks that are not kept yet, and where another sequence enters a
row, its own are. A block that is not kept is copied from the row that has it. A state, which some
layers keep instead of keys and values, is in its slot's row: a sequence that goes on from where
another is gets a copy.

Pages of rows that sequences have left stay allocated until rows hold more positions than there are
in all blocks. Then the operating system gets them back, least recently used rows first.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from llmc.artifacts.manifest import Chip
from llmc.runtime.core.step import EngineLimits, Step
from llmc.runtime.engines.state_slots import StatePositions

_STEPS = 16  # within about as many a block is kept
# Linux's MAP_NORESERVE, as most positions of most rows are never used.
_UNRESERVED = 0x4000 if sys.platform == "linux" else 0


class _Waiting(NamedTuple):
    """A full block of a row that is not kept yet."""

    place: int
    block: int
    version: int


class RowCache:
    """The KV cache of one rank.

    Attributes:
        caches: by name, float32 [max_slots, num_kv_heads, max_seq_len, head_dim], of states
            [max_slots, *shape].
    """

    def __init__(self, chip: Chip, limits: EngineLimits, max_seq_len: int) -> None:
        self._size, self._max_seq_len = limits.block_size, max_seq_len
        self.caches: dict[str, np.ndarray] = {}
        # Layers of equal shape lie in one array, so that a block is copied at once.
        self._rows: list[np.ndarray] = []  # [caches, max_slots, num_kv_heads, max_seq_len, ...]
        self._mappings: list[mmap.mmap] = []  # of each array in `_rows`
        self._blocks: list[np.ndarray] = []  # [num_blocks, caches, num_kv_heads, block_size, ...]
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, layer in chip.caches.items():
            by_shape.setdefault((layer.num_kv_heads, layer.head_dim), []).append(name)
        for (heads, dim), names in by_shape.items():
            shape = len(names), limits.max_slots, heads, max_seq_len, dim
            self._mappings.append(_map(math.prod(shape)))
            self._rows.append(np.frombuffer(self._mappings[-1], np.float32).reshape(shape))
            self._blocks.append(_zeros((limits.num_blocks, len(names), heads, self._size, dim)))
            self.caches.update(zip(names, self._rows[-1], strict=True))
        self._states = [_zeros((limits.max_slots, *state.shape)) for state in chip.states]
        self.caches.update(zip(chip.state_caches, self._states, strict=True))
        self._reached = StatePositions(limits)
        # Whatever is written to a block makes it another version. What a row holds of a block is
        # all of it only where it has the newest; version 0 is nobody's.
        places = -(-max_seq_len // self._size)
        self._versions = np.ones(limits.num_blocks, np.int64)
        self._stored = np.zeros(limits.num_blocks, np.int64)
        self._held = np.zeros((limits.max_slots, places), np.int64)
        self._held_versions = np.zeros((limits.max_slots, places), np.int64)
        self._filled = np.zeros(limits.max_slots, np.int64)
        self._waiting: dict[int, list[_Waiting]] = {}  # by slot
        # Positions of each row whose pages are allocated, how many there may be in all, and the
        # step that last used the row.
        self._allocated = np.zeros(limits.max_slots, np.int64)
        self._max_allocated = limits.num_blocks * self._size
        self._used = np.zeros(limits.max_slots, np.int64)
        self._steps = 0
        self._last: tuple[bytes, ...] = ()

    def pass_over(self, slot: int) -> int:
        """Where something is written to a row that a step passes over: behind all that it holds, or
        where it is full in the place of its last position.
        """
        position = min(int(self._filled[slot]), self._max_seq_len - 1)
        if position % self._size == 0 or position < self._filled[slot]:
            place = position // self._size
            if any(waiting.place == place for waiting in self._waiting.get(slot, ())):
                self._keep(self._waiting.pop(slot), slot)
            self._held_versions[slot, place] = 0
        return position

    def enter(self, step: Step) -> None:
        """Bring what is before the step's tokens into their sequences' rows."""
        source_of = {int(new): int(old) for old, new in step.copies}
        self._versions[list(source_of)] += 1
        if self._states:
            self._copy_states(step)
        if not len(step.copies) and self._last == \
                _bytes(step.slots, step.past_lens, step.block_tables):
            return  # the sequences of the last step go on, and have no other blocks
        places = []  # to fill, with what is to be there
        for index, slot in enumerate(step.slots.tolist()):
            past = int(step.past_lens[index])
            self._filled[slot] = past
            count = -(-past // self._size)
            table = step.block_tables[index, :count]
            if any(place >= past // self._size or table[place] != block
                   for place, block, _ in self._waiting.get(slot, ())):  # another sequence's
                self._keep(self._waiting.pop(slot), slot)
            wrong = (self._held[slot, :count] != table) | \
                (self._held_versions[slot, :count] != self._versions[table])
            for place in np.flatnonzero(wrong).tolist():
                block = int(table[place])
                content = self._find(source_of.get(block, block), place)
                places.append((slot, place, block, content))
        for slot, place, block, content in places:
            start, end = self._span(place)
            for rows, own in zip(self._rows, content, strict=True):
                rows[:, slot, :, start:end] = own[:, :, :end - start]
            self._held[slot, place] = block
            self._held_versions[slot, place] = self._versions[block]

    def _copy_states(self, step: Step) -> None:
        """Give sequences that go on from where another is what it has."""
        moved = [(slot, [state[source].copy() for state in self._states])
                 for slot, source in self._reached.enter(step)]
        for slot, content in moved:
            for state, own in zip(self._states, content, strict=True):
                state[slot] = own

    def leave(self, step: Step) -> None:
        """Take note of what the step has computed, and of the blocks that it has filled."""
        lengths = step.past_lens + step.seq_lens
        self._last = _bytes(step.slots, lengths, step.block_tables)
        if self._states:
            self._reached.leave(step)
        for index, slot in enumerate(step.slots.tolist()):
            past, length = int(step.past_lens[index]), int(lengths[index])
            self._filled[slot] = length
            for place in range(past // self._size, -(-length // self._size)):
                block = int(step.block_tables[index, place])
                start, end = self._span(place)
                self._versions[block] += 1
                self._held[slot, place] = block
                self._held_versions[slot, place] = self._versions[block]
                if end - start == self._size and end <= length:
                    self._waiting.setdefault(slot, []).append(
                        _Waiting(place, block, int(self._versions[block])))
            if past == 0:  # prompts that are run at once are padded, which is written behind them
                self._held_versions[slot, -(-length // self._size):] = 0
        self._note_allocated(step.slots, lengths, step)
        if step.num_decode == step.batch_size:
            for _ in range(-(-sum(map(len, self._waiting.values())) // _STEPS)):
                slot = next(iter(self._waiting))
                self._keep([self._waiting[slot].pop(0)], slot)
                if not self._waiting[slot]:
                    del self._waiting[slot]

    def _note_allocated(self, slots: np.ndarray, lengths: np.ndarray, step: Step) -> None:
        """Count the positions that a step has written, and release rows where they are too many."""
        self._steps += 1
        self._used[slots] = self._steps
        padded = step.seq_lens[step.past_lens == 0].max(initial=0)  # prompts that are run at once
        self._allocated[slots] = np.maximum(self._allocated[slots], np.maximum(lengths, padded))
        if self._allocated.sum() <= self._max_allocated:
            return
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            self._release(slot, length)
        idle = np.flatnonzero((self._allocated > 0) & (self._used < self._steps))
        for slot in idle[np.argsort(self._used[idle], kind="stable")].tolist():
            if self._allocated.sum() <= self._max_allocated:
                break
            self._release(slot, 0)

    def _release(self, slot: int, length: int) -> None:
        """Give back the pages of a row behind so many positions, of which blocks that lie nowhere
        else are kept.
        """
        first = -(-length // self._size)
        if self._allocated[slot] <= first * self._size:
            return
        held, versions = self._held[slot], self._held_versions[slot]
        here = (versions > 0) & (self._versions[held] == versions) & \
            (self._stored[held] != versions)
        here[:first] = False
        self._keep((_Waiting(place, int(held[place]), int(versions[place]))
                    for place in np.flatnonzero(here).tolist()), slot)
        versions[first:] = 0
        waiting = [own for own in self._waiting.pop(slot, ()) if own.place < first]
        if waiting:
            self._waiting[slot] = waiting
        for mapping, rows in zip(self._mappings, self._rows, strict=True):
            _release_pages(mapping, rows, slot, first * self._size)
        self._allocated[slot] = min(first * self._size, self._max_seq_len)
        self._filled[slot] = min(self._filled[slot], length)

    def _keep(self, waiting: Iterable[_Waiting], slot: int) -> None:
        """Copy blocks of a row beside the rows, unless they have been written to since."""
        for place, block, version in waiting:
            if self._versions[block] != version:
                continue
            self._stored[block] = version
            start, end = self._span(place)
            for rows, blocks in zip(self._rows, self._blocks, strict=True):
                blocks[block] = rows[:, slot, :, start:end]

    def _span(self, place: int) -> tuple[int, int]:
        start = place * self._size
        return start, min(start + self._size, self._max_seq_len)

    def _find(self, block: int, place: int) -> list[np.ndarray]:
        """A block's content; a copy, where the row that has it may be written."""
        version = self._versions[block]
        if self._stored[block] == version:
            return [blocks[block] for blocks in self._blocks]
        slot = int(np.flatnonzero((self._held[:, place] == block) &
                                  (self._held_versions[:, place] == version))[0])
        start, end = self._span(place)
        return [rows[:, slot, :, start:end].copy() for rows in self._rows]


def _bytes(*arrays: np.ndarray) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in arrays)


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array; see `_map`."""
    return np.frombuffer(_map(math.prod(shape)), np.float32).reshape(shape)


def _map(count: int) -> mmap.mmap:
    """Memory of so many float32 zeros, in small pages: of a row mostly the beginning is written,
    for each head apart, and a huge page would be cleared for each. Blocks are written for the first
    time while steps wait, and small pages were cleared four times as fast.
    """
    memory = mmap.mmap(-1, 4 * count,
                       flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _release_pages(mapping: mmap.mmap, rows: np.ndarray, slot: int, position: int) -> None:
    """Give back whole pages of a slot from a position on, for each head of each cache.

    Args:
        mapping: the memory of `rows`.
        rows: [caches, max_slots, num_kv_heads, max_seq_len, head_dim].
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    caches, slots, heads, length, _ = rows.shape
    stride = rows.strides[3]  # bytes of a position
    for cache in range(caches):
        start = (cache * slots + slot) * heads * length * stride
        stop = start + heads * length * stride
        spans = [(start, stop)] if position == 0 else [
            (start + (head * length + position) * stride, start + (head + 1) * length * stride)
            for head in range(heads)]
        for low, high in spans:
            low, high = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * \
                mmap.PAGESIZE
            if low < high:
                mapping.madvise(mmap.MADV_DONTNEED, low, high - low)
