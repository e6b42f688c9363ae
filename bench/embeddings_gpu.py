"""Embedding models on one GPU: bge-large's and Qwen3-Embedding-0.6B's shapes, random weights.

    python bench/embeddings_gpu.py WORK_DIR
    python bench/embeddings_gpu.py WORK_DIR --engines llmc --models bge-large

Prints tokens per second of many texts at once, given as token ids, and the latency of one query,
in bfloat16: of llmc, of transformers' forward pass (as SentenceTransformers calls it: sorted by
length, 64 padded texts at a time) with SDPA and, where flash_attn can be imported, FlashAttention
2, and of vLLM where that can be imported. Each engine runs in a separate process. The GEMM limit
is the time that torch's linear layers of these shapes take for 16,384 tokens, without anything
between them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench_model
import numpy as np
import torch

Texts = list[list[int]]
Embed = Callable[[Texts], object]

STEP = 16384  # packed tokens of a step, of llmc and vLLM
BATCH = 64  # texts of a padded batch
LONGEST = 512
QUERIES = (16, 64)  # tokens of a query alone
_NEEDS = {"transformers": "transformers", "transformers-flash": "flash_attn", "vllm": "vllm",
          "llmc": "llmc_cuda"}
MODELS: dict[str, dict[str, Any]] = {
    "bge-large": dict(
        model_type="bert", pooling="cls", hidden_size=1024, num_hidden_layers=24,
        num_attention_heads=16, intermediate_size=4096, vocab_size=30522,
        max_position_embeddings=LONGEST),
    "qwen3-0.6b": dict(
        model_type="qwen3", pooling="lasttoken", hidden_size=1024, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072,
        vocab_size=151669, max_position_embeddings=32768, rope_theta=1e6,
        tie_word_embeddings=True)}


def workloads(vocab: int) -> dict[str, Texts]:
    """Texts by name: of mixed lengths, and all of one length."""
    rng = np.random.default_rng(0)
    lengths = {"16 to 512 tokens": rng.integers(16, LONGEST + 1, 4096).tolist(),
               **{f"{size} tokens": [size] * (2**20 // size) for size in (16, 128, LONGEST)}}
    return {name: [rng.integers(1000, vocab, size).tolist() for size in sizes]
            for name, sizes in lengths.items()}


def save(name: str, directory: Path) -> Path:
    """Write a Hugging Face directory with random weights, and modules.json with its pooling."""
    from transformers import CONFIG_MAPPING, AutoModel

    if (directory / "modules.json").exists():
        return directory
    fields = {**MODELS[name]}
    pooling, kind = fields.pop("pooling"), fields.pop("model_type")
    torch.manual_seed(0)
    AutoModel.from_config(CONFIG_MAPPING[kind](**fields)).to(torch.bfloat16) \
        .save_pretrained(directory)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(
        {"word_embedding_dimension": fields["hidden_size"],
         f"pooling_mode_{'cls_token' if pooling == 'cls' else pooling}": True}))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (directory / "modules.json").write_text(json.dumps([
        {"idx": index, "name": str(index), "path": path,
         "type": f"sentence_transformers.models.{module}"}
        for index, (module, path) in enumerate(modules)]))
    return directory


def gemm_limit(name: str) -> float:
    """Tokens per second of the model's linear layers alone."""
    fields = MODELS[name]
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    dim = fields.get("head_dim", hidden // fields["num_attention_heads"])
    heads = fields["num_attention_heads"] * dim
    kv_heads = fields.get("num_key_value_heads", fields["num_attention_heads"]) * dim
    gated = fields["model_type"] == "qwen3"
    shapes = [(hidden, heads + 2 * kv_heads), (heads, hidden),
              (hidden, inner * (2 if gated else 1)), (inner, hidden)]
    taken = sum(bench_model.gemm_seconds(STEP, width, rows) for width, rows in shapes)
    return STEP / (taken * fields["num_hidden_layers"])


def of_llmc(directory: Path) -> Embed:
    """Compile the model where that is not done yet."""
    import llmc

    case = directory.with_name(f"{directory.name}-case")
    if not case.exists():
        llmc.compile(directory, case, target="cuda", dtype="bfloat16", max_seq_len=LONGEST)
    llm = llmc.LLM(case, max_batch_size=STEP // 16, max_num_batched_tokens=STEP,
                   gpu_memory_utilization=0.5)
    return llm.embed


def of_transformers(directory: Path, attention: str) -> Embed:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.bfloat16,
                                      attn_implementation=attention).cuda().eval()
    takes_last = "qwen3" in directory.name

    @torch.inference_mode()
    def embed(texts: Texts) -> object:
        rows = []
        texts = sorted(texts, key=len, reverse=True)
        for batch in (texts[start:start + BATCH] for start in range(0, len(texts), BATCH)):
            most = len(batch[0])
            ids, mask = (torch.tensor([fill(own) + [0] * (most - len(own)) for own in batch])
                         .cuda() for fill in (list, lambda own: [1] * len(own)))
            hidden = model(input_ids=ids, attention_mask=mask)[0]
            at = mask.sum(1) - 1 if takes_last else torch.zeros_like(mask[:, 0])
            row = hidden[torch.arange(len(batch), device="cuda"), at].float()
            rows.append(torch.nn.functional.normalize(row, dim=1))
        return torch.cat(rows).cpu().numpy()
    return embed


