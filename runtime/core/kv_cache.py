"""The paged KV cache's blocks: allocation, prefix caching, eviction.

A full block whose tokens are known is named by a hash of its tokens and of the preceding block's
name. A sequence with the same prefix shares such blocks. A named block without users stays cached
until its space is needed; the least recently used block is evicted first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmc.runtime.core.input_embeds import InputEmbeds


class BlockHashes:
    """The names of a sequence's full blocks.

    Args:
        block_size: positions of a block.
        key: anything else that determines the blocks' contents, such as the encoder input or a
            salt.
        lookahead: tokens after a block that determine its contents, too, and are in its name.
        embeds: rows in place of token embeddings.
    """

    def __init__(self, block_size: int, key: bytes = b"", lookahead: int = 0,
                 embeds: InputEmbeds | None = None) -> None:
        self._block_size, self._lookahead, self._embeds = block_size, lookahead, embeds
        self._last = key if embeds is None else key + embeds.salt
        self.names: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Name the blocks that the sequence's tokens fill.

        Args:
            tokens: all tokens of the sequence so far.
        """
        size, span = self._block_size, self._block_size + self._lookahead
        for start in range(len(self.names) * size, len(tokens) - span + 1, size):
            block = np.asarray(tokens[start:start + span], np.int64)
            rows = b"" if self._embeds is None else self._embeds.key(start, start + span)
            self._last = hashlib.sha256(self._last + block.tobytes() + rows).digest()
            self.names.append(self._last)


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence, in order; the first `named` of them have names."""

    blocks: list[int] = field(default_factory=list)
    named: int = 0


class BlockPool:
    """Allocator of blocks. It holds no keys or values; those are the engine's.

    Args:
        num_blocks: size of the pool.
        block_size: positions of a block.
        reuse: prefix caching: keep names, so that sequences share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._reuse = reuse
        self._users = [0] * num_blocks
        self._empty = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # named, without users; oldest first
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._sources: set[int] = set()  # of copies that are pending

    @property
    def free(self) -> int:
        """Number of blocks without users."""
        return len(self._empty) + len(self._kept)

    def spans(self, length: int) -> int:
        """Number of blocks for `length` positions."""
        return -(-length // self.block_size)

    def match(self, names: Sequence[bytes], length: int) -> list[int]:
        """Return the cached blocks of a sequence of `length` tokens.

        At least one token remains to be computed, since its logits are not cached.
        """
        blocks = []
        for name in names[:(length - 1) // self.block_size]:
            if name not in self._block_of:
                break
            blocks.append(self._block_of[name])
        return blocks

    def open(self, blocks: Sequence[int]) -> BlockTable:
        """Start a sequence with the blocks that `match` returned."""
        for block in blocks:
            self._use(block)
        return BlockTable(list(blocks), len(blocks))

    def lacks(self, table: BlockTable, length: int) -> int:
        """Number of blocks that a table needs for `length` positions."""
        return max(0, self.spans(length) - len(table.blocks))

    def alone(self, table: BlockTable) -> int:
        """Number of a table's blocks that no other table has."""
        return sum(self._users[block] == 1 for block in table.blocks)

    def has(self, table: BlockTable, position: int, count: int) -> bool:
        """Whether a table has exclusive blocks for `count` positions from `position`."""
        blocks, size = table.blocks, self.block_size
        return position + count <= len(blocks) * size and not self._held(blocks[position // size])

    def grow(self, table: BlockTable, length: int) -> bool:
        """Extend a table to `length` positions; False, and no change, if too few are free."""
        count = self.lacks(table, length)
        if count > self.free:
            return False
        table.blocks += sorted(self._take() for _ in range(count))  # runs read faster
        return True

    def name(self, table: BlockTable, names: Sequence[bytes], length: int) -> None:
        """Name the computed full blocks of a table.

        Args:
            names: names of the sequence's blocks.
            length: positions that are computed, or will be before any later step reads them.
        """
        for index in range(table.named, min(length // self.block_size, len(names))):
            block, name = table.blocks[index], names[index]
            if self._reuse and name not in self._block_of:
                self._name_of[block], self._block_of[name] = name, block
            table.named = index + 1

    def fork(self, table: BlockTable, length: int | None = None) -> BlockTable:
        """Share all blocks of a table, or those of its first `length` positions, with a new one."""
        blocks = table.blocks[:None if length is None else self.spans(length)]
        for block in blocks:
            self._use(block)
        return BlockTable(blocks, min(table.named, len(blocks)))

    def shared(self, table: BlockTable, position: int) -> bool:
        """Whether the block of a position must not be written.

        It has other users, or a name: a sequence that continues within a named block needs a copy.
        """
        index = position // self.block_size
        return index < len(table.blocks) and self._held(table.blocks[index])

    def copies(self, tables: Sequence[BlockTable], position: int) -> int:
        """Number of blocks that copy-on-write of these tables at a position takes."""
        counts = Counter(table.blocks[position // self.block_size] for table in tables
                         if position // self.block_size < len(table.blocks))
        return sum(count if self._held(block, count) else count - 1
                   for block, count in counts.items())

    def own(self, table: BlockTable, position: int) -> tuple[int, int]:
        """Replace a shared block with an exclusive one; a block must be free.

        Returns:
            (from, to): the contents are to be copied. `from` is not reallocated before `copied`.
        """
        index = position // self.block_size
        old, new = table.blocks[index], self._take()
        table.blocks[index] = new
        table.named = min(table.named, index)
        self._sources.add(old)
        self._release(old)
        return old, new

    def copied(self) -> None:
        """Release the sources of copies, which are submitted before any later step."""
        sources, self._sources = self._sources, set()
        for block in sources:
            if self._users[block] == 0:
                self._return_to_pool(block)

    def close(self, table: BlockTable) -> None:
        """Free a sequence's blocks. The last ones are evicted before the first."""
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks, table.named = [], 0

    def _held(self, block: int, users: int = 1) -> bool:
        """Whether a block has more than `users` users, or a name by which it can be found."""
        return self._users[block] > users or block in self._name_of

    def _use(self, block: int) -> None:
        self._kept.pop(block, None)
        self._users[block] += 1

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0 and block not in self._sources:
            self._return_to_pool(block)

    def _return_to_pool(self, block: int) -> None:
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
