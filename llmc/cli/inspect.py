"""`llmc inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from llmc.cli.options import case_options, json_option, require_case_dir
from llmc.cli.output import print_passes


@click.command("inspect")
@case_options
@click.option("--verify", is_flag=True, help="Also check the SHA-256 of every file.")
@json_option
def inspect_command(directory: Path | None, case_dir: Path | None, verify: bool,
                    as_json: bool) -> None:
    """Show the contents of a case directory: chips, memory and compiler passes."""
    from rich.console import Console
    from rich.table import Table

    from llmc.artifacts.manifest import read_manifest, verify_files
    from llmc.runtime.inspection import summarize

    case_dir = require_case_dir(directory, case_dir)
    manifest = read_manifest(case_dir)
    verify_files(manifest, case_dir, hashes=verify)
    summary = summarize(manifest)
    if as_json:
        click.echo(json.dumps(summary))
        return
    dims = manifest.dims
    console = Console()
    console.print(f"[bold]{manifest.source.architecture}[/bold] from {manifest.source.kind}, "
                  f"{manifest.dtype}, target {manifest.target.kind}, tp_size {manifest.tp_size}, "
                  f"llmc {manifest.llmc_version}")
    console.print(f"{dims.num_layers} layers, hidden {dims.hidden_size}, heads {dims.num_heads} / "
                  f"{dims.num_kv_heads} × {dims.head_dim}, vocabulary {dims.vocab_size} (padded "
                  f"{dims.padded_vocab_size}), {dims.max_seq_len} positions")
    if manifest.encoder is not None:
        console.print(f"encoder: {manifest.encoder.num_layers} layers, vocabulary "
                      f"{manifest.encoder.vocab_size}, prompts of at most "
                      f"{manifest.encoder.max_seq_len} tokens; the decoder starts with token "
                      f"{manifest.encoder.decoder_start_token_id}")
    if (pooling := manifest.pooling) is not None:
        labels = f", labels {', '.join(pooling.labels)}" if pooling.labels else ""
        prompts = f", prompts {', '.join(pooling.prompts)}" if pooling.prompts else ""
        console.print(f"task {pooling.task}: pooling {pooling.kind or 'none'}, width "
                      f"{pooling.width}{', normalized' if pooling.normalized else ''}{labels}"
                      f"{prompts}")
    if manifest.draft is not None:
        console.print(f"draft model: {manifest.draft.kind}, {manifest.draft.num_layers} layers, "
                      f"vocabulary {manifest.draft.vocab_size}")
    for kind, encoder in manifest.media.items():
        arrays = "; ".join(f"{tensor.name} {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"
                           for tensor in encoder.inputs)
        width = manifest.memory.width if manifest.memory else manifest.embeds_width
        console.print(f"{kind} encoder: {arrays} to rows of {width}", markup=False)
    if manifest.memory is not None:
        console.print(f"cross-attention: to at most {manifest.memory.max_seq_len} rows of the "
                      f"images of a prompt; an image has {manifest.memory.num_rows}")
    memory = ["encoder output per prompt (MB)"] if manifest.mem_max_seq_len else []
    table = Table("chip", "weights (MB)", "KV cache per token (KB)", *memory, "heads",
                  "KV heads", "steps")
    for chip in summary["chips"]:
        table.add_row(str(chip["rank"]), f"{chip['weight_bytes'] / 1e6:.1f}",
                      f"{chip['token_bytes'] / 1e3:.1f}",
                      *(f"{chip['memory_bytes'] / 1e6:.1f}" for _ in memory),
                      str(chip["num_heads"]), str(chip["num_kv_heads"]), str(chip["steps"]))
    console.print(table)
    for chip in summary["chips"]:
        if chip["quantization"]:
            console.print(f"chip {chip['rank']}, quantized weights: " + "; ".join(
                f"{count} in {form}" for form, count in chip["quantization"].items()))
    for kind in manifest.media:
        if summary[kind]["quantization"]:
            console.print(f"{kind} encoder, quantized weights: " + "; ".join(
                f"{count} in {form}" for form, count in summary[kind]["quantization"].items()))
    if summary["cache_tokens"]:
        console.print("KV cache capacity in tokens, approximate: " + "; ".join(
            f"{name} {count:,}" if count else f"{name} none: the weights do not fit"
            for name, count in summary["cache_tokens"].items()))
    print_passes(manifest)
    if verify:
        console.print(f"{len(manifest.files)} files have the size and the SHA-256 of "
                      "model_info.json", soft_wrap=True)
