"""Encoder outputs of decoding sequences side by side; models that attend to them."""

import families
import numpy as np
import pytest

import llmc
from llmc import SamplingParams
from llmc.runtime.engines import memory_columns
from llmc.runtime.engines.memory_columns import MemoryColumns

KEYS, WIDTH = 6, 4


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((5, KEYS, WIDTH)).astype(np.float32)
            for name in ("memory_key_0", "memory_value_0")}


def taken(columns, *sources):
    given = (np.array(part, np.int32) for part in zip(*sources, strict=True))
    return columns.take(*given)


def assert_columns(found, rows, *sources):
    most = max(length for *_, length in sources)
    for name, buffer in rows.items():
        by_key = found[name].reshape(most, len(sources), WIDTH)
        for index, (row, first, length) in enumerate(sources):
            np.testing.assert_array_equal(by_key[:length, index], buffer[row, first:first + length])
    assert all(np.isfinite(own).all() for own in found.values())


def test_columns_have_the_keys_of_each_sequence(rows):
    columns, batch = MemoryColumns(rows), [(3, 1, 5), (0, 0, 2), (3, 0, 6)]
    assert taken(columns, *batch) is None  # the first step of a batch
    first = taken(columns, *batch)
    assert_columns(first, rows, *batch)
    again = taken(columns, *batch)
    assert all(np.shares_memory(again[name], first[name]) for name in rows)


def test_only_the_columns_of_new_sequences_are_copied(rows):
    columns, batch = MemoryColumns(rows), [(3, 0, 6), (0, 0, 2), (1, 0, 6)]
    assert taken(columns, *batch) is None and taken(columns, *batch) is not None
    old = {name: buffer.copy() for name, buffer in rows.items()}
    for buffer in rows.values():
        buffer[0] += 1  # not copied again
    changed = [(3, 0, 6), (0, 0, 2), (4, 2, 3)]
    found = taken(columns, *changed)
    assert_columns(found, old, *changed)
    shorter = [(2, 1, 4), (0, 0, 2), (4, 2, 3)]
    assert_columns(taken(columns, *shorter), old, *shorter)
    assert taken(columns, (1, 0, 1), (1, 0, 2), (1, 0, 3)) is None  # another batch
    assert taken(columns, *shorter[:2]) is None


def test_keys_of_another_input_in_a_row_are_copied(rows):
    columns, batch = MemoryColumns(rows), [(3, 0, 6), (0, 0, 2)]
    taken(columns, *batch)
    taken(columns, *batch)
    for buffer in rows.values():
        buffer[0] = 7
    columns.forget({0})
    assert_columns(taken(columns, *batch), rows, *batch)


def test_columns_take_a_part_of_the_available_memory(rows, monkeypatch):
    size = 2 * 4 * WIDTH * 6 * 2
    for free, fits in ((4 * size - 1, False), (4 * size, True)):
        monkeypatch.setattr(memory_columns, "available_memory", lambda free=free: free)
        columns, batch = MemoryColumns(rows), [(3, 0, 6), (0, 0, 2)]
        assert taken(columns, *batch) is None
        assert (taken(columns, *batch) is not None) == fits


def test_a_batch_without_keys_has_no_columns(rows):
    columns = MemoryColumns(rows)
    assert [taken(columns, (0, 0, 0), (1, 0, 0)) for _ in range(3)] == [None] * 3


@pytest.fixture
def copied(monkeypatch):
    """Whether the keys of each step of several sequences were in their columns."""
    seen = []
    original = MemoryColumns.take

    def take(self, *given):
        found = original(self, *given)
        seen.append(found is not None)
        return found
    monkeypatch.setattr(MemoryColumns, "take", take)
    return seen


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_batch_generates_the_same_with_columns_and_without(name, encoder_decoder, copied,
                                                             monkeypatch):
    _, _, cases = encoder_decoder(name)
    rng = np.random.default_rng(5)
    batch = [rng.integers(3, families.VOCAB, length).tolist() for length in (9, 30, 9, 17)]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (12, 4, 12, 8)]
    with llmc.LLM(cases["tp2"]) as llm:
        with_columns = [own.token_ids for own in llm.generate(batch, params)]
        assert copied.count(True) > copied.count(False) > 0
        monkeypatch.setattr(memory_columns, "available_memory", lambda: 0)
        copied.clear()
        assert [own.token_ids for own in llm.generate(batch, params)] == with_columns
        assert copied and not any(copied)
