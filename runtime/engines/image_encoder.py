"""Encoders of images and audio on ONNX Runtime.

The host runs them on the cores of all ranks, before they run the step. An image encoder with a
program for a device has two or three steps: the host computes the inputs of the program, and
perhaps the rows of the prompt from its outputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from llmc.artifacts.manifest import MANIFEST_NAME, GraphStep, ImageEncoderProgram, Manifest
from llmc.artifacts.vision_input import UNREAD
from llmc.errors import LlmcError
from llmc.runtime.engines import cpu_sessions
from llmc.runtime.multimodal import vision_inputs
from llmc.runtime.multimodal.items import MediaItem, Modality

_MOST = 256 << 20  # bytes that are kept for images of several sizes


class MediaEncoder:
    """An encoder of images or audio clips.

    Args:
        manifest: of a model with it.
        case_dir: its case directory.
        kind: image or audio.
        threads: cores to use.

    Attributes:
        ops: names of the ops in its graph.

    Raises:
        LlmcError: the graph cannot be loaded or does not match the manifest.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, kind: Modality, threads: int) -> None:
        self._program, self._kind = manifest.media[kind], kind
        self._attended = manifest.memory.num_rows if manifest.memory else None
        self._steps = [step for step in self._program.steps if isinstance(step, GraphStep)]
        step = self._steps[0]
        self._path = step.path
        self._session = cpu_sessions.load(case_dir, step, _options(threads))
        facts = cpu_sessions.facts(step.path, self._session)
        cpu_sessions.check_versions(manifest, step.path, facts["ops"])
        self.ops = {*facts["ops"]}
        self._check()

    def encode(self, item: MediaItem) -> np.ndarray:
        """Run the encoder on one item: [num_outputs, num_rows, width].

        Raises:
            LlmcError: it gives another number of rows than the prompt takes, or fails.
        """
        arrays = item.arrays
        read = {tensor.name for tensor in self._program.inputs}
        feeds = {name: array for name, array in arrays.items()
                 if name in read or name not in UNREAD}
        for own in self._program.computed if isinstance(self._program, ImageEncoderProgram) else ():
            feeds |= vision_inputs.of_arrays(own, arrays)
        made = self._run(feeds)
        rows = made if isinstance(made, np.ndarray) else np.stack(made)
        if isinstance(self._program, ImageEncoderProgram) and self._program.padded:
            rows = rows[:, :item.num_rows]
        if self._attended is None and rows.shape[1] != item.num_rows:
            raise LlmcError(f"the {self._kind} encoder gives {rows.shape[1]} rows, the prompt has "
                            f"{item.num_rows} tokens for them; compile the model with the "
                            f"processor files that belong to its weights")
        if self._attended not in (None, rows.shape[1]):
            raise LlmcError(f"the {self._kind} encoder gives {rows.shape[1]} rows, "
                            f"{MANIFEST_NAME} says {self._attended}; compile the model again")
        return rows

    def _run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray] | np.ndarray:
        """Return the rows of each output, float32 [num_rows, width], in an array or a list."""
        computed = self._run_session(self._session, feeds)
        return [computed[tensor.name] for tensor in self._program.outputs]

    def _run_session(self, session: ort.InferenceSession, feeds: Mapping[str, np.ndarray]) -> \
            dict[str, np.ndarray]:
        """Return the outputs of a graph by name."""
        names = [tensor.name for tensor in session.get_outputs()]
        smaller = "fewer or smaller images" if self._kind == "image" else "shorter audio"
        with cpu_sessions.translate_errors(f"ONNX Runtime failed in '{self._path}'",
                                           f"give {smaller}"):
            return dict(zip(names, session.run(names, feeds), strict=True))

    def _check(self) -> None:
        """Compare the graph with the manifest."""
        program, session = self._program, self._session
        inputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in program.inputs}
        widths = {tensor.name: (tensor.dtype, tensor.width) for tensor in program.outputs}
        outputs = cpu_sessions.tensor_types(session.get_outputs())  # with a known number of rows
        step = self._steps[0]
        fits = widths == {name: (dtype, shape[-1]) for name, (dtype, shape) in outputs.items()} \
            if len(program.steps) == 1 else outputs.keys() == {*step.outputs}
        if cpu_sessions.tensor_types(session.get_inputs()) != inputs or not fits:
            raise LlmcError(f"'{self._path}' has other inputs or outputs than {MANIFEST_NAME} "
                            f"lists; compile the model again")


