"""The build backend: scikit-build-core's, which compiles the CUDA engine too where nvcc is.

LLMC_CUDA=OFF in the environment asks for the pure-CPU package, LLMC_CUDA=ON for the engine or an
error. What follows from the choice is the override on LLMC_CUDA in pyproject.toml.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

from scikit_build_core import build as _skbuild

build_sdist = _skbuild.build_sdist
get_requires_for_build_sdist = _skbuild.get_requires_for_build_sdist

_CUDA = "13"  # of the libraries that pyproject.toml names
_TOOLKIT = "/usr/local/cuda"


def find_nvcc() -> tuple[str | None, str]:
    """The path of a CUDA 13 nvcc, or None and why there is none."""
    name = os.environ.get("CUDACXX") or "nvcc"
    home, path = os.environ.get("CUDA_HOME"), os.environ.get("PATH", os.defpath)
    places = [*([f"{home}/bin"] if home else []), path, f"{_TOOLKIT}/bin"]
    nvcc = shutil.which(name, path=os.pathsep.join(places))
    if nvcc is None:
        return None, f"there is no {name} in $CUDA_HOME/bin, on $PATH or in {_TOOLKIT}/bin"
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)", output)
    if release is None or release[1] != _CUDA:
        return None, f"{nvcc} is of CUDA {release[1] if release else '?'}, not {_CUDA}"
    return nvcc, f"nvcc is {nvcc}"


def choose() -> str:
    """Put the choice into LLMC_CUDA, and nvcc's path into CUDACXX; returns both as a sentence.

    Raises:
        SystemExit: LLMC_CUDA is ON without a usable nvcc, or neither ON, OFF nor empty.
    """
    wanted = os.environ.get("LLMC_CUDA", "").upper()
    if wanted not in ("", "ON", "OFF"):
        raise SystemExit(f"LLMC_CUDA is '{wanted}'; write ON or OFF, or leave it unset")
    nvcc, reason = (None, "LLMC_CUDA is OFF") if wanted == "OFF" else find_nvcc()
    if nvcc is None and wanted == "ON":
        raise SystemExit(f"LLMC_CUDA is ON, but {reason}; install the CUDA {_CUDA} toolkit, or "
                         f"leave LLMC_CUDA unset for the pure-CPU package")
    os.environ["LLMC_CUDA"] = "ON" if nvcc else "OFF"
    if nvcc:
        os.environ["CUDACXX"] = nvcc
    return f"llmc is built {'with' if nvcc else 'without'} the CUDA engine: {reason}"


def _with_choice(hook: Callable) -> Callable:
    @functools.wraps(hook)
    def chosen(*args, **kwargs):
        sentence = choose()
        if hook.__name__.startswith("build"):
            print(sentence, file=sys.stderr, flush=True)
        return hook(*args, **kwargs)
    return chosen


get_requires_for_build_wheel = _with_choice(_skbuild.get_requires_for_build_wheel)
get_requires_for_build_editable = _with_choice(_skbuild.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _with_choice(_skbuild.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _with_choice(_skbuild.prepare_metadata_for_build_editable)
build_wheel = _with_choice(_skbuild.build_wheel)
build_editable = _with_choice(_skbuild.build_editable)
