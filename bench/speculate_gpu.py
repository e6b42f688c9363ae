"""Verifying steps on one GPU, with random weights, and decoding with drafts of a fixed acceptance.

    python bench/speculate_gpu.py WORK_DIR --model llama-8b
    python bench/speculate_gpu.py WORK_DIR --model llama-8b --quantize int4 --draft

First table: milliseconds of a step that verifies k drafts of each sequence, and its ratio to a step
without drafts. Steps are submitted before their predecessors are collected, as in serving; medians.
Tokens are random. With recurrent layers, a step also reads the accepted drafts of the one before,
for which half of k stand here.
With --draft, the model is compiled with its MTP layer (qwen3.5-4b), or else with an EAGLE-3 head of
its shape. A further table has rounds: the step, and k drafts for the next one.
Second table: tokens per second of whole generations, next to generations without drafts,
alternating; the number of drafts is chosen by `auto`. It is simulated: the weights of the final
norm are 0, so that all logits are, and drafts are token 0. A logit bias of token 0 at temperature 1
makes each draft right with a fixed probability.
Third table, with --draft: tokens per second of 512 requests of 32 to 512 random tokens in and 16 to
256 out, 256 at once, in the same ways.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import bench_model
import hybrids_gpu
import mixtures_gpu
import numpy as np
import torch
import vllm_gpu
from gpu import write_model

import llmc
from llmc.runtime.core.scheduler import Scheduler
from llmc.runtime.core.step import Engine, SamplingState, Step
from llmc.runtime.sampling.sampler import Sampler

LENGTH = 8192
MODELS = "llama-8b", "gpt-oss-20b", "qwen3.5-4b"
DRAFTS = (0, 1, 3, 5, 7)
STEPS_EACH = 25
STEPS = [(1, 128), (1, 2000), (1, 7000), (4, 128), (8, 128), (8, 2000), (16, 128)]
RATES = (0.85, 0.71, 0.5, 0.0)  # of each draft, if those before it were accepted


def steps(llm: llmc.LLM, batch: int, past: int, rounds: bool) -> list[float]:
    """Milliseconds of a step, or of a round, by DRAFTS."""
    vocab = llm.manifest.dims.vocab_size

    def work(scheduler: Scheduler, engine: Engine) -> list[float]:
        size = engine.limits.block_size
        longest = past + STEPS_EACH * (1 + max(DRAFTS)) + max(DRAFTS)
        blocks = -(-longest // size)
        tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]
        tokens = np.random.default_rng(0).integers(0, vocab, (batch, longest)).tolist()

        def prefill() -> None:
            state = SamplingState(Sampler(llmc.SamplingParams()))
            for i, table in enumerate(tables):
                for done in range(0, past, 2048):
                    engine.collect(engine.submit(Step.of(
                        [tokens[i][done:min(done + 2048, past)]], [done], [table], [i],
                        admit={} if done else {i: state})))

        prefill()
        taken = []
        for count in DRAFTS:
            if engine.limits.keeps_states and count:
                prefill()
            taken.append(timed(engine, past, tables, tokens, count, rounds))
        return taken

    return llm._loops[0].run(work)


def timed(engine: Engine, past: int, tables: Sequence[Sequence[int]],
          tokens: Sequence[Sequence[int]], count: int, propose: bool) -> float:
    """Milliseconds of a step with `count` drafts of each sequence, perhaps proposing as many."""
    batch = len(tables)
    committed = count // 2 if engine.limits.keeps_states else 0
    positions = itertools.count(past, 1 + committed if engine.limits.keeps_states else 0)

    def submit() -> int:
        start = next(positions)
        return engine.submit(Step.of(
            [own[start:start + 1 + committed + count] for own in tokens], [start] * batch, tables,
            range(batch), num_drafts=[count] * batch, num_uncommitted=[committed] * batch,
            propose=count if propose and count else None))

    taken, ticket = [], submit()
    for _ in range(STEPS_EACH - 1):
        start = time.perf_counter()
        following = submit()
        engine.collect(ticket)
        ticket = following
        taken.append((time.perf_counter() - start) * 1e3)
    engine.collect(ticket)
    return statistics.median(taken[4:])


def always_0(directory: Path, zero: float = 0.0) -> None:
    """Set the weights of a checkpoint's final norms, in place, to the value that makes 0."""
    value = torch.tensor(zero, dtype=torch.bfloat16).view(torch.int16).item()
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
            for name in {"model.norm.weight", "mtp.norm.weight"} & {*entries}:
                start, end = entries[name]["data_offsets"]
                file.seek(8 + size + start)
                file.write(value.to_bytes(2, "little", signed=True) * ((end - start) // 2))


def biased(rate: float, vocab: int, count: int, seed: int) -> llmc.SamplingParams:
    """Sampling of token 0 with this probability among equal logits."""
    bias = {0: math.log(rate / (1 - rate) * (vocab - 1))} if rate else {}
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, logit_bias=bias,
                               seed=seed)


def compare(llm: llmc.LLM, vocab: int, method: str, prompts: Sequence[Sequence[int]],
            counts: Sequence[int], rate: float, repeats: int) \
        -> tuple[list[float], list[float], float]:
    """Tokens per second without and with drafts, by run, and the acceptance length."""
    params = [biased(rate, vocab, count, seed) for seed, count in enumerate(counts)]
    loop = llm._loops[0]
    planner = loop._scheduler.drafts
    assert planner is not None
    made: dict[str, list[float]] = {"off": [], method: []}
    drafts = accepted = 0
    for repeat in range(1 + repeats):
        for loop._method in made:
            before = planner.counts.drafts, planner.counts.accepted_tokens
            start = time.perf_counter()
            llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            if repeat:
                made[loop._method].append(sum(counts) / seconds)
                drafts += planner.counts.drafts - before[0]
                accepted += planner.counts.accepted_tokens - before[1]
    return made["off"], made[method], 1 + accepted / max(drafts, 1)


def prepare(work: Path, name: str, quantize: str, draft: bool) -> Path:
    """Return the case directory; write the model and compile it if absent."""
    case = work / f"{name}-{quantize or 'stored'}{'-draft' if draft else ''}"
    if case.is_dir():
        return case
    hf = work / name
    if not hf.is_dir():
        if name == "qwen3.5-4b":
            bench_model.write_qwen(hf, **hybrids_gpu.SHAPE)
        elif name == "gpt-oss-20b":
            bench_model.write_gpt_oss(hf, positions=LENGTH, **mixtures_gpu.SHAPES[name])
        else:
            write_model(name, hf)
        always_0(hf, -1.0 if name == "qwen3.5-4b" else 0.0)  # its norms have 1 + weight
    head = None if not draft else "mtp" if name == "qwen3.5-4b" \
        else f"eagle3:{bench_model.write_eagle3(hf, work / f'{name}-head')}"
    llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=LENGTH, quantize=quantize,
                 draft=head)
    return case


