"""Bidirectional attention of prompts with images is found from the model's own masks."""

import numpy as np
import pytest
from multimodal_models import TEXTS, WHOLES
from transformers import CONFIG_MAPPING

import llmc
from llmc.compiler.frontend.image_masks import ImageMasks, form_of, image_masks
from llmc.compiler.frontend.masks import Visible
from llmc.compiler.graph.sdpa import WHOLE, WINDOWED

ROW = 90  # token of rows
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)


def config(name, **text):
    """A small config; `text` are fields of its text config."""
    base = CONFIG_MAPPING[WHOLES.get(name, name)]()
    known = TEXTS[name]
    kind = known.get("model_type", base.get_text_config().model_type)
    vision = {} if base.vision_config is None else {"vision_config": {
        **VISION, "model_type": base.vision_config.model_type}}
    return type(base)(text_config={**known, "model_type": kind, **text}, **vision, **{
        key: ROW for key in ("image_token_id", "image_token_index") if hasattr(base, key)})


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("gemma3", {}, ImageMasks("images", [WINDOWED] * 3)),
    ("gemma4", {"use_bidirectional_attention": None}, ImageMasks(token_id=0)),
    ("paligemma", {}, ImageMasks("prompt", [WINDOWED] * 3)),
    ("paligemma2", {}, ImageMasks("prompt", [WHOLE, WINDOWED] * 2)),
    ("qwen3_5", {}, ImageMasks()), ("llava", {}, ImageMasks())])
def test_masks_of_families(name, text, expected):
    assert image_masks(config(name, **text), ROW) == expected


@pytest.mark.parametrize(("use", "kinds"), [("vision", {"sliding_attention": WINDOWED})])
def test_layers_may_differ(use, kinds):
    known = config("gemma4", use_bidirectional_attention=use)
    found = image_masks(known, ROW)
    assert found.kind == "images"
    assert list(found.by_layer) == [kinds.get(kind, "") for kind in known.text_config.layer_types]


def test_images_that_see_each_other_are_refused():
    groups = np.array([-1, 0, 0, -1, 1, 1])
    query, key = np.ogrid[:6, :6]
    images = groups >= 0
    with pytest.raises(llmc.LlmcError, match="see others than those before them"):
        form_of((key <= query) | (images[:, None] & images), Visible(True, 0, 100), groups)


def test_a_window_may_hide_the_rest_of_an_image():
    groups = np.array([-1, *[0] * 5, -1, -1])
    query, key = np.ogrid[:8, :8]
    together = (groups[:, None] == groups) & (groups >= 0)
    causal, recent = key <= query, key > query - 3
    base = Visible(True, 3, 100)
    assert form_of(causal & recent, base, groups) == ""
    assert form_of((causal | together) & recent, base, groups) == WINDOWED
    assert form_of((causal & recent) | together, base, groups) == WHOLE
