"""The KV cache in blocks: whose they are, what they hold, and which may be used again.

A block that is full, and whose tokens are known, has a name: a hash of its tokens and of the name
of the block before it. A sequence that begins with the same tokens takes such blocks as they are.
What nobody uses any more stays until there is no other room, the least recently used going first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class BlockHashes:
    """The names of a sequence's blocks, as far as its tokens go.

    Args:
        key: what else changes the content of its blocks.
    """

    def __init__(self, block_size: int, key: bytes = b"") -> None:
        self._block_size = block_size
        self._last = key
        self.names: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Name the blocks that all tokens of the sequence so far fill."""
        size = self._block_size
        for start in range(len(self.names) * size, len(tokens) - size + 1, size):
            block = np.asarray(tokens[start:start + size], np.int64)
            self._last = hashlib.sha256(self._last + block.tobytes()).digest()
            self.names.append(self._last)


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence, in order; `named` of them, the first, have names."""

    blocks: list[int] = field(default_factory=list)
    named: int = 0


class BlockPool:
    """A pool of blocks. Nothing here is a copy of keys and values: those are the engine's.

    Args:
        reuse: keep names, so that sequences share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._reuse = reuse
        self._users = [0] * num_blocks
        self._empty = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # named, used by nobody; oldest first
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._sources: set[int] = set()  # of copies that are still to be made

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._empty) + len(self._kept)

    def spans(self, length: int) -> int:
        """Blocks of so many positions."""
        return -(-length // self.block_size)

    def match(self, names: Sequence[bytes], length: int) -> list[int]:
        """The blocks that are there of a sequence of so many tokens; one token at least is left,
        since what it leads to is not kept.
        """
        found = []
        for name in names[:(length - 1) // self.block_size]:
            if name not in self._block_of:
                break
            found.append(self._block_of[name])
        return found

    def open(self, found: Sequence[int]) -> BlockTable:
        """Begin a sequence with what `match` found."""
        for block in found:
            self._use(block)
        return BlockTable(list(found), len(found))

    def lacks(self, table: BlockTable, length: int) -> int:
        """Blocks that a table needs to have room for so many positions."""
        return max(0, self.spans(length) - len(table.blocks))

    def alone(self, table: BlockTable) -> int:
        """Number of a table's blocks that no other table has."""
        return sum(self._users[block] == 1 for block in table.blocks)

    def has(self, table: BlockTable, position: int, count: int) -> bool:
        """Whether a table has room for so many positions from one on, in blocks of its own."""
        blocks, size = table.blocks, self.block_size
        return position + count <= len(blocks) * size and not self._held(blocks[position // size])

    def grow(self, table: BlockTable, length: int) -> bool:
        """Make room for so many positions; False, and nothing taken, where there is too little."""
        count = self.lacks(table, length)
        if count > self.free:
            return False
        table.blocks += sorted(self._take() for _ in range(count))  # runs are read faster
        return True

    def name(self, table: BlockTable, names: Sequence[bytes], length: int) -> None:
        """So many positions are computed, or will be before whatever is computed next; `names` are
        those of the sequence's blocks.
        """
        for index in range(table.named, min(length // self.block_size, len(names))):
            block, name = table.blocks[index], names[index]
            if self._reuse and name not in self._block_of:
                self._name_of[block], self._block_of[name] = name, block
            table.named = index + 1

    def fork(self, table: BlockTable, length: int | None = None) -> BlockTable:
        """Another sequence that goes on from the same blocks, or those of so many positions."""
        blocks = table.blocks[:None if length is None else self.spans(length)]
        for block in blocks:
            self._use(block)
        return BlockTable(blocks, min(table.named, len(blocks)))

    def shared(self, table: BlockTable, position: int) -> bool:
        """Whether the block of a position, where there is one, is to stay as it is: it has other
        users too, or a name, as it has in a sequence that goes on from within it.
        """
        index = position // self.block_size
        return index < len(table.blocks) and self._held(table.blocks[index])

    def copies(self, tables: Sequence[BlockTable], position: int) -> int:
        """Blocks that sequences need so that each has one of its own at a position."""
        own = Counter(table.blocks[position // self.block_size] for table in tables
                      if position // self.block_size < len(table.blocks))
        return sum(count if self._held(block, count) else count - 1
                   for block, count in own.items())

    def own(self, table: BlockTable, position: int) -> tuple[int, int]:
        """Have a block of one's own in the place of a shared one, of which there must be a free
        one. Returns both: the content is to be copied, and until `copied` nobody gets the first.
        """
        index = position // self.block_size
        old, new = table.blocks[index], self._take()
        table.blocks[index] = new
        table.named = min(table.named, index)
        self._sources.add(old)
        self._leave(old)
        return old, new

    def copied(self) -> None:
        """What was to be copied is, before whatever is computed next."""
        sources, self._sources = self._sources, set()
        for block in sources:
            if self._users[block] == 0:
                self._give_back(block)

    def close(self, table: BlockTable) -> None:
        """A sequence ends; its last blocks are forgotten before its first."""
        for block in reversed(table.blocks):
            self._leave(block)
        table.blocks, table.named = [], 0

    def _held(self, block: int, users: int = 1) -> bool:
        """Whether more than so many users need what a block has, or who looks for its name."""
        return self._users[block] > users or block in self._name_of

    def _use(self, block: int) -> None:
        self._kept.pop(block, None)
        self._users[block] += 1

    def _leave(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0 and block not in self._sources:
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        if block in self._name_of:
            self._kept[block] = None
        else:
            self._empty.append(block)

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._name_of.pop(block)]
        self._users[block] = 1
        return block
