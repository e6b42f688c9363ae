"""The program of an image encoder on a GPU.

It runs one image at a time on a separate stream. Its memory is for images of a size; a larger
image makes it be loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.artifacts.program import Program, read_image_program
from llmc.artifacts.weight_file import WEIGHTS_NAME
from llmc.errors import LlmcError
from llmc.runtime.engines.cuda import SIZES, bytes_in, extension, load_weights
from llmc.runtime.engines.image_encoder import DividedImageEncoder, ImageEncoder

_PATCHES = 4096  # of the first size: a picture of 1024 x 1024 pixels in patches of 16 x 16
_ALIGNED = 128  # as max_tokens of CudaEngine
_BLOCK_SIZE = 16  # of the KV cache, which it lacks
_BACKEND = "llmc"  # attention to a KV cache, which it lacks


def load_image_encoder(manifest: Manifest, case_dir: Path, threads: int, device: int) -> \
        ImageEncoder:
    """Load the image encoder of a model for GPUs, with its program if it has one.

    Args:
        manifest: of a model with an image encoder.
        case_dir: its case directory.
        threads: of the host.
        device: index of the GPU.

    Raises:
        LlmcError: see `ImageEncoder` and `CudaEngine`.
    """
    assert manifest.image is not None
    if len(manifest.image.steps) == 1:
        return ImageEncoder(manifest, case_dir, threads)
    program = CudaImageProgram(manifest, case_dir, device)
    return DividedImageEncoder(manifest, case_dir, threads, program.run, program.convert)


def declare_image_program(declared: Any, program: Program) -> tuple[list[int], dict[str, int]]:
    """Declare a program to the extension's `Program`.

    Returns:
        Declared indices of its tensors, and those of its weights by name.

    Raises:
        CudaError: a node would read or write beyond a tensor.
    """
    numbers, weights = list[int](), dict[str, int]()
    for tensor in program.tensors:
        shape = [SIZES.get(dim, dim) for dim in tensor.shape]
        if tensor.kind == "value":
            numbers.append(declared.add_value(tensor.dtype, shape, tensor.offset,
                                              tensor.per_logit))
        elif tensor.kind == "columns":
            numbers.append(declared.add_columns(numbers[tensor.of], tensor.first, tensor.width))
        elif tensor.kind == "weight":
            numbers.append(declared.add_weight(tensor.dtype, shape))
            weights[tensor.name] = numbers[-1]
        else:
            numbers.append(declared.add_array(tensor.name, tensor.dtype, shape))
    for node in program.nodes:
        declared.add_node(node.op, node.fields,
                          [numbers[own] if own >= 0 else -1 for own in node.inputs],
                          [numbers[own] for own in node.outputs])
    declared.set_outputs([numbers[own] for own in program.outputs])
    return numbers, weights


def limits_of(program: Program, patches: int, rows: int, segments: int) -> dict[str, Any]:
    """Keyword arguments of the extension's `Program`."""
    values = next(own.dtype for own in program.tensors if own.kind == "value")
    return dict(dtype=values, max_batch=segments, max_tokens=patches, max_logits=rows,
                max_seq_len=patches, block_size=_BLOCK_SIZE, token_bytes=program.token_bytes,
                logit_bytes=program.logit_bytes)


class CudaImageProgram:
    """A program on a GPU.

    Raises:
        LlmcError: it cannot be loaded.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, device: int) -> None:
        self._cuda, self._device = extension(), device
        self._program, self._stored = read_image_program(manifest, case_dir)
        self._path = case_dir / manifest.chips[0].path / WEIGHTS_NAME
        self._arrays = {own.name: own.dtype for own in self._program.tensors
                        if own.kind == "input"}
        self._engine: Any = None
        self._numbers: list[int] = []
        self._sizes = (0, 0, 0)
        self._load((_PATCHES, _PATCHES, _PATCHES))

    def convert(self, name: str, array: np.ndarray) -> np.ndarray:
        """Bytes of an input in its dtype, uint8 [rows, bytes of a row]."""
        return bytes_in(self._arrays[name], array).reshape(len(array), -1)

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray] | np.ndarray:
        """Run it on one image: converted inputs by name to float32 [num_rows, width] of each
        output, which are one array if they have equal sizes.

        Raises:
            LlmcError: the GPU fails, or has too little memory.
        """
        lengths = {role: max((len(array) for name, array in inputs.items()
                              if name.partition(".")[0] == role), default=1)
                   for role in ("patches", "merged_rows", "cu_seqlens")}
        sizes = lengths["patches"], lengths["merged_rows"], lengths["cu_seqlens"] - 1
        if self._engine is None or any(size > most for size, most in
                                       zip(sizes, self._sizes, strict=True)):
            self._load(tuple(map(max, sizes, self._sizes)))
        with self._errors("failed"):
            self._engine.encode_image([inputs[name] for name in self._arrays], *sizes)
            return self._read(sizes)

    def _read(self, sizes: tuple[int, ...]) -> list[np.ndarray] | np.ndarray:
        tensors = [self._program.tensors[number] for number in self._program.outputs]
        shapes = [(sizes[int(own.per_logit)], own.width) for own in tensors]
        made: list[np.ndarray] | np.ndarray = [np.empty(shape, np.float32) for shape in shapes] \
            if len({*shapes}) > 1 else np.empty((len(shapes), *shapes[0]), np.float32)
        for number, rows in zip(self._program.outputs, made, strict=True):
            self._engine.read_watched(self._numbers[number], rows.reshape(-1))
        return made

    def _load(self, sizes: tuple[int, ...]) -> None:
        """Load it for images of these patches, rows and segments."""
        self._engine = None  # frees its memory
        patches, rows, segments = sizes
        patches = -(-max(patches, _PATCHES) // _ALIGNED) * _ALIGNED
        limits = limits_of(self._program, patches, min(rows, patches), min(segments, patches))
        with self._errors("cannot be loaded"):
            declared = self._cuda.Program(**limits)
            self._numbers, weights = declare_image_program(declared, self._program)
            engine = self._cuda.Engine(declared, self._device, _BACKEND)
            load_weights(engine, weights, self._path, self._stored)
        self._engine, self._sizes = engine, (patches, limits["max_logits"], limits["max_batch"])

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Convert the extension's errors to LlmcError."""
        try:
            yield
        except self._cuda.CudaError as error:
            raise LlmcError(f"the image encoder {what} on GPU {self._device}: {error}; give "
                            f"smaller images, or lower gpu_memory_utilization") from error