def of_vllm(directory: Path) -> Embed:
    from vllm import LLM, TokensPrompt

    llm = LLM(str(directory), runner="pooling", dtype="bfloat16", skip_tokenizer_init=True,
              max_model_len=LONGEST, max_num_batched_tokens=STEP, max_num_seqs=STEP // 16,
              gpu_memory_utilization=0.5)
    return lambda texts: llm.embed([TokensPrompt(prompt_token_ids=own) for own in texts],
                                   use_tqdm=False)


def load(engine: str, directory: Path) -> Embed:
    if engine == "llmc":
        return of_llmc(directory)
    if engine == "vllm":
        return of_vllm(directory)
    return of_transformers(directory, "flash_attention_2" if engine.endswith("flash") else "sdpa")


def measure(engine: str, name: str, work: Path) -> dict[str, float]:
    """Tokens per second of each workload, and milliseconds of one query."""
    embed = load(engine, work / name)
    found = {}
    every = workloads(MODELS[name]["vocab_size"])
    for what, texts in every.items():
        embed(texts[:256])
        gc.freeze()
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            embed(texts)
            taken.append(time.perf_counter() - start)
        found[what] = sum(map(len, texts)) / min(taken)
    for size in QUERIES:
        query, taken = every["128 tokens"][0][:size], []
        for _ in range(120):
            start = time.perf_counter()
            embed([query])
            taken.append(time.perf_counter() - start)
        found[f"one of {size}"] = statistics.median(taken[20:]) * 1e3
    return found


def report(engines: Sequence[str], names: Sequence[str], work: Path) -> None:
    print(f"{torch.cuda.get_device_name()}, {bench_model.environment('torch', 'transformers')}\n")
    for name in names:
        save(name, work / name)
        limit, vocab = gemm_limit(name), MODELS[name]["vocab_size"]
        torch.cuda.empty_cache()
        columns = [*workloads(vocab), *(f"one of {size}" for size in QUERIES)]
        print(f"{name}: tokens/s (share of the GEMM limit, {limit:.0f}), ms of one query\n")
        print(f"| engine | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
        for engine in engines:
            made = subprocess.run(
                [sys.executable, __file__, str(work), "--engines", engine, "--models", name,
                 "--measure"], capture_output=True, text=True)
            if made.returncode:
                reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
                print(f"| {engine} | not measured: {reason} |{' |' * (len(columns) - 1)}")
                continue
            found = json.loads(made.stdout.splitlines()[-1])
            cells = [f"{found[what]:.2f}" if what.startswith("one") else
                     f"{found[what]:.0f} ({found[what] / limit:.0%})" for what in columns]
            print(f"| {engine} | {' | '.join(cells)} |", flush=True)
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--engines", nargs="+", choices=[*_NEEDS], default=[
        engine for engine, package in _NEEDS.items() if find_spec(package)])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--measure", action="store_true", help="in this process, as JSON")
    options = parser.parse_args()
    if options.measure:
        engine, = options.engines
        name, = options.models
        print(json.dumps(measure(engine, name, options.work)))
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        report(options.engines, options.models, options.work)


if __name__ == "__main__":
    main()
