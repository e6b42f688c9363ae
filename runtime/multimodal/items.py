"""Media items of a prompt: what an encoder reads, and where its rows go."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

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
        pixels: what the arrays of an image were made from, if they are fewer bytes.
    """

    modality: Modality
    arrays: Arrays
    replacement: str
    num_rows: int
    pixels: NDArray[np.uint8] | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the encoder reads: equal for equal items, whatever file they were.

        `pixels` are hashed in place of the arrays' elements.
        """
        digest = hashlib.sha256(self.modality.encode())
        for name in sorted(self.arrays):
            array = self.arrays[name]
            digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
            if self.pixels is None:
                digest.update(_bytes(array))
        if self.pixels is not None:
            digest.update(f"\0{self.pixels.shape}\0".encode())
            digest.update(_bytes(self.pixels))
        return digest.hexdigest()


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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
