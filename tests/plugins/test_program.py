"""Programs and steps that the CUDA engine refuses, checked on the host without a GPU.

Programs whose nodes would access memory outside their tensors, and steps with indices out of range.
"""

import itertools
from dataclasses import replace

import bench_model
import families
import numpy as np
import pytest
import small_case
from declared_programs import build, schedules_of

import llmc
from llmc import plugins
from llmc.artifacts.manifest import Target, read_manifest
from llmc.artifacts.program import Program
from llmc.compiler.options import CompileOptions
from llmc.runtime.core.step import (
    LAST,
    EncoderOutputs,
    EngineLimits,
    SamplingState,
    ScoredRows,
    Step,
)
from llmc.runtime.engines.cuda import step_arrays
from llmc.runtime.engines.state_slots import StateSlots
from llmc.runtime.sampling.sampler import Sampler, SamplingParams

T, L, B = -1, -2, -3  # num_tokens, num_logits, batch
LIMITS = dict(max_batch=4, max_tokens=128, max_logits=8, max_seq_len=32, block_size=8)

INPUTS = {name: number for number, name in enumerate((
    "input_ids", "cu_seqlens", "past_lens", "logits_indices", "memory_starts",
    "encoder_sequence_length", "memory_rows", "block_table"))}


@pytest.fixture
def program(extension):
    """A float32 program with the inputs, and 64 values per token and 16 per logit in the arena."""
    made = extension.Program(dtype="float32", **LIMITS, mem_max_seq_len=16, token_bytes=256,
                             logit_bytes=64)
    for name, number in INPUTS.items():
        wide = name.startswith(("input", "logits")) or name.endswith("rows")
        assert made.add_input(name, "int64" if wide else "int32") == number
    return made


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory):
    """The handwritten manifest and programs of an encoder and a decoder."""
    case = small_case.write_case(tmp_path_factory.mktemp("small") / "case")
    return read_manifest(case), schedules_of(case)


@pytest.mark.parametrize(("family", "options"), [
    ("llama", {"kv_dtype": "float8_e4m3fn"}), ("gpt2", {"enable_lora": True, "tp_size": 2}),
    ("llama", {"enable_lora": True, "dtype": "bfloat16", "quantize": "int4"}), *(
        pytest.param(*case, marks=pytest.mark.thorough) for case in (
            ("llama", {}), ("gpt2", {"dtype": "float16"}), ("qwen3", {}), ("gpt_neox", {}),
            ("gemma2", {"dtype": "bfloat16", "tp_size": 2}), ("cohere", {}), ("granite", {}))),
    ("qwen2_moe", {"dtype": "bfloat16", "tp_size": 2, "enable_lora": True}),
    ("gpt_oss", {"dtype": "float16"}), *(
        pytest.param(*case, marks=pytest.mark.thorough) for case in (
            ("mixtral", {}), ("glm4_moe", {"dtype": "float16"}), ("phimoe", {}), ("mamba2", {}),
            ("lfm2", {"tp_size": 2}), ("olmo_hybrid", {}))),
    ("deepseek_v3", {"dtype": "bfloat16", "tp_size": 2}), ("minicpm3", {"quantize": "int8"}),
    ("falcon_h1", {"dtype": "bfloat16", "tp_size": 2}), ("llama4_text", {"dtype": "float16"}),
    ("apertus", {"dtype": "bfloat16"}), ("gemma4_text", {"tp_size": 2}),
    ("gemma4_text", {"kv_dtype": "float8_e4m3fn"})])
def test_compiled_programs_are_accepted(extension, family, options, tmp_path):
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    manifest = llmc.compile(hf, tmp_path / "case", target="cuda", **options)
    for rank in range(manifest.tp_size):
        build(extension, manifest, schedules_of(tmp_path / "case", rank))


def test_fp8_values_need_a_matching_producer_and_consumer(extension, tmp_path):
    hf = families.save(families.tiny_model("llama", intermediate_size=192), tmp_path / "hf")
    static = families.to_static_fp8(hf, tmp_path / "static", {"_proj": 0.003})
    manifest = llmc.compile(static, tmp_path / "case", target="cuda", dtype="float16")
    schedule, = schedules_of(tmp_path / "case")
    build(extension, manifest, [schedule])
    codes = [number for number, tensor in enumerate(schedule.tensors)
             if (tensor.kind, tensor.dtype) == ("value", "float8_e4m3fn")]
    assert len(codes) == 5
    for number in codes:
        for dtype in ("float16", "float32", "int64"):
            tensors = [*schedule.tensors]
            tensors[number] = tensors[number].model_copy(update={"dtype": dtype})
            refused(extension, manifest, schedule.model_copy(update={"tensors": tuple(tensors)}))
    for place, node in enumerate(schedule.nodes):
        for field, value in (("out_scale", 0.0), ("x_dtype", ""), ("activation_scale", 0.0)):
            if not node.fields.get(field) or (field == "activation_scale"
                                              and not node.fields.get("x_dtype")):
                continue
            nodes = [*schedule.nodes]
            nodes[place] = node.model_copy(update={"fields": {**node.fields, field: value}})
            refused(extension, manifest, schedule.model_copy(update={"nodes": tuple(nodes)}))


def test_fp8_block_weights_need_group_quantized_activations(extension, tmp_path):
    hf = families.save(families.tiny_model(
        "llama", hidden_size=256, intermediate_size=384, num_hidden_layers=1), tmp_path / "hf")
    blocks = bench_model.in_blocks(hf, tmp_path / "blocks")
    manifest = llmc.compile(blocks, tmp_path / "case", target="cuda", dtype="float16",
                            quantize_activations=True)
    schedule, = schedules_of(tmp_path / "case")
    build(extension, manifest, [schedule])
    places = [place for place, node in enumerate(schedule.nodes)
              if node.fields.get("activation_group_size") == 128]
    assert len(places) == 4
    for place, (field, value) in itertools.product(places, (
            ("activation_group_size", 64), ("activation_dtype", ""), ("activation_scale", 0.5),
            ("group_size", 64), ("weight_dtype", "int8"))):
        nodes = [*schedule.nodes]
        nodes[place] = nodes[place].model_copy(
            update={"fields": {**nodes[place].fields, field: value}})
        refused(extension, manifest, schedule.model_copy(update={"nodes": tuple(nodes)}))


