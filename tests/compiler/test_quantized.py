"""Unsupported quantized checkpoints are refused by method, from config or tensors, early.
"""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from llmc.cli import main
from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant import checkpoint
from llmc.errors import LlmcError

GROUP = dict(weights=dict(num_bits=8, type="float", strategy="channel"), targets=["Linear"])


def block_fp8(name, weight):
    return {name: weight.to(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.ones(1, 1)}


def compressed_fp8(name, weight):
    return {name: weight.to(torch.float8_e4m3fn),
            f"{name}_scale": torch.ones(len(weight), 1, dtype=torch.bfloat16)}


def compressed_int8(name, weight):
    return {name: (weight * 100).to(torch.int8),
            f"{name}_scale": torch.full((len(weight), 1), 0.01)}


def bitsandbytes_int8(name, weight):
    return {name: (weight * 100).to(torch.int8),
            name.replace(".weight", ".SCB"): torch.ones(len(weight))}


def gptq(name, weight):
    stem, (rows, columns) = name.removesuffix(".weight"), weight.shape
    return {f"{stem}.qweight": torch.zeros(columns // 4, rows, dtype=torch.int32),
            f"{stem}.qzeros": torch.zeros(1, rows // 4, dtype=torch.int32),
            f"{stem}.scales": torch.ones(1, rows, dtype=torch.float16),
            f"{stem}.g_idx": torch.zeros(columns, dtype=torch.int32)}


def awq(name, weight):
    return {key: tensor for key, tensor in gptq(name, weight).items() if "g_idx" not in key}


def nf4(name, weight):
    return {name: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
            f"{name}.absmax": torch.ones(weight.numel() // 64),
            f"{name}.quant_map": torch.ones(16),
            f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}


def w4a16(name, weight):
    return {f"{name}_packed": torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32),
            f"{name}_scale": torch.ones(len(weight), 1),
            f"{name}_shape": torch.tensor(weight.shape)}


def plain_float8(name, weight):
    return {name: weight.to(torch.float8_e5m2)}


def plain_integers(name, weight):
    return {name: (weight * 100).to(torch.int8)}


KINDS = {
    block_fp8: (dict(quant_method="quark", fmt="e4m3", weight_block_size=[128, 128]),
                r"by AMD Quark \(blocks of 128×128, e4m3\)",
                "by FP8 in blocks .*weight_scale_inv'"),
    compressed_fp8: (dict(quant_method="compressed-tensors", format="sparse-24-bitmask",
                          config_groups=dict(group_0=GROUP)),
                     r"by compressed-tensors \(8 bits, sparse-24-bitmask, float\)",
                     r"by compressed-tensors or .*weight_scale', bfloat16\)"),
    compressed_int8: (dict(quant_method="compressed-tensors", format="int-quantized"),
                      r"by compressed-tensors \(int-quantized\)", "by compressed-tensors or"),
    bitsandbytes_int8: (None, "", r"by bitsandbytes in 8 bits.*SCB"),
    gptq: (dict(quant_method="gptq", bits=3, group_size=128), r"by GPTQ \(3 bits, groups of 128\)",
           "by GPTQ .*g_idx"),
    awq: (dict(quant_method="awq", bits=4, group_size=64, version="gemv"),
          r"by AWQ \(4 bits, groups of 64\)",
          "by AWQ or GPTQ .*q(weight|zeros)'"),
    nf4: (None, "", "by bitsandbytes in 4 bits"),
    w4a16: (dict(quant_method="compressed-tensors", format="pack-quantized"),
            r"by compressed-tensors \(pack-quantized\)", "by compressed-tensors, packed"),
    plain_float8: (None, "", r"to FP8 \(tensor .* is float8_e5m2\)"),
    plain_integers: (None, "", r"is quantized \(weight '.*_proj.weight' is int8\)"),
}


def quantise(hf, directory, kind):
    """Convert the model's linear layers to a method's checkpoint format."""
    shutil.copytree(hf, directory)
    tensors = {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        tensors.update(kind(name, tensor) if "_proj.weight" in name else {name: tensor})
    save_file(tensors, directory / "model.safetensors")
    return directory


def edit(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def refusal(directory, monkeypatch, way_out="which llmc does not read; give the checkpoint that"):
    """Return the one-line error of `llmc compile`, raised before the export."""
    monkeypatch.setattr("llmc.compiler.frontend.export.export", None)
    result = CliRunner().invoke(main, ["compile", str(directory), "-o", str(directory / "case")])
    assert result.exit_code == 2, result.output
    line, = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.stderr.endswith(f"{line}\n")
    assert way_out in line
    assert not (directory / "case").exists()
    return line


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_unsupported_quantized_checkpoint_is_refused_by_method(kind, tiny_hf, tmp_path,
                                                                  monkeypatch):
    said, by_config, by_tensors = KINDS[kind]
    directory = quantise(tiny_hf, tmp_path / "hf", kind)
    way_out = {} if kind in (plain_float8, plain_integers) else {
        "way_out": "but its config does not name the method; give the config.json that belongs to"}
    assert re.search(by_tensors, refusal(directory, monkeypatch, **way_out))
    if said is None:
        return
    shutil.copy(tiny_hf / "model.safetensors", directory)  # floating-point weights
    for place in ({"quantization_config": said}, {"compression_config": said},
                  {"text_config": {"quantization_config": said}}):
        edit(directory, **place)
        assert re.search(by_config, refusal(directory, monkeypatch))
        shutil.copy(tiny_hf / "config.json", directory)


@pytest.mark.parametrize(("file", "said", "expected"), [
    ("quantize_config.json", {"bits": 2, "group_size": 128}, r"GPTQ \(2 bits, groups of 128\)"),
    ("quant_config.json", {"w_bit": 8, "q_group_size": 128}, r"AWQ \(8 bits, groups of 128\)"),
    ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}},
     r"NVIDIA ModelOpt \(W4A8_AWQ\)"),
])
def test_an_older_quantization_file_is_detected(file, said, expected, tiny_hf, tmp_path,
                                                monkeypatch):
    directory = shutil.copytree(tiny_hf, tmp_path / "hf")
    (directory / file).write_text(json.dumps(said))
    assert re.search(expected, refusal(directory, monkeypatch))


def test_packed_mxfp4_experts_are_detected():
    tensors = {"model.layers.0.mlp.experts.gate_up_proj_blocks":
               Weight.of(np.zeros((1, 2, 16), np.uint8))}
    with pytest.raises(LlmcError, match="by MXFP4"):
        checkpoint.refuse_quantized_tensors(tensors, "x")


@pytest.mark.parametrize("config", [
    {}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": {}},
    {"quantization_config": dict(quant_method="bitsandbytes", load_in_8bit=False,
                                 load_in_4bit=False)},
    {"quantization_config": "none"},
])
def test_an_empty_quantization_config_is_not_quantized(config):
    assert checkpoint.method_of(config) is None


def test_quantization_is_detected_before_torch_is_imported(tiny_hf, tmp_path):
    directory = shutil.copytree(tiny_hf, tmp_path / "hf")
    edit(directory, quantization_config=dict(quant_method="some-new-method", bits=3))
    for model, expected in ((directory, "some-new-method (3 bits)"),
                            (quantise(tiny_hf, tmp_path / "fp8", block_fp8), "FP8 in blocks")):
        script = f"""
import sys
from llmc.compiler.api import compile
try:
    compile({str(model)!r}, {str(tmp_path / "case")!r})
except Exception as error:
    assert type(error).__name__ == "LlmcError" and {expected!r} in str(error), error
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
        subprocess.run([sys.executable, "-c", script], check=True)
