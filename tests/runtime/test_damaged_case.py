"""Fuzzing of CUDA case directories: damaged and rehashed ones are refused, or run in bounds.

The NumPy interpreter replaces the engine; its arenas track the owner of each byte.

LLMC_FUZZ_EXAMPLES is the number of damages per file; default 100.
"""

import copy
import json
import math
import os
import shutil

import numpy as np
import pytest
import small_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_interpreter import Interpreter

import llmc
from llmc.artifacts.manifest import hash_file, read_manifest
from llmc.artifacts.program import read_program
from llmc.artifacts.weight_file import read_weight_header

EXAMPLES = int(os.environ.get("LLMC_FUZZ_EXAMPLES", "100"))
FILES = ("chip0/schedule.json", "chip0/encoder.json", "chip0/weights.safetensors",
         "model_info.json")
NUMBERS = (-2**63, -1, 0, 1, 2, 3, 7, 8, 15, 16, 17, 2**31 - 1, 2**31, 2**32 + 8, 2**63 - 1, 2**63,
           10**30)
ODD = (None, True, [], {}, "", "num_tokens", "batch", "\u0000", "é\n", "\ud800", 0.0, -1.0, 0.5,
       1e29, 1e300, math.nan, math.inf)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return small_case.write_case(tmp_path_factory.mktemp("small") / "case")


@pytest.fixture(scope="module")
def damaged(case, tmp_path_factory):
    """A copy of the case to damage and restore."""
    return shutil.copytree(case, tmp_path_factory.mktemp("damaged") / "case")


def load(case, file):
    """Load a file as JSON, of the weights the header."""
    if file.endswith(".json"):
        return json.loads((case / file).read_text())
    data = (case / file).read_bytes()
    return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])


def store(case, file, content):
    """Write a file, and its size and hash into the manifest if it is still valid."""
    path = case / file
    if file.endswith(".json"):
        path.write_text(json.dumps(content))
    else:
        data = path.read_bytes()
        header = json.dumps(content).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header
                         + data[8 + int.from_bytes(data[:8], "little"):])
    manifest = load(case, "model_info.json")
    for entry in manifest["files"] if file != "model_info.json" else ():
        if entry["path"] == file:
            entry.update(size=path.stat().st_size, sha256=hash_file(path))
    if file != "model_info.json":
        (case / "model_info.json").write_text(json.dumps(manifest))


def places(content, trail=()):
    """Return the key path of every node of a JSON document."""
    inner = content.items() if isinstance(content, dict) else \
        enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield (*trail, key)
        yield from places(value, (*trail, key))


def at(content, trail):
    for key in trail:
        content = content[key]
    return content