def test_expert_activations_have_the_weights_quantization(extension, tmp_path):
    hf = families.save(families.tiny_model(
        "qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_hidden_layers=1),
        tmp_path / "hf")
    blocks = bench_model.in_blocks(hf, tmp_path / "blocks")
    manifest = llmc.compile(blocks, tmp_path / "case", target="cuda", dtype="float16",
                            quantize_activations=True)
    schedule, = schedules_of(tmp_path / "case")
    build(extension, manifest, [schedule])
    place, = (place for place, node in enumerate(schedule.nodes) if node.op == "Experts")
    for field, value in (("activation_group_size", 64), ("activation_dtype", ""),
                         ("group_size", 64), ("weight_dtype", "int8")):
        nodes = [*schedule.nodes]
        nodes[place] = nodes[place].model_copy(
            update={"fields": {**nodes[place].fields, field: value}})
        refused(extension, manifest, schedule.model_copy(update={"nodes": tuple(nodes)}))


def refused(extension, manifest, schedule):
    """Assert that the engine and the reader refuse the program."""
    with pytest.raises(extension.CudaError):
        build(extension, manifest, [schedule])
    with pytest.raises(ValueError):
        Program.model_validate_json(schedule.model_dump_json())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_an_encoder_decoder_program_is_accepted(extension, encoder_decoder, name, tmp_path):
    _, raw, _ = encoder_decoder(name)
    families.write_encoder_decoder(raw, tmp_path / "case", Target(kind="cuda"),
                                   CompileOptions(dtype="float16"))
    build(extension, read_manifest(tmp_path / "case"), schedules_of(tmp_path / "case"))


def test_a_handwritten_program_is_accepted(extension, scheduled):
    build(extension, *scheduled)


def changed(schedule, kind, known=()):
    """Yield descriptions of single changes and the changed, unchecked programs.

    Changes that an engine may accept are excluded: another tensor of the same shape, or a tensor in
    a number's place; other rows of token or position tables and of looked-up keys, since kernels
    do not read absent rows; positions as an Embedding's tokens; and facts that the engine does not
    take from the program, or that another program defines (`known`).
    """
    def copied(part, number, **changes):
        values = [*getattr(schedule, part)]
        values[number] = values[number].model_copy(update=changes)
        return schedule.model_copy(update={part: tuple(values)})

    looked_up = {"Embedding": (1, 3), "BidirectionalAttention": (1, 2)}
    tables = {node.inputs[index] for node in schedule.nodes for index in looked_up.get(node.op, ())
              if index < len(node.inputs) and (node.op == "Embedding" or node.inputs[4] >= 0)}

    def alike(before, number):
        a, b = schedule.tensors[before], schedule.tensors[number]
        if (a.name, b.name) == ("input_ids", "position_ids") or a.shape == (1,):
            return True
        if before in tables:
            return (a.dtype, len(a.shape), a.shape[1:]) == (b.dtype, len(b.shape), b.shape[1:])
        return a.kind == b.kind != "input" and (a.dtype, a.shape) == (b.dtype, b.shape)

    for number, tensor in enumerate(schedule.tensors):
        if tensor.name in known:
            continue
        if kind == "a dimension" and tensor.kind != "input":
            for axis, dim in enumerate(tensor.shape):
                if axis == 0 and (number in tables or tensor.kind in ("cache", "state", "memory")):
                    continue
                if tensor.kind == "cache" and axis == 2:
                    continue
                longer = axis == 0 and tensor.name in ("cos", "sin")  # which may be
                for other in (dim - 1, *([] if longer else [dim + 1])) if isinstance(dim, int) \
                        else (7,):
                    shape = (*tensor.shape[:axis], other, *tensor.shape[axis + 1:])
                    yield f"{tensor.name} {shape}", copied("tensors", number, shape=shape)
        if kind == "a dtype" and tensor.kind != "memory":
            for dtype in ("float32", "float16", "int32", "int64", "float8_e4m3fn"):
                if dtype != tensor.dtype:
                    yield f"{tensor.name} {dtype}", copied("tensors", number, dtype=dtype)
        if kind == "a place" and tensor.kind == "value":
            for offset in (2**12, 2**40, 2**70, 1):
                yield f"{tensor.name} at {offset}", copied("tensors", number, offset=offset)
            yield tensor.name, copied("tensors", number, per_logit=not tensor.per_logit)
    for number, node in enumerate(schedule.nodes if kind == "a number" else ()):
        for part in ("inputs", "outputs"):
            for index, before in enumerate(getattr(node, part)):
                for other, tensor in enumerate(schedule.tensors):
                    if other == before or (alike(before, other) if before >= 0
                                           else part == "inputs"):
                        continue
                    numbers = [*getattr(node, part)]
                    numbers[index] = other
                    yield f"{node.op} {number}: {part[:-1]} {index} is {tensor.name}", \
                        copied("nodes", number, **{part: tuple(numbers)})


@pytest.mark.parametrize("of_encoder", [False, True], ids=["decoder", "encoder"])
@pytest.mark.parametrize("kind", ["a dimension", "a dtype", "a place", "a number"])
def test_a_changed_number_anywhere_is_refused(extension, scheduled, kind, of_encoder):
    manifest, schedules = scheduled
    count = 0
    known = schedules[0].named("input", "weight", "memory") if of_encoder else ()
    for what, other in changed(schedules[of_encoder], kind, known):
        with pytest.raises((extension.CudaError, llmc.LlmcError)):
            build(extension, manifest, [schedules[0], other] if of_encoder else [other])
            pytest.fail(f"{what} is taken")
        count += 1
    assert count > 20


def resized(shape, axis, change):
    return [dim + change * (place == axis) for place, dim in enumerate(shape)]


def core_shapes(extension, op, fields, shapes):
    return [tuple(shape) for shape in extension.shapes(
        op.name, dict(fields), [list(shapes.get(name, ())) for name in op.input_names])]


CASES = [pytest.param(op, sample, id=f"{op.name}-{index}")
         for op in plugins.registry().values() if op.samples and op.has_core
         for index, sample in enumerate(op.samples(np.random.default_rng(7)))
         if not op.lacking(sample.fields, sample.inputs)]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_core_accepts_the_shapes_of_its_contract(extension, op, sample):
    """Shapes of a sample, and with one dimension changed by one.

    Inputs of the step, whose sizes the engine checks, may be smaller.
    """
    shapes = {name: array.shape for name, array in sample.inputs.items()}
    assert core_shapes(extension, op, sample.fields, shapes) == list(op.fit(shapes, sample.fields))
    for name, change in itertools.product(shapes, (-1, 1)):
        for axis in range(len(shapes[name])):
            other = {**shapes, name: resized(shapes[name], axis, change)}
            try:
                expected = [*map(tuple, op.fit(other, sample.fields))]
            except ValueError:
                with pytest.raises(extension.CudaError):
                    core_shapes(extension, op, sample.fields, other)
                    pytest.fail(f"{name} {other[name]} is taken")
                continue
            if name not in op.integer_inputs:
                assert core_shapes(extension, op, sample.fields, other) == expected


@pytest.mark.parametrize(("declare", "match"), [
    (lambda p: p.add_input("tokens", "int64"), "unknown engine input 'tokens'"),
    (lambda p: p.add_input("position_ids", "int32"), "position_ids is of int64, not int32"),
    (lambda p: p.add_input("past_lens", "int32"), "declared twice"),
    (lambda p: p.add_weight("float32", [8, 0]), "dimension 0 is out of range"),
    (lambda p: p.add_weight("float32", [2**31, 2**31]), "dimension 2147483648 is out of range"),
    (lambda p: p.add_weight("float4", [8]), "unknown dtype 'float4'"),
    (lambda p: p.add_cache("float32", 2, 0), "dimension 0 is out of range"),
    (lambda p: p.add_cache("float8_e4m3fn", 1, 7), "block of 56 bytes is not a multiple of 16"),
    (lambda p: p.add_cache("float16", 2, 8), "float16, expected float32 or float8"),
    (lambda p: p.add_state("float16", [8]), "a state of float16, expected float32"),
    (lambda p: p.add_state("float32", [8, 0]), "dimension 0 is out of range"),
    (lambda p: p.add_memory(-8), "dimension -8 is out of range"),
    (lambda p: p.add_value("float16", [T, 8], 0, False), "computes in float32"),
    (lambda p: p.add_value("float32", [L, 8], 0, False), "does not begin with num_tokens"),
    (lambda p: p.add_value("float32", [T, 8], 0, True), "does not begin with num_logits"),
    (lambda p: p.add_value("float32", [T, 72], 0, False), "288 bytes at 0 .* arena's 256"),
    (lambda p: p.add_value("float32", [T, 8], 240, False), "32 bytes at 240"),
    (lambda p: p.add_value("float32", [T, 8], -16, False), "32 bytes at -16"),
    (lambda p: p.add_value("float32", [T, 8], 8, False), "not at a multiple of 16"),
    (lambda p: p.add_value("float32", [L, 20], 0, True), "80 bytes at 0 .* arena's 64"),
    (lambda p: p.add_columns(0, 0, 8), "tensor 0 is not a value with num_tokens rows"),
    (lambda p: p.add_columns(99, 0, 8), "tensor 99 does not exist"),
    (lambda p: p.add_columns(p.add_value("float32", [L, 8], 0, True), 0, 4), "num_tokens rows"),
    (lambda p: p.add_columns(p.add_value("float32", [T, 8], 0, False), 4, 5),
     "5 columns from 4 on exceed the value's 8"),
    (lambda p: p.add_columns(p.add_value("float32", [T, 8], 0, False), -1, 5), "from -1 on"),
    (lambda p: p.add_columns(p.add_value("float32", [T, 8], 0, False), 2**63 - 1, 5), "columns"),
    (lambda p: p.add_columns(p.add_value("float32", [T, 8], 0, False), 0, 0), "dimension 0"),
    (lambda p: p.set_logits(p.add_value("float32", [T, 8], 0, False), 8), "not .* num_logits rows"),
    (lambda p: p.set_logits(p.add_value("float32", [L, 8], 0, True), 9), "not fit the logits' 8"),
    (lambda p: p.set_logits(99, 8), "tensor 99 does not exist"),
])
def test_invalid_declarations_are_refused(extension, program, declare, match):
    with pytest.raises(extension.CudaError, match=match):
        declare(program)


@pytest.mark.parametrize(("limits", "match"), [
    (dict(max_batch=0), "max_batch is 0, expected 1 to"),
    (dict(max_seq_len=2**31 - 1), "max_seq_len is 2147483647"),
    (dict(block_size=24), "block_size 24 is not a power of two"),
    (dict(token_bytes=-1), "-1 bytes are not"), (dict(dtype="int64"), "not compute in int64")])
def test_invalid_limits_are_refused(extension, limits, match):
    whole = {"dtype": "float32", **LIMITS, "token_bytes": 256, "logit_bytes": 64, **limits}
    with pytest.raises(extension.CudaError, match=match):
        extension.Program(**whole)


def attention(p, **changes):
    """Return a CausalAttention's inputs by name."""
    caches = [p.add_cache("float32", 1, 8) for _ in range(2)]
    return list({"qkv": p.add_value("float32", [T, 32], 0, False), "key": caches[0],
                 "value": caches[1], "cu_seqlens": INPUTS["cu_seqlens"],
                 "past_lens": INPUTS["past_lens"], "cos": -1, "sin": -1, "q_norm": -1,
                 "k_norm": -1, "block_table": INPUTS["block_table"], **changes}.values())


def reading(p, caches, **changes):
    """Return a CachedAttention's inputs by name."""
    return list({"query": p.add_value("float32", [T, 16], 0, False), "key": caches[0],
                 "value": caches[1], "cu_seqlens": INPUTS["cu_seqlens"],
                 "past_lens": INPUTS["past_lens"], "cos": -1, "sin": -1, "q_norm": -1,
                 "query_scale": -1, "block_table": INPUTS["block_table"], **changes}.values())


def experts(p, x, scale):
    """Return the inputs of a 4-bit Experts with scales of this dtype."""
    up, down = p.add_weight("uint8", [4, 64, 16]), p.add_weight("uint8", [4, 32, 16])
    scales = [p.add_weight(scale, [4, rows, 1]) for rows in (64, 32)]
    return [x, INPUTS["input_ids"], x, up, down, -1, -1, scales[0], -1, scales[1]]


def packed(dtype):
    return {"top_k": 2, "weight_dtype": dtype, "group_size": 32, "in_features": 32,
            "inner_features": 32}


HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(("add", "match"), [
    (lambda p, x, y, w: p.add_node("Erf", {}, [x], [y]), "unknown op 'Erf'"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, 99], [y]), "tensor 99 does not exist"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, -2], [y]), "tensor -2 does not exist"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x], [y]), "needs the input 'weight'"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, w, *[-1] * 14], [y]),
     "16 inputs"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, w], []), "0 outputs"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, w], [-1]), "needs the output 'y'"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, w], [w]), "'y', is not a value"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [w, w], [y]), r"output is \[16, 16\]"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, w], [p.add_value(
        "float32", [L, 16], 0, True)]), "its output is"),
    (lambda p, x, y, w: p.add_node("RMSNorm", {}, [x, p.add_weight("float32", [16])], [y]),
     r"norm's weight is \[16\], expected \[8\]"),
    (lambda p, x, y, w: p.add_node("GemmBiasAct", {}, [x, p.add_weight("float16", [16, 8])], [y]),
     "'weight', is of float16, expected float32"),
    (lambda p, x, y, w: p.add_node("Add", {}, [p.add_weight("float32", [1])] * 2, [y]),
     "only weights as inputs"),
    (lambda p, x, y, w: p.add_node("Add", {}, [x, p.add_weight("float32", [7])], [x]),
     r"operand is \[7\], expected \[8\]"),
    (lambda p, x, y, w: p.add_node("RMSNorm", {}, [p.add_columns(y, 0, 8),
                                                   p.add_weight("float32", [8])], [x]),
     "'x', is a column slice"),
    (lambda p, x, y, w: p.add_node("GroupRMSNorm", {"groups": 1}, [
        x, p.add_weight("float32", [8]), p.add_columns(y, 3, 7)], [x]), "GroupRMSNorm's gate is"),
    (lambda p, x, y, w: p.add_node("Tanh", {}, [x], [p.add_columns(y, 0, 8)]), "is not a value"),
    (lambda p, x, y, w: p.add_node("Concat", {}, [x, w], [y]), "Concat's input is"),
    (lambda p, x, y, w: p.add_node("Add", {}, [x, w], [x]), "operand is"),
    (lambda p, x, y, w: p.add_node("Add", {}, [x], [x]), "needs the input 'b'"),
    (lambda p, x, y, w: p.add_node("Gather", {}, [p.add_value("float32", [L, 8], 0, True),
     INPUTS["logits_indices"]], [p.add_value("float32", [L, 8], 32, True)]), "has num_logits rows"),
    (lambda p, x, y, w: p.add_node("Gather", {}, [w, INPUTS["logits_indices"]],
                                   [p.add_value("float32", [L, 8], 0, True)]), "is not a value"),
    (lambda p, x, y, w: p.add_node("Gather", {}, [x, INPUTS["input_ids"]], [y]),
     "is not the step's logits_indices"),
    (lambda p, x, y, w: p.add_node("Scatter", {}, [x, INPUTS["memory_rows"], p.add_memory(8)],
                                   []), "not an input of a model"),
    (lambda p, x, y, w: p.add_node("Scatter", {}, [x, INPUTS["memory_rows"], p.add_memory(16)],
                                   [], "encoder"), r"memory is \[64, 16\], expected \[64, 8\]"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, attention(p), [y, -1, 0]),
     "is in place"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, attention(p), [x, -1, -1]),
     "its output is"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, attention(p, key=p.add_weight(
        "float32", [4, 1, 32, 8])), [y, -1, -1]), "is written, expected a cache"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, attention(
        p, past_lens=INPUTS["memory_starts"]), [y, -1, -1]), "is not the step's past_lens"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS | {"rotary_dim": 4}, attention(
        p, cos=p.add_weight("float32", [31, 2]), sin=p.add_weight("float32", [31, 2])),
        [y, -1, -1]), "'cos', has 31 rows for max_seq_len 32"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS | {"kv_dtype": "float8_e4m3fn"},
                                   attention(p), [y, -1, -1]), "float32, expected float8_e4m3fn"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, attention(p), [y, -1, -1],
                                   "encoder"),
     "past_lens.* not an input of an encoder"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS | {"num_heads": 2**33}, attention(p),
                                   [y, -1, -1]), "not fit in 32 bits"),
    (lambda p, x, y, w: p.add_node("RMSNorm", {}, [attention(p)[1], w], [y]), "is a cache or a"),
    (lambda p, x, y, w: p.add_node("CachedAttention", HEADS, reading(
        p, [p.add_cache("float32", 1, 8) for _ in range(2)]), [y]),
     "is a cache that no node has written yet"),
    (lambda p, x, y, w: p.add_node("CachedAttention", HEADS, reading(p, [w, w]), [y]),
     "key_cache has|dimensions|expected"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, [*attention(p), -1, -1, -1, -1,
     p.add_weight("float32", [31])], [y, -1, -1]), "'query_scale', has 31 rows"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, [*attention(p), -1, -1, -1,
     p.add_weight("float32", [2, 31])], [y, -1, -1]), "'key_bias', has 31 rows"),
    (lambda p, x, y, w: p.add_node("Columns", {}, [x, p.add_weight("float32", [16])], [y]),
     "'index', is of float32, expected int32"),
    (lambda p, x, y, w: p.add_node("Columns", {}, [x, p.add_weight("int32", [8])], [y]),
     "its output is"),
    (lambda p, x, y, w: p.add_node("CausalAttention", HEADS, attention(p, key=p.add_state(
        "float32", [1, 32, 8])), [y, -1, -1]), "is not a cache"),
    (lambda p, x, y, w: p.add_node("Experts", packed("mxfp4"), experts(p, x, "float32"), [y]),
     "'gate_up_scale', is of float32, expected uint8"),
    (lambda p, x, y, w: p.add_node("Experts", packed("int4"), experts(p, x, "uint8"), [y]),
     "'gate_up_scale', is of uint8, expected float32"),
])
def test_invalid_nodes_are_refused(extension, program, add, match):
    x, y = (program.add_value("float32", [T, width], 0, False) for width in (8, 16))
    with pytest.raises(extension.CudaError, match=match):
        add(program, x, y, program.add_weight("float32", [16, 8]))


