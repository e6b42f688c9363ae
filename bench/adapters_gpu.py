"""LoRA adapters on one GPU: Llama-3.1-8B's shape, random weights, adapters of all linear layers.

    python bench/adapters_gpu.py llmc WORK_DIR [--stored int4] [--rank 64]
    python bench/adapters_gpu.py vllm WORK_DIR [--rank 64]    where vLLM can be imported; after llmc

`llmc`: sides alternate, a model compiled without and with `--enable_lora`, and the latter with an
adapter for each sequence. Times of a decode step are medians, from runs of 17 and of 65 tokens, and
ratios are medians of pairs with the first side. `read` is what the adapters' bytes would take alone
at this GPU's measured speed, as a share of the first side's step. Then the serving workload of
vllm_gpu.py: 512 requests, at most 256 concurrent, over 32 adapters and without.

`vllm`: the same rows, from vLLM with `enable_lora` and the same adapters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import adapters
import numpy as np
from vllm_gpu import NEW, SHAPE, SOME, Prompts, workload

BYTES_PER_MS = 4.30e9  # one H200: device copy
COUNT, AT_ONCE, LONGEST = 32, 256, 4096
ROWS = [(1, 128), (8, 128), (32, 128), (32, 2048)]
# Generates tokens after prompts: their counts, and the index of each prompt's adapter or -1.
Generate = Callable[[Prompts, Sequence[int], Sequence[int]], object]


def decode_step(generate: Generate, batch: int, inputs: int, ids: Sequence[int], seed: int) -> \
        float:
    """Milliseconds of a decode step of a batch."""
    taken = {}
    for count in (SOME, NEW):
        rng = np.random.default_rng((seed, count))
        prompts = [rng.integers(5, 128000, inputs).tolist() for _ in range(batch)]
        start = time.perf_counter()
        generate(prompts, [count] * batch, ids)
        taken[count] = (time.perf_counter() - start) * 1e3
    return (taken[NEW] - taken[SOME]) / (NEW - SOME)


def adapter_ms(rank: int, count: int) -> float:
    """Milliseconds to read the matrices of some adapters."""
    hidden, inner = SHAPE["hidden"], SHAPE["intermediate"]
    kv = hidden * SHAPE["kv_heads"] // SHAPE["heads"]
    layer = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + inner)
    return 2 * rank * layer * SHAPE["layers"] * count / BYTES_PER_MS


def table(sides: Mapping[str, tuple[Generate, bool]], rank: int, rounds: int) -> None:
    """Print decode steps and the serving workload; a side may give each sequence an adapter."""
    print("| sequences | prompt | side | ms per step | ratio | read |\n"
          "| --- | --- | --- | --- | --- | --- |")
    for batch, inputs in ROWS:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for run in range(rounds + 1):
            for name, (generate, adapted) in sides.items():
                ids = [index if adapted else -1 for index in range(batch)]
                taken = decode_step(generate, batch, inputs, ids, run)
                if run:  # the first is a warm-up
                    times[name].append(taken)
        first = next(iter(times.values()))
        for name, own in times.items():
            ratio = statistics.median(b / a for a, b in zip(first, own, strict=True))
            share = adapter_ms(rank, batch) / statistics.median(first)
            print(f"| {batch} | {inputs} | {name} | {statistics.median(own):.3f} | {ratio:.3f} | "
                  f"{f'{share:.1%}' if sides[name][1] else ''} |", flush=True)
    print("\n| requests | side | tokens/s | ratio |\n| --- | --- | --- | --- |")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(rounds + 1):
        prompts, outputs = workload(seed=run)
        for name, (generate, adapted) in sides.items():
            ids = [index % COUNT if adapted else -1 for index in range(len(prompts))]
            start = time.perf_counter()
            generate(prompts, outputs, ids)
            if run:
                rates[name].append(sum(outputs) / (time.perf_counter() - start))
    first = next(iter(rates.values()))
    for name, own in rates.items():
        ratio = statistics.median(b / a for a, b in zip(first, own, strict=True))
        print(f"| {len(prompts)} | {name} | {statistics.median(own):.0f} | {ratio:.3f} |",
              flush=True)


def run_llmc(arguments: argparse.Namespace) -> None:
    import bench_model
    import torch

    import llmc

    work, stored, rank = arguments.work, arguments.stored, arguments.rank
    hf = work / "llama-8b"
    cases = {lora: work / f"adapters-{stored}-{lora}" for lora in (False, True)}
    if not hf.is_dir():
        bench_model.write(hf, layers_per_shard=8, positions=131072, **SHAPE)
    for lora, case in cases.items():
        if not case.is_dir():
            llmc.compile(hf, case, dtype="bfloat16", target="cuda", max_seq_len=LONGEST,
                         enable_lora=lora, quantize="" if stored == "bf16" else stored)
    adapter = work / f"adapter-{stored}-{rank}"
    peft = adapters.write_adapter(work / f"peft-{rank}", hf, rank)
    llmc.compile_adapter(peft, cases[True], adapter)
    if arguments.compile_only:
        return
    names = [f"adapter{index}" for index in range(COUNT)]
    print(stored, "rank", rank, bench_model.environment("torch"), torch.cuda.get_device_name(),
          "\n", flush=True)
    options: dict[str, Any] = dict(max_batch_size=AT_ONCE, verify=False, prefix_reuse=False,
                                   max_num_batched_tokens=2048, kv_cache_tokens=160_000)
    with ExitStack() as stack:
        plain = stack.enter_context(llmc.LLM(cases[False], **options))
        lora = stack.enter_context(llmc.LLM(
            cases[True], adapters=dict.fromkeys(names, adapter), max_loras=COUNT, **options))

        def run(llm: llmc.LLM) -> Generate:
            def generate(prompts: Prompts, counts: Sequence[int], ids: Sequence[int]) -> object:
                params = [llmc.SamplingParams(max_tokens=count, ignore_eos=True)
                          for count in counts]
                return llm.generate(prompts, params, adapter=[
                    names[index] if index >= 0 else None for index in ids])
            return generate

        table({"without --enable_lora": (run(plain), False), "no adapter": (run(lora), False),
               "an adapter each": (run(lora), True)}, rank, arguments.rounds)


def run_vllm(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm_gpu import _described

    peft = str(arguments.work / f"peft-{arguments.rank}")
    print("rank", arguments.rank, "vllm", vllm.__version__, "\n", flush=True)
    llm = LLM(model=_described(arguments.work, None), load_format="dummy", dtype="bfloat16",
              skip_tokenizer_init=True, max_num_seqs=AT_ONCE, max_model_len=LONGEST, seed=0,
              disable_log_stats=True, enable_prefix_caching=False, enable_lora=True,
              max_loras=COUNT, max_cpu_loras=COUNT, max_lora_rank=max(arguments.rank, 16),
              max_num_batched_tokens=2048)

    def generate(prompts: Prompts, counts: Sequence[int], ids: Sequence[int]) -> object:
        return llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
             for count in counts], use_tqdm=False,
            lora_request=[LoRARequest(f"adapter{index}", index + 1, peft) if index >= 0 else None
                          for index in ids])

    table({"no adapter": (generate, False), "an adapter each": (generate, True)}, arguments.rank,
          arguments.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("llmc", "vllm"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--stored", choices=("bf16", "int4"), default="bf16",
                        help="llmc: storage format of the base's weights.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile_only", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    (run_llmc if arguments.side == "llmc" else run_vllm)(arguments)


if __name__ == "__main__":
    main()
