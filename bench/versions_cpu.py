"""This llmc next to another checkout of it on a CPU: SmolLM2-135M in float32, in pairs.

    python bench/versions_cpu.py WORK_DIR OTHER_CHECKOUT [--batches 1,4] [--starts 6] [--rounds 5]

Each side compiles the model and generates in a separate process; a run of one is followed by a run
of the other, 64 tokens after prompts of 64. One of two processes of one checkout may be 4 % slower
for its whole life, so both restart several times, and alternate in beginning. The table has
medians, and the median of the pairs' ratios, above 1 where this llmc takes longer. With this
checkout as the other one it shows the noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import bench_model

_WORKER = """
import os, sys, time
import numpy as np
import llmc
hf, case, tokens = sys.argv[1:]
if not os.path.isdir(case):
    llmc.compile(hf, case)
params = llmc.SamplingParams(max_tokens=64, ignore_eos=True)
rng = np.random.default_rng(0)
options = {"kv_cache_tokens": int(tokens)} if int(tokens) else {}
with llmc.LLM(case, max_batch_size=8, **options) as llm:
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = rng.integers(5, 40000, (int(line), 64)).tolist()
        start = time.perf_counter()
        for count, _ in enumerate(llm.stream(prompts, params), 1):
            if count == len(prompts):
                first = time.perf_counter() - start
        print(first, time.perf_counter() - start, flush=True)
"""


class Side:
    """A process of a checkout."""

    def __init__(self, checkout: Path, hf: Path, case: Path, kv_cache_tokens: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(hf), str(case), str(kv_cache_tokens)],
            cwd=checkout, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(checkout)})
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side ended")
        return line

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, batch: int) -> tuple[float, float]:
        """Return the milliseconds of the prefill and of a decode step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        first, whole = map(float, self._answer().split())
        return first * 1e3, (whole - first) * 1e3 / 63


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1, 4])
    parser.add_argument("--kv_cache_tokens", type=int, default=0, help="this side's")
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    hf = bench_model.smollm2(work / "smollm2")
    checkouts = (Path(__file__).resolve().parents[1], arguments.other.resolve())
    pairs: dict[int, list[list[tuple[float, float]]]] = {batch: [] for batch in arguments.batches}
    for start in range(arguments.starts):
        order = (0, 1) if start % 2 == 0 else (1, 0)
        sides = {side: Side(checkouts[side], hf, work / ("this", "other")[side],
                            (arguments.kv_cache_tokens, 0)[side]) for side in order}
        for batch, found in pairs.items():
            for side in order:
                sides[side].run(batch)
            for _ in range(arguments.rounds):
                made = {side: sides[side].run(batch) for side in order}
                found.append([made[0], made[1]])
        for one in sides.values():
            one.end()
    print(bench_model.environment(), "\n")
    print("| batch | ms of | this | other | this / other |\n| --- | --- | --- | --- | --- |")
    for batch, found in pairs.items():
        for index, what in enumerate(("first token", "step")):
            ours, theirs = ([pair[side][index] for pair in found] for side in (0, 1))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"| {batch} | {what} | {statistics.median(ours):.2f} | "
                  f"{statistics.median(theirs):.2f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
