"""From the exported graphs of a model to what a target's engine runs: one list of passes, in order.

    fuse         exported nodes become llmc's ops; [batch, seq, …] becomes packed tokens
    partition    one graph becomes one for each rank
    quantise     weights of linear layers go into fewer bits, where a GPU's have taken norms in
    the engine   what only some targets want: other dtypes, caches in blocks

Each graph is verified after every pass, shapes and all, and what the pass did and refused is
reported: `llmc inspect` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import Dims, EncoderInfo
from llmc.compiler.dims import describe_encoder, describe_model
from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.graph.notes import VocabularySize
from llmc.compiler.graph.rewrite import (
    Report,
    Settings,
    describe,
    fields_of,
    op_of,
    operands,
    tidy,
)
from llmc.compiler.graph.verify import verify
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.adapters import adapters
from llmc.compiler.passes.attention import attention
from llmc.compiler.passes.blocks import blocks
from llmc.compiler.passes.columns import columns
from llmc.compiler.passes.dense_experts import dense_experts
from llmc.compiler.passes.embedding import embedding
from llmc.compiler.passes.encoder import move_memory, name_weights, share_weights
from llmc.compiler.passes.experts import experts
from llmc.compiler.passes.experts_residual import experts_residual
from llmc.compiler.passes.fold import fold
from llmc.compiler.passes.gate import gate
from llmc.compiler.passes.gemm import activation, gated_mlp, gemm, residual
from llmc.compiler.passes.groups import groups
from llmc.compiler.passes.norm import add_norm, norm
from llmc.compiler.passes.norm_gate import norm_gate
from llmc.compiler.passes.norm_gemm import norm_gemm
from llmc.compiler.passes.packing import pack, pad_vocabulary, select_tokens
from llmc.compiler.passes.precision import cache_dtype, cast, elements, narrow_indices
from llmc.compiler.passes.projections import projections
from llmc.compiler.passes.quantize import quantize_weights
from llmc.compiler.passes.recurrent_state import states
from llmc.compiler.passes.rounded_outputs import rounded_outputs
from llmc.compiler.passes.route import route
from llmc.compiler.passes.row_layout import gates
from llmc.compiler.passes.sdpa import sdpa
from llmc.compiler.passes.streams import streams
from llmc.compiler.passes.tensor_parallel import tensor_parallel
from llmc.compiler.preflight import About, limit_seq_len
from llmc.compiler.requirements import require_attention, require_embedding, require_routes
from llmc.errors import LlmcError
from llmc.targets import TargetSpec

_VOCAB_MULTIPLE = 64
Condition = Callable[[TargetSpec], bool]


# Conditions of passes.

def _always(target: TargetSpec) -> bool:
    return True


def _kernels(target: TargetSpec) -> bool:
    return target.kernels


def _program(target: TargetSpec) -> bool:
    return target.runs_program


def _paged(target: TargetSpec) -> bool:
    return target.paged


def _quantized(target: TargetSpec) -> bool:
    return target.group_multiple > 0


def _several_dtypes(target: TargetSpec) -> bool:
    return len(target.dtypes) > 1


def _kv_dtypes(target: TargetSpec) -> bool:
    return bool(target.kv_dtypes)


def _narrow(target: TargetSpec) -> bool:
    return target.index_dtype == "int32"


@dataclass(frozen=True)
class GraphPass:
    """A pass over each graph, for the targets that fulfil `when`.

    Skips the encoder's graph where it needs logits.
    """

    name: str
    run: Callable[[gs.Graph, Settings, Report], None]
    when: Condition = _always
    needs_logits: bool = False


@dataclass(frozen=True)
class EncoderPass:
    """A pass over the two graphs of a rank, the decoder's and the encoder's."""

    name: str
    run: Callable[[Sequence[gs.Graph], Settings, Report], None]
    when: Condition = _always


@dataclass(frozen=True)
class RankPass:
    """A pass over what one rank has, be it one graph or two."""

    name: str
    run: Callable[[Sequence[gs.Graph], Settings, Report], None]
    when: Condition = _always


@dataclass(frozen=True)
class Partition:
    """The pass that makes the graphs of all ranks from those of the whole model."""

    name: str
    run: Callable[[Sequence[gs.Graph], Settings, Report], list[list[gs.Graph]]]
    when: Condition = _always


@dataclass(frozen=True)
class Requirement:
    """What the passes before it must have fused; it refuses the model otherwise."""

    check: Callable[[Sequence[gs.Graph], Sequence[Report]], None]


Pass = GraphPass | EncoderPass | RankPass | Partition
Step = Pass | Requirement

PASSES: tuple[Step, ...] = (
    # Fuse.
    GraphPass("fold", fold),
    GraphPass("norm", norm),            # before attention, which looks for per-head norms
    GraphPass("embedding", embedding),  # before add_norm, which would take the positions' Add
    GraphPass("groups", groups),        # after both, of whose results it takes some columns
    GraphPass("experts", experts),      # before route, which looks for them
    GraphPass("dense_experts", dense_experts),  # likewise
    GraphPass("route", route),          # before gemm: the router's linear layer is its border
    Requirement(require_routes),
    GraphPass("gemm", gemm),            # before attention and MLP: their borders are GEMMs
    GraphPass("streams", streams),      # its borders are GEMMs, and norms
    GraphPass("states", states),        # its borders are GEMMs, whose columns it chooses
    GraphPass("sdpa", sdpa),
    GraphPass("adapters", adapters),    # after both, as it makes one GEMM of three for attention
    GraphPass("attention", attention),
    Requirement(require_attention),
    Requirement(require_embedding),
    GraphPass("gates", gates),          # after attention, which looks for its own layout
    GraphPass("gated_mlp", gated_mlp),  # before activation, which would take the gate's
    GraphPass("activation", activation),
    GraphPass("residual", residual),    # before add_norm: a GEMM adds for free
    GraphPass("add_norm", add_norm),
    GraphPass("pack", pack),            # after all that needs the batch axis to be run in pieces
    GraphPass("select_tokens", select_tokens, needs_logits=True),
    GraphPass("pad_vocabulary", pad_vocabulary, needs_logits=True),
    EncoderPass("share_weights", share_weights),  # after padding, so that a shared table stays one
    # Partition.
    Partition("tensor_parallel", tensor_parallel),
    EncoderPass("memory", move_memory),  # what moves has been cut where it was used
    # Quantise: behind partition, so that a group is never cut, and gains, so that none is rounded.
    GraphPass("norm_gate", norm_gate, _program),
    GraphPass("gate", gate, _program),  # of the gates that norm_gate has left
    GraphPass("projections", projections, _program),  # after both, whose ops take columns
    GraphPass("experts_residual", experts_residual, _kernels),  # after projections, as the next one
    GraphPass("norm_gemm", norm_gemm, _kernels),  # after projections: one GEMM that reads a norm
    RankPass("quantize", quantize_weights, _quantized),
    GraphPass("rounded_outputs", rounded_outputs, _program),  # as quantize says who rounds
    # What the engine of a target wants.
    GraphPass("elements", elements, _kernels),
    GraphPass("columns", columns, _program),
    RankPass("cast", cast, _several_dtypes),
    GraphPass("cache_dtype", cache_dtype, _kv_dtypes),  # after cast, which gives caches the model's
    EncoderPass("name_weights", name_weights, _kernels),  # after all that makes weights anew
    GraphPass("blocks", blocks, _paged, needs_logits=True),
    GraphPass("narrow_indices", narrow_indices, _narrow),
)
_FUSE = PASSES[:next(i for i, step in enumerate(PASSES) if isinstance(step, Partition))]


@dataclass(frozen=True)
class Fused:
    """A model whose graphs, the encoder's last, are fused and not divided yet."""

    graphs: list[gs.Graph]
    reports: list[Report]
    settings: Settings
    dims: Dims
    encoder_info: EncoderInfo | None = None


