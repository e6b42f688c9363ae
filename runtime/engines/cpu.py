"""ONNX Runtime on CPU cores.

Each slot has a contiguous row of the KV cache, which GroupQueryAttention extends in place;
`RowCache` maps blocks to these rows. A step runs in parts: first all decoding sequences, in
adjacent rows (rows between them are computed and discarded), then prompt chunks. Rows that have
never been used take no memory, since the operating system allocates pages on their first write. The
same holds for the encoder outputs of an encoder-decoder model, which the decoder only reads;
`MemoryColumns` has those of decoding sequences side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from llmc.artifacts.draft_tokens import read_draft_token_ids
from llmc.artifacts.manifest import (
    BIDIRECTIONAL_RANGES,
    DEEP_EMBEDS_PREFIX,
    EMBED_IDS,
    EMBEDS,
    HIDDEN,
    HIDDEN_OUT,
    INPUT_FEATURES,
    MANIFEST_NAME,
    MEMORY_STEPS,
    POOLED,
    ROTARY_POSITIONS,
    Chip,
    CollectiveStep,
    DraftProgram,
    EncoderProgram,
    GraphStep,
    Manifest,
    Steps,
)
from llmc.artifacts.weight_file import WEIGHTS_NAME
from llmc.errors import LlmcError
from llmc.memory import available_memory
from llmc.plugins.attention.op import AXES
from llmc.runtime.collectives import Communicator
from llmc.runtime.core.step import (
    EncoderInput,
    EncoderOutputs,
    EncoderTokens,
    EngineLimits,
    Step,
    StepOutput,
    encoder_pieces,
    positions,
)
from llmc.runtime.devices import Placement
from llmc.runtime.engines import cpu_sessions
from llmc.runtime.engines.draft_chain import DraftChain
from llmc.runtime.engines.lora_stacks import LoraSpan, LoraStacks
from llmc.runtime.engines.memory_columns import MemoryColumns
from llmc.runtime.engines.pool_threads import PoolThreads
from llmc.runtime.engines.row_cache import RowCache

_SIZES = {"num_tokens", "num_logits", "batch"}
_COLLECTIVES = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
MAX_CHUNK = 512  # prompt tokens in one run of the graphs; see `CpuEngine._chunk_size`
# Tokens of a group of texts that one core computes, when padded. all-MiniLM-L6-v2 in int8, texts of
# 16 to 256 tokens on one core: 60 texts/s in groups of at most 128 tokens, 56 in groups of 512; a
# BERT of 12 layers of 768, 12.2 and 11.6. Four texts of 13 tokens take 3.4 ms in two groups on two
# cores, 4.3 in one group on both; two texts in float32 6.2 and 5.7.
MIN_GROUP, MAX_GROUP = 24, 128
COPY_SHARE = 4  # free memory is divided by this to get the limit of a copy of the weights
_NO_INT32, _NO_INT64 = np.empty(0, np.int32), np.empty(0, np.int64)
MIN_CHUNK = 16  # even if its attention scores exceed SCORE_BYTES
SCORE_BYTES = 2**28  # limit of the attention scores of all ranks


@dataclass(frozen=True)
class _Part:
    """Sequences of a step in adjacent rows, from `first_row` on.

    `lora_ids` is int32 [num_tokens], the slot of each token's adapter or -1; empty in an encoder.
    `embed_ids` is int32 [num_tokens], each token's row of `Step.embeds` or -1; empty: all -1.
    `positions_by_axis` is int32 [num_tokens, 3]; None: positions in the cache.
    `ranges` is int32 [num_tokens, 2], `Step.bidirectional_ranges`, of one sequence; None: all 0.
    `decodes`: whether its sequences have one token each.
    """

    input_ids: np.ndarray
    cu_seqlens: np.ndarray
    past_lens: np.ndarray
    commit_lens: np.ndarray
    logits_indices: np.ndarray
    lora_ids: np.ndarray
    embed_ids: np.ndarray
    first_row: int = 0
    memory: EncoderOutputs | None = None
    token_type_ids: np.ndarray | None = None
    input_features: np.ndarray | None = None
    positions_by_axis: np.ndarray | None = None
    ranges: np.ndarray | None = None
    decodes: bool = False

    @property
    def position_ids(self) -> np.ndarray:
        """int64 [num_tokens]."""
        return positions(self.past_lens, self.cu_seqlens)

    @property
    def rotary_positions(self) -> np.ndarray:
        """int32 [num_tokens, 3]."""
        if self.positions_by_axis is not None:
            return self.positions_by_axis
        return np.repeat(self.position_ids.astype(np.int32)[:, None], AXES, axis=1)

    @staticmethod
    def of(prompts: Sequence[EncoderTokens]) -> _Part:
        """Pack encoder inputs: token ids, or rows in place of tokens."""
        lengths = [len(prompt) for prompt in prompts]
        rows = [prompt for prompt in prompts if isinstance(prompt, np.ndarray)]
        tokens = np.zeros(sum(lengths), np.int64) if rows else \
            np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])
        return _Part(tokens,
                     np.cumsum([0, *lengths], dtype=np.int32),
                     np.zeros(len(prompts), np.int32), np.array(lengths, np.int32),
                     np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32),
                     input_features=np.concatenate(rows) if rows else None)


class CpuEngine:
    """One rank on ONNX Runtime.

    Args:
        threads: size of the pool that the ranks of the replica share.
        limits: of the KV cache, and of a step.

    Attributes:
        ops: names of the ops in the rank's graphs.

    Raises:
        LlmcError: a graph cannot be loaded or does not match the manifest, or memory for the KV
            cache is insufficient.
    """

    def __init__(self, manifest: Manifest, chip: Chip, case_dir: Path, placement: Placement,
                 communicator: Communicator, threads: int, limits: EngineLimits) -> None:
        self._chip = chip
        self._communicator = communicator
        self._max_tokens = min(limits.max_tokens, MAX_CHUNK)
        self._score_bytes = SCORE_BYTES // manifest.tp_size
        self._width = manifest.dims.padded_vocab_size
        self._mem_max_seq_len, self._of_images = manifest.mem_max_seq_len, bool(manifest.memory)
        self._drafts = chip.drafts if limits.proposes else ()
        self._programs: list[Chip | EncoderProgram | DraftProgram] = [
            program for program in (chip.encoder, chip, *self._drafts) if program]
        self._kept = {*chip.kept, *(chip.draft_caches if self._drafts else ()), *chip.lora_inputs}
        self._max_seq_len = manifest.dims.max_seq_len
        segments = [step for step in self._steps() if isinstance(step, GraphStep)]
        options = cpu_sessions.session_options(placement, len(chip.steps), threads)
        self._sessions = {step.path: cpu_sessions.load(case_dir, step, options)
                          for step in segments}
        self._check(manifest)
        self._outputs = {step.path: self._output_shapes(step) for step in segments}
        with _no_memory(limits, manifest):
            self._rows = RowCache(chip, limits, manifest.dims.max_seq_len)
            self._memory = _allocate(manifest, chip, limits.max_slots)
            self._columns = MemoryColumns(self._memory)
            self._loras = LoraStacks(chip, limits) if chip.lora else None
        self._caches = self._rows.caches
        stacked = self._loras.inputs if self._loras else set[str]()
        self._stacked = {step.path: [name for name in step.inputs if name in stacked]
                         for step in segments}
        self._inputs = {step.path: [name for name in step.inputs if name not in stacked
                                    and name.removesuffix("_out") not in self._caches]
                        for step in segments}
        self._wants_positions = any("position_ids" in step.inputs for step in segments)
        self._wants_axes = any(ROTARY_POSITIONS in step.inputs for step in segments)
        self._wants_memory_steps = any(MEMORY_STEPS in step.inputs for step in segments)
        self._wants_ranges = any(BIDIRECTIONAL_RANGES in step.inputs for step in segments)
        self._wants_types = any("token_type_ids" in step.inputs for step in segments)
        self._last_uses = self._find_last_uses(chip.steps, {chip.result, *chip.features})
        self._per_token = manifest.pooling is not None and manifest.pooling.per_token
        self._unchunked = manifest.is_whole and not self._per_token
        self._pool_graph: GraphStep | None = None  # of texts, if it is the rank's only one
        if manifest.pooling and not self._kept and not self._loras and len(segments) == 1:
            self._pool_graph, = segments
        self._pool_threads = self._make_pool_threads(case_dir, placement)
        self._draft_uses = [self._find_last_uses(draft.steps, {"logits", HIDDEN_OUT})
                            for draft in self._drafts]
        self._draft_vocab = self._draft_width = 0
        self._draft_tokens: np.ndarray | None = None
        self._chain: DraftChain | None = None
        if self._drafts and manifest.draft:
            self._chain = DraftChain(manifest.draft, len(self._drafts), self._max_seq_len, self)
            self._draft_vocab = manifest.draft.vocab_size
            self._draft_width = manifest.draft.padded_vocab_size
            if manifest.draft.reduced:
                self._draft_tokens = read_draft_token_ids(
                    case_dir / chip.path / WEIGHTS_NAME, self._draft_vocab,
                    manifest.dims.vocab_size)
        self._no_embeds = np.zeros((1, manifest.embeds_width or 0), np.float32)
        self._num_deep = manifest.num_deep_embeds
        self._embeds = self._no_embeds  # of the present step
        self._deep_embeds = np.empty((0, 0, 0), np.float32)
        self._step: Step | None = None  # whose draft model has not run yet
        self._features: list[np.ndarray] = []  # of its tokens, for the draft model
        self._encoder_uses = self._find_last_uses(chip.encoder.steps, set(self._memory)) \
            if chip.encoder else []
        self._bindings = {path: session.io_binding() for path, session in self._sessions.items()}
        self._bound_rows: dict[str, tuple[int, int]] = {}  # by path: first row and batch size
        self._bound_loras: dict[str, LoraSpan] = {}  # by path
        self._span = LoraSpan()  # of the present run

    def compute(self, step: Step) -> np.ndarray:
        """Execute a step without LAST; returns logits, float32 [num_logits, padded_vocab]."""
        for slot, adapter in step.load_adapters.items():
            assert self._loras is not None
            self._loras.load(slot, adapter.matrices[self._chip.rank])
        self._encode(step.encode)
        self._embeds = step.embeds if len(step.embeds) else self._no_embeds
        self._deep_embeds = step.deep_embeds if len(step.deep_embeds) else \
            np.zeros((self._num_deep, *self._embeds.shape), np.float32)
        self._rows.enter(step)
        self._features.clear()
        if self._chain:
            self._chain.admit(step.admit)
        logits = []
        for part, kept in self._parts(step):
            part_logits = self._decode(part)
            if kept:
                logits.append(part_logits)
        if step.propose is None:
            self._rows.leave(step)
        if len(logits) == 1:
            return logits[0]
        return np.concatenate(logits) if logits else np.empty((0, self._width), np.float32)

    def pool(self, step: Step) -> list[np.ndarray]:
        """Execute a step of a model with pooled outputs; returns `StepOutput.pooled`.

        Without a KV cache, sequences run in groups of similar length: attention pads them.
        """
        if not self._kept:
            rows: dict[int, np.ndarray] = {}
            groups = [*self._similar(step)][::-1]  # the longest texts first
            parts = [self._whole(step, group) for group in groups]
            for group, part, made in zip(groups, parts, self._pool_parts(parts), strict=True):
                rows.update(zip(group, self._split(made, part), strict=True))
            return [rows[index] for index in step.sample.tolist()]
        self._rows.enter(step)
        pooled: list[np.ndarray] = []
        for part, kept in self._parts(step):
            values = self._values(part)
            self._run_steps(self._chip.steps, self._last_uses, part, values)
            if self._per_token:
                pooled.append(values[POOLED])
            elif kept:
                ends = np.searchsorted(part.cu_seqlens, part.logits_indices, side="right") - 1
                pooled.append(values[POOLED][ends])
        self._rows.leave(step)
        if not self._per_token:
            return list(np.concatenate(pooled)) if pooled else []
        each = np.split(np.concatenate(pooled), step.cu_seqlens[1:-1])
        return [each[index] for index in step.sample.tolist()]

    def _make_pool_threads(self, case_dir: Path, placement: Placement) -> PoolThreads | None:
        """Return threads for groups of texts, if the rank has several cores and one graph.

        Their session holds another copy of the weights, for which there must be enough memory.
        """
        step = self._pool_graph
        if step is None or len(placement.cores) < 2:
            return None
        size = (case_dir / self._chip.path / WEIGHTS_NAME).stat().st_size
        if size > available_memory() // COPY_SHARE:
            return None
        return PoolThreads(len(placement.cores), lambda: cpu_sessions.load(
            case_dir, step, cpu_sessions.one_thread()), POOLED)

    def _pool_parts(self, parts: Sequence[_Part]) -> list[np.ndarray]:
        """Run parts of texts, on all cores; returns the pooled rows of each."""
        if (step := self._pool_graph) is None:
            return [self._pool_part(part) for part in parts]
        inputs = [{name: values[name] for name in step.inputs} for values in map(
            self._values, parts)]
        with cpu_sessions.translate_errors(f"ONNX Runtime failed in '{step.path}'", "give shorter "
                                           "texts, or lower max_num_batched_tokens"):
            if self._pool_threads is not None and len(parts) > 1:
                return self._pool_threads.run(inputs)
            session = self._sessions[step.path]
            return [session.run([POOLED], own)[0] for own in inputs]

    def _pool_part(self, part: _Part) -> np.ndarray:
        values = self._values(part)
        self._run_steps(self._chip.steps, self._last_uses, part, values)
        return values[POOLED]

    def _similar(self, step: Step) -> Iterator[list[int]]:
        """Groups of sequences of similar length.

        A group has at most MAX_CHUNK tokens when padded; MAX_GROUP if each runs on one core. There
        are several groups for the cores to share, unless they are too small for that.
        """
        lengths = step.seq_lens
        if len(lengths) == 1:
            yield [0]
            return
        most = self._max_tokens
        if self._pool_threads is not None:
            share = -(-int(lengths.sum()) // self._pool_threads.cores)
            most = min(most, max(share, MIN_GROUP), MAX_GROUP)
        group: list[int] = []
        for index in np.argsort(lengths, kind="stable").tolist():
            if group and (len(group) + 1) * int(lengths[index]) > most:
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def _whole(self, step: Step, group: Sequence[int]) -> _Part:
        """Some sequences of a step, all of whose tokens are new."""
        if step.batch_size == 1:
            return _Part(step.token_ids, step.cu_seqlens, step.past_lens, step.seq_lens,
                         _NO_INT64, step.lora_ids if self._loras else _NO_INT32, _NO_INT32,
                         token_type_ids=_taken(step.token_type_ids, slice(None)))

        def packed(tokens: np.ndarray) -> np.ndarray:
            return np.concatenate([tokens[step.cu_seqlens[i]:step.cu_seqlens[i + 1]]
                                   for i in group])

        lengths = step.seq_lens[group]
        return _Part(packed(step.token_ids), np.cumsum([0, *lengths], dtype=np.int32),
                     np.zeros(len(group), np.int32), lengths, np.empty(0, np.int64),
                     packed(step.lora_ids), np.empty(0, np.int32),
                     token_type_ids=packed(step.token_type_ids)
                     if len(step.token_type_ids) else None)

    def _split(self, pooled: np.ndarray, part: _Part) -> list[np.ndarray]:
        """The rows of each sequence of a part."""
        return np.split(pooled, part.cu_seqlens[1:-1]) if self._per_token else list(pooled)

    def propose(self, step: Step, output: StepOutput) -> np.ndarray:
        """Run the passes of the draft model after a step.

        Args:
            step: the last step.
            output: its output.

        Returns:
            Drafts of the sequences that the step samples, int64 [num_sampled, step.propose]; -1
            after the last of each.
        """
        assert self._chain is not None
        self._step = step
        features = np.concatenate(self._features) if self._features else None
        return self._chain.propose(step, output, features)

    def run_draft(self, program: int, step: Step, hidden: np.ndarray | None, *,
                  whole: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Run a program of the draft model; see `DraftRank`."""
        draft, logits, results, start = self._drafts[program], [], list[np.ndarray](), 0
        for part, kept in self._parts(step, whole):
            values = self._values(part)
            stop = start + len(part.input_ids)
            if hidden is not None:
                values[HIDDEN] = np.ascontiguousarray(hidden[start:stop])
            self._run_steps(draft.steps, self._draft_uses[program], part, values)
            if kept:
                logits.append(values["logits"])
            if HIDDEN_OUT in values:
                results.append(values[HIDDEN_OUT])
            start = stop
        width = self._draft_width
        return np.concatenate(logits) if logits else np.empty((0, width), np.float32), \
            np.concatenate(results) if results else None

    def draft_ids(self, logits: np.ndarray) -> np.ndarray:
        """Return the token ids of the largest logits."""
        rows: np.ndarray = logits[:, :self._draft_vocab].argmax(1)
        return rows if self._draft_tokens is None else self._draft_tokens[rows]

    def write_ahead(self, slots: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        """Note that positions after the ends of sequences will be written."""
        self._rows.write_ahead(slots, starts, stops)

    def leave_step(self) -> None:
        """Note that all passes of the draft model on the tokens of the step have run."""
        assert self._step is not None and self._chain is not None
        self._rows.leave(self._step, self._chain.rewritten)

    def _parts(self, step: Step, whole: bool = False) -> Iterator[tuple[_Part, bool]]:
        """Parts to run separately, and whether their logits are needed.

        Args:
            step: the step.
            whole: run all tokens of a sequence at once.
        """
        lora_ids = step.lora_ids
        for start, end in self._groups(step):
            if start >= step.num_decode and end - start == 1:
                yield from self._chunks(step, start, whole, lora_ids)
                continue
            first, past = int(step.slots[start]), step.past_lens[start:end]
            commits = step.commit_lens[start:end]
            cu_seqlens = step.cu_seqlens[start:end + 1]
            inside = slice(cu_seqlens[0], cu_seqlens[-1])
            tokens, adapters = step.token_ids[inside], lora_ids[inside]
            indices = step.logits_indices
            if start or end < step.batch_size:
                indices = indices[(indices >= cu_seqlens[0]) & (indices < cu_seqlens[-1])]
                indices, cu_seqlens = indices - cu_seqlens[0], cu_seqlens - cu_seqlens[0]
            sequences: slice | np.ndarray = slice(start, end)
            if step.slots[end - 1] - first >= end - start:
                rows = step.slots[start:end] - first
                past, cu_seqlens, next_ones = self._pass_over(rows, first, past, cu_seqlens)
                sequences, commits = start + next_ones, np.diff(cu_seqlens)
            yield _Part(tokens, cu_seqlens, past, commits,
                        indices if len(indices) else np.array([len(tokens) - 1]), adapters,
                        step.embed_ids[inside], first,
                        step.memory and step.memory.take(sequences),
                        positions_by_axis=_taken(step.rotary_positions, inside),
                        ranges=_taken(step.bidirectional_ranges, inside),
                        decodes=start < step.num_decode), len(indices) > 0

    def _chunks(self, step: Step, index: int, whole: bool, lora_ids: np.ndarray) -> \
            Iterator[tuple[_Part, bool]]:
        """A sequence's new tokens, in chunks that bound the memory of the graphs.

        Drafts are in the last chunk: a later one would need the state after them.
        """
        first, stop = step.cu_seqlens[index:index + 2].tolist()
        start, past = first, int(step.past_lens[index])
        committed = first + int(step.commit_lens[index])
        while start < stop:
            end = stop if whole else start + self._chunk_size(
                past + start - first, stop - start, _memory_rows(step, index, index + 1))
            if committed < end < stop:
                end = committed if start < committed else stop
            end = _range_end(step, end, past + end - first) if end < stop else end
            indices = step.logits_indices
            indices = indices[(indices >= start) & (indices < end)] - start
            yield _Part(step.token_ids[start:end], np.array([0, end - start], np.int32),
                        np.array([past + start - first], np.int32),
                        np.array([min(end, committed) - start], np.int32),
                        indices if len(indices) else np.array([end - start - 1]),
                        lora_ids[start:end], step.embed_ids[start:end],
                        int(step.slots[index]),
                        step.memory and step.memory.take([index]),
                        positions_by_axis=_taken(step.rotary_positions, slice(start, end)),
                        ranges=_taken(step.bidirectional_ranges, slice(start, end))), \
                len(indices) > 0
            start = end

    def _chunk_size(self, past: int, new: int, memory_rows: int) -> int:
        """Number of tokens to run at once of `new` ones after `past`.

        At most MAX_CHUNK: memory grows with it, and speed does not. SmolLM2-135M on 3 ranks and 2
        cores prefilled 2,000 tokens in 3.6 to 3.9 s by chunks of 2,048 and in 3.8 s by chunks of
        512, with a peak of 886 and 748 MB. Fewer if attention materializes its scores, which also
        grow with the number of positions, or with `memory_rows`, those of encoder outputs that
        the sequence attends to.
        """
        if self._unchunked:  # all tokens of a text are pooled together
            return new
        size = min(new, self._max_tokens)
        each = 4 * max(self._held_scores * (past + size), self._held_memory_scores * memory_rows)
        return min(size, max(self._score_bytes // each, MIN_CHUNK)) if each else size

    def _pass_over(self, rows: np.ndarray, first: int, past_lens: np.ndarray,
                   cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Insert the rows between those of the sequences, which have no new token.

        A run writes to such a row all the same, after its last position.

        Returns:
            `past_lens`, `cu_seqlens`, and the index of the sequence whose encoder output each row
            uses.
        """
        past = np.full(rows[-1] + 1, -1, np.int32)
        past[rows] = past_lens
        for row in np.flatnonzero(past < 0).tolist():
            past[row] = self._rows.pass_over(first + row)
        next_ones = np.searchsorted(rows, np.arange(len(past)))
        return past, cu_seqlens[np.append(next_ones, len(rows))], next_ones

    def _groups(self, step: Step) -> Iterator[tuple[int, int]]:
        """Ranges [start, end) of sequences to run at once.

        A group is all sequences with one new token; or initial chunks of prompts in adjacent rows,
        with at most MAX_CHUNK tokens when padded, and scores of encoder outputs within their limit;
        or a single later or longer chunk. A sequence with bidirectional ranges is a separate group.
        """
        alone = _have_ranges(step)
        if step.num_decode:
            yield 0, step.num_decode
        start, lengths = step.num_decode, step.seq_lens
        for index in range(start + 1, step.batch_size + 1):
            padded = int(lengths[start:index + 1].max()) * (index + 1 - start)
            fits = index < step.batch_size and not alone[index - 1:index + 1].any() and \
                step.past_lens[index] == 0 and step.past_lens[index - 1] == 0 and \
                step.slots[index] == step.slots[index - 1] + 1 and \
                padded <= self._max_tokens and 4 * self._held_memory_scores * padded * \
                _memory_rows(step, start, index + 1) <= self._score_bytes
            if not fits:
                yield start, index
                start = index

    def _decode(self, part: _Part) -> np.ndarray:
        """Run the model's graphs."""
        values = self._values(part)
        self._run_steps(self._chip.steps, self._last_uses, part, values)
        if self._drafts and self._chip.features:
            self._features.append(values[HIDDEN])
        return values["logits"]

    def _values(self, part: _Part) -> dict[str, np.ndarray]:
        """Inputs of the graphs, without caches."""
        values = {"input_ids": part.input_ids, "cu_seqlens": part.cu_seqlens,
                  "past_lens": part.past_lens, "commit_lens": part.commit_lens,
                  "logits_indices": part.logits_indices}
        if self._loras is not None:
            values["lora_ids"] = part.lora_ids
            values["lora_logits_ids"] = part.lora_ids[part.logits_indices]
            self._span = self._loras.span(part.lora_ids)
        if self._no_embeds.size:
            values[EMBEDS] = self._embeds
            values |= {f"{DEEP_EMBEDS_PREFIX}{index}": rows
                       for index, rows in enumerate(self._deep_embeds)}
            values[EMBED_IDS] = part.embed_ids if len(part.embed_ids) else \
                np.full(len(part.input_ids), -1, np.int32)
        if self._wants_positions:
            values["position_ids"] = part.position_ids
        if self._wants_axes:
            values[ROTARY_POSITIONS] = part.rotary_positions
        if self._wants_ranges:
            values[BIDIRECTIONAL_RANGES] = np.zeros((len(part.input_ids), 2), np.int32) \
                if part.ranges is None else part.ranges
        if self._wants_types:
            values["token_type_ids"] = np.zeros_like(part.input_ids) \
                if part.token_type_ids is None else part.token_type_ids
        if part.memory is not None:
            self._add_memory(values, part.memory, part.decodes)
        return values

    def _add_memory(self, values: dict[str, np.ndarray], memory: EncoderOutputs,
                    decodes: bool) -> None:
        """Add the encoder outputs of a part, in an order in which graphs do not copy them.

        It is that of a single sequence, and of several in columns.
        """
        values["encoder_sequence_length"] = lengths = memory.encoder_sequence_length
        rows, firsts = memory.rows, memory.first_rows(0)
        values[MEMORY_STEPS] = np.ones(len(rows), np.int32)
        if len(rows) == 1:
            if decodes:
                self._columns.clear()
            values["memory_starts"] = np.zeros(1, np.int32)
            values.update((name, own[rows[0], firsts[0]:firsts[0] + max(lengths[0], 1)])
                          for name, own in self._memory.items())
            return
        columns = self._columns.take(rows, firsts, lengths) \
            if decodes and self._wants_memory_steps else None
        if columns is None:
            values["memory_starts"] = memory.first_rows(self._mem_max_seq_len)
            values.update((name, own.reshape(-1, own.shape[-1]))
                          for name, own in self._memory.items())
        else:
            values["memory_starts"] = np.arange(len(rows), dtype=np.int32)
            values[MEMORY_STEPS] = np.full(len(rows), len(rows), np.int32)
            values.update(columns)

    def _encode(self, prompts: Mapping[int, EncoderInput]) -> None:
        """Fill rows of the encoder-output buffer, in batches limited by their padded tokens."""
        waiting = encoder_pieces(prompts, self._max_tokens if self._of_images else 0)
        while waiting:
            count = 1
            while count < len(waiting) and (count + 1) * max(
                    len(prompt) for *_, prompt in waiting[:count + 1]) <= self._max_tokens:
                count += 1
            self._run_encoder(waiting[:count])
            waiting = waiting[count:]

    def _run_encoder(self, prompts: Sequence[tuple[int, int, EncoderTokens]]) -> None:
        assert self._chip.encoder is not None
        part = _Part.of([prompt for *_, prompt in prompts])
        values = {"input_ids": part.input_ids, "cu_seqlens": part.cu_seqlens,
                  "position_ids": part.position_ids}
        if part.input_features is not None:
            values[INPUT_FEATURES] = part.input_features
        self._run_steps(self._chip.encoder.steps, self._encoder_uses, part, values)
        self._columns.forget({row for row, *_ in prompts})
        for name, buffer in self._memory.items():
            for (row, first, _), start, end in zip(prompts, part.cu_seqlens, part.cu_seqlens[1:],
                                                   strict=False):
                buffer[row, first:first + end - start] = values[name][start:end]

    def _run_steps(self, steps: Steps, last_uses: list[list[str]], batch: _Part,
                   values: dict[str, np.ndarray]) -> None:
        """Run a program; its outputs are added to `values`."""
        rank = self._chip.rank
        for step, finished in zip(steps, last_uses, strict=True):
            if isinstance(step, GraphStep):
                with cpu_sessions.translate_errors(
                        f"ONNX Runtime failed in '{step.path}'",
                        "give fewer or shorter prompts at once, or lower max_batch_size"):
                    self._run_graph(step, batch, values)
            elif step.kind == "all_reduce":
                values[step.output] = self._communicator.all_reduce(rank, values[step.input])
            else:
                values[step.output] = self._communicator.all_gather(rank, values[step.input])
            for name in finished:
                del values[name]

    def _check(self, manifest: Manifest) -> None:
        """Compare the graphs with the manifest and with each other."""
        chip = self._chip
        known = {step.path: cpu_sessions.facts(step.path, self._sessions[step.path])
                 for step in self._steps() if isinstance(step, GraphStep)}
        facts = list(known.values())
        self.ops = {_COLLECTIVES[step.kind] for step in self._steps()
                    if isinstance(step, CollectiveStep)}
        self._held_scores, self._held_memory_scores = (
            max((fact[name] for fact in facts), default=0)
            for name in ("held_scores", "held_memory_scores"))
        for fact in facts:
            self.ops.update(fact["ops"])
            cpu_sessions.check_versions(manifest, chip.path, fact["ops"])
        for program in self._programs:
            heads = tuple(count for step in program.steps if isinstance(step, GraphStep)
                          for count in known[step.path]["num_heads"])
            listed = () if isinstance(program, EncoderProgram) else program.num_heads
            if listed != heads:
                raise LlmcError(f"the graphs of chip {chip.rank} have num_heads {list(heads)}, "
                                f"{MANIFEST_NAME} says {list(listed)}; compile the model again")
            self._check_steps(program, manifest.tp_size)

    def _steps(self) -> Iterator[GraphStep | CollectiveStep]:
        """Steps of all programs."""
        for program in self._programs:
            yield from program.steps

    def _check_steps(self, program: Chip | EncoderProgram | DraftProgram, tp_size: int) -> None:
        """Compare each graph's inputs and outputs with the manifest and with preceding graphs."""
        known: dict[str, cpu_sessions.TensorType] = {tensor.name: (tensor.dtype, tensor.shape)
                                         for tensor in (*program.inputs, *program.outputs)}
        for step in program.steps:
            if isinstance(step, CollectiveStep):
                dtype, shape = known[step.input]
                if step.kind == "all_gather" and isinstance(shape[-1], int):
                    shape = (*shape[:-1], shape[-1] * tp_size)
                tensor_types: dict[str, cpu_sessions.TensorType] = {step.output: (dtype, shape)}
            else:
                session = self._sessions[step.path]
                inputs, outputs = map(cpu_sessions.tensor_types,
                                      (session.get_inputs(), session.get_outputs()))
                if inputs.keys() != {*step.inputs} or outputs.keys() != {*step.outputs}:
                    raise LlmcError(f"'{step.path}' has other inputs or outputs than "
                                    f"{MANIFEST_NAME} lists; compile the model again")
                tensor_types = inputs | outputs
            for name, tensor_type in tensor_types.items():
                if known.setdefault(name, tensor_type) != tensor_type:
                    dtype, shape = known[name]
                    raise LlmcError(
                        f"{name!r} is {tensor_type[0]} {list(tensor_type[1])} in "
                        f"'{self._chip.path}', which should be {dtype} {list(shape)} as in "
                        f"{MANIFEST_NAME} or another graph; compile the model again")

    def _run_graph(self, step: GraphStep, batch: _Part,
                   values: dict[str, np.ndarray]) -> None:
        """Run one ONNX file; its outputs, except caches, are added to `values`."""
        binding = self._binding(step, batch.first_row, len(batch.past_lens))
        if self._loras is not None and self._stacked[step.path]:
            self._bind_loras(binding, step)
        sizes = {"num_tokens": len(batch.input_ids), "num_logits": len(batch.logits_indices),
                 "batch": len(batch.past_lens)}
        for name in self._inputs[step.path]:
            array = values[name]
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, shape in self._outputs[step.path]:
            output = np.empty([size if isinstance(size, int) else sizes[size] for size in shape],
                              np.float32)
            binding.bind_output(name, "cpu", 0, output.dtype, output.shape, output.ctypes.data)
            values[name] = output
        self._sessions[step.path].run_with_iobinding(binding)

    def _binding(self, step: GraphStep, first_row: int, batch_size: int) -> ort.IOBinding:
        """The step's binding, with rows of the caches bound in place.

        Bound are the caches that the graph updates, and those that it reads after another graph's
        update. Each graph has one binding, since one for each first row and batch size would never
        be freed.
        """
        binding = self._bindings[step.path]
        if self._bound_rows.get(step.path) != (first_row, batch_size):
            self._bound_rows[step.path] = first_row, batch_size
            for name in step.inputs:
                cache = self._caches.get(name.removesuffix("_out"))
                if cache is not None:
                    rows = cache[first_row:first_row + batch_size]
                    place = "cpu", 0, np.float32, rows.shape, rows.ctypes.data
                    binding.bind_input(name, *place)
                    if name in self._caches:
                        binding.bind_output(f"{name}_out", *place)
        return binding

    def _bind_loras(self, binding: ort.IOBinding, step: GraphStep) -> None:
        """Bind the rows of the run's adapters, unless these are bound already."""
        if self._loras is None or self._bound_loras.get(step.path) == self._span:
            return
        self._bound_loras[step.path] = self._span
        for name in self._stacked[step.path]:
            rows = self._loras.array(name, self._span)
            binding.bind_input(name, "cpu", 0, rows.dtype, rows.shape, rows.ctypes.data)

    def _output_shapes(self, step: GraphStep) -> list[tuple[str, list[int | str]]]:
        """Name and shape of each output of a graph, except caches.

        Raises:
            LlmcError: an output has an unsupported dtype or dimension.
        """
        shapes = []
        for tensor in self._sessions[step.path].get_outputs():
            if tensor.name.removesuffix("_out") in self._kept:
                continue
            if tensor.type != "tensor(float)" or not all(
                    isinstance(size, int) or size in _SIZES for size in tensor.shape):
                raise LlmcError(f"the output {tensor.name!r} of '{step.path}' is {tensor.type} "
                                f"{tensor.shape}, expected float with dimensions num_tokens or "
                                f"num_logits; compile the model again")
            shapes.append((tensor.name, tensor.shape))
        return shapes

    def _find_last_uses(self, steps: Steps, outputs: set[str]) -> list[list[str]]:
        """For each step, the tensors that no later step needs."""
        seen = set(outputs)
        uses = []
        for step in reversed(steps):
            names = {*step.inputs, *step.outputs}
            uses.append([name for name in names - seen
                         if name.removesuffix("_out") not in self._kept])
            seen |= names
        return uses[::-1]


def check_ops(manifest: Manifest, used: Set[str], drafts: bool) -> None:
    """Compare the ops of all graphs with those that the manifest lists.

    Args:
        used: names of the graphs' ops.
        drafts: whether a draft model, if any, is loaded.

    Raises:
        LlmcError: an op is only in one of them.
    """
    unmatched = used ^ manifest.ops.keys()
    if manifest.draft and not drafts:  # the draft model's alone may be absent
        unmatched = used - manifest.ops.keys()
    if unmatched:
        name = min(unmatched)
        where = f"in a graph and not in the ops of {MANIFEST_NAME}" if name in used else \
            f"in the ops of {MANIFEST_NAME} and in no graph"
        raise LlmcError(f"the op {name} is {where}; compile the model again")


def _taken(values: np.ndarray, inside: slice) -> np.ndarray | None:
    """Some of a step's `rotary_positions` or `bidirectional_ranges`; None if it has none."""
    return values[inside] if len(values) else None


def _memory_rows(step: Step, start: int, end: int) -> int:
    """Most rows of encoder outputs that one of the sequences [start, end) attends to."""
    return 0 if step.memory is None else int(step.memory.encoder_sequence_length[start:end].max())


def _have_ranges(step: Step) -> np.ndarray:
    """Whether each sequence has tokens with bidirectional ranges, bool [batch]."""
    if not len(step.bidirectional_ranges):
        return np.zeros(step.batch_size, bool)
    with_range = np.concatenate([[0], step.bidirectional_ranges[:, 1] > 0]).cumsum()
    found: np.ndarray = np.diff(with_range[step.cu_seqlens]) > 0
    return found


def _range_end(step: Step, token: int, position: int) -> int:
    """The first token from `token` on, at `position`, that does not continue a range."""
    if not len(step.bidirectional_ranges):
        return token
    start, stop = step.bidirectional_ranges[token].tolist()
    return token + stop - position if start < position < stop else token


@contextmanager
def _no_memory(limits: EngineLimits, manifest: Manifest) -> Iterator[None]:
    try:
        yield
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise LlmcError(f"there is too little memory for the KV cache: {limits.max_slots} rows of "
                        f"{manifest.dims.max_seq_len} positions and {limits.num_blocks} blocks of "
                        f"{limits.block_size}; lower max_batch_size or kv_cache_tokens, or compile "
                        f"with a smaller --max_seq_len") from error


def _allocate(manifest: Manifest, chip: Chip, max_slots: int) -> dict[str, np.ndarray]:
    """Encoder-output buffers, float32 [max_slots, mem_max_seq_len, num_kv_heads * head_dim]."""
    if chip.encoder is None:
        return {}
    return {tensor.name: np.zeros((max_slots, manifest.mem_max_seq_len,
                                   int(tensor.shape[-1])), np.float32)
            for tensor in chip.encoder.outputs}
