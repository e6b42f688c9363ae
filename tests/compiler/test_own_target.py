"""An external target: one TargetSpec and one module, registered from any folder."""

import importlib
import sys

import numpy as np
import pytest

import llmc
from llmc import targets
from llmc.artifacts.manifest import read_manifest

MODULE = '''
from llmc.compiler.targets import cpu
from llmc.artifacts.manifest import Target
from llmc.targets import TargetSpec, register

SPEC = register(TargetSpec(
    name="abacus", compiler=__name__, engine="llmc.runtime.engines.cpu:CpuEngine",
    runs_any_op=True, collectives=False, weight_dtypes=("int8",), group_multiple=64,
    kv_dtypes=("float16",), default_max_seq_len=32, versions=("beads",)))


def describe(options):
    return Target(kind=SPEC.name, versions={"beads": "10"})


def emit(graph, rank, case_dir, options, encoder=None):
    return cpu.emit(graph, rank, case_dir, options, encoder)
'''


@pytest.fixture
def abacus(tmp_path, monkeypatch):
    """The name of a target whose module is in a temporary folder."""
    (tmp_path / "abacus_target.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("abacus_target")
    yield "abacus"
    del targets.TARGETS["abacus"], sys.modules["abacus_target"]


def test_a_registered_target_compiles_and_runs_a_model(abacus, tiny_hf, case_tp1, tmp_path):
    manifest = llmc.compile(tiny_hf, tmp_path / "case", target=abacus)
    assert manifest.target.kind == abacus and manifest.target.versions == {"beads": "10"}
    assert manifest.dims.max_seq_len == 32 and manifest.kv_cache_layout == "linear"
    assert read_manifest(tmp_path / "case") == manifest
    with llmc.LLM(tmp_path / "case") as own, llmc.LLM(case_tp1) as expected:
        np.testing.assert_array_equal(own.logits([5, 6, 7]), expected.logits([5, 6, 7]))


@pytest.mark.parametrize(("options", "message"), [
    (dict(dtype="bfloat16"), "target 'abacus' has no dtype 'bfloat16'; supported: float32"),
    (dict(tp_size=2), "target 'abacus' has no collectives; compile with --tp_size 1"),
    (dict(quantize="int8", group_size=32), "group_size 32 is not a multiple of 64"),
    (dict(kv_dtype="float8_e4m3fn"), "leave it out, or give float16"),
    (dict(compute_capability="9.0"), "target 'abacus' has no compute_capability")])
def test_options_are_validated_against_the_target_s_spec(abacus, tiny_hf, tmp_path, options,
                                                         message):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(tiny_hf, tmp_path / "case", target=abacus, **options)


def test_a_case_directory_of_an_unknown_target_is_refused(abacus, tiny_hf, tmp_path, monkeypatch):
    llmc.compile(tiny_hf, tmp_path / "case", target=abacus)
    with monkeypatch.context() as elsewhere, \
            pytest.raises(llmc.LlmcError, match="unknown target 'abacus'; use one of: cpu, "):
        elsewhere.delitem(targets.TARGETS, abacus)
        read_manifest(tmp_path / "case")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="target 'cpu' is already registered"):
        targets.register(targets.CPU)
