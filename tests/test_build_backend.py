"""Which package a build makes: with the CUDA engine where nvcc 13 is, else without; or as asked."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The backend, on a machine without nvcc."""
    spec = spec_from_file_location("build_backend", ROOT / "csrc" / "build_backend.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("LLMC_CUDA", "CUDACXX", "CUDA_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "_TOOLKIT", str(tmp_path / "toolkit"))
    monkeypatch.chdir(ROOT)
    return module


def add_nvcc(folder, release="13.0"):
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'")
    nvcc.chmod(0o755)
    return nvcc


def requirements(backend):
    return {line.partition(">")[0] for line in backend.get_requires_for_build_wheel()}


@pytest.mark.parametrize("variable", ["PATH", "CUDACXX", "CUDA_HOME", None])
def test_the_engine_is_built_where_nvcc_is(backend, monkeypatch, tmp_path, variable):
    nvcc = add_nvcc(tmp_path / "toolkit" / "bin")
    if variable:
        nvcc = add_nvcc(tmp_path / "other" / "bin")
        monkeypatch.setenv(variable, str({"PATH": nvcc.parent, "CUDACXX": nvcc,
                                          "CUDA_HOME": nvcc.parents[1]}[variable]))
    assert requirements(backend) >= {"nanobind", "nvidia-cublas", "nvidia-cudnn-frontend",
                                      "nvidia-nccl-cu13"}
    assert backend.choose() == f"llmc is built with the CUDA engine: nvcc is {nvcc}"


def test_without_nvcc_the_wheel_is_pure(backend, tmp_path, capfd):
    assert requirements(backend) == set()
    name = backend.build_wheel(str(tmp_path))
    assert name.endswith("-py3-none-any.whl")
    assert {"llmc/cli.py", "llmc/compiler/api.py", "llmc/runtime/llm.py"} \
        <= set(ZipFile(tmp_path / name).namelist())
    assert "without the CUDA engine" in capfd.readouterr().err


def test_an_nvcc_of_another_cuda_is_not_used(backend, tmp_path):
    nvcc = add_nvcc(tmp_path / "bin", "12.4")
    assert backend.choose().endswith(f"without the CUDA engine: {nvcc} is of CUDA 12, not 13")


def test_off_is_obeyed(backend, monkeypatch, tmp_path):
    add_nvcc(tmp_path / "bin")
    monkeypatch.setenv("LLMC_CUDA", "off")
    assert requirements(backend) == set()


@pytest.mark.parametrize(("wanted", "message"), [
    ("ON", "LLMC_CUDA is ON, but there is no nvcc in .*toolkit/bin; install"),
    ("maybe", "LLMC_CUDA is 'MAYBE'; write ON or OFF"),
])
def test_what_cannot_be_is_refused(backend, monkeypatch, wanted, message):
    monkeypatch.setenv("LLMC_CUDA", wanted)
    with pytest.raises(SystemExit, match=message):
        backend.choose()
