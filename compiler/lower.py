"""Lowering: the ordered list of passes from exported graphs to a target's graphs.

    fuse         exported nodes to llmc ops; [batch, seq, …] to packed tokens
    partition    one graph to one graph per rank
    quantize     fusions for GPUs within a rank; then quantization of linear layers
    engine       target-specific passes: dtypes, paged KV cache

Every pass is followed by a verification of each graph, including shapes. Its matches and refusals
are reported, and `llmc inspect` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from llmc.artifacts.manifest import (
    Dims,
    DraftInfo,
    EncoderInfo,
    ImageMemory,
    Modality,
    PoolingInfo,
)
from llmc.compiler.dims import describe_draft, describe_encoder, describe_model, describe_pooled
from llmc.compiler.frontend.raw import RawModel
from llmc.compiler.graph.image_samples import settle_sizes
from llmc.compiler.graph.names import ENCODER_OUTPUT
from llmc.compiler.graph.notes import VocabularySize
from llmc.compiler.graph.rewrite import (
    NoMatch,
    Report,
    Settings,
    describe,
    fields_of,
    op_of,
    operands,
    part_of,
    tidy,
)
from llmc.compiler.graph.verify import verify
from llmc.compiler.options import LANGUAGE_MODEL_ONLY, CompileOptions
from llmc.compiler.passes.adapters import adapters
from llmc.compiler.passes.attention import attention
from llmc.compiler.passes.attention_projections import attention_projections
from llmc.compiler.passes.blocks import blocks
from llmc.compiler.passes.columns import columns
from llmc.compiler.passes.dense_experts import dense_experts
from llmc.compiler.passes.draft import match_heads, number_caches, read_caches
from llmc.compiler.passes.embedding import embedding
from llmc.compiler.passes.encoder import (
    move_memory,
    name_media_weights,
    name_weights,
    share_weights,
)
from llmc.compiler.passes.experts import experts
from llmc.compiler.passes.experts_residual import experts_residual
from llmc.compiler.passes.fold import fold
from llmc.compiler.passes.gate import gate
from llmc.compiler.passes.gemm import activation, gated_mlp, gemm, residual
from llmc.compiler.passes.groups import groups
from llmc.compiler.passes.image_attention import image_attention
from llmc.compiler.passes.image_patches import image_patches
from llmc.compiler.passes.image_pools import image_pools
from llmc.compiler.passes.image_program import ImageParts, divide_image
from llmc.compiler.passes.image_rows import image_rows
from llmc.compiler.passes.image_softmax import image_softmax
from llmc.compiler.passes.input_embeds import input_embeds, require_one_reader
from llmc.compiler.passes.layer_scale import layer_scale
from llmc.compiler.passes.linear_rows import linear_rows
from llmc.compiler.passes.lora import lora, name_origins
from llmc.compiler.passes.norm import add_norm, norm
from llmc.compiler.passes.norm_gate import norm_gate
from llmc.compiler.passes.norm_gemm import norm_gemm
from llmc.compiler.passes.packing import pack, pad_vocabulary, select_tokens
from llmc.compiler.passes.pad_heads import pad_heads
from llmc.compiler.passes.pool import pool
from llmc.compiler.passes.precision import cache_dtype, cast, elements, narrow_indices
from llmc.compiler.passes.projections import projections
from llmc.compiler.passes.quantize import quantize_encoder, quantize_weights
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
from llmc.targets import CPU, TargetSpec, target_spec

_VOCAB_MULTIPLE = 64
_DEFAULT_IMAGES = 4  # of a prompt, that layers attend to
Condition = Callable[[TargetSpec], bool]


# Conditions of passes.

def _always(target: TargetSpec) -> bool:
    return True


def _kernels(target: TargetSpec) -> bool:
    return target.kernels


def _program(target: TargetSpec) -> bool:
    return target.runs_program


def _any_op(target: TargetSpec) -> bool:
    return target.runs_any_op


def _paged(target: TargetSpec) -> bool:
    return target.paged


def _quantized(target: TargetSpec) -> bool:
    return target.group_multiple > 0


def _adapters(target: TargetSpec) -> bool:
    return bool(target.adapters)


def _several_dtypes(target: TargetSpec) -> bool:
    return len(target.dtypes) > 1


def _kv_dtypes(target: TargetSpec) -> bool:
    return bool(target.kv_dtypes)


def _narrow(target: TargetSpec) -> bool:
    return target.index_dtype == "int32"


@dataclass(frozen=True)
class GraphPass:
    """A pass over each graph, for targets that satisfy `when`.

    An encoder's graph is skipped if the pass needs logits.
    """

    name: str
    run: Callable[[gs.Graph, Settings, Report], None]
    when: Condition = _always
    needs_logits: bool = False


@dataclass(frozen=True)
class RankPass:
    """A pass over all graphs of a rank together.

    Args:
        others: what the graphs after the first may be, `encoder` or `draft`; other ranks are
            skipped. Empty: any number of graphs of any kind.
        reads: an input of the first graph; ranks without it are skipped. Empty: none is.
    """

    name: str
    run: Callable[[list[gs.Graph], Settings, Report], None]
    when: Condition = _always
    others: tuple[str, ...] = ()
    reads: str = ""

    def applies(self, graphs: Sequence[gs.Graph]) -> bool:
        """Whether it runs on a rank of these graphs."""
        if self.reads:
            return any(tensor.name == self.reads for tensor in graphs[0].inputs)
        return not self.others or (len(graphs) > 1 and part_of(graphs[1], 1) in self.others)


@dataclass(frozen=True)
class Partition:
    """The pass that partitions the model's graphs into those of each rank."""

    name: str
    run: Callable[[Sequence[gs.Graph], Settings, Report], list[list[gs.Graph]]]
    when: Condition = _always


