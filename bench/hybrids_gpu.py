"""A model with linear and full attention on one GPU, next to transformers, alternating.

    python bench/hybrids_gpu.py WORK_DIR [--alone]

A model of Qwen3.5-4B's shape with random weights in bfloat16: three of four layers are recurrent.
Milliseconds are medians of whole calls by the host's clock, sampling included. transformers runs
with the kernels for linear attention that are installed (`fla`, `causal_conv1d`), else with its
PyTorch code; `--alone` omits it, except for its logits. `limit` is the time that the weights read,
or the multiplications by them, would take alone.
Before the table: a decode step's time by kind of kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import bench_model
import gpu
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import llmc

SHAPE = dict(hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, vocab_size=248320,
             num_attention_heads=16, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True,
             linear_num_key_heads=16, linear_num_value_heads=32, max_position_embeddings=16384,
             eos_token_id=2, bos_token_id=1)
ROWS = [(1, 128, 64), (8, 128, 64), (64, 128, 64), (1, 8000, 16)]


class Peer:
    """Run transformers with its default cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, batch: int, inputs: int, outputs: int) -> tuple[float, float]:
        ids = torch.randint(5, 50000, (batch, inputs), device="cuda")
        with torch.inference_mode():
            torch.cuda.synchronize()
            start = time.perf_counter()
            made = self._model(ids, use_cache=True, logits_to_keep=1)
            newest = made.logits[:, -1].argmax(-1, keepdim=True)
            torch.cuda.synchronize()
            first = time.perf_counter()
            for _ in range(outputs - 1):
                made = self._model(newest, past_key_values=made.past_key_values, use_cache=True)
                newest = made.logits[:, -1].argmax(-1, keepdim=True)
            torch.cuda.synchronize()
        end = time.perf_counter()
        return (first - start) * 1e3, (end - first) * 1e3 / (outputs - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    hf, case = arguments.work / "hybrid", arguments.work / "hybrid-case"
    fast = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)]
    print(bench_model.environment("torch", "transformers"), torch.cuda.get_device_name(), "CUDA",
          torch.version.cuda, "; transformers with", " and ".join(fast) or "PyTorch's code", "\n",
          flush=True)
    config = AutoConfig.for_model("qwen3_5_text", **SHAPE)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if not hf.is_dir():
        model.save_pretrained(hf)
    if not case.is_dir():
        llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=16384)
    weights = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    head = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    with llmc.LLM(case, max_batch_size=64, kv_cache_tokens=64 * 640, verify=False,
                  prefix_reuse=False) as llm:
        tokens = np.random.default_rng(0).integers(5, 50000, 300).tolist()
        with torch.inference_mode():
            expected = model(torch.tensor([tokens]).cuda()).logits[0].float().cpu().numpy()
        error = np.abs(llm.logits(tokens) - expected).max() / np.ptp(expected)
        print(f"logits differ from transformers' by at most {error:.1e} of their range\n")
        print("microseconds of a decode step (kernels):")
        for batch, inputs, _ in ROWS[:3]:
            print(gpu.breakdown(llm, batch, inputs), flush=True)
        sides = {"llmc": gpu.ours(llm)}
        if not arguments.alone:
            sides["transformers"] = Peer(model)
        print(f"\n| batch, in, out | ms of | {' | '.join(sides)} | of llmc's | limit |\n"
              + "| --- " * (4 + len(sides)) + "|")
        for row in ROWS:
            batch, inputs, _ = row
            read = 2 * weights / gpu.BYTES_PER_MS
            first = max(2 * batch * (inputs * (weights - head) + head) / gpu.FLOPS_PER_MS, read)
            for (what, median, ratio), limit in zip(
                    gpu.in_turn(sides, row, arguments.runs), (first, read), strict=True):
                cells = [f"{time:.3f}" for time in median.values()]
                print(f"| {', '.join(map(str, row))} | {what} | {' | '.join(cells)} | "
                      f"{list(ratio.values())[-1]:.2f} | {limit:.3f} |", flush=True)


if __name__ == "__main__":
    main()
