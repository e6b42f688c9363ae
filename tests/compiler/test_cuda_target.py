"""The CUDA target: its program, run with the ops' references in its arena, and its graph.onnx."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import families
import lora
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file
from schedule_interpreter import Interpreter, Interpreters

import llmc
from llmc.artifacts.adapter import load_adapter
from llmc.artifacts.manifest import hash_file, read_manifest
from llmc.artifacts.program import ELEMENTWISE, read_program
from llmc.runtime.collectives import Communicator
from llmc.runtime.core.step import Step
from llmc.runtime.engines import cuda
from llmc.runtime.inspection import summarize


@pytest.mark.parametrize("family", families.once(
    ["llama", "gpt2", "qwen3", "gpt_neox", "gemma2", "granite", "cohere", "bloom", "mpt", "olmo2",
     "apertus"]))
def test_the_schedule_gives_transformers_logits(family, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    interpreter = Interpreter(tmp_path / "case")
    first, then = interpreter.run(tokens[:8], 0), interpreter.run(tokens[8:], 8)
    families.assert_close(np.concatenate([first, then]), families.reference_logits(model, tokens))


@pytest.mark.parametrize(("family", "changes", "tp_size"), [
    *(pytest.param(family, {}, tp_size,
                   marks=[pytest.mark.thorough] * (family == "gemma4_unified_text"))
      for family in families.OWN_ATTENTION for tp_size in (1, 2)),
    ("gemma4_text", {}, 4), ("gemma4_text", families.GEMMA4_LARGE, 2),
    pytest.param("gemma4_text", families.GEMMA4_MOE, 1, marks=pytest.mark.thorough),
    ("gemma4_text", families.GEMMA4_MOE, 4)])
def test_custom_attention_of_families_gives_transformers_logits_and_tokens(family, changes, tp_size,
                                                                           tmp_path):
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 tp_size=tp_size)
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 20).tolist()
    ranks = Interpreters(tmp_path / "case")
    for own in ranks._on_all(lambda rank: np.concatenate(
            [rank.run(tokens[:12], 0), rank.run(tokens[12:13], 12), rank.run(tokens[13:], 13)])):
        families.assert_close(own, families.reference_logits(model, tokens))
    assert ranks.greedy(tokens[:5], 3) == families.greedy(model, tokens[:5], 3)


# The ONNX dtype and the logits' tolerance: 16-bit rounding is 2^-11 or 2^-8.
ONNX_DTYPES = {"float32": (onnx.TensorProto.FLOAT, 1e-5),
               "float16": (onnx.TensorProto.FLOAT16, 4e-3),
               "bfloat16": (onnx.TensorProto.BFLOAT16, 3e-2)}


@pytest.mark.parametrize(("family", "dtype", "quantize"), [
    ("llama", "float32", ""), ("gpt2", "float32", ""), ("llama", "float16", ""),
    ("gpt2", "bfloat16", ""), ("gemma2", "float16", ""), ("gemma2", "bfloat16", ""),
    ("falcon_h1", "bfloat16", ""), ("gemma4_text", "float16", ""), ("apertus", "bfloat16", ""),
    ("mixtral", "float16", ""), ("llama", "float16", "int8"), ("gpt2", "bfloat16", "int8"),
    ("llama", "bfloat16", "fp8")])
def test_graph_onnx_is_typed_and_gives_transformers_logits(family, dtype, quantize, tmp_path):
    kind, tolerance = ONNX_DTYPES[dtype]
    tolerance += {"": 0, "int8": 0.02, "fp8": 0.05}[quantize]
    model = families.tiny_model(family)
    case = tmp_path / "case"
    manifest = llmc.compile(families.save(model, tmp_path / "hf"), case, target="cuda", dtype=dtype,
                            quantize=quantize)
    path = case / "chip0" / "graph.onnx"
    assert "chip0/graph.onnx" in {entry.path for entry in manifest.files}
    graph = onnx.load(path, load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True).graph
    kinds = {value.name: value.type.tensor_type.elem_type
             for value in (*inferred.value_info, *inferred.output)}
    program = read_program(case / "chip0" / "schedule.json")
    expected = {kind, onnx.TensorProto.BOOL}
    if family in families.MIXTURES:  # selected experts and their scores
        expected |= {onnx.TensorProto.INT64, onnx.TensorProto.FLOAT}
    assert {kinds[tensor.name] for tensor in program.tensors if tensor.kind == "value"} <= expected
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    families.assert_close(onnx_logits(graph, path.parent, tokens)[:, :families.VOCAB],
                          families.reference_logits(model, tokens), tolerance)


@pytest.mark.parametrize(("family", "tp_size", "rounded"), [
    ("llama", 2, 5), ("gemma2", 1, 7), ("starcoder2", 1, 2), ("cohere", 1, 4), ("bloom", 1, 0),
    *(pytest.param(*each, marks=pytest.mark.thorough) for each in (
        ("llama", 1, 5), ("qwen3", 1, 5), ("phi3", 1, 5), ("gpt_neox", 1, 2),
        ("gemma4_text", 1, 7), ("olmo2", 1, 5), ("qwen3_next", 1, 0)))])
def test_statically_scaled_activations_are_passed_in_fp8(family, tp_size, rounded, tmp_path):
    """Attention without a bias and gates output FP8 if all readers have the same scale.

    The last attention does not, as few of its rows are selected.
    """
    model = families.tiny_model(family, **({"intermediate_size": 192} if family in (
        "llama", "gemma2", "qwen3", "phi3", "cohere", "olmo2") else {}))
    case = tmp_path / "case"
    hf = families.to_static_fp8(
        families.save(model, tmp_path / "hf"), tmp_path / "static",
        {"o_proj": 0.0015, "down_proj": 0.0005, "_proj": 0.003, "dense": 0.002, "c_": 0.002,
         "query_key_value": 0.003})
    manifest = llmc.compile(hf, case, target="cuda", dtype="float16", tp_size=tp_size)
    found, = (report.matches for report in manifest.passes if report.name == "rounded_outputs")
    assert found.get("rounded", 0) == rounded
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    expected = Interpreters(case).compute(Step.of([tokens], [0], [[3, 0, 2, 1]], [0],
                                                  logits="all"))
    llmc.compile(hf, tmp_path / "exact", target="cuda")
    right = Interpreters(tmp_path / "exact").compute(Step.of([tokens], [0], [[3, 0, 2, 1]], [0],
                                                             logits="all"))
    families.assert_close(expected, right, 0.05)
    if tp_size > 1 or not rounded:
        return
    path = case / "chip0" / "graph.onnx"
    graph = onnx.load(path, load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True).graph
    kinds = Counter(value.type.tensor_type.elem_type for value in inferred.value_info)
    assert kinds[onnx.TensorProto.FLOAT8E4M3FN] == rounded
    families.assert_close(onnx_logits(graph, path.parent, tokens)[:, :families.VOCAB], right, 0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_onnx_takes_adapters_in_slots(dtype, tmp_path):
    model = families.tiny_model("llama")
    hf, case = families.save(model, tmp_path / "hf"), tmp_path / "case"
    manifest = llmc.compile(hf, case, target="cuda", dtype=dtype, enable_lora=True)
    factors = lora.make(model, lora.linear_layers(model))
    llmc.compile_adapter(lora.save(tmp_path / "peft", factors), case, tmp_path / "adapter")
    _, (matrices,) = load_adapter(tmp_path / "adapter", manifest, hash_file(
        case / "model_info.json"))
    graph = onnx.load(case / "chip0" / "graph.onnx", load_external_data=False)
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    expected = families.reference_logits(lora.merged(model, factors), tokens)
    families.assert_close(onnx_logits(graph, case / "chip0", tokens, matrices)[:, :families.VOCAB],
                          expected, ONNX_DTYPES[dtype][1])


def onnx_logits(graph, directory, tokens, adapter=None):
    """Return ONNX Runtime's logits of a prompt as float32; optionally with an adapter."""
    graph.graph.node.append(onnx.helper.make_node("Cast", ["logits"], ["logits_float32"],
                                                  to=onnx.TensorProto.FLOAT))
    graph.graph.output.append(onnx.ValueInfoProto(name="logits_float32"))
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                     str(directory))
    session = ort.InferenceSession(graph.SerializeToString(), options,
                                   providers=["CPUExecutionProvider"])
    step = Step.of([tokens], [0], [[3, 0, 2, 1]], [0], logits="all",
                   adapters=[0] if adapter else ())
    slots = {}
    for layer, (down, up) in (adapter or {}).items():
        slots |= {f"{layer}.lora_down": down[:, None], f"{layer}.lora_up": up[None],
                  f"{layer}.lora_ranks": np.array(up.shape[-1:], np.int32)}
    feeds = {}
    for value in graph.graph.input:
        described = value.type.tensor_type
        own = {"input_ids": "token_ids", "block_table": "block_tables", "state_slots": "slots",
               "lora_logits_ids": "lora_ids"}
        kind, array = described.elem_type, getattr(step, own.get(value.name, value.name), None)
        array = slots.get(value.name, array)
        if array is None and value.name.endswith("lora_ranks"):
            array = np.zeros(1, np.int32)
        if array is None:  # 4 blocks of 16, or states; NumPy has no bfloat16, so bits
            sizes = {"num_blocks": 4, "num_states": 4, "block_size": 16, "max_loras": 1,
                     "max_lora_rank": 8}
            array = np.zeros([sizes.get(dim.dim_param, dim.dim_value)
                              for dim in described.shape.dim],
                             np.uint32 if kind == onnx.TensorProto.FLOAT else np.uint16)
        feeds[value.name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
    return session.run_with_ort_values(["logits_float32"], feeds)[0].numpy()


def test_every_attention_has_its_cache_in_blocks(tiny_hf, tmp_path):
    manifest = llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    assert manifest.kv_cache_layout == "paged"
    schedule = read_program(tmp_path / "case" / "chip0" / "schedule.json")
    number, tensor = next((number, tensor) for number, tensor in enumerate(schedule.tensors)
                          if tensor.name == "block_table")
    assert (tensor.kind, tensor.dtype, tensor.shape) == ("input", "int32", ("batch", "max_blocks"))
    attention = [node for node in schedule.nodes if node.op == "CausalAttention"]
    assert len(attention) == manifest.dims.num_layers
    assert {node.inputs[9] for node in attention} == {number}
    assert {schedule.tensors[node.inputs[index]].shape for node in attention for index in (1, 2)} \
        == {("num_blocks", manifest.dims.num_kv_heads, "block_size", manifest.dims.head_dim)}


def test_sequences_share_blocks_until_they_are_copied(tiny_hf, tiny_model, tmp_path):
    """Two continuations of one prompt, the second in a copy of its last block."""
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    interpreter = Interpreter(tmp_path / "case")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    interpreter.compute(Step.of([tokens[:6]], [0], [[7, 2]], [0]))
    logits = interpreter.compute(Step.of(
        [tokens[6:], [5, 6, 7]], [6, 6], [[7, 2, 9], [7, 4, 1]], [0, 1], logits="all",
        copies=np.array([[2, 4]], np.int32)))
    families.assert_close(logits[:6], families.reference_logits(tiny_model, tokens)[6:])
    families.assert_close(logits[6:], families.reference_logits(
        tiny_model, [*tokens[:6], 5, 6, 7])[6:])


def test_16_bit_weights_have_float32_rope_tables(tiny_hf, tiny_model, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="float16")
    weights = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    table = tiny_model.model.embed_tokens.weight.detach().to(torch.float16).numpy()
    rows = next(array for array in weights.values() if array.shape[1:] == table.shape[1:]
                and np.array_equal(array[:len(table)], table))
    assert rows.dtype == np.float16
    assert {array.dtype for name, array in weights.items() if name.startswith("rotary")} \
        == {np.dtype(np.float32)}


def test_arena_memory_of_dead_values_is_reused(tiny_hf, tmp_path):
    """The arena is a fraction of the size of all values."""
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    schedule = read_program(tmp_path / "case" / "chip0" / "schedule.json")
    together = sum(4 * t.shape[-1] for t in schedule.tensors if t.kind == "value")
    assert schedule.token_bytes < together / 4


@pytest.mark.parametrize(("family", "tp_size"), [("llama", 2), ("gpt2", 3), ("gemma2", 2)])
def test_all_ranks_together_give_transformers_logits(family, tp_size, tmp_path):
    model = families.tiny_model(family)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 tp_size=tp_size)
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 9).tolist()
    communicator = Communicator(tp_size)
    with ThreadPoolExecutor(tp_size) as threads:
        logits = list(threads.map(
            lambda rank: Interpreter(tmp_path / "case", rank, communicator).run(tokens, 0),
            range(tp_size)))
    for rank in logits:
        families.assert_close(rank, families.reference_logits(model, tokens))


