"""llmc next to vLLM on one GPU: Llama-3.1-8B's shape in bfloat16, random weights, greedy.

    python bench/vllm_gpu.py llmc WORK_DIR      makes its inputs there
    python bench/vllm_gpu.py vllm WORK_DIR      where vLLM can be imported; with --rates these alone
    python bench/vllm_gpu.py llmc-vllm WORK_DIR     vLLM with llmc's worker, after `llmc` has made
                                                    its case directory; where llmc-vllm is installed

All print the same rows, to be run one after the other on one machine. The serving workload: 512
requests, 32 to 512 random tokens in and 16 to 256 out, 256 concurrent; offline, or with a common
prefix of 512 tokens (--prefix: these alone), or arriving as a Poisson process with --rates requests
per second. Static batches, of --static 8x8000,1x3900+31x200: TTFT from runs of one token, a step
from runs of 17 and of 65: while the last prompts are prefilled, the first sequences decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = dict(hidden=4096, layers=32, vocab=128256, intermediate=14336, heads=32, kv_heads=8)
AT_ONCE, SOME, NEW = 256, 17, 65
STATIC = ["1x128", "8x128", "16x128", "17x128", "64x128", "128x128", "8x8000", "1x32000"]
LONGEST = 33024
CASE = "llama-8b-llmc"

Prompts = list[list[int]]


def workload(prefix: int = 0, seed: int = 0) -> tuple[Prompts, list[int]]:
    """Return prompts and numbers of output tokens; lengths are the same for every seed."""
    rng = np.random.default_rng(0)
    inputs, outputs = rng.integers(32, 513, 512), rng.integers(16, 257, 512)
    first = rng.integers(5, 128000, prefix).tolist()
    rng = np.random.default_rng((1, seed))
    return [first + rng.integers(5, 128000, size).tolist() for size in inputs], outputs.tolist()


def run_workload(name: str, generate: Callable[[Prompts, list[int]], object], prompts: Prompts,
                 outputs: list[int]) -> None:
    start = time.perf_counter()
    generate(prompts, outputs)
    print(f"| {name} | {sum(outputs) / (time.perf_counter() - start):.0f} tokens/s |", flush=True)


def waits(name: str, first: list[float], between: list[float]) -> None:
    """Print percentiles of TTFT and inter-token latency in milliseconds."""
    print(f"| {name} | first token p50 {np.percentile(first, 50) * 1e3:.1f} p99 "
          f"{np.percentile(first, 99) * 1e3:.1f}, between tokens p50 "
          f"{np.percentile(between, 50) * 1e3:.2f} p90 {np.percentile(between, 90) * 1e3:.2f} p99 "
          f"{np.percentile(between, 99) * 1e3:.2f} |", flush=True)


def static(generate: Callable[[Prompts, int], object], rounds: int,
           cases: Sequence[str]) -> None:
    """Measure TTFT and step time of static batches such as "1x3900+31x200"."""
    for case in cases:
        alike = [[int(number) for number in part.split("x")] for part in case.split("+")]
        sizes = [size for batch, size in alike for _ in range(batch)]
        rng = np.random.default_rng(len(sizes))
        times: dict[int, list[float]] = {1: [], SOME: [], NEW: []}
        for run in range(rounds + 1):
            for count, own in times.items():
                prompts = [rng.integers(5, 128000, size).tolist() for size in sizes]
                start = time.perf_counter()
                generate(prompts, count)
                if run:
                    own.append((time.perf_counter() - start) * 1e3)
        first, some, whole = (statistics.median(own) for own in times.values())
        name = " + ".join(f"{batch} × {size}" for batch, size in alike)
        print(f"| {name} | first token {first:.1f} ms, step "
              f"{(whole - some) / (NEW - SOME):.3f} ms |", flush=True)


def compiled(work: Path) -> Path:
    """Return the case directory; compile it if absent."""
    case = work / CASE
    if not case.is_dir():
        import bench_model

        import llmc

        start = time.perf_counter()
        hf = bench_model.write(work / "llama-8b", layers_per_shard=8, positions=131072, **SHAPE)
        written = time.perf_counter()
        llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=LONGEST)
        print(f"written in {written - start:.0f} s, compiled in "
              f"{time.perf_counter() - written:.0f} s", flush=True)
    return case


def run_llmc(arguments: argparse.Namespace) -> None:
    import llmc
    from llmc.runtime.serving_workload import ServingWorkload, measure_workload

    case = compiled(arguments.work)
    options: dict[str, Any] = dict(max_batch_size=AT_ONCE, verify=False,
                                   max_num_batched_tokens=arguments.max_num_batched_tokens)

    def params(count: int) -> llmc.SamplingParams:
        return llmc.SamplingParams(max_tokens=count, ignore_eos=True)

    if arguments.prefix:
        _shared_prefix(case, options, params)
        return
    for name in ("first load", "next load"):
        start = time.perf_counter()
        llm = llmc.LLM(case, prefix_reuse=False, **options)
        loaded = time.perf_counter() - start
        llm.generate([[5, 6, 7]], params(1))
        print(f"| {name}, until the first token | {loaded:.1f} s, "
              f"{time.perf_counter() - start:.1f} s |", flush=True)
        prompts, outputs = workload()
        for run in range(1 if name == "first load" else 3):
            run_workload(f"offline throughput, {name}, run {run}",
                         lambda prompts, counts, llm=llm: llm.generate(
                             prompts, [params(count) for count in counts]), prompts, outputs)
        if name == "first load":
            llm.close()
    for rate in arguments.rates:
        gaps = np.random.default_rng(1).exponential(1 / rate, len(prompts))
        report = measure_workload(llm, ServingWorkload(prompts, list(map(params, outputs)),
                                              np.cumsum(gaps).tolist()))
        first, between = report.time_to_first_token, report.inter_token_latency
        print(f"| {rate:g} requests/s | first token p50 {first.p50 * 1e3:.1f} p99 "
              f"{first.p99 * 1e3:.1f}, between tokens p50 {between.p50 * 1e3:.2f} p90 "
              f"{between.p90 * 1e3:.2f} p99 {between.p99 * 1e3:.2f} |", flush=True)
    llm.close()
    with llmc.LLM(case, prefix_reuse=False,
                  **options | {"max_num_batched_tokens": arguments.static_tokens}) as llm:
        static(lambda prompts, count: llm.generate(prompts, params(count)), arguments.rounds,
               arguments.static)
    _shared_prefix(case, options, params)


def _shared_prefix(case: Path, options: dict[str, Any], params: Callable[[int], Any]) -> None:
    import llmc

    with llmc.LLM(case, **options) as llm:
        for run, seed in enumerate((0, 1, 2, 2)):  # the last finds all prompts in the cache
            run_workload(f"requests with a shared prefix, run {run}",
                         lambda prompts, counts: llm.generate(
                             prompts, [params(count) for count in counts]), *workload(512, seed))
        print(llm.metrics(), flush=True)


def _described(work: Path, quantization: str | None) -> str:
    """Write a directory with config.json of the shape, for vLLM's model."""
    directory = work / f"llama-8b-config-{quantization}"
    directory.mkdir(parents=True, exist_ok=True)
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,
                                      "zero_point": True, "version": "gemm"}} \
        if quantization == "awq" else {}
    (directory / "config.json").write_text(json.dumps(stored | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": SHAPE["hidden"], "num_hidden_layers": SHAPE["layers"],
        "vocab_size": SHAPE["vocab"], "intermediate_size": SHAPE["intermediate"],
        "num_attention_heads": SHAPE["heads"], "num_key_value_heads": SHAPE["kv_heads"],
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1,
        "torch_dtype": "bfloat16"}))
    return str(directory)