def test_valid_nodes_are_accepted(program):
    x, y = (program.add_value("float32", [T, width], 0, False) for width in (8, 16))
    weight = program.add_weight("float32", [16, 8])
    program.add_node("GemmBiasAct", {}, [x, weight, program.add_weight("float32", [16])], [y])
    program.add_node("Add", {}, [program.add_weight("float32", [1]), x], [x])
    program.add_node("Mul", {}, [program.add_weight("float32", [8]), x], [x])
    caches = attention(program)
    program.add_node("CausalAttention", HEADS, caches, [y, -1, -1])
    program.add_node("CachedAttention", HEADS, reading(program, caches[1:3]), [y])
    program.add_node("Columns", {}, [x, program.add_weight("int32", [16])], [y])
    program.add_node("Concat", {}, [x, x], [y])
    positions = program.add_input("position_ids", "int64")
    program.add_node("Embedding", {}, [positions, program.add_weight("float32", [4, 8])], [x])
    logits = program.add_value("float32", [L, 16], 0, True)
    program.add_node("Gather", {}, [y, INPUTS["logits_indices"]], [logits])
    program.add_node("Scatter", {}, [x, INPUTS["memory_rows"], program.add_memory(8)], [],
                     "encoder")
    program.set_logits(logits, 15)


NOWHERE = EncoderOutputs(np.array([0, 1], np.int32), np.array([16, 3], np.int32))


