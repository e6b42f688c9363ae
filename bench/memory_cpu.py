"""Memory of long prompts on target cpu: resident set and peak, by prompt length.

    python bench/memory_cpu.py CASE_DIR ...

Each row is a separate process that loads the case directory with a KV cache of 8,192 tokens,
runs its prompts of random token ids together, each with two tokens to generate, and then prompts of
512 tokens three times. The columns are megabytes after loading, at the peak and afterwards, seconds
of the prompts, and the median seconds of 512 tokens. `--aborts N` instead cancels N requests of 16
clients, after 1 to 8 tokens of each, and prints the resident megabytes eight times on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

import llmc

CACHE, CLIENTS = 8192, 16
PROMPTS = ((512, 1), (2000, 1), (4000, 1), (8190, 1), (2000, 4), (250, 16))  # tokens, prompts


def status_mb(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def measure(case_dir: str, length: int, count: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    params = llmc.SamplingParams(max_tokens=2, ignore_eos=True)
    with llmc.LLM(case_dir, kv_cache_tokens=CACHE) as llm:
        row: dict[str, float] = {"loaded_mb": status_mb("VmRSS")}

        def generate(tokens: int, prompts: int) -> float:
            given = [rng.integers(3, llm.manifest.dims.vocab_size, tokens).tolist()
                     for _ in range(prompts)]
            start = time.perf_counter()
            llm.generate(given, params)
            return time.perf_counter() - start

        row["seconds"] = round(generate(length, count), 2)
        row["peak_mb"], row["after_mb"] = status_mb("VmHWM"), status_mb("VmRSS")
        row["seconds_512"] = round(statistics.median(generate(512, 1) for _ in range(3)), 3)
        row["peak_mb_512"] = status_mb("VmHWM")
    return row


async def abort(case_dir: str, count: int) -> list[int]:
    """Return the resident megabytes before the aborts and after each eighth of them."""
    rng, resident = random.Random(0), []
    async with llmc.AsyncLLM(case_dir, kv_cache_tokens=CACHE) as llm:
        left = count

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if left % (count // 8) == 0:
                    resident.append(status_mb("VmRSS"))
                prompt = [rng.randrange(3, 49000) for _ in range(rng.randrange(8, 200))]
                stop, params = rng.randrange(1, 9), llmc.SamplingParams(max_tokens=64)
                stream = llm.generate(prompt, params)
                async for _ in stream:
                    stop -= 1
                    if not stop:
                        break
                await stream.aclose()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        resident.append(status_mb("VmRSS"))
    return resident


def in_process(*arguments: object) -> object:
    """Run this script with these arguments in a separate process; return its output."""
    done = subprocess.run([sys.executable, __file__, *map(str, arguments), "--child"], check=True,
                          stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("case_dir", nargs="+")
    parser.add_argument("--aborts", type=int, default=0)
    parser.add_argument("--prompts", type=int, nargs=2, action="append",
                        metavar=("TOKENS", "COUNT"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case_dir = args.case_dir[0]
        print(json.dumps(asyncio.run(abort(case_dir, args.aborts)) if args.aborts
                         else measure(case_dir, *args.prompts[0])))
        return
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, Python "
          f"{platform.python_version()}, llmc {llmc.__version__}, onnxruntime "
          f"{version('onnxruntime')}")
    columns = ["MB after loading", *(f"{part} of 8" for part in range(1, 9))] if args.aborts else \
        ["prompts", "MB after loading", "seconds", "peak MB", "MB after", "seconds of 512 tokens",
         "peak MB of 512 tokens"]
    print("\n| case directory | " + " | ".join(columns) + " |\n"
          + "| --- " * (len(columns) + 1) + "|")
    for case_dir in args.case_dir:
        name = Path(case_dir).name
        if args.aborts:
            resident = in_process(case_dir, "--aborts", args.aborts)
            assert isinstance(resident, list)
            print(f"| {name} | " + " | ".join(map(str, resident)) + " |", flush=True)
            continue
        for length, count in args.prompts or PROMPTS:
            row = in_process(case_dir, "--prompts", length, count)
            assert isinstance(row, dict)
            print(f"| {name} | {count} × {length} | " + " | ".join(map(str, row.values())) + " |",
                  flush=True)


if __name__ == "__main__":
    main()