@dataclass(frozen=True)
class Lowered:
    """The graphs that a target writes, one for each rank, and what is known of the whole.
    `encoders` is empty where the model has none.
    """

    graphs: list[gs.Graph]
    encoders: list[gs.Graph]
    reports: list[Report]
    settings: Settings
    dims: Dims
    encoder_info: EncoderInfo | None = None


def lower(raw: RawModel, options: CompileOptions) -> Lowered:
    """Run all passes. Consumes `raw`'s graphs.

    Raises:
        LlmcError: the model cannot be compiled; the message says what did not match.
    """
    return divide(fuse(raw, options), options)


def fuse(raw: RawModel, options: CompileOptions, vocab_multiple: int | None = None) -> Fused:
    """Run the passes before partition. Consumes `raw`'s graphs.

    Args:
        vocab_multiple: the padded vocabulary is a multiple of this; None: of 64 and tp_size.

    Raises:
        LlmcError: see `lower`.
    """
    about = About(raw.config, raw.generation, raw.encoder is not None)
    settings = Settings(
        limit_seq_len(about, options.max_seq_len, options.target),
        vocab_multiple or math.lcm(_VOCAB_MULTIPLE, options.tp_size),
        0 if raw.encoder is None else
        limit_seq_len(about, options.mem_max_seq_len, options.target, "mem_"),
        model=raw.architecture, options=options)
    graphs = [raw.graph, *([raw.encoder] if raw.encoder is not None else [])]
    reports: list[Report] = []
    for graph in graphs:
        tidy(graph)
    for step in _FUSE:
        run_pass(step, [graphs], settings, reports)
    _require_cores(graphs, settings.target)
    # The decoder's is padded first, then the encoder's.
    vocab_size, *encoder_vocab_size = (
        note.rows for report in reports if (note := report.noted(VocabularySize)) is not None)
    dims = describe_model(raw.graph, raw.architecture, vocab_size, settings.max_seq_len)
    info = None if raw.encoder is None else describe_encoder(
        raw, raw.encoder, encoder_vocab_size[0], settings.mem_max_seq_len, dims.vocab_size)
    return Fused(graphs, reports, settings, dims, info)


