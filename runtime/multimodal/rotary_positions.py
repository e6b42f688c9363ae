"""Positions of tokens by axis (frame, row, column), in models whose rotary embedding has them.

    prompt     a  b  [3 × 2 image]      c  d
    frame      0  1  2  2  2  2  2  2   5  6
    row        0  1  2  2  3  3  4  4   5  6
    column     0  1  2  3  2  3  2  3   5  6

Tokens that are generated continue with the position after the last, while the position in the KV
cache is the number of tokens before: `delta` is the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.vision_input import GRID
from llmc.plugins.attention.op import AXES
from llmc.runtime.multimodal.items import PlaceholderRange


@dataclass(frozen=True, eq=False)
class ImagePlace:
    """An image in a prompt.

    Args:
        positions: int [num_rows], positions in the prompt of its rows.
        grid: frames, rows and columns of these.
    """

    positions: np.ndarray
    grid: tuple[int, int, int]

    @staticmethod
    def of(positions: np.ndarray, grid: np.ndarray, merge_size: int) -> ImagePlace:
        """An image whose patches have a grid, int [1, 3] (frames, rows, columns)."""
        frames, rows, columns = grid.reshape(-1).tolist()
        return ImagePlace(positions, (frames, rows // merge_size, columns // merge_size))


@dataclass(frozen=True, eq=False)
class RotaryPositions:
    """Positions of a sequence's tokens by axis.

    Args:
        of_prompt: int32 [len(prompt), 3].
        delta: difference of later tokens' position, equal on all axes, and that in the KV cache.
    """

    of_prompt: np.ndarray
    delta: int

    def within(self, start: int, stop: int) -> np.ndarray:
        """Positions of the tokens from `start` to `stop`, int32 [stop - start, 3]."""
        known = self.of_prompt[start:stop]
        if len(known) == stop - start:
            return known
        later = np.arange(max(start, len(self.of_prompt)), stop, dtype=np.int32) + self.delta
        return np.concatenate([known, np.repeat(later[:, None], AXES, axis=1).astype(np.int32)])


IN_CACHE = RotaryPositions(np.empty((0, AXES), np.int32), 0)  # of a sequence without images


def positions_of_items(length: int, ranges: Sequence[PlaceholderRange],
                       merge_size: int) -> RotaryPositions:
    """Positions by axis of a prompt with images.

    Args:
        length: of the prompt.
        ranges: positions of the images, in order.
        merge_size: rows and columns of patches of a row of the encoder.
    """
    return rotary_positions(length, [
        ImagePlace.of(own.positions, own.item.arrays[GRID], merge_size) for own in ranges])


def rotary_positions(length: int, images: Sequence[ImagePlace]) -> RotaryPositions:
    """Positions by axis of a prompt; see `PositionGrid`.

    Args:
        length: of the prompt.
        images: in order.
    """
    result, done, position = np.empty((length, AXES), np.int32), 0, 0
    for image in images:
        first = int(image.positions[0])
        result[done:first] = np.arange(position, position + first - done)[:, None]
        position += first - done
        own = position + np.stack(np.unravel_index(np.arange(len(image.positions)), image.grid), 1)
        result[image.positions] = own
        position += max(image.grid[1:])
        done = int(image.positions[-1]) + 1
    result[done:] = np.arange(position, position + length - done)[:, None]
    return RotaryPositions(result, position - done)
