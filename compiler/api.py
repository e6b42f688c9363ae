"""`compile`: from a model to a case directory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import onnx_graphsurgeon as gs

from llmc import __version__
from llmc.compiler.artifact import file_entry
from llmc.compiler.frontend import RawModel, load
from llmc.compiler.graph.rewrite import op_of
from llmc.compiler.lower import Lowered, lower
from llmc.compiler.output import check_output, new_directory
from llmc.compiler.targets import Options, cpu, cuda, tensorrt, tensorrt_rtx
from llmc.errors import LlmcError
from llmc.runtime.manifest import (
    Chip,
    FileEntry,
    Manifest,
    PassReport,
    Source,
    Target,
    TokenizerInfo,
    write_manifest,
)
from llmc.runtime.tokenizer import named_end, read_tokenizer

TARGETS: dict[str, ModuleType] = {target.KIND: target
                                  for target in (cpu, cuda, tensorrt, tensorrt_rtx)}
_DEVICES = 8

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
                      output.with_name(f"{output.name}.timing_cache"), progress, kv_dtype, target,
                      tp_size, max_seq_len, mem_max_seq_len, max_beam_width)
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
    lowered = lower(raw, options)
    progress("write")
    with new_directory(output) as directory:
        return write(raw, lowered, described, options, directory)


def _used_ops(graphs: list[gs.Graph]) -> dict[str, int]:
    """The llmc ops of emitted graphs, with their versions."""
    used = {op.name: op.version for graph in graphs for node in graph.nodes
            if (op := op_of(node)) is not None}
    return dict(sorted(used.items()))


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
    tokenizer = _write_tokenizer(raw, directory, lowered.dims.vocab_size)
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


def _write_tokenizer(raw: RawModel, directory: Path, vocab_size: int) -> TokenizerInfo:
    target = directory / "tokenizer"
    target.mkdir()
    raw.save_tokenizer(target)
    present = (target / "tokenizer.json").is_file()
    if not present:
        shutil.rmtree(target)
    template = "tokenizer/chat_template.jinja"
    bos, ends = (raw.token_ids(key, vocab_size) for key in ("bos_token_id", "eos_token_id"))
    if present and not ends:  # what only the tokenizer says
        end = named_end(target, read_tokenizer(target), vocab_size)
        ends = () if end is None else (end,)
    return TokenizerInfo(path="tokenizer" if present else None,
                         bos_token_id=bos[0] if bos else None,
                         eos_token_ids=ends,
                         chat_template=template if (directory / template).is_file() else None)
