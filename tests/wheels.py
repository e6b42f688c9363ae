"""Check the wheels' contents, and installations in empty venvs.

    make wheels                                              builds them and runs this
    python tests/wheels.py WHEELS_DIR [PYTHON]…              for each of these Pythons, of 3.12 on

The pure wheel is installed alone: the command runs, and the compiler is absent. The stable-ABI
wheel of the CUDA engine is installed without nvcc on the PATH: it links only to libraries from pip
or of every Linux, it loads, and it reports the number of GPUs or a clear error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

# Of glibc and g++; the wheel's tag states their minimum versions.
_OF_THE_SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
                  "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2", "linux-vdso.so.1"}
_COUNT = """
from llmc.errors import LlmcError
from llmc.runtime.engines import cuda
engine = cuda.extension()
print(engine.__file__)
print("version", engine.version)
try:
    print("GPUs", cuda.device_count())
except LlmcError as error:
    print("refused:", error)
"""
_PURE = """
import importlib.util, llmc, sys
assert "torch" not in sys.modules and sys.prefix in llmc.__file__
assert not any(map(importlib.util.find_spec, ("torch", "onnx", "llmc_cuda", "nvidia")))
"""


def main(wheels: Path, pythons: list[str]) -> None:
    (pure,), (cuda,), (vllm,) = (list(wheels.glob(f"{name}-*.whl"))
                                 for name in ("llmc_aot", "llmc_cuda", "llmc_vllm"))
    assert pure.name.endswith("-py3-none-any.whl"), pure.name
    assert re.search(r"-cp312-abi3-manylinux_2_\d+_x86_64\.whl$", cuda.name), cuda.name
    for wheel in (pure, cuda, vllm):
        check_licenses(wheel)
    check_sbom(wheels / "llmc.cdx.json")
    for python in pythons:
        with tempfile.TemporaryDirectory() as directory:
            venv = Venv(python, Path(directory))
            venv.install(pure)
            assert "serve" in venv.run(venv.bin / "llmc", "--help")
            venv.run(venv.bin / "python", "-I", "-c", _PURE)
            venv.install(cuda)
            library, version, told = venv.run(venv.bin / "python", "-I", "-c",
                                              _COUNT).splitlines()
            venv.check_libraries(Path(library))
            assert re.fullmatch(r"GPUs [1-9]\d*|refused: there is no NVIDIA GPU here \(.+\); .+",
                                told), told
            print(f"{python}: {cuda.name}, {version}; {told}")


def check_licenses(wheel: Path) -> None:
    """Check the license, the notice and the licenses of compiled-in code."""
    with ZipFile(wheel) as archive:
        held = {name.partition(".dist-info/licenses/")[2] for name in archive.namelist()}
    wanted = {"LICENSE", "NOTICE"}
    if wheel.name.startswith("llmc_cuda"):
        wanted |= {f"licenses/{name}.txt" for name in ("cudnn-frontend-mit", "nanobind",
                                                       "robin-map")}
    assert wanted <= held, (wheel.name, wanted - held)


def check_sbom(path: Path) -> None:
    """Check that the SBOM names both wheels, their requirements and compiled-in code."""
    components = {component["name"]: component["version"]
                  for component in json.loads(path.read_text())["components"]}
    assert {"llmc-aot", "llmc-cuda", "onnxruntime", "nvidia-cublas", "nanobind",
            "nvidia-cudnn-frontend"} <= components.keys(), components


class Venv:
    """A venv of this Python, and an environment without nvcc and without libraries' paths."""

    def __init__(self, python: str, directory: Path) -> None:
        subprocess.run([python, "-m", "venv", directory], check=True)
        self.bin = directory / "bin"
        self._environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(directory),
                             "PIP_CACHE_DIR": os.path.expanduser("~/.cache/pip"), **{
                                 name: value for name, value in os.environ.items()
                                 if name.startswith("PIP_")}}

    def run(self, *command: object) -> str:
        """Run a command; return its stdout."""
        return subprocess.run([*map(str, command)], check=True, env=self._environment,
                              stdout=subprocess.PIPE, text=True).stdout

    def install(self, wheel: Path) -> None:
        self.run(self.bin / "pip", "--quiet", "--disable-pip-version-check", "install",
                 "--no-compile", wheel)

    def check_libraries(self, library: Path) -> None:
        """Check that all linked libraries are found in the venv or the system."""
        assert library.name == "_cuda.abi3.so", library
        for line in self.run("ldd", library).splitlines():
            name, _, where = line.strip().partition(" => ")
            assert Path(name.split()[0]).name in _OF_THE_SYSTEM or \
                str(self.bin.parent) in os.path.normpath(where.split(" (")[0]), line


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [sys.executable])
