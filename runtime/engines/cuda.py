"""llmc's engine on an NVIDIA GPU: a thin wrapper of `llmc_cuda._cuda`."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llmc import __version__
from llmc.artifacts.adapter import Matrices
from llmc.artifacts.draft_tokens import read_draft_token_ids
from llmc.artifacts.manifest import (
    DRAFT_TOKEN_IDS,
    INPUT_FEATURES,
    Chip,
    DraftInfo,
    Manifest,
)
from llmc.artifacts.program import (
    Part,
    Program,
    ProgramTensor,
    is_of_draft,
    read_chip_programs,
)
from llmc.artifacts.weight_file import WEIGHTS_NAME, StoredWeight
from llmc.errors import LlmcError
from llmc.installation import CUDA_INSTALL_COMMAND
from llmc.plugins.lora import RANK_MULTIPLE
from llmc.runtime.core.step import (
    EncoderInput,
    EncoderTokens,
    EngineLimits,
    Step,
    StepOutput,
    encoder_pieces,
)
from llmc.runtime.engines import BLOCK_SIZE, MAX_LOGITS, MAX_SCORED
from llmc.runtime.engines.admission import Admissions
from llmc.runtime.engines.draft_step import lookahead
from llmc.runtime.engines.state_slots import StateSlots
from llmc.runtime.engines.tuning import read_choices, tuning_file, write_choices
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import NONE_ALLOWED, Logprobs
from llmc.runtime.sampling.slot_params import LOGPROBS

SIZES: dict[int | str, int] = {"num_tokens": -1, "num_logits": -2, "batch": -3, "batch_plus_1": -4,
                               "max_loras": -7, "max_lora_rank": -8}
AHEAD = 2  # in-flight steps: one runs, the next is queued on the device
# Collectives of ranks: by NCCL, over peer memory, or by the faster one.
COLLECTIVES = ("nccl", "peer", "auto")
_ALIGNED = 128  # max_tokens is rounded up to a multiple, which aligns every value of the arena
_MAX_DRAFTS = 15  # of a sequence in a step
# Of all sequences in a step: rows whose steps are captured while loading.
_DRAFTS_EACH, _DRAFT_TOKENS = 7, 112
_NONE = np.empty(0, np.int32)
_NO_MASKS = np.empty(0, np.uint32)


def extension() -> ModuleType:
    """Import the compiled extension.

    Raises:
        LlmcError: it is not installed or of another version, or cuBLASLt or NCCL is missing.
    """
    if find_spec("llmc_cuda") is None:
        raise LlmcError(f"this installation of llmc has no CUDA engine; install it from a checkout "
                        f"where nvcc 13 is: {CUDA_INSTALL_COMMAND}")
    for path in _libraries():  # the dynamic loader does not search sys.path
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    try:
        cuda = import_module("llmc_cuda._cuda")
    except ImportError as error:
        raise LlmcError(f"the CUDA engine cannot be loaded ({error}); install "
                        f"nvidia-cublas and nvidia-nccl-cu13, or put libcublasLt.so.13 and "
                        f"libnccl.so.2 on the library path") from error
    if cuda.version != __version__:
        raise LlmcError(f"llmc-cuda is {cuda.version}, llmc is {__version__}; install both from "
                        f"one checkout: pip install . && {CUDA_INSTALL_COMMAND}")
    return cuda


def _libraries() -> Iterator[Path]:
    """Paths of the libraries of NVIDIA's packages that the extension links."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for library in ("cu13/lib/libcublasLt.so.13", "nccl/lib/libnccl.so.2",
                        "cudnn/lib/libcudnn.so.9"):
            if (path := Path(root, library)).exists():
                yield path


def library_directories() -> list[str]:
    """Directories of those libraries, for the library path of another process."""
    return [str(path.parent) for path in _libraries()]


def device_count() -> int:
    """Number of GPUs.

    Raises:
        LlmcError: there is no GPU, driver or extension.
    """
    count: int
    count, reason = extension().devices()
    if not count:
        raise LlmcError(f"there is no NVIDIA GPU here ({reason or 'none was found'}); run this "
                        f"model on a machine with one, or compile it with --target cpu")
    return count


