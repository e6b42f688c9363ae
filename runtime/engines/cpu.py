"""ONNX Runtime on CPU cores.

The KV cache is allocated once and bound as input and output of every step, so a step appends to it
in place. Rows that are not used yet take no memory: the operating system gives pages when they are
written. So is the memory of an encoder-decoder model, whose rows a decoder only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.collectives import Communicator
from llmc.runtime.devices import Placement
from llmc.runtime.manifest import MANIFEST_NAME, Chip, GraphStep, Manifest, Steps

_SIZES = {"num_tokens", "num_logits"}


class CpuEngine:
    """One rank on ONNX Runtime. See `Engine`.

    Args:
        threads: for a pool that the ranks of the replica share.
        max_batch_size: rows of the KV cache.

    Raises:
        LlmcError: a graph cannot be loaded or is not what the manifest says, or there is no memory
            for the KV cache.
    """

    def __init__(self, manifest: Manifest, chip: Chip, case_dir: Path, placement: Placement,
                 communicator: Communicator, threads: int, max_batch_size: int) -> None:
        self._chip = chip
        self._max_seq_len = manifest.dims.max_seq_len
        self._indirect = manifest.max_beam_width > 1
        self._communicator = communicator
        self._mem_max_seq_len = manifest.encoder.max_seq_len if manifest.encoder else 0
        segments = [step for step in chip.all_steps if isinstance(step, GraphStep)]
        options = _session_options(placement, len(chip.steps), threads)
        self._sessions = {step.path: _load(case_dir, step, options) for step in segments}
        self._caches, self._memory = _allocate(manifest, chip, max_batch_size)
        self._outputs = {step.path: self._made(step) for step in segments}
        self._last_uses = self._find_last_uses(chip.steps, {"logits"})
        self._encoder_uses = self._find_last_uses(chip.encoder.steps, set(self._memory)) \
            if chip.encoder else []
        self._bindings: dict[tuple[str, int, int], ort.IOBinding] = {}

    def run(self, batch: PackedBatch) -> np.ndarray:
        values = {"input_ids": batch.input_ids, "position_ids": batch.position_ids,
                  "cu_seqlens": batch.cu_seqlens, "past_lens": batch.past_lens,
                  "logits_indices": batch.logits_indices}
        if self._indirect:
            values["cache_indirection"] = batch.rows_of_positions(self._max_seq_len)
        if batch.memory is not None:
            values["memory_starts"] = batch.memory.rows * np.int32(self._mem_max_seq_len)
            values["encoder_sequence_length"] = batch.memory.encoder_sequence_length
            values.update((name, memory.reshape(-1, memory.shape[-1]))
                          for name, memory in self._memory.items())
        self._run_steps(self._chip.steps, self._last_uses, batch, values)
        return values["logits"]

    def encode(self, batch: PackedBatch, rows: Sequence[int]) -> None:
        assert self._chip.encoder is not None
        values = {"input_ids": batch.input_ids, "position_ids": batch.position_ids,
                  "cu_seqlens": batch.cu_seqlens}
        self._run_steps(self._chip.encoder.steps, self._encoder_uses, batch, values)
        for name, memory in self._memory.items():
            for row, start, end in zip(rows, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
                memory[row, :end - start] = values[name][start:end]

    def _run_steps(self, steps: Steps, last_uses: list[list[str]], batch: PackedBatch,
                   values: dict[str, np.ndarray]) -> None:
        """Run a program; what it makes is added to `values`."""
        rank = self._chip.rank
        for step, finished in zip(steps, last_uses, strict=True):
            if isinstance(step, GraphStep):
                self._run_graph(step, batch, values)
            elif step.kind == "all_reduce":
                values[step.output] = self._communicator.all_reduce(rank, values[step.input])
            else:
                values[step.output] = self._communicator.all_gather(rank, values[step.input])
            for name in finished:
                del values[name]

    def copy_row(self, source: int, target: int, length: int) -> None:
        for cache in self._caches.values():
            cache[target, :, :length] = cache[source, :, :length]

    def _run_graph(self, step: GraphStep, batch: PackedBatch,
                   values: dict[str, np.ndarray]) -> None:
        """Run one ONNX file; its outputs, but for the caches, are added to `values`."""
        binding = self._binding(step, batch.first_row, batch.batch_size)
        sizes = {"num_tokens": len(batch.input_ids), "num_logits": len(batch.logits_indices)}
        for name in step.inputs:
            if name not in self._caches:
                array = values[name]
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, shape in self._outputs[step.path]:
            made = np.empty([size if isinstance(size, int) else sizes[size] for size in shape],
                            np.float32)
            binding.bind_output(name, "cpu", 0, made.dtype, made.shape, made.ctypes.data)
            values[name] = made
        try:
            self._sessions[step.path].run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise LlmcError(f"ONNX Runtime failed in '{step.path}': {_first_line(error)}") \
                from error

    def _binding(self, step: GraphStep, first_row: int, batch_size: int) -> ort.IOBinding:
        """The step's binding for these cache rows, with the caches bound in place."""
        key = (step.path, first_row, batch_size)
        if key not in self._bindings:
            binding = self._sessions[step.path].io_binding()
            for name in step.inputs:
                if name in self._caches:
                    rows = self._caches[name][first_row:first_row + batch_size]
                    for bind, bound in ((binding.bind_input, name),
                                        (binding.bind_output, f"{name}_out")):
                        bind(bound, "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            self._bindings[key] = binding
        return self._bindings[key]

    def _made(self, step: GraphStep) -> list[tuple[str, list[int | str]]]:
        """Name and shape of what a graph makes besides caches; refuses one that is not what the
        manifest says.
        """
        session = self._sessions[step.path]
        inputs, outputs = session.get_inputs(), session.get_outputs()
        fits = {tensor.name for tensor in inputs} == set(step.inputs) \
            and {tensor.name for tensor in outputs} == set(step.outputs)
        made = []
        for tensor in (*inputs, *outputs):
            cache = self._cache(tensor.name)
            fits = fits and (cache is None or tuple(tensor.shape[1:]) == cache.shape[1:])
        for tensor in outputs:
            if self._cache(tensor.name) is None:
                made.append((tensor.name, tensor.shape))
                fits = fits and tensor.type == "tensor(float)" and all(
                    isinstance(size, int) or size in _SIZES for size in tensor.shape)
        if not fits:
            raise LlmcError(f"'{step.path}' has other inputs or outputs than {MANIFEST_NAME} says; "
                            f"compile the model again")
        return made

    def _find_last_uses(self, steps: Steps, wanted: set[str]) -> list[list[str]]:
        """For each step, the tensors that nothing needs after it."""
        seen = set(wanted)
        uses = []
        for step in reversed(steps):
            names = {*step.inputs, *step.outputs}
            uses.append([name for name in names - seen if self._cache(name) is None])
            seen |= names
        return uses[::-1]

    def _cache(self, name: str) -> np.ndarray | None:
        """The cache that a tensor is, before or after its update."""
        return self._caches.get(name.removesuffix("_out"))


def _load(case_dir: Path, step: GraphStep, options: ort.SessionOptions) -> ort.InferenceSession:
    path = case_dir / step.path
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise LlmcError(f"ONNX Runtime cannot load '{path}': {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _allocate(manifest: Manifest, chip: Chip, max_batch_size: int) -> \
        tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By name, the KV caches, float32 [max_batch_size, num_kv_heads, max_seq_len, head_dim], and
    the encoder's memory, float32 [max_batch_size, mem_max_seq_len, num_kv_heads * head_dim].
    """
    caches, memory = {}, {}
    try:
        for layer, cache in enumerate(chip.cache):
            for kind in ("key", "value"):
                caches[f"{kind}_cache_{layer}"] = np.zeros(
                    (max_batch_size, cache.num_kv_heads, manifest.dims.max_seq_len,
                     cache.head_dim), np.float32)
        if manifest.encoder and chip.encoder:
            for tensor in chip.encoder.outputs:
                memory[tensor.name] = np.zeros((max_batch_size, manifest.encoder.max_seq_len,
                                                int(tensor.shape[-1])), np.float32)
    except (MemoryError, ValueError) as error:
        raise LlmcError(f"there is no memory for the KV cache of {max_batch_size} sequences of "
                        f"{manifest.dims.max_seq_len} positions; lower max_batch_size, or compile "
                        f"with a smaller --max_seq_len") from error
    return caches, memory


def _session_options(placement: Placement, steps: int, threads: int) -> ort.SessionOptions:
    """Threads for one rank: a pool of its own, or where many graphs would each have one, the pool
    of the process.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised
    if steps > 1 and len(placement.cores) > 1 and not placement.pinned:
        _make_shared_pool(threads)
        options.use_per_session_threads = False
        return options
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = len(placement.cores)
    if placement.pinned and len(placement.cores) > 1:  # the first core is the calling thread's
        options.add_session_config_entry(
            "session.intra_op_thread_affinities",
            ";".join(str(core + 1) for core in placement.cores[1:]))
    if steps > 1:  # those that wait must not keep cores busy
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _make_shared_pool(threads: int) -> None:
    """Make the process's pool; the first model's size stays, as ONNX Runtime cannot change it."""
    try:
        ort.set_global_thread_pool_sizes(threads, 1)
    except Exception as error:  # onnxruntime's exceptions share no base class
        if "already been created" not in str(error):
            raise
