"""What an installation of llmc holds; what its CUDA engine, llmc-cuda, needs and says."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from hatchling import build

import llmc
from llmc.runtime.engines import cuda

ROOT = Path(__file__).parents[1]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
# Where in llmc a folder of the repository is, and what of it is data.
PLACES = {"llmc": "llmc", "llmc/compiler": "compiler", "llmc/runtime": "runtime",
          "llmc/plugins": "csrc/plugins"}
DATA = {"llmc/compiler/check/articles.jsonl"}


def contents(path):
    """A wheel's files, without what describes the wheel."""
    with ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert len(set(names)) == len(names)
        return {name: wheel.read(name) for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build.build_wheel(str(folder))


def test_a_wheel_has_every_module_once_and_nothing_to_compile(wheel):
    modules = {f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
               for package, folder in PLACES.items()
               for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()}
    assert set(contents(wheel)) == {name for name in modules if "__pycache__" not in name} | DATA
    assert wheel.name == f"llmc-{llmc.__version__}-py3-none-any.whl"


def test_a_wheel_made_from_the_sdist_is_the_same(wheel, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / f"llmc-{llmc.__version__}")
    again = tmp_path / build.build_wheel(str(tmp_path))
    assert contents(again) == contents(wheel)


def test_an_editable_installation_is_the_checkout_so_new_modules_are_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = contents(tmp_path / build.build_editable(str(tmp_path)))
    assert [text.decode().strip() for text in files.values()] == [str(ROOT)]


def test_the_two_distributions_have_one_version_and_one_set_of_libraries():
    project = tomllib.loads((ROOT / "csrc" / "pyproject.toml").read_text())
    assert project["project"]["version"] == llmc.__version__
    assert set(project["project"]["dependencies"]) < set(project["build-system"]["requires"])


def test_an_engine_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(cuda, "find_spec", lambda name: None if name == "nvidia" else name)
    monkeypatch.setattr(cuda, "import_module", lambda name: SimpleNamespace(version="0.0.9"))
    with pytest.raises(llmc.LlmcError, match=rf"llmc-cuda is 0.0.9, llmc is {llmc.__version__}; "
                                             r"install both from one checkout: pip install"):
        cuda.extension()


def cmake(script, environment, **variables):
    """Run one of csrc's scripts; its exit code and what it prints, on one line."""
    ran = subprocess.run([CMAKE, *(f"-D{name}={value}" for name, value in variables.items()),
                          "-P", ROOT / "csrc" / script],
                         env=environment, capture_output=True, text=True, start_new_session=True)
    return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


def add_nvcc(folder, release="13.0"):
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'")
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize("variable", ["PATH", "CUDACXX", "CUDA_HOME", None])
def test_nvcc_is_found_where_it_is_named(tmp_path, variable):
    nvcc = add_nvcc(tmp_path / "toolkit" / "bin", "12.4" if variable else "13.0")
    environment = {"PATH": "/none"}
    if variable:
        nvcc = add_nvcc(tmp_path / "other" / "bin")
        environment[variable] = str({"PATH": nvcc.parent, "CUDACXX": nvcc,
                                     "CUDA_HOME": nvcc.parents[1]}[variable])
    code, said = cmake("nvcc.cmake", environment, toolkit=tmp_path / "toolkit")
    assert (code, said) == (0, "")


@pytest.mark.parametrize(("release", "environment", "said"), [
    (None, {}, "llmc-cuda needs nvcc, which is not in $CUDA_HOME/bin, on $PATH or in {}/bin; "
               "install the CUDA 13 toolkit, or name its nvcc in CUDACXX"),
    ("13.0", {"CUDACXX": "nvcc-13"}, "llmc-cuda needs nvcc-13, which is not in"),
    ("12.4", {}, "llmc-cuda needs CUDA 13, and {}/bin/nvcc is of CUDA 12; install the CUDA 13"),
])
def test_what_is_no_nvcc_of_cuda_13_is_refused(tmp_path, release, environment, said):
    if release:
        add_nvcc(tmp_path / "bin", release)
    code, error = cmake("nvcc.cmake", {"PATH": "/none"} | environment, toolkit=tmp_path)
    assert code != 0 and said.format(tmp_path) in error
