"""Throughput and latency over a grid of batch sizes and sequence lengths."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.artifacts.manifest import prompt_vocab_size
from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.prompts import Prompt
from llmc.runtime.random_images import RandomImages
from llmc.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class Row:
    """Medians over the runs of one cell of the grid.

    Args:
        tokens_per_sec: generated tokens of all sequences.
        latency_ms: time of the whole generation.
        tctx_ms: TTFT, prefill time: until every sequence has its first token.
        tgen_ms: TPOT: time per later token.
        preprocess_ms: time to preprocess the images of one prompt, which the other times do not
            include; None without images.
        speculation: comparison with plain decoding, if it was measured.
    """

    batch: int
    input_length: int
    output_length: int
    tokens_per_sec: float
    latency_ms: float
    tctx_ms: float
    tgen_ms: float
    speculation: Speculation | None = None
    preprocess_ms: float | None = None


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding next to plain decoding, in alternating runs of one loaded model.

    Args:
        plain_tokens_per_sec: median of the plain runs.
        speedup: median of the pairs' ratios of tokens per second.
        drafts: number of verifications in all runs.
        draft_tokens, accepted_tokens: drafts verified and accepted.
        acceptance_length: mean number of tokens of a verification, accepted drafts + 1; None
            without any.
    """

    plain_tokens_per_sec: float
    speedup: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_length: float | None

    @staticmethod
    def of(before: Mapping[str, Any], after: Mapping[str, Any], plain: Sequence[float],
           speculative: Sequence[float]) -> Speculation:
        """Compare pairs of runs.

        Args:
            before, after: `LLM.metrics` before and after all runs.
            plain, speculative: tokens per second of each run.
        """
        drafts, draft_tokens, accepted = (
            after[f"spec_decode_{name}"] - before[f"spec_decode_{name}"]
            for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return Speculation(
            statistics.median(plain),
            statistics.median(b / a for a, b in zip(plain, speculative, strict=True)),
            drafts, draft_tokens, accepted, accepted / drafts + 1 if drafts else None)


def parse_grid(batch_size: str, input_output_len: str) -> list[tuple[int, int, int]]:
    """Parse `"1;4"`, `"64,64;128,20"` to (batch, input, output) in the table's order.

    Raises:
        LlmcError: a part is not a positive integer.
    """
    try:
        batches = [int(part) for part in batch_size.split(";")]
        lengths = [tuple(int(n) for n in part.split(",")) for part in input_output_len.split(";")]
    except ValueError:
        batches, lengths = [], []
    if not batches or not lengths or any(len(pair) != 2 for pair in lengths) \
            or min(batches) < 1 or min(min(pair) for pair in lengths) < 1:
        raise LlmcError(f'the grid "{batch_size}" and "{input_output_len}" is not understood; '
                        f'write it like "1;4" and "64,64;128,20"')
    return [(batch, pair[0], pair[1]) for pair in lengths for batch in batches]


def measure(llm: LLM, batch: int, input_length: int, output_length: int, *, runs: int = 3,
            warmup: int = 1, params: SamplingParams | None = None, compare: bool = False,
            images: RandomImages | None = None) -> Row:
    """Generate `output_length` tokens for `batch` random prompts, `runs` times.

    Args:
        warmup: number of runs before these.
        params: sampling parameters; None: greedy.
        compare: before each run, also run without drafts.
        images: images of each prompt, before its tokens.
    """
    rng = np.random.default_rng(0)
    vocab_size = prompt_vocab_size(llm.manifest, "bench")
    texts = rng.integers(0, vocab_size, (batch, input_length)).tolist()
    prompts: Sequence[Prompt] = texts
    params = dataclasses.replace(params or SamplingParams(), max_tokens=output_length,
                                 ignore_eos=True)
    times, plain, preprocessing = [], [], []
    before = llm.metrics()
    for run in range(warmup + runs):
        if run == warmup:
            before = llm.metrics()
        if images is not None:
            prompts, seconds = images.prompts(llm, texts, rng)
            preprocessing.append(seconds / batch * 1e3)
        if compare:
            with without_drafts(llm):
                plain.append(_timed(llm, prompts, params)[1])
        times.append(_timed(llm, prompts, params))
    firsts, totals = zip(*times[warmup:], strict=True)
    latency = statistics.median(totals)
    laters = [(total - first) / max(1, output_length - 1)
              for first, total in zip(firsts, totals, strict=True)]
    tokens = batch * output_length
    speculation = Speculation.of(
        before, llm.metrics(), [tokens / seconds for seconds in plain[warmup:]],
        [tokens / seconds for seconds in totals]) if compare else None
    return Row(batch, input_length, output_length, tokens / latency, latency * 1e3,
               statistics.median(firsts) * 1e3, statistics.median(laters) * 1e3, speculation,
               statistics.median(preprocessing[warmup:]) if images is not None else None)


@contextmanager
def without_drafts(llm: LLM) -> Iterator[None]:
    """Context in which new requests have no drafts."""
    llm.enable_drafts(False)
    try:
        yield
    finally:
        llm.enable_drafts(True)


def _timed(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> \
        tuple[float, float]:
    """Seconds until every prompt has its first token, and until the last token."""
    start = time.perf_counter()
    first = 0.0
    waiting = set(range(len(prompts)))
    for piece in llm.stream(prompts, params):
        if piece.index in waiting:
            waiting.remove(piece.index)
            first = time.perf_counter() - start
    return first, time.perf_counter() - start


def check_grid(llm: LLM, grid: Sequence[tuple[int, int, int]],
               images: RandomImages | None = None) -> None:
    """Check that the grid, with its images, fits the KV cache and the encoder.

    Raises:
        LlmcError: a cell does not fit.
    """
    room, encoder = llm.manifest.dims.max_seq_len, llm.manifest.encoder
    rows = 0
    if images is not None:
        (prompt,), _ = images.prompts(llm, [()], np.random.default_rng(0))
        rows = len(prompt)
    for _, inputs, outputs in grid:
        if encoder is not None:
            if inputs > encoder.max_seq_len:
                raise LlmcError(f"{inputs} tokens exceed the encoder's {encoder.max_seq_len}; "
                                f"compile with a larger --mem_max_seq_len")
            inputs = 0
        if rows + inputs + outputs > room:
            pictures = f"{rows} of images + " if rows else ""
            raise LlmcError(f"{pictures}{inputs} + {outputs} tokens exceed the KV cache of {room}; "
                            f"compile with a larger --max_seq_len")
