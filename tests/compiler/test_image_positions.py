"""Positions of image tokens by axis, and rows that are added after layers, found by probing."""

import numpy as np
import pytest
import torch
from multimodal_models import tiny_model
from transformers import CONFIG_MAPPING

import llmc
from llmc.artifacts.manifest import PositionGrid
from llmc.compiler.frontend.deep_embeds import _layers_before
from llmc.compiler.frontend.position_grid import position_grid
from llmc.compiler.graph.rewrite import NoMatch
from llmc.compiler.passes.attention.rotary import Rotary, find_axes
from llmc.runtime.multimodal.rotary_positions import ImagePlace, rotary_positions


@pytest.mark.parametrize("family", [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v", "glm_ocr",
    "ernie4_5_vl_moe", "paddleocr_vl"])
def test_families_follow_the_rule(family):
    assert position_grid(CONFIG_MAPPING[family]()) == PositionGrid(merge_size=2)


def test_models_without_positions_by_axis_have_no_grid():
    assert position_grid(CONFIG_MAPPING["llava"]()) is None


def test_positions_of_another_rule_are_refused():
    with pytest.raises(llmc.LlmcError, match="'minicpmv4_7' have positions by axis that follow no "
                                             "known rule; compile the language model alone"):
        position_grid(CONFIG_MAPPING["minicpmv4_7"]())


def test_positions_of_a_prompt():
    own = rotary_positions(10, [ImagePlace(np.arange(2, 8), (1, 3, 2))])
    assert own.of_prompt.T.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
                                        [0, 1, 2, 2, 3, 3, 4, 4, 5, 6],
                                        [0, 1, 2, 3, 2, 3, 2, 3, 5, 6]]
    assert own.within(8, 12).tolist() == [[5] * 3, [6] * 3, [7] * 3, [8] * 3]
    assert own.within(11, 12).tolist() == [[8] * 3]


def test_deep_rows_are_added_where_the_models_code_adds_them():
    with torch.device("meta"):
        model = type(tiny_model("qwen3_vl"))(tiny_model("qwen3_vl").config)
    assert _layers_before(model, 2) == [0, 1]
    with pytest.raises(llmc.LlmcError, match="has deep rows, and its language model adds 3 of 4"):
        _layers_before(model, 4)


def test_deep_rows_of_an_unknown_kind_are_refused():
    with torch.device("meta"):
        model = type(tiny_model("llava"))(tiny_model("llava").config)
    with pytest.raises(llmc.LlmcError, match="'llava' has deep rows, and its language model takes "
                                             "no rows after its layers"):
        _layers_before(model, 1)


def _rotary():
    angles = np.outer(np.arange(9), [1.0, 0.5, 0.2, 0.1])
    return Rotary(8, False, np.cos(angles), np.sin(angles))


def _rotated(rotary, axes):
    """A rotation of some elements of a head at positions by axis."""
    def rotated(elements, positions):
        x = np.zeros((1, 1, len(positions), 8))
        x[..., elements] = 1.0
        own = Rotary(rotary.dim, rotary.interleaved, rotary.cos, rotary.sin, axes)
        return own.rotate(x, positions)[0, 0]
    return rotated


@pytest.mark.parametrize("axes", [(0, 0, 1, 2), (0, 1, 2, 0), (2, 1, 0, 1)])
def test_the_axis_of_each_pair_is_found(axes):
    rotary = _rotary()
    assert find_axes(_rotated(rotary, axes), rotary, 3) == axes


def test_a_pair_without_an_axis_is_refused():
    rotary = _rotary()
    summed = _rotated(rotary, (0, 0, 1, 0))

    def rotated(elements, positions):
        return summed(elements, np.repeat(positions.sum(1, keepdims=True) // 2, 3, axis=1))

    found = find_axes(rotated, rotary, 3)
    assert isinstance(found, NoMatch)
    assert "pair 0 of the rotary embedding follows the position on none of 3 axes" in found.reason
