"""One layer's attention over KV blocks on one GPU, of Llama-3.1-8B's shape in bfloat16.

    python bench/attention_gpu.py

Prints bytes per second of decode, decode with a shared prefix, and operations per second of prefill
by llmc's kernel and by cuDNN. Microseconds are means over many launches. KV caches exceed the GPU's
L2, except where a few short sequences decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import bench_model
import numpy as np
import torch

from llmc.runtime.engines.cuda import extension

HEADS, KV_HEADS, DIM, BLOCK, POSITIONS = 32, 8, 128, 16, 33024
DECODING = [(1, 400), (1, 8000), (1, 32000), (2, 8000), (4, 8000), (8, 2000), (8, 8000), (16, 4000),
            (17, 4000), (32, 2000), (64, 400), (64, 1000), (128, 400), (200, 400), (256, 400)]
UNLIKE = [(1, 32000, 7, 300), (1, 32000, 39, 300), (1, 16000, 127, 300), (1, 8000, 255, 300)]
# Sequences, positions of their common prefix, and further positions of each.
SHARED = [(256, 512, 340), (128, 512, 340), (64, 512, 200), (64, 128, 200), (16, 512, 200),
          (16, 2000, 200), (8, 1000, 200), (8, 8000, 200), (4, 2000, 200), (4, 8000, 200),
          (2, 4000, 200), (2, 8000, 200), (2, 32000, 200)]
PROMPTS: list[tuple[list[int], int]] = [
    ([128], 0), ([500], 0), ([300, 200], 0), ([272] * 7, 0), ([512] * 4, 0), ([2048], 0),
    ([2048], 6000), ([2048], 14000), ([2048], 30000), ([8192], 0), ([8192], 23000),
    ([16384], 16000), ([32000], 0), ([8000] * 8, 0)]
FIELDS: dict[str, Any] = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
                              scale=1 / math.sqrt(DIM), rotary_dim=DIM)


def microseconds(new: Sequence[int], past: Sequence[int], *, repeats: int, library: bool = False,
                 scattered: bool = True, shared: int = 0, once: bool = False) -> float:
    """Time decode or prefill of sequences with cached tokens.

    Args:
        new: tokens of each sequence in the step.
        past: cached tokens of each sequence.
        library: use cuDNN.
        scattered: use scattered blocks instead of consecutive ones.
        shared: positions whose blocks all sequences share.
        once: read the shared blocks once, not by each sequence.
    """
    count = [-(-(own + before) // BLOCK) for own, before in zip(new, past, strict=True)]
    blocks = sum(count)
    cache = [torch.randn(blocks + 1, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
             for _ in range(2)]
    table = np.full((len(new), POSITIONS // BLOCK), blocks, np.int32)
    order = np.random.default_rng(0).permutation(blocks) if scattered else np.arange(blocks)
    for row, (start, size) in enumerate(zip(np.cumsum([0, *count[:-1]]), count, strict=True)):
        table[row, :size] = order[start:start + size]
    table[:, :shared // BLOCK] = table[0, :shared // BLOCK]
    tokens = sum(new)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    turns = torch.ones(POSITIONS, DIM // 2, device="cuda")

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def described(tensor: torch.Tensor) -> tuple[int, str, list[int]]:
        return (tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    absent = (0, "float32", [])
    given = [qkv, *cache, ints(np.cumsum([0, *new]).tolist()), ints(past), turns, turns]
    how: dict[str, Any] = {}
    if library:
        how = {"longest": max(new), "reach": max(map(sum, zip(new, past, strict=True)))}
    if once:
        how = {"own_from": [shared // BLOCK * BLOCK] * len(new)}
    taken: float = extension().run_op(
        "CausalAttention", FIELDS,
        [*map(described, given), absent, absent, described(torch.from_numpy(table).cuda())],
        [described(tensor) for tensor in (out, *cache)],
        len(new) if max(new) == 1 else 0, repeats, **how)
    return taken * 1e3


def main() -> None:
    print(bench_model.environment("torch"), torch.cuda.get_device_name(), "\n", flush=True)
    print("| sequences × positions | us | TB/s |\n| --- | --- | --- |")

    def decoding(name: str, lengths: Sequence[int]) -> None:
        taken = microseconds([1] * len(lengths), [length - 1 for length in lengths], repeats=60)
        read = sum(lengths) * 2 * KV_HEADS * DIM * 2
        print(f"| {name} | {taken:.1f} | {read / taken / 1e6:.2f} |", flush=True)

    for batch, length in DECODING:
        decoding(f"{batch} × {length}", [length] * batch)
    mixed = np.random.default_rng(3).integers(32, 700, 256).tolist()
    decoding("256 × 32 to 699, in any order", mixed)
    decoding("256 × 32 to 699, the longest first", sorted(mixed, reverse=True))
    for few, long, many, short in UNLIKE:
        decoding(f"{few} × {long} + {many} × {short}", [long] * few + [short] * many)
    print("\n| sequences × shared + own positions | each reads all (us) | the shared once (us) |\n"
          "| --- | --- | --- |")
    for batch, shared, own in SHARED:
        row = [microseconds([1] * batch, [shared + own - 1] * batch, repeats=60, shared=shared,
                            once=once) for once in (False, True)]
        print(f"| {batch} × {shared} + {own} | {row[0]:.1f} | {row[1]:.1f} |", flush=True)
    print("\n| new tokens, cached before | blocks in order (us) | TFLOPS | scattered (us) | TFLOPS "
          "| cuDNN (us) | TFLOPS |\n| --- | --- | --- | --- | --- | --- | --- |")
    for new, past in PROMPTS:
        work = sum(4 * HEADS * DIM * (own * past + own * own / 2) for own in new)
        row = [microseconds(new, [past] * len(new), repeats=5, **how)
               for how in ({"scattered": False}, {}, {"library": True})]
        print(f"| {len(new)} × {new[0]}, {past} | "
              + " | ".join(f"{taken:.0f} | {work / taken / 1e6:.0f}" for taken in row) + " |",
              flush=True)


if __name__ == "__main__":
    main()
