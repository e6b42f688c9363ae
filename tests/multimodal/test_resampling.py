"""Resampling equal to torch's antialiased interpolation of uint8, to the bit."""

import numpy as np
import pytest
import torch

from llmc.runtime.multimodal import resampling

MODES = {resampling.LANCZOS: "lanczos", resampling.BILINEAR: "bilinear",
         resampling.BICUBIC: "bicubic"}


@pytest.mark.parametrize("resample", MODES)
def test_every_pixel_is_torchs(resample):
    random = np.random.default_rng(resample)
    for round_ in range(40):
        height, width, new_height, new_width = (int(2 ** random.uniform(1, 8.5)) for _ in range(4))
        image = random.integers(0, 256, (3, height, width), np.uint8)
        if round_ % 2:  # black and white: sums beyond 0 and 255
            image = (image > 127).astype(np.uint8) * 255
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(image)[None], size=(new_height, new_width), mode=MODES[resample],
            antialias=True)[0].numpy()
        np.testing.assert_array_equal(resampling.resize(image, new_height, new_width, resample),
                                      expected)


@pytest.mark.parametrize(("size", "expected"), [((5, 7), "the same"), ((1, 1), "the mean")])
def test_a_constant_image_stays_constant(size, expected):
    image = np.full((3, 5, 7), 137, np.uint8)
    for resample in MODES:
        assert (resampling.resize(image, *size, resample) == 137).all(), expected


def test_a_long_axis_is_exact_beyond_the_integers_of_float32():
    image = np.random.default_rng(0).integers(0, 256, (1, 2, 9000), np.uint8)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(image)[None], size=(2, 9), mode="bicubic", antialias=True)[0].numpy()
    np.testing.assert_array_equal(resampling.resize(image, 2, 9, resampling.BICUBIC), expected)
