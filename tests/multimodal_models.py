"""Tiny random image-text models, what their processors give, and their encoders' rows."""

import families
import numpy as np
import onnx
import onnxruntime as ort
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from llmc import plugins
from llmc.compiler.frontend import image
from llmc.runtime.multimodal import vision_inputs

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "depth": 3,
           "num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
           "out_hidden_size": 64, "image_size": 28, "patch_size": 14,
           "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "embed_dim": 32}
_MROPE = families.rope("default", mrope_section=[4, 2, 2])
_PARTIAL_MROPE = families.rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
# Vision and language models have equal numbers of layers, so that they could be confused.
TEXTS = {
    "gemma3": {**families.FAMILIES["gemma3_text"], "num_hidden_layers": 3},
    "gemma4": families.OWN_ATTENTION["gemma4_text"],
    "paligemma": {**families.UNPLANNED["gemma"], "model_type": "gemma"},
    "paligemma2": {**families.FAMILIES["gemma2"], "model_type": "gemma2"},
    "gemma4_large": {**families.OWN_ATTENTION["gemma4_text"], **families.GEMMA4_LARGE,
                     "use_bidirectional_attention": "vision"},
    "mistral3": families.FAMILIES["mistral"],
    "mistral4": {**families.LATENT["deepseek_v3"], "model_type": "mistral4", **families.rope(
        "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
        original_max_position_embeddings=16)},
    "qwen3_vl": {**families.FAMILIES["qwen3"], **_MROPE},
    "qwen3_vl_moe": {**families.MIXTURES["qwen3_moe"], **_MROPE},
    "qwen2_5_vl": {**families.FAMILIES["qwen2"], **_MROPE},
    "qwen3_5": {**families.HYBRIDS["qwen3_5_text"], "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2]}},
    "qwen3_5_moe": {**families.HYBRIDS["qwen3_5_moe_text"], "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2]}},
    "llava": families.FAMILIES["llama"],
    "llama4": families.OWN_ATTENTION["llama4_text"],
    "internvl": families.FAMILIES["qwen2"],
    "smolvlm": families.FAMILIES["llama"],
    "deepseek_vl": families.FAMILIES["llama"],
    "janus": families.FAMILIES["llama"],
    "vipllava": families.FAMILIES["llama"],
    "llava_next": families.FAMILIES["llama"],
    "llava_onevision": families.FAMILIES["qwen2"],
    "lighton_ocr": families.FAMILIES["qwen3"],
    "qianfan_ocr": families.FAMILIES["qwen3"],
    "got_ocr2": families.FAMILIES["qwen2"],
    "aya_vision": families.UNPLANNED["cohere2"],
    "cohere2_vision": families.UNPLANNED["cohere2"],
    "exaone4_5": families.UNPLANNED["exaone4"],
    "qwen2_vl": {**families.FAMILIES["qwen2"], **_MROPE},
    "glm4v": {**families.UNPLANNED["glm"], **_PARTIAL_MROPE},
    "glm46v": {**families.UNPLANNED["glm"], **_PARTIAL_MROPE},
    "glm_ocr": {**families.UNPLANNED["glm"], **_PARTIAL_MROPE},
    "idefics3": families.FAMILIES["llama"],
}
# Models whose language model is part of another class.
WHOLES = {"mistral4": "mistral3", "paligemma2": "paligemma", "gemma4_large": "gemma4"}
# Fields of the whole config. One row of four patches.
_WHOLE = {"mm_tokens_per_image": 1, "scale_factor": 2, "alignment_intermediate_size": 48}
_OWN_WHOLE = {
    "vipllava": {"vision_feature_layer": [-1, -3]},
    "llava_next": {"image_grid_pinpoints": [[112, 224], [224, 112], [224, 224], [336, 112],
                                            [112, 336]]},
    "llava_onevision": {"image_grid_pinpoints": [
        [96 * row, 96 * column] for row in range(1, 5) for column in range(1, 5)],
        "vision_aspect_ratio": "anyres_max_4"}}


def tiny_model(family, token_id=families.VOCAB - 1, text=(), whole=(), **vision):
    """A random image-text model whose every parameter affects the output.

    Args:
        token_id: token of rows.
        text: fields of the text config.
        whole: fields of the whole config.
        vision: fields of the vision config.
    """
    base = CONFIG_MAPPING[WHOLES.get(family, family)]()
    kinds = {"text_config": base.get_text_config(), "vision_config": base.vision_config}
    if kinds["vision_config"] is None:
        kinds["vision_config"] = CONFIG_MAPPING[f"{WHOLES.get(family, family)}_vision"]()
    known = kinds["vision_config"].to_dict()
    sizes = {"text_config": TEXTS[family],
             "vision_config": {name: size for name, size in _VISION.items() if name in known}}
    sizes["text_config"] = {**sizes["text_config"], **dict(text)}
    sizes["vision_config"] |= vision
    config = type(base)(
        **{kind: {"model_type": given.model_type, **sizes[kind]} for kind, given in kinds.items()},
        **{name: token_id for name in ("image_token_id", "video_token_id", "image_token_index")
           if hasattr(base, name)},
        **{name: value for name, value in (
            _WHOLE | _OWN_WHOLE.get(family, {}) | dict(whole)).items() if hasattr(base, name)})
    return families.randomized(
        AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(*grids, patch=14, temporal=2):
    """What Qwen-VL's processors give for images with these numbers of rows and columns."""
    return [{"pixel_values": pixels(rows * columns, 3 * temporal * patch**2),
             "image_grid_thw": np.array([[1, rows, columns]])} for rows, columns in grids]


def encoder_rows(model, arrays):
    """Rows of transformers' encoder, and those of deep layers."""
    with torch.no_grad():
        output = image.features_owner(model).get_image_features(
            **{name: torch.from_numpy(array) for name, array in arrays.items()}, return_dict=True)
    if getattr(output, "pooler_output", None) is None:  # Llama 4's forward projects
        with torch.no_grad():
            output.pooler_output = model.multi_modal_projector(output.last_hidden_state)
    several = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [torch.cat(list(rows)).reshape(-1, rows[0].shape[-1]).numpy() for rows in several]


def session(proto, model):
    """Load an exported encoder, with the model's parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for node in proto.graph.node:
        if node.domain == plugins.DOMAIN:
            function = plugins.registry()[node.op_type].function(
                {own.name: onnx.helper.get_attribute_value(own) for own in node.attribute},
                node.input, "cpu")
            node.overload = function.overload
            if all(own.overload != function.overload for own in proto.functions):
                proto.functions.append(function)
    del proto.opset_import[:]
    proto.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in (
        ("", plugins.OPSET), (plugins.DOMAIN, 1), ("com.microsoft", 1)))
    external = [own.name for own in proto.graph.initializer
                if own.data_location == onnx.TensorProto.EXTERNAL]
    options = ort.SessionOptions()
    options.add_external_initializers(external, [ort.OrtValue.ortvalue_from_numpy(
        parameters[name.removeprefix("model.")].detach().numpy()) for name in external])
    return ort.InferenceSession(proto.SerializeToString(), options,
                                providers=["CPUExecutionProvider"])


def run_encoder(loaded, computed, arrays):
    """Run an exported encoder on what a processor gives for one image."""
    feeds = dict(arrays)
    for own in computed:
        feeds |= vision_inputs.of_arrays(own, arrays)
    names = {own.name for own in loaded.get_inputs()}
    return loaded.run(None, {name: array for name, array in feeds.items() if name in names})
