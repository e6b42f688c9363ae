"""llmc's own engine on an NVIDIA GPU: a thin shell over `llmc_cuda._cuda`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llmc import __version__
from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import BeamStep, Memory, PackedBatch
from llmc.runtime.decoding.beam_search import Candidates
from llmc.runtime.decoding.processing import LOGPROBS
from llmc.runtime.decoding.sampling import Choices, Draws
from llmc.runtime.engines import MAX_LOGITS
from llmc.runtime.manifest import Chip, Manifest
from llmc.runtime.schedule import Schedule, ScheduledTensor, read_program
from llmc.runtime.weights import WEIGHTS_NAME, StoredWeight

SIZES: dict[int | str, int] = {"num_tokens": -1, "num_logits": -2, "batch": -3, "batch_plus_1": -4}
INSTALL = "pip install -v ./csrc"
_BLOCK = 128  # max_tokens is a multiple, so that every value of the arena is aligned


def extension() -> ModuleType:
    """The compiled extension.

    Raises:
        LlmcError: it was not installed, is of another version, or cuBLASLt or NCCL is missing.
    """
    if find_spec("llmc_cuda") is None:
        raise LlmcError(f"this installation of llmc has no CUDA engine; install it from a checkout "
                        f"where nvcc 13 is: {INSTALL}")
    for path in _libraries():  # wherever on sys.path they are, the loader is to know them
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    try:
        cuda = import_module("llmc_cuda._cuda")
    except ImportError as error:
        raise LlmcError(f"the CUDA engine cannot be loaded ({error}); install "
                        f"nvidia-cublas and nvidia-nccl-cu13, or put libcublasLt.so.13 and "
                        f"libnccl.so.2 on the library path") from error
    if cuda.version != __version__:
        raise LlmcError(f"llmc-cuda is {cuda.version}, llmc is {__version__}; install both from "
                        f"one checkout: pip install . && {INSTALL}")
    return cuda


def _libraries() -> Iterator[Path]:
    """The libraries of NVIDIA's packages that the extension is linked with."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for library in ("cu13/lib/libcublasLt.so.13", "nccl/lib/libnccl.so.2",
                        "cudnn/lib/libcudnn.so.9"):
            if (path := Path(root, library)).exists():
                yield path


def library_directories() -> list[str]:
    """Where those libraries are, for the library path of another process."""
    return [str(path.parent) for path in _libraries()]


def device_count() -> int:
    """How many GPUs there are.

    Raises:
        LlmcError: there is none, or no driver, or no extension.
    """
    count: int
    count, reason = extension().devices()
    if not count:
        raise LlmcError(f"there is no NVIDIA GPU here ({reason or 'none was found'}); run this "
                        f"model where one is, or compile it with --target cpu")
    return count


