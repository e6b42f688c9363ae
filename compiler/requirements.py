"""Requirements: a model is refused whose experts, attention or token embedding are not fused.

The message says what did not match, by the refusals of the passes that look for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from llmc.compiler.graph.expert_products import EXPERTS_DOWN
from llmc.compiler.graph.rewrite import Report, describe, is_op, knows_sequences, operands, producer
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
    """Refuse a model whose experts, or what chooses them, were not fused."""
    nodes = [node for graph in graphs for node in graph.nodes]
    for report in (report for report in reports if not report.encoder):
        odd = [node for node in nodes if (report.run is experts and is_op(node, EXPERTS_DOWN))
               or report.run is dense_experts
               or (report.run is route and is_op(node, EXPERTS)
                   and not is_op(producer(operands(node)["experts"]), ROUTE))]
        if odd and report.refusals:
            where, _, why = report.refusals[0].partition(": ")
            raise LlmcError(f"{'a router was' if report.run is route else 'experts were'} not "
                            f"recognised: {why} ({where}); llmc compiles the mixtures of experts "
                            f"that llmc::Route and llmc::Experts describe")


def require_attention(graphs: Sequence[gs.Graph], reports: Sequence[Report]) -> None:
    """Refuse a model whose attention was not fused."""
    for graph, of_encoder in zip(graphs, (False, True), strict=False):
        if any(map(knows_sequences, graph.nodes)) and not any(
                is_op(node, SDPA) or node.op == "Softmax" for node in graph.nodes):
            continue
        refusals = [text for report in reports for text in report.refusals
                    if report.run in (sdpa, attention) and report.encoder == of_encoder]
        where, _, why = (refusals or ["the graph: it has neither Softmax nor Attention nodes"]
                         )[0].partition(": ")
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        raise LlmcError(
            f"attention was not recognised: {why} ({where}{more}); llmc compiles causal self-"
            f"attention with optional rotary embedding, GQA, sliding window and soft-cap, and "
            f"plain attention in and to an encoder, both with biases by distance")


def require_embedding(graphs: Sequence[gs.Graph], reports: Sequence[Report]) -> None:
    """Refuse a model in which what looks tokens up was found and not fused."""
    refusals = [text for report in reports for text in report.refusals
                if report.run is embedding]
    reasons = dict(text.split(": ", 1) for text in reversed(refusals))  # a node's first one
    for node in (node for graph in graphs for node in graph.nodes):
        where = describe(node)
        if node.op == "Gather" and where in reasons \
                and any(tensor.name == "input_ids" for tensor in node.inputs):
            raise LlmcError(f"the token embedding was not recognised: {reasons[where]} ({where}); "
                            f"llmc adds learned positions to it, or what is the same for every "
                            f"token")
