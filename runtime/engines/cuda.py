"""llmc's own engine on an NVIDIA GPU: a thin shell over `llmc._cuda`."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.attention.metadata import PackedBatch
from llmc.runtime.manifest import Chip, GraphStep, Manifest
from llmc.runtime.schedule import Schedule, read_schedule

_SIZES = {"num_tokens": -1, "num_logits": -2, "batch": -3, "batch_plus_1": -4}
_MAX_LOGITS = 512  # rows of logits that one step makes at most; longer requests take several
_BLOCK = 128  # max_tokens is a multiple, so that every value of the arena is aligned


def extension() -> ModuleType:
    """The compiled extension.

    Raises:
        LlmcError: it was not built, or cuBLASLt is missing.
    """
    if find_spec("llmc._cuda") is None:
        raise LlmcError("this installation of llmc has no CUDA engine; build it from a checkout "
                        "where nvcc is, as csrc/README.md says")
    _load_cublas()
    try:
        from llmc import _cuda
    except ImportError as error:
        raise LlmcError(f"the CUDA engine cannot be loaded ({error}); install nvidia-cublas, or "
                        f"put libcublasLt.so.13 on the library path") from error
    return _cuda


def _load_cublas() -> None:
    """Make the nvidia-cublas package's library known to the loader, where there is one."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(root).glob("*/lib/libcublasLt.so.13"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            return


def device_count() -> int:
    """How many GPUs there are.

    Raises:
        LlmcError: there is none, or no driver, or no extension.
    """
    count, reason = extension().devices()
    if not count:
        raise LlmcError(f"there is no NVIDIA GPU here ({reason or 'none was found'}); run this "
                        f"model where one is, or compile it with --target cpu")
    return count


class CudaEngine:
    """One rank on one GPU. See `Engine`; greedy decoding also runs on the device alone.

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
        step = chip.steps[0]
        assert isinstance(step, GraphStep)
        self._schedule = schedule = read_schedule(case_dir / step.path)
        self._vocab = manifest.dims.vocab_size
        self._max_logits = max(max_batch_size, min(_MAX_LOGITS, max_tokens))
        try:
            self._engine = cuda.Engine(
                device=device, dtype=manifest.dtype, max_batch=max_batch_size,
                max_tokens=-(-max_tokens // _BLOCK) * _BLOCK,
                max_logits=-(-self._max_logits // 8) * 8, max_seq_len=manifest.dims.max_seq_len,
                token_bytes=schedule.token_bytes, logit_bytes=schedule.logit_bytes)
            _build(self._engine, schedule, self._vocab)
            _load_weights(self._engine, schedule, case_dir / chip.path / "weights.safetensors")
        except self._errors as error:
            raise LlmcError(f"the model cannot be loaded onto GPU {device}: {error}") from error

    def run(self, batch: PackedBatch) -> np.ndarray:
        self.submit(batch)
        logits = np.empty((len(batch.logits_indices), self._vocab), np.float32)
        self._engine.read_logits(logits)
        return logits

    def trace(self, batch: PackedBatch) -> dict[str, np.ndarray]:
        """Execute a step and return every value that it makes, in order, by its tensor's name.

        float32 [num_tokens or num_logits, width] each. The host waits after every node.
        """
        sizes: dict[int | str, int] = {"num_tokens": len(batch.input_ids),
                                       "num_logits": len(batch.logits_indices)}
        numbers = [number for node in self._schedule.nodes for number in node.outputs
                   if number >= 0]
        values = {}
        self._engine.watch(numbers)
        try:
            self.submit(batch, prefill=True)  # decoding skips a node
            for number in numbers:
                tensor = self._schedule.tensors[number]
                value = np.empty([sizes.get(dim, dim) for dim in tensor.shape], np.float32)
                self._engine.read_watched(number, value)
                values[tensor.name] = value
        finally:
            self._engine.watch([])
        return values

    def submit(self, batch: PackedBatch, *, prefill: bool = False) -> None:
        """Start a step; its logits stay on the device."""
        lengths = np.diff(batch.cu_seqlens)
        decode = not prefill and bool((lengths == 1).all()) and \
            len(batch.logits_indices) == len(lengths)
        try:
            self._engine.run(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.past_lens,
                             np.ascontiguousarray(batch.logits_indices, np.int64), batch.first_row,
                             decode)
        except self._errors as error:
            raise LlmcError(f"the CUDA engine: {error}") from error

    def decode(self, tokens: Sequence[int], past_lens: Sequence[int], steps: int) -> np.ndarray:
        """Greedy steps on the device alone, from each sequence's newest token.

        Returns int64 [steps, batch]. The host waits once, at the end.
        """
        try:
            self._engine.begin_decode(np.asarray(tokens, np.int64),
                                      np.asarray(past_lens, np.int32), [])
            self._engine.decode(steps)
            chosen, _ = self._engine.history()
        except self._errors as error:
            raise LlmcError(f"the CUDA engine: {error}") from error
        return np.asarray(chosen, np.int64).reshape(steps, len(tokens))

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._engine.copy_row(source, target, length)


def _build(engine: Any, schedule: Schedule, vocab_size: int) -> None:
    """Declare the schedule's tensors and nodes; the numbers are the schedule's own."""
    for number, tensor in enumerate(schedule.tensors):
        shape = [_SIZES[dim] if isinstance(dim, str) and dim in _SIZES else dim
                 for dim in tensor.shape]
        if tensor.kind == "input":
            made = engine.add_input(tensor.name, tensor.dtype)
        elif tensor.kind == "weight":
            made = engine.add_weight(tensor.dtype, shape)
        elif tensor.kind == "cache":
            made = engine.add_cache(shape[1:])
        else:
            made = engine.add_value(tensor.dtype, shape, tensor.offset, tensor.per_logit)
        assert made == number
    for node in schedule.nodes:
        engine.add_node(node.op, node.fields, node.inputs, node.outputs)
    engine.set_logits(schedule.logits, vocab_size)
    engine.finish()


def _load_weights(engine: Any, schedule: Schedule, path: Path) -> None:
    """Copy each weight from the mapped file to the device."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:start]))
    for number, tensor in enumerate(schedule.tensors):
        if tensor.kind == "weight":
            low, high = header[tensor.name]["data_offsets"]
            engine.load_weight(number, data[start + low:start + high], 0)
    engine.synchronize()
