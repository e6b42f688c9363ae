"""Media items of a prompt: what an encoder reads, and where its rows go."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.manifest import Modality as Modality

if TYPE_CHECKING:
    from llmc.runtime.multimodal.image_processors.base import Arrays

PLURALS: dict[Modality, str] = {"image": "images", "audio": "audio clips"}


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One preprocessed image or audio clip.

    Args:
        arrays: inputs of the encoder program by name, as transformers' processor gives them for
            this item alone.
        replacement: text in place of the item's placeholder.
        num_rows: rows of the encoder that the prompt takes; 0 with cross-attention.
    """

    modality: Modality
    arrays: Arrays
    replacement: str
    num_rows: int

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the encoder reads: equal for equal items, whatever file they were."""
        digest = hashlib.sha256(self.modality.encode())
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class PlaceholderRange:
    """The positions of one item in a prompt.

    Args:
        offset: first position whose token belongs to the item's rows.
        length: positions from there to the last one.
        positions: positions that take the rows, in order: [num_rows].
    """

    item: MediaItem
    offset: int
    length: int
    positions: NDArray[np.int64]
