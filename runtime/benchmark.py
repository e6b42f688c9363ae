"""Throughput and latency over a grid of batch sizes and sequence lengths."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.errors import LlmcError
from llmc.runtime.core.llm import LLM
from llmc.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class Row:
    """Medians over the runs of one cell of the grid.

    Args:
        tokens_per_sec: generated tokens of all sequences.
        latency_ms: time of the whole generation.
        tctx_ms: prefill time: until every sequence has its first token.
        tgen_ms: TPOT: time per later token.
    """

    batch: int
    input_length: int
    output_length: int
    tokens_per_sec: float
    latency_ms: float
    tctx_ms: float
    tgen_ms: float


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
            warmup: int = 1, params: SamplingParams | None = None) -> Row:
    """Generate `output_length` tokens for `batch` random prompts, `runs` times.

    Args:
        warmup: number of runs before these.
        params: sampling parameters; None: greedy.
    """
    rng = np.random.default_rng(0)
    vocab_size = (llm.manifest.encoder or llm.manifest.dims).vocab_size
    prompts = rng.integers(0, vocab_size, (batch, input_length)).tolist()
    params = dataclasses.replace(params or SamplingParams(), max_tokens=output_length,
                                 ignore_eos=True)
    totals, firsts, laters = [], [], []
    for run in range(warmup + runs):
        start = time.perf_counter()
        first = 0.0
        waiting = set(range(batch))
        for piece in llm.stream(prompts, params):
            if piece.index in waiting:
                waiting.remove(piece.index)
                first = time.perf_counter() - start
        total = time.perf_counter() - start
        if run >= warmup:
            totals.append(total)
            firsts.append(first)
            laters.append((total - first) / max(1, output_length - 1))
    latency = statistics.median(totals)
    return Row(batch, input_length, output_length, batch * output_length / latency, latency * 1e3,
               statistics.median(firsts) * 1e3, statistics.median(laters) * 1e3)


def check_grid(llm: LLM, grid: Sequence[tuple[int, int, int]]) -> None:
    """Check that the grid fits the KV cache and the encoder.

    Raises:
        LlmcError: a cell does not fit.
    """
    room, encoder = llm.manifest.dims.max_seq_len, llm.manifest.encoder
    for _, inputs, outputs in grid:
        if encoder is not None:
            if inputs > encoder.max_seq_len:
                raise LlmcError(f"{inputs} tokens exceed the encoder's {encoder.max_seq_len}; "
                                f"compile with a larger --mem_max_seq_len")
            inputs = 0
        if inputs + outputs > room:
            raise LlmcError(f"{inputs} + {outputs} tokens exceed the KV cache of {room}; compile "
                            f"with a larger --max_seq_len")
