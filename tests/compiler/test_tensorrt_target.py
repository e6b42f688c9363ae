"""The TensorRT target with a stub builder: graph, profiles and errors.

tests/gpu has the real builder.
"""

import runpy
import sys
from pathlib import Path

import families
import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pooling
import pytest
from on_device import in_kernel_order
from schedule_interpreter import Interpreters

import llmc
from llmc import plugins
from llmc.artifacts.manifest import Target, read_manifest
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import tensorrt
from llmc.plugins.code_types import CODE_TYPES
from llmc.plugins.quantization import dequantized, pack, unpack
from llmc.runtime.core.step import Step
from llmc.runtime.engines.tensorrt import check_plugins, check_version, tensorrt_library

FOUND = {"version": "8.6.0", "gpu": "NVIDIA H200", "compute_capability": "9.0"}


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """Record the builder's requests; plans have five bytes."""
    asked = []

    def build(work, options):
        asked.append(work)
        if "plan" in work:
            work["parsed"] = onnx.load(work["onnx"], load_external_data=False)
            work["data"] = Path(work["onnx"]).with_name("parsed.data").read_bytes()
            Path(work["plan"]).write_bytes(b"plan!")
            options.progress("TensorRT builds")
        return FOUND

    monkeypatch.setattr(tensorrt, "_build", build)
    monkeypatch.setattr(tensorrt, "plugin_library", lambda: tmp_path / "libllmc_plugins.so")
    return asked


def compile(family, tmp_path, changes=None, **options):
    hf = families.save(families.tiny_model(family, **(changes or {})), tmp_path / "hf")
    return llmc.compile(hf, tmp_path / "case", target="tensorrt", **options)


def test_the_manifest_describes_the_plan_s_inputs(builder, tmp_path):
    said = []
    compile("llama", tmp_path, dtype="float16", max_batch_size=4, progress=said.append)
    manifest = read_manifest(tmp_path / "case")
    target = manifest.target
    assert (target.versions, target.compute_capability, target.gpu, target.max_batch_size) \
        == ({"tensorrt": "8.6.0"}, "9.0", "NVIDIA H200", 4)
    assert {entry.path for entry in manifest.files} >= {
        "chip0/engine.plan", "chip0/graph.onnx", "chip0/weights.safetensors",
        "chip0/polygraphy_inputs.py"}
    assert manifest.chips[0].steps[0].path == "chip0/engine.plan"
    assert builder[-1]["timing_cache"] == str(tmp_path / "case.timing_cache")
    assert "TensorRT builds" in said


def test_every_rank_gets_an_engine(builder, tmp_path):
    manifest = compile("llama", tmp_path, tp_size=2)
    assert [Path(work["plan"]).parent.name for work in builder[1:]] == ["chip0", "chip1"]
    graph = onnx.load(tmp_path / "case" / "chip1" / "graph.onnx", load_external_data=False).graph
    assert {"AllReduce", "AllGather"} <= {node.op_type for node in graph.node}
    assert manifest.ops.keys() >= {"AllReduce", "AllGather", "CausalAttention"}


def test_the_graph_is_valid_for_onnx_runtime_and_the_parser(builder, tmp_path):
    """ONNX Runtime 1.23 knows no overloads; TensorRT 10's parser would take functions, not plugins.
    """
    compile("llama", tmp_path)
    model = onnx.load(tmp_path / "case" / "chip0" / "graph.onnx", load_external_data=False)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 23
    functions = [(function.domain, function.name) for function in model.functions]
    assert len(functions) == len(set(functions)) > len({name for _, name in functions})
    used = [node for node in model.graph.node if node.domain]
    assert {(node.domain, node.op_type) for node in used} == set(functions)
    assert not any(node.overload for node in used)
    parsed = builder[-1]["parsed"]
    assert not parsed.functions
    assert parsed.graph == model.graph
    assert not Path(builder[-1]["onnx"]).exists()


@pytest.mark.parametrize(("family", "dtype", "tolerance", "beams"), [
    ("llama", "float32", 1e-5, 1), ("llama", "float16", 4e-3, 1), ("llama", "float16", 4e-3, 4),
    ("gpt2", "float16", 4e-3, 1), ("gemma2", "float16", 4e-3, 1), ("qwen3", "float32", 1e-5, 1)])
