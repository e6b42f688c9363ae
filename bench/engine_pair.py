"""Kernels of two builds of the CUDA engine on one GPU, in alternating processes.

    python bench/engine_pair.py BEFORE AFTER [--rounds 5]

BEFORE and AFTER are folders that hold a package llmc_cuda (`pip install --target`). Medians of the
rounds in microseconds: prefill attention, GEMMs of packed weights, and experts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import attention_gpu
import bench_model
import experts_gpu
import torch

from llmc.runtime.engines.cuda import extension

GEMMS = [(4, 4096, 4096), (8, 28672, 4096), (16, 4096, 4096), (16, 4096, 14336), (64, 4096, 4096),
         (64, 28672, 4096), (256, 28672, 4096), (1024, 4096, 14336), (4096, 6144, 4096)]
PREFILL = [([2048], 0), ([512] * 4, 0), ([8192], 0), ([2048], 6000), ([2048], 30000)]
FORMS = ("int4", "mxfp4", "float8_e4m3fn", "float8_e4m3fn rounded")
GROUP = 128


def gemm(dtype: str, rows: int, out: int, width: int) -> float:
    """Microseconds of a GEMM [rows, width] × [out, width]^T with random codes."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    groups = width // GROUP
    x, y = torch.randn(rows, width, **kind), torch.empty(rows, out, **kind)
    codes = torch.randint(0, 256, (out, width // (1 if dtype == "int8" else 2)),
                          dtype=torch.uint8, device="cuda")
    scale = torch.full((out, groups), 0.01, device="cuda")
    absent = (0, "float32", [])
    zero = experts_gpu.described(torch.zeros(out, -(-groups // 2), dtype=torch.uint8,
                                             device="cuda")) if dtype == "uint4" else absent
    described = [experts_gpu.described(tensor) for tensor in (x, codes, scale, y)]
    taken: float = extension().run_op(
        "GemmBiasAct", {"weight_dtype": dtype, "group_size": GROUP, "in_features": width,
                        "out_features": out},
        [*described[:2], absent, described[2], zero, absent, absent], described[3:], repeats=20)
    return taken * 1e3


def measure() -> dict[str, float]:
    """Microseconds of each kernel in this process's engine."""
    torch.manual_seed(0)
    times = {f"prefill, {len(new)} × {new[0]} after {past}":
             attention_gpu.microseconds(new, [past] * len(new), repeats=8)
             for new, past in PREFILL}
    for rows, out, width in GEMMS:
        for dtype in ("int4", "uint4", "int8"):
            times[f"{dtype} GEMM, {rows} × {out} × {width}"] = gemm(dtype, rows, out, width)
    num_experts, top_k, hidden, inner = experts_gpu.SHAPES["Qwen3-30B-A3B"]
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(num_experts, 2 * inner, hidden, **kind),
               torch.randn(num_experts, hidden, inner, **kind)]
    packed = {form: experts_gpu.packed(form, weights) for form in FORMS}
    for count in (16, 128, 1024, 4096):
        selected = torch.rand(count, num_experts, device="cuda").topk(top_k).indices
        given = [torch.randn(count, hidden, **kind), selected,
                 torch.rand(count, top_k, device="cuda")]
        y = torch.empty(count, hidden, **kind)
        times[f"bfloat16 experts, {count} tokens"] = experts_gpu.ours([*given, *weights], y, False)
        for form, (made, fields) in packed.items():
            times[f"{form} experts, {count} tokens"] = experts_gpu.ours(
                [*given, *made[:2]], y, False, made[2:], **fields)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.after is None:  # a child process
        print(json.dumps(measure()))
        return
    print(bench_model.environment("torch"), torch.cuda.get_device_name(), "\n", flush=True)
    sides = arguments.before, arguments.after
    rounds: dict[Path, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            path = os.pathsep.join([str(side), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.PIPE,
                                  text=True, env={**os.environ, "PYTHONPATH": path})
            rounds[side].append(json.loads(done.stdout))
    print("| kernel | before (us) | after (us) | after / before |\n| --- | --- | --- | --- |")
    for name in rounds[sides[0]][0]:
        before, after = (statistics.median(times[name] for times in rounds[side]) for side in sides)
        print(f"| {name} | {before:.1f} | {after:.1f} | {after / before:.3f} |")


if __name__ == "__main__":
    main()
