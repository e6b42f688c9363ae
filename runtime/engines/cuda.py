"""llmc's own engine on an NVIDIA GPU: a thin shell over `llmc_cuda._cuda`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llmc import __version__
from llmc.artifacts.manifest import Chip, Manifest
from llmc.artifacts.program import Program, ProgramTensor, read_chip_programs
from llmc.artifacts.weight_file import WEIGHTS_NAME, StoredWeight
from llmc.errors import LlmcError
from llmc.installation import CUDA_INSTALL_COMMAND
from llmc.runtime.core.step import EngineLimits, Step, StepOutput
from llmc.runtime.engines import BLOCK_SIZE, MAX_LOGITS, MAX_SCORED
from llmc.runtime.engines.admission import Admissions
from llmc.runtime.engines.state_slots import StateSlots
from llmc.runtime.engines.tuning import read_choices, tuning_file, write_choices
from llmc.runtime.sampling.beam_search import Candidates
from llmc.runtime.sampling.sampler import Logprobs
from llmc.runtime.sampling.slot_params import LOGPROBS

SIZES: dict[int | str, int] = {"num_tokens": -1, "num_logits": -2, "batch": -3, "batch_plus_1": -4}
# Who computes attention: a plain kernel for comparison, our own ones, or cuDNN the prompts'.
AHEAD = 2  # steps: while one runs, the next is waiting on the device and the one before is read
_ALIGNED = 128  # max_tokens is a multiple, so that every value of the arena is aligned
_NONE = np.empty(0, np.int32)
_NO_MASKS = np.empty(0, np.uint32)


def extension() -> ModuleType:
    """The compiled extension.

    Raises:
        LlmcError: it was not installed, is of another version, or cuBLASLt or NCCL is missing.
    """
    if find_spec("llmc_cuda") is None:
        raise LlmcError(f"this installation of llmc has no CUDA engine; install it from a checkout "
                        f"where nvcc 13 is: {CUDA_INSTALL_COMMAND}")
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
                        f"one checkout: pip install . && {CUDA_INSTALL_COMMAND}")
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

    Made, it has its weights. Steps can be given once all ranks have joined and `allocate` was
    called on each with the least that `measure` says.

    Args:
        device: the GPU's number.
        max_batch_size: slots, and sequences of a step.
        max_tokens: packed tokens of one step, at most.
        block_size: positions of a block of the KV cache, a power of two.
        kv_cache_tokens: positions of the whole KV cache; None: as many as there is memory for.
        gpu_memory_utilization: the part of the GPU's memory that may then be in use.
        attention_backend: one of the extension's attention_backends(); None: fastest.

    Raises:
        LlmcError: there is no extension, or too little memory, or a size is none.
    """

    def __init__(self, manifest: Manifest, chip: Chip, case_dir: Path, device: int, *,
                 max_batch_size: int, max_tokens: int, block_size: int = BLOCK_SIZE,
                 kv_cache_tokens: int | None = None, gpu_memory_utilization: float = 0.9,
                 attention_backend: str | None = None) -> None:
        check_memory_options(block_size, kv_cache_tokens, gpu_memory_utilization)
        check_attention_backend(attention_backend, manifest)
        self._backend = attention_backend or "fastest"
        cuda = extension()
        self._errors = cuda.CudaError
        self._device = device
        self._tuning, self._made_on = tuning_file(case_dir), cuda.timed_on(device)
        self._first = chip.rank == 0  # ranks time alike
        self._kv_cache_tokens, self._utilization = kv_cache_tokens, gpu_memory_utilization
        self._mem_max_seq_len = manifest.encoder.max_seq_len if manifest.encoder else 0
        check_fit(cuda, manifest, device)
        self._max_seq_len = manifest.dims.max_seq_len
        max_logits = max(max_batch_size, min(max_tokens, max(MAX_LOGITS,
                                                             max_batch_size + MAX_SCORED)))
        self._limits = EngineLimits(
            num_blocks=0, block_size=block_size, max_tokens=max_tokens, max_slots=max_batch_size,
            max_logits=max_logits, max_scored=max(max_logits - max_batch_size, 1), ahead=AHEAD,
            longest_first=True,  # then multiprocessors end together
            keeps_states=bool(chip.states))
        self._states: StateSlots | None = None  # once the blocks are there
        self._wishes: dict[int, int | None] = {}  # of log-probabilities, by slot
        # By ticket: those of the slots that it samples, and of the rows that it scores.
        self._under_way: dict[int, tuple[list[int | None], list[int]]] = {}
        limits = dict(dtype=manifest.dtype, max_batch=max_batch_size,
                      max_tokens=-(-max_tokens // _ALIGNED) * _ALIGNED,
                      max_logits=-(-self._limits.max_logits // 8) * 8,
                      max_seq_len=manifest.dims.max_seq_len, block_size=block_size,
                      mem_max_seq_len=self._mem_max_seq_len)
        try:
            self._engine = self._load(cuda, manifest, chip, case_dir, limits)
        except self._errors as error:
            raise LlmcError(f"the model cannot be loaded onto GPU {device}: {error}") from error

    def _load(self, cuda: ModuleType, manifest: Manifest, chip: Chip, case_dir: Path,
              limits: Mapping[str, Any]) -> Any:
        """The extension's engine, with its program and its weights."""
        read = read_chip_programs(manifest, chip, case_dir)
        self._program = program = read.model
        programs = [program, *([read.encoder] if read.encoder else [])]
        declared = cuda.Program(**limits, token_bytes=max(s.token_bytes for s in programs),
                                logit_bytes=program.logit_bytes)
        weights = build_program(declared, programs, manifest.dims.vocab_size)
        engine = cuda.Engine(declared, self._device, self._backend)
        refusal = engine.attention_refusal(manifest.dtype, manifest.kv_dtype)
        if refusal:
            raise LlmcError(
                f"attention_backend '{self._backend}' {refusal}, the model is of {manifest.dtype} "
                f"with {manifest.kv_dtype}; leave it out, or choose llmc")
        load_weights(engine, weights, case_dir / chip.path / WEIGHTS_NAME, read.weights)
        return engine

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong in the extension is the user's to know."""
        try:
            yield
        except self._errors as error:
            raise LlmcError(f"the CUDA engine: {error}") from error

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def measure(self) -> int:
        """Blocks of the KV cache that this rank has room for, or all that are asked for.

        Raises:
            LlmcError: there is no room for one sequence, or for what is asked for.
        """
        size, block = self._limits.block_size, self._engine.block_bytes
        with self._telling():
            room: int = self._engine.measure(self._utilization)
        if self._kv_cache_tokens is not None:
            wanted = -(-self._kv_cache_tokens // size)
            if wanted > room:
                raise LlmcError(
                    f"a KV cache of {self._kv_cache_tokens} tokens takes "
                    f"{wanted * block / 2**30:.2f} GiB of GPU {self._device}, which has room for "
                    f"{room * size} tokens, {room * block / 2**30:.2f} GiB, at "
                    f"gpu_memory_utilization {self._utilization}; lower kv_cache_tokens")
            return wanted
        if room == 0:
            raise LlmcError(
                f"the weights leave GPU {self._device} no memory for a KV cache at "
                f"gpu_memory_utilization {self._utilization}; raise it, or lower max_batch_size or "
                f"max_num_batched_tokens")
        # More than all slots can fill twice serves nobody.
        return min(room, 2 * self._limits.max_slots * -(-self._max_seq_len // size))

    def allocate(self, num_blocks: int, *, show_progress: bool = False) -> None:
        """Make the KV cache, and all that steps of any size need; all ranks at once.

        Raises:
            LlmcError: there is too little memory.
        """
        with self._telling():
            self._engine.allocate(num_blocks)
            self._warm(show_progress)
        self._limits = replace(self._limits, num_blocks=num_blocks)
        if self._limits.keeps_states:
            self._states = StateSlots(self._limits)

    def _warm(self, show_progress: bool) -> None:
        """Time and plan what steps with prompts need, and capture decode steps; of what was timed
        before, on this kind of GPU, nothing again.
        """
        with suppress(self._errors):
            self._engine.know(read_choices(self._tuning, self._made_on))
        known = len(self._engine.algorithms())
        steps = [(lengths, False) for lengths in prompt_steps(self._limits, self._max_seq_len)]
        steps += [([1] * size, True) for size in reversed(self._engine.graph_sizes)]
        console = Console(stderr=True)
        with Progress(TextColumn("preparing steps"), BarColumn(), TimeElapsedColumn(),
                      console=console, transient=True,
                      disable=not (show_progress and console.is_terminal)) as progress:
            for lengths, decode in progress.track(steps):
                self._engine.warm(lengths, decode)
        chosen = self._engine.algorithms()
        if self._first and len(chosen) > known:
            write_choices(self._tuning, self._made_on, chosen)

    def submit(self, step: Step) -> int:
        """See `Engine`. Where the logits of all tokens are asked for nothing is chosen; a slot that
        no sequence has entered chooses the likeliest token.
        """
        if step.logits == "all":
            step = replace(step, sample=_NONE)
        with self._telling():
            if step.encode:
                self._encode(step.encode)
            ticket: int = self._engine.submit(
                *step_arrays(step, self._mem_max_seq_len, self._states))
        for slot, state in step.admit.items():
            self._wishes[slot] = state.sampler.params.logprobs if state.sampler else None
        self._under_way[ticket] = ([self._wishes.get(slot) for slot in
                                    step.slots[step.sample].tolist()], step.scored.counts.tolist())
        return ticket

    def collect(self, ticket: int) -> StepOutput:
        """See `Engine`."""
        with self._telling():
            tokens, records, candidates, log_probs, logits, scored = self._engine.collect(ticket)
        wishes, counts = self._under_way.pop(ticket)
        logprobs: list[Logprobs | None] = [None] * len(wishes)
        if records is not None:
            logprobs = [None if wish is None or token < 0 else told(record, wish)
                        for wish, token, record in zip(wishes, tokens, records.view(LOGPROBS),
                                                       strict=True)]
        return StepOutput(tokens, logprobs,
                       None if candidates is None else Candidates(candidates, log_probs), logits,
                       () if scored is None else [
                           replace(told(record, count), rank=int(record["rank"]))
                           for record, count in zip(scored.view(LOGPROBS), counts, strict=True)])

    def _encode(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Run the encoder, on as many prompts at once as a step has room for."""
        waiting = [*prompts.items()]
        while waiting:
            count = packed = 0
            for _, tokens in waiting[:self._limits.max_slots]:
                if count and packed + len(tokens) > self._limits.max_tokens:
                    break
                count, packed = count + 1, packed + len(tokens)
            part, waiting = waiting[:count], waiting[count:]
            lengths = [len(tokens) for _, tokens in part]
            places = np.concatenate([np.arange(length) for length in lengths])
            starts = np.array([row for row, _ in part], np.int64) * self._mem_max_seq_len
            self._engine.encode(
                np.concatenate([np.asarray(tokens, np.int64) for _, tokens in part]), places,
                np.cumsum([0, *lengths], dtype=np.int32), np.repeat(starts, lengths) + places)

    def trace(self, step: Step) -> dict[str, np.ndarray]:
        """Execute a step that chooses nothing and return every value that it makes, in order, by
        its tensor's name, with the logits of all tokens; but for codes, of which only the kernels
        know the order.

        float32 [num_tokens or num_logits, width] each. The host waits after every node.
        """
        numbers = [number for node in self._program.nodes for number in node.outputs
                   if number >= 0 and self._program.tensors[number].dtype != "float8_e4m3fn"]
        values = {}
        self._engine.watch(numbers)
        try:
            self._execute(step)
            for number in numbers:
                tensor = self._program.tensors[number]
                value = np.empty([step.num_tokens if isinstance(dim, str) else dim
                                  for dim in tensor.shape], np.float32)
                self._engine.read_watched(number, value)
                values[tensor.name] = value
        finally:
            self._engine.watch([])
        return values

    def _execute(self, step: Step) -> np.ndarray:
        """The logits of all tokens of a step that chooses nothing."""
        made = self.collect(self.submit(replace(step, candidates=0, logits="all")))
        assert made.logits is not None
        return made.logits

    def check(self) -> None:
        """Raises LlmcError where a step has failed on the device."""
        with self._telling():
            self._engine.check()

    def close(self) -> None:
        """Wait for what is under way."""
        with suppress(self._errors):
            self._engine.synchronize()

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


def check_memory_options(block_size: int, kv_cache_tokens: int | None,
                         gpu_memory_utilization: float) -> None:
    """Raises LlmcError where one is out of range."""
    if block_size < 1 or block_size & (block_size - 1):
        raise LlmcError(f"block_size {block_size} is not a power of two; {BLOCK_SIZE} is usual")
    if kv_cache_tokens is not None and kv_cache_tokens < 1:
        raise LlmcError(f"kv_cache_tokens {kv_cache_tokens} is below 1")
    if not 0 < gpu_memory_utilization <= 1:
        raise LlmcError(f"gpu_memory_utilization {gpu_memory_utilization} is not above 0 and up to "
                        f"1")


def check_attention_backend(wish: str | None, manifest: Manifest) -> None:
    """Raises LlmcError where there is no such backend, or the target has a choice of none."""
    if wish is None:
        return
    cuda = extension()
    names = cuda.attention_backends()
    if wish not in names:
        raise LlmcError(f"there is no attention_backend '{wish}'; there are {', '.join(names)}")
    if not manifest.target.spec.runs_program:
        raise LlmcError(f"attention_backend '{wish}' is for target cuda; on target "
                        f"{manifest.target.kind} leave it out")


def prompt_steps(limits: EngineLimits, max_seq_len: int) -> list[list[int]]:
    """New tokens of the sequences of steps that are run while loading, the largest first: any step
    has about as many tokens as one of them, and one whose longest chunk and number of chunks,
    rounded up to powers of two, are another's.
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


def step_arrays(step: Step, mem_max_seq_len: int = 0,
                states: StateSlots | None = None) -> tuple[Any, ...]:
    """A step as the extension takes it; `states` where the model keeps any."""
    memory = step.memory
    state_slots, state_copies = (_NONE, _NONE) if states is None else states.place(step)
    starts = _NONE if memory is None else memory.rows * np.int32(mem_max_seq_len)
    lens = _NONE if memory is None else memory.encoder_sequence_length
    admit = Admissions.of(step.admit)
    return (step.token_ids, step.cu_seqlens, step.past_lens, step.block_tables, step.slots,
            step.num_decode, step.sample, step.copies, step.candidates,
            ("none", "sampled", "all").index(step.logits), starts, lens, *mask_arrays(step),
            state_slots, state_copies, step.scored.rows.astype(np.int32), step.scored.targets,
            step.scored.counts, *admit.arrays())


def mask_arrays(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Of each of `Step.sample` the row of its mask, -1 where it has none, and the masks."""
    if not step.masks:
        return _NONE, _NO_MASKS
    places = {slot: place for place, slot in enumerate(step.masks)}
    rows = [places.get(slot, -1) for slot in step.slots[step.sample].tolist()]
    return (np.array(rows, np.int32),
            np.stack([*step.masks.values()]).astype(np.uint32, copy=False))


def told(record: np.void, wish: int) -> Logprobs:
    """A record of LOGPROBS with so many of the likeliest."""
    return Logprobs(float(record["chosen"]),
                    tuple(zip(record["tokens"][:wish].tolist(), record["top"][:wish].tolist(),
                              strict=True)))


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
                        f"{major}.{minor}; build it with CMAKE_ARGS="
                        f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor} {CUDA_INSTALL_COMMAND}")
    known = {kind.name: kind.version for kind in cuda.plugin_types()}
    for name, version in manifest.ops.items():
        if known.get(name) != version:
            raise LlmcError(f"the model uses version {version} of {name}, this CUDA engine has "
                            f"{f'version {known[name]}' if name in known else 'none'}; compile "
                            f"the model again with this llmc")


def build_program(declared: Any, programs: Sequence[Program], vocab_size: int) -> dict[str, int]:
    """Declare the tensors and nodes of the model and perhaps its encoder, which know weights,
    inputs and the memory by the same names; the model's numbers are its program's own. Returns the
    weights' numbers.

    Raises:
        CudaError: a node would read or write beyond a tensor.
        LlmcError: a program has a size that is none, or one name for several tensors.
    """
    shared: dict[str, int] = {}
    weights: dict[str, int] = {}
    for program in programs:
        try:
            numbers = _declare_all(declared, program, shared, weights)
            of_encoder = program is not programs[0]
            if not of_encoder and any(number != made for number, made in numbers.items()):
                raise LlmcError("the schedule has a name of several tensors; compile the model "
                                "again")
            for node in program.nodes:
                declared.add_node(node.op, node.fields, [numbers[n] for n in node.inputs],
                                 [numbers[n] for n in node.outputs], of_encoder)
        except (TypeError, LookupError) as error:
            raise LlmcError(f"the schedule has a size or a field that is none ({error}); compile "
                            f"the model again") from error
    declared.set_logits(programs[0].logits, vocab_size)
    return weights


def _declare_all(declared: Any, program: Program, shared: dict[str, int],
                 weights: dict[str, int]) -> dict[int, int]:
    """The declared numbers by the program's; adds the names of what is no value to `shared`, and
    those of weights to `weights`.
    """
    numbers = {-1: -1}
    for number, tensor in enumerate(program.tensors):
        if tensor.kind == "value":
            numbers[number] = declared.add_value(
                tensor.dtype, [SIZES.get(dim, dim) for dim in tensor.shape], tensor.offset,
                tensor.per_logit)
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
    """A tensor that is not a value; its number."""
    number: int
    if tensor.kind == "input":
        number = declared.add_input(tensor.name, tensor.dtype)
    elif tensor.kind == "weight":
        number = declared.add_weight(tensor.dtype, list(tensor.shape))
    elif tensor.kind == "memory":
        number = declared.add_memory(tensor.shape[1])
    elif tensor.kind == "state":
        number = declared.add_state(tensor.dtype, list(tensor.shape[1:]))
    else:
        number = declared.add_cache(tensor.dtype, tensor.shape[1], tensor.shape[3])
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
