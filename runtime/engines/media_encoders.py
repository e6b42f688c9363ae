"""Encoders of the images and audio clips of steps, and the cache of their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.runtime.core.step import Step
from llmc.runtime.engines.image_encoder import ImageEncoder, MediaEncoder
from llmc.runtime.multimodal.items import Modality


class MediaEncoders:
    """Encodes the images and audio clips of steps, and puts their rows into them.

    Args:
        manifest: of a model with such encoders.
        case_dir: its case directory.
        threads: cores to use.
        image: its image encoder, if a device runs a part of it; None: the host runs all of it.

    Attributes:
        ops: names of the ops in their graphs.

    Raises:
        LlmcError: a graph cannot be loaded or does not match the manifest.
    """

    def __init__(self, manifest: Manifest, case_dir: Path, threads: int,
                 image: ImageEncoder | None = None) -> None:
        self._encoders: dict[Modality, MediaEncoder] = {
            kind: image if kind == "image" and image is not None
            else MediaEncoder(manifest, case_dir, kind, threads) for kind in manifest.media}
        self.ops = {name for own in self._encoders.values() for name in own.ops}
        self._num_outputs = 1 + manifest.num_deep_embeds
        self._rows: dict[int, np.ndarray] = {}  # by place: [num_outputs, num_rows, width]

    def fill(self, step: Step) -> Step:
        """Encode a step's items, and put the rows that it needs into it."""
        for place in step.free_media:
            del self._rows[place]
        for place, item in step.encode_media.items():
            rows = self._encoders[item.modality].encode(item)
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
