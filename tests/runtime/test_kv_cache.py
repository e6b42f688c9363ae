"""The block pool, compared with a model that stores whole histories without sharing."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmc.runtime.core.kv_cache import BlockHashes, BlockPool

SIZE, COUNT = 4, 12


class Histories(RuleBasedStateMachine):
    """Model of sequences with their tokens, and of each block's latest contents."""

    def __init__(self):
        super().__init__()
        self.blocks = BlockPool(COUNT, SIZE)
        self.sequences = []  # [table, chain, tokens, computed]
        self.content = {}  # (block, row): all tokens up to there

    def write(self, table, tokens, computed, length):
        for position in range(computed, length):
            block = table.blocks[position // SIZE]
            assert not self.blocks.shared(table, position)
            self.content[block, position % SIZE] = tuple(tokens[:position + 1])

    def name(self, sequence):
        table, chain, tokens, computed = sequence
        chain.extend(tokens)
        self.blocks.name(table, chain.names, computed)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE + 1))
    def open(self, tokens):
        chain = BlockHashes(SIZE)
        chain.extend(tokens)
        table = self.blocks.open(self.blocks.match(chain.names, len(tokens)))
        found = len(table.blocks) * SIZE
        assert found < len(tokens)
        if not self.blocks.grow(table, len(tokens)):
            assert self.blocks.lacks(table, len(tokens)) > self.blocks.free
            self.blocks.close(table)
            return
        self.write(table, tokens, found, len(tokens))
        self.sequences.append([table, chain, tokens, len(tokens)])
        self.name(self.sequences[-1])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def go_on(self, data, token):
        sequence = data.draw(st.sampled_from(self.sequences))
        table, _, tokens, computed = sequence
        if self.blocks.shared(table, computed):
            if not self.blocks.free:
                return
            old, new = self.blocks.own(table, computed)
            self.content.update({(new, row): self.content[old, row] for row in range(SIZE)
                                 if (old, row) in self.content})
            self.blocks.copied()
        if self.blocks.grow(table, computed + 1):
            tokens.append(token)
            self.write(table, tokens, computed, computed + 1)
            sequence[3] += 1
            self.name(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), part=st.booleans())
    def fork(self, data, part):
        table, _, tokens, computed = data.draw(st.sampled_from(self.sequences))
        length = data.draw(st.integers(0, computed)) if part else computed
        made = self.blocks.fork(table, length)
        self.sequences.append([made, BlockHashes(SIZE), tokens[:length], length])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.blocks.close(sequence[0])

    @invariant()
    def everybody_has_its_history(self):
        for table, _, tokens, computed in self.sequences:
            for position in range(computed):
                block = table.blocks[position // SIZE]
                assert self.content[block, position % SIZE] == tuple(tokens[:position + 1])

    @invariant()
    def users_are_counted_and_nothing_leaks(self):
        users = np.zeros(COUNT, int)
        for table, *_ in self.sequences:
            for block in table.blocks:
                users[block] += 1
        assert users.tolist() == self.blocks._users
        assert self.blocks.free == (users == 0).sum()

    def teardown(self):
        for table, *_ in self.sequences:
            self.blocks.close(table)
        assert self.blocks.free == COUNT and not any(self.blocks._users)


Histories.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
test_any_history = Histories.TestCase


def test_a_cached_block_is_not_overwritten_by_a_continuation():
    """Even if no other sequence uses it: its hash identifies its contents."""
    blocks, chain = BlockPool(4, 2), BlockHashes(2)
    chain.extend([1, 2])
    table = blocks.open([])
    assert blocks.grow(table, 2)
    blocks.name(table, chain.names, 2)
    part = blocks.fork(table, 1)
    blocks.close(table)
    assert blocks.shared(part, 1) and not blocks.has(part, 1, 1) and blocks.copies([part], 1) == 1


def test_eviction_is_lru_and_from_the_end_of_sequences():
    blocks = BlockPool(4, 2)
    chains = []
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        chain = BlockHashes(2)
        chain.extend(tokens)
        table = blocks.open(blocks.match(chain.names, 4))
        assert blocks.grow(table, 4)
        blocks.name(table, chain.names, 4)
        blocks.close(table)
        chains.append(chain)
    other = blocks.open([])
    assert blocks.grow(other, 2)
    assert [len(blocks.match(chain.names, 5)) for chain in chains] == [1, 2]
    assert blocks.grow(other, 4)
    assert [len(blocks.match(chain.names, 5)) for chain in chains] == [0, 2]


def test_block_hashes_include_all_their_inputs():
    plain, other = BlockHashes(2), BlockHashes(2, b"another prompt of an encoder")
    for chain in (plain, other):
        chain.extend([1, 2, 3])
    assert len(plain.names) == len(other.names) == 1 and plain.names != other.names


def test_names_with_lookahead_depend_on_the_token_after_the_block():
    one, other, short = (BlockHashes(2, lookahead=1) for _ in range(3))
    one.extend([1, 2, 3, 4, 5])
    other.extend([1, 2, 3, 4, 6])
    short.extend([1, 2, 3, 4])
    assert one.names[0] == other.names[0] == short.names[0]
    assert one.names[1] != other.names[1]
    assert len(short.names) == 1
