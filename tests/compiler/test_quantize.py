"""Weights quantized by llmc, compared with transformers on weights quantized in NumPy.
"""

import copy
import functools
import gc
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tracemalloc

import bench_model
import families
import lora
import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from conftest import VOCAB, write_tokenizer
from safetensors.numpy import load_file, save_file
from schedule_interpreter import Interpreters
from transformers import AutoModelForCausalLM

import llmc
from llmc.artifacts.manifest import Target, read_manifest
from llmc.compiler import api
from llmc.compiler.check.diff import _compare_weights, diff
from llmc.compiler.check.evaluate import perplexity
from llmc.compiler.frontend import load
from llmc.compiler.graph.rewrite import values_of
from llmc.compiler.lower import divide, fuse, lower
from llmc.compiler.options import CompileOptions
from llmc.compiler.quant.calibrate import calibrate
from llmc.compiler.quant.channel_scales import find_pair, scale_channels
from llmc.compiler.quant.scheme import Scheme
from llmc.compiler.targets import cpu
from llmc.errors import LlmcError
from llmc.runtime.core.step import Step
from llmc.runtime.tokenizer import read_tokenizer

TOKENS = np.random.default_rng(3).integers(3, families.VOCAB, 20).tolist()
WIDER = {"llama": {"intermediate_size": 192}, "gpt2": {"n_inner": 192},
         "minicpm3": {"intermediate_size": 192}}  # whole groups on 3 chips
EXACT, EIGHT_BITS = 1e-5, 0.03  # of quantized activations, relative to the range of logits
FLIPPED = 1e-3  # effect of a few activations between two FP8 values


def nonzero(scale):
    """Replace zero scales of padding rows by 1."""
    return np.where(scale == 0, np.float32(1), scale)


def rounded(matrix, scheme, size):
    """Quantize and dequantize a matrix."""
    groups = matrix.astype(np.float32).reshape(len(matrix), -1, size)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    extreme = np.where(-low > high, low, high)
    if scheme == "fp8":
        scale = nonzero(abs(extreme) / np.float32(448))
        codes = (groups / scale).astype(ml_dtypes.float8_e4m3fn)
        numbers = codes.astype(np.float64) * scale
    elif scheme == "uint4":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = nonzero((high - low) / np.float32(15))
        zero = np.rint(-low / scale)
        numbers = (np.clip(np.rint(groups / scale) + zero, 0, 15) - zero) * scale
    else:
        lowest, scale = {"int8": (-128, np.abs(extreme) / np.float32(127)),
                           "int4": (-8, extreme / np.float32(-8))}[scheme]
        scale = nonzero(scale)
        numbers = np.clip(np.rint(groups / scale), lowest, -lowest - 1) * scale
    return numbers.reshape(matrix.shape).astype(np.float32)


def is_linear(name, tensor):
    return tensor.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe"))


@functools.cache
def model_and_raw(family, root):
    model = families.tiny_model(family, **WIDER.get(family, {}))
    return model, load(families.save(model, root / family))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("quantize")


@pytest.fixture
def reference_bodies(monkeypatch):
    """Compile with the reference bodies instead of the cpu target's."""
    monkeypatch.setattr(cpu, "BODIES", "")


def truth(family, root, scheme, size, head=True, activations=False):
    """Return transformers' logits with quantized weights; size 0: a whole row."""
    model, _ = model_and_raw(family, root)
    state = {}
    for name, tensor in model.state_dict().items():
        tied = name.endswith("wte.weight") and head
        array = tensor.numpy()
        transposed = ".c_" in name  # GPT-2's Conv1D
        if (is_linear(name, array) and (head or "lm_head" not in name)) or tied:
            array = array.T if transposed else array
            array = rounded(array, scheme, size or array.shape[1])
            array = array.T if transposed else array
        state[name] = torch.tensor(np.ascontiguousarray(array))
    config = type(model.config).from_dict(model.config.to_dict())
    other = type(model)(config).eval()
    other.load_state_dict(state)
    if activations:
        families.round_tokens(other)
    return families.reference_logits(other, TOKENS)


def compiled(family, root, case, tp_size=1, **options):
    _, raw = model_and_raw(family, root)
    raw = families.copy_raw(raw)
    chosen = CompileOptions(tp_size=tp_size, target=options.get("target", "cpu"),
                     dtype=options.get("dtype", "float32"), quantize=options["quantize"],
                     quantize_lm_head=options.get("head", options["quantize"]) or "none",
                     group_size=options.get("group_size", 0),
                     quantize_activations=options.get("activations", False))
    case.mkdir()
    api.write(raw, lower(raw, chosen), Target(kind=chosen.target), chosen, case)
    return case


def logits(case):
    with llmc.LLM(case) as llm:
        return llm.logits(TOKENS)


@pytest.mark.parametrize(("scheme", "size"), [("int4", 32), ("uint4", 16), ("int8", 32),
                                              ("fp8", 0), ("fp8", 16)])
def test_standard_onnx_equals_transformers_with_quantized_weights(scheme, size, root, tmp_path,
                                                                  reference_bodies):
    case = compiled("llama", root, tmp_path / "case", quantize=scheme, group_size=size)
    families.assert_close(logits(case), truth("llama", root, scheme, size), EXACT)


@pytest.mark.parametrize("tp_size", [1, 3])
@pytest.mark.parametrize("scheme", ["int4", "uint4", "int8", "fp8"])
def test_mla_up_projections_are_quantized(scheme, tp_size, root, tmp_path):
    case = compiled("minicpm3", root, tmp_path / "case", tp_size, quantize=scheme, group_size=8)
    families.assert_close(logits(case), truth("minicpm3", root, scheme, 8),
                          EXACT if scheme == "fp8" else EIGHT_BITS)
    forms = read_manifest(case).chips[-1].quantization
    assert sum(name.endswith(("key_up", "value_up")) for name in forms) == 2 * 3