def damage(draw, content):
    """Change one node of a JSON document."""
    everywhere = list(places(content))
    trail = draw(st.sampled_from(everywhere))
    parent, key = at(content, trail[:-1]), trail[-1]
    value = parent[key]
    other = draw(st.sampled_from(everywhere))
    ways = ["remove", "replace", "copy", "swap"]
    if type(value) is int:
        ways += ["near", "number"] * 3
    way = draw(st.sampled_from(ways))
    if way == "remove":
        del parent[key]
    elif way == "near":
        parent[key] = draw(st.sampled_from([value + 1, value - 1, value + 16, 2 * value,
                                            value // 2, -value]))
    elif way == "number":
        parent[key] = draw(st.sampled_from(NUMBERS))
    elif way == "replace":
        parent[key] = draw(st.sampled_from(ODD))
    elif way == "swap" and trail[:len(other)] != other and other[:len(trail)] != trail:
        home = at(content, other[:-1])
        parent[key], home[other[-1]] = home[other[-1]], value
    elif isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    else:
        parent[f"{key}2"] = copy.deepcopy(value)


def run(case):
    """Run two steps of the program with all checks."""
    interpreter = Interpreter(case)
    vocab_size = interpreter.manifest.dims.vocab_size
    memory = interpreter.encode([3, 5, 7], 8)
    for tokens, past in (([1, 4], 0), ([4], 2)):
        assert interpreter.run(tokens, past, memory).shape == (len(tokens), vocab_size)


def test_an_undamaged_case_runs(case):
    run(case)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_case_is_refused_or_stays_within_its_memory(case, damaged, file, data):
    content = load(case, file)
    for _ in range(data.draw(st.integers(1, 3))):
        damage(data.draw, content)
    store(damaged, file, content)
    try:
        with np.errstate(all="ignore"):
            run(damaged)
    except llmc.LlmcError as error:
        assert str(error).isprintable()
    finally:
        for name in (file, "model_info.json"):
            shutil.copyfile(case / name, damaged / name)


def tensor(name):
    return lambda content: next(t for t in content["tensors"] if t["name"] == name)


def node(op, number=0):
    return lambda content: [n for n in content["nodes"] if n["op"] == op][number]


def number_of(content, name):
    return content["tensors"].index(tensor(name)(content))


@pytest.mark.parametrize(("where", "changes", "match"), [
    (tensor("0.x"), {"offset": 2**20}, "'0.x' ends at byte 10486.*, the arena at"),
    (tensor("0.x"), {"offset": 8}, "value '0.x' .* has offset 8"),
    (tensor("0.x"), {"per_logit": True}, "per_logit True"),
    (tensor("0.x"), {"kind": "weight"}, "weight '0.x' has an invalid shape or dtype: float32"),
    (tensor("0.x"), {"of": 3}, "value '0.x' has invalid columns: of 3"),
    (tensor("0.x"), {"kind": "columns", "offset": 0}, "columns '0.x' has invalid columns: of -1"),
    (tensor("0.x"), {"kind": "columns", "offset": 0, "of": 0}, "is not a view of tensor 0"),
    (tensor("0.x"), {"kind": "columns", "offset": 0, "of": 2**30}, "not a view of tensor 1073"),
    (tensor("0.x"), {"shape": ["num_tokens", 2**31]}, "less than or equal to 2147483647"),
    (tensor("0.x"), {"shape": ["num_tokens", 0]}, "greater than or equal to 1"),
    (tensor("0.x"), {"shape": ["batch", 16]}, "value '0.x'"),
    (tensor("0.x"), {"shape": ["num_tokens", 32]}, r"output 0 is \['num_tokens', 32\]"),
    (tensor("0.x"), {"dtype": "float16"}, "values have different dtypes: float16, float32"),
    (tensor("0.down"), {"shape": [16, 13]}, r"weight is \[16, 13\], expected \[16, 12\]"),
    (tensor("0.qkv.bias"), {"shape": [31]}, r"bias is \[31\], expected \[32\]"),
    (tensor("cos"), {"shape": [7, 4]}, r"CausalAttention's sin is \[8, 4\], expected \[7, 4\]"),
    (tensor("cos"), {"dtype": "bfloat16"}, "its cos cannot be weight 'cos' of bfloat16"),
    (tensor("past_lens"), {"name": "cu_seqlens"}, "'cu_seqlens' has an invalid shape or dtype"),
    (tensor("half"), {"shape": [2]}, "has input 'half', expected values, and float32 weights"),
    (node("CausalAttention"), {"fields": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8,
                                          "rotary_dim": 8}},
     r"CausalAttention's qkv is \['num_tokens', 32\], expected \['num_tokens', 48\]"),
    (node("CausalAttention"), {"fields": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}},
     "rotary_dim 0 is not an even number from 2"),
    (node("GatedMLP"), {"fields": {"activation": "sine"}}, "'activation' is 'sine', expected one"),
    (node("GatedMLP"), {"fields": {"shine": 1}}, "GatedMLP has no attribute 'shine'"),
    (node("RMSNorm"), {"fields": {"epsilon": 1e30}}, "'epsilon' 1e"),
    (node("GatedMLP"), {"op": "Sine"}, "'Sine': unknown op"),
    (node("Mul"), {"op": "Tanh"}, "expected 1 inputs of the same shape"),
    (node("RMSNorm"), {"inputs": [0]}, "RMSNorm needs the input 'weight'"),
    (node("RMSNorm"), {"inputs": [0, 0]}, "its x cannot be input 'cu_seqlens' of int32"),
    (node("RMSNorm"), {"inputs": [999, 0]}, "'RMSNorm' uses tensor 999, the program has"),
    (node("RMSNorm"), {"outputs": []}, "has 0 outputs, expected 1"),
])
def test_a_program_with_out_of_bounds_access_is_refused(case, tmp_path, where, changes, match):
    content = load(case, "chip0/schedule.json")
    where(content).update(changes)
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(content))
    with pytest.raises(llmc.LlmcError, match=f"is not a valid program: .*{match}"):
        read_program(path)