def test_running_without_the_extension_names_the_package(tiny_hf, tmp_path, monkeypatch):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    monkeypatch.setattr("llmc.runtime.engines.cuda.find_spec", lambda name: None)
    with pytest.raises(llmc.LlmcError, match=r"has no CUDA engine; install it"):
        llmc.LLM(tmp_path / "case")


def test_a_broken_program_raises_an_llmc_error(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    path = tmp_path / "case" / "chip0" / "schedule.json"
    path.write_text(path.read_text().replace('"op": "Embedding"', '"op": 7'))
    with pytest.raises(llmc.LlmcError, match="is not a valid program: nodes.0.op"):
        read_program(path)


def test_memory_is_counted_in_the_model_s_dtype(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="bfloat16")
    manifest = read_manifest(tmp_path / "case")
    dims = manifest.dims
    assert summarize(manifest)["chips"][0]["kv_cache_bytes"] == \
        2 * 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * dims.max_seq_len


class _Extension:
    """A stub of the extension for checks before loading."""

    architectures = "80 90"

    def __init__(self, capability, ops):
        self.capability, self.ops = capability, ops

    def compute_capability(self, device):
        return self.capability

    def plugin_types(self):
        return [SimpleNamespace(name=name, version=version) for name, version in self.ops.items()]


@pytest.mark.parametrize(("capability", "versions", "match"), [
    ((8, 9), {}, "was compiled for compute capability 9.0, GPU 0 has 8.9"),
    ((9, 0), {"CausalAttention": 8},
     "uses version 7 of CausalAttention, this CUDA engine has version 8"),
    ((9, 0), {"NormGemm": None}, "uses version 2 of NormGemm, this CUDA engine has none"),
])
def test_models_larger_than_the_gpu_or_engine_limits_are_refused(tiny_hf, tmp_path, capability,
                                                                 versions, match):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", compute_capability="9.0")
    manifest = read_manifest(tmp_path / "case")
    ops = {**manifest.ops, **versions}
    extension = _Extension(capability, {name: v for name, v in ops.items() if v})
    with pytest.raises(llmc.LlmcError, match=match):
        cuda.check_fit(extension, manifest, 0)


def test_an_unsupported_gpu_architecture_is_refused(tiny_hf, tmp_path):
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda")
    manifest = read_manifest(tmp_path / "case")
    cuda.check_fit(_Extension((8, 6), manifest.ops), manifest, 0)
    with pytest.raises(llmc.LlmcError, match=r"capabilities 8.0, 9.0, GPU 0 has 12.0; build it"):
        cuda.check_fit(_Extension((12, 0), manifest.ops), manifest, 0)


@pytest.mark.parametrize(("target", "kv_dtype", "message"), [
    ("cpu", "float8_e4m3fn", "target 'cpu' has no kv_dtype 'float8_e4m3fn'; leave it out$"),
    ("cuda", "int4", "no kv_dtype 'int4'; leave it out, or give float8_e4m3fn$")])
def test_a_kv_dtype_unsupported_by_a_target_is_refused(tiny_hf, tmp_path, target, kv_dtype,
                                                       message):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(tiny_hf, tmp_path / "case", target=target, kv_dtype=kv_dtype)


def test_a_kv_dtype_without_a_kv_cache_is_refused(tmp_path):
    hf = families.save(families.tiny_model("mamba2", num_heads=32, head_dim=4), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="'Mamba2ForCausalLM' has no KV cache; leave it out"):
        llmc.compile(hf, tmp_path / "case", target="cuda", kv_dtype="float8_e4m3fn")


def test_float8_caches_take_one_byte_per_element(tiny_hf, tmp_path):
    manifests = [llmc.compile(tiny_hf, tmp_path / f"case{kv_dtype}", target="cuda",
                              dtype="bfloat16", kv_dtype=kv_dtype)
                 for kv_dtype in ("", "float8_e4m3fn")]
    assert [manifest.kv_dtype for manifest in manifests] == ["bfloat16", "float8_e4m3fn"]
    wide, narrow = (summarize(manifest)["chips"][0]["kv_cache_bytes"] for manifest in manifests)
    assert wide == 2 * narrow
    schedule = read_program(tmp_path / "casefloat8_e4m3fn" / "chip0" / "schedule.json")
    assert {tensor.dtype for tensor in schedule.tensors if tensor.kind == "cache"} \
        == {"float8_e4m3fn"}


@pytest.mark.parametrize(("target", "capability", "error"), [
    ("cpu", "9.0", "target 'cpu' has no compute_capability; leave it out"),
    ("cuda", "sm_90", "compute_capability 'sm_90' is not a number like 9.0")])
def test_compute_capability_is_checked(tiny_hf, tmp_path, target, capability, error):
    with pytest.raises(llmc.LlmcError, match=error):
        llmc.compile(tiny_hf, tmp_path / "case", target=target, compute_capability=capability)


def test_unsupported_ops_raise_an_llmc_error(tmp_path, monkeypatch):
    monkeypatch.delitem(ELEMENTWISE, "Where")
    hf_dir = families.save(families.tiny_model("apertus"), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="the cuda target has no kernel for it; compile for"):
        llmc.compile(hf_dir, tmp_path / "case", target="cuda", dtype="bfloat16")
    assert not (tmp_path / "case").exists()


@pytest.mark.parametrize(("family", "changes", "what"), [
    ("gemma4_text", {**families.GEMMA4_SHALLOW, "global_head_dim": 36},
     "CausalAttention with head_dim 36"),
    ("mamba2", {"conv_kernel": 9}, "CausalConv1d with kernel_size 9")])
def test_sizes_without_a_kernel_are_refused(family, changes, what, tmp_path):
    hf_dir = families.save(families.tiny_model(family, **changes), tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match=f"'cuda' has no kernel for llmc::{what} "):
        llmc.compile(hf_dir, tmp_path / "case", target="cuda")


@pytest.mark.parametrize(("family", "changes"), [
    ("deepseek_v3", {"qk_rope_head_dim": 4}),
    ("mamba2", {"num_heads": 32, "head_dim": 4})])
def test_head_sizes_of_other_ops_are_not_restricted(family, changes, tmp_path):
    model = families.tiny_model(family, **changes)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda")
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    families.assert_close(Interpreter(tmp_path / "case").run(tokens, 0),
                          families.reference_logits(model, tokens))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_keys_of_several_layers_are_cached_side_by_side(tp_size, tmp_path):
    """Full keys and values of MLA, as its rotary embedding has a scale."""
    model = families.tiny_model("deepseek_v2", qk_nope_head_dim=16, **families.rope(
        "yarn", factor=4.0, original_max_position_embeddings=16))
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda",
                 tp_size=tp_size)
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    for own in Interpreters(tmp_path / "case")._on_all(lambda rank: rank.run(tokens, 0)):
        families.assert_close(own, families.reference_logits(model, tokens))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_a_shared_expert_without_features_is_removed(family, tmp_path):
    model = families.tiny_model(family, shared_expert_intermediate_size=0)
    llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", target="cuda")
    schedule = read_program(tmp_path / "case" / "chip0" / "schedule.json")
    assert all(0 not in tensor.shape for tensor in schedule.tensors)
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 12).tolist()
    families.assert_close(Interpreter(tmp_path / "case").run(tokens, 0),
                          families.reference_logits(model, tokens))


def test_max_seq_len_defaults_to_the_model_s_context_length(tmp_path):
    hf_dir = families.save(families.tiny_model("llama", max_position_embeddings=131072),
                           tmp_path / "hf")
    for target in ("cuda", "cpu"):
        assert llmc.compile(hf_dir, tmp_path / target, target=target).dims.max_seq_len == 131072