class CudaEngine:
    """One rank on one GPU. See `Engine`; tokens are chosen on the device.

    Args:
        device: the GPU's number.
        max_batch_size: rows of the KV cache.
        max_tokens: packed tokens of one step, at most.

    Raises:
        LlmcError: there is no extension, or too little memory.
    """

    def __init__(self, manifest: Manifest, chip: Chip, case_dir: Path, device: int,
                 max_batch_size: int, max_tokens: int) -> None:
        cuda = extension()
        self._errors = cuda.CudaError
        self._logprob_steps: int = cuda.logprob_steps
        self._device = device
        self._state: tuple[np.ndarray, ...] | None = None
        self._memory: Memory | None = None  # that the device knows of
        self._mem_max_seq_len = manifest.encoder.max_seq_len if manifest.encoder else 0
        check_fit(cuda, manifest, device)
        self._vocab = manifest.dims.vocab_size
        self._max_logits = max(max_batch_size, min(MAX_LOGITS, max_tokens))
        limits = dict(dtype=manifest.dtype, max_batch=max_batch_size,
                      max_tokens=-(-max_tokens // _BLOCK) * _BLOCK,
                      max_logits=-(-self._max_logits // 8) * 8,
                      max_seq_len=manifest.dims.max_seq_len,
                      mem_max_seq_len=self._mem_max_seq_len)
        try:
            self._engine = self._load(cuda, manifest, chip, case_dir, limits)
        except self._errors as error:
            raise LlmcError(f"the model cannot be loaded onto GPU {device}: {error}") from error

    def _load(self, cuda: ModuleType, manifest: Manifest, chip: Chip, case_dir: Path,
              limits: Mapping[str, Any]) -> Any:
        """The extension's engine, with its program and its weights."""
        read = read_program(manifest, chip, case_dir)
        self._schedule = schedule = read.model
        schedules = [schedule, *([read.encoder] if read.encoder else [])]
        program = cuda.Program(**limits, token_bytes=max(s.token_bytes for s in schedules),
                               logit_bytes=schedule.logit_bytes)
        weights = build_program(program, schedules, self._vocab)
        engine = cuda.Engine(program, self._device)
        load_weights(engine, weights, case_dir / chip.path / WEIGHTS_NAME, read.weights)
        return engine

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong in the extension is the user's to know."""
        try:
            yield
        except self._errors as error:
            raise LlmcError(f"the CUDA engine: {error}") from error

    def encode(self, batch: PackedBatch, rows: Sequence[int]) -> None:
        self._state = None
        lengths = np.diff(batch.cu_seqlens)
        starts = np.asarray(rows, np.int64) * self._mem_max_seq_len
        with self._telling():
            self._engine.encode(batch.input_ids, batch.position_ids, batch.cu_seqlens,
                                np.repeat(starts, lengths) + batch.position_ids)

    def _set_memory(self, memory: Memory | None) -> None:
        """Tell the device where the sequences' prompts are in the encoder's memory."""
        if memory is None or (self._memory is not None and all(
                np.array_equal(getattr(memory, name), getattr(self._memory, name))
                for name in ("rows", "encoder_sequence_length"))):
            return
        self._engine.set_memory(memory.rows * np.int32(self._mem_max_seq_len),
                                memory.encoder_sequence_length)
        self._memory = memory

    def run(self, batch: PackedBatch) -> np.ndarray:
        self.submit(batch)
        return self._read_logits(batch)

    def _read_logits(self, batch: PackedBatch) -> np.ndarray:
        logits = np.empty((len(batch.logits_indices), self._vocab), np.float32)
        self._engine.read_logits(logits)
        return logits

    def trace(self, batch: PackedBatch) -> dict[str, np.ndarray]:
        """Execute a step and return every value that it makes, in order, by its tensor's name.

        float32 [num_tokens or num_logits, width] each. The host waits after every node.
        """
        sizes = {"num_tokens": len(batch.input_ids), "num_logits": len(batch.logits_indices)}
        numbers = [number for node in self._schedule.nodes for number in node.outputs
                   if number >= 0]
        values = {}
        self._engine.watch(numbers)
        try:
            self.submit(batch, prefill=True)  # decoding skips a node
            for number in numbers:
                tensor = self._schedule.tensors[number]
                value = np.empty([sizes[dim] if isinstance(dim, str) else dim
                                  for dim in tensor.shape], np.float32)
                self._engine.read_watched(number, value)
                values[tensor.name] = value
        finally:
            self._engine.watch([])
        return values

    def submit(self, batch: PackedBatch, *, prefill: bool = False) -> None:
        """Start a step; its logits stay on the device."""
        self._state = None
        lengths = np.diff(batch.cu_seqlens)
        indirection = np.empty(0) if batch.cache_indirection is None else batch.cache_indirection
        decode = not prefill and bool((lengths == 1).all()) and \
            len(batch.logits_indices) == len(lengths)
        with self._telling():
            self._set_memory(batch.memory)
            self._engine.run(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.past_lens,
                             np.ascontiguousarray(batch.logits_indices, np.int64),
                             np.ascontiguousarray(indirection, np.int32), batch.first_row, decode)

    def likeliest(self, batch: PackedBatch, count: int) -> Candidates:
        """Execute a step: the `count` likeliest tokens of each of its rows of logits."""
        self.submit(batch)
        return self._candidates(len(batch.logits_indices), count, self._engine.candidates)

    def follow(self, step: BeamStep) -> Candidates:
        """Execute a step of beam search; see `BeamStep`."""
        self._state = None
        with self._telling():
            self._set_memory(step.memory)
        return self._candidates(step.tokens.size, step.count, self._engine.follow, step.tokens,
                                step.parents, step.past_lens, step.prompt_lens)

    def _candidates(self, rows: int, count: int, find: Callable[..., None],
                    *given: np.ndarray) -> Candidates:
        found = Candidates(np.empty((rows, count), np.int32), np.empty((rows, count), np.float32))
        with self._telling():
            find(*given, found.tokens, found.log_probs)
        return found

    def decode(self, batch: PackedBatch, draws: Draws, end_ids: Sequence[int], steps: int) -> \
            Choices:
        """A step, and the tokens that it and the steps after it lead to.

        All on the device; the host waits once, at the end, and where log-probabilities are asked
        for as often as there are no more kept. A sequence's tokens after an end token mean nothing.
        """
        lengths = np.diff(batch.cu_seqlens)
        sampling = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.typical_p,
                    draws.seed)
        fixed = (*sampling, draws.sequences, np.array(end_ids))
        goes_on = bool((lengths == 1).all()) and batch.first_row == 0
        state = (batch.input_ids, batch.past_lens, draws.drawn, *fixed)
        with self._telling():
            if draws.prompts is not None:
                self._engine.set_history(batch.first_row, *draws.prompts)
            if not goes_on:
                self.submit(batch)
                self._begin(np.empty(0, np.int64), batch.past_lens + lengths, draws, end_ids,
                            batch.first_row)
            elif self._state is None or not all(map(np.array_equal, state, self._state)):
                self._set_memory(batch.memory)
                self._begin(batch.input_ids, batch.past_lens, draws, end_ids, 0)
            chosen = self._go_on(steps, 0 if goes_on else 1, draws)
        # What the device is ready to go on with, where no sequence has ended.
        self._state = (chosen.tokens[-1], batch.past_lens + lengths + steps - 1,
                       draws.drawn + steps, *fixed)
        return chosen

    def _begin(self, tokens: np.ndarray, past_lens: np.ndarray, draws: Draws,
               end_ids: Sequence[int], first_row: int) -> None:
        self._state = None
        processing = draws.processing
        self._engine.begin_decode(
            tokens, past_lens, draws.temperature, draws.top_k, draws.top_p, draws.min_p,
            draws.typical_p, draws.seed, draws.drawn, list(end_ids),
            processing=None if processing is None else processing.rows.view(np.uint8),
            lists=None if processing is None else processing.lists,
            logprobs=draws.logprobs, first_row=first_row)

    def _go_on(self, steps: int, made: int, draws: Draws) -> Choices:
        """The last so many steps, of which some are made already."""
        if draws.logprobs is None:
            self._engine.decode(steps - made)
            return Choices(self._tokens(steps))
        parts = []
        for start in range(0, steps, self._logprob_steps):
            count = min(self._logprob_steps, steps - start)
            self._engine.decode(count - made)
            made = 0
            parts.append(np.empty((count, len(draws.logprobs)), LOGPROBS))
            self._engine.read_logprobs(count, parts[-1].view(np.uint8))
        return Choices(self._tokens(steps), np.concatenate(parts))

    def _tokens(self, steps: int) -> np.ndarray:
        return np.array(self._engine.tokens(steps), np.int64).reshape(steps, -1)

    def join(self, communicator: bytes, rank: int, size: int) -> None:
        """Meet the other ranks; `communicator` is `unique_id()` of one of them."""
        try:
            self._engine.join(communicator, rank, size)
        except self._errors as error:
            raise LlmcError(f"GPU {self._device} cannot join the other ranks: {error}") from error

    def abort(self) -> None:
        """Give up waiting for the other ranks; the engine is of no use afterwards."""
        self._engine.abort()

    def unique_id(self) -> bytes:
        made: bytes = self._engine.unique_id()
        return made

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._state = None
        self._engine.copy_row(source, target, length)


def check_fit(cuda: Any, manifest: Manifest, device: int) -> None:
    """Compare what the model was compiled for with the GPU and the extension.

    Code for a compute capability runs on later ones of the same major number.

    Raises:
        LlmcError: naming what does not fit.
    """
    major, minor = cuda.compute_capability(device)
    wanted = manifest.target.compute_capability
    if wanted not in (None, f"{major}.{minor}"):
        raise LlmcError(f"the model was compiled for compute capability {wanted}, GPU {device} has "
                        f"{major}.{minor}; compile it again for this one")
    built = [int(number) for number in re.findall(r"\d+", cuda.architectures)]
    if not any(number // 10 == major and number % 10 <= minor for number in built):
        raise LlmcError(f"the CUDA engine was built for compute capabilities "
                        f"{', '.join(f'{n // 10}.{n % 10}' for n in built)}, GPU {device} has "
                        f"{major}.{minor}; build it with "
                        f"CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES={major}{minor} {INSTALL}")
    known = {kind.name: kind.version for kind in cuda.plugin_types()}
    for name, version in manifest.ops.items():
        if known.get(name) != version:
            raise LlmcError(f"the model uses version {version} of {name}, this CUDA engine has "
                            f"{f'version {known[name]}' if name in known else 'none'}; compile "
                            f"the model again with this llmc")


def build_program(program: Any, schedules: Sequence[Schedule], vocab_size: int) -> dict[str, int]:
    """Declare the tensors and nodes of the model and perhaps its encoder, which know weights,
    inputs and the memory by the same names; the model's numbers are its schedule's own. Returns the
    weights' numbers.

    Raises:
        CudaError: a node would read or write beyond a tensor.
        LlmcError: a schedule has a size that is none, or one name for several tensors.
    """
    shared: dict[str, int] = {}
    weights: dict[str, int] = {}
    for schedule in schedules:
        try:
            numbers = _declare_all(program, schedule, shared, weights)
            of_encoder = schedule is not schedules[0]
            if not of_encoder and any(number != made for number, made in numbers.items()):
                raise LlmcError("the schedule has a name of several tensors; compile the model "
                                "again")
            for node in schedule.nodes:
                program.add_node(node.op, node.fields, [numbers[n] for n in node.inputs],
                                 [numbers[n] for n in node.outputs], of_encoder)
        except (TypeError, IndexError) as error:
            raise LlmcError(f"the schedule has a size or a field that is none ({error}); compile "
                            f"the model again") from error
    program.set_logits(schedules[0].logits, vocab_size)
    return weights


def _declare_all(program: Any, schedule: Schedule, shared: dict[str, int],
                 weights: dict[str, int]) -> dict[int, int]:
    """The program's numbers by the schedule's; adds the names of what is no value to `shared`, and
    those of weights to `weights`.
    """
    numbers = {-1: -1}
    for number, tensor in enumerate(schedule.tensors):
        if tensor.kind == "value":
            numbers[number] = program.add_value(
                tensor.dtype, [SIZES.get(dim, dim) for dim in tensor.shape], tensor.offset,
                tensor.per_logit)
            continue
        if tensor.name not in shared:
            shared[tensor.name] = _declare(program, tensor)
        numbers[number] = shared[tensor.name]
        if tensor.kind == "weight":
            weights[tensor.name] = numbers[number]
    return numbers


def _declare(program: Any, tensor: ScheduledTensor) -> int:
    """A tensor that is not a value; its number."""
    number: int
    if tensor.kind == "input":
        number = program.add_input(tensor.name, tensor.dtype)
    elif tensor.kind == "weight":
        number = program.add_weight(tensor.dtype, list(tensor.shape))
    elif tensor.kind == "memory":
        number = program.add_memory(tensor.shape[1])
    else:
        number = program.add_cache(tensor.dtype, tensor.shape[1:])
    return number


def load_weights(engine: Any, weights: Mapping[str, int], path: Path,
                 stored: Mapping[str, StoredWeight]) -> None:
    """Copy each weight from where it is stored in the mapped file to the device.

    Raises:
        LlmcError: a weight is not stored, or not as large as the engine declares it.
    """
    data = np.memmap(path, np.uint8, "r")
    for name, number in weights.items():
        if name not in stored:
            raise LlmcError(f"'{path}' has no weight '{name}'; compile the model again")
        low, high = stored[name].start, stored[name].stop
        wanted = engine.bytes_of(number)
        if high - low != wanted:
            raise LlmcError(f"'{path}' has {high - low} bytes of the weight '{name}', the schedule "
                            f"says {wanted}; compile the model again")
        engine.load_weight(number, data[low:high])
    engine.synchronize()
