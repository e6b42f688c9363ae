"""Workloads of many requests on one GPU, llmc and vLLM: Llama-3.1-8B's shape, random weights.

    python bench/serving_gpu.py llmc WORK_DIR [--stored bf16,"fp8 static",int4]
    python bench/serving_gpu.py vllm WORK_DIR [--stored bf16,fp8,awq]    where vLLM can be imported

A workload 256x1000-3000x64-256@128 is 256 requests of 1,000 to 3,000 random tokens in and 64 to 256
out, greedy, at most 128 at once. Each runs --runs times with other tokens, all given at once; the
median of output tokens per second, of all tokens per second, and of the GPU's power. Both sides run
on one machine, one after the other, with their default number of tokens in a step.
--stored: storage formats of quantized_gpu.py; of vLLM, its quantization. --profile: of llmc, the
time of each kernel in one more run.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import vllm_gpu
from vllm_gpu import Prompts

WORKLOADS = ["512x32-512x16-256@256", "256x1000-3000x64-256@256", "1024x778x73@256",
             "64x8000x64@64", "16x30000x16@16", "1024x100x100@1024", "256x100x1000@256",
             "64x1000x1000@64", "8x1000x500@8", "1x1000x500@1"]
LONGEST = 33024
Generate = Callable[[Prompts, list[int]], object]


class Workload:
    """Requests of random tokens.

    Args:
        name: REQUESTSxINxOUT@CONCURRENT, IN and OUT each one number or a range.
    """

    def __init__(self, name: str) -> None:
        sizes, at_once = name.split("@")
        number, *ranges = sizes.split("x")
        self.name, self.number, self.at_once = name, int(number), int(at_once)
        self.inputs, self.outputs = ([int(end) for end in given.split("-")] for given in ranges)

    def requests(self, run: int) -> tuple[Prompts, list[int]]:
        """Prompts and numbers of output tokens; lengths are the same in every run."""
        lengths, tokens = np.random.default_rng(0), np.random.default_rng((1, run))
        inputs, outputs = (lengths.integers(own[0], own[-1] + 1, self.number).tolist()
                           for own in (self.inputs, self.outputs))
        return [tokens.integers(5, 128000, size).tolist() for size in inputs], outputs


class Power:
    """Measures the median power of the first GPU, in watts, while it is entered."""

    def __enter__(self) -> Power:
        self._process = subprocess.Popen(
            ["nvidia-smi", "--id=0", "--query-gpu=power.draw", "--format=csv,noheader,nounits",
             "--loop-ms=200"], stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._process.terminate()
        lines = self._process.communicate()[0].splitlines()
        self.watts = statistics.median([float(line) for line in lines if line] or [float("nan")])


def measure(workload: Workload, generate: Generate, runs: int) -> None:
    """Print a workload's row."""
    made, everything, watts = [], [], []
    for run in range(runs):
        prompts, outputs = workload.requests(run)
        with Power() as power:
            start = time.perf_counter()
            generate(prompts, outputs)
            seconds = time.perf_counter() - start
        made.append(sum(outputs) / seconds)
        everything.append((sum(outputs) + sum(map(len, prompts))) / seconds)
        watts.append(power.watts)
    print(f"| {workload.name} | {statistics.median(made):.0f} | {statistics.median(everything):.0f}"
          f" | {min(made):.0f} to {max(made):.0f} | {statistics.median(watts):.0f} |", flush=True)


def profile(workload: Workload, generate: Generate, runs: int) -> None:
    """Print the time of each kernel, from the latest end before it to its own end."""
    import bench_model

    prompts, outputs = workload.requests(runs)
    seconds, taken, counts = bench_model.kernel_times(lambda: generate(prompts, outputs))
    print(f"\n{workload.name}: {seconds:.2f} s, kernels {sum(taken.values()):.2f} s")
    for name, spent in sorted(taken.items(), key=lambda item: -item[1])[:25]:
        print(f"{spent * 1e3:9.1f} ms {counts[name]:7d} x {spent * 1e6 / counts[name]:8.1f} us  "
              f"{name[:110]}")


@contextmanager
def llmc_side(work: Path, stored: str, at_once: int) -> Iterator[Generate]:
    import bench_model

    import llmc

    case = bench_model.compiled(work, "llama-32", stored, LONGEST, lambda hf, form: (
        bench_model.write(hf, layers_per_shard=8, positions=LONGEST, stored=form,
                          **vllm_gpu.SHAPE)))
    with llmc.LLM(case, max_batch_size=at_once, verify=False, prefix_reuse=False) as llm:
        yield lambda prompts, counts: llm.generate(prompts, [
            llmc.SamplingParams(max_tokens=count, ignore_eos=True) for count in counts])


@contextmanager
def vllm_side(work: Path, stored: str, at_once: int) -> Iterator[Generate]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {} if stored == "bf16" else {"quantization": stored}
    llm = LLM(model=vllm_gpu._described(work, options.get("quantization")), load_format="dummy",
              dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=at_once, seed=0,
              max_model_len=LONGEST, disable_log_stats=True, enable_prefix_caching=False,
              attention_backend="FLASH_ATTN", enable_flashinfer_autotune=False, **options)
    yield lambda prompts, counts: llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
         for count in counts], use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("llmc", "vllm"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--stored", type=lambda text: text.split(","), default=["bf16"])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=WORKLOADS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    workloads = [Workload(name) for name in arguments.workloads]
    side = llmc_side if arguments.side == "llmc" else vllm_side
    for stored in arguments.stored:
        print(f"\n{arguments.side}, {stored}\n\n| requests, in, out, at once | output tokens/s "
              "| tokens/s | range | W |\n| --- | --- | --- | --- | --- |", flush=True)
        for at_once in sorted({workload.at_once for workload in workloads}):
            with side(arguments.work, stored, at_once) as generate:
                generate([[5, 6, 7]], [1])
                gc.freeze()
                for workload in workloads:
                    if workload.at_once != at_once:
                        continue
                    measure(workload, generate, arguments.runs)
                    if arguments.profile:
                        profile(workload, generate, arguments.runs)


if __name__ == "__main__":
    main()
