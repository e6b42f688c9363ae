"""`compile`: a model to a case directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, cast

import onnx_graphsurgeon as gs

from llmc import __version__
from llmc.artifacts.manifest import (
    PROCESSOR,
    Chip,
    DTypeName,
    FileEntry,
    Manifest,
    PassReport,
    Source,
    Target,
    TokenizerInfo,
    WeightDType,
    write_manifest,
)
from llmc.compiler.adapter import merge_adapter
from llmc.compiler.artifact import file_entry, weight_forms
from llmc.compiler.frontend import RawModel, load
from llmc.compiler.frontend.draft import DraftSource, attach_draft
from llmc.compiler.frontend.peft import read_peft, read_peft_source
from llmc.compiler.frontend.raw import dequantize
from llmc.compiler.frontend.scoring import Scoring
from llmc.compiler.frontend.tokenizer_config import FOLDER, TEMPLATE
from llmc.compiler.graph.notes import Context
from llmc.compiler.graph.rewrite import attends_causally, op_of
from llmc.compiler.graph.weights import Weight
from llmc.compiler.lower import Lowered, divide, fuse, lower, lower_media
from llmc.compiler.options import CompileOptions, takes_options
from llmc.compiler.output import check_output, new_directory
from llmc.compiler.preflight import (
    About,
    check_model,
    check_options,
    limit_seq_len,
    read_dtype,
    warn_untested_transformers,
)
from llmc.compiler.quant.notes import ActivationGroupsQuantized
from llmc.compiler.sampling_defaults import read_sampling
from llmc.compiler.targets import Draft, ImageEncoder, backend
from llmc.compiler.windows import check_windows
from llmc.errors import LlmcError
from llmc.interrupts import check_interrupted, interruptible
from llmc.memory import memory_errors
from llmc.runtime.tokenizer import named_end, read_tokenizer

_DEVICES = 8

Progress = Callable[[str], None]


class Note(str):
    """A remark passed to `progress`. A plain string there names the phase that begins."""


@takes_options
@interruptible()
@memory_errors("compile the model")
def compile(model: str | Path, output: str | Path, *, progress: Progress = lambda text: None,
            **options: Any) -> Manifest:
    """Compile a causal LM or an encoder-decoder model into a case directory.

    The output is written atomically: an existing case directory is replaced only on success.

    Args:
        model: a Hugging Face directory, a hub id, a .gguf file, or an .onnx file with `hf_dir`.
        output: the case directory to write. A symbolic link is followed. A directory with files
            that llmc did not write is not replaced.
        …
        progress: called with the name of each phase as it begins, and with remarks (`Note`).

    Raises:
        LlmcError: the input is invalid, the model is unsupported, or the disk is full.
        TypeError: an option is unknown.
    """
    output = Path(output)
    given = CompileOptions(**options, progress=progress,
                           timing_cache=output.parent / f"{output.name}.timing_cache")
    given = replace(given, dtype=read_dtype(given.dtype, given.target, model))
    return _compile(model, output, given)


def _compile(model: str | Path, output: Path, options: CompileOptions) -> Manifest:
    """Check the options, export the model, run the passes and write the case directory."""
    progress = options.progress
    check_options(options)
    check_output(output)
    described = backend(options.target).describe(options)
    untested = warn_untested_transformers(version("transformers"))
    if untested:
        progress(untested)
    adapter = None if options.adapter is None else read_peft(options.adapter)
    progress("export")
    source = None if options.draft is None else DraftSource.of(options.draft)
    raw = load(model, hf_dir=options.hf_dir, mtp=source == DraftSource("mtp"),
               trust_remote_code=options.trust_remote_code,
               allow_pickle=options.allow_pickle, revision=options.revision,
               task=options.task, pooling=options.pooling,
               scoring=Scoring.of(options.classifier_from_token, options.score_template),
               takes_embeds=options.enable_prompt_embeds,
               takes_media=not options.language_model_only,
               check=lambda *about: check_model(options, About(*about)))
    for note in raw.notes:
        progress(Note(note))
    if source is not None:
        progress("draft")
        raw = attach_draft(raw, source, lambda path: _load_draft(path, raw, options),
                           allow_pickle=options.allow_pickle)
        assert raw.draft is not None
        for note in raw.draft.notes:
            progress(Note(note))
    if not options.allow_nan:
        _require_finite(raw)
    if adapter is not None:
        merge_adapter(raw, adapter)
    if options.requantize and not dequantize(raw):
        raise LlmcError(f"requantize is given, but '{raw.architecture}' has no quantized weights; "
                        f"leave it out")
    progress("passes")
    if options.calibrated and options.scheme is not None:
        lowered = lower_media(_calibrated(raw, options), raw)
    else:
        lowered = lower(raw, options)
    _check_activations(lowered, options)
    _check_kv_dtype(lowered, options, raw.architecture)
    _report_notes(lowered, options, lambda text: progress(Note(text)))
    check_windows(lowered.graphs[0], raw.config, raw.architecture, lowered.settings.max_seq_len)
    progress("write")
    with new_directory(output) as directory:
        manifest = write(raw, lowered, described, options, directory)
        check_interrupted()  # before the output is replaced
        return manifest


def _load_draft(path: Path, raw: RawModel, options: CompileOptions) -> RawModel:
    """Export a separate draft model, which must have as many positions as the model."""
    length = limit_seq_len(About(raw.config, raw.generation, False), options.max_seq_len,
                           options.target)
    return load(path, trust_remote_code=options.trust_remote_code,
                allow_pickle=options.allow_pickle,
                check=lambda *about: check_model(
                    replace(options, draft=None, max_seq_len=length, language_model_only=False),
                    About(*about)))


def _require_finite(raw: RawModel) -> None:
    """Reject NaN and infinities when weights are read.

    A constant of an ONNX file may be a mask, so -inf is allowed there.
    """
    weights = {id(tensor._values): tensor._values
               for graph in raw.all_graphs for tensor in graph.tensors().values()
               if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
    for weight in weights.values():
        if weight.is_floating:
            weight.require_finite(allow_minus_inf=raw.kind == "onnx")


def _calibrated(raw: RawModel, options: CompileOptions) -> Lowered:
    """`lower`, with calibrated quantization between fusion and partition."""
    from llmc.compiler.quant.calibrate import calibrate, read_text

    assert options.scheme is not None
    tokens = read_text(Path(str(options.calibrate)), raw)
    fused = fuse(raw, options)
    calibrate(fused.graphs[0], tokens, options.scheme, options.head_scheme,
              fused.settings.max_seq_len, options.progress)
    return divide(fused, options)


def _used_ops(graphs: list[gs.Graph]) -> dict[str, int]:
    """Return the llmc ops of emitted graphs and their versions."""
    used = {op.name: op.version for graph in graphs for node in graph.nodes
            if (op := op_of(node)) is not None}
    return dict(sorted(used.items()))


def _check_activations(lowered: Lowered, options: CompileOptions) -> None:
    """Reject quantize_activations without effect."""
    if options.quantize_activations and options.scheme is None \
            and not any(report.noted(ActivationGroupsQuantized) for report in lowered.reports):
        raise LlmcError("quantize_activations is given without quantize fp8, and the checkpoint "
                        "has no block-wise FP8 weights that ask for quantized activations; add "
                        "--quantize fp8, or leave out quantize_activations")


def _check_kv_dtype(lowered: Lowered, options: CompileOptions, model: str) -> None:
    """Reject kv_dtype without effect."""
    if options.kv_dtype and not any(op_of(node) is not None and attends_causally(node)
                                    for graph in (*lowered.graphs, *chain(*lowered.drafts))
                                    for node in graph.nodes):
        raise LlmcError(f"kv_dtype is given, but '{model}' has no KV cache; leave it out")


def _report_notes(lowered: Lowered, options: CompileOptions, progress: Progress) -> None:
    """Report the passes' notes: weights that are not quantized or multiplied as requested."""
    context = Context(options.dtype, options.target, lowered.settings.target.gpu)
    for report in lowered.reports:
        for text in report.texts(context):
            progress(text)


