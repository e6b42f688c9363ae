"""Which package imports which: everything stands on what is below it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What the compiler takes of the runtime: how an engine tokenizes, samples and loads.
COMPILER_ON_RUNTIME = {
    "llmc.runtime.decoding.params", "llmc.runtime.engines", "llmc.runtime.engines.cuda",
    "llmc.runtime.engines.tensorrt", "llmc.runtime.tokenizer",
}


def imports(folder, of):
    """The modules of the package `of` that a folder's modules import, by path."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module} if node.module != "llmc" else {
                    f"llmc.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        names = {name for name in names if name == of or name.startswith(f"{of}.")}
        if names:
            found[path.relative_to(ROOT).as_posix()] = names
    return found


def test_the_format_imports_neither_the_compiler_nor_the_runtime():
    for package in ("llmc.compiler", "llmc.runtime", "llmc.server"):
        assert imports("artifacts", package) == {}


def test_the_runtime_and_the_server_do_not_import_the_compiler():
    assert imports("runtime", "llmc.compiler") == imports("server", "llmc.compiler") == {}


def test_the_compiler_imports_the_runtime_only_to_run_an_engine_or_to_ask_one():
    found = imports("compiler", "llmc.runtime")
    outside = {path: names - COMPILER_ON_RUNTIME for path, names in found.items()
               if not path.startswith("compiler/check/")}
    assert {path: names for path, names in outside.items() if names} == {}
