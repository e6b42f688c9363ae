"""The interface of engines: `Step` is their input, `StepOutput` their output.

The `num_decode` sequences with one new token come first, followed by those with several: the last
token and drafts to verify, or a chunk of a prompt. From admission to its end, a sequence has a
slot, which holds its sampling state, and a table of the blocks that hold its keys and values:
position p is row p % block_size of block `block_tables[b, p // block_size]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np

from llmc.plugins.attention.op import AXES
from llmc.runtime.core.adapters import Adapter
from llmc.runtime.core.image_memory import MemoryView, PromptMemory
from llmc.runtime.engines import MAX_LOGITS, MAX_SCORED
from llmc.runtime.multimodal.items import MediaItem
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import Logprobs, Sampler

LAST = -1  # placeholder of a token id: the token that the slot sampled last


def proposal(index: int) -> int:
    """Placeholder of a token id: a draft that the engine proposed in the slot's last step."""
    return -2 - index


def positions(past_lens: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Position ids of packed tokens, int64 [num_tokens]; see `Step`."""
    if len(past_lens) == 1:
        past = int(past_lens[0])
        return np.arange(past, past + int(cu_seqlens[1]), dtype=np.int64)
    starts = past_lens.astype(np.int64) - cu_seqlens[:-1]
    position_ids: np.ndarray = np.arange(cu_seqlens[-1]) + np.repeat(starts, np.diff(cu_seqlens))
    return position_ids


@dataclass(frozen=True)
class SamplingState:
    """Per-sequence sampling state, installed on admission.

    Args:
        sampler: samples the sequence's tokens. None: the step returns candidates or logits instead.
        tokens: tokens generated before a preemption.
        prompt_lookup: whether the engine drafts what followed the latest tokens earlier in the
            sampler's prompt or the generated tokens; see `EngineLimits.prompt_lookup`.
    """

    sampler: Sampler | None
    tokens: tuple[int, ...] = ()
    prompt_lookup: bool = False


# What an encoder reads: token ids, or rows float32 [num_rows, width].
EncoderTokens = Sequence[int] | np.ndarray
EncoderInput = EncoderTokens | PromptMemory  # or images, whose rows replace them


def encoder_pieces(inputs: Mapping[int, EncoderInput], size: int) -> \
        list[tuple[int, int, EncoderTokens]]:
    """Divide encoder inputs into pieces.

    Args:
        inputs: by row of the encoder-output buffer.
        size: rows of a piece, for an encoder that computes each by itself; 0: inputs are whole.

    Returns:
        Row of the buffer, first token and contents of each piece.
    """
    pieces = list[tuple[int, int, EncoderTokens]]()
    for row, own in inputs.items():
        assert not isinstance(own, PromptMemory)
        pieces += [(row, first, own[first:first + size]) for first in range(0, len(own), size)] \
            if size else [(row, 0, own)]
    return pieces


@dataclass(frozen=True)
class EncoderOutputs:
    """Encoder outputs for a decoder's sequences; several sequences may share one.

    Args:
        rows: int32 [batch], rows of the encoder-output buffer.
        encoder_sequence_length: int32 [batch], tokens of the encoder prompts.
        starts: int32 [batch], the first token of each that is attended to; empty: all 0.
        seen: bool [batch], whether its new tokens are after an image; empty: layers do not attend
            to images.
    """

    rows: np.ndarray
    encoder_sequence_length: np.ndarray
    starts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    seen: np.ndarray = field(default_factory=lambda: np.empty(0, bool))

    @staticmethod
    def of(rows: Sequence[int], lengths: Sequence[int]) -> EncoderOutputs:
        return EncoderOutputs(np.asarray(rows, np.int32), np.asarray(lengths, np.int32))

    @staticmethod
    def of_images(rows: Sequence[int], views: Sequence[MemoryView]) -> EncoderOutputs:
        """Rows of images that the new tokens of sequences attend to."""
        return EncoderOutputs(
            np.asarray(rows, np.int32), np.array([view.length for view in views], np.int32),
            np.array([view.first for view in views], np.int32),
            np.array([view.seen for view in views], bool))

    def take(self, sequences: Sequence[int] | slice | np.ndarray) -> EncoderOutputs:
        """Select sequences of the batch."""
        return EncoderOutputs(self.rows[sequences], self.encoder_sequence_length[sequences],
                              *(own[sequences] if len(own) else own
                                for own in (self.starts, self.seen)))

    def first_rows(self, mem_max_seq_len: int) -> np.ndarray:
        """int32 [batch], the first token of each in a buffer of rows of `mem_max_seq_len`."""
        starts: np.ndarray = self.rows * np.int32(mem_max_seq_len)
        return starts + self.starts if len(self.starts) else starts


@dataclass(frozen=True)
class ScoredRows:
    """Prompt tokens of a step whose successor, already known, is scored.

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
class Step:
    """Engine inputs of one step.

    Args:
        token_ids: int64 [num_tokens], the packed new tokens of all sequences; LAST stands for the
            token that the sequence's slot sampled last, and `proposal`s for the drafts after it,
            which may still be in flight.
        cu_seqlens: int32 [batch + 1], start and end of each sequence's tokens.
        past_lens: int32 [batch], positions already in the cache.
        block_tables: int32 [batch, max_blocks]; -1 after a sequence's last block.
        slots: int32 [batch].
        num_decode: number of leading sequences, each with one new token.
        sample: int32 [num_sampled], ascending indices of the sequences to sample.
        admit: sampling state of each slot whose sequence is new.
        copies: int32 [num_copies, 2], blocks (from, to) to copy before all else.
        candidates: if positive, return this number of most likely tokens for each of `sample`.
        logits: return logits of `sampled_rows`, of all tokens, or none. `pooled`: return the rows
            of the sequences of `sample`, of a model with pooled outputs, which samples nothing.
        scored: prompt tokens whose log-probabilities to return; not with `logits` of all tokens.
        masks: token masks by slot, uint32 [ceil(vocab_size / 32)], or [1 + drafts, ...] with one
            for each token that is sampled: token t is allowed if bit t % 32 of word t // 32 is 1.
            The mask of a token needs the token before it, so such a sequence has no more than one
            step in flight.
        encode: encoder inputs by row of the encoder-output buffer; before all else.
        memory: encoder outputs of the sequences.
        num_drafts: int32 [batch], number of drafts at the end of each sequence's tokens, only of
            `sample`; empty: no sequence has any. A token is sampled after each draft and after the
            token before them. Drafts are accepted up to the first that differs from the sampled
            token. Not with `candidates`, nor with `logits` of all tokens.
        num_uncommitted: int32 [batch], number of drafts at the beginning of each sequence's tokens
            that were accepted by the step before it, only in models with recurrent state: it was
            not stored after them. Such a sequence is decoding. Empty: no sequence has any.
        next_tokens: int64 [batch], the token after the tokens of each sequence, if it is known and
            the sequence is not in `sample`; else -1. Empty: none is known.
        propose: number of drafts of the next tokens to return for each of `sample`, by the engine's
            draft model or by prompt lookup. None: neither runs, and the caches of a draft model
            lack these positions. See `EngineLimits.proposals_take_blocks`.
        unread: int32 [batch], number of drafts in steps of each sequence that are in flight.
            `past_lens` counts them as accepted; the engine subtracts the rejected ones. Only of
            sequences in `sample`. Empty: none. See `EngineLimits.drafts_ahead`.
        token_type_ids: int64 [num_tokens], for a model that reads them; empty: all 0.
        adapters: int32 [batch], the engine's slot of each sequence's LoRA adapter, or -1. Empty: no
            sequence has one. The draft model runs without.
        load_adapters: adapters to load into slots, before all else.
        embeds: float32 [num_embeds, width], rows in place of token embeddings; empty: none. The
            draft model reads the token ids of their positions.
        embed_ids: int32 [num_tokens], the row of each token, or -1; empty: no token has one. Rows
            of `embeds` are followed by those of `media_rows`.
        deep_embeds: float32 [num_deep, num_embeds, width], rows that are added to hidden states of
            the same tokens; empty: all 0. The engine's image encoder computes them.
        rotary_positions: int32 [num_tokens, 3], positions by axis, of a model that reads them;
            empty: each token's are its position in the cache.
        bidirectional_ranges: int32 [num_tokens, 2], first position and the one after the last of
            the range of each token, such as an image, with bidirectional attention; [0, 0]: none. A
            step has all tokens of a range that are not in the cache. Empty: no token has one.
        media_rows: int32 [n, 3], rows of encoded images and audio: place, first row and number of
            rows.
        encode_media: items to encode, by place; before all else.
        free_media: places whose rows are no longer needed; before `encode_media`.
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
    logits: Literal["none", "sampled", "all", "pooled"] = "none"
    scored: ScoredRows = field(default_factory=ScoredRows.none)
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    encode: Mapping[int, EncoderInput] = field(default_factory=dict)
    memory: EncoderOutputs | None = None
    num_drafts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    num_uncommitted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    next_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    propose: int | None = None
    unread: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    token_type_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    adapters: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    load_adapters: Mapping[int, Adapter] = field(default_factory=dict)
    embeds: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    embed_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    deep_embeds: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0), np.float32))
    rotary_positions: np.ndarray = field(default_factory=lambda: np.empty((0, AXES), np.int32))
    bidirectional_ranges: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    media_rows: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int32))
    encode_media: Mapping[int, MediaItem] = field(default_factory=dict)
    free_media: Sequence[int] = ()

    @staticmethod
    def of(tokens: Sequence[Sequence[int]], past_lens: Sequence[int],
           tables: Sequence[Sequence[int]], slots: Sequence[int], *,
           sample: Sequence[int] | None = None, num_drafts: Sequence[int] = (),
           num_uncommitted: Sequence[int] = (), unread: Sequence[int] = (),
           adapters: Sequence[int] = (),
           **others: object) -> Step:
        """Pack sequences, those with one new token first; by default all of them are sampled."""
        def counts(given: Sequence[int]) -> np.ndarray:
            return np.array(given if any(given) else [], np.int32)

        lengths = [len(new) for new in tokens]
        rows = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, table in zip(rows, tables, strict=True):
            row[:len(table)] = table
        num_decode = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
        assert all(n > 1 for n in lengths[num_decode:]), "sequences with one token come first"
        return Step(
            np.array([token for new in tokens for token in new], np.int64),
            np.array([0, *accumulate(lengths)], np.int32), np.array(past_lens, np.int32), rows,
            np.array(slots, np.int32), num_decode,
            np.array(range(len(tokens)) if sample is None else sample, np.int32),
            num_drafts=counts(num_drafts), num_uncommitted=counts(num_uncommitted),
            unread=counts(unread),
            adapters=np.array(adapters if any(slot >= 0 for slot in adapters) else [], np.int32),
            **others)  # type: ignore[arg-type]

    def without_media(self) -> Step:
        """The step after the encoders of its items, whose rows are in `embeds`."""
        return replace(self, media_rows=np.empty((0, 3), np.int32), encode_media={},
                       free_media=())

    @property
    def batch_size(self) -> int:
        return len(self.past_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the sequences after the first `num_decode`."""
        return self.num_tokens - self.num_decode

    @property
    def sampled_counts(self) -> np.ndarray:
        """int32 [num_sampled], rows that each of `sample` has in `sampled_rows`."""
        if not len(self.num_drafts):
            return np.ones(len(self.sample), np.int32)
        counts: np.ndarray = self.num_drafts[self.sample] + 1
        return counts

    @property
    def num_extra(self) -> np.ndarray:
        """int32 [batch], drafts and uncommitted tokens of each sequence."""
        extra = np.zeros(self.batch_size, np.int32)
        for counts in (self.num_drafts, self.num_uncommitted):
            if len(counts):
                extra += counts
        return extra

    @property
    def commit_lens(self) -> np.ndarray:
        """int32 [batch], new tokens of each sequence after which its recurrent state is stored."""
        return self.seq_lens - self.num_drafts if len(self.num_drafts) else self.seq_lens

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
    def lora_ids(self) -> np.ndarray:
        """int32 [num_tokens], the slot of each token's adapter, or -1."""
        if not len(self.adapters):
            return np.full(self.num_tokens, -1, np.int32)
        ids: np.ndarray = np.repeat(self.adapters, self.seq_lens)
        return ids

    @property
    def logits_indices(self) -> np.ndarray:
        """int64 [num_logits], ascending tokens whose logits are needed."""
        if self.logits == "all":
            return np.arange(self.num_tokens)
        if len(self.scored):
            return np.sort(np.concatenate([self.sampled_rows, self.scored.rows]))
        return self.sampled_rows

    @property
    def sampled_rows(self) -> np.ndarray:
        """int64 [num_rows], the last token before the drafts and the drafts of each of `sample`."""
        ends: np.ndarray = self.cu_seqlens[self.sample + 1].astype(np.int64)
        if not len(self.num_drafts):
            return ends - 1
        counts = self.sampled_counts
        rows: np.ndarray = np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
        return rows


@dataclass(frozen=True)
class StepOutput:
    """Results of a step for `Step.sample`.

    Args:
        tokens: int64 [num_tokens], of each sequence the accepted drafts and the token sampled after
            them; NONE_ALLOWED where no token was allowed, NOT_FINITE where a logit was NaN or
            positive infinity.
        logprobs: [num_tokens], if the slot's parameters ask for them.
        candidates: [num_sampled, count], if the step asks for them.
        logits: float32 [num_logits, vocab_size], if the step asks for them.
        scored: [num_scored], log-probabilities of `Step.scored`.
        counts: int32 [num_sampled], tokens of each of `Step.sample`. None: one each.
        drafts: int64 [num_sampled, propose], if the step asks for them; -1 after the last of each.
        pooled: of each of `Step.sample`, float32 [width] or [num_tokens, width], if the step asks
            for them.
        matches: int32 [num_sampled], tokens that agree with the source of `drafts`, of prompt
            lookup. None: the drafts have no source.
    """

    tokens: np.ndarray
    logprobs: Sequence[Logprobs | None]
    candidates: Candidates | None = None
    logits: np.ndarray | None = None
    scored: Sequence[Logprobs] = ()
    counts: np.ndarray | None = None
    drafts: np.ndarray | None = None
    pooled: Sequence[np.ndarray] = ()
    matches: np.ndarray | None = None


@dataclass(frozen=True)
class EngineLimits:
    """Capacities of an engine.

    Args:
        num_blocks, block_size: size of the KV cache.
        max_tokens: packed tokens of a step.
        max_slots: concurrent sequences.
        max_logits: rows of logits of a step.
        ahead: maximum number of in-flight steps.
        max_scored: scored tokens of a step, at least 1.
        max_drafts: drafts of a sequence in a step; 0: the engine verifies none.
        max_draft_tokens: drafts of all sequences in a step.
        proposes: the engine proposes drafts, by a loaded draft model or by prompt lookup.
        prompt_lookup: it does by prompt lookup, for sequences whose `SamplingState` asks for it.
        proposals_take_blocks: the draft model writes the keys and values of its proposals to the
            blocks after a sequence's tokens. Without blocks, later proposals are arbitrary.
        proposed_positions: fewest positions that proposals take, of a draft model that computes all
            of them in one block.
        lookahead: tokens after a block that determine its contents, as layers of a draft model read
            the next token.
        drafts_ahead: steps may verify drafts of a step in flight, as `proposal`s.
        longest_first: order decoding sequences by descending length; else by slot.
        keeps_states: layers have a recurrent state (Mamba, gated delta rule, short convolution).
            Such a sequence can be continued only at its end, not from earlier blocks, and its state
            is stored before the drafts of a step: see `Step.num_uncommitted`.
        whole: all tokens of a sequence are in one step, as its pooled output depends on all.
        max_loras: slots of LoRA adapters; 0: the model takes none.
        max_lora_rank: highest rank of an adapter.
        applies_rules: the engine applies rules of speech (`Sampler.rules`); otherwise the loop
            samples such sequences from logits.
    """

    num_blocks: int
    block_size: int
    max_tokens: int
    max_slots: int
    max_logits: int
    ahead: int
    max_scored: int = MAX_SCORED
    max_drafts: int = 0
    max_draft_tokens: int = MAX_LOGITS
    proposes: bool = False
    prompt_lookup: bool = False
    proposals_take_blocks: bool = False
    proposed_positions: int = 0
    drafts_ahead: bool = False
    lookahead: int = 0
    longest_first: bool = False
    keeps_states: bool = False
    whole: bool = False
    max_loras: int = 0
    max_lora_rank: int = 0
    applies_rules: bool = False


class Engine(Protocol):
    """One replica of a model on its devices. One thread submits steps."""

    @property
    def limits(self) -> EngineLimits:
        ...

    def submit(self, step: Step) -> int:
        """Start a step and return a ticket, without waiting for the device.

        Steps take effect in the order of submission.

        Raises:
            LlmcError: this step or one before it failed. The engine cannot be used afterwards.
        """
        ...

    def collect(self, ticket: int) -> StepOutput:
        """Wait for the output of a step. Tickets are collected in order, each once.

        Raises:
            LlmcError: see `submit`.
        """
        ...

    def close(self) -> None:
        """Free its memory and end its threads and processes; from any thread, at any time."""
        ...
