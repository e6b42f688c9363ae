"""Which slot has the state that a sequence goes on from.

A state, which some layers keep instead of keys and values, is of one place in its sequence. It is
known by the block of the last position, as that was when it was written, and the length: who has
the same blocks, a completion of a prompt, a beam, goes on from a copy.
"""

from __future__ import annotations

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.step import EngineLimits, Step


class StatePositions:
    """What the steps so far have left each slot's state at."""

    def __init__(self, limits: EngineLimits) -> None:
        self._size = limits.block_size
        # Whatever is written to a block makes it another version; version 0 is nobody's.
        self._versions = np.ones(limits.num_blocks, np.int64)
        self._places = np.zeros((limits.max_slots, 3), np.int64)  # block, its version, length

    def enter(self, step: Step) -> list[tuple[int, int]]:
        """Slots of the step whose sequences go on from where another slot's is, and that slot.

        Raises:
            LlmcError: no slot's is there.
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
            wanted = (block, self._versions[block], past)
            if tuple(self._places[slot]) == wanted:
                continue
            found = np.flatnonzero((self._places == wanted).all(1))
            if not len(found):
                raise LlmcError(f"no sequence has the state at position {past} of slot {slot}; "
                                f"begin it anew")
            moves.append((slot, int(found[0])))
        return moves

    def leave(self, step: Step) -> None:
        """Take note of where the step brings its sequences."""
        lengths = step.past_lens + step.seq_lens
        for index, slot in enumerate(step.slots.tolist()):
            past, length = int(step.past_lens[index]), int(lengths[index])
            own = step.block_tables[index, past // self._size:-(-length // self._size)]
            self._versions[own] += 1
            self._places[slot] = own[-1], self._versions[own[-1]], length


class StateSlots:
    """Where each slot's state lies among as many as there are slots: it goes from slot to slot
    without being copied, but where several go on from it.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._reached = StatePositions(limits)
        self._rows = np.arange(limits.max_slots, dtype=np.int32)  # by slot

    def place(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Of each of the step's sequences the state, int32 [batch]; and which states are to be
        copied before, int32 [num_copies, 2], none of them to one that is copied.

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
            if source in leaving:  # its own sequence goes elsewhere
                given[slots.pop()] = row
            for slot in slots:
                given[slot] = free.pop()
                copies.append((row, given[slot]))
        for slot, row in given.items():
            self._rows[slot] = row
        self._reached.leave(step)
        return self._rows[step.slots], np.array(copies, np.int32).reshape(-1, 2)
