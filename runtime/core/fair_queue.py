"""Fair queueing: the order in which waiting sequences are admitted.

A tree of three levels counts slots and orders what waits:

    root → tenants → requests → waiting groups

1. Children without a slot precede siblings that hold slots, the oldest first.
2. Children that hold slots are ordered by priority, then number of slots, then age.
3. A lower priority delays a child without a slot by at most HEAD_START steps per level.

No share starves: once its slots are released, rule 1 puts it before all later arrivals.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.core.scheduler import Sequence

HEAD_START = 256  # steps of waiting equivalent to one level of priority

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
        """Re-sort this node among its siblings, then each ancestor among its siblings."""
        if self.parent is not None:
            self.parent.place(self, step)
            self.parent.moved(step)


class Share(_Node):
    """The slots of a tenant or of one request, and the waiting groups below it.

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

    @property
    def tenant(self) -> Share:
        """The tenant's share, of a request's."""
        assert self.parent is not None
        return self.parent

    def head(self, step: int) -> WaitingGroup | None:
        first = self._without[0][1].head(step) if self._without else None
        other = self._with[0][1].head(step) if self._with else None
        if first is None or other is None:
            return first or other
        return first if has_waited_for(first.order, other.priority, step) else other

    def place(self, child: _Node, step: int) -> None:
        """Sort a child by its slots and its next waiting group."""
        if child in self._places:
            entries, entry = self._places.pop(child)
            del entries[bisect_left(entries, entry[0], key=lambda placed: placed[0])]
        head = child.head(step)
        if head is not None:
            key = (head.priority, child.slots, *head.order) if child.slots else head.order
            entries = self._with if child.slots else self._without
            self._places[child] = entries, (key, child)
            insort(entries, (key, child), key=lambda placed: placed[0])

    def hold(self, slots: int) -> None:
        """Count slots that a sequence takes, or frees if negative; call `moved` after."""
        held, self.slots = self.slots, self.slots + slots
        if self.parent is not None:
            self.parent.holders += bool(self.slots) - bool(held)
            self.parent.hold(slots)


class WaitingGroup(_Node):
    """The waiting sequences of one request; only the first exists yet.

    A preempted sequence waits in a separate group, below the share of its request.

    Args:
        sequences: in the order of admission.
        order: sort key of the request.
        priority: lower ones go first.
        share: the request's share.

    Attributes:
        first: the next sequence to admit; None if nothing waits.
        hidden: whether the group is skipped in this step.
        waits_since: the step since which its first sequence waits for a slot of its adapter.
    """

    def __init__(self, sequences: Iterator[Sequence], order: Order, priority: int,
                 share: Share) -> None:
        self._sequences, self._order, self.priority = sequences, order, priority
        self.share = self.parent = share
        self.first: Sequence | None = None
        self.hidden = False
        self.waits_since: int | None = None
        self._taken = 0
        self.take()

    @property
    def order(self) -> Order:
        assert self.first is not None
        return self.first.order

    def head(self, step: int) -> WaitingGroup | None:
        return None if self.first is None or self.hidden else self

    def take(self) -> None:
        """Create the next sequence and make it the first; call `moved` after."""
        self.first = next(self._sequences, None)
        if self.first is not None and self.first.epoch == 0:
            self.first.order = (*self._order, self._taken)
            self.first.priority, self.first.share = self.priority, self.share
            self._taken += 1


def has_waited_for(order: Order, priority: int, step: int) -> bool:
    """Whether a sequence of this order has waited long enough to count as of this priority."""
    return order[0] - step <= priority * HEAD_START