def swap_inputs(op, first, second):
    def change(content):
        inputs = node(op)(content)["inputs"]
        inputs[first], inputs[second] = inputs[second], inputs[first]
    return change


def lose(name):
    """Replace every input of nodes by another value of its size."""
    def change(content):
        node("GemmBiasRes", 1)(content)["inputs"][3] = number_of(content, name)
    return change


def over_its_input(content):
    tensor("logits")(content)["offset"] = tensor("halved")(content)["offset"]


def named_cache(content):
    outputs = node("CausalAttention")(content)["outputs"]
    outputs[1] = outputs[0]


def write_a_weight(content):
    node("RMSNorm")(content)["outputs"] = [number_of(content, "q")]


def late(content):
    content["nodes"].append(content["nodes"].pop(2))


def twice(content):
    content["nodes"].insert(2, copy.deepcopy(content["nodes"][1]))


def one_cache(content):
    inputs = node("CausalAttention", 1)(content)["inputs"]
    inputs[1:3] = node("CausalAttention")(content)["inputs"][1:3]



def larger(content):
    content["token_bytes"] += 16


@pytest.mark.parametrize(("change", "match"), [
    (swap_inputs("CausalAttention", 3, 4), "its cu_seqlens cannot be input 'past_lens'"),
    (swap_inputs("CausalAttention", 1, 5), "its key_cache cannot be weight 'cos'"),
    (swap_inputs("Gather", 0, 1), "expected .*'logits_indices'"),
    (over_its_input, "writes 'logits' over 'halved', which is still live"),
    (named_cache, "output 1 is tensor .*, expected -1"),
    (write_a_weight, "'RMSNorm': (output 0 is|writes 'q')"),
    (late, "reads '0.qkv' before it is written"),
    (twice, "writes 'normed', a value that another node writes"),
    (one_cache, "writes 'key_cache_0' again"),
    (larger, "expected .* the ends of the values"),
    (lose("normed"), "over 'normed', which is still live"),
])
def test_an_order_that_overwrites_a_live_value_is_refused(case, tmp_path, change, match):
    content = load(case, "chip0/schedule.json")
    change(content)
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(content))
    with pytest.raises(llmc.LlmcError, match=f"is not a valid program: .*{match}"):
        read_program(path)


def set_to(value, *trail):
    def change(content):
        at(content, trail[:-1])[trail[-1]] = value
    return change


def in_header(name, **changes):
    return lambda content: content[name].update(changes)


def other_memory(content):
    memory = next(t for t in content["tensors"] if t["kind"] == "memory")
    memory["name"] = "memory_key_1"


def other_heads(content):
    content["chips"][0]["num_heads"][1] = 4


@pytest.mark.parametrize(("file", "change", "match"), [
    (FILES[0], lambda c: tensor("key_cache_0")(c).update(shape=["num_blocks", 2, "block_size", 8]),
     "is not a valid program: .*CausalAttention's"),
    (FILES[1], other_memory, "no encoder writes 'memory_key_1'"),
    (FILES[3], set_to(9, "encoder", "max_seq_len"), None),
    (FILES[3], set_to(9, "dims", "max_seq_len"), "has 8 rows, expected at least 9"),
    (FILES[3], set_to("float16", "dtype"), "expected float16|KV caches are float32"),
    (FILES[3], set_to(["logits"], "chips", 0, "steps", 0, "outputs"), "no step writes"),
    (FILES[3], other_heads, r"layer 1 has 2 heads, expected 4 as in model_info.json"),
    (FILES[3], lambda c: c["ops"].pop("GatedMLP"), "'GatedMLP' is in the programs, but not in"),
    (FILES[3], lambda c: c["ops"].update(LayerNorm=1, AllReduce=1),
     "'AllReduce' is not in the programs, but in `ops`"),
    (FILES[3], set_to(33, "dims", "vocab_size"), "padded_vocab_size 32 is below vocab_size 33"),
    (FILES[3], set_to(17, "dims", "hidden_size"), "has hidden_size 17 columns"),
    (FILES[3], set_to(33, "encoder", "vocab_size"), "each token of the encoder's vocab_size 33"),
    (FILES[3], set_to(12, "chips", 0, "weight_bytes"), "bytes of weights, expected 12 as in"),
    (FILES[2], in_header("norm", dtype="F16"), "not a valid weight file"),
    (FILES[2], in_header("norm", shape=[4, 4]), r"'norm' is float32 \[16\], expected"),
    (FILES[2], in_header("norm", data_offsets=[0, 64]), "not a valid weight file"),
    (FILES[2], lambda c: c.update(norms=c.pop("norm")), "weights.safetensors has no 'norm'"),
])
def test_references_between_files_must_agree(case, tmp_path, file, change, match):
    damaged = shutil.copytree(case, tmp_path / "case")
    content = load(damaged, file)
    change(content)
    store(damaged, file, content)
    if match is None:
        run(damaged)
        return
    with pytest.raises(llmc.LlmcError, match=match):
        run(damaged)


