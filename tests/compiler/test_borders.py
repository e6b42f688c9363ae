"""Allowed imports between packages, and allowed uses of op names."""

import ast
from pathlib import Path

import pytest

from llmc import plugins

ROOT = Path(__file__).resolve().parents[2]
ABOVE_PASSES = ("llmc.compiler.lower", "llmc.compiler.dims", "llmc.compiler.api",
                "llmc.compiler.targets", "llmc.compiler.check", "llmc.compiler.frontend")
# Forbidden imports of each package.
FORBIDDEN = {
    "csrc/plugins": ("llmc.compiler", "llmc.runtime", "llmc.cli"),
    "artifacts": ("llmc.compiler", "llmc.runtime", "llmc.server", "llmc.cli"),
    "runtime": ("llmc.compiler", "llmc.cli"),
    "compiler/graph": (*ABOVE_PASSES, "llmc.compiler.passes", "llmc.runtime", "llmc.cli"),
    "compiler/passes": (*ABOVE_PASSES, "llmc.runtime", "llmc.cli"),
    "compiler/quant": ("llmc.compiler.lower", "llmc.compiler.dims", "llmc.compiler.api",
                       "llmc.compiler.targets", "llmc.cli"),
    "compiler/quant/readers": (*ABOVE_PASSES, "llmc.compiler.passes", "llmc.runtime", "llmc.cli"),
    "compiler/frontend": ("llmc.compiler.passes", "llmc.compiler.lower", "llmc.compiler.dims",
                          "llmc.compiler.api", "llmc.compiler.targets", "llmc.compiler.check",
                          "llmc.cli"),
    "compiler/targets": ("llmc.compiler.frontend", "llmc.compiler.passes", "llmc.compiler.lower",
                         "llmc.compiler.dims", "llmc.compiler.api", "llmc.compiler.check",
                         "llmc.cli"),
    "compiler/check": ("llmc.cli",),
}
# Imports of the compiler, except compiler/check, from the runtime: the tokenizer, the sampling
# parameters for a model's defaults, the preprocessing of images and audio that a processor's files
# describe, the rendering of templates to check one, and the location of the engine's libraries for
# TensorRT.
FROM_RUNTIME = ("llmc.runtime.sampling.params", "llmc.runtime.engines", "llmc.runtime.tokenizer",
                "llmc.runtime.multimodal", "llmc.runtime.chat_template", "llmc.runtime.sandbox")


def sources(room):
    return sorted((ROOT / room).rglob("*.py"))


def imported(path):
    """Return every module that a file imports, at any level."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_package_imports_only_from_lower_packages(room):
    files = sources(room)
    assert files
    crossing = [f"{path.relative_to(ROOT)} imports {name}" for path in files
                for name in imported(path)
                if any(f"{name}.".startswith(f"{door}.") for door in FORBIDDEN[room])]
    assert not crossing


def test_the_compiler_imports_only_the_engine_protocol_of_the_runtime():
    crossing = [f"{path.relative_to(ROOT)} imports {name}" for path in sources("compiler")
                for name in imported(path) if f"{name}.".startswith("llmc.runtime.")
                and path.parent.name != "check"
                and not any(f"{name}.".startswith(f"{door}.") for door in FROM_RUNTIME)]
    assert not crossing


def test_op_names_appear_as_strings_only_in_their_folders():
    """Passes query an op's roles and create it from its value: a new op edits none of them."""
    quoted = [f"{path.relative_to(ROOT)}:{node.lineno} {node.value!r}"
              for path in sources("compiler") for node in ast.walk(ast.parse(path.read_text()))
              if isinstance(node, ast.Constant) and node.value in plugins.registry()]
    assert not quoted
