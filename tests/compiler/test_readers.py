"""Readers of quantized checkpoints, registered by their files."""

import sys

import numpy as np
import pytest

from llmc.compiler.graph.weights import Weight
from llmc.compiler.quant import checkpoint, readers
from llmc.errors import LlmcError

TERNARY = """
from llmc.compiler.quant.readers import Mark, Reader
from llmc.compiler.quant.readers.words import int8_codes
from llmc.compiler.quant.stored import Stored


def read(decoder, config):
    if config.get("bits") != 2:
        return False
    for module in decoder.modules("signs"):
        rows, width = decoder.matrix(f"{module}.signs")
        codes = int8_codes(decoder.take(f"{module}.signs", (rows, width), "i"))
        decoder.keep(module, Stored("int8", codes, decoder.scales(f"{module}.size", (rows, 1))))
    return True


READER = Reader(methods={"ternary": "Ternary"}, read=read, marks=(Mark(r"[.]signs", "Ternary"),))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An additional folder of readers."""
    monkeypatch.setattr(readers, "__path__", [*readers.__path__, str(tmp_path)])
    readers.registry.cache_clear()
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"{readers.__name__}.{path.stem}", None)
    readers.registry.cache_clear()


def tensors():
    signs = np.array([[1, -1, 0, 1], [0, 1, 1, -1]], np.int8)
    return {"layer.signs": Weight.of(signs),
            "layer.size": Weight.of(np.array([[0.5], [2.0]], np.float32))}


def test_a_reader_file_registers_itself(folder):
    (folder / "ternary.py").write_text(TERNARY)
    config = {"quantization_config": {"quant_method": "ternary", "bits": 2}}
    assert checkpoint.method_of(config) == "Ternary (2 bits)"
    weight = checkpoint.read_quantized(folder, config, tensors).tensors["layer.weight"]
    np.testing.assert_array_equal(weight.load(), [[0.5, -0.5, 0, 0.5], [0, 2, 2, -2]])
    with pytest.raises(LlmcError, match=r"by Ternary \(3 bits\), which llmc does not read"):
        checkpoint.read_quantized(
            folder, {"quantization_config": {"quant_method": "ternary", "bits": 3}}, tensors)
    with pytest.raises(LlmcError, match="by Ternary .it has a tensor 'layer.signs'"):
        checkpoint.read_quantized(folder, {}, tensors)


def test_a_method_has_one_reader(folder):
    (folder / "other_gptq.py").write_text(
        "from llmc.compiler.quant.readers import Reader\n"
        "READER = Reader(methods={'gptq': 'GPTQ'}, read=lambda decoder, config: True)\n")
    with pytest.raises(ValueError, match="quant_method 'gptq' has two readers"):
        readers.registry()


@pytest.mark.parametrize(("name", "method"), [
    ("a.g_idx", "GPTQ"), ("a.qweight", "AWQ or GPTQ"), ("a.weight_scale_inv", "FP8 in blocks"),
    ("a.weight_scale", "compressed-tensors or NVIDIA ModelOpt"), ("a.SCB", "bitsandbytes in 8")])
def test_a_checkpoint_is_recognized_by_its_tensors(name, method):
    known = {"a.qzeros": Weight.of(np.zeros(2, np.int32)), name: Weight.of(np.zeros(2, np.int32))} \
        if name == "a.g_idx" else {name: Weight.of(np.zeros(2, np.float32))}
    with pytest.raises(LlmcError, match=rf"quantized by {method}[^,]*\(it has a tensor '{name}'"):
        checkpoint.refuse_quantized_tensors(known, "x")
