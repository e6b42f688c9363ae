"""llmc next to vLLM with speculation on one GPU: Llama-3.1-8B's shape in bfloat16, random weights.

    python bench/speculate_vllm.py llmc WORK_DIR      makes the checkpoint and the EAGLE-3 head
    python bench/speculate_vllm.py vllm WORK_DIR      where vLLM can be imported, after `llmc`

Both sides run one checkpoint, one head and the same prompts. Acceptance is simulated: the weights
of the final norm and of the head leave one logit, so that token 0 has the probability RATE wherever
a token is sampled, and both proposers draft token 0. Tokens per second are medians of --runs whole
generations of 256 tokens at temperature 1, in runs after one another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RATE, OUT, LONGEST = 0.71, 256, 2048
SIZES = [(1, 128), (4, 128), (16, 128), (64, 128)]  # sequences, tokens of a prompt
WAYS = [("off", 0), ("ngram", 3), ("eagle3", 3), ("eagle3", 5)]
LARGE = 30000.0  # of dimension 0 of every embedding, so that it is all of a hidden state's norm
Generate = Callable[[Sequence[Sequence[int]]], object]


def one_logit(directory: Path, vocab: int, hidden: int) -> None:
    """Change a checkpoint so that the logit of token 0 is constant and all others are 0."""
    from safetensors.torch import load_file, save_file

    wanted = math.log(RATE / (1 - RATE) * (vocab - 1))
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {index[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}:
        tensors = load_file(directory / file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][:, 0] = LARGE
        if "lm_head.weight" in tensors:
            tensors["model.norm.weight"].zero_()
            tensors["model.norm.weight"][0] = 1
            tensors["lm_head.weight"][:, 0] = 0
            tensors["lm_head.weight"][0, 0] = wanted / math.sqrt(hidden)
        save_file(tensors, directory / file)


def made(work: Path) -> tuple[Path, Path]:
    """Return the directories of the checkpoint and of the EAGLE-3 head; write them if absent."""
    target, head = work / "llama-one-logit", work / "llama-one-logit-head"
    if not head.is_dir():
        import bench_model
        import vllm_gpu

        bench_model.write(target, layers_per_shard=8, **vllm_gpu.SHAPE)
        one_logit(target, vllm_gpu.SHAPE["vocab"], vllm_gpu.SHAPE["hidden"])
        bench_model.write_eagle3(target, head)
    return target, head


@contextmanager
def llmc_side(work: Path, way: str, count: int) -> Iterator[tuple[Generate, Callable[[], str]]]:
    import llmc

    target, head = made(work)
    case = work / "llama-one-logit-case"
    if not case.is_dir():
        llmc.compile(target, case, dtype="bfloat16", target="cuda", max_seq_len=LONGEST,
                     draft=f"eagle3:{head}")
    speculate = {"eagle3": "draft"}.get(way, way)
    options: dict[str, Any] = {} if way == "off" else {"num_speculative_tokens": count}
    with llmc.LLM(case, max_batch_size=64, verify=False, prefix_reuse=False, speculate=speculate,
                  **options) as llm:
        params = llmc.SamplingParams(max_tokens=OUT, ignore_eos=True, temperature=1.0)

        def length() -> str:
            counts = llm.metrics()
            return f"{1 + counts['spec_decode_accepted_tokens'] / counts['spec_decode_drafts']:.2f}"

        yield lambda prompts: llm.generate(prompts, params), length


@contextmanager
def vllm_side(work: Path, way: str, count: int) -> Iterator[tuple[Generate, Callable[[], str]]]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    target, head = made(work)
    config: dict[str, Any] | None = {"num_speculative_tokens": count}
    if way == "off":
        config = None
    elif way == "ngram":
        config |= {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    else:
        config |= {"method": "eagle3", "model": str(head)}
    llm = LLM(model=str(target), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64,
              seed=0, max_model_len=LONGEST, disable_log_stats=False, enable_prefix_caching=False,
              attention_backend="FLASH_ATTN", enable_flashinfer_autotune=False,
              speculative_config=config, gpu_memory_utilization=0.8)
    params = SamplingParams(temperature=1.0, max_tokens=OUT, ignore_eos=True, detokenize=False)

    def length() -> str:
        counts = {metric.name: metric.value for metric in llm.get_metrics()
                  if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")}
        accepted, drafts = (counts[f"vllm:spec_decode_num_{name}"]
                            for name in ("accepted_tokens", "drafts"))
        return f"{1 + accepted / drafts:.2f}"

    yield lambda prompts: llm.generate([{"prompt_token_ids": own} for own in prompts], params,
                                       use_tqdm=False), length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("llmc", "vllm"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--ways", default=",".join(f"{way}:{count}" for way, count in WAYS),
                        help="speculation and number of drafts")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print("| side, speculation, drafts | acceptance length | "
          + " | ".join(f"{batch} × {size}" for batch, size in SIZES) + " (tokens/s) |\n"
          + "| --- " * (2 + len(SIZES)) + "|", flush=True)
    side = llmc_side if arguments.side == "llmc" else vllm_side
    for way, count in (given.split(":") for given in arguments.ways.split(",")):
        with side(arguments.work, way, int(count)) as (generate, length):
            cells = []
            for batch, size in SIZES:
                prompts = [[i + 11, *range(100, 99 + size)] for i in range(batch)]
                seconds = []
                for _ in range(1 + arguments.runs):
                    start = time.perf_counter()
                    generate(prompts)
                    seconds.append(time.perf_counter() - start)
                cells.append(f"{batch * OUT / statistics.median(seconds[1:]):.0f}")
            accepted = length() if way != "off" else ""
        print(f"| {arguments.side}, {way}, {count} | {accepted} | {' | '.join(cells)} |",
              flush=True)


if __name__ == "__main__":
    main()
