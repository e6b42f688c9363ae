"""Positions by axis of a model's image tokens (M-RoPE), determined by running its `get_rope_index`.

transformers' models with such positions have this method. It is run without weights on prompts with
images of several grids, and must agree with `rotary_positions`, which the runtime uses.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from llmc.artifacts.manifest import PositionGrid
from llmc.compiler.frontend.image import IMAGE
from llmc.compiler.frontend.parts import build
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.runtime.multimodal.rotary_positions import ImagePlace, rotary_positions

# Frames, rows and columns of images in the probing prompt, in tokens.
_GRIDS = ((1, 2, 5), (1, 4, 1), (1, 3, 3))
_TEXT = 3  # tokens before, between and after images


def has_positions_by_axis(model: torch.nn.Module) -> bool:
    """Whether tokens of a model have positions by axis."""
    return any(hasattr(module, "get_rope_index") for module in model.modules())


def position_grid(config: Any) -> PositionGrid | None:
    """Return the positions of an image-text model's image rows by axis; None if it has none.

    Args:
        config: a transformers config.

    Raises:
        LlmcError: the model has positions by axis, but follows no known rule.
    """
    with torch.device("meta"):
        model = build(copy.deepcopy(config), IMAGE, False)
    owner = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
    if owner is None:
        return None
    vision = getattr(config, "vision_config", None)
    merge_size = getattr(vision, "spatial_merge_size", None)
    if isinstance(merge_size, int) and merge_size > 0:
        grid = PositionGrid(merge_size=merge_size)
        if _follows(owner, grid):
            return grid
    raise LlmcError(f"images of '{config.model_type}' have positions by axis that follow no known "
                    f"rule; {LANGUAGE_MODEL_ONLY}")


def _follows(owner: Any, grid: PositionGrid) -> bool:
    """Whether `get_rope_index` gives the positions of a grid, with 0, 1 and several images."""
    return all(np.array_equal(_by_model(owner, grid.merge_size, _GRIDS[:count]),
                              rotary_positions(*_prompt(_GRIDS[:count])).of_prompt)
               for count in range(len(_GRIDS) + 1))


def _prompt(grids: tuple[tuple[int, int, int], ...]) -> tuple[int, list[ImagePlace]]:
    """Length of a prompt with images of these grids, and their places."""
    places, length = [], _TEXT
    for each in grids:
        count = int(np.prod(each))
        places.append(ImagePlace(np.arange(length, length + count), each))
        length += count + _TEXT
    return length, places


def _by_model(owner: Any, merge_size: int, grids: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """Positions by the model, [length, 3]; empty if its method fails."""
    length, places = _prompt(grids)
    types = torch.zeros((1, length), dtype=torch.int64)
    for place in places:
        types[0, place.positions] = 1
    given = None if not grids else torch.tensor(
        [(t, rows * merge_size, columns * merge_size) for t, rows, columns in grids])
    try:
        found, _ = owner.get_rope_index(torch.zeros((1, length), dtype=torch.int64),
                                        mm_token_type_ids=types, image_grid_thw=given)
        return np.asarray(found[:, 0].T.numpy())
    except Exception:  # of the model's code, which takes other arguments
        return np.empty((0, 0))