def run_vllm(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = dict(max_num_seqs=AT_ONCE, max_model_len=LONGEST, seed=0,
                                   disable_log_stats=True)
    if arguments.side == "llmc-vllm":
        options |= dict(model=str(arguments.work / CASE),
                        max_num_batched_tokens=arguments.max_num_batched_tokens)
    else:
        options |= dict(model=_described(arguments.work, arguments.quantization),
                        load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
                        attention_backend="FLASH_ATTN", enable_flashinfer_autotune=False,
                        quantization=None if arguments.quantization == "awq"
                        else arguments.quantization)

    def params(count: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True,
                              detokenize=False)

    def inputs(prompts: Prompts) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": prompt} for prompt in prompts]

    if arguments.rates:
        asyncio.run(_vllm_traffic(arguments.rates, options))
        return
    start = time.perf_counter()
    llm = LLM(enable_prefix_caching=arguments.prefix, **options)
    loaded = time.perf_counter() - start
    llm.generate(inputs([[5, 6, 7]]), params(1), use_tqdm=False)
    print(f"| load, until the first token | {loaded:.1f} s, {time.perf_counter() - start:.1f} s |",
          flush=True)
    prompts, outputs = workload(512 if arguments.prefix else 0)
    for run in range(0 if arguments.static_alone else 4 if arguments.prefix else 3):
        if arguments.prefix:
            prompts, outputs = workload(512, min(run, 2))  # the last finds all in the cache
        run_workload(f"requests{' with a shared prefix' * arguments.prefix}, run {run}",
                     lambda prompts, counts: llm.generate(
                         inputs(prompts), [params(count) for count in counts], use_tqdm=False),
                     prompts, outputs)
    if arguments.prefix:
        return
    static(lambda prompts, count: llm.generate(inputs(prompts), params(count), use_tqdm=False),
           arguments.rounds, arguments.static)


async def _vllm_traffic(rates: Sequence[float], options: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(enable_prefix_caching=False, **options))
    prompts, outputs = workload()
    for rate in (0.0, *rates):  # the first is a warm-up
        first: list[float] = []
        between: list[float] = []

        async def one(index: int, name: str, first: list[float], between: list[float]) -> None:
            begun, latest = time.perf_counter(), None
            async for _ in engine.generate(
                    {"prompt_token_ids": prompts[index]},
                    SamplingParams(temperature=0.0, max_tokens=outputs[index], ignore_eos=True,
                                   detokenize=False), name):
                now = time.perf_counter()
                if latest is None:
                    first.append(now - begun)
                else:
                    between.append(now - latest)
                latest = now

        tasks = []
        gaps = np.random.default_rng(1).exponential(1 / rate if rate else 0, len(prompts))
        for index, gap in enumerate(gaps):
            await asyncio.sleep(gap)
            tasks.append(asyncio.create_task(one(index, f"{rate}-{index}", first, between)))
        await asyncio.gather(*tasks)
        if rate:
            waits(f"{rate:g} requests/s", first, between)
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("llmc", "vllm", "llmc-vllm"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")],
                        default=[])
    parser.add_argument("--static", type=lambda text: [part for part in text.split(",") if part],
                        default=STATIC)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_num_batched_tokens", type=int, default=2048)
    parser.add_argument("--static_tokens", type=int, default=8192,
                        help="llmc: max_num_batched_tokens of static batches.")
    parser.add_argument("--prefix", action="store_true", help="Only the shared prefix.")
    parser.add_argument("--quantization",
                        help="vllm: quantization of weights; fp8: a scale per tensor; awq: groups "
                             "of 128.")
    parser.add_argument("--static_alone", action="store_true", help="vllm: only static batches.")
    parser.add_argument("--compile_only", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.compile_only:
        compiled(arguments.work)
        return
    (run_llmc if arguments.side == "llmc" else run_vllm)(arguments)


if __name__ == "__main__":
    main()
