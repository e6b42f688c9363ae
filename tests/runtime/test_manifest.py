"""Reading case directories: whatever is wrong with one is one clear sentence."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmc
from llmc.runtime.manifest import read_manifest

MANIFEST = "model_info.json"


def edit(case, change):
    data = json.loads((case / MANIFEST).read_text())
    change(data)
    (case / MANIFEST).write_text(json.dumps(data))


def refused(case, match):
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        llmc.LLM(case).close()
    assert "\n" not in str(caught.value)


def test_a_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", "does not exist; make it with: llmc compile")


def test_a_directory_without_a_manifest(tmp_path):
    refused(tmp_path, "has no model_info.json")


def test_a_truncated_manifest(broken_case):
    text = (broken_case / MANIFEST).read_text()
    (broken_case / MANIFEST).write_text(text[:len(text) // 2])
    refused(broken_case, "cannot be read as JSON")


def test_a_newer_format(broken_case):
    edit(broken_case, lambda data: data.update(format_version=2))
    refused(broken_case, "format_version 2, this llmc reads up to 1; install a newer llmc")


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/graph.onnx", "chip0/../../x"])
def test_paths_that_leave_the_directory(broken_case, path):
    edit(broken_case, lambda data: data["files"][0].update(path=path))
    refused(broken_case, "must be relative and stay inside")


def test_a_missing_chip(broken_case):
    shutil.rmtree(broken_case / "chip1")
    refused(broken_case, "chip1/.* is missing; compile the model again")


def test_a_chip_that_is_not_listed(broken_case):
    edit(broken_case, lambda data: data["chips"].pop())
    refused(broken_case, "tp_size is 2, but the chips are not ranks 0 to 1")


def test_more_ranks_than_memory_could_count(broken_case):
    edit(broken_case, lambda data: data.update(tp_size=10**15))
    refused(broken_case, "tp_size is 1000000000000000, but the chips are not ranks 0 to")


def test_a_truncated_weight_file(broken_case):
    path = broken_case / "chip1" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(broken_case, "bytes, model_info.json says")


def test_a_flipped_bit(broken_case):
    path = broken_case / "chip0" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(broken_case, "chip0/weights.safetensors' has changed since it was compiled")


def test_an_unknown_field(broken_case):
    edit(broken_case, lambda data: data.update(surprise=1))
    refused(broken_case, "surprise: Extra inputs are not permitted")


def test_more_beams_than_it_was_compiled_for(broken_case):
    edit(broken_case, lambda data: data.update(max_beam_width=4))
    refused(broken_case, "max_beam_width is 4, but chip 0 has no input 'cache_indirection'")


def test_a_broken_tokenizer(broken_case):
    (broken_case / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(llmc.LlmcError, match="tokenizer"):
        llmc.LLM(broken_case)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_to_the_manifest_is_read_or_refused_never_a_traceback(case_tp2,
                                                                         tmp_path_factory, data):
    manifest = json.loads((case_tp2 / MANIFEST).read_text())
    node, trail = manifest, []
    while isinstance(node, dict | list) and node and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict)
                                        else list(range(len(node)))))
        trail.append((node, key))
        node = node[key]
    if trail:
        parent, key = trail[-1]
        if data.draw(st.booleans()):
            del parent[key]
        else:
            parent[key] = data.draw(JSON)
    else:
        manifest = data.draw(JSON)
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / MANIFEST).write_text(json.dumps(manifest))
    try:
        read_manifest(directory)
    except llmc.LlmcError as error:
        assert "\n" not in str(error)
    finally:
        shutil.rmtree(directory)


@given(st.binary())
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused(tmp_path_factory, content):
    directory = tmp_path_factory.mktemp("bytes")
    (directory / MANIFEST).write_bytes(content)
    with pytest.raises(llmc.LlmcError):
        read_manifest(directory)
    shutil.rmtree(directory)