@dataclass(frozen=True)
class Requirement:
    """A check of the preceding passes' result; raises LlmcError."""

    check: Callable[[Sequence[gs.Graph], Sequence[Report]], None]


Pass = GraphPass | RankPass | Partition
Step = Pass | Requirement

PASSES: tuple[Step, ...] = (
    # Fuse.
    GraphPass("fold", fold),
    GraphPass("input_embeds", input_embeds),  # before all that run a piece of the graph
    GraphPass("pool", pool),            # before all that expect an axis of tokens
    GraphPass("norm", norm),            # before attention, which looks for per-head norms
    GraphPass("embedding", embedding),  # before add_norm, which would take the positions' Add
    GraphPass("groups", groups),        # after both: it slices columns of their results
    GraphPass("experts", experts),      # before route, which starts from experts
    GraphPass("dense_experts", dense_experts),  # likewise
    GraphPass("route", route),          # before gemm: the router's linear layer is its border
    Requirement(require_routes),
    GraphPass("gemm", gemm),            # before attention and MLP: their borders are GEMMs
    GraphPass("streams", streams),      # its borders are GEMMs and norms
    GraphPass("states", states),        # its borders are GEMMs, whose columns it slices
    GraphPass("sdpa", sdpa),
    GraphPass("adapters", adapters),    # after both: it merges three GEMMs into one for attention
    GraphPass("attention", attention),
    Requirement(require_attention),
    Requirement(require_embedding),
    RankPass("number_caches", number_caches, others=("draft",)),
    RankPass("read_caches", read_caches, others=("draft",)),
    GraphPass("gates", gates),          # after attention, which expects the original layout
    GraphPass("gated_mlp", gated_mlp),  # before activation, which would fuse the gate's
    GraphPass("activation", activation),
    GraphPass("residual", residual),    # before add_norm: free in a GEMM's epilogue
    GraphPass("add_norm", add_norm),
    GraphPass("pack", pack),            # after all passes that probe with a batch axis
    GraphPass("select_tokens", select_tokens, needs_logits=True),
    GraphPass("pad_vocabulary", pad_vocabulary, needs_logits=True),
    # After padding, so that tied tables stay tied.
    RankPass("share_weights", share_weights, others=("encoder", "draft")),
    # Partition.
    Partition("tensor_parallel", tensor_parallel),
    RankPass("match_heads", match_heads, others=("draft",)),
    # After its weights were partitioned by their uses.
    RankPass("memory", move_memory, reads=ENCODER_OUTPUT),
    # Quantize after partition, so that no group is cut, and after the fusion of norms, so that
    # their gains are folded into the unquantized weights.
    GraphPass("norm_gate", norm_gate, _program),
    GraphPass("gate", gate, _program),  # gates that norm_gate did not fuse
    GraphPass("projections", projections, _program),  # after both, whose ops read columns
    GraphPass("attention_projections", attention_projections, _any_op),
    GraphPass("experts_residual", experts_residual, _kernels),  # after projections
    GraphPass("norm_gemm", norm_gemm, _kernels),  # after projections: one GEMM per norm
    # After all passes that select rows and columns, before quantize, which changes values.
    RankPass("lora", lora, _adapters),
    RankPass("quantize", quantize_weights, _quantized),
    GraphPass("rounded_outputs", rounded_outputs, _program),  # after quantize sets activations
    # Target-specific.
    GraphPass("elements", elements, _kernels),
    GraphPass("columns", columns, _program),
    RankPass("cast", cast, _several_dtypes),
    GraphPass("cache_dtype", cache_dtype, _kv_dtypes),  # after cast, which sets the model's dtype
    # After all passes that create weights.
    RankPass("name_weights", name_weights, _kernels, others=("encoder", "draft")),
    GraphPass("blocks", blocks, _paged, needs_logits=True),
    GraphPass("narrow_indices", narrow_indices, _narrow),
)
# Passes over the image encoder, which reads no tokens.
IMAGE_PASSES: tuple[GraphPass, ...] = (
    GraphPass("fold", fold),
    GraphPass("patches", image_patches),
    GraphPass("pools", image_pools),
    GraphPass("norm", norm),
    GraphPass("gemm", gemm),
    GraphPass("softmax", image_softmax),
    GraphPass("rows", image_rows),      # after these, whose ops work on rows
    GraphPass("layer_scale", layer_scale),
    GraphPass("attention", image_attention),  # its borders are rows
    GraphPass("gated_mlp", gated_mlp),  # as in PASSES from here on
    GraphPass("activation", activation),
    GraphPass("residual", residual),
    GraphPass("add_norm", add_norm),
)
# Passes over the encoder of audio clips, which runs on the host.
AUDIO_PASSES: tuple[GraphPass, ...] = (GraphPass("fold", fold),)
# Further passes over it with `--quantize_encoders`.
AUDIO_QUANTIZE_PASSES: tuple[GraphPass, ...] = (
    GraphPass("gemm", gemm),
    GraphPass("rows", linear_rows),
    GraphPass("quantize", quantize_encoder),
)
# Passes over the part of the image encoder that a device runs, as in PASSES.
IMAGE_DEVICE_PASSES: tuple[GraphPass | RankPass, ...] = (
    GraphPass("pad_heads", pad_heads, _program),  # before projections, which merges GEMMs
    GraphPass("projections", projections, _program),
    GraphPass("norm_gemm", norm_gemm, _kernels),
    GraphPass("quantize", quantize_encoder, _quantized),
    GraphPass("elements", elements, _kernels),
    GraphPass("columns", columns, _program),
    RankPass("cast", cast, _several_dtypes),
)
_FUSE = PASSES[:next(i for i, step in enumerate(PASSES) if isinstance(step, Partition))]


