"""Encoders of the images and audio clips of steps, and the cache of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmc.artifacts.manifest import Manifest
from llmc.runtime.core.image_memory import PromptMemory
from llmc.runtime.core.step import EncoderInput, Step
from llmc.runtime.engines.image_encoder import ImageEncoder, MediaEncoder
from llmc.runtime.multimodal.items import MediaItem, Modality


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
        self._width = manifest.memory.width if manifest.memory else 0
        self._rows: dict[int, np.ndarray] = {}  # by place: [num_outputs, num_rows, width]

    def fill(self, step: Step) -> Step:
        """Encode a step's items, and put the rows that it needs into it."""
        if self._width:
            step = self._fill_memory(step)
        for place in step.free_media:
            del self._rows[place]
        for place, item in step.encode_media.items():
            rows = self._encode(item)
            deep = self._num_outputs - len(rows)  # audio has no rows of deep layers
            self._rows[place] = np.pad(rows, ((0, deep), (0, 0), (0, 0))) if deep else rows
        if not len(step.media_rows):
            return step
        pieces = [self._rows[place][:, first:first + count]
                  for place, first, count in step.media_rows.tolist()]
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        if len(step.embeds):
            given = np.zeros((len(rows), *step.embeds.shape), np.float32)
            given[0] = step.embeds
            rows = np.concatenate([given, rows], axis=1)
        return replace(step, embeds=rows[0], deep_embeds=rows[1:])

    def _encode(self, item: MediaItem) -> np.ndarray:
        """Rows of an item, [num_outputs, num_rows, width]."""
        return self._encoders[item.modality].encode(item)

    def _fill_memory(self, step: Step) -> Step:
        """Encode the images that layers attend to, and mark tokens that are not after one."""
        if any(isinstance(source, PromptMemory) for source in step.encode.values()):
            step = replace(step, encode=self._rows_of_prompts(step.encode))
        if step.memory is None or step.memory.seen.all():
            return step
        ids = np.where(step.memory.seen, -1, 0).astype(np.int32)
        return replace(step, embeds=np.zeros((1, self._width), np.float32),
                       embed_ids=np.repeat(ids, step.seq_lens))

    def _rows_of_prompts(self, encode: Mapping[int, EncoderInput]) -> dict[int, EncoderInput]:
        """Encode the images of prompts; return the rows in the order of each prompt."""
        sources = [own for own in encode.values() if isinstance(own, PromptMemory)]
        items = {item.digest: item for own in sources for item, _ in own.pieces}
        rows = {digest: self._encode(item)[0] for digest, item in items.items()}
        return {row: self._rows_of_prompt(own, rows) if isinstance(own, PromptMemory) else own
                for row, own in encode.items()}

    def _rows_of_prompt(self, source: PromptMemory, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        if not source.pieces:
            return np.zeros((1, self._width), np.float32)
        return np.concatenate([rows[item.digest][own.start:own.stop]
                               for item, own in source.pieces])
