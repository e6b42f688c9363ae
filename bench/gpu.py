"""llmc's CUDA engine next to transformers on one GPU, with random weights, alternating.

    python bench/gpu.py WORK_DIR --model gpt2-medium
    python bench/gpu.py WORK_DIR --model llama-8b
    python bench/gpu.py WORK_DIR --model gpt2-medium --grid     llmc alone, twelve sizes
    python bench/gpu.py WORK_DIR --model llama-8b --tp 1,2,4    llmc alone, on 1, 2 and 4 GPUs
    python bench/gpu.py WORK_DIR --model gpt2-medium --tensorrt llmc's two targets, in float16
    python bench/gpu.py WORK_DIR --model llama-8b --float8      KV caches in float8 and in bfloat16
    python bench/gpu.py WORK_DIR --model llama-8b --sampling    the cost of sampling, at batch 64
    python bench/gpu.py WORK_DIR --model gpt2-medium --checks   the cost of reading tokens

transformers runs with a StaticCache, eager and under torch.compile's mode reduce-overhead.
Milliseconds are medians of whole calls by the host's clock, sampling included. `limit` is the time
that the bytes read, or the multiplications, would take alone at this GPU's measured speeds. After
the table: a decode step's time by kind of kernel, each kernel from its predecessor's end to its
end.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bench_model
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

import llmc
from llmc.artifacts.program import read_program
from llmc.runtime.benchmark import measure
from llmc.runtime.core.scheduler import Scheduler
from llmc.runtime.core.step import LAST, Engine, SamplingState, Step
from llmc.runtime.sampling.sampler import Sampler, SamplingParams

LENGTH = 1024
BYTES_PER_MS, FLOPS_PER_MS = 4.30e9, 799e9  # one H200: device copy, bfloat16 GEMM
MODELS = {"gpt2-medium": "float16", "llama-8b": "bfloat16"}
ROWS = {"gpt2-medium": [(1, 64, 120), (64, 128, 120)], "llama-8b": [(1, 128, 64), (64, 128, 64)]}
GRID = [(batch, *lengths) for lengths in ((64, 20), (128, 20), (64, 120), (128, 120))
        for batch in (1, 8, 64)]
# Sampling parameters that a step is timed with, besides greedy.
PENALTIES = dict(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2,
                 bad_words=[[token, token + 1] for token in range(100, 150)], min_tokens=40,
                 end_id=2, logit_bias=dict.fromkeys(range(200, 300), -1.0))
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=1.0),
    "top_k 50, top_p 0.9": dict(temperature=1.0, top_k=50, top_p=0.9),
    "min_p 0.05": dict(temperature=1.0, min_p=0.05),
    "top_p 0.9": dict(temperature=1.0, top_p=0.9),
    "top_k 50, typical_p 0.9": dict(temperature=1.0, top_k=50, typical_p=0.9),
    "typical_p 0.9": dict(temperature=1.0, typical_p=0.9),
    "penalties": PENALTIES,
    "logprobs 5": dict(logprobs=5),
    "penalties, top_k 50, top_p 0.9, logprobs 5":
        dict(temperature=1.0, top_k=50, top_p=0.9, logprobs=5, **PENALTIES),
}
KINDS = {"GEMV": "gemv_kernel", "GEMM": "nvjet|gemm|splitK|cublas",
         "attention": "decode_kernel|token_attention_kernel|prefill_kernel|append_kernel",
         "norm": "norm_kernel", "experts": "experts|route_kernel|combine_kernel|sort_pairs_kernel",
         "NCCL": "nccl|interleave",
         "sampling": "sample_kernel|update_slots_kernel|cast_logits_kernel|logprobs_kernel|"
                     "process_logits_kernel"}


def write_model(name: str, directory: Path) -> Path:
    """Write the model with random weights as a Hugging Face directory."""
    if directory.is_dir():
        return directory
    if name == "llama-8b":
        return bench_model.write(directory, hidden=4096, layers=32, vocab=128256,
                                 intermediate=14336, heads=32, kv_heads=8, layers_per_shard=8)
    config = AutoConfig.for_model("gpt2", n_embd=1024, n_layer=24, n_head=16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.save_pretrained(directory)
    return directory


class Peer:
    """transformers with a StaticCache, eager or compiled."""

    def __init__(self, model: torch.nn.Module, compiled: bool) -> None:
        self._model = model
        self._forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False) \
            if compiled else model.forward
        self._caches: dict[tuple[int, int], StaticCache] = {}

    def __call__(self, batch: int, inputs: int, outputs: int) -> tuple[float, float]:
        """Return milliseconds of TTFT and of a decode step."""
        if (batch, inputs) not in self._caches:
            config = self._model.config
            made = StaticCache(config=config, max_cache_len=inputs + outputs)
            made.early_initialization(
                batch, getattr(config, "num_key_value_heads", config.num_attention_heads),
                config.hidden_size // config.num_attention_heads, self._model.dtype, "cuda")
            self._caches[batch, inputs] = made
        cache = self._caches[batch, inputs]
        cache.reset()
        ids = torch.randint(5, 50000, (batch, inputs), device="cuda")
        with torch.inference_mode():
            torch.cuda.synchronize()
            start = time.perf_counter()
            newest = self._step(ids, torch.arange(inputs, device="cuda"), cache)
            torch.cuda.synchronize()
            first = time.perf_counter()
            for position in range(inputs, inputs + outputs - 1):
                newest = self._step(newest, torch.tensor([position], device="cuda"), cache)
            torch.cuda.synchronize()
        end = time.perf_counter()
        return (first - start) * 1e3, (end - first) * 1e3 / (outputs - 1)

    def _step(self, ids: torch.Tensor, positions: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        logits = self._forward(ids, position_ids=positions[None], past_key_values=cache,
                               use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True).clone()


def limits(llm: llmc.LLM, batch: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Return lower bounds of prefill and decode step on one rank, in milliseconds."""
    dims, chip = llm.manifest.dims, llm.manifest.chips[0]
    program = read_program(llm.case_dir / chip.steps[0].path)
    sizes = [math.prod(program.tensors[node.inputs[1]].shape) for node in program.nodes
             if "Gemm" in node.op or node.op == "GatedMLP"]
    layers, head = sum(sizes[:-1]), sizes[-1]
    position = 2 * 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim / llm.manifest.tp_size
    read = 2 * (layers + head)
    decode = (read + batch * (inputs + outputs / 2) * position) / BYTES_PER_MS
    return max(2 * batch * (inputs * layers + head) / FLOPS_PER_MS, read / BYTES_PER_MS), decode