@dataclass(frozen=True)
class Fused:
    """A fused, unpartitioned model; graphs of an encoder or a draft model are the last."""

    graphs: list[gs.Graph]
    reports: list[Report]
    settings: Settings
    dims: Dims
    encoder_info: EncoderInfo | None = None
    draft_info: DraftInfo | None = None
    pooling: PoolingInfo | None = None
    memory: ImageMemory | None = None


@dataclass(frozen=True)
class Lowered:
    """The graphs that a target writes, one per rank, and the model's dimensions.

    `encoders` is empty for a model without an encoder or `memory`, `drafts` for one without a draft
    model. A
    draft model may have several graphs. `image` is the image encoder, of rank 0. With
    `image_device`, it computes the inputs of that graph, and `image_rows`, if any, what follows.
    `audio` is the encoder of audio clips, of rank 0.
    """

    graphs: list[gs.Graph]
    encoders: list[gs.Graph]
    drafts: list[list[gs.Graph]]
    reports: list[Report]
    settings: Settings
    dims: Dims
    encoder_info: EncoderInfo | None = None
    draft_info: DraftInfo | None = None
    pooling: PoolingInfo | None = None
    image: gs.Graph | None = None
    image_device: gs.Graph | None = None
    image_rows: gs.Graph | None = None
    audio: gs.Graph | None = None
    memory: ImageMemory | None = None

    @property
    def image_graphs(self) -> list[gs.Graph]:
        """Those of the image encoder."""
        return [own for own in (self.image, self.image_device, self.image_rows) if own is not None]


