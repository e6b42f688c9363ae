"""One layer's MLA over KV blocks on one GPU, of DeepSeek-V3's shape in bfloat16.

    python bench/latent_gpu.py

From queries and new rows to the heads' values, with all 128 heads and with one rank's 16.
Microseconds are means over many launches. A short cache and the up-projections stay in L2, which
they would not in a model.
"""

from __future__ import annotations

from typing import Any

import bench_model
import numpy as np
import torch

from llmc.runtime.engines.cuda import extension

SHARED, LATENT, OWN, VALUE, BLOCK = 64, 512, 128, 128, 64
DIM, QUERY = SHARED + LATENT, SHARED + OWN
HEADS = (128, 16)
STEPS = [(1, 1, 3999), (8, 1, 3999), (64, 1, 999), (1, 1, 31999), (1, 1000, 0), (1, 4000, 0)]


def microseconds(heads: int, batch: int, new: int, past: int, repeats: int) -> float:
    """Time `batch` sequences with `new` tokens each and `past` cached ones."""
    blocks = -(-(new + past) // BLOCK)
    tokens = batch * new

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def described(tensor: torch.Tensor) -> tuple[int, str, list[int]]:
        return (tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    cache = normal(batch * blocks + 1, 1, BLOCK, DIM)
    turns = torch.ones(blocks * BLOCK, SHARED // 2, device="cuda")
    given = [normal(tokens, heads * QUERY), normal(tokens, DIM),
             normal(heads, OWN, LATENT) / LATENT**0.5, normal(heads, LATENT, VALUE) / LATENT**0.5,
             cache, ints(np.arange(batch + 1) * new), ints([past] * batch), turns, turns]
    table = ints(np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks))
    out = torch.empty(tokens, heads * VALUE, device="cuda", dtype=torch.bfloat16)
    taken: float = extension().run_op(
        "LatentAttention", dict(num_heads=heads, num_kv_heads=1, head_dim=DIM, query_dim=QUERY,
                                shared_dim=SHARED, rotary_dim=SHARED),
        [*map(described, given), (0, "float32", []), described(table)],
        [described(out), described(cache)],
        batch if new == 1 else 0, repeats)
    return taken * 1e3


def main() -> None:
    print(bench_model.environment("torch"), torch.cuda.get_device_name(), "\n", flush=True)
    print("| heads | sequences × new, cached before | us | TB/s | TFLOPS |\n"
          "| --- | --- | --- | --- | --- |")
    for heads in HEADS:
        for batch, new, past in STEPS:
            taken = microseconds(heads, batch, new, past, repeats=60 if new == 1 else 5)
            read = 2 * (batch * (new + past) * DIM + heads * LATENT * (OWN + VALUE))
            work = 2 * batch * new * heads * ((past + (new + 1) / 2) * (DIM + LATENT)
                                              + LATENT * (OWN + VALUE))
            print(f"| {heads} | {batch} × {new}, {past} | {taken:.1f} | {read / taken / 1e6:.2f} "
                  f"| {work / taken / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