@pytest.mark.parametrize("body", ["", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activations_are_quantized_to_fp8_dynamically_per_token(family, body, root, tmp_path,
                                                                monkeypatch):
    monkeypatch.setattr(cpu, "BODIES", body)
    case = compiled(family, root, tmp_path / "case", quantize="fp8", activations=True)
    expected = truth(family, root, "fp8", 0, activations=True)
    families.assert_close(logits(case), expected, FLIPPED)
    without = truth(family, root, "fp8", 0)
    assert np.abs(expected - without).max() > 0.005 * np.ptp(without)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["int4", "uint4", "int8", "fp8"])
def test_the_cpu_target_differs_by_8_bit_activation_error(scheme, tp_size, root, tmp_path):
    # An FP8 row has a scale per chip, so several chips are compared in groups.
    size = 0 if scheme == "fp8" and tp_size == 1 else 16
    case = compiled("llama", root, tmp_path / "case", tp_size, quantize=scheme, group_size=size)
    families.assert_close(logits(case), truth("llama", root, scheme, size),
                          EXACT if scheme == "fp8" else EIGHT_BITS)


def linear_modules(model):
    """Return modules with a separate weight, and the norm before each, if any."""
    made, read, hooks = {}, {}, []
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            hooks.append(module.register_forward_pre_hook(
                lambda own, inputs, name=name: read.update({name: (own, inputs[0])})))
        elif type(module).__name__.endswith("Norm"):
            hooks.append(module.register_forward_hook(
                lambda own, inputs, result: made.update({result.data_ptr(): (own, result)})))
    families.reference_logits(model, TOKENS)
    for hook in hooks:
        hook.remove()
    return {name: (own, made.get(x.data_ptr(), (None,))[0]) for name, (own, x) in read.items()}


def dequantized(model, scheme, forms):
    """Copy a transformers model with quantized weights according to a manifest's `forms`.

    Norm weights are folded first where the manifest states it.
    """
    model = copy.deepcopy(model)
    for name, (module, norm) in linear_modules(model).items():
        merged = re.sub(r"\b[qkv]_proj$", "qkv_proj", re.sub(r"\b(gate|up)_proj$",
                                                            "gate_up_proj", name))
        stems = tuple(f"{stem.replace('embed_out', 'lm_head')}.weight" for stem in (name, merged))
        stored = next((key for key in forms if key.startswith(stems)), None)
        turned = type(module).__name__ == "Conv1D"
        weight = module.weight.detach().numpy().T if turned else module.weight.detach().numpy()
        if stored is None:
            assert weight.shape[1] % 32, f"{name} is not in fewer bits"
            continue
        assert forms[stored].dtype == scheme
        gains, shift = np.float32(1), None
        if stored.endswith(".normed"):
            gains = norm.weight.detach().numpy() + ("Gemma" in type(norm).__name__)
            shift = getattr(norm, "bias", None)
        numbers = rounded(weight * gains, scheme, forms[stored].group_size) / gains
        if shift is not None:  # its input is not quantized
            bias = torch.tensor((weight - numbers) @ shift.detach().numpy())
            module.bias = torch.nn.Parameter(bias if module.bias is None else module.bias + bias)
        numbers = torch.tensor(np.ascontiguousarray(numbers.T if turned else numbers))
        module.weight.data = numbers  # of the embedding too if tied
    return model


def check_dequantized(model, scheme, compile_for, monkeypatch, tokens=TOKENS,
                      eight_bits=EIGHT_BITS):
    """Compare a quantized model's logits with transformers on dequantized weights.

    The tolerance is float32 rounding for float32 activations, transformers' bfloat16 error in
    bfloat16, and 8-bit activation error in the cpu target's kernels. `compile_for(target, dtype)`
    returns a case.
    """
    for body, tolerance in (("", EXACT), ("cpu", eight_bits)):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "BODIES", body)
            case = compile_for("cpu", "float32")
        numbers = dequantized(model, scheme, read_manifest(case).chips[0].quantization)
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(tokens), families.reference_logits(numbers, tokens),
                                  tolerance)
    for dtype in ("float32", "bfloat16"):
        case = compile_for("cuda", dtype)
        numbers = dequantized(model, scheme, read_manifest(case).chips[0].quantization)
        exact = families.reference_logits(numbers, tokens)
        allowed = EXACT
        if dtype == "bfloat16":
            loss = np.abs(families.reference_logits(numbers.to(torch.bfloat16), tokens) - exact)
            allowed = 2 * loss.max() / np.ptp(exact)
        families.assert_close(schedule_logits(Interpreters(case), tokens), exact, allowed)


# The part that `make test` runs.
SHORT = {("gpt2", "int8"), ("gpt_neox", "int8"), ("llama", "int4"), ("gemma2", "int4")}


@pytest.mark.parametrize(("family", "scheme"), [
    pytest.param(*pair, marks=[pytest.mark.thorough] * (pair not in SHORT))
    for pair in itertools.product(families.FAMILIES, ("int8", "int4"))])
