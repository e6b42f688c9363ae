"""What an installation of llmc holds; what its CUDA engine, llmc-cuda, needs and says."""

import fcntl
import os
import pty
import re
import shutil
import subprocess
import sys
import tarfile
import termios
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
          "llmc/server": "server", "llmc/plugins": "csrc/plugins"}
DATA = {"llmc/compiler/check/articles.jsonl", "llmc/server/page.html"}


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
        sdist.extractall(tmp_path)  # our own; Debian's 3.11 has no filters
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


def cmake(script, environment, terminal=None, **variables):
    """Run one of csrc's scripts; its exit code and what it prints, on one line."""
    ran = subprocess.run([CMAKE, *(f"-D{name}={value}" for name, value in variables.items()),
                          "-P", ROOT / "csrc" / script],
                         env=environment, capture_output=True, text=True, start_new_session=True,
                         preexec_fn=terminal and (
                             lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)))
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


def test_a_build_says_what_it_compiles_and_how_long_that_takes(tmp_path):
    files = {"kernels": ";".join(["a.cu"] * 10), "sources": ";".join(["a.cpp"] * 30)}
    environment = {"PATH": os.environ["PATH"], "CMAKE_BUILD_PARALLEL_LEVEL": "1"}
    minutes = []
    for architectures in ("90", "80;86;89;90"):
        code, line = cmake("announce.cmake", environment, **files, architectures=architectures)
        found = re.fullmatch(r"-- llmc-cuda: compiles 10 CUDA files for compute capabilities (.*) "
                             r"and 30 C\+\+ files: about (\d+) min on 1 cores", line)
        assert code == 0 and found[1] == architectures.replace(";", ", ")
        minutes.append(int(found[2]))
        screen, terminal = pty.openpty()  # where pip shows nothing else of what a build prints
        assert cmake("announce.cmake", environment, terminal, **files,
                     architectures=architectures) == (0, "")
        assert os.read(screen, 1000).decode().strip() \
            == f"{line.removeprefix('-- ')}; pip -v shows how far it is"
        os.close(screen)
        os.close(terminal)
    assert minutes[0] < minutes[1]
