"""`llmc compile`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from llmc.cli.compiler_import import import_compiler
from llmc.cli.options import completes, json_option
from llmc.cli.output import print_passes
from llmc.cli.progress import Phases
from llmc.interrupts import interruptible

# What a shell completes; the compiler's own lists take seconds to import.
TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt_rtx")
DTYPES = ("float32", "float16", "bfloat16", "auto")
QUANTIZE = ("int8", "int4", "uint4", "fp8", "none")


@click.command("compile")
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path),
              help="Case directory to make.")
@click.option("--tp_size", default=1, help="Tensor parallel size: chips that share the model.")
@click.option("--expert_parallel", is_flag=True,
              help="Give each chip whole experts of an MoE, not some columns of each.")
@click.option("--dtype", default="float32", metavar="float32|float16|bfloat16|auto",
              shell_complete=completes(*DTYPES),
              help="Dtype of weights and activations; auto: the checkpoint's, where the target has "
                   "it.")
@click.option("--kv_dtype", default="", metavar="float8_e4m3fn", show_default=False,
              shell_complete=completes("float8_e4m3fn"),
              help="Dtype of the KV cache, for --target cuda or tensorrt.  [default: as --dtype]")
@click.option("--quantize", default="", metavar="|".join(QUANTIZE), show_default=False,
              shell_complete=completes(*QUANTIZE),
              help="Quantize the weights of linear layers; uint4 is int4 with zero points; none: "
                   "dequantize a quantized checkpoint to --dtype.  [default: as in the checkpoint]")
@click.option("--group_size", default=0, show_default=False,
              help="Weights along a row that share a scale.  [default: the largest of 128, 64, 32 "
                   "and 16 that divides the row; with fp8 the row]")
@click.option("--quantize_lm_head", default="", metavar="|".join(QUANTIZE), show_default=False,
              shell_complete=completes(*QUANTIZE),
              help="Quantize the LM head, and the embedding where they are tied.  [default: as "
                   "--quantize, but int8 in place of 4 bits]")
@click.option("--quantize_activations", is_flag=True,
              help="With --quantize fp8: also quantize activations to FP8, with a scale for each "
                   "token. With an FP8 checkpoint in blocks that asks for it: for each group of a "
                   "token.")
@click.option("--requantize", is_flag=True,
              help="Dequantize a quantized checkpoint, then quantize it as --quantize says.")
@click.option("--calibrate", type=click.Path(path_type=Path), default=None, metavar="TEXT",
              help="Text file to calibrate --quantize on.")
@click.option("--target", default="cpu", metavar="|".join(TARGETS),
              shell_complete=completes(*TARGETS), help="Engine that runs the compiled model.")
@click.option("--compute_capability", default=None, metavar="9.0",
              help="Compute capability of the only GPUs that may run it.  [default: any]")
@click.option("--max_seq_len", type=int, default=None,
              help="Maximum number of positions of a sequence.  [default: the model's; for "
                   "--target tensorrt at most 4096]")
@click.option("--mem_max_seq_len", type=int, default=None,
              help="Maximum number of tokens that an encoder reads.  [default: the model's, at "
                   "most 4096]")
@click.option("--max_batch_size", default=64,
              help="Maximum number of sequences of a step, for --target tensorrt.")
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="For an .onnx MODEL: directory with its config.json and tokenizer.")
@click.option("--revision", default=None, metavar="COMMIT",
              help="Of a hub id MODEL: branch, tag or commit.  [default: main]")
@click.option("--trust_remote_code", is_flag=True, help="Run code that comes with the model.")
@click.option("--allow_pickle", is_flag=True, help="Read .bin weights with torch.load.")
@click.option("--allow_nan", is_flag=True, help="Compile weights that have NaN or infinities.")
@click.option("--verbose", is_flag=True, help="Print what each pass matched and refused.")
@json_option
def compile_command(model: str, output: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Compile MODEL: a Hugging Face directory, hub id, .gguf or .onnx file."""
    started = time.perf_counter()
    with Phases() as phases, interruptible():  # imports too
        phases.begin("import")
        api = import_compiler()

        def progress(text: str) -> None:
            (phases.note if isinstance(text, api.Note) else phases.begin)(text)

        manifest = api.compile(model, output, progress=progress, **options)
    seconds = time.perf_counter() - started
    if verbose:
        print_passes(manifest)
    if as_json:
        click.echo(json.dumps({"case_dir": str(output), "seconds": seconds,
                               "tp_size": manifest.tp_size}))
    else:
        size = sum(entry.size for entry in manifest.files)
        click.echo(f"{manifest.source.architecture} → {output}: {manifest.tp_size} chip(s), "
                   f"{size / 1e6:.0f} MB in {seconds:.1f} s")