def lower(raw: RawModel, options: CompileOptions) -> Lowered:
    """Run all passes. Consumes `raw`'s graphs.

    Raises:
        LlmcError: the model cannot be compiled; the message names what did not match.
    """
    return lower_media(divide(fuse(raw, options), options), raw)


def fuse(raw: RawModel, options: CompileOptions, vocab_multiple: int | None = None) -> Fused:
    """Run the passes before partition. Consumes `raw`'s graphs.

    Args:
        raw: the exported model.
        options: the options of the compilation.
        vocab_multiple: pad the vocabulary to a multiple of this; None: of 64 and tp_size.

    Raises:
        LlmcError: see `lower`.
    """
    about = About(raw.config, raw.generation, raw.encoder is not None)
    memory = _image_memory(raw, options)
    settings = Settings(
        _max_seq_len(raw, about, options),
        vocab_multiple or math.lcm(_VOCAB_MULTIPLE, options.tp_size),
        memory.max_seq_len if memory is not None else
        0 if raw.encoder is None else
        _mem_max_seq_len(raw, about, options),
        model=raw.architecture, causal=raw.pooling is None, options=options)
    graphs = list(raw.graphs)
    reports: list[Report] = []
    for graph in graphs:
        tidy(graph)
    if options.enable_lora:
        name_origins(raw.graph)
    for step in _FUSE:
        run_pass(step, [graphs], settings, reports)
    _require_kernels(graphs, settings.target)
    if options.enable_prompt_embeds or (memory is None and (
            raw.image or raw.audio) and (raw.image is None or raw.image.token_id is None)):
        require_one_reader(raw.graph, raw.architecture, "leave out --enable_prompt_embeds"
                           if options.enable_prompt_embeds else
                           LANGUAGE_MODEL_ONLY)
    if raw.pooling is not None:
        dims, pooling = describe_pooled(raw, settings.max_seq_len)
        return Fused(graphs, reports, settings, dims, pooling=pooling)
    # The vocabulary of the model is padded first, then that of the encoder or draft model.
    vocab_size, *other_vocab_size = (
        note.rows for report in reports if (note := report.noted(VocabularySize)) is not None)
    dims = describe_model(raw.graph, raw.architecture, vocab_size, settings.max_seq_len)
    info = None if raw.encoder is None else describe_encoder(
        raw, raw.encoder, None if raw.features else other_vocab_size[0],
        settings.mem_max_seq_len, dims.vocab_size)
    draft = None if raw.draft is None else describe_draft(raw.draft, other_vocab_size[0])
    return Fused(graphs, reports, settings, dims, info, draft, memory=memory)


def _max_seq_len(raw: RawModel, about: About, options: CompileOptions) -> int:
    """Maximum number of positions: by the option, else of the texts that a model is meant for."""
    most = limit_seq_len(about, options.max_seq_len, options.target)
    own = None if raw.pooling is None else raw.pooling.max_tokens
    return min(most, own) if own is not None and options.max_seq_len is None else most


def _mem_max_seq_len(raw: RawModel, about: About, options: CompileOptions) -> int:
    """Maximum number of tokens, or the number of rows, that the encoder reads."""
    given = options.mem_max_seq_len
    if raw.features is None:
        return limit_seq_len(about, given, options.target, "mem_")
    if not target_spec(options.target).reads_features:
        raise LlmcError(f"the encoder of '{raw.architecture}' reads audio, which target "
                        f"'{options.target}' does not support; compile with --target cpu")
    if given not in (None, raw.features.num_rows):
        raise LlmcError(f"mem_max_seq_len {given} is not supported: the encoder of "
                        f"'{raw.architecture}' reads {raw.features.num_rows} rows of audio; leave "
                        f"it out")
    return raw.features.num_rows


