"""The cost of sampling in a decode step of SmolLM2-135M in float32 on a CPU.

    python bench/sampling_cpu.py WORK_DIR      makes its inputs there, then prints the table

Greedy generation and generation with each set of sampling parameters alternate. The table has
medians, and the middle half of the pairs' ratios. The last columns are from single steps, with
engine and sampling timed apart: the engine's fastest step, so that other work on the machine does
not flatter the ratio, and the median of sampling. Prompts are pieces of README.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench_model
import numpy as np

import llmc
from llmc.runtime.engines.host import HostSampling

PROMPT, NEW = 64, 32
CUTS = dict(temperature=0.8, top_p=0.9, min_p=0.05, typical_p=0.9)


def settings() -> dict[str, llmc.SamplingParams]:
    """Return the sampling parameters to compare with greedy, by name."""
    tokens = np.random.default_rng(1).integers(3, 49000, (4, 100)).tolist()
    bad_words = [*zip(tokens[0]), *zip(tokens[1], tokens[2])]  # noqa: B905  one and two tokens
    changes = dict(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2,
                   min_tokens=NEW, bad_words=bad_words, logit_bias=dict.fromkeys(tokens[3], 1.0))
    named = {
        "temperature": dict(temperature=0.8),
        "top-k 50, top-p": dict(temperature=0.8, top_k=50, top_p=0.9),
        "penalties, 200 bad words, 100 biases, minimum length": changes,
        "all of these, min-p, typical": dict(**changes, **CUTS, top_k=50),
        "the same without top-k": dict(**changes, **CUTS),
        "all, and 5 log-probabilities": dict(**changes, **CUTS, top_k=50, logprobs=5)}
    return {name: llmc.SamplingParams(max_tokens=NEW, ignore_eos="min_tokens" not in params,
                                      seed=1, **params) for name, params in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("numpy"), "\n")
    case = arguments.work / "llmc"
    if not case.is_dir():
        llmc.compile(bench_model.smollm2(arguments.work / "smollm2"), case)
    greedy = llmc.SamplingParams(max_tokens=NEW, ignore_eos=True)
    text = Path(__file__).parent.with_name("README.md").read_text(encoding="utf-8")
    with llmc.LLM(case) as llm:
        tokens = llm.tokenizer.encode(text).ids
        print("| batch | sampling | greedy, ms per step | with it | ratio | middle half "
              "| fastest step, ms | sampling, ms | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for batch in (1, 4, 16):
            prompts = [tokens[row * PROMPT:(row + 1) * PROMPT] for row in range(batch)]
            step(llm, prompts, greedy)
            for name, params in settings().items():
                pairs = [(step(llm, prompts, greedy), step(llm, prompts, params))
                         for _ in range(arguments.runs)]
                plain, sampled = (statistics.median(times) for times in zip(*pairs, strict=True))
                low, ratio, high = statistics.quantiles([b / a for a, b in pairs], n=4)
                engine, choosing = parts(llm, prompts, params)
                print(f"| {batch} | {name} | {plain:.2f} | {sampled:.2f} | {ratio:.3f} | {low:.3f} "
                      f"to {high:.3f} | {engine:.2f} | {choosing:.2f} | {choosing / engine:.1%} |",
                      flush=True)


def step(llm: llmc.LLM, prompts: list[list[int]], params: llmc.SamplingParams) -> float:
    """Measure the milliseconds of a decode step in a generation."""
    start = 0.0
    for count, _ in enumerate(llm.stream(prompts, params), 1):
        if count == len(prompts):
            start = time.perf_counter()
    return (time.perf_counter() - start) / (NEW - 1) * 1e3


def parts(llm: llmc.LLM, prompts: list[list[int]], params: llmc.SamplingParams) -> \
        tuple[float, float]:
    """Measure the milliseconds of a step in the engine, and of sampling its tokens."""
    engine = llm._loops[0]._engine
    assert isinstance(engine, HostSampling)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            made = work(*arguments)
            times.setdefault(name, []).append(time.perf_counter() - start)
            return made
        return run

    ranks = SimpleNamespace(compute=timed("engine", engine._ranks.compute))
    with mock.patch.multiple(engine, _ranks=ranks, _sample=timed("choosing", engine._sample)):
        llm.generate(prompts, params)
    return min(times["engine"]) * 1e3, statistics.median(times["choosing"]) * 1e3


if __name__ == "__main__":
    main()