def row(llm: llmc.LLM, vocab: int, method: str, label: str, prompts: Sequence[Sequence[int]],
        counts: Sequence[int], rate: float, repeats: int) -> None:
    """Print a row of the second or third table."""
    plain, drafted, length = compare(llm, vocab, method, prompts, counts, rate, repeats)
    ratio = statistics.median(own / other for own, other in zip(drafted, plain, strict=True))
    print(f"| {label} | {rate} | {statistics.median(plain):.0f} | {statistics.median(drafted):.0f} "
          f"| {ratio:.3f} | {length:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--quantize", default="", help="as stored without it; none: dequantized")
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--compile_only", action="store_true")
    numbers = {"type": lambda text: [*map(float, text.split(",") if text else [])]}
    parser.add_argument("--batches", type=lambda text: [*map(int, text.split(","))],
                        default=[1, 4, 16, 64])
    parser.add_argument("--rates", **numbers, default=RATES)
    parser.add_argument("--request_rates", **numbers, default=RATES[::2])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("torch", "transformers"), torch.cuda.get_device_name(), "\n",
          flush=True)
    case = prepare(arguments.work, arguments.model, arguments.quantize, arguments.draft)
    if arguments.compile_only:
        return
    method = "draft" if arguments.draft else "ngram"
    vocab = json.loads((case / "model_info.json").read_text())["dims"]["vocab_size"]
    with llmc.LLM(case, max_batch_size=256, verify=False, prefix_reuse=False,
                  speculate=method) as llm:
        for rounds in (False, True)[:1 + arguments.draft]:
            print(f"\n{case.name}: {'rounds' if rounds else 'verifying steps'}")
            print("\n| sequences, positions | "
                  + " | ".join(f"k = {count} (ms)" for count in DRAFTS) + " | ratios |\n"
                  + "| --- " * (len(DRAFTS) + 2) + "|")
            for batch, past in STEPS:
                times = steps(llm, batch, past, rounds)
                print(f"| {batch}, {past} | " + " | ".join(f"{each:.3f}" for each in times) + " | "
                      + ", ".join(f"{each / times[0]:.2f}" for each in times[1:]) + " |",
                      flush=True)
        print("\n| work | rate of drafts | plain (tokens/s) | with drafts | ratio | "
              "acceptance length |\n" + "| --- " * 6 + "|")
        for batch in arguments.batches:
            prompts = [[i + 11, *range(100, 227)] for i in range(batch)]
            for rate in arguments.rates:
                row(llm, vocab, method, f"{batch} sequences", prompts, [256] * batch, rate, 2)
        prompts, counts = vllm_gpu.workload()
        for rate in arguments.request_rates:
            row(llm, vocab, method, "512 requests", prompts, counts, rate, 2)


if __name__ == "__main__":
    main()
