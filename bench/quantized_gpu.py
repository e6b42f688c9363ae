"""Steps of Llama-3.1-8B's shape by storage format of its linear layers, on one GPU.

    python bench/quantized_gpu.py WORK_DIR [--stored fp8,int4,bf16] [--layers 32] [--static 1x400]

| --stored | checkpoint, with random weights |
| --- | --- |
| fp8 | compressed-tensors FP8_DYNAMIC: activations per token |
| fp8 static | FP8: a static activation scale per layer |
| fp8 weights | FP8 weights alone |
| fp8 blocks | FP8_BLOCK, blocks of 128 × 128 |
| fp8 blocks rounded | the same, with activations quantized per group |
| int4 | W4A16, groups of 128 |
| bf16 | not quantized |

The LM head is in bfloat16, as in published checkpoints, except with `int4 head`. Each row: TTFT and
a step, medians of runs of 1, 17 and 65 tokens by the host's clock, greedy, after prompts of 128
tokens or as --static, as in vllm_gpu.py; the TTFT of 64 × 128 is a prefill of 8,192 tokens. After
the table: a decode step's time by kind of kernel.
`--crowds 3` instead runs vllm_gpu.py's offline workload 3 times, in steps of at most 2,048 tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_model
import gpu
import vllm_gpu

import llmc

CASES = [f"{batch}x128" for batch in (1, 8, 16, 17, 32, 64, 128)]
LONGEST = 4096


def case_of(stored: str, work: Path, layers: int) -> Path:
    """Return the case directory of the model in this storage format; compile it if absent."""
    return bench_model.compiled(work, f"llama-{layers}", stored, LONGEST, lambda hf, form: (
        bench_model.write(hf, layers_per_shard=8, positions=LONGEST, stored=form,
                          **{**vllm_gpu.SHAPE, "layers": layers})))


def params(count: int) -> llmc.SamplingParams:
    return llmc.SamplingParams(max_tokens=count, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--stored", type=lambda text: text.split(","),
                        default=["fp8", "fp8 weights", "int4", "int4 head", "bf16"])
    parser.add_argument("--layers", type=int, default=vllm_gpu.SHAPE["layers"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--static", type=lambda text: text.split(","), default=CASES)
    parser.add_argument("--crowds", type=int, default=0)
    parser.add_argument("--max_num_batched_tokens", type=int, default=64 * 128)
    parser.add_argument("--compile_only", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for stored in arguments.stored:
        case = case_of(stored, arguments.work, arguments.layers)
        if arguments.compile_only:
            continue
        with llmc.LLM(case, max_batch_size=256, verify=False, prefix_reuse=False,
                      max_num_batched_tokens=2048 if arguments.crowds
                      else arguments.max_num_batched_tokens) as llm:
            print(f"{stored}, {arguments.layers} layers", flush=True)
            for _ in range(arguments.crowds):
                vllm_gpu.run_workload(
                    "offline throughput", lambda prompts, counts, llm=llm: llm.generate(
                        prompts, [params(count) for count in counts]), *vllm_gpu.workload())
            if arguments.crowds:
                continue
            vllm_gpu.static(lambda prompts, count, llm=llm: llm.generate(prompts, params(count)),
                            arguments.rounds, arguments.static)
            print("\nmicroseconds of a decode step (kernels):")
            for batch in (1, 8, 16, 64):
                print(gpu.breakdown(llm, batch, 128), flush=True)


if __name__ == "__main__":
    main()
