"""ONNX Runtime on CPU cores.

The KV cache is allocated once and bound as input and output of every step, so a step appends to it
in place. Rows that are not used yet take no memory: the operating system gives pages when they are
written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.collectives import Communicator
from llmc.runtime.devices import Placement
from llmc.runtime.manifest import Chip, GraphStep, Manifest


class CpuEngine:
    """One rank on ONNX Runtime. See `Engine`."""

    def __init__(self, manifest: Manifest, chip: Chip, case_dir: Path, placement: Placement,
                 communicator: Communicator, max_batch_size: int) -> None:
        self._chip = chip
        self._communicator = communicator
        self._vocab = manifest.dims.padded_vocab_size
        self._takes_positions = any(tensor.name == "position_ids" for tensor in chip.inputs)
        self._max_seq_len = manifest.dims.max_seq_len
        self._caches: dict[str, np.ndarray] = {}
        for layer, cache in enumerate(chip.cache):
            shape = (max_batch_size, cache.num_kv_heads, self._max_seq_len, cache.head_dim)
            for kind in ("key", "value"):
                self._caches[f"{kind}_cache_{layer}"] = np.zeros(shape, np.float32)
        segments = [step for step in chip.steps if isinstance(step, GraphStep)]
        options = _session_options(placement, alone=len(segments) == 1)
        self._sessions = {}
        for step in segments:
            try:
                self._sessions[step.path] = ort.InferenceSession(
                    str(case_dir / step.path), options, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime's exceptions share no base class
                raise LlmcError(f"ONNX Runtime cannot load '{case_dir / step.path}': "
                                f"{str(error).splitlines()[0]}") from error
        self._bindings: dict[tuple[str, int, int], ort.IOBinding] = {}

    def run(self, batch: PackedBatch) -> np.ndarray:
        values = {"input_ids": batch.input_ids, "cu_seqlens": batch.cu_seqlens,
                  "past_lens": batch.past_lens, "logits_indices": batch.logits_indices}
        if self._takes_positions:
            values["position_ids"] = batch.position_ids
        rank = self._chip.rank
        for step in self._chip.steps:
            if isinstance(step, GraphStep):
                self._run_graph(step, batch, values)
            elif step.kind == "all_reduce":
                values[step.output] = self._communicator.all_reduce(rank, values.pop(step.input))
            else:
                values[step.output] = self._communicator.all_gather(rank, values.pop(step.input))
        return values["logits"]

    def copy_row(self, source: int, target: int, length: int) -> None:
        for cache in self._caches.values():
            cache[target, :, :length] = cache[source, :, :length]

    def _run_graph(self, step: GraphStep, batch: PackedBatch, values: dict[str, np.ndarray]) -> None:
        """Run one ONNX file; its outputs are added to `values`."""
        binding = self._binding(step, batch.first_row, batch.batch_size)
        for name in step.inputs:
            if name not in self._caches:
                array = values[name]
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        made = [name for name in step.outputs if name.removesuffix("_out") not in self._caches]
        if made == ["logits"]:
            logits = np.empty((len(batch.logits_indices), self._vocab), np.float32)
            binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
            self._sessions[step.path].run_with_iobinding(binding)
            values["logits"] = logits
            return
        for name in made:
            binding.bind_output(name, "cpu")
        self._sessions[step.path].run_with_iobinding(binding)
        caches = len(step.outputs) - len(made)  # bound first, once for all
        for name, value in zip(made, binding.get_outputs()[caches:], strict=True):
            values[name] = value.numpy()

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


def _session_options(placement: Placement, *, alone: bool) -> ort.SessionOptions:
    """Threads for one rank. Many sessions of one rank must not all spin while they wait."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = len(placement.cores)
    options.inter_op_num_threads = 1
    if placement.pinned and len(placement.cores) > 1:
        options.add_session_config_entry(
            "session.intra_op_thread_affinities",
            ";".join(str(core + 1) for core in placement.cores[1:]))
    if not alone:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
