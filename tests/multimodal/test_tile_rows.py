"""Rows of tiles are those of transformers' models that cut images into tiles."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from llmc.compiler.frontend import tile_packing
from llmc.errors import LlmcError
from llmc.runtime.multimodal.image_processors.anyres import best_canvas
from llmc.runtime.multimodal.image_processors.base import Dims
from llmc.runtime.multimodal.tile_rows import tile_rows

TILE, PATCH = 96, 16
SIDE = TILE // PATCH
CANVASES = [[TILE * rows, TILE * columns] for rows in range(1, 5) for columns in range(1, 5)]


@pytest.fixture(scope="module", params=["llava_next", "llava_onevision"])
def owner(request):
    """The module of a model that packs tiles, without values."""
    config = CONFIG_MAPPING[request.param]()
    config.vision_config.image_size, config.vision_config.patch_size = TILE, PATCH
    config.image_grid_pinpoints = CANVASES
    with torch.device("meta"):
        return tile_packing.packer(AutoModelForImageTextToText.from_config(config))


def limits(owner):
    """Arguments of the model's method and of ours."""
    if "next" in type(owner).__name__.lower():
        return {"vision_feature_select_strategy": "full"}, 0
    return {"vision_aspect_ratio": "anyres_max_2"}, 2


@pytest.mark.parametrize("size", [
    (30, 40), (97, 301), (350, 83), (479, 640), (1, 120), (1000, 1000), (2000, 700)])
def test_rows_are_those_of_transformers(owner, size):
    named, limit = limits(owner)
    canvas = best_canvas(Dims(*size), tuple(map(tuple, CANVASES)))
    for tiles in (1, 1 + canvas.height * canvas.width // TILE ** 2):
        features, separator = torch.randn(tiles, SIDE ** 2, 5), torch.randn(5)
        expected, _ = owner.pack_image_features([features], [size], image_newline=separator,
                                                **named)
        indices, *weights = tile_rows(
            {"pixel_values": np.empty((1, tiles)), "image_sizes": np.array([size])},
            tile=TILE, side=SIDE, max_num_patches=limit, pinpoints=CANVASES)
        rows = torch.cat([features.reshape(-1, 5), separator[None]]).numpy()[indices]
        rows = (rows * weights[0][..., None]).sum(1) if weights else rows[:, 0]
        assert rows.shape == expected[0].shape
        assert np.abs(rows - expected[0].numpy()).max() < 1e-5


def test_another_packing_is_refused(owner):
    named, _ = limits(owner)

    def reversed_rows(*args, **others):
        (rows,), lengths = owner.pack_image_features(*args, **others)
        return [rows.flip(0)], lengths

    tile_packing.check(owner, owner.pack_image_features, named, SIDE ** 2)
    with pytest.raises(LlmcError, match="packs the rows of tiles in a way"):
        tile_packing.check(owner, reversed_rows, named, SIDE ** 2)