def ints(*values):
    return np.array(values, np.int32)


def step(**changes):
    """A step of two sequences with 1 token and 3."""
    made = Step.of([[5], [6, 7, 8]], [7, 0], [[3, 9], [4, 9]], [2, 0], memory=NOWHERE)
    return replace(made, **changes)


def check_step(program, made, blocks=8):
    program.check_step(blocks, *step_arrays(made, 16))


STATE = SamplingState(Sampler(SamplingParams(repetition_penalty=1.2, bad_words=[[5, 6], [7]],
                                             logprobs=3, logit_bias={4: 1.0}), 0, [5, 6], [1],
                              [[5, 6], [7]]), (4, 5))


def test_steps_of_a_model_with_recurrent_states(extension, program):
    program.add_state("float32", [3, 8])
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 8)
    arrays = step_arrays(step(), 16)
    all_of_them = ints(1, 3)
    for slots, commits, copies, match in (
            (ints(3, 0), all_of_them, ints(0, 1, 0, 2), None),
            (ints(), all_of_them, ints(), "state_slots has 0 elements"),
            (ints(4, 0), all_of_them, ints(), r"state_slots\[0\] is 4"),
            (ints(1, 1), all_of_them, ints(), "state_slots has 1 twice"),
            (ints(1, 0), all_of_them, ints(4, 0), r"copies of states\[0\] is 4"),
            (ints(1, 0), all_of_them, ints(0, 1, 1, 2), "state 1 is both source and destination"),
            (ints(1, 0), ints(), ints(), "commit_lens has 0 elements, expected 2"),
            (ints(1, 0), ints(1, 1), ints(), None),
            (ints(1, 0), ints(1, 4), ints(), r"commit_lens\[1\] is 4, expected 1 to the seq.* 3 t"),
            (ints(1, 0), ints(0, 3), ints(), r"commit_lens\[0\] is 0, expected 1 to")):
        changed = (*arrays[:16], slots, commits, copies.reshape(-1, 2), *arrays[19:])
        if match is None:
            program.check_step(8, *changed)
            continue
        with pytest.raises(extension.CudaError, match=match):
            program.check_step(8, *changed)


