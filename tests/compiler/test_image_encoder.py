"""Image encoders: the exported graph gives the rows of transformers' for any image."""

import copy

import numpy as np
import pytest
import torch
from multimodal_models import encoder_rows, packed, pixels, run_encoder, session, tiny_model
from transformers import vision_utils

from llmc.artifacts.vision_input import VisionInput
from llmc.compiler.frontend import image, trace
from llmc.errors import LlmcError
from llmc.runtime.multimodal import vision_inputs

GRIDS = ((4, 6), (10, 8), (2, 2), (18, 10))
# By family: what the processor gives for images of several sizes.
SAMPLES = {
    "llava": [{"pixel_values": pixels(1, 3, 28, 28)}] * 2,
    "internvl": [{"pixel_values": pixels(tiles, 3, 28, 28)} for tiles in (2, 5, 1)],
    "gemma3": [{"pixel_values": pixels(tiles, 3, 28, 28)} for tiles in (2, 3, 1)],
    "llama4": [{"pixel_values": pixels(tiles, 3, 28, 28)} for tiles in (2, 5, 1)],
    "smolvlm": [{"pixel_values": pixels(1, tiles, 3, 28, 28)} for tiles in (2, 5, 1)],
    "llava_next": [{"pixel_values": pixels(1, tiles, 3, 28, 28), "image_sizes": np.array([size])}
                   for tiles, size in ((3, (25, 60)), (5, (97, 101)), (2, (20, 9)))],
    "glm4v": packed(*GRIDS), "qwen3_vl": packed(*GRIDS), "qwen2_5_vl": packed(*GRIDS)}
VISION = {"qwen2_5_vl": {"window_size": 56}, "llama4": {
    "intermediate_size": 128, "projector_input_dim": 40, "projector_output_dim": 40,
    "vision_output_dim": 40}}
WHOLE = {"llava_next": {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]}}


def export(model, samples):
    with trace.alone():
        return image.trace_image(copy.deepcopy(model.config), samples)


@pytest.mark.parametrize("family", SAMPLES)
def test_rows_are_those_of_transformers_for_images_of_any_size(family):
    """Tiles, packed patches, windows, deep rows; also of sizes that were not exported."""
    model = tiny_model(family, whole=WHOLE.get(family, {}), **VISION.get(family, {}))
    *known, new = SAMPLES[family]
    proto, computed = export(model, known)
    loaded = session(proto, model)
    for arrays in (*known, new):
        for rows, expected in zip(run_encoder(loaded, computed, arrays),
                                  encoder_rows(model, arrays), strict=True):
            assert rows.shape == expected.shape
            assert np.abs(rows - expected).max() < 1e-5 * max(np.abs(expected).max(), 1)


def test_an_array_that_the_encoder_does_not_take_is_named():
    with pytest.raises(LlmcError, match="the processor gives 'depth', which the image encoder"):
        export(tiny_model("llava"), [{"pixel_values": pixels(1, 3, 28, 28), "depth": pixels(1)}])


@pytest.mark.parametrize(("function", "arguments"), [
    ("get_vision_cu_seqlens", {}), ("get_vision_cu_seqlens", {"merge_temporal": True}),
    ("get_vision_position_ids", {"spatial_merge_size": 2}),
    ("get_vision_position_ids", {"spatial_merge_size": 1, "include_temporal": True}),
    ("get_vision_window_index", {"spatial_merge_size": 2, "window_size": 56, "patch_size": 14}),
    ("get_vision_window_index", {"spatial_merge_size": 2, "window_size": 112, "patch_size": 14}),
    *(("get_vision_interpolation_indices_and_weights", {
        "num_grid_per_side": 7, "mode": mode, "align_corners": align, "padding": padding,
        "spatial_merge_size": merge})
      for mode in ("bilinear", "bicubic") for align in (True, False)
      for padding in ("border", "zeros") for merge in (1, 2))])
def test_inputs_of_the_grid_are_those_of_transformers(function, arguments):
    grid = np.array([[1, 4, 6], [2, 10, 8], [1, 2, 2], [3, 18, 10]])
    expected = getattr(vision_utils, function)(torch.from_numpy(grid), **arguments)
    several = expected if isinstance(expected, tuple) else (expected,)
    names = tuple(f"input_{index}" for index in range(len(several)))
    own = vision_inputs.compute(
        VisionInput(function=function, arguments=arguments, names=names), grid)
    for name, value in zip(names, several, strict=True):
        assert own[name].dtype == value.numpy().dtype
        assert np.abs(own[name] - value.numpy()).max() <= (2e-6 if value.is_floating_point() else 0)
