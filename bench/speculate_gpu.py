"""Verifying steps on one GPU, with random weights, and decoding with drafts of a fixed acceptance.

    python bench/speculate_gpu.py WORK_DIR --model llama-8b
    python bench/speculate_gpu.py WORK_DIR --model llama-8b --quantize int4 --draft

First table: milliseconds of a step that verifies k drafts of each sequence, and its ratio to a step
without drafts. Steps are submitted before their predecessors are collected, as in serving; medians.
With --draft, the model is compiled with an EAGLE-3 head of its shape, and the table has rounds: the
step, and the head's k drafts for the next one.
Second table: tokens per second of whole generations, next to generations without drafts,
alternating. It is simulated: the final norm's weights are 0, so that token 0 follows every token.
The drafts are right with a fixed probability; with --draft, all of them are, and their number is
fixed, so that the acceptance length is that number + 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import bench_model
import mixtures_gpu
import torch
from gpu import write_model

import llmc
from llmc.runtime.core import loop as loop_module
from llmc.runtime.core.scheduler import Scheduler
from llmc.runtime.core.step import Engine, SamplingState, Step
from llmc.runtime.engines.cuda import CudaEngine
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.speculation.drafter import Draft

LENGTH = 8192
MODELS = "llama-8b", "gpt-oss-20b"
DRAFTS = (0, 1, 3, 5, 7)
STEPS = [(1, 128), (1, 2000), (1, 7000), (4, 128), (8, 128), (8, 2000), (16, 128)]
RATES = (0.5, 0.67, 0.8)  # of each draft, if those before it were accepted


def steps(llm: llmc.LLM, batch: int, past: int) -> list[float]:
    """Milliseconds of a step by DRAFTS."""
    def work(scheduler: Scheduler, engine: Engine) -> list[float]:
        size = engine.limits.block_size
        blocks = -(-(past + 1 + max(DRAFTS)) // size)
        tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]
        state = SamplingState(Sampler(llmc.SamplingParams()))
        for i, table in enumerate(tables):
            done = 0
            while done < past:
                count = min(2048, past - done)
                engine.collect(engine.submit(Step.of(
                    [[7] * count], [done], [table], [i], admit={} if done else {i: state})))
                done += count
        proposes = engine.limits.proposes
        return [timed(engine, batch, past, tables, count, count if proposes and count else None)
                for count in DRAFTS]

    return llm._loops[0].run(work)


def timed(engine: Engine, batch: int, past: int, tables: Sequence[Sequence[int]],
          count: int, propose: int | None) -> float:
    """Milliseconds of a step with `count` drafts of each sequence, and `propose` new ones."""
    def submit() -> int:
        return engine.submit(Step.of([[7] * (1 + count)] * batch, [past] * batch, tables,
                                     range(batch), num_drafts=[count] * batch, propose=propose))

    taken, ticket = [], submit()
    for _ in range(24):
        start = time.perf_counter()
        following = submit()
        engine.collect(ticket)
        ticket = following
        taken.append((time.perf_counter() - start) * 1e3)
    engine.collect(ticket)
    return statistics.median(taken[4:])


class Simulated:
    """A drafter of token 0, or of another token with a fixed probability."""

    def __init__(self, seed: int, rate: float) -> None:
        self._random, self._rate = random.Random(seed), rate

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def draft(self, count: int) -> Draft:
        return Draft([int(self._random.random() >= self._rate) for _ in range(count)], 8)


def always_0(directory: Path) -> None:
    """Set the weights of a checkpoint's final norm to 0, in place."""
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size)).get("model.norm.weight")
            if entry is not None:
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                file.write(bytes(end - start))
                return
    raise SystemExit("the checkpoint has no model.norm.weight")


