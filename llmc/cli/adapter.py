"""`llmc adapter`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from llmc.cli.compiler_import import import_compiler
from llmc.cli.options import json_option
from llmc.cli.progress import Phases
from llmc.interrupts import interruptible


@click.command("adapter")
@click.argument("peft_dir", type=click.Path(path_type=Path))
@click.option("--case_dir", required=True, type=click.Path(path_type=Path),
              help="Case directory of the adapter's base, compiled with --enable_lora.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path),
              help="Directory to write.")
@json_option
def adapter_command(peft_dir: Path, case_dir: Path, output: Path, as_json: bool) -> None:
    """Compile PEFT_DIR, a LoRA adapter that PEFT has saved, for a case directory."""
    started = time.perf_counter()
    with Phases() as phases, interruptible():
        phases.begin("import")
        import_compiler()
        from llmc.compiler.adapter import compile_adapter

        phases.begin("adapter")
        info = compile_adapter(peft_dir, case_dir, output)
    seconds = time.perf_counter() - started
    if as_json:
        click.echo(json.dumps({"adapter": str(output), "seconds": seconds, "rank": info.rank,
                               "modules": len(info.modules)}))
    else:
        size = sum(entry.size for entry in info.files)
        click.echo(f"{peft_dir} → {output}: rank {info.rank}, {len(info.modules)} modules, "
                   f"{size / 1e6:.0f} MB in {seconds:.1f} s")
