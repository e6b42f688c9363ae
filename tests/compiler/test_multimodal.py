"""The language model compiles from checkpoints of multimodal models.
"""

import families
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import llmc
from llmc.compiler.check.diff import diff
from llmc.compiler.frontend import load

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "depth": 3,
           "num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
           "out_hidden_size": 64, "image_size": 28, "patch_size": 14,
           "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "embed_dim": 32}
_MROPE = families.rope("default", mrope_section=[4, 2, 2])
# Vision and language models have equal numbers of layers, so that they could be confused.
TEXTS = {
    "gemma3": {**families.FAMILIES["gemma3_text"], "num_hidden_layers": 3},
    "gemma4": families.OWN_ATTENTION["gemma4_text"],
    "mistral3": families.FAMILIES["mistral"],
    "mistral4": {**families.LATENT["deepseek_v3"], "model_type": "mistral4", **families.rope(
        "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
        original_max_position_embeddings=16)},
    "qwen3_vl": {**families.FAMILIES["qwen3"], **_MROPE},
    "qwen3_vl_moe": {**families.MIXTURES["qwen3_moe"], **_MROPE},
    "qwen2_5_vl": {**families.FAMILIES["qwen2"], **_MROPE},
    "llava": families.FAMILIES["llama"],
    "llama4": families.OWN_ATTENTION["llama4_text"],
    "internvl": families.FAMILIES["qwen2"],
}
# Models whose language model is part of another class.
WHOLES = {"mistral4": "mistral3"}
COMMON = ("gemma4", "mistral3", "qwen3_vl")
ROW = np.random.default_rng(3).integers(3, families.VOCAB - 3, 24).tolist()


def tiny_model(family):
    base = CONFIG_MAPPING[WHOLES.get(family, family)]()
    kinds = {"text_config": base.get_text_config(), "vision_config": base.vision_config}
    if kinds["vision_config"] is None:
        kinds["vision_config"] = CONFIG_MAPPING[f"{family}_vision"]()
    known = kinds["vision_config"].to_dict()
    sizes = {"text_config": TEXTS[family],
             "vision_config": {name: size for name, size in _VISION.items() if name in known}}
    config = type(base)(
        **{kind: {"model_type": given.model_type, **sizes[kind]} for kind, given in kinds.items()},
        **{name: families.VOCAB - 1 for name in ("image_token_id", "video_token_id",
                                                 "image_token_index") if hasattr(base, name)})
    return families.randomized(
        AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.thorough] * (family not in COMMON))
    for family in TEXTS])
def test_the_language_model_compiles_from_the_whole_checkpoint(family, tmp_path):
    model = tiny_model(family)
    cases = families.compile_sizes(families.save(model, tmp_path / "hf"), tmp_path, [1, 2])
    expected = families.reference_logits(model, ROW)
    for case in cases.values():
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(ROW), expected)
            session = llm.session(1)
            families.assert_close(session.extend([ROW[:9]])[0], expected[8])
            families.assert_close(session.extend([[ROW[9]]])[0], expected[9])


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl"])
def test_diff_compares_the_language_model(family, tmp_path):
    hf_dir = families.save(tiny_model(family), tmp_path / "hf")
    llmc.compile(hf_dir, tmp_path / "case", tp_size=2)
    compared = diff(tmp_path / "case", hf_dir, tokens=16)
    assert compared.verdict is None, compared


def test_a_note_reports_that_images_are_unsupported(tmp_path):
    hf_dir = families.save(tiny_model("mistral3"), tmp_path / "hf")
    sentence = ("input of images is not supported: only the language model of 'mistral3' is "
                "compiled")
    assert sentence in load(hf_dir).notes
    told = []
    llmc.compile(hf_dir, tmp_path / "case", progress=told.append)
    assert sentence in told


def test_an_unassigned_tensor_is_named(tmp_path):
    hf_dir = families.save(tiny_model("mistral3"), tmp_path / "hf")
    tensors = load_file(hf_dir / "model.safetensors")
    save_file({**tensors, "model.language_model.layers.0.mlp.more.weight": torch.ones(2, 2)},
              hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(llmc.LlmcError, match=r"has a tensor '[\w.]*layers.0.mlp.more.weight'"):
        llmc.compile(hf_dir, tmp_path / "case")
    (name,) = [name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight")
               and "language_model" in name]
    save_file({key: tensor for key, tensor in tensors.items() if key != name},
              hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(llmc.LlmcError, match=r"has no tensor '[\w.]*layers.1.mlp.up_proj.weight'"):
        llmc.compile(hf_dir, tmp_path / "case")
