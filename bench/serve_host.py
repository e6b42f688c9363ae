"""Throughput of `llmc serve` where the model is not the limit, in tokens per second.

    python bench/serve_host.py CASE_DIR --step 8      steps that take 8 ms, and 22 us for each token
                                                      of a prompt, and compute nothing
    python bench/serve_host.py CASE_DIR               the case directory's engine, on a GPU

768 prompts of 64 random tokens get 128 tokens each, 256 concurrent: by `LLM.generate`, and by
requests to a server in a separate process, streamed and not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import llmc
from llmc.runtime.core import llm as loading
from llmc.runtime.core.step import EngineLimits, Step, StepOutput

PROMPT, OUTPUT, PER_STREAM = 64, 128, 3
_OF_A_PROMPT_TOKEN = 22e-6  # seconds


class Idle:
    """An `Engine` that takes a fixed time and returns random tokens."""

    def __init__(self, seconds: float, sequences: int) -> None:
        self.limits = EngineLimits(num_blocks=2**15, block_size=16, max_tokens=2048,
                             max_slots=sequences, max_logits=512, ahead=3)
        self._seconds, self._end, self._tickets = seconds, 0.0, 0
        self._made: dict[int, tuple[float, np.ndarray]] = {}
        self._rng = np.random.default_rng(0)

    def submit(self, step: Step) -> int:
        self._end = max(self._end, time.perf_counter()) + self._seconds + \
            _OF_A_PROMPT_TOKEN * step.num_prefill_tokens
        self._tickets += 1
        self._made[self._tickets] = self._end, self._rng.integers(300, 40000, len(step.sample))
        return self._tickets

    def collect(self, ticket: int) -> StepOutput:
        end, tokens = self._made.pop(ticket)
        time.sleep(max(end - time.perf_counter(), 0))
        return StepOutput(tokens, [None] * len(tokens))

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case_dir", type=Path)
    parser.add_argument("--step", type=float, help="ms")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step is not None:
        engine = Idle(arguments.step / 1e3, arguments.streams)
        loading.load_replica = lambda *_: engine  # type: ignore[assignment]
    options: dict[str, Any] = dict(max_batch_size=arguments.streams, verify=False)
    if arguments.port is not None:
        from llmc.server.serve import serve

        serve(arguments.case_dir, port=arguments.port, served_model_name="m", **options)
        return
    print("| by | at once | tokens/s |\n| --- | --- | --- |")
    with llmc.LLM(arguments.case_dir, **options) as llm:
        params = llmc.SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        told("LLM.generate", arguments, lambda run: llm.generate(
            prompts(arguments.streams, run, llm.manifest.dims.vocab_size), params))
        vocab_size = llm.manifest.dims.vocab_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, *sys.argv, "--port", str(port)],
                              stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port) and server.poll() is None:
            time.sleep(0.2)
        for stream in (True, False):
            told(f"`llmc serve`, {'streamed' if stream else 'whole'}", arguments,
                 lambda run: asyncio.run(_ask(
                     port, stream, arguments.streams,  # noqa: B023
                     prompts(arguments.streams, run, vocab_size))))
    finally:
        server.terminate()
        server.wait()


def prompts(streams: int, run: int, vocab_size: int) -> list[list[int]]:
    made: list[list[int]] = np.random.default_rng(run).integers(
        300, min(vocab_size, 40000), (PER_STREAM * streams, PROMPT)).tolist()
    return made


def told(name: str, arguments: argparse.Namespace, work: Any) -> None:
    """Measure a client and print its row; the first run is a warm-up."""
    times = []
    for run in range(arguments.rounds + 1):
        start = time.perf_counter()
        work(run)
        times.append(time.perf_counter() - start)
    tokens = PER_STREAM * arguments.streams * OUTPUT
    print(f"| {name} | {arguments.streams} | {tokens / statistics.median(times[1:]):.0f} |",
          flush=True)


async def _ask(port: int, stream: bool, streams: int, wanted: list[list[int]]) -> None:
    gate = asyncio.Semaphore(streams)

    async def one(prompt: list[int]) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True,
                           "stream": stream, "temperature": 0}).encode()
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                         b"application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                         % len(body) + body)
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200") and b'"length"' in answer, answer[:500]

    await asyncio.gather(*map(one, wanted))


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
