"""Compile a model and compare it: `python examples/compile_and_verify.py MODEL CASE_DIR`."""

import sys

import llmc
from llmc.cli import main as command_line


def main(model: str, case_dir: str) -> None:
    manifest = llmc.compile(model, case_dir, tp_size=2)
    print(f"{manifest.source.architecture}: {manifest.tp_size} chips, {manifest.dtype}")
    command_line(["diff", case_dir, "--reference", model])  # exits with 0, or 1 over tolerance


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
