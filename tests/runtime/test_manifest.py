"""Reading case directories: whatever is wrong with one is one clear sentence."""

import contextlib
import json
import os
import shutil
import socket

import families
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmc
from llmc.artifacts.manifest import covers, hash_file, read_manifest, verify_files
from llmc.compiler.passes.tensor_parallel import share_heads
from llmc.plugins import registry
from llmc.runtime.inspection import summarize

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
    edit(broken_case, lambda data: data.update(format_version=3))
    refused(broken_case, "format_version 3, this llmc reads up to 2; install a newer llmc")


def test_an_older_format(broken_case):
    edit(broken_case, lambda data: data.update(format_version=1, max_beam_width=1))
    refused(broken_case, "has format_version 1, this llmc reads 2; compile the model again")


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


def test_a_host_needs_the_files_of_its_own_ranks_only(broken_case):
    manifest = read_manifest(broken_case)
    shutil.rmtree(broken_case / "chip1")
    verify_files(manifest, broken_case, ranks=[0])
    verify_files(manifest, broken_case, ranks=[])
    with pytest.raises(llmc.LlmcError, match="chip1/.* is missing"):
        verify_files(manifest, broken_case, ranks=[1])
    with pytest.raises(llmc.LlmcError, match="chip1/.* is missing"):
        verify_files(manifest, broken_case)


@pytest.mark.parametrize("file", ["chip0/weights.safetensors", "tokenizer/tokenizer.json"])
def test_a_flipped_bit_in_what_one_rank_reads(broken_case, file):
    path = broken_case / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(llmc.LlmcError, match=f"{file}' has changed since it was compiled"):
        verify_files(read_manifest(broken_case), broken_case, ranks=[0])


@pytest.mark.parametrize("dim", ["hidden_size", "vocab_size"])
def test_one_rank_s_weights_that_do_not_fit_the_dims(broken_case, dim):
    def double(data):
        data["dims"][dim] *= 2
        data["dims"]["padded_vocab_size"] *= 2
        for chip in data["chips"]:
            for tensor in chip["outputs"]:
                if tensor["name"] == "logits":
                    tensor["shape"][1] *= 2

    edit(broken_case, double)
    with pytest.raises(llmc.LlmcError, match="no weight under .* has a row of hidden_size"):
        verify_files(read_manifest(broken_case), broken_case, ranks=[1])


def test_an_unknown_field(broken_case):
    edit(broken_case, lambda data: data.update(surprise=1))
    refused(broken_case, "surprise: Extra inputs are not permitted")


def chip(data, rank=0):
    return data["chips"][rank]


def tensor(data, name, rank=0, side="inputs"):
    return next(t for t in chip(data, rank)[side] if t["name"] == name)