def test_onnx_runtime_runs_the_graph_on_polygraphy_s_inputs(builder, family, dtype, tolerance,
                                                            beams, tmp_path):
    compile(family, tmp_path, dtype=dtype)
    chip = tmp_path / "case" / "chip0"
    model = onnx.load(chip / "graph.onnx", load_external_data=False)
    session = ort.InferenceSession(str(chip / "graph.onnx"), providers=["CPUExecutionProvider"])
    inputs, = runpy.run_path(str(chip / "polygraphy_inputs.py"))["load_data"]()
    assert not {array.dtype for array in inputs.values()} & {np.dtype(np.int64)}
    inputs = {value.name: inputs[value.name] for value in model.graph.input}
    results = dict(zip([value.name for value in session.get_outputs()], session.run(None, inputs),
                       strict=True))
    model = families.tiny_model(family)
    families.assert_close(results["logits"][:, :families.VOCAB].astype(np.float32),
                          families.reference_logits(model, [1, 2, 3, 4])[-1:], tolerance)


@pytest.mark.parametrize(("name", "task", "kind", "dtype"), [
    ("bert", "embed", "mean", "float32"), ("roberta", "token_classify", "", "float16"),
    ("modernbert", "classify", "", "float16"), ("qwen3", "embed", "last", "float32")])