Side = Callable[[int, int, int], tuple[float, float]]  # ms of TTFT and of a decode step


def in_turn(sides: Mapping[str, Side], row: tuple[int, int, int], repeats: int) -> \
        Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Time each side in turn; yield the metric, the medians and the ratios to the first side."""
    times: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for side in list(sides.values()) * 2:  # warm-up: compilation, capture, tuning
        side(*row)
    for _ in range(repeats):
        for label, side in sides.items():
            times[label].append(side(*row))
    first = times[next(iter(sides))]
    for index, what in enumerate(("first token", "decode step")):
        yield (what, {label: statistics.median(t[index] for t in rows)
                      for label, rows in times.items()},
               {label: statistics.median(b[index] / a[index]
                                         for a, b in zip(first, rows, strict=True))
                for label, rows in times.items()})


def ours(llm: llmc.LLM) -> Side:
    def run(batch: int, inputs: int, outputs: int) -> tuple[float, float]:
        row = measure(llm, batch, inputs, outputs, runs=1, warmup=0)
        return row.tctx_ms, row.tgen_ms
    return run


def steps_of(llm: llmc.LLM, batch: int, inputs: int, params: SamplingParams | None = None) -> \
        Callable[[int], object]:
    """Prefill a batch; return a function that runs N decode steps, at most 500 in total."""
    loop = llm._loops[0]
    prompts = np.random.default_rng(0).integers(5, 50000, (batch, inputs)).tolist()
    wish = params or SamplingParams()
    held: list[Any] = []

    def begin(scheduler: Scheduler, engine: Engine) -> None:
        lease = scheduler.lease(batch)
        assert lease is not None and scheduler.extend(lease, [inputs + 500] * batch)
        held.append(lease)
        most = engine.limits.max_tokens // inputs
        for start in range(0, batch, most):
            rows = range(start, min(start + most, batch))
            step = Step.of([prompts[row] for row in rows], [0] * len(rows),
                           [lease.tables[row].blocks for row in rows],
                           [lease.slots[row] for row in rows],
                           admit={lease.slots[row]: SamplingState(
                               Sampler(wish, 0, prompts[row], [2], wish.bad_words))
                               for row in rows})
            engine.collect(engine.submit(step))

    def decode(scheduler: Scheduler, engine: Engine) -> None:
        lease, past = held[0], inputs + len(held) - 1
        tickets: collections.deque[int] = collections.deque()
        for _ in range(count[0]):
            held.append(None)
            tickets.append(engine.submit(Step.of(
                [[LAST]] * batch, [past] * batch, [table.blocks for table in lease.tables],
                lease.slots)))
            past += 1
            if len(tickets) > 1:
                engine.collect(tickets.popleft())
        engine.collect(tickets.popleft())

    def go_on(steps: int) -> None:
        count[0] = steps
        loop.run(decode)

    count = [0]
    loop.run(begin)
    return go_on


def breakdown(llm: llmc.LLM, batch: int, inputs: int, steps: int = 16,
              params: SamplingParams | None = None) -> str:
    """Return the microseconds of a decode step by kind of kernel, on the first rank."""
    decode = steps_of(llm, batch, inputs, params)
    decode(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decode(steps)
    events = sorted((e for e in profile.events() if e.device_type.name == "CUDA"
                     and not e.name.startswith("Mem")), key=lambda e: e.time_range.end)
    per_step = len(events) // steps
    events = events[per_step * 4:per_step * steps]
    total: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.Counter()
    for before, event in itertools.pairwise(events):
        kind = next((k for k, names in KINDS.items() if re.search(names, event.name)), "other")
        total[kind] += event.time_range.end - before.time_range.end
        count[kind] += 1
    parts = [f"{kind} {time / (steps - 4):.0f} ({count[kind] / (steps - 4):.0f})"
             for kind, time in sorted(total.items(), key=lambda item: -item[1])]
    return f"batch {batch}: " + ", ".join(parts)


def pairs(llm: llmc.LLM, hf: Path, name: str, repeats: int) -> None:
    """Print the table next to transformers."""
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=getattr(torch, MODELS[name])) \
        .cuda().eval()
    tokens = np.random.default_rng(0).integers(5, 50000, 100).tolist()
    expected = model(torch.tensor([tokens]).cuda()).logits[0].float().detach().cpu().numpy()
    error = np.abs(llm.logits(tokens) - expected).max() / np.ptp(expected)
    print(f"logits differ from transformers' by at most {error:.1e} of their range\n")
    sides = {"llmc": ours(llm), "eager": Peer(model, False), "compiled": Peer(model, True)}
    print("| batch, in, out | ms of | llmc | eager | compiled | compiled / llmc | limit |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS[name]:
        for (what, median, ratio), limit in zip(in_turn(sides, row, repeats), limits(llm, *row),
                                                strict=True):
            print(f"| {row[0]}, {row[1]}, {row[2]} | {what} | " + " | ".join(
                f"{median[side]:.3f}" for side in sides)
                + f" | {ratio['compiled']:.2f} | {limit:.3f} |", flush=True)
    print("\nmicroseconds of a decode step (kernels):")
    for batch, inputs, _ in ROWS[name]:
        print(breakdown(llm, batch, inputs))


def grid(llm: llmc.LLM) -> None:
    """Print twelve sizes of llmc alone, as `llmc bench` does."""
    print("| batch | input_length | output_length | tokens_per_sec | latency(ms) | "
          "prefill time (ms) | TPOT (ms) |\n| --- | --- | --- | --- | --- | --- | --- |")
    for cell in GRID:
        row = measure(llm, *cell, runs=5, warmup=2)
        print(f"| {row.batch} | {row.input_length} | {row.output_length} | "
              f"{row.tokens_per_sec:.1f} | {row.latency_ms:.2f} | {row.tctx_ms:.2f} | "
              f"{row.tgen_ms:.3f} |", flush=True)


def sampling(llm: llmc.LLM, name: str, runs: int) -> None:
    """Measure the cost of sampling at the largest batch, alternating with greedy.

    It is measured in single steps, which the device runs without the host, and in generations.
    """
    batch, inputs, outputs = ROWS[name][-1]
    print("| sampling | step (ms) | more than greedy | ratio | generation, a step (ms) | "
          "more than greedy |\n| --- | --- | --- | --- | --- | --- |")
    kinds = {label: SamplingParams(**given, max_tokens=64, seed=0)
             for label, given in SAMPLING.items()}
    for label, params in kinds.items():
        alone: dict[bool, list[float]] = {False: [], True: []}
        whole: dict[bool, list[float]] = {False: [], True: []}
        for run in range(runs + 1):
            for chosen in (False, True):
                decode = steps_of(llm, batch, inputs, params if chosen else None)
                decode(4)  # captures graphs
                start = time.perf_counter()
                decode(outputs)
                alone[chosen].append((time.perf_counter() - start) * 1e3 / outputs)
                row = measure(llm, batch, inputs, outputs, runs=1, warmup=0,
                              params=params if chosen else None)
                whole[chosen].append(row.tgen_ms)
            if not run:  # warm-up
                for times in (*alone.values(), *whole.values()):
                    times.clear()
        more, share, slower = (statistics.median(values) for values in (
            [b - a for a, b in zip(*alone.values(), strict=True)],
            [b / a - 1 for a, b in zip(*alone.values(), strict=True)],
            [b / a - 1 for a, b in zip(*whole.values(), strict=True)]))
        print(f"| {label} | {statistics.median(alone[True]):.3f} | {more * 1e3:.0f} µs | "
              f"{share:.1%} | {statistics.median(whole[True]):.3f} | {slower:.1%} |", flush=True)
    print("\nmicroseconds of a decode step (kernels):")
    for label, params in {"greedy": None, **kinds}.items():
        print(f"{label}, {breakdown(llm, batch, inputs, params=params)}")


def checks(llm: llmc.LLM, name: str, repeats: int) -> None:
    """Measure a decode step if the host reads tokens after each step, or after several."""
    def looking(check_step: int) -> Side:
        def run(batch: int, inputs: int, outputs: int) -> tuple[float, float]:
            llm._loops[0]._check_step = check_step
            return ours(llm)(batch, inputs, outputs)
        return run

    sides = {str(steps): looking(steps) for steps in (1, 2, 3)}
    print("| batch, in, out | " + " | ".join(f"check_step {label} (ms)" for label in sides)
          + " | 2 / 1 |\n" + "| --- " * (len(sides) + 2) + "|")
    for row in ROWS[name]:
        for what, median, ratio in in_turn(sides, row, repeats):
            if what == "decode step":
                print(f"| {row[0]}, {row[1]}, {row[2]} | " + " | ".join(
                    f"{median[label]:.3f}" for label in sides) + f" | {ratio['2']:.2f} |",
                    flush=True)


def beside(hf: Path, work: Path, name: str, ways: Mapping[str, Mapping[str, str]],
           repeats: int) -> None:
    """Compare two compilations of the model, alternating."""
    sides: dict[str, llmc.LLM] = {}
    for label, options in ways.items():
        case = work / f"{name}-{label.replace(' ', '-')}"
        started = time.perf_counter()
        if not case.is_dir():
            llmc.compile(hf, case, max_seq_len=LENGTH, **options)  # type: ignore[arg-type]
            print(f"compiled for {label} in {time.perf_counter() - started:.0f} s", flush=True)
        sides[label] = llmc.LLM(case, max_batch_size=64, verify=False, prefix_reuse=False)
        versions = sides[label].manifest.target.versions
        print(label, *(f"{library} {version}" for library, version in versions.items()), flush=True)
    first, second = sides
    print(f"\n| batch, in, out | ms of | {first} | {second} | ratio |\n"
          "| --- | --- | --- | --- | --- |")
    for row in ROWS[name]:
        runs = {label: ours(llm) for label, llm in sides.items()}
        for what, median, ratio in in_turn(runs, row, repeats):
            print(f"| {row[0]}, {row[1]}, {row[2]} | {what} | {median[first]:.3f} | "
                  f"{median[second]:.3f} | {ratio[second]:.2f} |", flush=True)
    print("\nmicroseconds of a decode step (kernels):")
    for label, llm in sides.items():
        for batch, inputs, _ in ROWS[name]:
            print(f"{label}, {breakdown(llm, batch, inputs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--tensorrt", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--tp", default="")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    name, work = arguments.model, arguments.work
    work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("torch", "transformers"), torch.cuda.get_device_name(),
          "CUDA", torch.version.cuda, "\n", flush=True)
    hf = write_model(name, work / name)
    if arguments.tensorrt:
        beside(hf, work, name, {target: {"target": target, "dtype": "float16"}
                                for target in ("cuda", "tensorrt")}, arguments.runs)
        return
    if arguments.float8:
        plain = {"target": "cuda", "dtype": MODELS[name]}
        beside(hf, work, name, {f"{MODELS[name]} caches": plain, "float8 caches":
                                plain | {"kv_dtype": "float8_e4m3fn"}}, arguments.runs)
        return
    first: dict[int, tuple[float, float]] = {}
    notes: list[str] = []
    if arguments.tp:
        print("| tp | batch, in, out | first token (ms) | speed-up | decode step (ms) | speed-up | "
              "limit |\n| --- | --- | --- | --- | --- | --- | --- |")
    for tp_size in [int(part) for part in arguments.tp.split(",")] if arguments.tp else [1]:
        case = work / f"{name}-tp{tp_size}"
        if not case.is_dir():
            started = time.perf_counter()
            llmc.compile(hf, case, dtype=MODELS[name], target="cuda", max_seq_len=LENGTH,
                         tp_size=tp_size)
            print(f"compiled for tp {tp_size} in {time.perf_counter() - started:.0f} s",
                  file=sys.stderr)
        with llmc.LLM(case, max_batch_size=64, verify=False, prefix_reuse=False) as llm:
            if arguments.grid:
                grid(llm)
            elif arguments.checks:
                checks(llm, name, arguments.runs)
            elif arguments.sampling:
                sampling(llm, name, arguments.runs)
            elif not arguments.tp:
                pairs(llm, hf, name, arguments.runs)
            else:
                for row in ROWS[name]:
                    result = measure(llm, *row, runs=arguments.runs, warmup=2)
                    times = result.tctx_ms, result.tgen_ms
                    base = first.setdefault(row[0], times)
                    print(f"| {tp_size} | {row[0]}, {row[1]}, {row[2]} | {times[0]:.2f} | "
                          f"{base[0] / times[0]:.2f} | {times[1]:.3f} | "
                          f"{base[1] / times[1]:.2f} | {limits(llm, *row)[1]:.3f} |", flush=True)
                    notes.append(f"tp {tp_size}, {breakdown(llm, row[0], row[1])}")
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
