"""Sweep of all causal LM classes of transformers as tiny random models on the cpu target.

    python tests/sweep.py [FAMILY …] [--jobs 2] [--output tests/sweep.md]

Rows of named families are replaced; other rows are kept. A test compares README.md's number of
matching classes with tests/sweep.md.

Each family runs in a separate process, at tp 1 and at tp 2, in float32. It matches if the logits of
a prompt are within 1e-4 of transformers' range and 8 greedy tokens are equal; otherwise llmc must
raise LlmcError. Anything else is a bug of llmc. Not part of `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMIT = 400  # seconds
ORDER = ("wrong", "failed", "matches", "refused", "untried")
MOST = 200_000_000  # parameters: a larger model is not tiny
# Small values by config field; other fields keep their defaults.
SIZES: dict[str, Any] = {
    "n_embd": 64, "emb_dim": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 96,
    "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "ffn_dim": 96,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 40, "embed_dim": 64, "num_layers": 3,
    "num_heads": 4, "word_embed_proj_dim": 64, "moe_k": 2, "moe_num_active_experts": 2,
    "num_experts_per_token": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_head_dim": 24, "state_size": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "chunk_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "time_step_rank": 4, "mamba_dt_rank": 4, "n_groups": 1, "mamba_d_ssm": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "lru_width": 64, "attention_window_size": 8, "index_n_heads": 2,
    "index_head_dim": 16, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "global_head_dim": 16, "num_kv_shared_layers": 0, "attention_hidden_size": 64,
    "attention_chunk_size": 8, "intermediate_size_mlp": 96, "floor_scale": 5,
}
# Fields that must be consistent.
FITTING: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
    **{family: {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
                "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
       for family in ("blenderbot", "plbart", "whisper")},
    "longcat_flash": {"head_dim": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    **{family: {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                "indexer_budget": 64, "indexer_compress_ratio": 4}
       for family in ("qwen4_exp", "qwen4_exp_text")},
    "moshi": {"sliding_window": 64},  # all positions
    "xlm": {"causal": True},
    "zamba": {"num_hidden_layers": 5, "head_dim": 32, "attention_hidden_size": 128,
              "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_top_k": 2}},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "xmod": {"default_language": "en_XX"},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1},
}
# Small sizes of other parts of multimodal configs.
_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
            "num_hidden_layers": 1}
_BYTES = {**_ENCODER, "vocab_size": 260, "hidden_size_global": 64}
PARTS: dict[str, dict[str, Any]] = {
    "blt": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 50, "encoder_config": _BYTES,
            "decoder_config": _BYTES, "global_config": {**_ENCODER, "hidden_size": 64},
            "patcher_config": {**_ENCODER, "vocab_size": 260}},
    "emu3": {"vq_config": {"codebook_size": 8, "embed_dim": 32, "latent_channels": 32,
                           "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1,
                           "attn_resolutions": [1], "hidden_size": 32},
             "vocabulary_map": {"<|extra_200|>": 90, "<image>": 91, **{
                 f"<|visual token {i:06}|>": 92 + i for i in range(8)}}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "num_hidden_layers": 2,
                                         "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
    "mllama": {"vision_config": {"hidden_size": 32, "intermediate_size": 48, "attention_heads": 4,
                                 "num_hidden_layers": 1, "num_global_layers": 1, "image_size": 28,
                                 "vision_output_dim": 64, "intermediate_layers_indices": [0]}},
    "phi4_multimodal": {
        "vision_config": {**_ENCODER, "image_size": 28, "crop_size": 28},
        "audio_config": {**_ENCODER, "num_blocks": 1, "ext_pw_out_channel": 32,
                         "nemo_conv_channels": 32}},
}


def tiny_config(family: str) -> Any:
    """Return a small config, of a multimodal class that of its language model if possible.

    Raises:
        KeyError, ValueError, TypeError and others of transformers: unknown family or sizes.
    """
    import families
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    known = {**families.FAMILIES, **families.LATENT, **families.OWN_ATTENTION,
             **families.UNPLANNED, **families.MIXTURES, **families.HYBRIDS}
    if family in known:
        return AutoConfig.for_model(family, **known[family])
    base = CONFIG_MAPPING[family](**PARTS.get(family, {}))
    text = base.get_text_config(decoder=True)
    names = text.to_dict()
    sizes = {name: value for name, value in {**families.SIZES, **SIZES}.items()
             if name in names and (names[name] is not None or name in ("head_dim", "pad_token_id"))}
    if "vocab_size_per_layer_input" in names:
        sizes["vocab_size_per_layer_input"] = families.VOCAB
    if "kv_lora_rank" in sizes:  # no grouped-query attention
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    if len(set(names.get("layer_types") or ())) > 1:  # one layer of each kind, and the first again
        kinds = list(dict.fromkeys(names["layer_types"]))
        sizes |= {"layer_types": [*kinds, kinds[0]], "num_hidden_layers": len(kinds) + 1}
    own = PARTS.get(family, {}) if text is base else {}
    tiny = type(text)(**{**sizes, **FITTING.get(family, {}), **own})
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return tiny
    parts = {"text_config": tiny.to_dict()} if "text_config" in base.sub_configs else {}
    return type(base)(**PARTS.get(family, {}), **parts)


def tiny_model(family: str) -> Any:
    """Return a random model whose every parameter affects the output."""
    import families
    import torch

    from llmc.compiler.frontend.parts import causal_lm_class
    config = tiny_config(family)
    auto = causal_lm_class(config)
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in auto.from_config(config).parameters())
    except (AttributeError, ValueError) as error:
        raise ValueError(f"transformers makes no causal LM of a {type(config).__name__}: "
                         f"{error}") from error
    if count > MOST:
        raise ValueError(f"{count:,} parameters")
    return families.randomized(auto.from_config(config, attn_implementation="eager"))


def try_family(family: str, directory: Path) -> dict[str, Any]:
    """Return the result of a family: `matches`, `refused`, `wrong`, `failed` or `untried`.

    With it the reason and the seconds to a refusal.
    """
    import numpy as np
    import torch

    import llmc
    try:
        model = tiny_model(family)
        model.save_pretrained(directory / "hf")
        count = model.config.get_text_config().vocab_size
        ids = np.random.default_rng(0).integers(3, count - 3, 24).tolist()
        with torch.no_grad():
            truth = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
            tokens = ids[:12]
            for _ in range(8):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                                  .argmax()))
    except Exception as error:  # transformers' own
        return {"outcome": "untried", "why": _line(error)}
    found: dict[str, Any] = {"outcome": "matches", "why": "tp 1 and 2"}
    for tp_size in (1, 2):
        begun = time.perf_counter()
        try:
            llmc.compile(directory / "hf", directory / f"tp{tp_size}", tp_size=tp_size)
            with llmc.LLM(directory / f"tp{tp_size}") as llm:
                error = float(np.abs(llm.logits(ids) - truth).max() / np.ptp(truth))
                made = llm.generate([ids[:12]], llmc.SamplingParams(max_tokens=8, ignore_eos=True))
        except llmc.LlmcError as refusal:
            seconds = round(time.perf_counter() - begun, 1)
            if tp_size == 1:
                return {"outcome": "refused", "why": _line(refusal), "seconds": seconds}
            return {**found, "why": f"tp 1; tp 2 is refused: {_line(refusal)}", "seconds": seconds}
        except Exception as failure:
            return {"outcome": "failed", "why": f"tp {tp_size}: {type(failure).__name__}: "
                                                f"{_line(failure)}"}
        if error > 1e-4 or list(made[0].token_ids) != tokens[12:]:
            return {"outcome": "wrong", "why": f"tp {tp_size}: logits off by {error:.1e} of their "
                                               f"range, tokens {list(made[0].token_ids)} for "
                                               f"{tokens[12:]}"}
    return found


def _line(error: BaseException) -> str:
    """Return the error's first line without the model's path."""
    words = " ".join(str(error).split())
    return re.sub(r"'[^']*/hf'", "'hf'", words)[:300] or type(error).__name__


def run_family(family: str) -> dict[str, Any]:
    """Run `try_family` in a separate process."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, __file__, family, "--inside", directory], timeout=LIMIT,
                capture_output=True, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        except subprocess.TimeoutExpired:
            return {"outcome": "failed", "why": f"not done after {LIMIT} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"outcome": "failed", "why": f"ended with {done.returncode}: "
                                            f"{' '.join(done.stderr.split())[-300:]}"}
    read: dict[str, Any] = json.loads(lines[-1])
    return read


