"""Inputs of an image encoder that the runtime computes, and arrays that few encoders read.

See llmc.runtime.multimodal.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

GRID = "image_grid_thw"  # array of a processor: frames, rows and columns of an image's patches
SIZES = "image_sizes"  # array of a processor: height and width of an image, those of its pixels
FRAMES = "feature_attention_mask"  # array of a processor: which frames are of audio, not padding
UNREAD = frozenset({GRID, SIZES, FRAMES})  # arrays that few graphs read

PACK = "pack_image_features"

VisionFunction = Literal[
    "get_vision_cu_seqlens", "get_vision_position_ids", "get_vision_window_index",
    "get_vision_interpolation_indices_and_weights", "pack_image_features"]


class VisionInput(BaseModel):
    """Inputs that one function computes.

    Args:
        function: its name in transformers, in `vision_utils` or of a model's method.
        arguments: its arguments other than arrays.
        names: the inputs that get its results.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: VisionFunction
    arguments: dict[str, bool | int | str | tuple[tuple[int, int], ...]]
    names: tuple[str, ...]
