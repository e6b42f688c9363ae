"""`llmc adapter`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from llmc.cli.compiler_import import import_compiler
from llmc.cli.options import case_options, json_option, require_case_dir
from llmc.cli.progress import Phases
from llmc.interrupts import interruptible


@click.command("adapter")
@click.argument("peft_dir", type=click.Path(path_type=Path))
@case_options
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path),
              help="Directory to write.")
@json_option
def adapter_command(peft_dir: Path, directory: Path | None, case_dir: Path | None, output: Path,
                    as_json: bool) -> None:
    """Compile PEFT_DIR, a LoRA adapter that PEFT has saved, for its base DIR.

    DIR is a case directory that was compiled with --enable_lora.
    """
    base = require_case_dir(directory, case_dir)
    started = time.perf_counter()
    with Phases() as phases, interruptible():
        phases.begin("import")
        import_compiler()
        from llmc.compiler.adapter import compile_adapter

        phases.begin("adapter")
        info = compile_adapter(peft_dir, base, output)
    seconds = time.perf_counter() - started
    if as_json:
        click.echo(json.dumps({"adapter": str(output), "seconds": seconds, "rank": info.rank,
                               "modules": len(info.modules)}))
    else:
        size = sum(entry.size for entry in info.files)
        click.echo(f"{peft_dir} → {output}: rank {info.rank}, {len(info.modules)} modules, "
                   f"{size / 1e6:.0f} MB in {seconds:.1f} s")