@pytest.mark.parametrize("changes", [
    {}, {"past_lens": ints(7, 5)}, {"block_tables": ints(7, 7, 99, 4).reshape(2, 2),
                                   "past_lens": ints(12, 0), "copies": ints(3, 4).reshape(1, 2)},
    {"sample": ints()}, {"logits": "all"}, {"candidates": 8}, {"admit": {2: STATE, 1: STATE}},
    {"num_decode": 0}, {"scored": ScoredRows(ints(1, 2), np.array([7, 0]), ints(0, 20))}])
def test_valid_steps_are_accepted(program, changes):
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 8)
    if "block_tables" in changes:
        changes = changes | {"block_tables": ints(7, 7, 4, 99).reshape(2, 2)}
    check_step(program, step(**changes))


@pytest.mark.parametrize(("changes", "match"), [
    ({"cu_seqlens": ints(0, 4)}, "cu_seqlens has 2 elements, expected 3"),
    ({"cu_seqlens": ints(0, 1, 5)}, "cu_seqlens go from 0 to 5, expected 0 to num_tokens 4"),
    ({"cu_seqlens": ints(1, 3, 4)}, "cu_seqlens go from 1 to 4"),
    ({"cu_seqlens": ints(0, 4, 4)}, r"cu_seqlens\[2\] is 4 after 4; every sequence"),
    ({"cu_seqlens": ints(0, -3, 4)}, r"cu_seqlens\[1\] is -3 after 0"),
    ({"past_lens": ints(32, 0)}, "1 tokens after 32 of sequence 0 exceed max_seq_len 32"),
    ({"past_lens": ints(0, -1)}, "3 tokens after -1 of sequence 1"),
    ({"past_lens": ints(16, 0)}, "17 positions of sequence 0 exceed the 2 blocks of its table"),
    ({"past_lens": ints()}, "a batch of 0 has no sequences"),
    ({"past_lens": ints(8, 0)}, r"block_tables\[1\] is 9, expected 0 to 7"),
    ({"block_tables": ints(3, 9, 4)}, "block_tables of 3 elements are not rows of 2 sequences"),
    ({"block_tables": ints(-1, 4).reshape(2, 1)}, r"block_tables\[0\] is -1"),
    ({"token_ids": np.array([-2, 6, 7, 8])}, r"token_ids\[0\] is -2"),
    ({"token_ids": np.array([LAST, 6, 7, 8])}, "token 0 is the last one of slot 2"),
    ({"slots": ints(0, 0)}, "slots has 0 twice"), ({"slots": ints(0)}, "slots has 1 elements"),
    ({"slots": ints(0, 4)}, r"slots\[1\] is 4, expected 0 to 3"),
    ({"num_decode": 2}, "sequence 1 of 2 decoding ones has 3 new tokens"),
    ({"num_decode": 3}, "num_decode 3, expected 0 to the batch size 2"),
    ({"num_decode": -1}, "num_decode -1, expected"),
    ({"sample": ints(1, 0)}, "sample is not ascending"), ({"sample": ints(2)}, r"sample\[0\] is 2"),
    ({"copies": ints(0, 8).reshape(1, 2)}, r"copies of blocks\[1\] is 8"),
    ({"copies": ints(0, 1, 2)}, "are not pairs"),
    ({"copies": ints(0, 1, 2, 1).reshape(2, 2)}, "block 1 is a destination of two copies"),
    ({"copies": ints(0, 1, 1, 2).reshape(2, 2)}, "block 1 is both source and destination"),
    ({"candidates": 9}, "candidates is 9, expected 0 to vocab_size 8"),
    ({"admit": {4: STATE}}, r"slots of admitted sequences\[0\] is 4"),
    ({"admit": {0: replace(STATE, tokens=(9,))}}, r"admitted sequences\[2\] is 9, expected 0 to 7"),
    ({"admit": {0: replace(STATE, tokens=(5,) * 32)}}, "a sequence of 34 tokens, 2 of them in its"),
    ({"scored": ScoredRows(ints(4), np.array([7]), ints(0))}, r"scored_rows\[0\] is 4, .* to 3"),
    ({"scored": ScoredRows(ints(1), np.array([8]), ints(0))}, r"scored_targets\[0\] is 8"),
    ({"scored": ScoredRows(ints(1), np.array([7]), ints(21))}, r"scored_counts\[0\] is 21"),
    ({"scored": ScoredRows(ints(1, 2), np.array([7]), ints(0, 0))}, "targets of scored rows has 1"),
    ({"scored": ScoredRows(ints(1), np.array([7]), ints(0, 0))}, "counts of scored rows has 2"),
    ({"scored": ScoredRows(ints(1), np.array([7]), ints(0)), "logits": "all"}, "cannot have"),
    ({"scored": ScoredRows(ints(*[1] * 7), np.array([7] * 7), ints(*[0] * 7))}, "and 9 logits"),
    ({"memory": None}, "memory_starts has 0 elements, expected 2"),
    ({"memory": EncoderOutputs(ints(0, 3), ints(16, 17))},
     "17 rows of encoder output at 48 exceed"),
    ({"memory": EncoderOutputs(ints(0, -1), ints(1, 1))}, "1 rows of encoder output at -16"),
    ({"memory": EncoderOutputs(ints(0, 0), ints(1, -1))}, "-1 rows of encoder output at 0"),
    ({"memory": EncoderOutputs(ints(0, 0), ints(1))},
     "encoder_sequence_length has 1 elements, expected 2"),
])
def test_invalid_steps_are_refused(extension, program, changes, match):
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 8)
    with pytest.raises(extension.CudaError, match=match):
        check_step(program, step(**changes))


