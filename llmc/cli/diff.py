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
@click.option("--reference", required=True, help="What it was compiled from.")
@click.option("--hf_dir", type=click.Path(path_type=Path), default=None,
              help="For an .onnx reference.")
@click.option("--prompt", default=None, help="Text to compare on.  [default: random tokens]")
@click.option("--tolerance", type=float, default=None,
              help="Largest difference of every tensor, relative to its range.  [default: see "
                   "above]")
@click.option("--tokens", default=16, help="Greedy tokens to compare.")
@click.option("--bisect", is_flag=True, help="Find the first op over tolerance.")
@click.option("--html", type=click.Path(path_type=Path), default=None, help="Report to write.")
@json_option
def diff_command(directory: Path | None, case_dir: Path | None, as_json: bool, html: Path | None,
                 **options: Any) -> None:
    """Show where, and by how much, a compiled model differs from the original.

    The original is run in float32 with the compiled model's own weights, dequantized. A tensor may
    differ by:

    \b
    model                                   of the tensor's range, or measured
    float32; weights dequantized in kernels 1e-5
    float16, bfloat16                       2 x what transformers loses in it
    float8 KV caches                        2 x what transformers loses with them
    quantized activations (cpu: int8, int4, 2 x what transformers loses with the
    uint4; --quantize_activations)          same rounding
    between layers, or an .onnx reference   3 x what the export loses so
    weights that cannot be put into the     0.1 in 8 bits, 0.5 in 4 bits
    reference

    Measured on the same tokens, times the square root of tp_size. Weights that are not quantized
    must be equal bit by bit, quantized ones what rounding to nearest makes of the reference's;
    calibrated ones, or another tool's, at most 0.9 of their root mean square away. A greedy token
    may differ where the reference's logits are no further apart than the difference allowed there.
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
