"""Types between packages: mypy reports a wrong argument across each border."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[1]
# The calling file, the imported name, and a call with a wrong argument.
PLANTS = [
    ("llmc/cli/compile.py", "llmc.compiler.api", "compile(3, None)"),
    ("llmc/cli/run.py", "llmc.runtime.core.llm", "LLM(3)"),
    ("llmc/compiler/api.py", "llmc.artifacts.manifest", "read_manifest(3)"),
    ("llmc/compiler/check/diff.py", "llmc.runtime.core.step", "Step.of(3, [0], [], [])"),
    ("llmc/compiler/check/diff.py", "llmc.runtime.gpus", "GpuReplica.trace(3, None)"),
    ("llmc/runtime/core/loop.py", "llmc.runtime.core.scheduler", "Scheduler(3, 4)"),
    ("llmc/runtime/gpus.py", "llmc.runtime.engines.cuda", "CudaEngine.submit(3, None)"),
    ("llmc/compiler/frontend/bind.py", "llmc.compiler.graph.weights", "Weight.of([1.0])"),
    ("llmc/compiler/passes/gemm.py", "llmc.compiler.graph.rewrite", "NoMatch(3)"),
    ("llmc/compiler/passes/gemm.py", "llmc.plugins", "Sample(3, None)"),
    ("llmc/compiler/passes/quantize.py", "llmc.compiler.quant.scheme", "Scheme(3)"),
    ("llmc/compiler/quant/readers/awq.py", "llmc.compiler.quant.readers", "Mark(3, 'AWQ')"),
    ("llmc/runtime/gpus.py", "llmc.artifacts.manifest", "read_manifest(3)"),
    ("llmc/compiler/targets/cuda.py", "llmc.artifacts.program", "read_program(3)"),
    ("llmc/plugins/rms_norm/op.py", "llmc.plugins.normalization",
     "normalize(1.0, {}, {}, centred=False)"),
    ("llmc/runtime/core/llm.py", "llmc.runtime.sampling.params", "SamplingParams(max_tokens='4')"),
    ("llmc/cli/serve.py", "llmc.server.serve", "serve(3)"),
    ("llmc/server/app.py", "llmc.runtime.core.llm", "AsyncLLM(3)"),
    ("llmc/runtime/engines/cpu.py", "llmc.runtime.collectives", "Communicator('two')"),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return mypy's errors with all wrong calls added, by `file:line`.

    The checkout is unchanged.
    """
    folder = tmp_path_factory.mktemp("planted")
    if (ROOT / ".mypy_cache").is_dir():  # the cache of `make lint`, which speeds this up
        shutil.copytree(ROOT / ".mypy_cache", folder / "cache")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(folder / "cache")]
    for number, path in enumerate(dict.fromkeys(path for path, *_ in PLANTS)):
        text = (ROOT / path).read_text()
        for other, module, call in PLANTS:
            if other == path:
                text += _plant(module, call)
        shadow = folder / f"{number}.py"
        shadow.write_text(text)
        options += ["--shadow-file", path, str(shadow)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        output, problem, _ = api.run(options)
    assert not problem, problem
    found = {}
    for line in output.splitlines():
        place, is_error, message = line.partition(": error: ")
        if is_error:
            found[place] = message
    yield found


def _plant(module: str, call: str) -> str:
    name = call.split("(")[0].split(".")[0]
    return f"\n\ndef _planted_{name}() -> None:\n    from {module} import {name}\n    {call}\n"


@pytest.mark.parametrize(("path", "module", "call"), PLANTS)
def test_a_wrong_argument_across_a_border_is_an_error(path, module, call, errors):
    lines = (ROOT / path).read_text().count("\n")
    for other, *plant in PLANTS:
        if other == path:
            lines += _plant(*plant).count("\n")
            if plant == [module, call]:
                break
    assert "[arg-type]" in errors.get(f"{path}:{lines}", "nothing"), call
