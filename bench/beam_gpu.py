"""Beam search steps next to greedy steps with as many rows, on one GPU, random weights.

    python bench/beam_gpu.py WORK_DIR
    python bench/beam_gpu.py WORK_DIR --tp 2

The model is Llama-3.1-8B's shape in bfloat16. Milliseconds are medians by the host's clock. Greedy
decoding has steps in flight. A step of beam search waits for the host, and copies blocks in which
beams diverge. The two alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import bench_model
import gpu
import numpy as np
import torch

import llmc
from llmc.runtime.benchmark import measure

ROWS = [(1, 4, 128, 64), (1, 4, 512, 256), (1, 2, 128, 64), (4, 4, 128, 64)]


def beam_step(llm: llmc.LLM, batch: int, beam: int, inputs: int, outputs: int) -> float:
    """Measure the milliseconds of a step."""
    prompts = np.random.default_rng(0).integers(5, 50000, (batch, inputs)).tolist()
    times = []
    for count in (1, outputs):
        start = time.perf_counter()
        llm.beam_search(prompts, llmc.SamplingParams(beam_width=beam, max_tokens=count,
                                                     ignore_eos=True))
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) * 1e3 / (outputs - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("torch"), torch.cuda.get_device_name(), "\n", flush=True)
    hf = gpu.write_model("llama-8b", arguments.work / "llama-8b")
    case = arguments.work / f"llama-8b-beams-tp{arguments.tp}"
    if not case.is_dir():
        started = time.perf_counter()
        llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=gpu.LENGTH,
                     tp_size=arguments.tp)
        print(f"compiled in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    with llmc.LLM(case, max_batch_size=16, verify=False, prefix_reuse=False) as llm:
        print("| batch, beam, in, out | greedy step of batch · beam (ms) | beam step | ratio |\n"
              "| --- | --- | --- | --- |")
        for batch, beam, inputs, outputs in ROWS:
            greedy, searched = [], []
            for run in range(-2, arguments.runs):  # the first two capture and tune
                pair = (measure(llm, batch * beam, inputs, outputs, runs=1, warmup=0).tgen_ms,
                        beam_step(llm, batch, beam, inputs, outputs))
                if run >= 0:
                    greedy.append(pair[0])
                    searched.append(pair[1])
            ratio = statistics.median(own / other for own, other
                                      in zip(searched, greedy, strict=True))
            print(f"| {batch}, {beam}, {inputs}, {outputs} | {statistics.median(greedy):.3f} | "
                  f"{statistics.median(searched):.3f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