# What one part says and another does not.
CONTRADICTIONS = {
    "twice the heads": (lambda d: d["dims"].update(num_heads=8), "heads .* are not the model's 8"),
    "other KV heads": (lambda d: d["dims"].update(num_kv_heads=4), "are not the model's 4 and 4"),
    "heads that no groups share": (lambda d: d["dims"].update(num_kv_heads=3), "is no multiple of"),
    "a chip's heads": (lambda d: chip(d, 1)["num_heads"].__setitem__(0, 3), "heads"),
    "a chip without heads": (lambda d: chip(d)["num_heads"].clear(), "for 0, the model has 4"),
    "another layer's heads": (lambda d: chip(d, 1)["num_heads"].__setitem__(2, 4),
                              r"num_heads \[2, 2, 2, 2\], model_info.json says \[2, 2, 4, 2\]"),
    "head_dim": (lambda d: d["dims"].update(head_dim=8), "the model of head_dim 8"),
    "hidden_size": (lambda d: d["dims"].update(hidden_size=127), "no weight .* of hidden_size 127"),
    "a larger vocabulary": (lambda d: d["dims"].update(vocab_size=2**20), "is below vocab_size"),
    "the logits' width": (lambda d: d["dims"].update(padded_vocab_size=448),
                          r"'logits' is float32 \['num_logits', 320\]"),
    "max_seq_len": (lambda d: d["dims"].update(max_seq_len=32), r"is float32 .*, which should be"),
    "the least max_seq_len": (lambda d: d["dims"].update(max_seq_len=0), "greater than or equal"),
    "a negative cache": (lambda d: tensor(d, "key_cache_1").update(shape=["batch", -1, 64, 16]),
                         "greater than or equal to 1"),
    "a larger cache": (lambda d: tensor(d, "key_cache_1").update(shape=["batch", 2, 64, 16]),
                       "'key_cache_1' is float32"),
    "a cache's head_dim": (lambda d: chip(d)["cache"][2].update(head_dim=8),
                           "'key_cache_2' is float32"),
    "a cache's dtype": (lambda d: tensor(d, "value_cache_0").update(dtype="float16"),
                        "'value_cache_0' is float16"),
    "an updated cache": (lambda d: tensor(d, "key_cache_0_out", side="outputs").update(
        shape=["batch", 1, 65, 16]), "'key_cache_0_out' is float32"),
    "an input's dtype": (lambda d: tensor(d, "past_lens").update(dtype="int64"),
                         r"'past_lens' is int64 \['batch'\], which should be int32"),
    "an unknown size": (lambda d: tensor(d, "past_lens").update(shape=["rows"]), "valid integer"),
    "another size": (lambda d: tensor(d, "past_lens").update(shape=["num_tokens"]),
                     r"'past_lens' is int32 \['num_tokens'\]"),
    "an input gone": (lambda d: chip(d)["inputs"].pop(0), "differ in|has no input"),
    "an input twice": (lambda d: chip(d)["inputs"].append(chip(d)["inputs"][0]), "lists .* twice"),
    "blocks that nobody asked for": (lambda d: chip(d)["inputs"].append(
        {"name": "block_table", "dtype": "int32", "shape": ["batch", "max_blocks"]}),
        "'block_table'"),
    "another layout": (lambda d: d.update(kv_cache_layout="paged"), "which target cpu does not"),
    "an op's version": (lambda d: d["ops"].update(Embedding=0),
                        "uses version 0 of Embedding, this llmc has version 1"),
    "an unknown op": (lambda d: d["ops"].update(Sine=1), "version 1 of Sine, this llmc has none"),
    "no ops": (lambda d: d["ops"].clear(), "ops lacks"),
    "an op gone": (lambda d: d["ops"].pop("GatedMLP"), "the op GatedMLP is in a graph"),
    "an op too many": (lambda d: d["ops"].update(LayerNorm=1),
                       "the op LayerNorm is in the ops of"),
    "no end tokens": (lambda d: d["tokenizer"].update(eos_token_ids=[]),
                      "has the EOS token 2, model_info.json lists no eos_token_ids"),
    "an end token": (lambda d: d["tokenizer"].update(eos_token_ids=[2, 300]),
                     "eos_token_ids has token 300, the vocabulary 300"),
    "a negative token": (lambda d: d["tokenizer"].update(bos_token_id=-1), "greater than or equal"),
    "weights": (lambda d: chip(d, 1).update(weight_bytes=1024), "model_info.json says 1024"),
    "more weights than the file": (lambda d: chip(d).update(weight_bytes=2**40), "only"),
    "another chip's graph": (lambda d: chip(d).update(path="chip1"), "which is not in 'chip1'"),
    "a collective": (lambda d: chip(d)["steps"][1].update(kind="all_gather"), "same collectives"),
    "a file gone": (lambda d: d["files"].__delitem__(slice(None)), "which is not listed"),
    "the tokenizer": (lambda d: d["tokenizer"].update(path="words"), "'words/tokenizer.json'"),
    "a path's other name": (lambda d: d["files"][0].update(path="chip0/./x"), "is not written as"),
    "the target's dtype": (lambda d: d.update(dtype="bfloat16"), "cpu has no dtype bfloat16"),
    "a GPU": (lambda d: d["target"].update(gpu="NVIDIA"), "target cpu has no gpu"),
    "a plan's versions": (lambda d: d["target"].update(kind="tensorrt"),
                          "int64|does not say|kv_cache_layout is linear"),
    "another encoder": (lambda d: chip(d, 1).update(encoder={"inputs": [], "outputs": [],
                                                             "steps": []}),
                        "same collectives|has an encoder"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_parts_that_contradict_each_other_are_refused(broken_case, name):
    change, match = CONTRADICTIONS[name]
    edit(broken_case, change)
    refused(broken_case, match)


def write_text(case, text):
    (case / MANIFEST).write_text(text)


# More than any model has.
SIZES = {
    "a million files": (lambda case: write_text(case, '{"files": [' + f'{"a" * 100!r}, ' * 10**6),
                        "bytes, the limit is 16777216"),
    "many files": (lambda case: edit(case, lambda d: d.update(
        files=[{"path": f"{i}", "size": 0, "sha256": "0" * 64} for i in range(70000)])),
        "files: .* at most 65536 items"),
    "a sparse file": (lambda case: os.truncate(case / MANIFEST, 10**10), "10000000000 bytes"),
    "deep JSON": (lambda case: write_text(case, "[" * 10**6), "cannot be read as JSON"),
    "a long number": (lambda case: write_text(case, "9" * 10**6), "cannot be read as JSON"),
    "a billion layers": (lambda case: edit(case, lambda d: d["dims"].update(num_layers=10**9)),
                         "dims.num_layers: .* less than or equal to 65536"),
    "many positions": (lambda case: edit(case, lambda d: d["dims"].update(max_seq_len=10**12)),
                       "dims.max_seq_len: .* less than or equal to"),
    "many chips": (lambda case: edit(case, lambda d: d.update(tp_size=5000, chips=[
        {"rank": 0}] * 5000)), "chips: |chips.0"),
    "many steps": (lambda case: edit(case, lambda d: chip(d).update(steps=[
        {"kind": "all_reduce", "input": "a", "output": "b"}] * 70000)),
                   "steps: .* at most 65536 items"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_manifest_of_sizes_that_no_model_has_is_refused(broken_case, name):
    change, match = SIZES[name]
    change(broken_case)
    refused(broken_case, match)


def test_a_chat_template_larger_than_any_is_refused(broken_case):
    path = "tokenizer/chat_template.jinja"
    (broken_case / path).write_bytes(b" " * 5_000_000)
    rehash(broken_case, path)
    refused(broken_case, "chat_template.jinja' has 5000000 bytes, the limit is 4194304")


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_heads_as_the_compiler_shares_them_are_a_whole_and_others_are_not(num_kv_heads, group,
                                                                          data):
    whole = num_kv_heads * group, num_kv_heads
    ranks = [(share.stop - share.start, len(share.kv_heads))
             for share in share_heads(*whole, data.draw(st.integers(1, whole[0])))]
    assert covers(*whole, ranks)
    rank = data.draw(st.integers(0, len(ranks) - 1))
    more = data.draw(st.integers(1, whole[0]))
    heads, kv_heads = ranks[rank]
    for odd in ((heads + more, kv_heads), (heads, kv_heads + more)):
        assert not covers(*whole, [*ranks[:rank], odd, *ranks[rank + 1:]])
    assert not covers(*whole, ranks[1:])


def rehash(case, path):
    """Let the manifest say that the file is as it should be."""
    def say(data):
        entry = next(entry for entry in data["files"] if entry["path"] == path)
        entry.update(size=(case / path).stat().st_size, sha256=hash_file(case / path))
    edit(case, say)


def change_graph(case, path, change):
    graph = onnx.load(case / path, load_external_data=False)
    change(graph)
    (case / path).write_bytes(graph.SerializeToString())
    rehash(case, path)


def first_initializer(graph, **entries):
    external = next(t for t in graph.graph.initializer if t.external_data).external_data
    for entry in external:
        entry.value = entries.get(entry.key, entry.value)


@pytest.mark.parametrize(("change", "match"), [
    (lambda g: g.ClearField("metadata_props"), "has no valid metadata of its ops"),
    (lambda g: setattr(g.metadata_props[0], "value", "[]"), "has no valid metadata of its ops"),
    (lambda g: setattr(g.metadata_props[0], "value", '{"ops": {"Embedding": 2}, "num_heads": []}'),
     "have version 2 of Embedding, model_info.json says 1"),
    (lambda g: setattr(g.graph.output[0], "name", "other"), "ONNX Runtime cannot load|has other"),
    (lambda g: first_initializer(g, offset=str(2**40)), "of 'weights.safetensors', which has"),
    (lambda g: first_initializer(g, location="nothing.bin"), "is in the file 'nothing.bin'"),
    (lambda g: first_initializer(g, location="../../model_info.json"),
     "chip0/segment_000.onnx' is not an ONNX graph that llmc wrote: .* '../../model_info.json'"),
    (lambda g: first_initializer(g, location="tokenizer.json"), "expected 'weights.safetensors'"),
    (lambda g: g.graph.node.pop(), "ONNX Runtime cannot load"),
    (lambda g: g.functions[0].node.add(op_type="Loop", input=["", ""], output=["x"]),
     "a Loop in the function"),
    (lambda g: g.graph.node.add(op_type="EPContext", domain="com.microsoft"),
     "the operator 'com.microsoft.EPContext', which is none of llmc's"),
])
def test_a_graph_that_was_changed_and_hashed_again_is_one_sentence(broken_case, change, match):
    change_graph(broken_case, "chip0/segment_000.onnx", change)
    refused(broken_case, match)


@pytest.mark.parametrize("data", [b"", b"no graph", bytes(range(256)) * 40])
def test_a_file_that_is_no_graph_is_one_sentence(broken_case, data):
    (broken_case / "chip0" / "segment_000.onnx").write_bytes(data)
    rehash(broken_case, "chip0/segment_000.onnx")
    refused(broken_case, "segment_000.onnx' is not an ONNX graph that llmc wrote")


def terabytes(graph):
    """Let a graph add a tensor of 2^40 zeros to its result."""
    made = graph.graph.output[0].name
    node = next(node for node in graph.graph.node if made in node.output)
    node.output[[*node.output].index(made)] = "made"
    graph.graph.node.extend(onnx.parser.parse_graph(
        "g (float[n] made) => (float[n] result) { size = Constant<value_ints=[1099511627776]>()"
        " zeros = ConstantOfShape(size) corner = Constant<value_ints=[0]>()"
        " none = Gather(zeros, corner) result = Add(made, none) }").node)
    graph.graph.node[-1].output[0] = made


def test_a_graph_that_takes_terabytes_names_itself(broken_case):
    change_graph(broken_case, "chip0/segment_000.onnx", terabytes)
    with pytest.raises(llmc.LlmcError, match="chip0/segment_000.onnx") as caught, \
            llmc.LLM(broken_case) as model:
        model.logits([1, 2])
    assert "\n" not in str(caught.value)


# What stands in place of a file, made at a path.
IN_PLACE_OF_FILES = {
    "is a symbolic link": lambda path: path.symlink_to(path.with_name(f"{path.name}.moved")),
    "is a FIFO, expected a regular file": os.mkfifo,
    "is a directory, expected a regular file": os.mkdir,
    "is a socket, expected a regular file": lambda path: bind(path),
}


def bind(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # short names
        server.bind(path.name)


@pytest.mark.parametrize("file", [
    MANIFEST, "chip0/segment_000.onnx", "chip1/weights.safetensors", "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json", "tokenizer/chat_template.jinja"])
@pytest.mark.parametrize("what", IN_PLACE_OF_FILES)
def test_what_is_no_regular_file_is_refused_and_never_opened(broken_case, file, what):
    path = broken_case / file
    path.rename(path.with_name(f"{path.name}.moved"))
    IN_PLACE_OF_FILES[what](path)
    refused(broken_case, f"{file}' {what}")


@pytest.mark.parametrize("folder", ["chip1", "tokenizer"])
def test_a_directory_that_is_a_symbolic_link_is_refused(broken_case, tmp_path, folder):
    (broken_case / folder).rename(tmp_path / "elsewhere")
    (broken_case / folder).symlink_to(tmp_path / "elsewhere")
    refused(broken_case, f"{folder}' is a symbolic link, .*cp -rL")


def test_a_symbolic_link_to_a_case_directory_and_hard_links_in_it_are_fine(case_tp1, tmp_path):
    copy = shutil.copytree(case_tp1, tmp_path / "copy", copy_function=os.link)
    (tmp_path / "link").symlink_to(copy)
    with llmc.LLM(tmp_path / "link") as model:
        assert model.logits([1]).shape[0] == 1


def test_a_file_that_is_read_and_not_listed_is_refused(broken_case):
    edit(broken_case, lambda data: data.update(files=[
        entry for entry in data["files"] if entry["path"] != "tokenizer/tokenizer_config.json"]))
    refused(broken_case, "tokenizer_config.json' is not among the files of model_info.json")
    (broken_case / "tokenizer" / "tokenizer_config.json").unlink()
    llmc.LLM(broken_case).close()


@pytest.mark.parametrize(("length", "match"), [
    (10**9, "its header has 1000000000 bytes, the limit is"), (2**63, "its header has")])
def test_a_weight_file_with_a_huge_header_is_not_read(broken_case, length, match):
    path = "chip0/weights.safetensors"
    with open(broken_case / path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(2 * 10**9)  # sparse

    def say(data):
        next(entry for entry in data["files"] if entry["path"] == path).update(size=2 * 10**9)

    edit(broken_case, say)
    with pytest.raises(llmc.LlmcError, match=match):
        llmc.LLM(broken_case, verify=False)


def narrower(graph):
    """Let a segment say that the hidden states that it reads are one element narrower."""
    value = graph.graph.input[0]
    value.type.tensor_type.shape.dim[1].dim_value -= 1


def test_segments_that_do_not_fit_together_are_refused(broken_case):
    path = json.loads((broken_case / MANIFEST).read_text())["chips"][0]["steps"][2]["path"]
    change_graph(broken_case, path, narrower)
    refused(broken_case, "which should be float32|ONNX Runtime cannot load")


def test_what_onnx_runtime_says_in_a_step_is_one_sentence(case_tp1, monkeypatch):
    with llmc.LLM(case_tp1) as model:
        engine = families.ranks(model)[0]

        class Failing:
            def run_with_iobinding(self, binding):
                raise RuntimeError("Failed to allocate memory for requested buffer\nat line 3")

        monkeypatch.setattr(engine, "_sessions", dict.fromkeys(engine._sessions, Failing()))
        said = "ONNX Runtime failed in .*buffer; there is too little memory: give fewer or shorter"
        with pytest.raises(llmc.LlmcError, match=said) as caught:
            model.logits([1, 2])
        assert "\n" not in str(caught.value)


def test_a_broken_tokenizer(broken_case):
    (broken_case / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(llmc.LlmcError, match="tokenizer"):
        llmc.LLM(broken_case)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def assert_consistent(manifest):
    """What loaders compute with, each number told by two parts of the manifest."""
    dims = manifest.dims
    ranks = range(manifest.tp_size)
    assert [c.rank for c in manifest.chips] == [*ranks]
    heads = [c.num_heads[0] for c in manifest.chips]
    assert sum(heads) == dims.num_heads or {*heads} == {dims.num_heads}
    for c in manifest.chips:
        inputs, outputs = ({t.name: t for t in side} for side in (c.inputs, c.outputs))
        assert len(c.cache) == len(c.num_heads) == dims.num_layers
        for layer, cache in enumerate(c.cache):
            assert c.num_heads[layer] % cache.num_kv_heads == 0
            shape = ("batch", cache.num_kv_heads, dims.max_seq_len, cache.head_dim)
            for name in (f"key_cache_{layer}", f"value_cache_{layer}"):
                assert inputs[name].shape == outputs[f"{name}_out"].shape == shape
                assert inputs[name].dtype == manifest.kv_dtype
        assert outputs["logits"].shape[1] == dims.padded_vocab_size >= dims.vocab_size
        assert "block_table" not in inputs
    assert all(0 <= token < dims.vocab_size for token in manifest.tokenizer.eos_token_ids)
    assert manifest.ops.items() <= {op.name: op.version for op in registry().values()}.items()
    chips = summarize(manifest)["chips"]
    assert all(type(chips[rank][key]) is int and chips[rank][key] >= 0 for rank in ranks
               for key in ("weight_bytes", "kv_cache_bytes", "memory_bytes", "file_bytes"))


@settings(max_examples=int(os.environ.get("LLMC_FUZZ_EXAMPLES", "300")), deadline=None,
          derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_to_the_manifest_is_read_whole_or_refused_never_a_traceback(
        case_tp2, tmp_path_factory, data):
    manifest = json.loads((case_tp2 / MANIFEST).read_text())
    node, trail = manifest, []
    while isinstance(node, dict | list) and node and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict)
                                        else list(range(len(node)))))
        trail.append((node, key))
        node = node[key]
    if trail:
        parent, key = trail[-1]
        way = data.draw(st.sampled_from(["remove", "replace", "near", "repeat"]))
        if way == "near" and type(node) is int:
            parent[key] = node + data.draw(st.sampled_from([-1, 1, node, -2 * node, 2**31, 2**63]))
        elif way == "repeat" and isinstance(parent, list):
            parent.append(node)
        elif way == "remove":
            del parent[key]
        else:
            parent[key] = data.draw(JSON)
    else:
        manifest = data.draw(JSON)
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / MANIFEST).write_text(json.dumps(manifest))
    try:
        assert_consistent(read_manifest(directory))
    except llmc.LlmcError as error:
        assert str(error).isprintable()
    finally:
        shutil.rmtree(directory)
