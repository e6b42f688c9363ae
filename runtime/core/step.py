"""A step: the one thing that engines are given, what they give back, and what an engine is.

Sequences that have one new token come first, `num_decode` of them, then those with longer chunks of
a prompt. Each has a slot for its life, which owns how it chooses tokens, and a table of the blocks
that hold its keys and values: position p is row p % block_size of block `block_tables[b, p //
block_size]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np

from llmc.runtime.engines import MAX_SCORED
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import Logprobs, Sampler

LAST = -1  # in the place of a token: what the sequence's slot chose last


def positions(past_lens: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Of packed tokens, int64 [num_tokens]; see `Step`."""
    starts = past_lens.astype(np.int64) - cu_seqlens[:-1]
    own: np.ndarray = np.arange(cu_seqlens[-1]) + np.repeat(starts, np.diff(cu_seqlens))
    return own


@dataclass(frozen=True)
class SamplingState:
    """What a slot is told when a sequence enters it.

    Args:
        sampler: how it chooses; None: it does not, as its candidates or logits are wanted.
        tokens: what it has generated so far; some, where it is computed again.
    """

    sampler: Sampler | None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncoderOutputs:
    """Where a decoder finds what its encoder made of each sequence's prompt; sequences may have the
    same.

    Args:
        rows: int32 [batch], rows of the memory.
        encoder_sequence_length: int32 [batch], the prompts' tokens.
    """

    rows: np.ndarray
    encoder_sequence_length: np.ndarray

    @staticmethod
    def of(rows: Sequence[int], lengths: Sequence[int]) -> EncoderOutputs:
        return EncoderOutputs(np.asarray(rows, np.int32), np.asarray(lengths, np.int32))

    def take(self, sequences: Sequence[int] | slice | np.ndarray) -> EncoderOutputs:
        """Of these sequences of the batch."""
        return EncoderOutputs(self.rows[sequences], self.encoder_sequence_length[sequences])


