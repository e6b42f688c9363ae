"""The worked examples of docs/extending."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import families
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file, save_file

import llmc
from llmc import plugins
from llmc.compiler import lower
from llmc.compiler.graph.rewrite import Report, Settings, tidy
from llmc.compiler.quant import checkpoint, readers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "extending"


@pytest.fixture
def examples(monkeypatch):
    """Import a module of the examples."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("softcap", "softcap.op", "fuse_softcap", "rowwise_int8")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def run(graph, target_functions, **feeds):
    """Run a graph in ONNX Runtime with the bodies of llmc's ops; return the outputs."""
    model = gs.export_onnx(graph, do_type_check=False)
    model.functions.extend(target_functions)
    for node in model.graph.node:
        for function in target_functions:
            if node.op_type == function.name:
                node.overload = function.overload
    del model.opset_import[:]
    model.opset_import.extend([onnx.helper.make_opsetid("", plugins.OPSET),
                               onnx.helper.make_opsetid(plugins.DOMAIN, 1),
                               onnx.helper.make_opsetid("com.microsoft", 1)])
    model.ir_version = 10
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)


def graph_of(divisor, factor):
    x = gs.Variable("x", np.float32, ["rows", 16])
    values = [gs.Variable(name, np.float32, ["rows", 16]) for name in ("small", "bounded", "y")]
    nodes = [gs.Node("Div", inputs=[x, gs.Constant("d", np.float32([divisor]))],
                     outputs=[values[0]]),
             gs.Node("Tanh", inputs=[values[0]], outputs=[values[1]]),
             gs.Node("Mul", inputs=[values[1], gs.Constant("f", np.float32([factor]))],
                     outputs=[values[2]])]
    return gs.Graph(nodes, inputs=[x], outputs=[values[2]], opset=plugins.OPSET)


def test_the_ops_body_equals_its_reference(examples):
    op = examples("softcap.op").OP
    for sample in op.samples(np.random.default_rng(0)):
        function = op.function(sample.fields, ["x"])
        x = gs.Variable("x", np.float32, ["rows", 16])
        y = gs.Variable("y", np.float32, ["rows", 16])
        node = gs.Node(op.name, domain=plugins.DOMAIN, attrs=dict(sample.fields), inputs=[x],
                       outputs=[y])
        got, = run(gs.Graph([node], inputs=[x], outputs=[y], opset=plugins.OPSET), [function],
                   **sample.inputs)
        expected, = op.reference(sample.fields, sample.inputs)
        families.assert_close(got, expected, op.tolerance)
        assert op.fit({"x": (3, 16)}, sample.fields) == [(3, 16)]


def test_the_pass_keeps_what_the_graph_computes(examples):
    op, fuse = examples("softcap.op").OP, examples("fuse_softcap").fuse_softcap
    graph, report = graph_of(2.5, 2.5), Report("fuse_softcap")
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32) * 40
    expected, = run(graph, [], x=x)
    fuse(graph, Settings(max_seq_len=32, vocab_multiple=64), report)
    tidy(graph)
    assert [node.op for node in graph.nodes] == ["Softcap"] and report.matches == {"softcap": 1}
    got, = run(graph, [op.function({"cap": 2.5}, ["x"])], x=x)
    families.assert_close(got, expected, 1e-6)


def test_the_pass_refuses_another_factor_with_the_values(examples):
    graph, report = graph_of(2.5, 3.0), Report("fuse_softcap")
    examples("fuse_softcap").fuse_softcap(graph, Settings(max_seq_len=32, vocab_multiple=64),
                                          report)
    assert [node.op for node in graph.nodes] == ["Div", "Tanh", "Mul"]
    assert report.matches == {"softcap": 0}
    assert "divisor 2.5 differs from factor 3.0" in str(report.refusals)


def test_a_model_compiles_with_the_op_and_the_pass(examples, tmp_path, monkeypatch):
    """As if they were in csrc/plugins and compiler/passes."""
    op, fuse = examples("softcap.op").OP, examples("fuse_softcap").fuse_softcap
    known = {**plugins.registry(), op.name: op}
    monkeypatch.setattr(plugins, "registry", lambda: known)
    names = [getattr(step, "name", "") for step in lower.PASSES]
    cut = names.index("add_norm") + 1
    monkeypatch.setattr(lower, "_FUSE", (
        *lower._FUSE[:cut], lower.GraphPass("softcap", fuse), *lower._FUSE[cut:]))
    monkeypatch.setattr(lower, "PASSES", (*lower._FUSE, *lower.PASSES[len(lower._FUSE) - 1:]))
    model = families.tiny_model("gemma2")  # soft-caps its logits
    manifest = llmc.compile(families.save(model, tmp_path / "hf"), tmp_path / "case", tp_size=2)
    assert "Softcap" in manifest.ops
    tokens = list(range(3, 20))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(tokens), expected, 1e-5)


@pytest.fixture(scope="module")
def rowwise_checkpoint(tmp_path_factory):
    """A tiny Llama in the example's format, and its dequantized model."""
    root = tmp_path_factory.mktemp("rowwise")
    families.save(families.tiny_model("llama", num_hidden_layers=1), root / "plain")
    tensors, exact = {}, {}
    for name, tensor in load_file(root / "plain" / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = exact[name] = tensor
            continue
        scale = np.abs(tensor).max(1) / 127
        codes = np.round(tensor / scale[:, None]).astype(np.int8)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.qdata": codes, f"{module}.row_scale": scale}
        exact[name] = codes * scale[:, None]
    config = json.loads((root / "plain" / "config.json").read_text())
    for folder, saved, more in (("hf", tensors, {"quantization_config": {
            "quant_method": "rowwise_int8"}}), ("exact", exact, {})):
        (root / folder).mkdir()
        save_file(saved, root / folder / "model.safetensors", {"format": "pt"})
        (root / folder / "config.json").write_text(json.dumps(config | more))
    return root


def test_the_checkpoint_format_is_read_exactly(examples, rowwise_checkpoint, tmp_path, monkeypatch):
    """As if the example were a file of compiler/quant/readers."""
    reader = examples("rowwise_int8").READER
    known = {**readers.registry(), **dict.fromkeys(reader.methods, reader)}
    monkeypatch.setattr(checkpoint, "registry", lambda: known)
    llmc.compile(rowwise_checkpoint / "hf", tmp_path / "kept")
    llmc.compile(rowwise_checkpoint / "hf", tmp_path / "case", quantize="none")
    llmc.compile(rowwise_checkpoint / "exact", tmp_path / "exact")
    tokens = list(range(3, 20))
    logits = {}
    for name in ("kept", "case", "exact"):
        with llmc.LLM(tmp_path / name) as llm:
            logits[name] = llm.logits(tokens)
            assert bool(llm.manifest.quantization) == (name == "kept")
    families.assert_close(logits["case"], logits["exact"], 1e-5)
    families.assert_close(logits["kept"], logits["exact"], 0.05)  # activations are quantized


@pytest.mark.parametrize("source", ["softcap/plugin.cpp", "softcap/softcap.cu",
                                    "attention_backend.cpp"])
def test_the_sources_compile(extension, source, tmp_path):
    import nvidia
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    includes = [option for root in nvidia.__path__ for folder in (
        "cu13/include", "nccl/include", "cudnn/include") for option in ("-I", f"{root}/{folder}")]
    done = subprocess.run(
        [nvcc, "-std=c++17", "-arch=sm_90", "-I", str(ROOT / "csrc"), *includes, "-c",
         str(EXAMPLES / source), "-o", str(tmp_path / "object.o")],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