def test_pooled_rows_are_transformers(builder, name, task, kind, dtype, tmp_path):
    """Encoders without caches, and a decoder with them, by ONNX Runtime."""
    fields = {**pooling.ENCODERS, **pooling.DECODERS}[name]
    model = pooling.save(name, fields, tmp_path / "hf", task, kind,
                         **({} if task == "embed" else {"num_labels": 3}))
    llmc.compile(tmp_path / "hf", tmp_path / "case", target="tensorrt", dtype=dtype)
    manifest, chip = read_manifest(tmp_path / "case"), tmp_path / "case" / "chip0"
    assert manifest.pooling.task == task
    assert manifest.chips[0].outputs[0].shape == (
        "num_tokens" if task == "token_classify" else "batch", 64 if task == "embed" else 3)
    session = ort.InferenceSession(str(chip / "graph.onnx"), providers=["CPUExecutionProvider"])
    assert bool([own for own in session.get_inputs() if "_cache_" in own.name]) == (name == "qwen3")
    inputs, = runpy.run_path(str(chip / "polygraphy_inputs.py"))["load_data"]()
    for texts in [[[1, 2, 3, 4]], *([] if name == "qwen3" else [[[7, 8, 9], [5, 6]]])]:
        ends = np.cumsum([0, *map(len, texts)])
        inputs |= {"input_ids": np.concatenate(texts), "cu_seqlens": ends,
                   "past_lens": np.zeros(len(texts)), "token_type_ids": np.zeros(ends[-1]),
                   "position_ids": np.concatenate([np.arange(len(own)) for own in texts])}
        rows, = session.run(["pooled"], {
            own.name: inputs[own.name].astype(inputs[own.name].dtype if "cache" in own.name
                                              else np.int32) for own in session.get_inputs()})
        each = np.split(rows, ends[1:-1]) if task == "token_classify" else list(rows)
        pooling.assert_rows([own.astype(np.float32) for own in each],
                            [pooling.reference(model, ids, kind) for ids in texts],
                            {"float32": 1e-5, "float16": 2e-2}[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_float8_caches_are_bytes_in_the_graph(builder, dtype, tmp_path):
    """Two steps in ONNX Runtime; the second reads the caches of the first."""
    manifest = compile("llama", tmp_path, dtype=dtype, kv_dtype="float8_e4m3fn")
    assert manifest.kv_dtype == "float8_e4m3fn"
    chip = tmp_path / "case" / "chip0"
    session = ort.InferenceSession(str(chip / "graph.onnx"), providers=["CPUExecutionProvider"])
    inputs, = runpy.run_path(str(chip / "polygraphy_inputs.py"))["load_data"]()
    caches = [name for name in inputs if "_cache_" in name]
    assert {inputs[name].dtype for name in caches} == {np.dtype(np.int8)}
    names = [value.name for value in session.get_outputs()]
    feeds = {value.name: inputs[value.name] for value in session.get_inputs()}
    for past, tokens in ((0, [1, 2, 3, 4]), (4, [9])):
        feeds |= {"input_ids": np.array(tokens, np.int32), "past_lens": np.array([past], np.int32),
                  "cu_seqlens": np.array([0, len(tokens)], np.int32),
                  "logits_indices": np.array([len(tokens) - 1], np.int32)}
        results = dict(zip(names, session.run(None, feeds), strict=True))
        feeds |= {name: results[f"{name}_out"] for name in caches}
        assert all(feeds[name][:, :, past:past + len(tokens)].any() for name in caches)
    families.assert_close(
        results["logits"][:, :families.VOCAB].astype(np.float32),
        families.reference_logits(families.tiny_model("llama"), [1, 2, 3, 4, 9])[-1:], 0.03)


QUANTIZED = pytest.mark.parametrize("wish", [
    dict(quantize="int4", group_size=32), dict(quantize="uint4", group_size=32),
    dict(quantize="int8", group_size=32), dict(quantize="fp8"),
    dict(quantize="fp8", quantize_activations=True),
    dict(quantize="int4", quantize_lm_head="int4")],
    ids=lambda wish: "-".join(map(str, wish.values())))
IN_GROUPS = {"llama": {"intermediate_size": 96}, "gpt2": {}}


# MoE models with quantized experts: in tiles, except 4-bit ones whose rows of 96 are not
# multiples of 64.
MIXTURES = pytest.mark.parametrize(("family", "wish"), [
    ("qwen3_moe", dict(quantize="int4")), ("qwen3_moe", dict(quantize="uint4", group_size=32)),
    ("qwen3_moe", dict(quantize="int8")), ("qwen3_moe", dict(quantize="fp8")),
    ("gpt_oss", {}), ("gpt_oss-96", {})], ids=lambda value: "-".join(map(
        str, value.values())) or "mxfp4" if isinstance(value, dict) else value)


def save_mixture(family, tmp_path):
    """Save a checkpoint, gpt-oss in MXFP4."""
    if family == "qwen3_moe":
        return families.save(families.tiny_model(family, moe_intermediate_size=64,
                                                 num_hidden_layers=2), tmp_path / "hf")
    width = 96 if family.endswith("96") else 64
    plain = families.save(families.tiny_model("gpt_oss", hidden_size=width,
                                              intermediate_size=width), tmp_path / "plain")
    families.to_mxfp4(plain, tmp_path / "hf", np.random.default_rng(6))
    return tmp_path / "hf"


@QUANTIZED
@pytest.mark.parametrize("family", IN_GROUPS)
def test_quantized_weights_are_kept(builder, family, wish, tmp_path):
    compile(family, tmp_path, IN_GROUPS[family], **wish)
    assert read_manifest(tmp_path / "case").quantization
    check_kept(tmp_path, wish)


@MIXTURES
def test_quantized_experts_are_kept(builder, family, wish, tmp_path):
    said = []
    llmc.compile(save_mixture(family, tmp_path), tmp_path / "case", target="tensorrt",
                 progress=said.append, **wish)
    assert not any("experts" in text or "no kernels" in text for text in said)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    kind = {"": "mxfp4", "fp8": "float8_e4m3fn"}.get(wish.get("quantize", ""), wish.get("quantize"))
    assert {form.dtype for name, form in forms.items() if "experts" in name} == {kind}
    check_kept(tmp_path, wish)


def check_kept(tmp_path, wish):
    """Assert that ONNX Runtime's result equals the cuda target's program."""
    session = ort.InferenceSession(str(tmp_path / "case" / "chip0" / "graph.onnx"),
                                   providers=["CPUExecutionProvider"])
    inputs, = runpy.run_path(
        str(tmp_path / "case" / "chip0" / "polygraphy_inputs.py"))["load_data"]()
    found = session.run(["logits"], {value.name: inputs[value.name]
                                     for value in session.get_inputs()})[0]
    llmc.compile(tmp_path / "hf", tmp_path / "cuda", target="cuda", **wish)
    step = Step.of([[1, 2, 3, 4]], [0], [[0]], [0])
    families.assert_close(found[:, :families.VOCAB],
                          Interpreters(tmp_path / "cuda").compute(step)[-1:], 1e-5)


def numbers_of(fields, given):
    """Dequantize codes in the order of csrc/kernels/common/dequantize.cuh.

    Of every eight columns the even ones are first; a group's scales are adjacent.
    """
    width, height = fields["in_features"], fields["out_features"]
    own = CODE_TYPES[fields["weight_dtype"]]
    bits, zero = own.bits, own.zero_point
    raw = given["weight"].view(np.uint8).reshape(height, -1)
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(height, -1) if bits == 4 else raw
    places = [column // 8 * 8 + column % 8 // 2 + column % 2 * 4 if width % 8 == 0 else column
              for column in range(width)]
    codes, groups = codes[:, places], width // fields["group_size"]
    scales = given["weight_scale"].reshape(groups, height).T
    if "weight_zero" in given:
        raw = given["weight_zero"].view(np.uint8).reshape(height, -1)
        zeros = np.stack([raw & 15, raw >> 4], -1).reshape(height, -1)[:, :groups] \
            if bits == 4 else raw
    else:
        zeros = np.full((height, groups), zero)
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) \
        if fields["weight_dtype"] == "float8_e4m3fn" else codes.astype(np.float32)
    numbers = numbers.reshape(height, groups, -1) - zeros[:, :, None]
    return (numbers * scales[:, :, None]).reshape(height, width)


# Bit positions of MXFP4 codes in a word, packed.cuh.
MXFP4_BITS = ((6, 7, 8, 15), (12, 13, 14, 21), (2, 3, 4, 11), (0, 1, 10, 9),
              (22, 23, 24, 31), (28, 29, 30, 5), (18, 19, 20, 27), (16, 17, 26, 25))


def in_tiles(codes, dtype):
    """Return codes [experts, out, in] as bytes in the tile order of experts.cuh."""
    bits = CODE_TYPES[dtype].bits
    experts, height, width = codes.shape
    step = 64 if bits == 4 else 32
    row, column = np.indices((height, width))
    thread = row % 8 * 4 + column % 32 // 8
    vector = (row // 16 * (width // step) + column // step) * 32 + thread
    part = row % 16 // 8 * (step // 32) + column % step // 32
    places = vector * (128 // bits) + part * 8 + column % 8 // 2 + column % 2 * 4
    assert np.array_equal(np.sort(places, None), np.arange(height * width))
    placed = np.empty((experts, height * width), np.uint8)
    placed[:, places] = codes
    if dtype != "mxfp4":
        return pack(placed, bits)
    word = np.zeros((experts, height * width // 8, 32), np.uint8)
    for place, bits_of_code in enumerate(MXFP4_BITS):
        for bit, at in enumerate(bits_of_code):
            word[..., at] = placed[:, place::8] >> bit & 1
    return np.packbits(word, axis=-1, bitorder="little")


def scales_in_tiles(scales):
    """Return scales [experts, out, groups] in tile order."""
    experts, height, groups = scales.shape
    placed = np.empty((experts, height * groups), scales.dtype)
    for row in range(height):
        for group in range(groups):
            placed[:, (row // 16 * groups + group) * 16 + row % 16] = scales[:, row, group]
    return placed


# Sizes hidden and inner, and whether gate_up and down are in tiles: with a group size that is a
# power of two from 32 on, and for 4 bits columns in multiples of 64.
@pytest.mark.parametrize(("dtype", "size", "hidden", "inner", "tiled"), [
    *((dtype, size, 128, 256, (True, True)) for dtype in CODE_TYPES for size in (32, 128)
      if (dtype, size) != ("mxfp4", 128)),
    *((dtype, 32, 96, 64, (own.bits == 8, True)) for dtype, own in CODE_TYPES.items()),
    ("int4", 32, 64, 32, (True, False)), ("mxfp4", 32, 96, 32, (False, False)),
    ("uint4", 48, 96, 48, (False, False)), ("uint8", 12, 24, 36, (False, False)),
    ("int8", 16, 32, 64, (False, False)), ("float8_e4m3fn", 96, 96, 96, (False, False))])
def test_experts_have_the_kernel_layout(dtype, size, hidden, inner, tiled):
    """The layout of Experts::prepare on a GPU, as int32 words."""
    rng = np.random.default_rng(size)
    bits, fixed = CODE_TYPES[dtype].bits, CODE_TYPES[dtype].zero_point
    given, expected = {}, {}
    for name, rows, width, in_order in (("gate_up", 2 * inner, hidden, tiled[0]),
                                        ("down", hidden, inner, tiled[1])):
        codes = rng.integers(0, 2 ** bits, (3, rows, width), np.uint8)
        groups = 3, rows, width // size
        scales = rng.integers(100, 130, groups, np.uint8) if dtype == "mxfp4" else \
            rng.uniform(0.5, 2, groups).astype(np.float32)
        stored = {name: pack(codes.reshape(-1, width), bits).reshape(3, rows, -1),
                  f"{name}_scale": scales}
        lies = {name: in_tiles(codes, dtype), f"{name}_scale": scales_in_tiles(scales)} \
            if in_order else dict(stored)
        if fixed is None:
            zeros = rng.integers(0, 2 ** bits, (3 * rows, groups[-1]), np.uint8)
            stored[f"{name}_zero"] = lies[f"{name}_zero"] = pack(zeros, bits).reshape(3, rows, -1)
        given |= stored
        expected |= lies
    made = in_kernel_order(plugins.registry()["Experts"], {
        "top_k": 2, "weight_dtype": dtype, "group_size": size, "in_features": hidden,
        "inner_features": inner}, given)
    assert made.keys() == given.keys()
    for name, weight in made.items():
        experts, rows, width = given[name].shape
        words = given[name].dtype == np.uint8
        assert weight.shape == (experts, rows // 4 if words else rows, width)
        assert weight.dtype == (np.int32 if words else np.float32)
        assert weight.load().tobytes() == expected[name].tobytes()
        assert np.array_equal(weight.rows(1, 3), weight.load()[1:])  # one expert after another


@QUANTIZED
def test_the_parser_gets_weights_in_kernel_layout(builder, wish, tmp_path):
    compile("llama", tmp_path, IN_GROUPS["llama"], **wish)
    carried, stored = parsed_weights(builder[-1], tmp_path / "case" / "chip0")
    count = 0
    for node in builder[-1]["parsed"].graph.node:
        fields = attributes(node)
        if not fields.get("weight_dtype"):
            continue
        names = dict(zip(fields["present"].split(), node.input, strict=True))
        ports = [name for name in ("weight", "weight_scale", "weight_zero") if name in names]
        given = {port: carried(names[port]) for port in ports}
        assert given["weight"].shape == (fields["out_features"] // 4,
                                         stored[names["weight"]].shape[1])
        expected = dequantized(fields, *(stored.get(names.get(port, "")) for port in (
            "weight", "weight_scale", "weight_zero")), None)
        np.testing.assert_allclose(numbers_of(fields, given), expected, rtol=1e-6, atol=1e-7)
        count += 1
    assert count >= 4 * 2


@MIXTURES
def test_the_parser_gets_experts_in_kernel_layout(builder, family, wish, tmp_path):
    """Constants are int32 and float32, which TensorRT 8.6 supports."""
    llmc.compile(save_mixture(family, tmp_path), tmp_path / "case", target="tensorrt", **wish)
    graph = builder[-1]["parsed"].graph
    assert {tensor.data_type for tensor in graph.initializer} == {
        onnx.TensorProto.FLOAT, onnx.TensorProto.INT32}
    carried, stored = parsed_weights(builder[-1], tmp_path / "case" / "chip0")
    nodes = [node for node in graph.node if node.op_type == "Experts"]
    assert nodes
    for node in nodes:
        fields = attributes(node)
        names = dict(zip(fields["present"].split(), node.input, strict=True))
        bits = CODE_TYPES[fields["weight_dtype"]].bits
        for role in plugins.registry()["Experts"].quantized:
            weight, scale = stored[names[role.weight]], stored[names[role.scale]]
            codes = unpack(weight.reshape(-1, weight.shape[-1]), bits)
            codes = codes.reshape(*weight.shape[:2], -1)
            tiled = not family.endswith("96")
            assert carried(names[role.weight]).tobytes() == (
                in_tiles(codes, fields["weight_dtype"]) if tiled else weight).tobytes()
            assert carried(names[role.scale]).tobytes() == (
                scales_in_tiles(scale) if tiled else scale).tobytes()
            if role.zero in names:
                zero = stored[names[role.zero]]
                assert carried(names[role.zero]).tobytes() == zero.tobytes()


def parsed_weights(work, chip):
    """Return the parser's weights by name, and those of `graph.onnx`."""
    assert not (chip / "parsed.data").exists()
    parsed = {tensor.name: tensor for tensor in work["parsed"].graph.initializer}
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(
        chip / "graph.onnx").graph.initializer}

    def carried(name):
        place = {entry.key: entry.value for entry in parsed[name].external_data}
        assert place["location"] == "parsed.data"
        kind = onnx.helper.tensor_dtype_to_np_dtype(parsed[name].data_type)
        assert kind in (np.int32, np.float32)
        return np.frombuffer(work["data"], kind, int(place["length"]) // 4,
                             int(place["offset"])).reshape(parsed[name].dims)

    return carried, stored


def test_rows_of_partial_words_are_not_quantized(builder, tmp_path):
    compile("gpt2", tmp_path, {"n_inner": 98}, quantize="fp8")
    report, = [report for report in read_manifest(tmp_path / "case").passes
               if report.name == "quantize"]
    assert any("98 rows; the target reads multiples of 4, so it is dequantized" in text
               for text in report.refusals)


def test_experts_with_unsupported_groups_are_dequantized_with_a_note(builder, tmp_path):
    said = []
    compile("qwen3_moe", tmp_path, {"num_hidden_layers": 2}, quantize="int8", progress=said.append)
    assert any("2 layers' experts stay in float32, as target tensorrt has no kernel" in text
               for text in said)
    forms = read_manifest(tmp_path / "case").chips[0].quantization
    assert forms and not any("experts" in name for name in forms)


def compile_encoder_decoder(raw, tmp_path, dtype):
    families.write_encoder_decoder(
        raw, tmp_path / "case", Target(kind="tensorrt"),
        CompileOptions(dtype=dtype, max_batch_size=3),
        max_seq_len=48, mem_max_seq_len=32)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_onnx_runtime_runs_an_encoder_and_its_decoder(builder, name, encoder_decoder, tmp_path):
    """With the encoder output bound as written, plus the rows of another prompt."""
    _, raw, cases = encoder_decoder(name)
    compile_encoder_decoder(raw, tmp_path, "float32")
    chip = tmp_path / "case" / "chip0"
    assert [Path(work["plan"]).name for work in builder] == ["engine.plan", "encoder.plan"]
    source, tokens = [5, 17, 9, 30, 2], [0, 11, 12]
    with llmc.LLM(cases["tp1"]) as llm:
        expected = llm.logits(tokens, source)

    def run(file, script, **given):
        session = ort.InferenceSession(str(chip / file), providers=["CPUExecutionProvider"])
        profile = runpy.run_path(str(chip / script))["PROFILES"][0]
        feeds = {}
        for value in session.get_inputs():
            assert len(profile[value.name][0]) == len(value.shape)
            kind = np.int32 if value.type == "tensor(int32)" else np.float32
            feeds[value.name] = np.asarray(given[value.name], kind) if value.name in given \
                else np.zeros(profile[value.name][0], kind)
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(None, feeds), strict=True))

    memory = run("encoder.onnx", "polygraphy_encoder_inputs.py", input_ids=source,
                 position_ids=range(5), cu_seqlens=[0, 5])
    memory = {name: np.concatenate([np.full((2, made.shape[1]), np.nan), made])
              for name, made in memory.items()}
    decoded = run("graph.onnx", "polygraphy_inputs.py", input_ids=tokens, position_ids=range(3),
                  cu_seqlens=[0, 3], logits_indices=range(3), memory_starts=[2],
                  encoder_sequence_length=[5], **memory)
    families.assert_close(decoded["logits"][:, :families.VOCAB], expected, 1e-4)


def attributes(node):
    return {attribute.name: onnx.helper.get_attribute_value(attribute)
            if attribute.type != onnx.AttributeProto.STRING else attribute.s.decode()
            for attribute in node.attribute}


@pytest.mark.parametrize(("family", "beams"), [
    ("llama", 1), ("llama", 4), ("gpt2", 1), ("gemma2", 1), ("phi3", 1), ("gpt_neox", 1)])
def test_every_node_is_a_plugin_that_gives_the_shapes_of_its_body(harness, builder, family, beams,
                                                                  tmp_path):
    """With attributes, dtypes and shapes as passed by TensorRT's parser."""
    compile(family, tmp_path, dtype="float16")
    check_nodes(tmp_path / "case" / "chip0" / "graph.onnx", harness)


def test_every_node_over_float8_caches_is_a_plugin(harness, builder, tmp_path):
    compile("llama", tmp_path, dtype="float16", kv_dtype="float8_e4m3fn")
    check_nodes(tmp_path / "case" / "chip0" / "graph.onnx", harness)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_every_node_of_an_encoder_and_its_decoder_is_a_plugin(harness, builder, name,
                                                              encoder_decoder, tmp_path):
    _, raw, _ = encoder_decoder(name)
    compile_encoder_decoder(raw, tmp_path, "float16")
    for file in ("encoder.onnx", "graph.onnx"):
        check_nodes(tmp_path / "case" / "chip0" / file, harness)


@QUANTIZED
def test_every_node_with_quantized_weights_is_a_plugin(harness, builder, wish, tmp_path):
    compile("llama", tmp_path, IN_GROUPS["llama"], dtype="float16", **wish)
    check_nodes(tmp_path / "case" / "chip0" / "graph.onnx", harness,
                builder[-1]["parsed"].graph.initializer)


@MIXTURES
def test_every_node_with_quantized_experts_is_a_plugin(harness, builder, family, wish, tmp_path):
    llmc.compile(save_mixture(family, tmp_path), tmp_path / "case", target="tensorrt",
                 dtype="float16", **wish)
    check_nodes(tmp_path / "case" / "chip0" / "graph.onnx", harness,
                builder[-1]["parsed"].graph.initializer)


def check_nodes(path, harness, parsed=()):
    """Check all nodes; `parsed` has initializers that replace the graph's for the parser."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False)).graph
    sizes = {"num_tokens": 5, "batch": 3, "batch_plus_1": 4, "num_logits": 2,
             "num_memory_tokens": 96}
    known = {}
    for value in (*model.input, *model.value_info, *model.output):
        tensor = value.type.tensor_type
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
        known[value.name] = (kind.replace("int8", "float8_e4m3fn"),
                             [sizes.get(dim.dim_param, dim.dim_value) for dim in tensor.shape.dim])
    sizes_of = {tensor.name: list(tensor.dims) for tensor in model.initializer}
    for tensor in (*model.initializer, *parsed):
        known[tensor.name] = (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(
            tensor.data_type)).name, list(tensor.dims))
    ours = [node for node in model.node if node.domain.split(".")[0] == plugins.DOMAIN]
    assert ours
    for node in ours:
        fields = attributes(node)
        op = plugins.registry()[node.op_type]
        assert all(node.input) and len(fields["present"].split()) == len(node.input)
        assert (fields.pop("plugin_namespace"), fields.pop("plugin_version")) \
            == ("llmc", str(op.version))
        answers = harness.ask(node.op_type, fields, [(0, *known[name]) for name in node.input])
        given = dict(zip(fields["present"].split(), (known[name] for name in node.input),
                         strict=True))
        shapes = {port: sizes_of.get(name, shape) for (port, (_, shape)), name in zip(
            given.items(), node.input, strict=True)}
        kinds = [given[name][0] if name in op.cache_inputs
                 else op.output_dtypes.get(name, "float16")
                 for name in (output.removesuffix("_out") for output in op.outputs)]
        declared = {name: fields[name] for name in op.fields}
        if "int64" not in {kind for kind, _ in answers.outputs}:  # unsupported by TensorRT 8
            kinds = [kind.replace("int64", "int32") for kind in kinds]
        assert [(kind, tuple(shape)) for kind, shape in answers.outputs] \
            == list(zip(kinds, map(tuple, op.shapes(shapes, declared)), strict=True))
        known |= dict(zip(node.output, answers.outputs, strict=True))


def test_profiles_for_prompts_and_for_decoding(builder, tmp_path):
    compile("llama", tmp_path, max_batch_size=5, max_seq_len=48)
    script = runpy.run_path(str(tmp_path / "case" / "chip0" / "polygraphy_inputs.py"))
    prompts, decoding = script["PROFILES"]
    assert prompts["input_ids"][0] == [1] and prompts["input_ids"][2] == [4096]
    assert prompts["logits_indices"][2] == [512]
    assert prompts["cu_seqlens"] == decoding["cu_seqlens"] == [[2], [6], [6]]
    assert decoding["input_ids"] == decoding["logits_indices"] == [[1], [5], [5]]
    assert [shape[1:] for shape in decoding["key_cache_0"]] == [[2, 16, 16]] * 3
    assert prompts["block_table"] == decoding["block_table"] == [[1, 8], [5, 8], [5, 8]]
    for profile in (prompts, decoding):
        for least, usual, most in profile.values():
            assert all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True))


@pytest.mark.parametrize(("options", "match"), [
    (dict(dtype="bfloat16"), "TensorRT 8.6.0 has no bfloat16"),
    (dict(compute_capability="8.0"), "compute_capability 8.0 is given, .* which has 9.0"),
    (dict(max_batch_size=0), "max_batch_size 0 is below 1"),
])
def test_unsupported_options_are_refused(builder, options, match, tmp_path):
    with pytest.raises(llmc.LlmcError, match=match):
        compile("llama", tmp_path, **options)
    assert not (tmp_path / "case").exists()


def test_a_head_dim_without_a_kernel_is_refused(builder, tmp_path):
    hf = families.save(families.tiny_model("llama", head_dim=12), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="head_dim 12 of 'LlamaForCausalLM' is not a multiple"):
        llmc.compile(hf, tmp_path / "case", target="tensorrt")


def test_a_missing_tensorrt_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorrt, "plugin_library", lambda: tmp_path / "none.so")
    monkeypatch.delenv("LLMC_TENSORRT_PYTHON", raising=False)
    monkeypatch.setattr(tensorrt, "find_spec", lambda name: None)
    with pytest.raises(llmc.LlmcError, match=r"pip install tensorrt, or set LLMC_TENSORRT"):
        tensorrt.describe(CompileOptions())


def stub(directory, text):
    """Return a Python that imports this as tensorrt."""
    (directory / "tensorrt.py").write_text(text)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(("text", "match"), [
    ("raise ImportError('libcudnn.so.8 is not there')", "cannot build .*: libcudnn.so.8 is not"),
    ("import os, sys; print('segment lost', file=sys.stderr); os._exit(139)",
     "builder ended with exit code 139: segment lost"),
    ("import os; os._exit(0)", "builder ended with exit code 0"),
])
def test_builder_process_messages_are_reported(monkeypatch, tmp_path, text, match):
    monkeypatch.setenv("LLMC_TENSORRT_PYTHON", stub(tmp_path, text))
    with pytest.raises(llmc.LlmcError, match=match):
        tensorrt._build({"plugins": "none.so"}, CompileOptions())


def test_a_missing_python_is_an_error(monkeypatch):
    monkeypatch.setenv("LLMC_TENSORRT_PYTHON", "/none/python")
    with pytest.raises(llmc.LlmcError, match=r"'/none/python', the value of LLMC_TENSORRT_PYTHON"):
        tensorrt._build({"plugins": "none.so"}, CompileOptions())


def test_the_tensorrt_version_must_match_the_compiled_one(builder, tmp_path):
    manifest = compile("llama", tmp_path, max_batch_size=2)
    check_version(manifest.target, "8.6.0")
    with pytest.raises(llmc.LlmcError, match="built by TensorRT 8.6.0, TensorRT 8.6.1 is"):
        check_version(manifest.target, "8.6.1")
    check_plugins(manifest, manifest.ops)
    newer = manifest.model_copy(update={"ops": {**manifest.ops, "CausalAttention": 9}})
    with pytest.raises(llmc.LlmcError, match="version 9 of the plugin CausalAttention, .* has "
                                             "version 7; install"):
        check_plugins(newer, manifest.ops)
    with pytest.raises(llmc.LlmcError, match="has none; install"):
        check_plugins(manifest, {})
    with pytest.raises(llmc.LlmcError, match="max_batch_size 3 exceeds 2, for which the model"):
        llmc.LLM(tmp_path / "case", max_batch_size=3)
    plan = tmp_path / "case" / "chip0" / "engine.plan"
    plan.write_bytes(plan.read_bytes()[:-1])
    with pytest.raises(llmc.LlmcError, match="engine.plan' has 4 bytes, expected 5"):
        llmc.LLM(tmp_path / "case")


def test_the_tensorrt_library_is_located(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMC_TENSORRT_LIBRARY", str(tmp_path))
    assert tensorrt_library("8") == str(tmp_path / "libnvinfer.so.8")
    monkeypatch.setenv("LLMC_TENSORRT_LIBRARY", "/opt/libnvinfer.so.8")
    assert tensorrt_library("8") == "/opt/libnvinfer.so.8"
    monkeypatch.delenv("LLMC_TENSORRT_LIBRARY")
    assert tensorrt_library("7") == "libnvinfer.so.7"


def test_a_tensorrt_that_cannot_be_loaded_is_an_llmc_error(extension, harness, tmp_path):
    with pytest.raises(extension.CudaError,
                       match=r"TensorRT cannot be loaded \(.*none.*\); install it, or name"):
        extension.tensorrt.load(str(tmp_path / "none.so"))
