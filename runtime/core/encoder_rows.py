"""Rows of the encoder-output buffer, shared by sequences with the same encoder input."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class _Row:
    index: int
    users: int = 0
    written: bool = False


class EncoderRows:
    """Rows of the encoder-output buffer by key of the encoder's input.

    A row without users keeps its contents until another input needs it, so that audio or a text
    that comes again is not encoded again. There are no more rows than are used at once: one that
    was never used takes no memory.

    Args:
        reuse: keep the contents of rows without users.
    """

    def __init__(self, reuse: bool) -> None:
        self._reuse = reuse
        self._count = 0  # rows ever taken
        self._empty: list[int] = []  # a heap: lowest first
        self._used: dict[bytes, _Row] = {}
        self._kept: OrderedDict[bytes, _Row] = OrderedDict()  # least recently used first

    def acquire(self, key: bytes) -> None:
        """Give a sequence the row of its key."""
        row = self._used.get(key) or self._kept.pop(key, None) or _Row(self.take())
        self._used[key] = row
        row.users += 1

    def release(self, key: bytes) -> None:
        """End a sequence's use of its row."""
        row = self._used[key]
        row.users -= 1
        if row.users:
            return
        del self._used[key]
        if self._reuse and row.written:
            self._kept[key] = row
        else:
            self.give_back(row.index)

    def has(self, key: bytes) -> bool:
        """Whether a row has the outputs for a key, or will have them in the next step."""
        return key in self._used or key in self._kept

    def row(self, key: bytes) -> int:
        """The row of a key in use."""
        return self._used[key].index

    def begin_write(self, key: bytes) -> bool:
        """Whether the row has to be written, which the caller then does."""
        row = self._used[key]
        written, row.written = row.written, True
        return not written

    def take(self) -> int:
        """Take a row for other use."""
        if self._empty:
            return heapq.heappop(self._empty)
        if self._kept:
            return self._kept.popitem(last=False)[1].index
        self._count += 1
        return self._count - 1

    def give_back(self, index: int) -> None:
        """Return a row that `take` gave."""
        heapq.heappush(self._empty, index)
