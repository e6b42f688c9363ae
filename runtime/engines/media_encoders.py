"""Encoders of images and audio on ONNX Runtime, and the cache of their rows.

The host runs them on the cores of all ranks, before they run the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort

from llmc.artifacts.manifest import MANIFEST_NAME, GraphStep, ImageEncoderProgram, Manifest
from llmc.artifacts.vision_input import GRID, UNREAD
from llmc.errors import LlmcError
from llmc.runtime.core.step import Step
from llmc.runtime.engines import cpu_sessions
from llmc.runtime.multimodal import vision_inputs
from llmc.runtime.multimodal.items import Modality


class MediaEncoders:
    """Encodes the images and audio clips of steps, and puts their rows into them.

    Args:
        manifest: of a model with such encoders.
        case_dir: its case directory.
        threads: cores to use.

    Attributes:
        ops: names of the ops in their graphs.

    Raises:
        LlmcError: a graph cannot be loaded or does not match the manifest.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, threads: int) -> None:
        self._encoders = {kind: MediaEncoder(manifest, case_dir, kind, threads)
                          for kind in manifest.media}
        self.ops = {name for own in self._encoders.values() for name in own.ops}
        self._num_outputs = 1 + manifest.num_deep_embeds
        self._rows: dict[int, np.ndarray] = {}  # by place: [num_outputs, num_rows, width]

    def fill(self, step: Step) -> Step:
        """Encode a step's items, and put the rows that it needs into it."""
        for place in step.free_media:
            del self._rows[place]
        for place, item in step.encode_media.items():
            rows = self._encoders[item.modality].encode(item.arrays)
            if rows.shape[1] != item.num_rows:
                raise LlmcError(f"the {item.modality} encoder gives {rows.shape[1]} rows, the "
                                f"prompt has {item.num_rows} tokens for them; compile the model "
                                f"with the processor files that belong to its weights")
            deep = self._num_outputs - len(rows)  # audio has no rows of deep layers
            self._rows[place] = np.pad(rows, ((0, deep), (0, 0), (0, 0)))
        if not len(step.media_rows):
            return step
        rows = np.concatenate([self._rows[place][:, first:first + count]
                               for place, first, count in step.media_rows.tolist()], axis=1)
        if len(step.embeds):
            given = np.zeros((len(rows), *step.embeds.shape), np.float32)
            given[0] = step.embeds
            rows = np.concatenate([given, rows], axis=1)
        return replace(step, embeds=rows[0], deep_embeds=rows[1:])


class MediaEncoder:
    """An encoder of images or of audio clips.

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
        step, = self._program.steps
        assert isinstance(step, GraphStep)
        self._path = step.path
        self._session = cpu_sessions.load(case_dir, step, _options(threads))
        facts = cpu_sessions.facts(step.path, self._session)
        cpu_sessions.check_versions(manifest, step.path, facts["ops"])
        self.ops = {*facts["ops"]}
        self._check()

    def encode(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the encoder on one item: [num_outputs, num_rows, width]."""
        feeds = {name: array for name, array in arrays.items() if name not in UNREAD}
        if isinstance(self._program, ImageEncoderProgram):
            for own in self._program.computed:
                feeds |= vision_inputs.compute(own, arrays[GRID])
        smaller = "fewer or smaller images" if self._kind == "image" else "shorter audio"
        with cpu_sessions.translate_errors(f"ONNX Runtime failed in '{self._path}'",
                                           f"give {smaller}"):
            return np.stack(self._session.run(
                [tensor.name for tensor in self._program.outputs], feeds))

    def _check(self) -> None:
        """Compare the graph with the manifest."""
        program, session = self._program, self._session
        inputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in program.inputs}
        widths = {tensor.name: (tensor.dtype, tensor.width) for tensor in program.outputs}
        outputs = cpu_sessions.tensor_types(session.get_outputs())  # with a known number of rows
        if cpu_sessions.tensor_types(session.get_inputs()) != inputs or widths != {
                name: (dtype, shape[-1]) for name, (dtype, shape) in outputs.items()}:
            raise LlmcError(f"'{self._path}' has other inputs or outputs than {MANIFEST_NAME} "
                            f"lists; compile the model again")


def _options(threads: int) -> ort.SessionOptions:
    options = cpu_sessions.common_options()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # ranks wait for it
    return options
