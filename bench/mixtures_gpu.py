"""MoE models on one GPU, next to transformers, alternating.

    python bench/mixtures_gpu.py WORK_DIR [--model qwen3-30b-a3b] [--stored "fp8 blocks"] [--alone]

`qwen3-30b-a3b`: 24 of its 48 layers in bfloat16, or in a storage format of quantized_gpu.py
(`--stored`); `gpt-oss-20b`: its experts in MXFP4. Random weights. transformers, in bfloat16, uses
torch's grouped GEMM (`experts_implementation="grouped_mm"`); `--alone` omits it. Milliseconds are
medians of whole calls by the host's clock, sampling included. `limit` is the time a decode step
needs at this GPU's measured speed to read all weights outside of experts and those of the experts
that the batch selects if it selects evenly. Before the table: a decode step's time by kind of
kernel.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bench_model
import gpu
import torch
from hybrids_gpu import Peer
from transformers import AutoConfig, AutoModelForCausalLM

import llmc

POSITIONS = 4096
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(hidden=2048, layers=24, vocab=151936, intermediate=768, heads=32,
                          kv_heads=4, head_dim=128, experts=128, chosen=8),
    "gpt-oss-20b": dict(hidden=2880, layers=24, vocab=201088, intermediate=2880, heads=64,
                        kv_heads=8, head_dim=64, experts=32, chosen=4)}
ROWS = [(1, 128, 64), (2, 128, 64), (8, 128, 64), (16, 128, 64), (64, 128, 64)]


def limit(name: str, batch: int, stored: str) -> float:
    """Return the milliseconds of a decode step by the bytes that it reads."""
    hidden, layers, vocab, inner, heads, kv_heads, dim, experts, chosen = (
        SHAPES[name][key] for key in ("hidden", "layers", "vocab", "intermediate", "heads",
                                      "kv_heads", "head_dim", "experts", "chosen"))
    touched = experts * (1 - (1 - chosen / experts) ** batch)
    linear = 2.0 if stored == "bf16" else 1.0 if "fp8" in stored else 0.5  # bytes per weight
    number = 17 / 32 if name == "gpt-oss-20b" else linear  # 4 bits, and 8 for each group of 32
    layer = linear * hidden * dim * (2 * heads + 2 * kv_heads) + 2 * experts * hidden \
        + touched * 3 * hidden * inner * number
    bytes_read: float = layers * layer + 2 * vocab * hidden
    return bytes_read / gpu.BYTES_PER_MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--stored", default="bf16")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compile_only", action="store_true")
    arguments = parser.parse_args()
    name = arguments.model
    stored = arguments.stored
    if name == "gpt-oss-20b" and stored != "bf16":
        parser.error("gpt-oss-20b has one storage format only; leave out --stored")

    def write(hf: Path, form: str) -> None:
        if name == "gpt-oss-20b":
            bench_model.write_gpt_oss(hf, positions=POSITIONS, **SHAPES[name])
        else:
            bench_model.write_mixture(hf, positions=POSITIONS, stored=form, **SHAPES[name])

    case = bench_model.compiled(arguments.work, name, stored, POSITIONS, write)
    if arguments.compile_only:
        return
    print(name, stored, bench_model.environment("torch", "transformers"),
          torch.cuda.get_device_name(), "CUDA", torch.version.cuda, "\n", flush=True)
    with llmc.LLM(case, max_batch_size=64, kv_cache_tokens=64 * 640, verify=False,
                  prefix_reuse=False) as llm:
        sides = {"llmc": gpu.ours(llm)}
        if not arguments.alone:
            config = AutoConfig.from_pretrained(
                bench_model.source_of(arguments.work, name, stored))
            config.__dict__.pop("quantization_config", None)
            with torch.device("cuda"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.bfloat16, experts_implementation="grouped_mm").eval()
            sides["transformers"] = Peer(model)
        print("microseconds of a decode step (kernels):")
        for batch, inputs, _ in ROWS:
            print(gpu.breakdown(llm, batch, inputs), flush=True)
        print(f"\n| batch, in, out | ms of | {' | '.join(sides)} | of llmc's | limit | of it |\n"
              + "| --- " * (5 + len(sides)) + "|")
        for row in ROWS:
            for what, median, ratio in gpu.in_turn(sides, row, arguments.runs):
                least = limit(name, row[0], stored) if what == "decode step" else float("nan")
                cells = [f"{time:.3f}" for time in median.values()]
                print(f"| {', '.join(map(str, row))} | {what} | {' | '.join(cells)} | "
                      f"{list(ratio.values())[-1]:.2f} | {least:.3f} | "
                      f"{median['llmc'] / least:.2f} |", flush=True)


if __name__ == "__main__":
    main()
