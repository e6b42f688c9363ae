"""The command line: one file per command, each a thin wrapper of a public function."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from llmc import __version__
from llmc.cli.adapter import adapter_command
from llmc.cli.bench import bench_command
from llmc.cli.compile import compile_command
from llmc.cli.diff import diff_command
from llmc.cli.eval import eval_command
from llmc.cli.group import CONTEXT_SETTINGS, Group
from llmc.cli.inspect import inspect_command
from llmc.cli.run import run_command
from llmc.cli.serve import serve_command
from llmc.installation import CUDA_INSTALL_COMMAND


def _engines() -> str:
    extension = find_spec("llmc_cuda")
    if extension is None:
        return f"cpu; for NVIDIA GPUs, from a checkout: {CUDA_INSTALL_COMMAND}"
    plugins = Path(str(extension.origin)).with_name("libllmc_plugins.so")
    return "cpu, cuda, tensorrt" if plugins.is_file() else "cpu, cuda"


@click.group(cls=Group, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="llmc",
                      message=f"%(prog)s %(version)s (engines: {_engines()})")
def main() -> None:
    """Compile language models ahead of time, and run the compiled models."""


for _command in (compile_command, adapter_command, run_command, bench_command, serve_command,
                 inspect_command, diff_command, eval_command):
    main.add_command(_command)
