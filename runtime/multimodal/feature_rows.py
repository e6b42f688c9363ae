"""Rows that an encoder reads in place of tokens, from features of audio."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.manifest import FeatureRows


def make_rows(features: NDArray[np.float32], layout: FeatureRows) -> NDArray[np.float32]:
    """Make the rows of an item, as `FeatureRows` describes.

    Args:
        features: float32 [frames, num_channels], of at most `num_frames` frames; the others are 0.

    Returns:
        float32 [num_rows, width].
    """
    before = -layout.offset
    size = (layout.num_rows - 1) * layout.stride + layout.window
    padded = np.zeros((max(size, before + layout.num_frames), layout.num_channels), np.float32)
    padded[before:before + len(features)] = features
    windows = np.lib.stride_tricks.sliding_window_view(padded, layout.window, axis=0)
    windows = windows[::layout.stride][:layout.num_rows].swapaxes(1, 2)
    rows = np.empty((layout.num_rows, layout.width), np.float32)
    columns = layout.window * layout.num_channels
    rows[:, :columns] = windows.reshape(layout.num_rows, columns)
    for index, mask in enumerate(layout.masks):
        positions = np.arange(layout.num_rows) * mask.stride + mask.offset
        rows[:, columns + index] = (positions >= 0) & (positions < mask.length)
    return rows