@pytest.mark.parametrize(("past", "tables", "own_from"), [
    ((32768, 33000), ([1, 2], [1, 2]), (32768, 32768)),  # blocks of 16,384
    ((32767, 33000), ([1, 2], [1, 2]), ()),              # the second block is still written to
    ((32768, 33000), ([1, 2], [1, 3]), ()),              # too few to be beneficial
    ((35000, 35000, 17000), ([1, 2], [1, 3], [1, 4]), (16384,) * 3),
    ((35000, 35000, 35000, 100), ([5, 2], [1, 3], [1, 3], [1, 3]), (0, 32768, 32768, 0)),
    ((35000,) * 6, ([5, 6], [5, 6], [5, 2], [5, 3], [1, 3], [1, 4]), (16384,) * 4 + (0, 0)),
    ((16384, 16384), ([1, 2], [3, 4]), ()),
])
def test_the_shared_prefix_of_a_step_is_found(extension, past, tables, own_from):
    program = extension.Program(dtype="float32", max_batch=8, max_tokens=16, max_logits=8,
                                max_seq_len=65536, block_size=16384, token_bytes=256,
                                logit_bytes=64)
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 8)
    blocks = [[*table, 7] for table in tables]

    def prefix(new):
        made = Step.of([[5] * new] * len(past), [*past], blocks, [*range(len(past))])
        return program.check_step(8, *step_arrays(made))

    assert prefix(1) == (max(own_from, default=0), [*own_from])
    assert prefix(2) == (0, [])


def drafted(tokens, drafts, **changes):
    """A step of one sequence with drafts, at position 7."""
    made = Step.of([tokens], [7], [[3, 2]], [2], num_drafts=[drafts], memory=NOWHERE.take([0]))
    return replace(made, **changes)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize(("made", "problem"), [
    (drafted([5, 6, 7], 2), None),
    (drafted([5, 6, 7], 2, masks={2: np.zeros((3, 1), np.uint32)}), None),
    (drafted([5, 6, 7], 3), "3 drafts of sequence . exceed its tokens"),
    (drafted([5, 6, -1], 2), "token 2 is the last one of slot|draft 2 is -1, expected 0 to 14"),
    (drafted([5, 6, 15], 2), "draft 2 is 15, expected 0 to 14"),
    (drafted([5, 6, 7, 8, 9], 4), "1 sampled sequences and 4 drafts exceeds the engine's limit"),
    (drafted([5, 6, 7], 2, logits="sampled"), None),
    (drafted([5, 6, 7], 2, candidates=2), "cannot return candidates or the logits of all"),
    (drafted([5, 6, 7], 2, logits="all"), "cannot return candidates or the logits of all")])
def test_steps_with_drafts(extension, program, rows, made, problem):
    """As a chunk, and with a row for each draft."""
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 15)
    arrays = step_arrays(made, 16, max_rows=rows)
    assert arrays[6] == (rows == 4 and made.num_tokens == 1 + made.num_drafts[0] <= rows)
    if problem is None:
        program.check_step(8, *arrays)
        return
    with pytest.raises(extension.CudaError, match=problem):
        program.check_step(8, *arrays)


def test_there_may_be_fewer_states_than_rows(extension):
    program = extension.Program(dtype="float32", **LIMITS, max_states=2, token_bytes=256,
                                logit_bytes=64)
    program.add_state("float32", [3, 8])
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 15)
    arrays = step_arrays(Step.of([[5]], [0], [[3]], [2]))
    program.check_step(8, *arrays[:16], ints(1), ints(1), *arrays[18:])
    with pytest.raises(extension.CudaError, match=r"state_slots\[0\] is 2, expected 0 to 1"):
        program.check_step(8, *arrays[:16], ints(2), ints(1), *arrays[18:])


@pytest.mark.parametrize("rows", [0, 4])
def test_states_of_steps_with_drafts_are_by_sequence(extension, program, rows):
    """As a chunk, and with a row for each draft and each uncommitted token."""
    program.add_state("float32", [3, 8])
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 15)
    made = Step.of([[9], [5, 6, 7]], [0, 0], [[4, 5], [3, 2]], [2, 0], num_drafts=[0, 1],
                   num_uncommitted=[0, 1], memory=NOWHERE)
    states = StateSlots(EngineLimits(8, 8, 16, 4, 16, 1, keeps_states=True))
    arrays = step_arrays(made, 16, states, rows)
    assert arrays[6] == (rows == 4)
    assert (len(arrays[2]), arrays[16].tolist(), arrays[17].tolist()) == (
        4 if rows else 2, [2, 0], [1, 2])
    program.check_step(8, *arrays)
    for slots, commits, match in ((ints(2, 0, 0, 0), ints(1, 2), "state_slots has 4 elements"),
                                  (ints(2, 0), ints(1, 4), r"commit_lens\[1\] is 4, expected 1"),
                                  (ints(2, 2), ints(1, 2), "state_slots has 2 twice")):
        with pytest.raises(extension.CudaError, match=match):
            program.check_step(8, *arrays[:16], slots, commits, *arrays[18:])


def test_more_than_the_limits_is_refused(extension, program):
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 8)
    many = Step.of([[5] * 9], [0], [[1, 2]], [0], logits="all", memory=NOWHERE.take([0]))
    with pytest.raises(extension.CudaError, match="9 tokens and 9 logits exceeds .* 128 and 8"):
        check_step(program, many)
    wide = Step.of([[5]] * 5, [0] * 5, [[1]] * 5, range(5), memory=NOWHERE.take([0] * 5))
    with pytest.raises(extension.CudaError, match="a batch of 5 exceeds max_batch_size 4"):
        check_step(program, wide)


