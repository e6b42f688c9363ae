"""Positions by axis of a model's image tokens (M-RoPE), determined by running its `get_rope_index`.

transformers' models with such positions have this method. It is run without weights on prompts with
images of several grids and audio clips of several lengths, and must agree with `rotary_positions`,
which the runtime uses: rows of audio have the positions of text.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from itertools import zip_longest
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
_TEXT = 3  # tokens before, between and after items


def has_positions_by_axis(model: torch.nn.Module) -> bool:
    """Whether tokens of a model have positions by axis."""
    return any(hasattr(module, "get_rope_index") for module in model.modules())


def position_grid(config: Any, clips: Sequence[tuple[int, int]] = ()) -> PositionGrid | None:
    """Return the positions of an image-text model's image rows by axis; None if it has none.

    Args:
        config: a transformers config.
        clips: frames and rows of audio clips, whose rows have the positions of text.

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
        if _follows(owner, grid, clips):
            return grid
    raise LlmcError(f"images of '{config.model_type}' have positions by axis that follow no known "
                    f"rule; {LANGUAGE_MODEL_ONLY}")


def _follows(owner: Any, grid: PositionGrid, clips: Sequence[tuple[int, int]]) -> bool:
    """Whether `get_rope_index` gives the positions of a grid, with 0, 1 and several items."""
    prompts = [_Prompt(owner.config, _GRIDS[:images], clips[:count])
               for images in range(len(_GRIDS) + 1) for count in range(len(clips) + 1)]
    return all(np.array_equal(_by_model(owner, grid.merge_size, own),
                              rotary_positions(own.ids.shape[1], own.images).of_prompt)
               for own in prompts)


class _Prompt:
    """A prompt with images and audio clips in turn.

    Args:
        config: of the model, with the token ids of items.
        grids: of the images, in tokens.
        clips: frames and rows of the clips.
    """

    def __init__(self, config: Any, grids: Sequence[tuple[int, int, int]],
                 clips: Sequence[tuple[int, int]]) -> None:
        self.grids, self.frames = grids, [frames for frames, _ in clips]
        named = {name: value for name, value in config.to_dict().items()
                 if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)}
        text = next(token for token in range(len(named) + 1) if token not in named.values())
        ids, self.images = [text] * _TEXT, list[ImagePlace]()
        for shape, clip in zip_longest(grids, clips):
            for kind, count in (("image", 0 if shape is None else int(np.prod(shape))),
                                ("audio", 0 if clip is None else clip[1])):
                if not count:
                    continue
                if kind == "image":
                    self.images.append(ImagePlace(np.arange(len(ids), len(ids) + count), shape))
                start = "vision_start_token_id" if kind == "image" else "audio_start_token_id"
                ids[-1] = getattr(config, start, None) or text
                ids += [getattr(config, f"{kind}_token_id", None) or text] * count + [text] * _TEXT
        self.ids = torch.tensor([ids])


def _by_model(owner: Any, merge_size: int, prompt: _Prompt) -> np.ndarray:
    """Positions by the model, [length, 3]; empty if its method fails."""
    types = torch.zeros_like(prompt.ids)
    for place in prompt.images:
        types[0, place.positions] = 1
    given = {
        "input_ids": prompt.ids, "mm_token_type_ids": types,
        "attention_mask": torch.ones_like(prompt.ids),
        "image_grid_thw": torch.tensor([(t, rows * merge_size, columns * merge_size)
                                        for t, rows, columns in prompt.grids])
        if prompt.grids else None,
        "audio_seqlens": torch.tensor(prompt.frames) if prompt.frames else None}
    known = inspect.signature(owner.get_rope_index).parameters
    try:
        found, _ = owner.get_rope_index(**{key: value for key, value in given.items()
                                           if key in known})
        return np.asarray(found[:, 0].T.numpy())
    except Exception:  # of the model's code, which takes other arguments
        return np.empty((0, 0))
