"""Contents of the distributions llmc-aot and llmc-cuda, and their requirements."""

import ast
import fcntl
import itertools
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
from packaging.requirements import Requirement

import llmc
from llmc.compiler import preflight
from llmc.installation import DISTRIBUTION, install_command
from llmc.runtime.engines import cuda

ROOT = Path(__file__).parents[1]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
# Package and data files of each folder of the repository.
PLACES = {"llmc": "llmc", "llmc/artifacts": "artifacts", "llmc/compiler": "compiler",
          "llmc/runtime": "runtime", "llmc/server": "server", "llmc/plugins": "csrc/plugins"}
DATA = {"llmc/artifacts/model_info.schema.json", "llmc/compiler/check/articles.jsonl",
        "llmc/compiler/check/pairs.jsonl", "llmc/compiler/check/search.jsonl",
        "llmc/server/page.html", "llmc/py.typed"}


def contents(path):
    """Return a wheel's files without its metadata."""
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
    assert wheel.name == f"llmc_aot-{llmc.__version__}-py3-none-any.whl"


def test_a_wheel_made_from_the_sdist_is_the_same(wheel, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as sdist:
        has_filters = hasattr(tarfile, "data_filter")  # Debian's 3.11 has none
        sdist.extractall(tmp_path, **({"filter": "data"} if has_filters else {}))
    monkeypatch.chdir(tmp_path / f"llmc_aot-{llmc.__version__}")
    again = tmp_path / build.build_wheel(str(tmp_path))
    assert contents(again) == contents(wheel)


def test_an_editable_installation_is_the_checkout_so_new_modules_are_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = contents(tmp_path / build.build_editable(str(tmp_path)))
    assert [text.decode().strip() for text in files.values()] == [str(ROOT)]


def test_every_wheel_carries_its_licenses(wheel, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "vllm_plugin")
    for path in (wheel, tmp_path / build.build_wheel(str(tmp_path))):
        with ZipFile(path) as archive:
            held = {name.partition(".dist-info/licenses/")[2]: archive.read(name)
                    for name in archive.namelist()}
        assert {"LICENSE", "NOTICE"} <= held.keys()
        assert held["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    compiled_in = {path.name for path in (ROOT / "csrc" / "licenses").iterdir()}
    patterns = read_project("csrc")["project"]["license-files"]
    held = {path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)}
    assert {path.name for path in held} == {"LICENSE", "NOTICE"} | compiled_in
    notice = (ROOT / "csrc" / "NOTICE").read_text()
    assert all(f"licenses/{name}" in notice for name in compiled_in)


def read_project(folder=""):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def name_of(requirement):
    """Return a requirement's distribution name, normalized as on PyPI."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_the_distributions_have_one_version_and_one_set_of_libraries():
    cuda, vllm = read_project("csrc"), read_project("vllm_plugin")
    assert {cuda["project"]["version"], vllm["project"]["version"]} == {llmc.__version__}
    assert set(cuda["project"]["dependencies"]) < set(cuda["build-system"]["requires"])


def test_no_requirement_is_the_stranger_s_package_llmc():
    """`llmc` on PyPI belongs to another project."""
    projects = [read_project(folder)["project"] for folder in ("", "csrc", "vllm_plugin")]
    assert [project["name"] for project in projects] == [DISTRIBUTION, "llmc-cuda", "llmc-vllm"]
    required = {name_of(requirement) for project in projects
                for requirement in itertools.chain(
                    project.get("dependencies", ()),
                    *project.get("optional-dependencies", {}).values())}
    assert {name for name in required if "llmc" in name} == {DISTRIBUTION}
    assert f"{DISTRIBUTION}=={llmc.__version__}" in projects[2]["dependencies"]
    tracked = subprocess.run(["git", "grep", "-lE", r"(install|-links \S+) +'?llmc(\[| |'|$)", "--",
                              ":!tests/test_distributions.py"],
                             cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout == ""


@pytest.mark.parametrize("extra", ["eval", "export", "serve", "tensorrt-rtx"])
def test_what_an_error_says_to_install_is_there(wheel, extra):
    local, packed = re.findall(r"pip install '\./?([^']*)'", install_command(extra))
    assert local == f"[{extra}]" and packed == f"{wheel.name}[{extra}]"
    with ZipFile(wheel) as archive:
        metadata, = (archive.read(name).decode() for name in archive.namelist()
                     if name.endswith("/METADATA"))
    assert f"Name: {DISTRIBUTION}\n" in metadata and f"Provides-Extra: {extra}\n" in metadata


# Distributions with another import name, and imports of another Python's packages.
_PROVIDES = {"google": "protobuf", "PIL": "pillow"}
_FOREIGN = {"compiler": {"tensorrt"}}  # of the Python in LLMC_TENSORRT_PYTHON
# Each folder's requirements: the runtime's, and these extras.
_EXTRAS = {"llmc": (), "artifacts": (), "runtime": ("serve", "multimodal"), "server": ("serve",),
           "csrc/plugins": ("export",),
           "compiler": ("export", "eval", "tensorrt-rtx")}


def third_party_imports(folder):
    paths = [path for path in (ROOT / folder).glob("**/*.py")
             if not any(parent.is_symlink() for parent in path.parents)]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "llmc", "llmc_vllm"}


def distributions_of(folder):
    return {_PROVIDES.get(name, name_of(name))
            for name in third_party_imports(folder) - _FOREIGN.get(folder, set())}


@pytest.mark.parametrize("folder", _EXTRAS)
def test_every_import_is_declared(folder):
    project = read_project()["project"]
    declared = {name_of(requirement) for requirement in itertools.chain(
        project["dependencies"],
        *(project["optional-dependencies"][extra] for extra in _EXTRAS[folder]))}
    assert distributions_of(folder) <= declared


def test_the_vllm_plugin_declares_its_imports():
    project = read_project("vllm_plugin")["project"]
    declared = {*map(name_of, project["dependencies"]),
                *map(name_of, project["optional-dependencies"]["ray"])}
    assert distributions_of("vllm_plugin") | {DISTRIBUTION} == declared


def test_the_vllm_plugin_refuses_another_vllm(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "vllm_plugin")
    from llmc_vllm import release
    assert f"vllm=={release.VLLM}.*" in read_project("vllm_plugin")["project"]["dependencies"]
    pinned = (ROOT / "vllm_plugin" / "requirements.txt").read_text()
    assert f"\nvllm=={release.VLLM}." in pinned
    for version in ("0.32.0", "0.32.3+cpu"):
        release.check_release(version)
    for version in ("0.24.0", "0.33.0", "0.320.1", "1.0"):
        with pytest.raises(llmc.LlmcError, match=rf"vLLM {version} is installed, .* "
                                                 r"requires vLLM 0.32; .* 'vllm==0.32.\*'"):
            release.check_release(version)


def test_the_runtime_declares_nothing_that_only_an_extra_imports():
    declared = set(map(name_of, read_project()["project"]["dependencies"]))
    assert declared == (distributions_of("llmc") | distributions_of("artifacts")
                        | distributions_of("runtime")) \
        - {"llguidance", "pillow", "soundfile", "soxr"}


def test_tested_releases_of_transformers_are_those_that_are_allowed_and_locked():
    first, last = preflight.TESTED_TRANSFORMERS
    assert f"transformers>={first}" in read_project()["project"]["optional-dependencies"]["export"]
    assert locked("test")["transformers"].startswith((f"{first}.", f"{last}."))
    for version in (first, f"{first}.0", f"{last}.7", last):
        assert preflight.warn_untested_transformers(version) is None
    for version in ("5.22.3", "5.25.0", "6.0.0rc1", "5.25.dev0"):
        assert f"transformers {version} is untested" in \
            preflight.warn_untested_transformers(version)


def locked(name):
    """Return the versions that a file in requirements/ pins, by distribution."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = [Requirement(line.rstrip("\\")) for line in lines if re.match(r"\w", line)]
    return {name_of(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


@pytest.mark.parametrize(("name", "extras"), [
    ("demo", ("demo", "export")), ("serve", ("serve",)), ("test-serve", ("test-serve",)),
    ("test", ("demo", "minilm", "export", "test", "eval", "serve")), ("engine", None)])
def test_what_is_locked_is_what_is_declared(name, extras):
    """`make lock` updates the files."""
    project = read_project() if extras is not None else read_project("csrc")
    required = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in extras or ():
        required += project["project"]["optional-dependencies"][extra]
    if name == "test-serve":  # beside `test`
        required.remove(*project["build-system"]["requires"])
    pins = locked(name) | locked("torch")
    for requirement in map(Requirement, required):
        if name_of(requirement.name) != DISTRIBUTION:
            assert pins[name_of(requirement.name)] in requirement.specifier, str(requirement)
    tested = locked("test")
    assert {key for key in pins.keys() & tested.keys() if pins[key] != tested[key]} == set()


def test_compiling_with_an_untested_transformers_warns_and_goes_on(tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.compiler.api.version", lambda name: "7.1.0")
    told = []
    llmc.compile(tiny_hf, tmp_path / "case", progress=told.append)
    assert told[0].startswith("warning: transformers 7.1.0 is untested")
    assert not any("has no tokenizer" in text for text in told)
    assert (tmp_path / "case" / "model_info.json").is_file()


def test_an_engine_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(cuda, "find_spec", lambda name: None if name == "nvidia" else name)
    monkeypatch.setattr(cuda, "import_module", lambda name: SimpleNamespace(version="0.0.9"))
    with pytest.raises(llmc.LlmcError, match=rf"llmc-cuda is 0.0.9, llmc is {llmc.__version__}; "
                                             r"install both from one checkout: pip install"):
        cuda.extension()


def cmake(script, environment, terminal=None, **variables):
    """Run one of csrc's scripts; return its exit code and its output on one line."""
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
        screen, terminal = pty.openpty()  # pip shows nothing else of a build's output
        assert cmake("announce.cmake", environment, terminal, **files,
                     architectures=architectures) == (0, "")
        assert os.read(screen, 1000).decode().strip() \
            == f"{line.removeprefix('-- ')}; pip -v shows how far it is"
        os.close(screen)
        os.close(terminal)
    assert minutes[0] < minutes[1]
