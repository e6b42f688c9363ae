"""Maps the paged KV cache's blocks to contiguous rows.

GroupQueryAttention needs contiguous positions, so each slot has a row of max_seq_len positions. A
full block is also stored outside the rows, and copied into the row of another sequence that shares
it, which costs far less than recomputing it. Storing does not delay prefill: decode steps store a
few pending blocks each, and a slot's own are stored before another sequence takes its row. A block
that is not stored is copied from the row that has it. Recurrent states are in their slots' rows; a
sequence that continues another's state gets a copy.

Pages of idle rows stay allocated until rows hold more positions than all blocks together. Then they
are returned to the operating system, least recently used rows first.
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

_STEPS = 16  # decode steps within which pending blocks are stored
# Linux's MAP_NORESERVE: most positions of most rows are never used.
_UNRESERVED = 0x4000 if sys.platform == "linux" else 0


class _PendingBlock(NamedTuple):
    """A full block of a row that is not stored yet."""

    place: int
    block: int
    version: int


class RowCache:
    """The KV cache of one rank.

    Attributes:
        caches: by name, float32 [max_slots, num_kv_heads, max_seq_len, head_dim]; recurrent states
            are [max_slots, *shape].
    """

    def __init__(self, chip: Chip, limits: EngineLimits, max_seq_len: int) -> None:
        self._size, self._max_seq_len = limits.block_size, max_seq_len
        self.caches: dict[str, np.ndarray] = {}
        # Layers of equal shape are in one array, so that a block is copied at once.
        self._rows: list[np.ndarray] = []  # [caches, max_slots, num_kv_heads, max_seq_len, ...]
        self._mappings: list[mmap.mmap] = []  # memory of each array in `_rows`
        self._blocks: list[np.ndarray] = []  # [num_blocks, caches, num_kv_heads, block_size, ...]
        by_shape: dict[tuple[int, int], list[str]] = {}
        layers = {**chip.caches, **(chip.draft_caches if limits.proposes else {})}
        for name, layer in layers.items():
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
        # Every write to a block increments its version. A row's copy of a block is complete only
        # if it has the newest version. No block has version 0.
        places = -(-max_seq_len // self._size)
        self._versions = np.ones(limits.num_blocks, np.int64)
        self._stored = np.zeros(limits.num_blocks, np.int64)
        self._held = np.zeros((limits.max_slots, places), np.int64)
        self._held_versions = np.zeros((limits.max_slots, places), np.int64)
        self._filled = np.zeros(limits.max_slots, np.int64)
        self._pending: dict[int, list[_PendingBlock]] = {}  # by slot
        # Positions of each row whose pages are allocated, their maximum sum, and the last step
        # that used each row.
        self._allocated = np.zeros(limits.max_slots, np.int64)
        self._max_allocated = limits.num_blocks * self._size
        self._used = np.zeros(limits.max_slots, np.int64)
        self._steps = 0
        self._last: tuple[bytes, ...] = ()

    def pass_over(self, slot: int) -> int:
        """Return the position where a step writes to a row between those of its sequences.

        It is the next free one, or the last of a full row. It is not 0 if the row may have a
        recurrent state, which would be cleared there: pages of the row may have been released.
        """
        free = max(int(self._filled[slot]), int(bool(self._states)))
        position = min(free, self._max_seq_len - 1)
        if position % self._size == 0 or position != self._filled[slot]:
            place = position // self._size
            if any(waiting.place == place for waiting in self._pending.get(slot, ())):
                self._store(self._pending.pop(slot), slot)
            self._held_versions[slot, place] = 0
        return position

    def write_ahead(self, slots: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        """Note that a draft model will write positions after its sequences' ends, of no block.

        Call it between `enter` and `leave` of a step.

        Args:
            slots: int32 [batch].
            starts, stops: int [batch], positions.
        """
        for slot, start, stop in zip(slots.tolist(), starts.tolist(), stops.tolist(), strict=True):
            self._held_versions[slot, -(-start // self._size):-(-stop // self._size)] = 0
            self._allocated[slot] = max(self._allocated[slot], stop)

    def enter(self, step: Step) -> None:
        """Copy the blocks before the step's tokens into their sequences' rows."""
        source_of = {int(new): int(old) for old, new in step.copies}
        self._versions[list(source_of)] += 1
        if self._states:
            self._copy_states(step)
        if not len(step.copies) and self._last == \
                _bytes(step.slots, step.past_lens, step.block_tables):
            return  # the same sequences as in the last step, with the same blocks
        places = []  # to fill, with their content
        for index, slot in enumerate(step.slots.tolist()):
            past = int(step.past_lens[index])
            self._filled[slot] = past
            count = -(-past // self._size)
            table = step.block_tables[index, :count]
            if any(place >= past // self._size or table[place] != block
                   for place, block, _ in self._pending.get(slot, ())):  # of another sequence
                self._store(self._pending.pop(slot), slot)
            outdated = (self._held[slot, :count] != table) | \
                (self._held_versions[slot, :count] != self._versions[table])
            for place in np.flatnonzero(outdated).tolist():
                block = int(table[place])
                content = self._find(source_of.get(block, block), place)
                places.append((slot, place, block, content))
        for slot, place, block, content in places:
            start, end = self._span(place)
            for rows, block_of_rows in zip(self._rows, content, strict=True):
                rows[:, slot, :, start:end] = block_of_rows[:, :, :end - start]
            self._held[slot, place] = block
            self._held_versions[slot, place] = self._versions[block]

    def _copy_states(self, step: Step) -> None:
        """Copy recurrent states to sequences that continue another's."""
        moved = [(slot, [state[source].copy() for state in self._states])
                 for slot, source in self._reached.enter(step)]
        for slot, content in moved:
            for state, copied in zip(self._states, content, strict=True):
                state[slot] = copied

    def leave(self, step: Step, rewritten: int = 0) -> None:
        """Record the positions that the step has written, and store pending blocks.

        Args:
            step: the step.
            rewritten: positions before its tokens that it has written again.
        """
        lengths = step.past_lens + step.seq_lens
        self._last = _bytes(step.slots, lengths, step.block_tables)
        if self._states:
            self._reached.leave(step)
        for index, slot in enumerate(step.slots.tolist()):
            past, length = int(step.past_lens[index]), int(lengths[index])
            self._filled[slot] = length
            for place in range(max(past - rewritten, 0) // self._size, -(-length // self._size)):
                block = int(step.block_tables[index, place])
                start, end = self._span(place)
                self._versions[block] += 1
                self._held[slot, place] = block
                self._held_versions[slot, place] = self._versions[block]
                if end - start == self._size and end <= length:
                    self._pending.setdefault(slot, []).append(
                        _PendingBlock(place, block, int(self._versions[block])))
            if past == 0:  # prompts of one batch are padded, which writes after their ends
                self._held_versions[slot, -(-length // self._size):] = 0
        self._note_allocated(step.slots, lengths, step)
        if step.num_decode == step.batch_size:
            for _ in range(-(-sum(map(len, self._pending.values())) // _STEPS)):
                slot = next(iter(self._pending))
                self._store([self._pending[slot].pop(0)], slot)
                if not self._pending[slot]:
                    del self._pending[slot]

    def _note_allocated(self, slots: np.ndarray, lengths: np.ndarray, step: Step) -> None:
        """Count written positions, and release pages if they are too many."""
        self._steps += 1
        self._used[slots] = self._steps
        padded = step.seq_lens[step.past_lens == 0].max(initial=0)  # prompts of one batch
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
        """Return the pages of a row after `length` positions to the operating system.

        Blocks that only this row has are stored first.
        """
        first = -(-length // self._size)
        if self._allocated[slot] <= first * self._size:
            return
        held, versions = self._held[slot], self._held_versions[slot]
        only_here = (versions > 0) & (self._versions[held] == versions) & \
            (self._stored[held] != versions)
        only_here[:first] = False
        self._store((_PendingBlock(place, int(held[place]), int(versions[place]))
                    for place in np.flatnonzero(only_here).tolist()), slot)
        versions[first:] = 0
        pending = [block for block in self._pending.pop(slot, ()) if block.place < first]
        if pending:
            self._pending[slot] = pending
        for mapping, rows in zip(self._mappings, self._rows, strict=True):
            _release_pages(mapping, rows, slot, first * self._size)
        self._allocated[slot] = min(first * self._size, self._max_seq_len)
        self._filled[slot] = min(self._filled[slot], length)

    def _store(self, pending: Iterable[_PendingBlock], slot: int) -> None:
        """Store blocks of a row, unless they have been written since."""
        for place, block, version in pending:
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
        """Content of a block; copied if its row may be written."""
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
    """A float32 array of zeros; see `_map`."""
    return np.frombuffer(_map(math.prod(shape)), np.float32).reshape(shape)


def _map(count: int) -> mmap.mmap:
    """Map `count` float32 zeros in small pages.

    Mostly the beginning of a row is written, separately for each head, and each write would clear a
    huge page. Blocks are first written while steps wait; clearing small pages was four times as
    fast.
    """
    memory = mmap.mmap(-1, 4 * count,
                       flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _release_pages(mapping: mmap.mmap, rows: np.ndarray, slot: int, position: int) -> None:
    """Return whole pages of a slot from a position on, for each head of each cache.

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
