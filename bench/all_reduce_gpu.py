"""Collectives of a tensor-parallel step: NCCL next to llmc's kernels over peer memory.

    python bench/all_reduce_gpu.py --ranks 2

All-reduce of rows of 4,096 bfloat16 elements, alone and with the RMSNorm after it, and all-gather
of logits of a vocabulary of 128,256 tokens. Ranks are threads of one process, each with a GPU.
Microseconds per collective on the slowest rank, medians over many; captured ones run inside a CUDA
graph, as in decode steps, the others are launched one by one, as in prefill.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import bench_model
import torch

from llmc.runtime.engines.cuda import extension

HIDDEN, VOCABULARY = 4096, 128256
REDUCED_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
GATHERED_ROWS = [1, 2, 4, 8, 16, 32, 64, 128]
WAYS = ["nccl", "one_shot", "two_shot"]
COLUMNS = ["NCCL", "one-shot", "two-shot"]
REPEATS, RUNS = 50, 7
PACKET_BYTES, BUFFER_BYTES = 512 << 10, 64 << 20


class Ranks:
    """Ranks with tensors of one size on each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks = extension().LocalRanks([*range(size)], PACKET_BYTES, BUFFER_BYTES)

    def microseconds(self, op: str, way: str, tensors: Sequence[Sequence[torch.Tensor | None]], *,
                     captured: bool) -> float:
        """Median time of a collective. Tensors are in the order of `LocalRanks.run`, per rank."""
        described = [[_described(tensor) for tensor in own] for own in tensors]
        for rank in range(self.size):
            torch.cuda.synchronize(rank)
        return 1e3 * statistics.median(
            self._ranks.run(op, way, described, repeats=REPEATS, captured=captured)
            for _ in range(RUNS))


def _described(tensor: torch.Tensor | None) -> tuple[int, str, list[int]]:
    if tensor is None:
        return 0, "float32", []
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def empty(rank: int, rows: int, width: int) -> torch.Tensor:
    return torch.zeros(rows, width, dtype=torch.bfloat16, device=f"cuda:{rank}")


def reduced(ranks: Ranks, rows: int, way: str, *, captured: bool) -> float:
    return ranks.microseconds("all_reduce", way, [
        [empty(rank, rows, HIDDEN), empty(rank, rows, HIDDEN)] for rank in range(ranks.size)],
        captured=captured)


def normed(ranks: Ranks, rows: int, *, captured: bool) -> float:
    return ranks.microseconds("all_reduce_norm", "one_shot", [
        [empty(rank, rows, HIDDEN), None, empty(rank, rows, HIDDEN), empty(rank, rows, HIDDEN),
         None, torch.ones(HIDDEN, device=f"cuda:{rank}")] for rank in range(ranks.size)],
        captured=captured)


def gathered(ranks: Ranks, rows: int, way: str, *, captured: bool) -> float:
    width = VOCABULARY // ranks.size // 8 * 8
    return ranks.microseconds("all_gather", way, [
        [empty(rank, rows, width * ranks.size), empty(rank, rows, width),
         empty(rank, rows, width * ranks.size)] for rank in range(ranks.size)], captured=captured)


def fits(way: str, rows: int, width: int, factor: int) -> bool:
    """Whether the ways over peer memory take this size; `factor`: of the buffer, per byte."""
    limit = {"one_shot": PACKET_BYTES, "two_shot": BUFFER_BYTES // factor}
    return rows * width * 2 <= limit.get(way, rows * width * 2)


def table(title: str, rows: Sequence[int], columns: Sequence[str], measure: Any) -> None:
    """Print a table of microseconds; `measure(rows, captured)` has a cell for each column."""
    for captured in (True, False):
        print(f"\n| {title}, {'captured' if captured else 'launched'}: us | "
              f"{' | '.join(columns)} |\n|{' --- |' * (1 + len(columns))}")
        for count in rows:
            cells = ["" if value is None else f"{value:.1f}" for value in measure(count, captured)]
            print(f"| {count} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    count = parser.parse_args().ranks
    if torch.cuda.device_count() < count:
        parser.error(f"{count} ranks need {count} GPUs, there are {torch.cuda.device_count()}")
    print(bench_model.environment("torch"), f"{count} × {torch.cuda.get_device_name()}", flush=True)
    ranks = Ranks(count)

    def sums(rows: int, captured: bool) -> list[float | None]:
        alone = [reduced(ranks, rows, way, captured=captured)
                 if fits(way, rows, HIDDEN, 2) else None for way in WAYS]
        return [*alone, normed(ranks, rows, captured=captured)
                if fits("one_shot", rows, HIDDEN, 2) else None]

    def logits(rows: int, captured: bool) -> list[float | None]:
        return [gathered(ranks, rows, way, captured=captured)
                if fits(way, rows, VOCABULARY // count, count) else None for way in WAYS]

    table("rows summed", REDUCED_ROWS, [*COLUMNS, "one-shot with norm"], sums)
    table("rows of logits", GATHERED_ROWS, ["NCCL", "packets", "buffers"], logits)


if __name__ == "__main__":
    main()
