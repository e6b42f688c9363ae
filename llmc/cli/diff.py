"""`llmc diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmc.cli.compiler_import import import_compiler
from llmc.cli.options import case_options, json_option, require_case_dir
from llmc.cli.output import finish_check
from llmc.cli.progress import Phases


@click.command("diff")
@case_options
@click.option("--reference", required=True,
              help="Original model: directory, hub id, .gguf or .onnx file.")
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="Directory with config.json and tokenizer of an .onnx reference.")
@click.option("--prompt", default=None,
              help="Text to compare the models on.  [default: random tokens]")
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path),
              help="Picture of a prompt to compare as well: its encoder rows, layers and logits; "
                   "may be repeated. --prompt then has the model's placeholder for each.")
@click.option("--audio", multiple=True, type=click.Path(path_type=Path),
              help="Audio clip of that prompt, compared likewise; may be repeated. Of a speech "
                   "model, the cross-attention KV, layers and logits of its first window.")
@click.option("--tolerance", type=float, default=None,
              help="Tolerance of every tensor, relative to its range.  [default: see above]")
@click.option("--tokens", type=int, default=None,
              help="Number of greedy tokens to compare.  [default: 16]")
@click.option("--bisect", is_flag=True, help="Find the first op beyond the tolerance.")
@click.option("--html", type=click.Path(path_type=Path), default=None,
              help="HTML report to write.")
@json_option
def diff_command(directory: Path | None, case_dir: Path | None, as_json: bool, html: Path | None,
                 **options: Any) -> None:
    """Compare a compiled model with the original, tensor by tensor.

    The original runs in float32 with the dequantized weights of the compiled model. Tolerances:

    \b
    model                                   relative to the tensor's range
    float32; weights dequantized in kernels 1e-5
    float16, bfloat16                       2 x error of transformers in it
    float8 KV caches                        2 x error of transformers with them
    quantized activations (cpu: int8, int4, 2 x error of transformers with the
    uint4; --quantize_activations)          same activation quantization
    the preceding three, within a layer     3 x error of the export
    (--bisect) or with an .onnx reference
    float8 KV caches, .onnx reference       0.1
    weights that the reference cannot load, 0.1 in 8 bits, 0.5 in 4 bits
    and --image and --audio with quantized
    weights

    Errors are measured on the same tokens, and multiplied by the square root of tp_size. Weights
    that are not quantized must be bit-identical. Quantized weights must equal the reference's
    weights, rounded to nearest; calibrated weights and those of another tool may differ by 0.9 of
    their root mean square. A greedy token may differ where the reference's two logits differ by
    at most the tolerance.
    """
    found = require_case_dir(directory, case_dir)
    with Phases() as phases:
        phases.begin("import")
        import_compiler()
        from llmc.compiler.check.diff import diff
        from llmc.compiler.check.report import print_report, write_html

        report = diff(found, progress=phases.begin, **options)
    if html is not None:
        write_html(report, html)
    finish_check(report, print_report, as_json)