def table(results: dict[str, dict[str, Any]], date: str) -> str:
    """Return the Markdown table, failures first; `date` is that of the last run."""
    import transformers
    counts = Counter(result["outcome"] for result in results.values())
    lines = [f"# Causal LM classes of transformers {transformers.__version__} on target cpu",
             "", f"By tests/sweep.py, last on {date}: " + ", ".join(
                 f"{counts[outcome]} {outcome}" for outcome in ORDER) + ".", "",
             "| family | outcome | | refused after (s) |", "| --- | --- | --- | --- |"]
    for name, result in sorted(results.items(),
                               key=lambda item: (ORDER.index(item[1]["outcome"]), item[0])):
        why = result["why"].replace("|", "\\|")
        lines.append(f"| {name} | {result['outcome']} | {why} | {result.get('seconds', '')} |")
    return "\n".join(lines) + "\n"


def kept(path: Path) -> dict[str, dict[str, Any]]:
    """Read the results of an existing table."""
    results: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = re.fullmatch(rf"\| (\S+) \| ({'|'.join(ORDER)}) \| (.*) \| ([\d.]*) \|", line)
        if row is not None:
            name, outcome, why, seconds = row.groups()
            results[name] = {"outcome": outcome, "why": why.replace("\\|", "|"),
                             **({"seconds": float(seconds)} if seconds else {})}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(try_family(arguments.families[0], arguments.inside)))
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = arguments.families or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    results = kept(arguments.output) if arguments.output and arguments.families else {}
    date = time.strftime("%Y-%m-%d")

    def note(name: str) -> None:
        results[name] = run_family(name)
        print(f"{name}: {results[name]['outcome']}: {results[name]['why']}", flush=True)
        if arguments.output:
            arguments.output.write_text(table(dict(results), date), encoding="utf-8")

    with ThreadPoolExecutor(arguments.jobs) as threads:
        list(threads.map(note, names))


if __name__ == "__main__":
    main()