def test_every_family_equals_its_dequantized_weights(family, scheme, root, tmp_path, monkeypatch):
    numbers = itertools.count()

    def compile_for(target, dtype):
        return compiled(family, root, tmp_path / f"case{next(numbers)}", quantize=scheme,
                        target=target, dtype=dtype)

    check_dequantized(model_and_raw(family, root)[0], scheme, compile_for, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_smollm2_equals_its_dequantized_weights(scheme, tmp_path, monkeypatch):
    hf = bench_model.smollm2(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    tokens = read_tokenizer(hf).encode("The sea is blue because water absorbs red light").ids

    def compile_for(target, dtype):
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        llmc.compile(hf, tmp_path / "case", target=target, dtype=dtype, quantize=scheme,
                     quantize_lm_head=scheme, max_seq_len=64)
        return tmp_path / "case"

    check_dequantized(model, scheme, compile_for, monkeypatch, tokens,
                      eight_bits=0.06)  # of 30 layers


def schedule_logits(interpreters, tokens=TOKENS):
    step = Step.of([tokens], [0], [list(range(8))], [0], logits="all")
    return interpreters.compute(step)


def check_schedule(family, root, tmp_path, schemes, tp_size=1, size=0):
    """Compare programs with quantized and dequantized weights; return their chips."""
    plain = compiled(family, root, tmp_path / "plain", tp_size, quantize="none", target="cuda")
    found = []
    for scheme in schemes:
        case = compiled(family, root, tmp_path / scheme, tp_size, quantize=scheme, target="cuda",
                        group_size=size)
        numbers, chips = Interpreters(plain), read_manifest(case).chips
        for chip, rank in zip(chips, numbers.ranks, strict=True):
            assert len(chip.quantization) >= 7  # of three layers and the head
            for name, form in chip.quantization.items():
                rank.weights[name] = rounded(rank.weights[name], scheme, form.group_size)
                sums = f"{name.removesuffix('.normed')}.row_sums"
                if sums in rank.weights:
                    rank.weights[sums] = rank.weights[name].sum(1)
        families.assert_close(schedule_logits(Interpreters(case)), schedule_logits(numbers), EXACT)
        found.extend(chips)
    return found


@pytest.mark.parametrize("family", families.once(sorted(
    {*families.FAMILIES, *families.UNPLANNED})))
def test_every_family_s_program_equals_its_dequantized_weights(family, root, tmp_path):
    check_schedule(family, root, tmp_path, ["int8", "int4"])


@pytest.mark.parametrize(("family", "tp_size"), [
    ("llama", 2), ("llama", 3), ("gpt2", 2), ("gpt2", 3), ("gemma3_text", 2)])
def test_programs_of_several_ranks_equal_dequantized_weights(family, tp_size, root, tmp_path):
    check_schedule(family, root, tmp_path, ["int8", "int4", "uint4"], tp_size)


@pytest.mark.parametrize(("scheme", "size"), [("uint4", 32), ("int8", 64), ("fp8", 0)])
def test_norm_weights_are_folded_before_quantization(scheme, size, root, tmp_path):
    chip, = check_schedule("llama", root, tmp_path, [scheme], size=size)
    assert sum(name.endswith(".normed") for name in chip.quantization) == 7
    model, _ = model_and_raw("llama", root)
    families.assert_close(schedule_logits(Interpreters(tmp_path / scheme)),
                          families.reference_logits(model, TOKENS), 0.2 if size == 32 else 0.05)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_program_quantizes_activations_after_norms(family, tmp_path):
    model = families.tiny_model(family, **WIDER[family])
    state = {name: torch.full_like(tensor, name.endswith("weight"))
             if "norm" in name or ".ln_" in name else tensor
             for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)  # no norm weights and biases: a program folds them
    hf = families.save(model, tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", quantize="fp8", quantize_activations=True,
                 quantize_lm_head="none")
    model.load_state_dict({name: torch.tensor(rounded(tensor.numpy().T, "fp8", len(tensor)).T)
                           if ".c_" in name and tensor.ndim == 2 else
                           torch.tensor(rounded(tensor.numpy(), "fp8", tensor.shape[1]))
                           if "_proj.weight" in name else tensor
                           for name, tensor in state.items()})
    families.round_tokens(model)
    found = schedule_logits(Interpreters(tmp_path / "case"))
    families.assert_close(found, families.reference_logits(model, TOKENS), FLIPPED)


def test_weights_without_a_cuda_kernel_are_not_quantized(root, tmp_path):
    case = compiled("qwen2", root, tmp_path / "case", quantize="int8", target="cuda")
    refused = [text for report in read_manifest(case).passes if report.name == "quantize"
               for text in report.refusals]
    assert len(refused) == 1 and "groups of 100; the target's kernels read multiples of 32" \
        in refused[0]
    stored = load_file(case / "chip0" / "weights.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype == np.float32


def test_a_tied_embedding_shares_the_quantized_lm_head(root, tmp_path, reference_bodies):
    case = compiled("gpt2", root, tmp_path / "case", quantize="int8", group_size=32)
    families.assert_close(logits(case), truth("gpt2", root, "int8", 32), EXACT)
    tables = [name for name in load_file(case / "chip0" / "weights.safetensors")
              if name.startswith("lm_head") or "wte" in name]
    assert len(tables) == 2  # codes and scales


def products(proto):
    """Return the MatMulNBits nodes in the body of each op with a quantized weight."""
    bodies = {(f.domain, f.name, f.overload): f for f in proto.functions}
    return {node.input[1]: [{a.name: onnx.helper.get_attribute_value(a) for a in inner.attribute}
                            for inner in bodies[node.domain, node.op_type, node.overload].node
                            if inner.op_type == "MatMulNBits"]
            for node in proto.graph.node
            if any(a.name == "weight_dtype" and a.s for a in node.attribute)
            and node.op_type != "Embedding"}


@pytest.mark.parametrize(("scheme", "bits"), [("int4", 4), ("uint4", 4), ("int8", 8)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_cpu_target_uses_int8_dot_products(family, scheme, bits, root, tmp_path):
    """Every linear layer, the LM head too, is one MatMulNBits of accuracy level 4."""
    case = compiled(family, root, tmp_path / "case", quantize=scheme)
    found = products(onnx.load(case / "chip0" / "graph.onnx", load_external_data=False))
    assert found.keys() == read_manifest(case).chips[0].quantization.keys()
    assert "lm_head.weight" in found and len(found) == 4 * 3 + 1
    for name, nodes in found.items():
        node, = nodes
        assert (node["accuracy_level"], node["bits"]) == (4, bits), name


@pytest.mark.parametrize("body", ["", "cpu"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_onnx_runtime_runs_the_file_without_llmc(scheme, body, root, tmp_path, monkeypatch):
    """As in docs/artifact-format.md, in a process where llmc cannot be imported.

    Bodies of standard ONNX have no ops of other domains.
    """
    monkeypatch.setattr(cpu, "BODIES", body)
    case = compiled("llama", root, tmp_path / "case", quantize=scheme)
    if not body:
        proto = onnx.load(case / "chip0" / "graph.onnx", load_external_data=False)
        assert {node.domain for f in proto.functions for node in f.node} <= {"", "ai.onnx"}
    script = """
import sys
sys.modules["llmc"] = None
import numpy as np, onnxruntime as ort

case, tokens, output = sys.argv[1], np.array(eval(sys.argv[2])), sys.argv[3]
session = ort.InferenceSession(f"{case}/chip0/graph.onnx", providers=["CPUExecutionProvider"])
feed = {"input_ids": tokens, "position_ids": np.arange(len(tokens)),
        "cu_seqlens": np.array([0, len(tokens)], np.int32), "past_lens": np.zeros(1, np.int32),
        "logits_indices": np.arange(len(tokens))}
names = {tensor.name for tensor in session.get_inputs()}
feed = {name: value for name, value in feed.items() if name in names}
for tensor in session.get_inputs():
    if "cache" in tensor.name:
        shape = [1, tensor.shape[1], 64, tensor.shape[3]]
        feed[tensor.name] = np.zeros(shape, np.float32)
np.save(output, session.run(["logits"], feed)[0])
"""
    subprocess.run([sys.executable, "-c", script, case, repr(TOKENS), tmp_path / "logits.npy"],
                   check=True)
    found = np.load(tmp_path / "logits.npy")[:, :families.VOCAB]
    families.assert_close(found, truth("llama", root, scheme, 64), EIGHT_BITS if body else EXACT)
    families.assert_close(found, logits(case), EXACT)


def test_the_lm_head_dtype_is_separate(root, tmp_path, reference_bodies):
    forms = {}
    for head in ("int8", ""):
        case = compiled("llama", root, tmp_path / f"head{head}", quantize="int4", head=head)
        forms[head] = read_manifest(case).chips[0].quantization
    assert forms["int8"]["lm_head.weight"].dtype == "int8"
    assert "lm_head.weight" not in forms[""]
    assert {form.dtype for name, form in forms["int8"].items() if "lm_head" not in name} == {"int4"}
    families.assert_close(logits(tmp_path / "head"), truth("llama", root, "int4", 32, head=False),
                          0.2)  # 64 and 32 in groups


def test_the_manifest_lists_weight_dtypes_and_inspect_counts_them(root, tmp_path):
    from llmc.runtime.inspection import summarize

    case = compiled("llama", root, tmp_path / "case", quantize="uint4")
    manifest = read_manifest(case)
    assert manifest.quantization == ("uint4",)
    stored = load_file(case / "chip0" / "weights.safetensors")
    for name, form in manifest.chips[0].quantization.items():
        rows, width = stored[name].shape[0], stored[name].shape[1] * 2
        groups = width // form.group_size
        assert stored[name].dtype == stored[f"{name}_zero"].dtype == np.uint8
        assert stored[f"{name}_scale"].shape == (rows, groups)
        assert stored[f"{name}_zero"].shape == (rows, -(-groups // 2))
    counts = summarize(manifest)["chips"][0]["quantization"]
    assert counts == {"uint4, groups of 64": 13}


def digests(case):
    """Return the hashes of all files of a case."""
    return {path.relative_to(case).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(case.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "uint4", "fp8"])
def test_the_same_model_and_options_give_the_same_bytes(scheme, target, root, tmp_path):
    one, other = (digests(compiled("llama", root, tmp_path / name, quantize=scheme, target=target))
                  for name in ("one", "other"))
    assert one == other and "chip0/weights.safetensors" in one


def test_calibration_is_reproducible(talkative, tmp_path):
    _, hf, text = talkative
    for name in ("one", "other"):
        llmc.compile(hf, tmp_path / name, quantize="int4", group_size=32, calibrate=text)
    assert digests(tmp_path / "one") == digests(tmp_path / "other")


def test_a_quantized_checkpoint_is_reproducible(tmp_path):
    hf = families.save(families.tiny_model("llama", intermediate_size=96, num_hidden_layers=2),
                       tmp_path / "hf")
    made = families.to_static_fp8(hf, tmp_path / "fp8", {"_proj": 0.01})
    for name in ("one", "other"):
        llmc.compile(made, tmp_path / name, target="cuda")
    assert read_manifest(tmp_path / "one").quantization == ("float8_e4m3fn",)
    assert digests(tmp_path / "one") == digests(tmp_path / "other")


def test_gpus_without_fp8_tensor_cores_are_reported(tiny_hf, tmp_path):
    said = []
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="bfloat16", quantize="fp8",
                 compute_capability="8.0", progress=said.append)
    assert any("FP8 weights are converted to bfloat16 when they are read" in text for text in said)
    assert not any("FP8 by FP8" in text for text in said)


def test_activation_quantization_is_reported_and_in_the_manifest(tiny_hf, tmp_path):
    from llmc.runtime.inspection import summarize

    said = []
    llmc.compile(tiny_hf, tmp_path / "case", target="cuda", dtype="bfloat16", quantize="fp8",
                 quantize_activations=True, progress=said.append)
    manifest = read_manifest(tmp_path / "case")
    counts = summarize(manifest)["chips"][0]["quantization"]
    rounds = sum(count for form, count in counts.items() if "activations float8_e4m3fn" in form)
    assert sum(counts.values()) - rounds == 1  # the LM head
    assert any(f"{rounds} linear layers multiply FP8 by FP8 on GPUs of compute capability 9.0" in
               text for text in said)
    said.clear()
    whole = families.save(families.tiny_model("llama", intermediate_size=96), tmp_path / "whole")
    llmc.compile(whole, tmp_path / "groups", target="cuda", dtype="bfloat16", quantize="fp8",
                 quantize_activations=True, group_size=32, progress=said.append)
    assert any("linear layers are quantized to FP8 but multiplied in bfloat16" in text
               for text in said) and not any("multiply FP8 by FP8" in text for text in said)


@pytest.mark.parametrize(("options", "said"), [
    ({"quantize": "int5"}, "cannot be quantized to 'int5'; allowed: int8, int4, uint4, fp8"),
    ({"quantize": "int4", "target": "tensorrt_rtx"},
     "target 'tensorrt_rtx' has no kernels for quantized weights"),
    ({"quantize": "int4", "group_size": 48, "target": "cuda"},
     "group_size 48 is not a multiple of 32, as kernels of target 'cuda' need; give 32"),
    ({"quantize": "int4", "group_size": 7}, "group_size 7 is not an even number of at least 16"),
    ({"quantize_lm_head": "int8"}, "quantize_lm_head is given without quantize"),
    ({"group_size": 32}, "group_size is given without quantize; give both"),
    ({"group_size": 32, "quantize": "none"}, "group_size is given without quantize; give both"),
    ({"quantize_activations": True}, "quantize_activations is given without quantize fp8"),
    ({"quantize": "int4", "quantize_activations": True},
     "quantize_activations is given without quantize fp8"),
    ({"quantize": "int8", "quantize_activations": True, "target": "cuda"},
     "target 'cuda' has no kernels for int8 activations; leave out quantize_activations"),
    ({"quantize": "int4", "group_size": 48}, "group_size 48 does not divide the rows of 'model"),
])
def test_unquantizable_models_raise_an_llmc_error(options, said, tiny_hf, tmp_path):
    with pytest.raises(LlmcError, match=said):
        llmc.compile(tiny_hf, tmp_path / "case", **options)
    assert not (tmp_path / "case").exists()


@pytest.mark.parametrize(("changes", "options", "said"), [
    ({}, {"group_size": 32}, "'model.layers.0.self_attn.q_b_proj.weight', which have 24 columns "
                             "on a chip; no group_size divides all rows to be quantized"),
    ({"q_lora_rank": 32, "kv_lora_rank": 32}, {"group_size": 64},
     "'model.layers.0.self_attn.q_b_proj.weight', which have 32 columns on a chip; use 16 or "
     "32, which divide all rows to be quantized"),
    ({"q_lora_rank": 32, "kv_lora_rank": 32}, {"group_size": 64, "target": "cuda"},
     "which have 32 columns on a chip; use 32, which divide all rows to be quantized")])
def test_an_invalid_group_size_is_refused_with_valid_ones(changes, options, said, tmp_path):
    hf = families.save(families.tiny_model("minicpm3", intermediate_size=96, num_hidden_layers=2,
                                           **changes), tmp_path / "hf")
    with pytest.raises(LlmcError, match=f"does not divide the rows of .*{said}"):
        llmc.compile(hf, tmp_path / "case", quantize="int4", **options)


def test_routers_and_shared_expert_gates_are_not_quantized(tmp_path):
    hf = families.save(families.tiny_model("qwen2_moe", moe_intermediate_size=64,
                                           num_hidden_layers=2), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int4")
    kept = {name for name, array in load_file(tmp_path / "case/chip0/weights.safetensors").items()
            if "layers.1" in name and array.ndim == 2 and array.dtype == np.float32
            and not name.endswith("_scale")}
    assert kept == {f"model.layers.1.mlp.{name}.weight" for name in ("gate", "shared_expert_gate")}


def test_a_rank_with_a_single_row_quantizes_as_the_others(tmp_path):
    """Three chips have 2, 1 and 1 of the four delta-rule heads."""
    hf = families.save(families.tiny_model(
        "qwen3_next", intermediate_size=96, moe_intermediate_size=96,
        shared_expert_intermediate_size=96), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int8", tp_size=3)
    names = [sorted(chip.quantization) for chip in read_manifest(tmp_path / "case").chips]
    assert names[0] == names[1] == names[2]


@pytest.mark.parametrize("family", ["codegen", "llama"])
def test_ranks_split_columns_in_whole_groups_if_possible(family, tmp_path):
    """256 after an activation, and 100, on 3 chips: 85 and 33 would be refused."""
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int8", tp_size=3)
    widths = [load_file(tmp_path / f"case/chip{rank}/weights.safetensors")[name].shape[1]
              for rank in range(3) for name in read_manifest(
                  tmp_path / "case").chips[rank].quantization
              if name.endswith(("fc_out.weight", "down_proj.weight")) and ".0." in name]
    assert widths == {"codegen": [96, 80, 80], "llama": [36, 32, 32]}[family]


def test_ranks_split_inner_columns_of_experts_in_whole_groups(tmp_path):
    """40 on 3 chips; weights with unsupported groups are not quantized."""
    said = []
    hf = families.save(families.tiny_model("qwen3_moe", num_hidden_layers=2, intermediate_size=96),
                       tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int8", tp_size=3, progress=said.append)
    assert any("2 layers' experts stay in float32" in text for text in said)


def test_short_convolution_channels_are_split_in_whole_groups(tmp_path):
    """64 channels on 3 chips: 32, 16 and 16; weights without whole groups have even rows."""
    model = families.tiny_model("lfm2", block_auto_adjust_ff_dim=False, intermediate_size=100)
    hf = families.save(model, tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int8", tp_size=3)
    chips = read_manifest(tmp_path / "case").chips
    sizes = [{name: form.group_size for name, form in chip.quantization.items()} for chip in chips]
    assert [own["model.layers.0.conv.out_proj.weight"] for own in sizes] == [32, 16, 16]
    assert [own["model.layers.0.feed_forward.w2.weight"] for own in sizes] == [36, 32, 32]
    families.assert_close(logits(tmp_path / "case"), families.reference_logits(model, TOKENS), 0.03)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A model with low-rank activations, as in real models, and a text for it."""
    root = tmp_path_factory.mktemp("calibrate")
    model = families.tiny_model("llama", vocab_size=VOCAB, intermediate_size=96,
                                num_hidden_layers=2, tie_word_embeddings=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 8:] *= 0.1
    hf = families.save(model, root / "hf")
    write_tokenizer(hf)
    text = root / "text.txt"
    text.write_text(" ".join(np.random.default_rng(2).choice(
        ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"], 1500)))
    return model, hf, text


@pytest.mark.parametrize("scheme", ["int4", "uint4"])
def test_calibration_has_a_smaller_output_error_than_rounding_to_nearest(scheme, talkative,
                                                                         tmp_path,
                                                                         reference_bodies):
    model, hf, text = talkative
    options = dict(quantize=scheme, group_size=32, quantize_lm_head="none")
    llmc.compile(hf, tmp_path / "nearest", **options)
    llmc.compile(hf, tmp_path / "calibrated", **options, calibrate=text)
    with llmc.LLM(tmp_path / "nearest") as llm:
        tokens = llm.tokenizer.encode("the lazy fox jumps over the quick brown dog " * 3).ids
        nearest = llm.logits(tokens)
    with llmc.LLM(tmp_path / "calibrated") as llm:
        calibrated = llm.logits(tokens)
    exact = families.reference_logits(model, tokens)
    assert ((calibrated - exact) ** 2).mean() < 0.7 * ((nearest - exact) ** 2).mean()
    forms = [read_manifest(tmp_path / name).chips[0].quantization
             for name in ("nearest", "calibrated")]
    assert forms[0] == forms[1]
    compared = diff(tmp_path / "calibrated", hf, tokens=24)
    assert compared.verdict is None, compared.verdict


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma2", "starcoder2"])
def test_channel_scaling_preserves_the_model(family, root, tmp_path):
    model, raw = model_and_raw(family, root)
    raw, rng = families.copy_raw(raw), np.random.default_rng(5)
    options = CompileOptions(enable_lora=True, tp_size=2 if family == "phi3" else 1)
    fused = fuse(raw, options)
    graph, = fused.graphs
    pairs = [pair for node in graph.nodes if (pair := find_pair(graph, node)) is not None]
    for pair in pairs:
        spread = np.exp(rng.standard_normal(values_of(pair.weight).shape[1]))
        scale_channels(pair, rng.standard_normal((64, len(spread))) * spread, Scheme("int4", 32))
    scaled = [pair.made.name for pair in pairs if pair.made.name.endswith(".scaled")]
    assert scaled
    (tmp_path / "case").mkdir()
    api.write(raw, divide(fused, options), Target(kind="cpu"), options, tmp_path / "case")
    families.assert_close(logits(tmp_path / "case"), families.reference_logits(model, TOKENS))
    factors = lora.make(model, lora.linear_layers(model))  # are scaled, too
    llmc.compile_adapter(lora.save(tmp_path / "peft", factors), tmp_path / "case",
                         tmp_path / "adapter")
    with llmc.LLM(tmp_path / "case", adapters={"own": tmp_path / "adapter"}) as llm:
        completion, = llm.generate([TOKENS], llmc.SamplingParams(
            max_tokens=3, temperature=0, ignore_eos=True, logprobs=0), adapter="own")
    lora.assert_generates(lora.merged(model, factors), completion, 2e-5)


@pytest.mark.thorough
def test_calibration_holds_one_layer_in_memory(tmp_path):
    """Six layers take no more memory than two, except for the codes of two."""
    peaks, tokens = [], np.random.default_rng(4).integers(3, families.VOCAB, 1024).tolist()
    for depth in (2, 6):
        raw = load(families.save(families.tiny_model(
            "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=depth),
            tmp_path / f"{depth}"))
        graph, = fuse(raw, CompileOptions()).graphs
        gc.collect()
        tracemalloc.start()
        calibrate(graph, tokens, Scheme("int4"), Scheme("int4"), 64)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    codes = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512
    assert peaks[1] - peaks[0] < 2 * codes


def test_layers_with_shared_kv_are_calibrated(talkative, tmp_path):
    """They follow the layer and read its cache."""
    hf = families.save(families.tiny_model("gemma4_text", vocab_size=VOCAB, intermediate_size=96,
                                           vocab_size_per_layer_input=VOCAB,
                                           hidden_size_per_layer_input=32), tmp_path / "hf")
    write_tokenizer(hf)
    llmc.compile(hf, tmp_path / "case", quantize="int8", group_size=16, calibrate=talkative[2])
    llmc.compile(hf, tmp_path / "exact")
    found = []
    for name in ("case", "exact"):
        with llmc.LLM(tmp_path / name) as llm:
            found.append(llm.logits(TOKENS))
    families.assert_close(*found, 0.05)


def test_layers_with_unannotated_tensors_are_calibrated(talkative, tmp_path):
    hf = families.save(families.tiny_model("falcon_h1", vocab_size=VOCAB, num_hidden_layers=2),
                       tmp_path / "hf")
    write_tokenizer(hf)
    llmc.compile(hf, tmp_path / "case", quantize="int8", calibrate=talkative[2])
    assert read_manifest(tmp_path / "case").quantization == ("int8",)


@pytest.mark.parametrize(("family", "sizes", "text"), [
    ("qwen3_moe", {"moe_intermediate_size": 64}, "the experts of 2 layers are rounded to nearest"),
    ("minicpm3", {"hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 32},
     "4 MLA up-projections are rounded to nearest"), ("llama", {}, "")])
def test_uncalibrated_weights_are_reported(family, sizes, text, talkative, tmp_path):
    hf = families.save(families.tiny_model(family, vocab_size=VOCAB, num_hidden_layers=2, **sizes),
                       tmp_path / "hf")
    write_tokenizer(hf)
    for options in ({"calibrate": talkative[2]}, {}):
        said = []
        llmc.compile(hf, tmp_path / "case", quantize="int8", progress=said.append, **options)
        found = [note for note in said if "rounded to nearest" in note]
        assert len(found) == bool(text and options) and all(text in note for note in found), found


def test_calibrated_weights_are_sharded_with_their_groups(talkative, tmp_path, reference_bodies):
    _, hf, text = talkative
    found = []
    for tp_size in (1, 2):
        llmc.compile(hf, tmp_path / f"tp{tp_size}", quantize="int4", group_size=16,
                     calibrate=text, tp_size=tp_size)
        with llmc.LLM(tmp_path / f"tp{tp_size}") as llm:
            found.append(llm.logits(TOKENS))
    families.assert_close(found[1], found[0], EXACT)


@pytest.mark.parametrize(("content", "said"), [
    ("the quick brown fox", "tokens, and calibration needs 1024; give a longer text"),
    (None, "cannot be read as UTF-8 text")])
def test_a_calibration_text_that_is_too_short_is_refused(content, said, talkative, tmp_path):
    if content is not None:
        (tmp_path / "text").write_text(content)
    with pytest.raises(LlmcError, match=said):
        llmc.compile(talkative[1], tmp_path / "case", quantize="int4", calibrate=tmp_path / "text")
    with pytest.raises(LlmcError, match="calibrate is given without quantize"):
        llmc.compile(talkative[1], tmp_path / "case", calibrate=tmp_path / "text")


def test_calibrating_an_encoder_decoder_is_refused_before_the_export(tmp_path):
    hf = families.save(families.tiny_encoder_decoder("t5"), tmp_path / "hf")
    said = []
    with pytest.raises(LlmcError, match="is an encoder-decoder model, which --calibrate does not"):
        llmc.compile(hf, tmp_path / "case", quantize="int8", calibrate=tmp_path / "no text",
                     progress=said.append)
    assert "passes" not in said


def test_eval_and_diff_compare_with_the_original(talkative, tmp_path):
    _, hf, text = talkative
    llmc.compile(hf, tmp_path / "case", quantize="int8", group_size=32)
    report = perplexity(tmp_path / "case", data=text, hf_dir=hf)
    assert report.verdict is None and report.tolerance == 0.05
    equal, asked = report.kept
    assert asked == 1000 and 900 < equal < 1000
    compared = diff(tmp_path / "case", hf, tokens=24)
    assert compared.verdict is None, compared.verdict
    assert compared.allowed == ("2 times the error of transformers in float32 with quantized "
                                "activations, with the compiled model's dequantized weights")
    assert len(compared.tokens) == 24


@pytest.mark.thorough
def test_diff_reports_how_many_of_1000_greedy_tokens_agree(tmp_path):
    hf = families.save(families.tiny_model("llama", vocab_size=VOCAB, intermediate_size=96,
                                           max_position_embeddings=1088), tmp_path / "hf")
    write_tokenizer(hf)
    llmc.compile(hf, tmp_path / "case", quantize="int8", group_size=32)
    report = diff(tmp_path / "case", hf, tokens=1000)
    assert report.verdict is None, report.verdict
    kept = sum(token.token == token.reference_token for token in report.tokens)
    assert len(report.tokens) == 1000 and kept > 900
    assert f"greedy tokens: {kept} of 1000 equal" in report.equal_tokens


@pytest.mark.parametrize(("family", "scheme"), [("gpt2", "int8"), ("llama", "int4")])
def test_diff_compares_unquantized_weights_of_a_program(family, scheme, root, tmp_path):
    case = compiled(family, root, tmp_path / "case", quantize=scheme, target="cuda", head="")
    _, raw = model_and_raw(family, root)
    manifest = read_manifest(case)
    assert not _compare_weights(families.copy_raw(raw), manifest, case)
    name = next(name for name in load_file(case / "chip0" / "weights.safetensors")
                if "lm_head" in name)
    families.plant(case, 0, name, 1.0)
    found, = _compare_weights(families.copy_raw(raw), manifest, case)
    assert found.name == name


@pytest.mark.parametrize(("family", "scheme", "tp_size", "target"), [
    ("llama", "int4", 2, "cpu"), ("qwen3_moe", "fp8", 1, "cuda"), ("gpt2", "uint4", 1, "cuda"),
    ("gemma3_text", "int8", 1, "cpu")])
def test_diff_distinguishes_quantized_weights_from_another_model(family, scheme, tp_size, target,
                                                                 root, tmp_path):
    """The other model has the same norms and embedding."""
    case = compiled(family, root, tmp_path / "case", tp_size, quantize=scheme, target=target)
    model, raw = model_and_raw(family, root)
    manifest = read_manifest(case)
    assert not _compare_weights(families.copy_raw(raw), manifest, case)
    other = copy.deepcopy(model)
    torch.manual_seed(7)
    for name, parameter in other.named_parameters():
        if parameter.dim() > 1 and not any(part in name for part in ("embed", "wte", "wpe")):
            torch.nn.init.normal_(parameter, std=float(parameter.detach().std()))
    found = _compare_weights(load(families.save(other, tmp_path / "hf")), manifest, case)
    rounded = {name for chip in manifest.chips for name in chip.quantization}
    assert {weight.name for weight in found} >= {name for name in rounded if "layers.1." in name
                                                 or ".h.1." in name}
    assert all(weight.off > 1 for weight in found if weight.name in rounded)
    assert ", more than rounding causes" in str(found[0])


def test_diff_finds_zeroed_weights_and_zeroed_scales(tmp_path):
    model = families.tiny_model("llama", intermediate_size=96)
    torch.nn.init.zeros_(model.model.layers[1].self_attn.o_proj.weight)
    hf = families.save(model, tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int4", group_size=32)
    manifest = read_manifest(tmp_path / "case")
    assert not _compare_weights(load(hf), manifest, tmp_path / "case")
    path = tmp_path / "case" / "chip0" / "weights.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != f"{name}_scale"}, path)
    found, = _compare_weights(load(hf), manifest, tmp_path / "case")
    assert found.name == name and "is missing" in str(found)


def test_diff_accounts_for_unfolded_calibration_scales(talkative, tmp_path):
    _, hf, text = talkative
    llmc.compile(hf, tmp_path / "case", quantize="int4", calibrate=text, target="cuda")
    manifest = read_manifest(tmp_path / "case")
    assert not _compare_weights(load(hf), manifest, tmp_path / "case")
    names = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    assert any(name.endswith(".scaled") for name in names)


def with_numbers(tiny_hf, hf, numbers):
    """Overwrite the first values of a row of a weight in the checkpoint."""
    tensors = load_file(tiny_hf / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, :len(numbers)] = numbers
    hf.mkdir()
    (hf / "config.json").write_text((tiny_hf / "config.json").read_text())
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    return hf


@pytest.mark.parametrize(("scheme", "numbers", "said"), [
    ("int4", [np.nan], r"\[64, 64\] has 1 NaN"),
    ("uint4", [3e38, -3e38], "has values in one group from -3e")])
def test_nonfinite_or_too_large_weights_are_named(scheme, numbers, said, tiny_hf, tmp_path):
    hf = with_numbers(tiny_hf, tmp_path / "hf", numbers)
    with pytest.raises(LlmcError, match=f"layers.1.self_attn.o_proj.weight' {said}"):
        llmc.compile(hf, tmp_path / "case", quantize=scheme)
    assert json.loads((hf / "config.json").read_text())


@pytest.mark.parametrize(("scheme", "numbers"), [
    ("uint4", [3.3e38, -5e36]), ("int4", [3e38, -3e38]), ("int8", [3e38, -3e38]),
    ("fp8", [3e38, -3e38])])
def test_scales_of_the_largest_values_are_finite(scheme, numbers, tiny_hf, tmp_path):
    hf = with_numbers(tiny_hf, tmp_path / "hf", numbers)
    llmc.compile(hf, tmp_path / "case", quantize=scheme)
    weights = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    assert all(np.isfinite(array).all() for name, array in weights.items()
               if name.endswith("_scale"))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_odd_rows_are_not_quantized_with_a_note(target, tmp_path):
    hf_dir = families.save(families.tiny_model("llama", intermediate_size=37), tmp_path / "hf")
    said = []
    llmc.compile(hf_dir, tmp_path / "case", quantize="int8", target=target, progress=said.append)
    assert any(f"3 linear layers stay in float32, as target {target} has no kernel" in text
               for text in said)


# Tolerances of `diff` for quantized models.

@pytest.fixture(scope="module")
def in_groups(tmp_path_factory):
    """A tiny Llama whose rows are whole groups of 32."""
    model = families.tiny_model("llama", intermediate_size=96, num_hidden_layers=2)
    return families.save(model, tmp_path_factory.mktemp("in_groups") / "hf")


@pytest.mark.parametrize(("scheme", "tp_size", "most"), [
    ("int4", 1, 0.02), ("uint4", 2, 0.03), ("int8", 1, 0.02), ("fp8", 2, 1e-5)])
def test_diff_allows_for_activation_quantization_error(scheme, tp_size, most, in_groups, tmp_path):
    """Weights have no extra tolerance, as the reference is dequantized from them."""
    llmc.compile(in_groups, tmp_path / "case", quantize=scheme, tp_size=tp_size,
                 group_size=0 if scheme == "fp8" else 32)
    report = diff(tmp_path / "case", in_groups, bisect=True)
    assert report.verdict is None, report.verdict
    assert "with the compiled model's dequantized weights" in report.allowed
    ours = [d for d in report.layers if d.pair.startswith("compiled")]
    assert {d.pair for d in ours} == {"compiled vs export", "compiled vs transformers"}
    assert all(d.relative < d.allowed < most * 1.001 for d in ours)
    assert report.token_error < 2 * most


@pytest.mark.parametrize(("family", "tp_size"), [("olmoe", 2), ("ernie4_5_moe", 1)])
def test_diff_traces_weights_through_fused_norms_and_biases(family, tp_size, tmp_path):
    """Passes evaluate attention with QK norm and routers with a bias."""
    hf = families.save(families.tiny_model(family), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="fp8", tp_size=tp_size)
    report = diff(tmp_path / "case", hf, bisect=True)
    assert report.verdict is None, report.verdict
    assert report.allowed == ("1e-05 of a tensor's range, with the compiled model's "
                              "dequantized weights")


def test_diff_finds_an_error_in_a_quantized_model_s_op_and_in_its_weights(in_groups, tmp_path):
    case = tmp_path / "case"
    llmc.compile(in_groups, case, quantize="int4", group_size=32)
    damage(case, "RMSNorm", "epsilon", 1e6)
    assert diff(case, in_groups, tokens=0).first_layer == "hidden_states.0"
    llmc.compile(in_groups, case, quantize="int4", group_size=32)
    families.plant(case, 0, "model.layers.1.mlp.down_proj.weight_scale", 0.02)
    weight, = diff(case, in_groups, tokens=0).weights
    assert weight.name == "model.layers.1.mlp.down_proj.weight" and 0 < weight.elements <= 32


def damage(case, op, field, factor):
    """Multiply an attribute of an op's nodes in the body of the case's graph."""
    path = case / "chip0" / "graph.onnx"
    model = onnx.load(path, load_external_data=False)
    functions = [function for function in model.functions if function.name == op]
    assert functions
    for function in functions:
        for node in function.node:
            for attribute in node.attribute:
                if attribute.name == field:
                    attribute.f *= factor
    onnx.save(model, path)


def test_int8_activations_of_a_decoder_are_those_of_the_reference(root, tmp_path):
    hf = families.save(families.tiny_model("llama"), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", quantize="int8", quantize_activations=True)
    assert diff(tmp_path / "case", hf, tokens=0).verdict is None