@dataclass(frozen=True)
class ScoredRows:
    """Tokens of a step after each of which the next token, known already, is scored.

    Args:
        rows: int64 [num_scored], tokens of the step, ascending; none is the last token of a
            sequence in `Step.sample`.
        targets: int64 [num_scored], the token that follows each.
        counts: int32 [num_scored], most likely tokens to return with each.
    """

    rows: np.ndarray
    targets: np.ndarray
    counts: np.ndarray

    @staticmethod
    def none() -> ScoredRows:
        return ScoredRows(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class KVCacheParams:
    """Where a step's past is.

    Args:
        num_cached_tokens_per_seq: int32 [batch].
        block_ids_per_seq: int32 [batch, max_blocks].
    """

    use_cache: bool
    num_cached_tokens_per_seq: np.ndarray
    block_ids_per_seq: np.ndarray


@dataclass(frozen=True)
class Step:
    """Engine inputs of one step.

    Args:
        token_ids: int64 [num_tokens], the new tokens of all sequences one after the other; LAST
            stands for what the sequence's slot chose last, which may still be under way.
        cu_seqlens: int32 [batch + 1], where each sequence's tokens begin and end.
        past_lens: int32 [batch], positions already in the cache.
        block_tables: int32 [batch, max_blocks]; what is behind a sequence's last block means
            nothing.
        slots: int32 [batch].
        num_decode: so many sequences, the first, have one new token each.
        sample: int32 [num_sampled], sequences, ascending, that choose a token.
        admit: slots whose sequence is new, with what they begin with.
        copies: int32 [num_copies, 2], blocks (from, to) to be copied before all else.
        candidates: above 0, also give so many likeliest tokens of each of `sample`.
        logits: also give logits, of each of `sample`, or of all tokens.
        scored: prompt tokens whose log-probabilities are wanted; not with `logits` of all tokens.
        masks: by slot, where only some tokens may be chosen, uint32 [ceil(vocab_size / 32)]: token
            t may where bit t % 32 of word t // 32 is 1. The loop makes such a sequence's step once
            its last token is known, so a device takes the masks with the step.
        encode: prompts for an encoder, token ids by the row of its memory; before all else.
        memory: where the sequences' prompts are in it.
        request_ids, prompt_lens: [batch], for whoever looks at a step.
    """

    token_ids: np.ndarray
    cu_seqlens: np.ndarray
    past_lens: np.ndarray
    block_tables: np.ndarray
    slots: np.ndarray
    num_decode: int
    sample: np.ndarray
    admit: Mapping[int, SamplingState] = field(default_factory=dict)
    copies: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    candidates: int = 0
    logits: Literal["none", "sampled", "all"] = "none"
    scored: ScoredRows = field(default_factory=ScoredRows.none)
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    encode: Mapping[int, Sequence[int]] = field(default_factory=dict)
    memory: EncoderOutputs | None = None
    request_ids: tuple[int, ...] = ()
    prompt_lens: tuple[int, ...] = ()

    @staticmethod
    def of(tokens: Sequence[Sequence[int]], past_lens: Sequence[int],
           tables: Sequence[Sequence[int]], slots: Sequence[int], *,
           sample: Sequence[int] | None = None, **others: object) -> Step:
        """Pack sequences, those with one new token first; by default all of them choose."""
        lengths = [len(own) for own in tokens]
        rows = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(rows, tables, strict=True):
            row[:len(table)] = table
        num_decode = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
        assert all(n > 1 for n in lengths[num_decode:]), "sequences with one token come first"
        return Step(
            np.array([token for own in tokens for token in own], np.int64),
            np.array([0, *accumulate(lengths)], np.int32), np.array(past_lens, np.int32), rows,
            np.array(slots, np.int32), num_decode,
            np.array(range(len(tokens)) if sample is None else sample, np.int32),
            **others)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int:
        return len(self.past_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seq_lens(self) -> np.ndarray:
        """New tokens of each sequence, int32 [batch]."""
        lengths: np.ndarray = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return lengths

    @property
    def position_ids(self) -> np.ndarray:
        """int64 [num_tokens]."""
        return positions(self.past_lens, self.cu_seqlens)

    @property
    def logits_indices(self) -> np.ndarray:
        """int64 [num_logits], tokens whose logits are needed, ascending."""
        if self.logits == "all":
            return np.arange(self.num_tokens)
        if len(self.scored):
            return np.sort(np.concatenate([self.sampled_rows, self.scored.rows]))
        return self.sampled_rows

    @property
    def sampled_rows(self) -> np.ndarray:
        """int64 [num_sampled], the last token of each of `sample`."""
        last: np.ndarray = self.cu_seqlens[self.sample + 1].astype(np.int64) - 1
        return last

    # The names that attention backends know.

    @property
    def num_contexts(self) -> int:
        return self.batch_size - self.num_decode

    @property
    def num_generations(self) -> int:
        return self.num_decode

    @property
    def num_ctx_tokens(self) -> int:
        return self.num_tokens - self.num_decode

    @property
    def kv_cache_params(self) -> KVCacheParams:
        return KVCacheParams(True, self.past_lens, self.block_tables)


@dataclass(frozen=True)
class StepOutput:
    """What a step leads to, for each of `Step.sample`.

    Args:
        tokens: int64 [num_sampled]; NONE_ALLOWED where no token was allowed, NOT_FINITE where a
            logit was NaN or positive infinity.
        logprobs: [num_sampled], where the slot's parameters ask for them.
        candidates: [num_sampled, count], where the step asks for them.
        logits: float32 [num_logits, vocab_size], likewise.
        scored: [num_scored], of `Step.scored`.
    """

    tokens: np.ndarray
    logprobs: Sequence[Logprobs | None]
    candidates: Candidates | None = None
    logits: np.ndarray | None = None
    scored: Sequence[Logprobs] = ()


@dataclass(frozen=True)
class EngineLimits:
    """What an engine has room for.

    Args:
        num_blocks, block_size: of the KV cache.
        max_tokens: packed tokens of a step.
        max_slots: sequences at once.
        max_logits: rows of logits of a step.
        max_scored: tokens of a step that are scored, at least 1.
        ahead: steps that may be submitted before the first of them is collected.
        longest_first: sequences of one new token are to come by falling length; else by slot.
        keeps_states: blocks are not all that a sequence has: some layers keep a state, of the place
            where it is. It can go on from there alone, not from earlier blocks.
    """

    num_blocks: int
    block_size: int
    max_tokens: int
    max_slots: int
    max_logits: int
    ahead: int
    max_scored: int = MAX_SCORED
    longest_first: bool = False
    keeps_states: bool = False


class Engine(Protocol):
    """One copy of a model, on as many devices as it was compiled for. It is given steps by one
    thread.
    """

    @property
    def limits(self) -> EngineLimits:
        ...

    def submit(self, step: Step) -> int:
        """Start a step; returns a ticket, at once where a device works by itself. Steps take effect
        in the order in which they are submitted.

        Raises:
            LlmcError: the step, or one before it, failed; the engine is of no use afterwards.
        """
        ...

    def collect(self, ticket: int) -> StepOutput:
        """Wait for what a step leads to. Tickets are collected in order, each once.

        Raises:
            LlmcError: see `submit`.
        """
        ...

    def close(self) -> None:
        """Free what it holds, and end its threads and processes; from any thread, at any time."""
        ...