def _weight_dtypes(chips: Sequence[Chip]) -> tuple[WeightDType, ...] | None:
    """Return the dtypes of quantized weights."""
    return tuple(sorted({form.dtype for chip in chips
                         for form in chip.quantization.values()})) or None


def write(raw: RawModel, lowered: Lowered, target: Target, options: CompileOptions,
          directory: Path) -> Manifest:
    """Write a case directory into an empty directory."""
    chips: list[Chip] = []
    files: list[FileEntry] = []
    options = replace(options, max_seq_len=lowered.dims.max_seq_len)
    reads = lowered.encoder_info or lowered.memory
    if reads is not None:
        options = replace(options, mem_max_seq_len=reads.max_seq_len)
    for rank, graph in enumerate(lowered.graphs):
        encoder = lowered.encoders[rank:rank + 1]
        draft = lowered.drafts[rank] if lowered.drafts else []
        others: dict[str, Any] = {
            "draft": Draft(draft[0], raw.draft.token_ids, tuple(draft[1:]))} \
            if draft and raw.draft else {}
        image = lowered.image if rank == 0 else None
        if image is not None and raw.image is not None:
            others["image"] = ImageEncoder(
                image, raw.image.computed, raw.image.grid, raw.image.bidirectional,
                raw.image.token_id, raw.image.padded, lowered.image_device, lowered.image_rows)
        if rank == 0 and lowered.audio is not None:
            others["audio"] = lowered.audio
        chip, written = backend(target.kind).emit(graph, rank, directory, options, *encoder,
                                                  **others)
        forms = weight_forms([graph, *encoder, *draft])
        media = {kind: program.model_copy(update={"quantization": weight_forms(graphs)})
                 for kind, program, graphs in (
                     ("image", chip.image, lowered.image_graphs),
                     ("audio", chip.audio, (lowered.audio,))) if program is not None}
        chips.append(chip.model_copy(update={"quantization": forms, **media}))
        files.extend(_inside(chip.path, written))
    tokenizer = _write_tokenizer(raw, directory, lowered.dims.vocab_size)
    files.extend(_tokenizer_files(directory))
    if tokenizer.path is None:
        options.progress(Note("the model has no tokenizer: it takes and returns token ids"))
    if raw.processor is not None:
        (directory / PROCESSOR).write_text(raw.processor.model_dump_json())
        files.append(file_entry(directory / PROCESSOR))
    sampling, notes = read_sampling(raw.generation, lowered.dims.vocab_size,
                                    lowered.encoder_info is not None)
    for note in notes:
        options.progress(Note(note))
    tp_size = len(chips)
    manifest = Manifest(
        format_version=2, llmc_version=__version__,
        source=Source(kind=raw.kind, architecture=raw.architecture,
                      config_sha256=raw.config_sha256, repo_id=raw.origin.repo_id,
                      commit=raw.origin.commit, files=raw.origin.files(),
                      requantized=options.requantize,
                      adapter=() if options.adapter is None else
                      read_peft_source(options.adapter)),
        dims=lowered.dims,
        dtype=cast(DTypeName, options.dtype),  # validated by check_options
        quantization=_weight_dtypes(chips), tp_size=tp_size,
        device_groups=tuple(tuple(range(start, start + tp_size))
                            for start in range(0, max(_DEVICES, tp_size) - tp_size + 1, tp_size)),
        encoder=lowered.encoder_info, memory=lowered.memory, draft=lowered.draft_info,
        pooling=lowered.pooling,
        target=target,
        kv_cache_layout="paged" if target.spec.paged else "linear",
        ops=_used_ops([*lowered.graphs, *lowered.encoders, *chain(*lowered.drafts),
                       *lowered.image_graphs, *([lowered.audio] if lowered.audio else [])]),
        tokenizer=tokenizer,
        sampling=sampling, chips=tuple(chips),
        passes=tuple(PassReport(name=report.name, matches=report.matches,
                                refusals=tuple(report.refusals)) for report in lowered.reports),
        files=tuple(files))
    write_manifest(manifest, directory)
    return manifest