class ImageEncoder(MediaEncoder):
    """An image encoder; see `MediaEncoder`."""

    def __init__(self, manifest: Manifest, case_dir: Path, threads: int) -> None:
        super().__init__(manifest, case_dir, "image", threads)


class DividedImageEncoder(ImageEncoder):
    """Computes the inputs of a program by ONNX Runtime, and runs it on a device.

    A third step computes the rows of the prompt from the outputs of both. What depends on an
    image's size alone is kept for images of the same size.

    Args:
        run: runs the program; converted inputs by name to its outputs, float32 [num_rows, width]
            each.
        convert: makes what the program takes of an input, by its name.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, threads: int,
                 run: Callable[[Mapping[str, np.ndarray]], list[np.ndarray] | np.ndarray],
                 convert: Callable[[str, np.ndarray], np.ndarray] = lambda name, array: array) -> \
            None:
        super().__init__(manifest, case_dir, threads)
        self._run_program, self._convert = run, convert
        self._kept = OrderedDict[tuple[object, ...], _Kept]()  # least recently used first
        self._rows: ort.InferenceSession | None = None
        if len(self._steps) > 2:
            step = self._steps[2]
            self._rows = cpu_sessions.load(case_dir, step, _options(threads))
            found = [{own.name for own in tensors}
                     for tensors in (self._rows.get_inputs(), self._rows.get_outputs())]
            if found != [{*step.inputs}, {*step.outputs}]:
                raise LlmcError(f"'{step.path}' has other inputs or outputs than {MANIFEST_NAME} "
                                f"lists; compile the model again")

    def _run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray] | np.ndarray:
        known, inputs = self._inputs_of(feeds)
        device, outputs = self._steps[1], [tensor.name for tensor in self._program.outputs]
        made = self._run_program(inputs)
        if self._rows is None and [*device.outputs] == outputs:
            return made
        known = {**known, **dict(zip(device.outputs, made, strict=True))}
        if self._rows is not None:
            known |= self._run_session(self._rows, {
                own.name: known[own.name] for own in self._rows.get_inputs()})
        return [known[name] for name in outputs]

    def _inputs_of(self, feeds: Mapping[str, np.ndarray]) -> \
            tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Outputs of the first step, and the converted inputs of the program."""
        assert isinstance(self._program, ImageEncoderProgram)
        reshaped = self._program.reshaped
        kept = self._of_size(feeds, reshaped) if reshaped else self._computed(feeds, reshaped)
        known = {name: feeds[source].reshape(kept.shapes[name])
                 for name, source in reshaped.items()}
        return {**kept.known, **known}, {
            **kept.inputs, **{name: self._convert(name, own) for name, own in known.items()}}

    def _of_size(self, feeds: Mapping[str, np.ndarray], reshaped: Mapping[str, str]) -> _Kept:
        """What is known of an image of this size, or is computed for it."""
        key = tuple((name, array.shape, b"" if name in reshaped.values() else array.tobytes())
                    for name, array in sorted(feeds.items()))
        self._kept[key] = kept = self._kept.pop(key, None) or self._computed(feeds, reshaped)
        while len(self._kept) > 1 and sum(own.bytes for own in self._kept.values()) > _MOST:
            self._kept.popitem(last=False)
        return kept

    def _computed(self, feeds: Mapping[str, np.ndarray], reshaped: Mapping[str, str]) -> _Kept:
        known = self._run_session(self._session, feeds)
        inputs = with_equal_segments({name: known[name] for name in self._steps[1].inputs})
        return _Kept({name: array.shape for name, array in known.items() if name in reshaped},
                     {name: array for name, array in known.items() if name not in reshaped},
                     {name: self._convert(name, array) for name, array in inputs.items()
                      if name not in reshaped})


@dataclass(frozen=True)
class _Kept:
    """What the host computes from an image's size.

    Args:
        shapes: of inputs of the program that are an array of the image, by name.
        known: other outputs of the first step.
        inputs: other inputs of the program, converted.
    """

    shapes: Mapping[str, tuple[int, ...]]
    known: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return sum(own.nbytes for part in (self.known, self.inputs) for own in part.values())


def with_equal_segments(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add empty segments, so that each cu_seqlens has as many."""
    segments = {name: array for name, array in inputs.items() if name.startswith("cu_seqlens")}
    most = max(map(len, segments.values()), default=0)
    return {**inputs, **{name: np.pad(array, (0, most - len(array)), mode="edge")
                         for name, array in segments.items()}}


def _options(threads: int) -> ort.SessionOptions:
    options = cpu_sessions.common_options()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # ranks wait for it
    return options