def whole(llm: llmc.LLM, batch: int, rate: float | None, repeats: int = 3) -> \
        tuple[float, float, float]:
    """Tokens per second without and with drafts, and the acceptance length.

    Args:
        rate: of simulated drafts; None: the draft model drafts.
    """
    prompts = [[i + 11, *range(100, 227)] for i in range(batch)]
    params = llmc.SamplingParams(max_tokens=256, ignore_eos=True)
    planner = llm._loops[0]._scheduler.drafts
    assert planner is not None
    made: dict[bool, list[float]] = {False: [], True: []}
    drafts = accepted = 0
    for repeat in range(1 + repeats):
        for drafting in (False, True):
            llm._loops[0]._method = "off" if not drafting else "draft" if rate is None else "ngram"
            if rate is not None:
                loop_module.NgramDrafter = lambda prompt, *_: Simulated(  # type: ignore[misc,assignment]
                    prompt[0], rate)
            before = planner.counts.drafts, planner.counts.accepted_tokens
            start = time.perf_counter()
            out = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            assert all(set(own.token_ids) == {0} for own in out), "other tokens"
            if repeat:
                made[drafting].append(batch * 256 / seconds)
                drafts += planner.counts.drafts - before[0]
                accepted += planner.counts.accepted_tokens - before[1]
    return (statistics.median(made[False]), statistics.median(made[True]),
            1 + accepted / max(drafts, 1))


def prepare(work: Path, name: str, quantize: str, draft: bool) -> Path:
    """Return the case directory; write the model and compile it if absent."""
    case = work / f"{name}-{quantize}{'-eagle3' if draft else ''}"
    if case.is_dir():
        return case
    hf = work / name
    if not hf.is_dir():
        if name == "gpt-oss-20b":
            bench_model.write_gpt_oss(hf, positions=LENGTH, **mixtures_gpu.SHAPES[name])
        else:
            write_model(name, hf)
        always_0(hf)
    head = f"eagle3:{bench_model.write_eagle3(hf, work / f'{name}-head')}" if draft else None
    llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=LENGTH, quantize=quantize,
                 draft=head)
    return case


def load(case: Path, batch: int, count: int | None, method: str) -> llmc.LLM:
    return llmc.LLM(case, max_batch_size=batch, verify=False, prefix_reuse=False, speculate=method,
                    num_speculative_tokens=count or "auto")


def generations(llm: llmc.LLM, batches: Sequence[int], rates: Sequence[float | None],
                label: str = "") -> None:
    """Print rows of the second table."""
    for batch in batches:
        for rate in rates:
            plain, drafted, length = whole(llm, batch, rate)
            print(f"| {batch} | {label or rate} | {plain:.0f} | {drafted:.0f} | "
                  f"{drafted / plain:.2f} | {length:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--compile_only", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("torch", "transformers"), torch.cuda.get_device_name(), "\n",
          flush=True)
    case = prepare(arguments.work, arguments.model, arguments.quantize, arguments.draft)
    if arguments.compile_only:
        return
    method = "draft" if arguments.draft else "ngram"
    CudaEngine.looks_up = False  # simulated drafts are the host's
    with load(case, 64, None, method) as llm:
        print(f"{case.name}: {'rounds' if arguments.draft else 'verifying steps'}")
        print("\n| sequences, positions | " + " | ".join(f"k = {count} (ms)" for count in DRAFTS)
              + " | ratios |\n" + "| --- " * (len(DRAFTS) + 2) + "|")
        for batch, past in STEPS:
            row = steps(llm, batch, past)
            print(f"| {batch}, {past} | " + " | ".join(f"{each:.3f}" for each in row) + " | "
                  + ", ".join(f"{each / row[0]:.2f}" for each in row[1:]) + " |", flush=True)
        print("\n| sequences | drafts | plain (tokens/s) | with drafts | ratio | "
              "acceptance length |\n| --- | --- | --- | --- | --- | --- |")
        if not arguments.draft:
            generations(llm, (1, 4, 16, 64), RATES)
    if arguments.draft:
        with load(case, 64, 2, method) as llm:
            generations(llm, (1, 4, 16, 64), [None], "2, all right")


if __name__ == "__main__":
    main()