NO_ROWS = np.empty(0, np.uint8)


@pytest.mark.parametrize(("rows", "starts", "match"), [
    (np.array([0, 1, 2, 64]), ints(0, 4), r"memory_rows\[3\] is 64, expected 0 to 63"),
    (np.array([0, 1, 2]), ints(0, 4), "memory_rows has 3 elements, expected 4"),
    (np.arange(4), ints(0, 2), "cu_seqlens go from 0 to 2, expected 0 to num_tokens 4"),
    (np.arange(4), ints(0, 1, 2, 3, 4, 5), "5 prompts of 4 tokens exceed"),
    (np.arange(4), ints(), "a batch of -1 has no sequences"),
])
def test_invalid_encoder_prompts_are_refused(extension, program, rows, starts, match):
    program.check_encode(np.arange(4), NO_ROWS, np.arange(4), ints(0, 4), np.arange(4))
    with pytest.raises(extension.CudaError, match=match):
        program.check_encode(np.arange(4), NO_ROWS, np.arange(4), starts, rows)
    with pytest.raises(extension.CudaError, match=r"position_ids\[3\] is 16"):
        program.check_encode(np.arange(4), NO_ROWS, np.array([0, 1, 2, 16]), ints(0, 4),
                             np.arange(4))


@pytest.fixture
def slotted(extension):
    """A float32 program with slots for adapters, and the inputs of a GemmBiasAct [8] to [16]."""
    made = extension.Program(dtype="float32", **LIMITS, max_loras=3, max_lora_rank=8,
                             token_bytes=256, logit_bytes=64)
    for name in ("cu_seqlens", "past_lens", "lora_ids", "lora_logits_ids", "block_table"):
        made.add_input(name, "int32")
    for name in ("input_ids", "logits_indices"):
        made.add_input(name, "int64")
    return made


SLOTS, RANKS = -7, -8


def adapted(p, **changes):
    """The inputs of a GemmBiasAct with adapters, and its output."""
    x, y = (p.add_value("float32", [T, width], 0, False) for width in (8, 16))
    given = {"x": x, "weight": p.add_weight("float32", [16, 8]), **dict.fromkeys("abcdefgh", -1),
             "lora_ids": 2, "down": p.add_adapters("float32", [1, SLOTS, RANKS, 8]),
             "up": p.add_adapters("float32", [SLOTS, 16, RANKS]),
             "ranks": p.add_adapters("int32", [SLOTS])}
    return [*{**given, **{name: make(p) for name, make in changes.items()}}.values()], [y]


def test_nodes_take_adapters_in_slots(slotted):
    slotted.add_node("GemmBiasAct", {}, *adapted(slotted))
    inputs, outputs = adapted(slotted, down=lambda p: p.add_adapters(
        "float32", [2, SLOTS, RANKS, 8]))
    slotted.add_node("GemmBiasAct", {}, [*inputs, slotted.add_weight("int32", [16])], outputs)
    slotted.set_logits(slotted.add_value("float32", [L, 16], 0, True), 8)
    made = replace(step(), memory=None)
    for ids in (ints(), ints(2, -1), ints(0, 0)):
        slotted.check_step(8, *step_arrays(replace(made, adapters=ids)))
    slotted.check_step(8, *step_arrays(made)[:25], ints(0, -1, 2, 0), *step_arrays(made)[26:])


@pytest.fixture
def with_embeds(slotted):
    """A program whose embeddings may be replaced by rows of 8 numbers."""
    ids, rows = slotted.add_input("embed_ids", "int32"), slotted.add_embeds("embeds", 8)
    x, y = (slotted.add_value("float32", [T, 8], offset, False) for offset in (0, 32))
    slotted.add_node("InputEmbeds", {}, [x, rows, ids], [y])
    slotted.set_logits(slotted.add_value("float32", [L, 16], 0, True), 8)
    return slotted


def test_steps_may_have_rows_in_place_of_embeddings(with_embeds):
    made = replace(step(), memory=None)
    rows = np.zeros((2, 8), np.float32)
    for ids in (ints(0, 1, -1, 0), ints(-1, -1, -1, -1)):
        with_embeds.check_step(8, *step_arrays(replace(made, embeds=rows, embed_ids=ids)))
    with_embeds.check_step(8, *step_arrays(made))


@pytest.mark.parametrize(("rows", "ids", "match"), [
    ((2, 8), (0, 2, -1, 0), r"embed_ids\[1\] is 2, expected -1 to 1"),
    ((2, 8), (0, -2, -1, 0), r"embed_ids\[1\] is -2, expected -1 to 1"),
    ((2, 8), (0,), "embed_ids has 1 elements, expected 4"),
    ((2, 7), (0, -1, 0, 0), "embeds has 14 elements, expected 8"),
    ((5, 8), (0, 2, 4, 1), "5 rows in place of the embeddings of 4 tokens"),
    ((1, 8), (), "embeds without embed_ids has 8 elements, expected 0")])
def test_invalid_rows_are_refused(extension, with_embeds, rows, ids, match):
    made = replace(step(), memory=None, embeds=np.zeros(rows, np.float32), embed_ids=ints(*ids))
    with pytest.raises(extension.CudaError, match=match):
        with_embeds.check_step(8, *step_arrays(made))


@pytest.fixture
def by_axis(with_embeds):
    """A program that also takes positions by axis, and rows of a deep layer."""
    with_embeds.add_input("rotary_positions", "int32")
    ids, rows = 7, with_embeds.add_embeds("deep_embeds_0", 8)  # embed_ids is the eighth input
    x, y = (with_embeds.add_value("float32", [T, 8], offset, False) for offset in (0, 32))
    with_embeds.add_node("AddEmbeds", {}, [x, rows, ids], [y])
    return with_embeds


def test_rows_of_deep_layers_and_positions_by_axis(by_axis):
    made = replace(step(), memory=None, embeds=np.zeros((2, 8), np.float32),
                   embed_ids=ints(0, 1, -1, 0))
    deep = np.zeros((1, 2, 8), np.float32)
    for changes in ({}, {"deep_embeds": deep},
                    {"rotary_positions": np.zeros((4, 3), np.int32)}):
        by_axis.check_step(8, *step_arrays(replace(made, **changes)))