def divide(fused: Fused, options: CompileOptions, columns_together: int = 0) -> Lowered:
    """Run the passes from partition on. Consumes the graphs where tp_size is 1.

    Args:
        columns_together: columns of a weight that stay on one rank; 0: the groups of its scheme.

    Raises:
        LlmcError: see `lower`.
    """
    settings = replace(fused.settings, options=options, columns_together=columns_together)
    ranks, reports = [fused.graphs], list(fused.reports)
    for step in PASSES[len(_FUSE):]:
        ranks = run_pass(step, ranks, settings, reports)
    return Lowered([graphs[0] for graphs in ranks], [graphs[1] for graphs in ranks if graphs[1:]],
                   reports, settings, fused.dims, fused.encoder_info)


def run_pass(step: Step, ranks: list[list[gs.Graph]], settings: Settings,
             reports: list[Report]) -> list[list[gs.Graph]]:
    """Run a pass on the graphs of every rank and verify them; what there is then. Ranks differ in
    sizes only, so the report is the first one's.

    Raises:
        AssertionError: the pass broke a graph; the message names it and the node.
        LlmcError: the model cannot be compiled.
    """
    if isinstance(step, Requirement):
        step.check(ranks[0], reports)
        return ranks
    if not step.when(settings.target):
        return ranks
    if isinstance(step, Partition):
        reports.append(Report(step.name, step.run))
        ranks = step.run(ranks[0], settings, reports[-1])
    for rank, graphs in enumerate(ranks):
        made: list[Report] = []
        if isinstance(step, GraphPass):
            made = _apply_to_each(step, graphs, settings)
        elif isinstance(step, RankPass) or (isinstance(step, EncoderPass) and len(graphs) > 1):
            made = [Report(step.name, step.run)]
            step.run(graphs, settings, made[0])
        if rank == 0:
            reports.extend(made)
        for graph in graphs:
            tidy(graph)
            verify(graph, step.name)
    return ranks


def _apply_to_each(step: GraphPass, graphs: Sequence[gs.Graph], settings: Settings) -> list[Report]:
    made = [Report(step.name, step.run)]
    step.run(graphs[0], settings, made[0])
    for encoder in graphs[1:] if not step.needs_logits else ():
        made.append(Report(f"encoder.{step.name}", step.run, encoder=True))
        step.run(encoder, replace(settings, max_seq_len=settings.mem_max_seq_len), made[1])
    return made


def _require_cores(graphs: Sequence[gs.Graph], target: TargetSpec) -> None:
    """Refuse a model with ops that the target's engine does not have."""
    for node in (node for graph in graphs for node in graph.nodes):
        op = op_of(node)
        if op is None or target.runs_any_op:
            continue
        odd = sorted(op.lacking(fields_of(node), operands(node))) if target.kernels else []
        lacks_cache = (op.state and not target.recurrent_state) or (op.attention is not None and (
            (op.attention.reads and not target.shared_caches)
            or (len(op.attention.caches) == 1 and not target.latent_caches)))
        if odd or not op.has_core or lacks_cache:
            raise LlmcError(f"target '{target.name}' has no kernel for llmc::{op.name}"
                            f"{' with ' + ' and '.join(odd) if odd else ''} yet, which "
                            f"{describe(node)} is; compile for --target cpu")