def _tokenizer_files(directory: Path) -> Iterator[FileEntry]:
    for path in sorted((directory / "tokenizer").rglob("*")):
        if path.is_file():
            yield file_entry(path).model_copy(
                update={"path": path.relative_to(directory).as_posix()})


def _inside(folder: str, files: Iterable[FileEntry]) -> Iterator[FileEntry]:
    return (file.model_copy(update={"path": f"{folder}/{file.path}"}) for file in files)


def _write_tokenizer(raw: RawModel, directory: Path, vocab_size: int) -> TokenizerInfo:
    target = directory / "tokenizer"
    target.mkdir()
    raw.save_tokenizer(target)
    present = (target / "tokenizer.json").is_file()
    if not present:
        shutil.rmtree(target)
    bos, ends = (raw.token_ids(key, vocab_size) for key in ("bos_token_id", "eos_token_id"))
    templates = _chat_templates(target)
    if present:
        tokenizer = read_tokenizer(target)
        named = named_end(target, tokenizer, vocab_size)
        # The tokenizer's EOS token ends a turn, also where the configs list others only.
        if named is not None and (templates or not ends):
            ends += (named,)
        ends += tuple(token for token in raw.end_tokens(tokenizer) if token in range(vocab_size))
    return TokenizerInfo(path="tokenizer" if present else None,
                         bos_token_id=bos[0] if bos else None,
                         eos_token_ids=tuple(dict.fromkeys(ends)),
                         chat_template=templates.pop("default", None),
                         additional_chat_templates=templates)


def _chat_templates(tokenizer: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer's folder: names to paths in the case directory."""
    files = {"default": tokenizer / TEMPLATE,
             **{path.stem: path for path in sorted((tokenizer / FOLDER).glob("*.jinja"))}}
    return {name: path.relative_to(tokenizer.parent).as_posix()
            for name, path in files.items() if path.is_file()}