@pytest.mark.parametrize(("changes", "match"), [
    ({"deep_embeds": np.zeros((1, 3, 8), np.float32)}, "deep_embeds has 24 elements, expected 16"),
    ({"deep_embeds": np.zeros((2, 2, 8), np.float32)}, "deep_embeds has 32 elements, expected 16"),
    ({"embeds": np.zeros((0, 0), np.float32), "embed_ids": ints(),
      "deep_embeds": np.zeros((1, 2, 8), np.float32)},
     "deep_embeds without embed_ids has 16 elements, expected 0"),
    ({"rotary_positions": np.zeros((3, 3), np.int32)}, "rotary_positions has 9 elements"),
    ({"rotary_positions": np.full((4, 3), -1, np.int32)}, r"rotary_positions\[0\] is -1"),
    ({"rotary_positions": np.full((4, 3), 2**20, np.int32)}, "is 1048576, expected 0 to"),
])
def test_invalid_rows_of_deep_layers_and_positions_by_axis_are_refused(extension, by_axis, changes,
                                                                       match):
    made = replace(step(), memory=None, **{"embeds": np.zeros((2, 8), np.float32),
                                           "embed_ids": ints(0, 1, -1, 0), **changes})
    with pytest.raises(extension.CudaError, match=match):
        by_axis.check_step(8, *step_arrays(made))


@pytest.mark.parametrize(("declare", "match"), [
    (lambda p: p.add_embeds("embeds", 8), "input embeds is declared twice"),
    (lambda p: p.add_embeds("deep_embeds_0", 4), "rows of 4 numbers, others of 8"),
    (lambda p: p.add_embeds("deep_embeds_x", 8), "unknown input of embeddings 'deep_embeds_x'"),
    (lambda p: p.add_embeds("deep_embeds_999", 8), "unknown input of embeddings"),
    (lambda p: p.add_input("rotary_positions", "int64"), "rotary_positions is of int32, not int64"),
])
def test_invalid_inputs_of_rows_are_refused(extension, with_embeds, declare, match):
    with pytest.raises(extension.CudaError, match=match):
        declare(with_embeds)


def test_positions_by_axis_need_a_program_that_takes_them(extension, with_embeds):
    made = replace(step(), memory=None, rotary_positions=np.zeros((4, 3), np.int32))
    with pytest.raises(extension.CudaError, match="positions by axis, which the program does not"):
        with_embeds.check_step(8, *step_arrays(made))


def test_rows_need_a_program_that_takes_them(extension, slotted):
    slotted.set_logits(slotted.add_value("float32", [L, 16], 0, True), 8)
    made = replace(step(), memory=None, embeds=np.zeros((1, 8), np.float32),
                   embed_ids=ints(0, -1, -1, -1))
    with pytest.raises(extension.CudaError, match="which the program does not take"):
        slotted.check_step(8, *step_arrays(made))
    with pytest.raises(extension.CudaError, match="unknown engine input 'embeds'"):
        slotted.add_input("embeds", "float32")


@pytest.mark.parametrize(("changes", "match"), [
    (dict(down=lambda p: -1), "takes lora_ids, lora_down, lora_up and lora_ranks together"),
    (dict(lora_ids=lambda p: -1), "takes lora_ids, lora_down, lora_up and lora_ranks together"),
    (dict(lora_ids=lambda p: 0), "is not the step's lora_ids"),
    (dict(lora_ids=lambda p: 3), "lora_ids has shape|lora_ids"),
    (dict(down=lambda p: p.add_weight("float32", [1, 3, 8, 8])), "'lora_down', is not adapters"),
    (dict(ranks=lambda p: p.add_weight("int32", [3])), "'lora_ranks', is not adapters"),
    (dict(weight=lambda p: p.add_adapters("float32", [SLOTS, 16, RANKS])),
     "'weight', is adapters, which it does not take"),
    (dict(down=lambda p: p.add_adapters("float32", [1, SLOTS, RANKS, 16])), "lora_down"),
    (dict(up=lambda p: p.add_adapters("float32", [SLOTS, 8, RANKS])), "lora_up"),
    (dict(down=lambda p: p.add_adapters("float32", [2, SLOTS, RANKS, 8])),
     "lora_down without lora_part"),
])
def test_nodes_with_other_adapters_are_refused(extension, slotted, changes, match):
    inputs, outputs = adapted(slotted, **changes)
    with pytest.raises(extension.CudaError, match=match):
        slotted.add_node("GemmBiasAct", {}, inputs, outputs)


@pytest.mark.parametrize(("dtype", "shape", "match"), [
    ("float32", [3, 16, 8], "adapters of 3 dimensions, expected the slots and ranks"),
    ("float32", [1, SLOTS, 8, 8], "adapters of 4 dimensions"),
    ("float32", [SLOTS, RANKS], "adapters of 2 dimensions"), ("int32", [3], "of 1 dimensions"),
    ("float32", [SLOTS], "of 1 dimensions"), ("float32", [SLOTS, 0, RANKS], "dimension 0"),
    ("float32", [SLOTS, 2**45, RANKS], "out of range"),
    ("bfloat16", [SLOTS, 16, RANKS], "adapters of bfloat16, expected float32")])
def test_invalid_adapters_are_refused(extension, program, slotted, dtype, shape, match):
    with pytest.raises(extension.CudaError, match=match):
        slotted.add_adapters(dtype, shape)
    with pytest.raises(extension.CudaError, match="has no slots for adapters"):
        program.add_adapters(dtype, shape)


@pytest.mark.parametrize(("ids", "match"), [
    (ints(0, 3), r"lora_ids\[1\] is 3, expected -1 to 2"), (ints(-2, 0), r"lora_ids\[0\] is -2"),
    (ints(0), "lora_ids has 1 elements, expected 4")])
def test_steps_with_invalid_adapters_are_refused(extension, program, slotted, ids, match):
    made = step_arrays(replace(step(), memory=None))
    slotted.set_logits(slotted.add_value("float32", [L, 16], 0, True), 8)
    tokens = np.repeat(ids, [1, 3]).astype(np.int32) if len(ids) == 2 else ids
    with pytest.raises(extension.CudaError, match=match):
        slotted.check_step(8, *made[:25], tokens, *made[26:])
    program.set_logits(program.add_value("float32", [L, 16], 0, True), 8)
    with pytest.raises(extension.CudaError, match="LoRA adapters, which the program does not take"):
        check_step(program, replace(step(), adapters=ids[[0, 0]]))


def test_a_rank_of_slots_is_whole_vectors(extension):
    with pytest.raises(extension.CudaError, match="max_lora_rank 12 is not a multiple of 8"):
        extension.Program(dtype="float32", **LIMITS, max_loras=1, max_lora_rank=12,
                          token_bytes=256, logit_bytes=64)
