"""A step's packed batch: which tokens are new, whose they are, and what is cached before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Memory:
    """Where a decoder finds what its encoder made of each sequence's prompt; sequences may have the
    same.

    Args:
        rows: int32 [batch], rows of the memory.
        encoder_sequence_length: int32 [batch], the prompts' tokens.
    """

    rows: np.ndarray
    encoder_sequence_length: np.ndarray

    @staticmethod
    def of(rows: Sequence[int], lengths: Sequence[int]) -> Memory:
        return Memory(np.asarray(rows, np.int32), np.asarray(lengths, np.int32))

    def take(self, sequences: Sequence[int] | np.ndarray) -> Memory:
        """Of these sequences of the batch."""
        return Memory(self.rows[sequences], self.encoder_sequence_length[sequences])


@dataclass(frozen=True)
class PackedBatch:
    """The engine inputs of one step.

    Args:
        input_ids: int64 [num_tokens], the new tokens of all sequences one after the other.
        position_ids: int64 [num_tokens].
        cu_seqlens: int32 [batch + 1], where each sequence's tokens begin and end.
        past_lens: int32 [batch], positions already in the cache.
        logits_indices: int64 [num_logits], tokens whose logits are wanted.
        first_row: the cache row of the first sequence; the others follow.
        cache_indirection: int32 [batch, max_seq_len], for each position in the cache of a sequence
            the row that holds it, counted from `first_row`; None: its own.
        memory: of an encoder-decoder model.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    past_lens: np.ndarray
    logits_indices: np.ndarray
    first_row: int
    cache_indirection: np.ndarray | None = None
    memory: Memory | None = None

    @staticmethod
    def prepare(new_tokens: Sequence[Sequence[int]], past_lens: Sequence[int], first_row: int = 0,
                all_logits: bool = False, cache_indirection: np.ndarray | None = None,
                memory: Memory | None = None) -> PackedBatch:
        """Pack the new tokens of each sequence; logits of the last of each, or of all."""
        lengths = [len(tokens) for tokens in new_tokens]
        ends = np.cumsum([0, *lengths])
        past = np.asarray(past_lens, dtype=np.int32)
        positions = [np.arange(start, start + length) for start, length
                     in zip(past_lens, lengths, strict=True)]
        return PackedBatch(
            input_ids=np.concatenate([np.asarray(t, dtype=np.int64) for t in new_tokens]),
            position_ids=np.concatenate(positions).astype(np.int64),
            cu_seqlens=ends.astype(np.int32),
            past_lens=past,
            logits_indices=np.arange(ends[-1]) if all_logits else ends[1:] - 1,
            first_row=first_row, cache_indirection=cache_indirection, memory=memory)

    @property
    def batch_size(self) -> int:
        return len(self.past_lens)

    def rows_of_positions(self, max_seq_len: int) -> np.ndarray:
        """`cache_indirection`, or where there is none, one that says the same."""
        if self.cache_indirection is not None:
            return self.cache_indirection
        return np.repeat(np.arange(self.batch_size, dtype=np.int32)[:, None], max_seq_len, axis=1)


@dataclass(frozen=True)
class BeamStep:
    """A decode step of beam search for an engine that keeps the indirection of its beams itself.

    Beam k of prompt b has cache row b * beam + k. The step before was the same prompts', or read
    each into its first beam's row.

    Args:
        tokens: int64 [batch, beam], what each beam goes on with.
        parents: int32 [batch, beam], the beam of the step before that each continues.
        past_lens: int32 [batch, beam], positions already in the cache; beams of a prompt are alike.
        prompt_lens: int32 [batch, beam], how many of them are the prompt's.
        count: candidates wanted of each beam.
        memory: of each beam [batch * beam], where the model has an encoder.
    """

    tokens: np.ndarray
    parents: np.ndarray
    past_lens: np.ndarray
    prompt_lens: np.ndarray
    count: int
    memory: Memory | None = None
