"""Differences of correct models relative to the tolerances of `llmc diff`, by family.

    python bench/rounding.py
    python bench/rounding.py llama gpt2

The tiny model of each family is compiled for CPUs in float32, for 1, 2 and 3 chips as far as it has
heads, and for CUDA in bfloat16, which NumPy runs. Prints the tensor with the largest difference
relative to its tolerance, both relative to its range, and the verdict, which should be none. The
table at the end has the worst family of each target.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import families
from schedule_interpreter import Interpreters

from llmc.artifacts.manifest import Target, read_manifest
from llmc.compiler import api
from llmc.compiler.check import diff
from llmc.compiler.frontend import load
from llmc.compiler.lower import lower
from llmc.compiler.options import CompileOptions
from llmc.errors import LlmcError

FORMS = [("cpu", "float32", 1), ("cpu", "float32", 2), ("cpu", "float32", 3),
         ("cuda", "bfloat16", 1)]


@contextmanager
def interpreted_greedy(root):
    """Return the greedy tokens of a CUDA case directory."""
    yield Interpreters(root).greedy


def measure(family: str, directory: Path, furthest: dict[str, tuple[float, str]]) -> None:
    hf = families.save(families.tiny_model(family), directory / "hf")
    raw = load(hf)

    def copied(*_, **__):
        return families.copy_raw(raw)

    diff.load = copied
    compare, greedy = diff.compare, diff._greedy
    diff.device_count, diff.GpuReplica = lambda: 8, lambda _, case, *__: Interpreters(case)
    for kind, dtype, tp_size in FORMS:
        case, seen = directory / f"{kind}{tp_size}", []

        def keep(*arguments, seen=seen):
            seen.append(compare(*arguments))
            return seen[-1]

        options = CompileOptions(dtype=dtype, target=kind, tp_size=tp_size)
        case.mkdir()
        try:
            api.write(raw, lower(copied(), options), Target(kind=kind), options, case)
        except LlmcError as error:  # too few heads, or an op without a kernel
            print(f"{family:12} {kind:4} {dtype:8} tp {tp_size} {error}", flush=True)
            continue
        diff.compare = keep
        diff._greedy = interpreted_greedy if kind == "cuda" else greedy
        try:
            report = diff.diff(case, hf, bisect=True)
        finally:
            diff.compare, diff._greedy = compare, greedy
        worst = max((d for d in seen if d.pair == "compiled vs export"),
                    key=lambda d: d.relative / d.allowed)
        form = f"{kind}, {dtype}, tp {tp_size}"
        furthest[form] = max(furthest.get(form, (0.0, "")), (worst.relative / worst.allowed,
                             f"{family} | {worst.relative:.1e} | {worst.allowed:.1e}"))
        print(f"{family:12} {kind:4} {dtype:8} tp {read_manifest(case).tp_size} {worst.name:24} "
              f"{worst.relative:.1e} of {worst.allowed:.1e}  {report.verdict or 'none'}",
              flush=True)


def main() -> None:
    furthest: dict[str, tuple[float, str]] = {}
    for family in sys.argv[1:] or [*families.FAMILIES, *families.UNPLANNED]:
        with tempfile.TemporaryDirectory() as directory:
            measure(family, Path(directory), furthest)
    print("\n| compiled for | furthest family | difference | allowed |\n| --- | --- | --- | --- |")
    for form, (_, told) in furthest.items():
        print(f"| {form} | {told} |")


if __name__ == "__main__":
    main()