def as_plans(content):
    """Return the manifest as after TensorRT's builder: plans with 32-bit integers."""
    content["target"] = {"kind": "tensorrt", "versions": {"tensorrt": "8.6.1"}, "gpu": "H200",
                         "compute_capability": "9.0", "max_batch_size": 4}
    chip = content["chips"][0]
    for tensor in (*chip["inputs"], *chip["encoder"]["inputs"]):
        tensor["dtype"] = tensor["dtype"].replace("int64", "int32")


@pytest.mark.parametrize(("change", "match"), [
    (lambda c: None, None),
    (lambda c: c["chips"][0]["inputs"][0].update(dtype="int64"), "expected int32"),
    (lambda c: c["chips"][0]["encoder"]["inputs"][0].update(dtype="int64"), "expected int32"),
    (lambda c: c["chips"][0]["encoder"]["outputs"][0].update(shape=["num_tokens", 16]),
     "'memory_key_0' is float32"),
    (lambda c: c["chips"][0]["encoder"]["outputs"][0].update(shape=["num_logits", 8]),
     "'memory_key_0' is float32"),
    (lambda c: c["chips"][0]["outputs"][0].update(dtype="float16"), "'logits' is float16"),
    (lambda c: c["chips"][0]["steps"][0]["inputs"].pop(), "the steps and the listed inputs differ"),
    (set_to(None, "target", "max_batch_size"), "tensorrt requires max_batch_size"),
    (set_to(None, "target", "gpu"), "tensorrt requires gpu"),
    (set_to({}, "target", "versions"), "requires versions.tensorrt"),
    (set_to(0, "target", "max_batch_size"), "greater than or equal to 1"),
    (set_to(2**40, "target", "max_batch_size"), "less than or equal to"),
])
def test_plan_inputs_and_outputs_must_match_the_manifest(tmp_path, change, match):
    case = small_case.write_case(tmp_path / "small", states=False)
    content = load(case, "model_info.json")
    as_plans(content)
    change(content)
    (tmp_path / "model_info.json").write_text(json.dumps(content))
    if match is None:
        assert read_manifest(tmp_path).target.max_batch_size == 4
        return
    with pytest.raises(llmc.LlmcError, match=match):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("data", "match"), [
    (b"", "the header has 0 bytes, the file 0"),
    (b"\xff" * 16, "the header has 18446744073709551615 bytes"),
    (b"\x02" + b"\0" * 7 + b"[]", "the header is not a JSON object"),
    (b"\x02" + b"\0" * 7 + b"{}x", "the weights end at byte 10, the file at 11"),
    (b"\x02" + b"\0" * 7 + b"\xff\xfe", "not a valid weight file"),
    (b"\x0f" + b"\0" * 7 + b'{"a":1,"a":2}  ', "the header has a name twice"),
    (b"\x08" + b"\0" * 7 + b'{"a": 1}', "'a' must have dtype, shape and data_offsets, and"),
])
def test_a_weight_file_is_read_or_refused(tmp_path, data, match):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(llmc.LlmcError, match=match):
        read_weight_header(path)


def test_the_header_equals_that_of_safetensors(case):
    from safetensors.numpy import load_file
    path = case / FILES[2]
    arrays, data = load_file(path), path.read_bytes()
    header = read_weight_header(path)
    assert header.keys() == arrays.keys()
    for name, weight in header.items():
        assert weight.dtype == arrays[name].dtype.name and weight.shape == arrays[name].shape
        assert data[weight.start:weight.stop] == arrays[name].tobytes()
