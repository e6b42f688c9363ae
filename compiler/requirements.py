"""Requirements: experts, attention and token embedding of a model must be fused.

Errors quote the refusals of the passes that should have fused them.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from llmc.compiler.graph.expert_products import EXPERTS_DOWN
from llmc.compiler.graph.rewrite import (
    Report,
    describe,
    is_op,
    knows_sequences,
    operands,
    part_of,
    producer,
)
from llmc.compiler.graph.sdpa import SDPA
from llmc.compiler.passes.attention import attention
from llmc.compiler.passes.dense_experts import dense_experts
from llmc.compiler.passes.embedding import embedding
from llmc.compiler.passes.experts import experts
from llmc.compiler.passes.route import route
from llmc.compiler.passes.sdpa import sdpa
from llmc.errors import LlmcError
from llmc.plugins.experts.op import OP as EXPERTS
from llmc.plugins.route.op import OP as ROUTE


def require_routes(graphs: Sequence[gs.Graph], reports: Sequence[Report]) -> None:
    """Reject a model with experts or a router that were not fused."""
    nodes: dict[str, list[gs.Node]] = {
        part_of(graph, index): list(graph.nodes) for index, graph in enumerate(graphs)}
    for report in reports:
        unfused = [node for node in nodes.get(report.part, ())
                   if (report.run is experts and is_op(node, EXPERTS_DOWN))
                   or report.run is dense_experts
                   or (report.run is route and is_op(node, EXPERTS)
                       and not is_op(producer(operands(node)["experts"]), ROUTE))]
        if unfused and report.refusals:
            where, _, why = report.refusals[0].partition(": ")
            raise LlmcError(f"{'a router was' if report.run is route else 'experts were'} not "
                            f"recognized: {why} ({where}); use a model whose MoE layers "
                            f"llmc::Route and llmc::Experts can express")


def require_attention(graphs: Sequence[gs.Graph], reports: Sequence[Report]) -> None:
    """Reject a model with attention that was not fused."""
    for index, graph in enumerate(graphs):
        if any(map(knows_sequences, graph.nodes)) and not any(
                is_op(node, SDPA) or node.op == "Softmax" for node in graph.nodes):
            continue
        refusals = [text for report in reports for text in report.refusals
                    if report.run in (sdpa, attention) and report.part == part_of(graph, index)]
        where, _, why = (refusals or ["the graph: it has neither Softmax nor Attention nodes"]
                         )[0].partition(": ")
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        raise LlmcError(
            f"attention was not recognized: {why} ({where}{more}); llmc supports causal self-"
            f"attention with optional rotary embedding, GQA, sliding window and soft-cap, and "
            f"bidirectional and cross-attention of encoder-decoder models, all with optional "
            f"relative position bias")


def require_embedding(graphs: Sequence[gs.Graph], reports: Sequence[Report]) -> None:
    """Reject a model with a token embedding that was found but not fused."""
    refusals = [text for report in reports for text in report.refusals
                if report.run is embedding]
    reasons = dict(text.split(": ", 1) for text in reversed(refusals))  # a node's first one
    for node in (node for graph in graphs for node in graph.nodes):
        where = describe(node)
        if node.op == "Gather" and where in reasons \
                and any(tensor.name == "input_ids" for tensor in node.inputs):
            raise LlmcError(f"the token embedding was not recognized: {reasons[where]} ({where}); "
                            f"llmc supports adding learned position embeddings, or a constant "
                            f"that is the same for every token")
