"""One layer's experts on one GPU: llmc's kernels next to torch's grouped GEMM, in us.

    python bench/experts_gpu.py [--forms "int4,mxfp4,…"] [--shapes Qwen3-30B-A3B,…]

Columns: the kernels for few and for many tokens in bfloat16, torch's grouped GEMM between a sort
and a sum as in transformers, and the kernels of each storage format in --forms. "float8_e4m3fn
rounded" also quantizes activations to FP8, per group.

Each is a mean of consecutive launches, torch's in a CUDA graph. Tokens select random experts. The
limit is the time to read the selected weights at COPY bytes per second, or of the operations at
RATE.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import bench_model
import torch

from llmc.plugins.code_types import CODE_TYPES
from llmc.runtime.engines.cuda import extension

# num_experts, top_k, hidden, inner
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880),
          "Mixtral-8x7B": (8, 2, 4096, 14336)}
TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 1024, 4096)
COPY, RATE = 4.3e12, 8e14  # measured on an H200: copied bytes/s, FLOPS of a large GEMM
REPEATS = 20


def described(tensor: torch.Tensor) -> tuple[int, str, list[int]]:
    return (tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def ours(given: list[torch.Tensor], y: torch.Tensor, few: bool,
         scales: Sequence[torch.Tensor] = (), **fields: Any) -> float:
    """Measure the microseconds of the experts; `scales` are those of quantized weights."""
    none: tuple[int, str, list[int]] = (0, "float32", [])
    behind = [one for scale in scales for one in (described(scale), none)]
    taken: float = extension().run_op(
        "Experts", {"top_k": given[1].shape[1], **fields},
        [*(described(tensor) for tensor in given), *([none, none, *behind] if behind else [])],
        [described(y)], repeats=REPEATS, firsts=[few] * REPEATS)
    return taken * 1e3


def packed(form: str, weights: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return random quantized weights, their scales, and the attributes of their format."""
    dtype, _, rounded = form.partition(" ")
    hidden, inner = (weight.shape[-1] for weight in weights)
    size = 32 if dtype == "mxfp4" else math.gcd(hidden, inner, 128)
    per_byte = CODE_TYPES[dtype].per_byte
    made = [torch.randint(0, 256, (*weight.shape[:2], weight.shape[2] // per_byte),
                          dtype=torch.uint8, device="cuda") for weight in weights]
    if dtype == "float8_e4m3fn":
        made = [codes & 0xBF for codes in made]  # excludes NaN
    for weight in weights:
        shape = (*weight.shape[:2], weight.shape[2] // size)
        made.append(torch.full(shape, 120, dtype=torch.uint8, device="cuda") if dtype == "mxfp4"
                    else torch.full(shape, 0.01, device="cuda"))
    return made, {"weight_dtype": dtype, "group_size": size, "in_features": hidden,
                  "inner_features": inner, "activation_dtype": dtype if rounded else "",
                  "activation_group_size": size if rounded else 0}


def grouped(given: list[torch.Tensor], y: torch.Tensor) -> None:
    """Measure torch's grouped GEMM, with gate and up projections concatenated."""
    x, experts, scores, gate_up, down = given
    flat = experts.flatten()
    order = flat.argsort()
    counts = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device) \
        .scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    tokens = order // experts.shape[1]
    both = torch._grouped_mm(x[tokens], gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    made = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    weighted = made * scores.flatten()[order, None].to(made.dtype)
    y.zero_().index_add_(0, tokens, weighted)


def graphed(work: Callable[[], None]) -> float:
    """Measure the microseconds of a CUDA graph with REPEATS repetitions."""
    for _ in range(3):
        work()
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True)
                                                  for _ in range(2))
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPEATS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", type=lambda text: text.split(","), default=["int4", "mxfp4"])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[*SHAPES])
    parser.add_argument("--tokens", type=lambda text: [*map(int, text.split(","))], default=TOKENS)
    arguments = parser.parse_args()
    print(bench_model.environment("torch"), torch.cuda.get_device_name(), flush=True)
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for name in arguments.shapes:
        num_experts, top_k, hidden, inner = SHAPES[name]
        gate_up = torch.randn(num_experts, 2 * inner, hidden, **kind) / hidden**0.5
        down = torch.randn(num_experts, hidden, inner, **kind) / inner**0.5
        fewer = [packed(dtype, [gate_up, down]) for dtype in arguments.forms]
        columns = ["tokens", "limit", "few", "many", "torch",
                   *(f"{form}, {way}" for form in arguments.forms for way in ("few", "many"))]
        print(f"\n{name}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
        for count in arguments.tokens:
            experts = torch.rand(count, num_experts, device="cuda").topk(top_k).indices
            given = [torch.randn(count, hidden, **kind), experts,
                     torch.rand(count, top_k, device="cuda"), gate_up, down]
            y = torch.empty(count, hidden, **kind)
            numbers = 3 * hidden * inner
            limit = max(2 * numbers * len(experts.unique()) / COPY,
                        2 * numbers * count * top_k / RATE) * 1e6
            few = f"{ours(given, y, True):.1f}" if count <= 256 else ""
            peer = graphed(lambda given=given, y=y: grouped(given, y))
            cells = [f"{ours([*given[:3], *made[:2]], y, way, made[2:], **fields):.1f}"
                     if count <= 256 or not way else "" for made, fields in fewer
                     for way in (True, False)]
            print(f"| {count} | {limit:.1f} | {few} | {ours(given, y, False):.1f} | {peer:.1f} | "
                  f"{' | '.join(cells)} |", flush=True)
        del gate_up, down, fewer


if __name__ == "__main__":
    main()
