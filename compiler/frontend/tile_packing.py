"""Packing of tiles by a model's `pack_image_features`, which `tile_rows` computes at run time.

The method is run on random features, and must agree with `tile_rows` for images of several sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from llmc.artifacts.vision_input import PACK, SIZES
from llmc.compiler.options import LANGUAGE_MODEL_ONLY
from llmc.errors import LlmcError
from llmc.runtime.multimodal.image_processors.anyres import best_canvas
from llmc.runtime.multimodal.image_processors.base import Dims
from llmc.runtime.multimodal.tile_rows import tile_rows

NAMES = ("row_indices", "row_weights")  # of the results
# Heights and widths of images: wide, tall, square, small, one pixel high.
_PROBED = ((97, 301), (1350, 383), (2000, 2000), (30, 40), (1, 120))
_WIDTH = 3  # of random features


def packer(model: Any) -> Any:
    """Return the module whose code packs tiles; None if absent."""
    return next((module for _, module in reversed(list(model.named_modules()))
                 if hasattr(module, PACK)), None)


def settings(owner: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `tile_rows`.

    Args:
        owner: see `packer`.
        named: arguments that its method gets.
    """
    vision, limit = owner.config.vision_config, named.get("vision_aspect_ratio")
    return {"tile": vision.image_size, "side": vision.image_size // vision.patch_size,
            "max_num_patches": int(limit.removeprefix("anyres_max_")) if limit else 0,
            "pinpoints": owner.config.image_grid_pinpoints}


def check(owner: Any, method: Any, named: Mapping[str, Any], num_rows: int) -> None:
    """Check that `tile_rows` packs as the model's method does.

    Args:
        owner: see `packer`.
        method: its method.
        named: arguments that it gets.
        num_rows: rows of features of a tile.

    Raises:
        LlmcError: it does not.
    """
    own = settings(owner, named)
    for height, width in _PROBED:
        canvas = best_canvas(Dims(height, width), tuple(map(tuple, own["pinpoints"])))
        tiles = 1 + canvas.height * canvas.width // own["tile"] ** 2
        for count in {1, tiles}:
            generator = torch.Generator().manual_seed(count)
            features = torch.randn((count, num_rows, _WIDTH), generator=generator)
            given = {**named, "image_newline": torch.randn(_WIDTH, generator=generator)}
            expected = method([features], image_sizes=[(height, width)], **given)[0][0]
            rows = pack([features], given["image_newline"], [
                torch.from_numpy(array) for array in tile_rows(
                    {"pixel_values": np.empty((1, count)), SIZES: np.array([[height, width]])},
                    **own)])
            if rows.shape != expected.shape or (rows - expected).abs().max() > 1e-4:
                raise LlmcError(f"'{owner.config.model_type}' packs the rows of tiles in a way "
                                f"that llmc does not support; {LANGUAGE_MODEL_ONLY}")


def pack(features: Sequence[torch.Tensor], separator: torch.Tensor,
         results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack the features of one image.

    Args:
        features: one tensor [tiles, num_rows, width].
        separator: [width].
        results: those of `tile_rows`.
    """
    rows = torch.cat([features[0].reshape(-1, separator.shape[0]), separator[None]])
    if len(results) == 1:
        return rows[results[0][:, 0]]
    indices, weights = results
    # One column after another takes less memory than all at once.
    terms = [rows[indices[:, column]] * weights[:, column, None]
             for column in range(indices.shape[1])]
    return functools.reduce(torch.add, terms)
