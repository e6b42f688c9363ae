"""Recurrent states by slot, and which slot's state a sequence continues.

A recurrent state belongs to one position of its sequence: the last one before the drafts of a step.
It is identified by the block of that position, that block's version when the state was written, and
the length. A sequence that shares these blocks, such as another completion of a prompt or a beam,
continues with a copy.
"""

from __future__ import annotations

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.step import EngineLimits, Step


class StatePositions:
    """The sequence position of each slot's state, after the submitted steps."""

    def __init__(self, limits: EngineLimits) -> None:
        self._size = limits.block_size
        # Every write to a block increments its version; no block has version 0.
        self._versions = np.ones(limits.num_blocks, np.int64)
        self._positions = np.zeros((limits.max_slots, 3), np.int64)  # block, its version, length

    def enter(self, step: Step) -> list[tuple[int, int]]:
        """Return the slots whose sequences continue another slot's state, each with that slot.

        Raises:
            LlmcError: no slot has the state.
        """
        source_of = {int(new): int(old) for old, new in step.copies}
        self._versions[list(source_of)] += 1
        moves = []
        for index, slot in enumerate(step.slots.tolist()):
            past = int(step.past_lens[index])
            if past == 0:
                continue
            block = int(step.block_tables[index, (past - 1) // self._size])
            block = source_of.get(block, block)
            position = (block, self._versions[block], past)
            if tuple(self._positions[slot]) == position:
                continue
            sources = np.flatnonzero((self._positions == position).all(1))
            if not len(sources):
                raise LlmcError(f"no slot has the recurrent state of slot {slot}'s sequence at "
                                f"position {past}; recompute the sequence from its start")
            moves.append((slot, int(sources[0])))
        return moves

    def leave(self, step: Step) -> None:
        """Record the positions after a step."""
        lengths, committed = (step.past_lens + new for new in (step.seq_lens, step.commit_lens))
        for index, slot in enumerate(step.slots.tolist()):
            past, length = int(step.past_lens[index]), int(lengths[index])
            table, stored = step.block_tables[index], int(committed[index])
            self._versions[table[past // self._size:-(-length // self._size)]] += 1
            block = table[(stored - 1) // self._size]
            self._positions[slot] = block, self._versions[block], stored


class StateSlots:
    """Rows of recurrent state by slot.

    A state moves between slots without a copy, unless several sequences continue it.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._reached = StatePositions(limits)
        self._rows = np.arange(limits.max_slots, dtype=np.int32)  # row of each slot

    def place(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Assign state rows to the step's sequences.

        Returns:
            Each sequence's row, int32 [batch]; and rows (from, to) to copy before, int32
            [num_copies, 2]. No destination is also a source.

        Raises:
            LlmcError: see `StatePositions.enter`.
        """
        moves = self._reached.enter(step)
        takers: dict[int, list[int]] = {}
        for slot, source in moves:
            takers.setdefault(source, []).append(slot)
        leaving = {slot for slot, _ in moves}
        free = [int(self._rows[slot]) for slot in leaving if slot not in takers]
        given, copies = {}, []
        for source, slots in takers.items():
            row = int(self._rows[source])
            if source in leaving:  # the slot's sequence continues another state
                given[slots.pop()] = row
            for slot in slots:
                given[slot] = free.pop()
                copies.append((row, given[slot]))
        for slot, row in given.items():
            self._rows[slot] = row
        self._reached.leave(step)
        return self._rows[step.slots], np.array(copies, np.int32).reshape(-1, 2)
