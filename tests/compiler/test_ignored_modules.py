"""Modules excluded by a quantization config stay unquantized; their neighbors are quantized.
"""

import json
import re

import families
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from schedule_interpreter import Interpreters
from transformers import AutoModelForCausalLM

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.compiler.targets import cpu
from llmc.runtime.core.step import Step

TOKENS = np.random.default_rng(3).integers(3, families.VOCAB, 20).tolist()
GROUP = 32


def words(codes, order=range(8)):
    """Pack codes [..., n] into int32 [..., n / 8], eight columns in this order."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)[..., list(order)].astype(np.uint32)
    return (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def compressed_tensors(name, codes, zeros, scales):
    scales = scales.astype(ml_dtypes.bfloat16)
    zeros = np.full_like(zeros, 8)
    return {f"{name}.weight_packed": words(codes), f"{name}.weight_scale": scales,
            f"{name}.weight_shape": np.array(codes.shape)}, zeros, scales


def awq(name, codes, zeros, scales):
    scales = scales.astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {f"{name}.qweight": words(np.ascontiguousarray(codes.T), order),
            f"{name}.qzeros": words(np.ascontiguousarray(zeros.T), order),
            f"{name}.scales": np.ascontiguousarray(scales.T)}, zeros, scales


def gptq(name, codes, zeros, scales):
    scales, zeros = scales.astype(np.float16), np.maximum(zeros, 1)  # stored minus one
    return {f"{name}.qweight": np.ascontiguousarray(words(codes).T),
            f"{name}.qzeros": words(np.ascontiguousarray(zeros.T) - 1),
            f"{name}.scales": np.ascontiguousarray(scales.T),
            f"{name}.g_idx": np.arange(codes.shape[1], dtype=np.int32) // GROUP}, zeros, scales


def groups(ignore):
    """compressed-tensors config: names, and patterns prefixed with `re:`."""
    weights = dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True)
    return dict(quant_method="compressed-tensors", format="pack-quantized", ignore=ignore,
                config_groups={"group_0": dict(targets=["Linear"], weights=weights)})


def others(method, ignore):
    """AWQ and GPTQ config: parts of names."""
    more = dict(version="gemm") if method == "awq" else dict(checkpoint_format="gptq",
                                                              desc_act=False)
    return dict(quant_method=method, bits=4, group_size=GROUP, modules_to_not_convert=ignore,
                **more)


# A config, its tensor writer, the excluded modules, and the dtype of the others.
CASES = {
    "compressed-tensors, names": (
        groups(["lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj"]),
        compressed_tensors, r"lm_head|layers\.1\.self_attn\.o_proj|layers\.0\.mlp\.down_proj",
        "int4"),
    "compressed-tensors, patterns": (
        groups(["re:.*lm_head", r"re:model\.layers\.0\.mlp\..*"]), compressed_tensors,
        r"lm_head|layers\.0\.mlp\.", "int4"),
    "compressed-tensors, part of what is merged": (
        groups(["lm_head", "re:.*k_proj"]), compressed_tensors, r"lm_head|k_proj", "int4"),
    "awq, a layer": (others("awq", ["lm_head", "model.layers.0"]), awq, r"lm_head|layers\.0\.",
                     "uint4"),
    "awq, a kind": (others("awq", ["lm_head", "mlp"]), awq, r"lm_head|mlp", "uint4"),
    "gptq, a kind": (others("gptq", ["lm_head", "o_proj"]), gptq, r"lm_head|o_proj", "uint4"),
    "gptq, nothing but the head": (others("gptq", ["lm_head"]), gptq, "lm_head", "uint4"),
    "gptq, a list that is none": (others("gptq", None), gptq, "lm_head", "uint4"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    model = families.tiny_model("llama", intermediate_size=96, num_hidden_layers=2)
    return families.save(model, tmp_path_factory.mktemp("plain") / "hf")


def write(plain, directory, case):
    """Write a checkpoint; return its dequantized weights."""
    said, make, ignored, _ = CASES[case]
    rng, tensors, truth = np.random.default_rng(5), {}, {}
    for name, array in load_file(plain / "model.safetensors").items():
        truth[name] = array
        if array.ndim < 2 or "embed" in name or re.search(ignored, name):
            tensors[name] = array
            continue
        shape = len(array), array.shape[1] // GROUP
        codes = rng.integers(0, 16, array.shape)
        made, zeros, scales = make(name.removesuffix(".weight"), codes,
                                   rng.integers(0, 16, shape), rng.uniform(0.01, 0.03, shape))
        tensors.update(made)
        truth[name] = ((codes - zeros.repeat(GROUP, 1)).astype(np.float32)
                       * scales.astype(np.float32).repeat(GROUP, 1))
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return truth


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_modules_excluded_from_quantization_stay_floating_point(case, target, plain, tmp_path,
                                                                monkeypatch):
    truth = write(plain, tmp_path / "hf", case)
    monkeypatch.setattr(cpu, "BODIES", "")  # exact bodies of standard ONNX
    llmc.compile(tmp_path / "hf", tmp_path / "case", target=target)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    model.load_state_dict({name: torch.tensor(array) for name, array in truth.items()})
    if target == "cuda":
        step = Step.of([TOKENS], [0], [list(range(8))], [0], logits="all")
        found = Interpreters(tmp_path / "case").compute(step)
    else:
        with llmc.LLM(tmp_path / "case") as llm:
            found = llm.logits(TOKENS)
    families.assert_close(found, families.reference_logits(model, TOKENS), 1e-5)

    forms = read_manifest(tmp_path / "case").chips[0].quantization
    _, _, ignored, dtype = CASES[case]
    parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}
    expected = set()
    for layer in range(2):
        for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj",
                       "mlp.down_proj"):
            block, own = module.split(".")
            names = [f"layers.{layer}.{block}.{part}_proj" for part in parts.get(own, ())] \
                or [f"layers.{layer}.{module}"]
            if not any(re.search(ignored, name) for name in names):
                expected.add(f"model.layers.{layer}.{module}.weight")
    assert forms.keys() == expected and expected
    assert {form.dtype for form in forms.values()} == {dtype}
