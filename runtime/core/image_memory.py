"""The images of a prompt that layers of its language model attend to (cross-attention).

A row of the encoder-output buffer has what an engine computes from a prompt's `PromptMemory`: rows
of its images, in an order such that each token attends to adjacent ones: tiles of all images, then
their padding. Which these are is decided as by transformers' processor of Llama 3.2 Vision:

| token | attends to |
| --- | --- |
| before the first image | all rows of all images, with those of padding |
| the token of an image, and those after it | the tiles of that image |
| after several images without a token between them | the tiles of these images |
| of a prompt without images | a row of zeros, for which attention gives zeros |
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from llmc.artifacts.manifest import ImageMemory
from llmc.artifacts.vision_input import TILES
from llmc.errors import LlmcError
from llmc.runtime.multimodal.items import MediaItem, PlaceholderRange


@dataclass(frozen=True)
class MemoryView:
    """Rows that some tokens of a prompt attend to.

    Args:
        start: position of the first of these tokens.
        first: first row.
        length: number of rows.
        seen: whether the tokens are after an image.
    """

    start: int
    first: int
    length: int
    seen: bool


@dataclass(frozen=True, eq=False)
class PromptMemory:
    """Rows of a prompt's images.

    Args:
        pieces: images, each with the range of its rows. Empty: a row of zeros.
        views: what tokens attend to, by ascending `start` from 0.
    """

    pieces: Sequence[tuple[MediaItem, range]]
    views: Sequence[MemoryView]

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self.pieces) or 1

    def view(self, position: int) -> MemoryView:
        """What the token at a position attends to."""
        return self.views[bisect_right(self._starts, position) - 1]

    def stop(self, position: int) -> int | None:
        """The first position after this one whose token attends to other rows; None: none does."""
        after = bisect_right(self._starts, position)
        return self._starts[after] if after < len(self._starts) else None

    @property
    def positions(self) -> list[int]:
        """Positions of the tokens of images."""
        return [view.start for view in self.views if view.seen]

    @cached_property
    def key(self) -> bytes:
        """Bytes that identify the rows; empty without images."""
        text = " ".join(f"{item.digest} {rows.start} {rows.stop}" for item, rows in self.pieces)
        return hashlib.sha256(text.encode()).digest() if text else b""

    @cached_property
    def _starts(self) -> list[int]:
        return [view.start for view in self.views]


NO_IMAGES = PromptMemory((), (MemoryView(0, 0, 1, False),))


def prompt_memory(images: Sequence[PlaceholderRange], rows: ImageMemory) -> PromptMemory:
    """Order the rows of a prompt's images.

    Args:
        images: positions of the images.
        rows: of the model.

    Raises:
        LlmcError: they are more rows than the model was compiled for.
    """
    if not images:
        return NO_IMAGES
    images = sorted(images, key=lambda own: own.offset)
    counts = [int(own.item.arrays[TILES].sum()) * rows.rows_per_tile for own in images]
    pieces, views = [(own.item, range(count)) for own, count in zip(
        images, counts, strict=True)], list[MemoryView]()
    if images[0].offset:
        pieces += [(own.item, range(count, rows.num_rows)) for own, count in zip(
            images, counts, strict=True) if count < rows.num_rows]
        views.append(MemoryView(0, 0, len(images) * rows.num_rows, False))
    for first, stop in _adjacent([own.offset for own in images]):
        views += [MemoryView(images[last].offset, sum(counts[:first]),
                             sum(counts[first:last + 1]), True) for last in range(first, stop)]
    memory = PromptMemory(pieces, views)
    if len(memory) > rows.max_seq_len:
        raise LlmcError(f"the {len(images)} images of a prompt take {len(memory)} rows, layers "
                        f"attend to at most {rows.max_seq_len}; give fewer, or compile the model "
                        f"with --mem_max_seq_len {len(memory)}")
    return memory


def _adjacent(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [first, stop) of indices of consecutive positions."""
    borders = [index for index in range(1, len(positions))
               if positions[index] != positions[index - 1] + 1]
    return list(pairwise([0, *borders, len(positions)]))