class CudaEngine:
    """One rank on one GPU. See `Engine`; sampling runs on the device.

    The constructor loads the weights. Before the first step, all ranks join, and `allocate` is
    called on each with the minimum of `measure`.

    Args:
        device: index of the GPU.
        max_batch_size: number of slots, and maximum number of sequences of a step.
        max_tokens: maximum number of packed tokens of a step.
        block_size: positions of a block of the KV cache, a power of two.
        kv_cache_tokens: positions of the whole KV cache; None: as many as fit in memory.
        gpu_memory_utilization: fraction of the GPU's memory to use.
        attention_backend: one of the extension's attention_backends(); None: fastest.
        speculates: whether to verify drafts.
        draft: whether to load the draft model.
        prompt_lookup: whether to draft by prompt lookup. A model with recurrent layers or an
            encoder does not.
        max_loras: slots of LoRA adapters; 0: the engine takes none.
        max_lora_rank: highest rank of an adapter.

    Raises:
        LlmcError: the extension is missing, memory is insufficient, or an argument is out of range.
    """

    verifies: ClassVar[bool] = True  # whether it verifies drafts
    looks_up: ClassVar[bool] = True  # whether it can draft by prompt lookup

    def __init__(self, manifest: Manifest, chip: Chip, case_dir: Path, device: int, *,
                 max_batch_size: int, max_tokens: int, block_size: int = BLOCK_SIZE,
                 kv_cache_tokens: int | None = None, gpu_memory_utilization: float = 0.9,
                 attention_backend: str | None = None, speculates: bool = False,
                 draft: bool = False, prompt_lookup: bool = False, max_loras: int = 0,
                 max_lora_rank: int = 0) -> None:
        check_memory_options(block_size, kv_cache_tokens, gpu_memory_utilization)
        check_attention_backend(attention_backend, manifest)
        self._collectives = collectives_option()
        self._backend = attention_backend or "fastest"
        cuda = extension()
        self._errors = cuda.CudaError
        self._device = device
        self._tuning, self._made_on = tuning_file(case_dir), cuda.timed_on(device)
        self._first = chip.rank == 0  # ranks have equal shapes, so one stores the tuning
        self._kv_cache_tokens, self._utilization = kv_cache_tokens, gpu_memory_utilization
        self._mem_max_seq_len, self._of_images = manifest.mem_max_seq_len, bool(manifest.memory)
        self._dtype = manifest.dtype
        check_fit(cuda, manifest, device)
        self._max_seq_len = manifest.dims.max_seq_len
        self._loads_draft = draft
        times = 2 if chip.states else 1  # the next step computes accepted drafts again
        self._max_drafts = 0 if not (speculates and self.verifies and chip.verifies_drafts) else \
            min(_MAX_DRAFTS, (max_tokens - max_batch_size) // times,
                (manifest.draft.max_drafts if draft and manifest.draft else None) or _MAX_DRAFTS)
        prompt_lookup = bool(prompt_lookup and self.looks_up and self._max_drafts
                             and not chip.states and manifest.encoder is None)
        # Rows of decode steps: a sequence has one, and one more for each draft.
        max_rows = self._max_rows = max_batch_size + min(
            max_tokens - max_batch_size,
            max(times * self._max_drafts, min(_DRAFTS_EACH * max_batch_size, _DRAFT_TOKENS))
            if self._max_drafts else 0)
        max_logits = max(max_rows, min(max_tokens, max(MAX_LOGITS, max_rows + MAX_SCORED)))
        self._limits = EngineLimits(
            num_blocks=0, block_size=block_size, max_tokens=max_tokens, max_slots=max_batch_size,
            max_logits=max_logits, max_scored=max(max_logits - max_rows, 1), ahead=AHEAD,
            max_drafts=self._max_drafts,
            max_draft_tokens=(max_rows - max_batch_size) // times,
            proposes=draft or prompt_lookup, prompt_lookup=prompt_lookup,
            proposals_take_blocks=draft and bool(chip.draft_caches),
            proposed_positions=1 + (manifest.draft.max_drafts or -1)
            if draft and manifest.draft else 0,
            drafts_ahead=prompt_lookup or (draft and not chip.states),
            lookahead=lookahead(manifest.draft if draft else None, chip),
            longest_first=True,  # balances multiprocessors
            keeps_states=bool(chip.states), whole=manifest.is_whole, max_loras=max_loras,
            max_lora_rank=max_lora_rank)
        self._rank = chip.rank
        self._states: StateSlots | None = None  # created by `allocate`
        self._num_logprobs: dict[int, int | None] = {}  # number of log-probabilities, by slot
        # By ticket: numbers of log-probabilities of sampled slots and of scored rows, and whether
        # the step proposes drafts.
        self._in_flight: dict[int, tuple[list[int | None], list[int], bool]] = {}
        self._pooling = manifest.pooling
        self._pooled: dict[int, Step] = {}  # steps in flight that return pooled rows, by ticket
        limits = dict(dtype=manifest.dtype, max_batch=max_rows, max_states=max_batch_size,
                      max_tokens=-(-max_tokens // _ALIGNED) * _ALIGNED,
                      max_logits=-(-self._limits.max_logits // 8) * 8,
                      max_seq_len=manifest.dims.max_seq_len, block_size=block_size,
                      mem_max_seq_len=self._mem_max_seq_len, prompt_lookup=prompt_lookup,
                      **lora_limits(chip, self._limits))
        try:
            self._engine = self._load(cuda, manifest, chip, case_dir, limits)
        except self._errors as error:
            raise LlmcError(f"the model cannot be loaded onto GPU {device}: {error}") from error

    def _load(self, cuda: ModuleType, manifest: Manifest, chip: Chip, case_dir: Path,
              limits: Mapping[str, Any]) -> Any:
        """Create the extension's engine with its program and weights."""
        programs = read_chip_programs(manifest, chip, case_dir)
        parts = programs.parts(draft=self._loads_draft)
        self._program = parts["model"]
        declared = declare_arenas(cuda, parts, limits)
        weights = build_program(declared, parts, manifest)
        self._lora_layers = adapter_layers(self._program)
        if "draft" in parts and manifest.draft and manifest.draft.reduced:
            read_draft_token_ids(case_dir / chip.path / WEIGHTS_NAME, manifest.draft.vocab_size,
                                 manifest.dims.vocab_size)  # checks them
        engine = cuda.Engine(declared, self._device, self._backend)
        refusal = engine.attention_refusal(manifest.dtype, manifest.kv_dtype)
        if refusal:
            raise LlmcError(
                f"attention_backend '{self._backend}' {refusal}, the model has dtype "
                f"{manifest.dtype} and kv_dtype {manifest.kv_dtype}; leave it out, or use llmc")
        load_weights(engine, weights, case_dir / chip.path / WEIGHTS_NAME, programs.weights)
        return engine

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert the extension's errors to LlmcError."""
        try:
            yield
        except self._errors as error:
            raise LlmcError(f"the CUDA engine: {error}") from error

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def measure(self) -> int:
        """Number of KV-cache blocks that fit on this rank, or that kv_cache_tokens takes.

        Raises:
            LlmcError: they do not fit, or not even one does.
        """
        size, block = self._limits.block_size, self._engine.block_bytes
        with self._translate_errors():
            available: int = self._engine.measure(self._utilization)
        if self._kv_cache_tokens is not None:
            requested = -(-self._kv_cache_tokens // size)
            if requested > available:
                raise LlmcError(
                    f"a KV cache of {self._kv_cache_tokens} tokens takes "
                    f"{requested * block / 2**30:.2f} GiB of GPU {self._device}, which has "
                    f"room for {available * size} tokens, {available * block / 2**30:.2f} GiB, at "
                    f"gpu_memory_utilization {self._utilization}; lower kv_cache_tokens")
            return requested
        if available == 0:
            raise LlmcError(
                f"the weights leave GPU {self._device} no memory for a KV cache at "
                f"gpu_memory_utilization {self._utilization}; raise it, or lower max_batch_size or "
                f"max_num_batched_tokens")
        # Twice the blocks of all slots at full length is enough, prefix caching included.
        return min(available, 2 * self._limits.max_slots * -(-self._max_seq_len // size))

    def allocate(self, num_blocks: int, *, show_progress: bool = False) -> None:
        """Allocate the KV cache and prepare steps of all sizes; on all ranks at once.

        Raises:
            LlmcError: memory is insufficient.
        """
        with self._translate_errors():
            self._engine.allocate(num_blocks)
            self._warm(show_progress)
        self._limits = replace(self._limits, num_blocks=num_blocks)
        if self._limits.keeps_states:
            self._states = StateSlots(self._limits)

    def _warm(self, show_progress: bool) -> None:
        """Tune and plan steps with prefill, and capture decode steps.

        Algorithms tuned before on this kind of GPU are not tuned again.
        """
        with suppress(self._errors):
            self._engine.know(read_choices(self._tuning, self._made_on))
        known = len(self._engine.algorithms())
        steps = [(lengths, False, False)
                 for lengths in prompt_steps(self._limits, self._max_seq_len)]
        sizes = [*reversed(self._engine.graph_sizes)]
        most = min(self._limits.max_slots, sizes[0])  # larger steps have drafts
        decode_sizes = [size for size in sizes if size < most] + \
            [min(size for size in sizes if size >= most)]
        if self._pooling is None:
            steps += [([1] * size, True, False) for size in sorted(decode_sizes, reverse=True)]
        if self._max_drafts:
            steps += [([1] * size, True, True) for size in sizes if size > 1]
        console = Console(stderr=True)
        with Progress(TextColumn("preparing steps"), BarColumn(), TimeElapsedColumn(),
                      console=console, transient=True,
                      disable=not (show_progress and console.is_terminal)) as progress:
            for lengths, decode, verifies in progress.track(steps):
                self._engine.warm(lengths, decode, verifies)
        chosen = self._engine.algorithms()
        if self._first and len(chosen) > known:
            write_choices(self._tuning, self._made_on, chosen)

    def submit(self, step: Step) -> int:
        """See `Engine`.

        With logits of all tokens, nothing is sampled or drafted. A slot without an admitted
        sequence samples greedily. A step that returns pooled rows neither samples nor admits.
        """
        if self._pooling is not None:
            step = replace(step, admit={}, logits="pooled")
        if step.logits == "all":
            step = replace(step, sample=_NONE, propose=None)
        with self._translate_errors():
            if step.encode:
                self._encode(step.encode)
            for slot, adapter in step.load_adapters.items():
                self._engine.load_adapter(
                    slot, *adapter_arrays(adapter.matrices[self._rank], self._lora_layers))
            ticket: int = self._engine.submit(
                *step_arrays(step, self._mem_max_seq_len, self._states,
                             self._max_rows if self._max_drafts else 0))
        if step.logits == "pooled":
            self._pooled[ticket] = step
        for slot, state in step.admit.items():
            self._num_logprobs[slot] = state.sampler.params.logprobs if state.sampler else None
        self._in_flight[ticket] = ([self._num_logprobs.get(slot) for slot in
                                    step.slots[step.sample].tolist()], step.scored.counts.tolist(),
                                   step.propose is not None)
        return ticket

    def collect(self, ticket: int) -> StepOutput:
        """See `Engine`."""
        with self._translate_errors():
            tokens, records, candidates, log_probs, logits, scored, lengths, drafts, matches = \
                self._engine.collect(ticket)
        num_logprobs, counts, proposes = self._in_flight.pop(ticket)
        step = self._pooled.pop(ticket, None)
        if step is not None:
            return self._pooled_output(step, logits)
        if proposes and drafts is None:
            drafts = np.empty((len(num_logprobs), 0), np.int64)
        if lengths is not None:
            num_logprobs = np.repeat(np.array(num_logprobs, object), lengths).tolist()
        logprobs: list[Logprobs | None] = [None] * len(num_logprobs)
        if records is not None:
            logprobs = [None if count is None or token < 0 else logprobs_of(record, count)
                        for count, token, record in zip(
                            num_logprobs, tokens, records.view(LOGPROBS), strict=True)]
        return StepOutput(
            tokens, logprobs, None if candidates is None else Candidates(candidates, log_probs),
            logits, () if scored is None else [
                replace(logprobs_of(record, count), rank=int(record["rank"]))
                for record, count in zip(scored.view(LOGPROBS), counts, strict=True)],
            counts=lengths, drafts=drafts, matches=matches)

    def _pooled_output(self, step: Step, rows: np.ndarray | None) -> StepOutput:
        """The results of a step that returns pooled rows.

        Args:
            rows: of each sequence of the step, or of each token of a token classifier; None if the
                step samples no sequence.
        """
        pooled: list[np.ndarray] = []
        if rows is not None and self._pooling is not None:
            each = np.split(rows, step.cu_seqlens[1:-1]) if self._pooling.per_token else rows
            pooled = [each[index] for index in step.sample.tolist()]
        count = len(step.sample)
        return StepOutput(np.full(count, NONE_ALLOWED), [None] * count, pooled=pooled)

    def _encode(self, prompts: Mapping[int, EncoderInput]) -> None:
        """Run the encoder, in batches limited by max_batch_size and max_tokens."""
        waiting = encoder_pieces(prompts, self._limits.max_tokens if self._of_images else 0)
        while waiting:
            count = packed = 0
            for _, _, tokens in waiting[:self._limits.max_slots]:
                if count and packed + len(tokens) > self._limits.max_tokens:
                    break
                count, packed = count + 1, packed + len(tokens)
            part, waiting = waiting[:count], waiting[count:]
            lengths = [len(tokens) for *_, tokens in part]
            offsets = np.concatenate([np.arange(length) for length in lengths])
            starts = np.array([row * self._mem_max_seq_len + first for row, first, _ in part],
                              np.int64)
            self._engine.encode(
                *encoder_arrays([own for *_, own in part], self._dtype), offsets,
                np.cumsum([0, *lengths], dtype=np.int32), np.repeat(starts, lengths) + offsets)

    def trace(self, step: Step) -> dict[str, np.ndarray]:
        """Execute a step without sampling.

        The host waits after every node.

        Returns:
            float32 [num_tokens, num_logits or batch, width] outputs of every node, in order, by
            tensor name, including the logits of all tokens. FP8 codes are omitted, since only the
            kernels know their layout.
        """
        numbers = [number for node in self._program.nodes for number in node.outputs
                   if number >= 0 and self._program.tensors[number].dtype != "float8_e4m3fn"]
        values = {}
        self._engine.watch(numbers)
        try:
            self._execute(step)
            for number in numbers:
                tensor = self._program.tensors[number]
                rows = step.batch_size if tensor.shape[0] == "batch" else step.num_tokens
                value = np.empty((rows, tensor.width), np.float32)
                self._engine.read_watched(number, value)
                values[tensor.name] = value
        finally:
            self._engine.watch([])
        return values

    def _execute(self, step: Step) -> np.ndarray:
        """Execute a step without sampling; return the logits of all tokens, or the pooled rows."""
        output = self.collect(self.submit(replace(step, candidates=0, logits="all")))
        if self._pooling is not None:
            return np.vstack(output.pooled)
        assert output.logits is not None
        return output.logits

    def check(self) -> None:
        """Raise LlmcError if a step has failed on the device."""
        with self._translate_errors():
            self._engine.check()

    def close(self) -> None:
        """Wait for in-flight steps."""
        with suppress(self._errors):
            self._engine.synchronize()

    def join(self, communicator: bytes, rank: int, size: int) -> None:
        """Join the other ranks' communicator.

        Args:
            communicator: `unique_id()` of one of the ranks.
        """
        try:
            self._engine.join(communicator, rank, size, self._collectives)
        except self._errors as error:
            raise LlmcError(f"GPU {self._device} cannot join the other ranks: {error}") from error

    def abort(self) -> None:
        """Stop waiting for the other ranks. The engine cannot be used afterwards."""
        self._engine.abort()

    def unique_id(self) -> bytes:
        identifier: bytes = self._engine.unique_id()
        return identifier


def check_memory_options(block_size: int, kv_cache_tokens: int | None,
                         gpu_memory_utilization: float) -> None:
    """Raise LlmcError if an option is out of range."""
    if block_size < 1 or block_size & (block_size - 1):
        raise LlmcError(f"block_size {block_size} is not a power of two; {BLOCK_SIZE} is common")
    if kv_cache_tokens is not None and kv_cache_tokens < 1:
        raise LlmcError(f"kv_cache_tokens {kv_cache_tokens} is below 1; give 1 or more")
    if not 0 < gpu_memory_utilization <= 1:
        raise LlmcError(f"gpu_memory_utilization {gpu_memory_utilization} is not above 0 and at "
                        f"most 1")


def collectives_option() -> str:
    """How ranks exchange data, as LLMC_COLLECTIVES has it.

    Raises:
        LlmcError: it has another value.
    """
    value = os.environ.get("LLMC_COLLECTIVES", COLLECTIVES[0])
    if value not in COLLECTIVES:
        raise LlmcError(f"LLMC_COLLECTIVES is '{value}', expected {', '.join(COLLECTIVES[:-1])} or "
                        f"{COLLECTIVES[-1]}; unset it for {COLLECTIVES[0]}")
    return value


def check_attention_backend(name: str | None, manifest: Manifest) -> None:
    """Raise LlmcError if the backend is unknown, or the target does not support backends."""
    if name is None:
        return
    cuda = extension()
    names = cuda.attention_backends()
    if name not in names:
        raise LlmcError(f"there is no attention_backend '{name}'; there are {', '.join(names)}")
    if not manifest.target.spec.runs_program:
        raise LlmcError(f"attention_backend '{name}' is for target cuda; on target "
                        f"{manifest.target.kind} leave it out")


def prompt_steps(limits: EngineLimits, max_seq_len: int) -> list[list[int]]:
    """Steps to run while loading, as new tokens of each sequence, the largest first.

    For any step, one of them has about as many tokens, and one has the same longest chunk and
    number of chunks, rounded up to powers of two.
    """
    most = limits.max_tokens
    powers = [size for power in range(5, 31) for size in (2**power, 3 * 2**(power - 1))]
    sizes = sorted({most, *(size for size in powers if size < most)}, reverse=True)
    steps = [[max_seq_len] * (size // max_seq_len) + [size % max_seq_len] * (size % max_seq_len > 0)
             for size in sizes]
    longest = min(most, max_seq_len)
    for chunk in (2**power for power in range(7, 32) if 2**power < 2 * max(longest, 128)):
        for count in (2**power for power in range(1, 32) if 2**power < 2 * limits.max_slots):
            count = min(count, limits.max_slots)
            length = min(chunk, longest, most - count + 1)
            if length > (chunk // 2 if chunk > 128 else 0):
                steps.append([length] + [1] * (count - 1))
    return [step for step in steps if len(step) <= limits.max_slots]


def step_arrays(step: Step, mem_max_seq_len: int = 0, states: StateSlots | None = None,
                max_rows: int = 0) -> tuple[Any, ...]:
    """The extension's arguments for a step.

    Args:
        states: recurrent states, if the model has any.
        max_rows: maximum number of rows of a decode step. A step without prompts has a row for each
            draft, and for each uncommitted token.
    """
    verifies = bool(step.num_extra.any()) and step.num_tokens <= max_rows and \
        not len(step.embed_ids) and \
        bool((step.seq_lens == 1 + step.num_extra).all())
    mask_rows, masks = mask_arrays(step)
    num_drafts = step.num_drafts[step.sample] if len(step.num_drafts) else _NONE
    state_slots, state_copies = (_NONE, _NONE) if states is None else states.place(step)
    commit_lens = _NONE if states is None else step.commit_lens
    if verifies:
        step = as_rows(step)
    memory = step.memory
    starts = _NONE if memory is None else memory.first_rows(mem_max_seq_len)
    lens = _NONE if memory is None else memory.encoder_sequence_length
    admit = Admissions.of(step.admit)
    return (step.token_ids, step.cu_seqlens, step.past_lens, step.block_tables, step.slots,
            step.num_decode, verifies, step.sample, num_drafts, step.copies, step.candidates,
            ("none", "sampled", "all", "pooled").index(step.logits), starts, lens, mask_rows, masks,
            state_slots, commit_lens, state_copies, step.scored.rows.astype(np.int32),
            step.scored.targets, step.scored.counts, step.next_tokens,
            -1 if step.propose is None else step.propose, step.unread,
            step.lora_ids if len(step.adapters) else _NONE, step.token_type_ids,
            step.embeds.reshape(-1), step.embed_ids, step.deep_embeds.reshape(-1),
            step.rotary_positions.reshape(-1), step.bidirectional_ranges.reshape(-1),
            *admit.arrays())


def encoder_arrays(prompts: Sequence[EncoderTokens], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The extension's arguments for what an encoder reads.

    Args:
        prompts: all token ids, or all rows.
        dtype: of the model.

    Returns:
        Token ids, int64 [num_tokens], and the bytes of the rows in the model's dtype, uint8; one of
        them is empty.
    """
    rows = [own for own in prompts if isinstance(own, np.ndarray)]
    if not rows:
        return np.concatenate([np.asarray(own, np.int64) for own in prompts]), np.empty(0, np.uint8)
    return np.empty(0, np.int64), bytes_in(dtype, np.concatenate(rows))


def bytes_in(dtype: str, array: np.ndarray) -> np.ndarray:
    """The bytes of an array in a dtype, uint8; numbers are rounded to the nearest."""
    if dtype == "bfloat16":
        return _bfloat16(np.ascontiguousarray(array, np.float32).reshape(-1)).view(np.uint8)
    return np.ascontiguousarray(array, np.dtype(dtype)).reshape(-1).view(np.uint8)


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Round float32 [n] to bfloat16, ties to even, as uint16: in pieces that caches hold."""
    bits = numbers.view(np.uint32)
    rounded, room = np.empty(bits.shape, np.uint16), np.empty(1 << 17, np.uint32)
    for start in range(0, len(bits), len(room)):
        piece = bits[start:start + len(room)]
        own = room[:len(piece)]
        np.right_shift(piece, 16, out=own)
        own &= 1
        own += piece
        own += 0x7FFF
        own >>= 16
        rounded[start:start + len(own)] = own
    return rounded


def as_rows(step: Step) -> Step:
    """Make each token of a step a sequence; `sample` are the last tokens of each sequence."""
    sequences = np.repeat(np.arange(step.batch_size), step.seq_lens)
    return replace(
        step, cu_seqlens=np.arange(step.num_tokens + 1, dtype=np.int32),
        past_lens=step.position_ids.astype(np.int32), block_tables=step.block_tables[sequences],
        slots=step.slots[sequences], num_decode=step.num_tokens,
        sample=step.cu_seqlens[step.sample + 1] - np.int32(1), num_drafts=_NONE,
        num_uncommitted=_NONE,
        memory=step.memory and step.memory.take(sequences),
        next_tokens=step.next_tokens[sequences] if len(step.next_tokens) else step.next_tokens,
        unread=step.unread[sequences] if len(step.unread) else step.unread,
        adapters=step.adapters[sequences] if len(step.adapters) else step.adapters)


def lora_limits(chip: Chip, limits: EngineLimits) -> dict[str, int]:
    """The extension's limits of adapters; a chip that takes them has at least one slot."""
    if not chip.lora:
        return {}
    rank = -(-max(limits.max_lora_rank, 1) // RANK_MULTIPLE) * RANK_MULTIPLE
    return {"max_loras": max(limits.max_loras, 1), "max_lora_rank": rank}


def adapter_layers(program: Program) -> list[str]:
    """Names of the layers that take adapters, in the extension's order."""
    used = {number for node in program.nodes for number in node.inputs if number >= 0}
    tensors = [program.tensors[number] for number in sorted(used)]
    return [tensor.name.removesuffix(".lora_down") for tensor in tensors
            if tensor.kind == "adapters" and len(tensor.shape) == 4]


def adapter_arrays(matrices: Matrices, layers: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The extension's arguments for an adapter: its rank in each layer, and its bytes."""
    ranks = [matrices[layer][1].shape[1] if layer in matrices else 0 for layer in layers]
    parts = [matrix.reshape(-1).view(np.uint8) for layer in layers
             for matrix in matrices.get(layer, ())]
    return np.array(ranks, np.int32), np.concatenate(parts) if parts else np.empty(0, np.uint8)


def mask_arrays(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """The mask's row of each of `Step.sampled_rows`, -1 without a mask; and the masks."""
    if not step.masks:
        return _NONE, _NO_MASKS
    rows, masks, first = list[int](), list[np.ndarray](), dict[int, int]()
    for slot, mask in step.masks.items():
        first[slot] = len(masks)
        masks += [mask] if mask.ndim == 1 else [*mask]
    for slot, count in zip(step.slots[step.sample].tolist(), step.sampled_counts.tolist(),
                           strict=True):
        rows += range(first[slot], first[slot] + count) if slot in first else [-1] * count
    return np.array(rows, np.int32), np.stack(masks).astype(np.uint32, copy=False)


def logprobs_of(record: np.void, count: int) -> Logprobs:
    """Convert a record of LOGPROBS.

    Args:
        count: number of most likely tokens.
    """
    return Logprobs(float(record["chosen"]),
                    tuple(zip(record["tokens"][:count].tolist(), record["top"][:count].tolist(),
                              strict=True)))


def check_fit(cuda: Any, manifest: Manifest, device: int) -> None:
    """Compare the model's compilation target with the GPU and the extension.

    Code for a compute capability runs on later ones with the same major number.

    Raises:
        LlmcError: they do not match.
    """
    major, minor = cuda.compute_capability(device)
    expected = manifest.target.compute_capability
    if expected not in (None, f"{major}.{minor}"):
        raise LlmcError(f"the model was compiled for compute capability {expected}, GPU {device} "
                        f"has {major}.{minor}; compile it again for this one")
    built = [int(number) for number in re.findall(r"\d+", cuda.architectures)]
    if not any(number // 10 == major and number % 10 <= minor for number in built):
        raise LlmcError(f"the CUDA engine was built for compute capabilities "
                        f"{', '.join(f'{n // 10}.{n % 10}' for n in built)}, GPU {device} has "
                        f"{major}.{minor}; build it with CMAKE_ARGS="
                        f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor} {CUDA_INSTALL_COMMAND}")
    known = {kind.name: kind.version for kind in cuda.plugin_types()}
    for name, version in manifest.ops.items():
        if known.get(name) != version:
            raise LlmcError(f"the model uses version {version} of {name}, this CUDA engine has "
                            f"{f'version {known[name]}' if name in known else 'none'}; compile "
                            f"the model again with this llmc")


def declare_arenas(cuda: ModuleType, programs: Mapping[Part, Program],
                   limits: Mapping[str, Any]) -> Any:
    """Create the extension's empty program.

    Args:
        programs: by part. The model and its encoder share an arena.
        limits: keyword arguments of the extension's `Program`.
    """
    shared = [program for part, program in programs.items() if not is_of_draft(part)]
    drafts = [program for part, program in programs.items() if is_of_draft(part)]
    declared = cuda.Program(**limits, token_bytes=max(own.token_bytes for own in shared),
                            logit_bytes=programs["model"].logit_bytes)
    if drafts:
        declared.set_draft_arena(max(own.token_bytes for own in drafts),
                                 max(own.logit_bytes for own in drafts))
    return declared


def build_program(declared: Any, programs: Mapping[Part, Program],
                  manifest: Manifest) -> dict[str, int]:
    """Declare the tensors and nodes of the model and of its encoder or draft model, if any.

    They use the same names for weights, inputs and encoder outputs. The declared indices of the
    model's tensors are those of its program.

    Args:
        declared: see `declare_arenas`.
        programs: by part, the model's first.

    Returns:
        Indices of the weights by name.

    Raises:
        CudaError: a node would read or write beyond a tensor.
        LlmcError: a program has an invalid size, or one name for several tensors.
    """
    shared: dict[str, int] = {}
    weights: dict[str, int] = {}
    model = programs["model"]
    for part, program in programs.items():
        try:
            numbers = _declare_all(declared, program, shared, weights, of_draft=is_of_draft(part))
            if program is model and any(index != number for number, index in numbers.items()):
                raise LlmcError("the schedule has one name for several tensors; compile the "
                                "model again")
            for node in program.nodes:
                declared.add_node(node.op, node.fields, [numbers[n] for n in node.inputs],
                                 [numbers[n] for n in node.outputs], part)
            if is_of_draft(part) and manifest.draft is not None:
                _set_draft(declared, manifest.draft, program, model, numbers, weights)
        except (TypeError, LookupError) as error:
            raise LlmcError(f"the schedule has an invalid size or attribute ({error}); compile "
                            f"the model again") from error
    if manifest.pooling is None:
        declared.set_logits(model.logits, manifest.dims.vocab_size)
    else:
        declared.set_pooled(model.logits)
    return weights


def _set_draft(declared: Any, info: DraftInfo, program: Program, model: Program,
               numbers: Mapping[int, int], weights: dict[str, int]) -> None:
    """Declare what the engine reads and writes of a draft model, or of a layer of one.

    Args:
        info: of the draft model.
        program: the draft model's, or the layer's.
        model: the model's program.
        numbers: declared indices by the draft model's.
        weights: indices of weights by name; extended.
    """
    if info.reduced and DRAFT_TOKEN_IDS not in weights:
        weights[DRAFT_TOKEN_IDS] = declared.add_weight("int64", [info.vocab_size])
    declared.set_draft(
        logits=numbers[program.logits], vocab_size=info.vocab_size, features=model.features
        if program.hidden >= 0 else -1, hidden=numbers[program.hidden],
        hidden_out=numbers.get(program.hidden_out, -1), token_ids=weights.get(DRAFT_TOKEN_IDS, -1),
        at_one_position=info.chain == "position",
        block=1 + (info.max_drafts or 0) if info.chain == "block" else 0,
        mask=info.mask_token_id or 0)


def _declare_all(declared: Any, program: Program, shared: dict[str, int],
                 weights: dict[str, int], *, of_draft: bool) -> dict[int, int]:
    """Declare a program's tensors.

    Args:
        shared: indices of inputs, weights, caches and states by name; extended.
        weights: indices of weights by name; extended.
        of_draft: whether its values are in the draft model's arena.

    Returns:
        Declared indices by the program's.
    """
    numbers = {-1: -1}
    for number, tensor in enumerate(program.tensors):
        if tensor.kind == "value":
            numbers[number] = declared.add_value(
                tensor.dtype, [SIZES.get(dim, dim) for dim in tensor.shape], tensor.offset,
                tensor.per_logit, of_draft)
        elif tensor.kind == "columns":
            numbers[number] = declared.add_columns(numbers[tensor.of], tensor.first, tensor.width)
        if number in numbers:
            continue
        if tensor.name not in shared:
            shared[tensor.name] = _declare(declared, tensor)
        numbers[number] = shared[tensor.name]
        if tensor.kind == "weight":
            weights[tensor.name] = numbers[number]
    return numbers


def _declare(declared: Any, tensor: ProgramTensor) -> int:
    """Declare a tensor that is not a value, and return its index."""
    number: int
    if tensor.is_embeds:
        number = declared.add_embeds(tensor.name, tensor.shape[1])
    elif tensor.kind == "input" and tensor.name == INPUT_FEATURES:
        number = declared.add_features(tensor.shape[1])
    elif tensor.kind == "input":
        number = declared.add_input(tensor.name, tensor.dtype)
    elif tensor.kind == "weight":
        number = declared.add_weight(tensor.dtype, list(tensor.shape))
    elif tensor.kind == "memory":
        number = declared.add_memory(tensor.shape[1])
    elif tensor.kind == "adapters":
        number = declared.add_adapters(tensor.dtype, [SIZES.get(dim, dim) for dim in tensor.shape])
    elif tensor.kind == "state":
        number = declared.add_state(tensor.dtype, list(tensor.shape[1:]))
    else:
        number = declared.add_cache(tensor.dtype, tensor.shape[1], tensor.shape[3])
    return number


def load_weights(engine: Any, weights: Mapping[str, int], path: Path,
                 stored: Mapping[str, StoredWeight]) -> None:
    """Copy each weight from the mapped weight file to the device.

    Raises:
        LlmcError: a weight is missing, or its size differs from the declared one.
    """
    data = np.memmap(path, np.uint8, "r")
    for name, number in weights.items():
        if name not in stored:
            raise LlmcError(f"'{path}' has no weight '{name}'; compile the model again")
        low, high = stored[name].start, stored[name].stop
        expected = engine.bytes_of(number)
        if high - low != expected:
            raise LlmcError(f"'{path}' has {high - low} bytes of the weight '{name}', the schedule "
                            f"has {expected}; compile the model again")
        engine.load_weight(number, data[low:high])
    engine.synchronize()
