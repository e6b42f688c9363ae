"""`compile`: from a model to a case directory."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import onnx_graphsurgeon as gs

from llmc import __version__, plugins
from llmc.compiler.artifact import file_entry
from llmc.compiler.frontend import RawModel, load
from llmc.compiler.graph.rewrite import Report, Settings, is_llmc, verify, weight
from llmc.compiler.graph.weights import Weight
from llmc.compiler.output import check_output, new_directory
from llmc.compiler.passes.memory import move_memory
from llmc.compiler.passes.packing import lm_head
from llmc.compiler.passes.tensor_parallel import max_tp_size, partition_all
from llmc.compiler.pipeline import ENCODER_PASSES, run_passes
from llmc.compiler.targets import Options, cpu, cuda, tensorrt, tensorrt_rtx
from llmc.errors import LlmcError
from llmc.runtime.manifest import (
    Chip,
    Dims,
    EncoderInfo,
    FileEntry,
    Manifest,
    PassReport,
    Source,
    Target,
    TokenizerInfo,
    write_manifest,
)

TARGETS: dict[str, ModuleType] = {target.KIND: target
                                  for target in (cpu, cuda, tensorrt, tensorrt_rtx)}
_DEFAULT_MAX_SEQ_LEN = 4096
_DEVICES = 8
_VOCAB_MULTIPLE = 64

Progress = Callable[[str], None]


def compile(model: str | Path, output: str | Path, *, tp_size: int = 1, dtype: str = "float32",
            target: str = "cpu", max_seq_len: int | None = None,
            mem_max_seq_len: int | None = None, max_beam_width: int = 1,
            max_batch_size: int = 64, hf_dir: str | Path | None = None,
            compute_capability: str | None = None, kv_dtype: str = "",
            trust_remote_code: bool = False, allow_pickle: bool = False,
            progress: Progress = lambda text: None) -> Manifest:
    """Compile a causal LM or an encoder-decoder model into a case directory.

    The directory appears whole or not at all; one that is there already is replaced only then.

    Args:
        model: a Hugging Face directory, a hub id, a .gguf file, or an .onnx file with `hf_dir`.
        output: the case directory to make; of a symbolic link, its target is. One that holds what
            llmc did not put there is not replaced.
        tp_size: chips that share the model.
        dtype: of weights and activations; the cpu target has float32.
        kv_dtype: of the KV caches; the cuda and tensorrt targets have float8_e4m3fn; "": as dtype.
        compute_capability: of the only GPUs that may run it, such as 9.0; None for all.
        target: engine kind.
        max_seq_len: positions a sequence may use; at most the model's, at most 4096 by default.
        mem_max_seq_len: tokens of a prompt that an encoder takes, chosen like max_seq_len, which
            then is the decoder's.
        max_beam_width: beams of a prompt, at most; above 1 attention can read the KV cache through
            an indirection, for which the cpu target has a slower attention in every step. The
            tensorrt_rtx target has no beam search.
        max_batch_size: sequences of a step; only the tensorrt target has such a limit.
        progress: called with what is about to happen.

    Raises:
        LlmcError: the input is bad, the model cannot be compiled, or the disk is full.
    """
    if target not in TARGETS:
        raise LlmcError(f"target '{target}' is not known; there are: {', '.join(TARGETS)}")
    if dtype not in TARGETS[target].DTYPES:
        raise LlmcError(f"target '{target}' has no dtype '{dtype}'; it has: "
                        f"{', '.join(TARGETS[target].DTYPES)}")
    kv_dtypes = getattr(TARGETS[target], "KV_DTYPES", ())
    if kv_dtype and kv_dtype not in kv_dtypes:
        raise LlmcError(f"target '{target}' has no kv_dtype '{kv_dtype}'; leave it out"
                        f"{''.join(f', or give {name}' for name in kv_dtypes)}")
    if compute_capability is not None and (
            target not in ("cuda", "tensorrt")
            or not re.fullmatch(r"[1-9]\d*\.\d", compute_capability)):
        raise LlmcError(f"compute_capability '{compute_capability}' is not one of a GPU's for "
                        f"target {target}; write it like 9.0")
    if tp_size < 1:
        raise LlmcError(f"tp_size {tp_size} is below 1")
    if max_beam_width < 1:
        raise LlmcError(f"max_beam_width {max_beam_width} is below 1; 1 is no beam search")
    if max_beam_width > 1 and target == tensorrt_rtx.KIND:
        raise LlmcError(f"max_beam_width {max_beam_width} is not there yet for target '{target}'; "
                        f"leave it out, or compile with --target cpu, cuda or tensorrt")
    if max_batch_size < 1:
        raise LlmcError(f"max_batch_size {max_batch_size} is below 1")
    if target == tensorrt.KIND and max_beam_width > max_batch_size:
        raise LlmcError(f"max_beam_width {max_beam_width} exceeds max_batch_size {max_batch_size}, "
                        f"the rows that a plan has; raise it")
    output = Path(output)
    check_output(output)
    options = Options(dtype, compute_capability, max_batch_size,
                      output.with_name(f"{output.name}.timing_cache"), progress,
                      kv_dtype=kv_dtype)
    described = TARGETS[target].describe(options)
    progress("export")
    raw = load(model, hf_dir=hf_dir, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    progress("passes")
    if raw.encoder is not None and target == tensorrt_rtx.KIND:
        raise LlmcError(f"'{raw.architecture}' is an encoder-decoder model, which is not there yet "
                        f"for target '{target}'; compile it with --target cpu, cuda or tensorrt")
    if raw.encoder is None and mem_max_seq_len is not None:
        raise LlmcError(f"mem_max_seq_len {mem_max_seq_len} is given, but '{raw.architecture}' has "
                        f"no encoder; leave it out")
    lowered = lower(raw, tp_size, max_seq_len, max_beam_width=max_beam_width,
                    mem_max_seq_len=mem_max_seq_len)
    progress("write")
    with new_directory(output) as directory:
        return write(raw, lowered, described, options, directory)


@dataclass(frozen=True)
class Fused:
    """The fused graphs of the whole model, and what is known of it."""

    graph: gs.Graph
    reports: list[Report]
    settings: Settings
    dims: Dims
    encoder: gs.Graph | None = None
    encoder_info: EncoderInfo | None = None


@dataclass(frozen=True)
class Lowered:
    """The fused graph of each rank, and what is known of the whole. `encoders` is empty where the
    model has none.
    """

    graphs: list[gs.Graph]
    reports: list[Report]
    settings: Settings
    dims: Dims
    encoders: list[gs.Graph]
    encoder_info: EncoderInfo | None = None


def lower(raw: RawModel, tp_size: int, max_seq_len: int | None,
          vocab_multiple: int | None = None, max_beam_width: int = 1,
          mem_max_seq_len: int | None = None) -> Lowered:
    """Run the passes and partition. Consumes `raw`'s graphs.

    `vocab_multiple` is 64, or what tp_size needs, where it is not given.

    Raises:
        LlmcError: see `compile`.
    """
    fused = fuse(raw, max_seq_len, vocab_multiple or math.lcm(_VOCAB_MULTIPLE, tp_size),
                 max_beam_width, mem_max_seq_len)
    return divide(fused, tp_size, raw.architecture)


def fuse(raw: RawModel, max_seq_len: int | None, vocab_multiple: int, max_beam_width: int = 1,
         mem_max_seq_len: int | None = None) -> Fused:
    """Run the passes. Consumes `raw`'s graphs.

    Raises:
        LlmcError: see `compile`.
    """
    length = _max_seq_len(raw, max_seq_len)
    settings = Settings(length, vocab_multiple, max_beam_width)
    graph = raw.graph
    reports = run_passes(graph, settings)
    vocab_size = next(report.matches["vocab_size"] for report in reports
                       if "vocab_size" in report.matches)
    attention = [node for node in graph.nodes if is_llmc(node, "CausalAttention")]
    if not attention:
        raise LlmcError(f"the decoder of '{raw.architecture}' has no causal self-attention")
    dims = Dims(
        num_layers=len(attention),
        hidden_size=weight(next(n for n in graph.nodes if is_llmc(n, "Embedding")).inputs[1])
        .shape[1],
        num_heads=attention[0].attrs["num_heads"], num_kv_heads=attention[0].attrs["num_kv_heads"],
        head_dim=attention[0].attrs["head_dim"], vocab_size=vocab_size,
        padded_vocab_size=weight(lm_head(graph).inputs[1]).shape[0], max_seq_len=length)
    if raw.encoder is None:
        return Fused(graph, reports, settings, dims)
    mem_settings = replace(settings, max_seq_len=_max_seq_len(raw, mem_max_seq_len, "mem_"))
    for report in run_passes(raw.encoder, mem_settings, ENCODER_PASSES):
        reports.append(replace(report, name=f"encoder.{report.name}"))
    info = _describe_encoder(raw, mem_settings.max_seq_len)
    _share_weights(raw.encoder, graph)
    return Fused(graph, reports, settings, dims, raw.encoder, info)


def divide(fused: Fused, tp_size: int, architecture: str) -> Lowered:
    """Partition. Consumes the graphs where tp_size is 1.

    Raises:
        LlmcError: see `compile`.
    """
    wholes = [fused.graph, *([fused.encoder] if fused.encoder is not None else [])]
    limit = min(map(max_tp_size, wholes))
    if tp_size > limit:
        raise LlmcError(f"tp_size {tp_size} exceeds num_attention_heads {limit} of "
                        f"'{architecture}'; allowed: 1 to {limit}")
    graphs, *encoders = partition_all(wholes, tp_size, architecture)
    reports = list(fused.reports)
    if encoders:
        reports.append(Report("memory"))
        moved = [move_memory(*rank) for rank in zip(encoders[0], graphs, strict=True)]
        reports[-1].count("memory", moved[0])
        for encoder in encoders[0]:
            verify(encoder, "memory")
    report = Report("tensor_parallel")
    for kind in ("AllReduce", "AllGather"):
        report.count(kind, sum(is_llmc(node, kind) for rank in (graphs, *encoders)
                               for node in rank[0].nodes))
    reports.append(report)
    for rank in graphs:
        verify(rank, report.name)
    return Lowered(graphs, reports, fused.settings, fused.dims, encoders[0] if encoders else [],
                   fused.encoder_info)


def _share_weights(encoder: gs.Graph, decoder: gs.Graph) -> None:
    """Pad what the encoder shares with the decoder as it is padded there, and rename what only has
    the same name.
    """
    def weights(graph: gs.Graph) -> dict[str, gs.Constant]:
        return {tensor.name: tensor for node in graph.nodes for tensor in node.inputs
                if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}

    theirs = weights(decoder)
    for name, tensor in weights(encoder).items():
        values, other = tensor._values, theirs[name]._values if name in theirs else None
        if other is None or other is values:
            continue
        if other.shape[0] > values.shape[0] and values.pad_rows(other.shape[0]) is other:
            tensor._values = other
        else:
            tensor.name = f"encoder.{name}"


def _describe_encoder(raw: RawModel, max_seq_len: int) -> EncoderInfo:
    assert raw.encoder is not None

    def ids(key: str) -> tuple[int, ...]:  # the config's own are not for generation
        return replace(raw, config={}).token_ids(key)

    start = raw.token_ids("decoder_start_token_id") or raw.token_ids("bos_token_id")
    if not start:
        raise LlmcError(f"'{raw.architecture}' does not say which token its decoder begins with; "
                        f"put decoder_start_token_id into generation_config.json")
    attention = [node for node in raw.encoder.nodes if is_llmc(node, "BidirectionalAttention")]
    table = next(node for node in raw.encoder.nodes if is_llmc(node, "Embedding")
                 and node.inputs[0].name == "input_ids").inputs[1]
    return EncoderInfo(
        num_layers=len(attention), max_seq_len=max_seq_len,
        vocab_size=weight(table).shape[0],
        decoder_start_token_id=start[0],
        forced_bos_token_ids=ids("forced_bos_token_id"),
        forced_eos_token_ids=ids("forced_eos_token_id"),
        bad_words=tuple(map(tuple, raw.generation.get("bad_words_ids") or ())))


def _used_ops(graphs: list[gs.Graph]) -> dict[str, int]:
    """The llmc ops of emitted graphs, with their versions."""
    used = {node.op for graph in graphs for node in graph.nodes if is_llmc(node)}
    return {op: plugins.registry()[op].version for op in sorted(used)}


def _max_seq_len(raw: RawModel, wish: int | None, prefix: str = "") -> int:
    config = raw.config.get("text_config") or raw.config
    key, limit = next(((key, config[key]) for key in
                       ("max_position_embeddings", "n_positions", "max_seq_len")
                       if isinstance(config.get(key), int)), ("", None))
    if wish is None:
        return min(limit or _DEFAULT_MAX_SEQ_LEN, _DEFAULT_MAX_SEQ_LEN)
    if raw.encoder is not None and key == "n_positions":
        limit = None  # T5's, whose positions are relative: what it was trained with
    if wish < 2 or (limit is not None and wish > limit):
        raise LlmcError(f"{prefix}max_seq_len {wish} is not possible: '{raw.architecture}' has "
                        f"max_position_embeddings {limit}; allowed: 2 to {limit or 'any'}")
    return wish


def write(raw: RawModel, lowered: Lowered, target: Target, options: Options,
          directory: Path) -> Manifest:
    """Write a case directory into an empty directory."""
    chips: list[Chip] = []
    files: list[FileEntry] = []
    if lowered.encoder_info is not None:
        options = replace(options, mem_max_seq_len=lowered.encoder_info.max_seq_len)
    for rank, graph in enumerate(lowered.graphs):
        encoder = lowered.encoders[rank:rank + 1]
        chip, written = TARGETS[target.kind].emit(graph, rank, directory, options, *encoder)
        chips.append(chip)
        files.extend(_inside(chip.path, written))
    tokenizer = _write_tokenizer(raw, directory)
    files.extend(_inside("tokenizer", map(file_entry, sorted((directory / "tokenizer").glob("*")))))
    tp_size = len(chips)
    manifest = Manifest(
        format_version=1, llmc_version=__version__,
        source=Source(kind=raw.kind, architecture=raw.architecture,
                      config_sha256=raw.config_sha256),
        dims=lowered.dims, max_beam_width=lowered.settings.max_beam_width, dtype=options.dtype,
        tp_size=tp_size,
        device_groups=tuple(tuple(range(start, start + tp_size))
                            for start in range(0, max(_DEVICES, tp_size) - tp_size + 1, tp_size)),
        encoder=lowered.encoder_info, target=target,
        ops=_used_ops(lowered.graphs + lowered.encoders), tokenizer=tokenizer, chips=tuple(chips),
        passes=tuple(PassReport(name=report.name, matches=report.matches,
                                refusals=tuple(report.refusals)) for report in lowered.reports),
        files=tuple(files))
    write_manifest(manifest, directory)
    return manifest


def _inside(folder: str, files: Iterable[FileEntry]) -> Iterator[FileEntry]:
    return (file.model_copy(update={"path": f"{folder}/{file.path}"}) for file in files)


def _write_tokenizer(raw: RawModel, directory: Path) -> TokenizerInfo:
    target = directory / "tokenizer"
    target.mkdir()
    raw.save_tokenizer(target)
    present = (target / "tokenizer.json").is_file()
    if not present:
        shutil.rmtree(target)
    template = "tokenizer/chat_template.jinja"
    bos = raw.token_ids("bos_token_id")
    return TokenizerInfo(path="tokenizer" if present else None,
                         bos_token_id=bos[0] if bos else None,
                         eos_token_ids=raw.token_ids("eos_token_id"),
                         chat_template=template if (directory / template).is_file() else None)