def _image_memory(raw: RawModel, options: CompileOptions) -> ImageMemory | None:
    """Describe the images of a prompt that layers attend to; None if none do.

    Raises:
        LlmcError: the target does not support it, or mem_max_seq_len has no room for an image.
    """
    rows = None if raw.image is None else raw.image.attended
    given = options.mem_max_seq_len
    if rows is None:
        if raw.encoder is None and given is not None:
            raise LlmcError(f"mem_max_seq_len {given} is given, but no layer of "
                            f"'{raw.architecture}' attends to images; leave it out")
        return None
    assert raw.image is not None
    for name, what, asked in (("enable_prompt_embeds", "prompt embeddings",
                               options.enable_prompt_embeds),
                              ("enable_lora", "adapters", options.enable_lora),
                              ("draft", "draft models", raw.draft is not None),
                              ("calibrate", "texts of calibration", options.calibrated)):
        if asked:
            raise LlmcError(f"layers of '{raw.architecture}' attend to images, which {what} do not "
                            f"support; leave out --{name}, or {LANGUAGE_MODEL_ONLY}")
    if given is not None and given < rows.num_rows:
        raise LlmcError(f"mem_max_seq_len {given} is less than the {rows.num_rows} rows of an "
                        f"image of '{raw.architecture}'; give at least as many for each image of "
                        f"a prompt")
    return ImageMemory(**rows.model_dump(), width=int(raw.image.graph.outputs[0].shape[-1]),
                       max_seq_len=_DEFAULT_IMAGES * rows.num_rows if given is None else given)


def divide(fused: Fused, options: CompileOptions, columns_together: int = 0) -> Lowered:
    """Run the passes from partition on. Consumes the graphs if tp_size is 1.

    Args:
        fused: the result of `fuse`.
        options: the options of the compilation.
        columns_together: columns of a weight that stay on one rank; 0: the scheme's group size.

    Raises:
        LlmcError: see `lower`.
    """
    settings = replace(fused.settings, options=options, columns_together=columns_together)
    ranks, reports = [fused.graphs], list(fused.reports)
    for step in PASSES[len(_FUSE):]:
        ranks = run_pass(step, ranks, settings, reports)
    encoders = [graphs[1] for graphs in ranks] if fused.encoder_info or fused.memory else []
    drafts = [graphs[1:] for graphs in ranks] if fused.draft_info else []
    return Lowered([graphs[0] for graphs in ranks], encoders, drafts, reports, settings,
                   fused.dims, fused.encoder_info, fused.draft_info, fused.pooling,
                   memory=fused.memory)


def lower_media(lowered: Lowered, raw: RawModel) -> Lowered:
    """Run the passes over encoders of images and audio, if there are any. Consumes their graphs."""
    lowered = lower_image(lowered, raw)
    if raw.audio is None:
        return lowered
    graph, reports = raw.audio.graph, list(lowered.reports)
    tidy(graph)
    settings = _of_host(lowered.settings)
    quantizes = settings.options.encoder_scheme is not None
    for step in (*AUDIO_PASSES, *(AUDIO_QUANTIZE_PASSES if quantizes else ())):
        reports.append(_run_encoder_pass(step, graph, settings, "audio"))
    name_media_weights([lowered.graphs[0], *(lowered.drafts[0] if lowered.drafts else []),
                        *lowered.image_graphs], graph, "audio")
    return replace(lowered, audio=graph, reports=reports)


def _of_host(settings: Settings) -> Settings:
    """The settings of a graph that the host runs by ONNX Runtime, whatever the target."""
    return replace(settings, options=replace(settings.options, target=CPU.name))


def _run_encoder_pass(step: GraphPass, graph: gs.Graph, settings: Settings,
                      kind: Modality) -> Report:
    """Run a pass over the graph of an encoder of images or audio, and verify it."""
    report = Report(f"{kind}.{step.name}", step.run, kind)
    step.run(graph, settings, report)
    tidy(graph)
    verify(graph, report.name)
    return report


def lower_image(lowered: Lowered, raw: RawModel) -> Lowered:
    """Run the passes over the image encoder, if there is one. Consumes its graph.

    It runs on rank 0, whose weight file has its weights.
    """
    if raw.image is None:
        return lowered
    graph, reports = raw.image.graph, list(lowered.reports)
    settings = replace(lowered.settings, image_samples=raw.image.samples)
    device = rows = None
    if settings.target.runs_program:
        fused = graph.copy()
        try:
            found = fuse_image(fused, settings)
            parts, more = lower_image_device(fused, settings)
            graph, device, rows = parts.host, parts.device, parts.rows
            reports += [*found, *more]
        except LlmcError as error:  # the host runs all of it
            reports.append(Report("image.device", divide_image, "image"))
            reports[-1].refuse(graph.nodes[-1], NoMatch(str(error).split(";")[0]))
    if device is None:
        reports += fuse_image(graph, _of_host(settings))
    if device is None and settings.options.encoder_scheme is not None:
        reports.append(_run_encoder_pass(GraphPass("quantize", quantize_encoder), graph,
                                         _of_host(settings), "image"))
    for tensor in graph.outputs if device is None else ():
        tensor.shape = ["num_embeds", tensor.shape[-1]]
    others = [lowered.graphs[0], *lowered.encoders[:1],
              *(lowered.drafts[0] if lowered.drafts else [])]
    name_media_weights(others, graph, "image")
    if device is not None:
        name_media_weights([*others, graph], device, "image")
        if rows is not None:
            name_media_weights([*others, graph, device], rows, "image")
    return replace(lowered, image=graph, image_device=device, image_rows=rows, reports=reports)


