"""Fair queueing: the order in which waiting sequences are admitted.

A tree of three levels counts slots and orders what waits:

    root → tenants → requests → waiting groups

1. A child without a slot goes before its siblings that hold slots, the oldest first.
2. Children that hold slots go by priority, then by number of slots, then by age.
3. A lower priority delays a child without a slot by HEAD_START steps per level, not longer.

Nobody starves: a share that others overtake runs out of slots, and rule 1 then puts it in front of
all later arrivals.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.core.scheduler import Sequence

HEAD_START = 256  # steps of waiting that one level of priority is worth

Order = tuple[int, ...]  # arrival step + priority · HEAD_START, arrival number, index in its group
_Entry = tuple[Order, "_Node"]


class _Node:
    """A node of the tree."""

    parent: Share | None
    slots = 0

    def head(self, step: int) -> WaitingGroup | None:
        """The waiting group to admit next; None if nothing waits."""
        raise NotImplementedError

    def moved(self, step: int) -> None:
        """Sort this node among its siblings again, and each ancestor among its own."""
        if self.parent is not None:
            self.parent.place(self, step)
            self.parent.moved(step)


class Share(_Node):
    """The slots of a tenant or of one request, and what waits below it.

    Attributes:
        slots: number of slots that its running sequences hold.
        holders: number of children that hold slots.
    """

    def __init__(self, parent: Share | None = None) -> None:
        self.parent = parent
        self.slots = self.holders = 0
        self._without: list[_Entry] = []  # children without a slot, sorted
        self._with: list[_Entry] = []  # children that hold slots, sorted
        self._places: dict[_Node, tuple[list[_Entry], _Entry]] = {}

    def head(self, step: int) -> WaitingGroup | None:
        first = self._without[0][1].head(step) if self._without else None
        other = self._with[0][1].head(step) if self._with else None
        if first is None or other is None:
            return first or other
        return first if has_waited_for(first.order, other.priority, step) else other

    def place(self, child: _Node, step: int) -> None:
        """Sort a child by what it holds and what of it waits now."""
        if child in self._places:
            entries, entry = self._places.pop(child)
            del entries[bisect_left(entries, entry[0], key=lambda own: own[0])]
        head = child.head(step)
        if head is not None:
            key = (head.priority, child.slots, *head.order) if child.slots else head.order
            entries = self._with if child.slots else self._without
            self._places[child] = entries, (key, child)
            insort(entries, (key, child), key=lambda own: own[0])

    def hold(self, slots: int) -> None:
        """Count slots that a sequence takes, or gives back if negative; call `moved` after."""
        held, self.slots = self.slots, self.slots + slots
        if self.parent is not None:
            self.parent.holders += bool(self.slots) - bool(held)
            self.parent.hold(slots)


class WaitingGroup(_Node):
    """The waiting sequences of one request, of which only the first is made.

    A preempted sequence waits in a group of its own, below the share of its request.

    Args:
        share: of the request.

    Attributes:
        first: the next sequence to admit; None if nothing waits.
        hidden: not to be admitted for now.
    """

    def __init__(self, sequences: Iterator[Sequence], order: Order, priority: int,
                 share: Share) -> None:
        self._sequences, self._order, self.priority = sequences, order, priority
        self.share = self.parent = share
        self.first: Sequence | None = None
        self.hidden = False
        self._taken = 0
        self.take()

    @property
    def order(self) -> Order:
        assert self.first is not None
        return self.first.order

    def head(self, step: int) -> WaitingGroup | None:
        return None if self.first is None or self.hidden else self

    def take(self) -> None:
        """Make the next sequence the first; call `moved` after."""
        self.first = next(self._sequences, None)
        if self.first is not None and self.first.epoch == 0:
            self.first.order = (*self._order, self._taken)
            self.first.priority, self.first.share = self.priority, self.share
            self._taken += 1


def has_waited_for(order: Order, priority: int, step: int) -> bool:
    """Whether a sequence of this order has waited long enough to count as of this priority."""
    return order[0] - step <= priority * HEAD_START
