"""`llmc compile`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from llmc.cli.compiler_import import import_compiler
from llmc.cli.options import Command, completes, json_option
from llmc.cli.output import print_passes
from llmc.cli.progress import Phases
from llmc.compiler.options import OPTIONS
from llmc.interrupts import interruptible

# Arguments of click.option for each type of an option.
_CLICK_TYPES: dict[Any, dict[str, Any]] = {
    int: dict(type=int), int | None: dict(type=int), bool: dict(is_flag=True),
    str: dict(type=str), str | None: dict(type=str),
    str | Path | None: dict(type=click.Path(path_type=Path))}


def _compile_options(command: Command) -> Command:
    """Add an option for each attribute of CompileOptions."""
    for option in reversed(OPTIONS):
        declared, given = option.declared, dict(_CLICK_TYPES[option.kind])
        if declared.choices:
            given.update(metavar="|".join(declared.choices),
                         shell_complete=completes(*declared.choices))
        elif declared.metavar:
            given.update(metavar=declared.metavar)
        command = click.option(f"--{option.name}", default=option.default, help=option.help(),
                               show_default=not declared.default, **given)(command)
    return command


@click.command("compile")
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path),
              help="Case directory to write.")
@_compile_options
@click.option("--verbose", is_flag=True,
              help="Print the matches and the refusals of each pass.")
@json_option
def compile_command(model: str, output: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Compile MODEL: a Hugging Face directory, hub id, .gguf or .onnx file."""
    started = time.perf_counter()
    with Phases() as phases, interruptible():  # covers the imports
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