def fuse_image(graph: gs.Graph, settings: Settings) -> list[Report]:
    """Run the passes over an image encoder's graph.

    Returns:
        Their reports.
    """
    reports: list[Report] = []
    settle_sizes(graph, settings.image_samples)
    tidy(graph)
    for step in IMAGE_PASSES:
        reports.append(_run_encoder_pass(step, graph, settings, "image"))
    return reports


def lower_image_device(graph: gs.Graph, settings: Settings) -> tuple[ImageParts, list[Report]]:
    """Divide a fused image encoder, and lower the part for a device. Consumes the graph.

    Returns:
        The parts, and the reports of the passes.

    Raises:
        LlmcError: the encoder cannot be divided.
    """
    parts, reports = divide_image(graph, settings.image_samples), list[Report]()
    verify(parts.device, "divide_image")
    if parts.rows is not None:
        verify(parts.rows, "divide_image")
    for step in IMAGE_DEVICE_PASSES:
        if not step.when(settings.target):
            continue
        reports.append(Report(f"image.{step.name}", step.run, "image"))
        if isinstance(step, GraphPass):
            step.run(parts.device, settings, reports[-1])
        else:
            step.run([parts.device], settings, reports[-1])
        tidy(parts.device)
        verify(parts.device, f"image.{step.name}")
    for tensor in parts.device.inputs:
        if tensor.name.partition(".")[0] in ("cos", "sin"):  # float32 in any dtype
            tensor.dtype = np.dtype(np.float32)
    return parts, reports


def run_pass(step: Step, ranks: list[list[gs.Graph]], settings: Settings,
             reports: list[Report]) -> list[list[gs.Graph]]:
    """Run a pass on the graphs of every rank and verify them.

    Args:
        step: the pass or requirement.
        ranks: for each rank, its graphs.
        settings: settings of the passes.
        reports: rank 0's reports are appended, as ranks differ in sizes only.

    Returns:
        For each rank, its graphs after the pass.

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
        new: list[Report] = []
        if isinstance(step, GraphPass):
            new = _apply_to_each(step, graphs, settings)
        elif isinstance(step, RankPass) and step.applies(graphs):
            new = [Report(step.name, step.run)]
            step.run(graphs, settings, new[0])
        if rank == 0:
            reports.extend(new)
        for graph in graphs:
            tidy(graph)
            verify(graph, step.name)
    return ranks


def _apply_to_each(step: GraphPass, graphs: Sequence[gs.Graph], settings: Settings) -> list[Report]:
    reports = [Report(step.name, step.run)]
    step.run(graphs[0], settings, reports[0])
    for other in graphs[1:]:
        part = part_of(other, 1)
        if part == "encoder" and step.needs_logits:
            continue
        reports.append(Report(f"{part}.{step.name}", step.run, part))
        step.run(other, settings if part == "draft" else
                 replace(settings, max_seq_len=settings.mem_max_seq_len), reports[-1])
    return reports


def _require_kernels(graphs: Sequence[gs.Graph], target: TargetSpec) -> None:
    """Reject a model with ops that the target's engine has no kernel for."""
    for node in (node for graph in graphs for node in graph.nodes):
        op = op_of(node)
        if op is None or target.runs_any_op:
            continue
        missing = sorted(op.lacking(fields_of(node), operands(node))) if target.kernels else []
        lacks_cache = (op.state and not target.recurrent_state) or (op.attention is not None and (
            (op.attention.reads and not target.shared_caches)
            or (len(op.attention.caches) == 1 and not target.latent_caches)))
        if missing or not op.has_core or lacks_cache:
            raise LlmcError(f"target '{target.name}' has no kernel for llmc::{op.name}"
                            f"{' with ' + ' and '.join(missing) if missing else ''} "
                            f"({describe(node)}); compile for --target cpu")
