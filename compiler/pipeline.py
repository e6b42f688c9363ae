"""The order of the passes, with the reason for each place that is not obvious."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from llmc.compiler.graph.rewrite import Report, Settings, is_llmc, tidy, verify
from llmc.compiler.passes.attention import attention
from llmc.compiler.passes.embedding import embedding
from llmc.compiler.passes.fold import fold
from llmc.compiler.passes.gemm import activation, gated_mlp, gemm, residual
from llmc.compiler.passes.norm import add_norm, norm
from llmc.compiler.passes.packing import ATTENTION, pack, pad_vocabulary, select_tokens
from llmc.compiler.passes.sdpa import sdpa
from llmc.errors import LlmcError

Pass = Callable[[gs.Graph, Settings, Report], None]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("fold", fold),
    ("norm", norm),            # before attention, which looks for per-head norms
    ("embedding", embedding),  # before add_norm, which would take the position embedding's Add
    ("gemm", gemm),            # before attention and MLP: their borders are GEMMs
    ("sdpa", sdpa),
    ("attention", attention),
    ("gated_mlp", gated_mlp),  # before activation, which would take the gate's
    ("activation", activation),
    ("residual", residual),    # before add_norm: a GEMM adds for free
    ("add_norm", add_norm),
    ("pack", pack),            # after all that needs the batch axis to be run in pieces
    ("select_tokens", select_tokens),
    ("pad_vocabulary", pad_vocabulary),
)

ENCODER_PASSES = tuple((name, run) for name, run in PASSES
                       if name not in ("select_tokens", "pad_vocabulary"))  # it has no logits


def run_passes(graph: gs.Graph, settings: Settings,
               passes: tuple[tuple[str, Pass], ...] = PASSES) -> list[Report]:
    """Rewrite `graph` in place, verify it after every pass, and say what each did.

    Raises:
        LlmcError: the model cannot be compiled; the message says what did not match.
    """
    reports: list[Report] = []
    tidy(graph)
    for name, run in passes:
        report = Report(name)
        reports.append(report)
        run(graph, settings, report)
        tidy(graph)
        verify(graph, name)
        if name == "attention":
            _require_attention(graph, reports)
    return reports


def _require_attention(graph: gs.Graph, reports: list[Report]) -> None:
    """Refuse a model whose attention was not fused."""
    refusals = [text for report in reports if report.name in ("sdpa", "attention")
                for text in report.refusals]
    if any(is_llmc(node, *ATTENTION) for node in graph.nodes) \
            and not any(node.op in ("Sdpa", "Softmax") for node in graph.nodes):
        return
    why = refusals[0] if refusals else "the graph has neither Softmax nor Attention nodes"
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    raise LlmcError(f"attention was not recognised: {why}{more}; llmc compiles causal self-"
                    f"attention with optional rotary embedding, GQA, sliding window and soft-cap, "
                    f"and plain attention in and to an encoder, both with biases by distance")
