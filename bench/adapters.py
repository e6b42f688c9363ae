"""The cost of LoRA adapters in a decode step of SmolLM2-135M in float32 on a CPU.

    python bench/adapters.py WORK_DIR      makes its inputs there, then prints the table

Sides alternate: a model compiled without and with `--enable_lora`, and the latter with one adapter
for all sequences, and with a separate one for each. Adapters of rank 16 change all linear layers.
Milliseconds are medians, ratios are medians of pairs with the first side. Prompts are pieces of
README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import bench_model
import numpy as np
from safetensors.numpy import save_file

import llmc

PROMPT, NEW, RANK = 64, 32, 16
MOST = 8  # sequences, each with an adapter


def write_adapter(directory: Path, hf: Path, rank: int) -> Path:
    """Write a PEFT adapter of all linear layers of a Llama, with random factors."""
    if directory.is_dir():
        return directory
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = (width * config[f"num_{kind}_heads"] for kind in (
        "attention", "key_value"))
    sizes = {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
             "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
             "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
             "mlp.down_proj": (hidden, inner)}
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(config["num_hidden_layers"]):
        for module, (out, columns) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (rank, columns)), ("B", (out, rank))):
                tensors[f"{name}.lora_{part}.weight"] = (
                    rng.standard_normal(shape, np.float32) / 100)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2] for module in sizes], "bias": "none",
        "base_model_name_or_path": str(hf)}), encoding="utf-8")
    return directory


def step(llm: llmc.LLM, prompts: list[list[int]], adapters: Sequence[str | None]) -> float:
    """Measure the milliseconds of a decode step in a generation."""
    start = 0.0
    params = llmc.SamplingParams(max_tokens=NEW, ignore_eos=True)
    for count, _ in enumerate(llm.stream(prompts, params, adapter=adapters), 1):
        if count == len(prompts):
            start = time.perf_counter()
    return (time.perf_counter() - start) / (NEW - 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment("numpy"), "\n")
    hf = bench_model.smollm2(work / "smollm2")
    if not (work / "plain").is_dir():
        llmc.compile(hf, work / "plain")
    if not (work / "lora").is_dir():
        llmc.compile(hf, work / "lora", enable_lora=True)
    llmc.compile_adapter(write_adapter(work / "peft", hf, RANK), work / "lora", work / "adapter")
    text = Path(__file__).parent.with_name("README.md").read_text(encoding="utf-8")
    names = [f"adapter{index}" for index in range(MOST)]
    with ExitStack() as stack:
        plain = stack.enter_context(llmc.LLM(work / "plain", verify=False))
        lora = stack.enter_context(llmc.LLM(work / "lora", verify=False, max_loras=MOST,
                                            adapters=dict.fromkeys(names, work / "adapter")))
        tokens = plain.tokenizer.encode(text).ids
        print("| sequences | side | ms per step | ratio |\n| --- | --- | --- | --- |")
        for batch in (1, MOST):
            prompts = [tokens[row * PROMPT:(row + 1) * PROMPT] for row in range(batch)]
            sides = {"without --enable_lora": (plain, [None] * batch),
                     "no adapter": (lora, [None] * batch), "1 adapter": (lora, names[:1] * batch)}
            if batch > 1:
                sides[f"{batch} adapters"] = lora, names[:batch]
            times: dict[str, list[float]] = {name: [] for name in sides}
            for run in range(arguments.runs + 1):
                for name, (llm, adapters) in sides.items():
                    taken = step(llm, prompts, adapters)
                    if run:  # the first is a warm-up
                        times[name].append(taken)
            first = next(iter(times.values()))
            for name, own in times.items():
                ratio = statistics.median(b / a for a, b in zip(first, own, strict=True))
                print(f"| {batch} | {name} | {statistics.median(own):.2f} | {ratio:.3f} |",
                      flush=True)


if __name__ == "__main__":
    main()
