"""Ops in an external folder are compiled, sharded and run without changes to llmc."""

import sys

import families
import numpy as np
import onnx_graphsurgeon as gs
import pytest
import torch
from safetensors.numpy import load_file

import llmc
from llmc import plugins
from llmc.compiler import api
from llmc.compiler.frontend import load
from llmc.compiler.graph.weights import Weight

OPS = {
    "channel_clamp": '''
"""y = clamp(x, -limit, limit) * gain, element by element."""

from llmc.plugins import Op
from llmc.plugins.roles import ByElements

OP = Op(
    name="ChannelClamp",
    version=3,
    inputs=("x", "gain"),
    outputs=("y",),
    fields={"limit": 1.0},
    required=("limit",),
    shapes=lambda shapes, fields: [shapes["x"]],
    shard=(ByElements(vectors=("gain",)),),
    body=lambda fields, present: f"""high = Constant<value_float={fields['limit']!r}>()
        low = Neg(high)
        bounded = Clip(x, low, high)
        y = Mul(bounded, gain)""",
)
''',
    "scaled_gemm": '''
"""y = (x · weightᵀ) · scale, weight as [out, in], scale [out]."""

from llmc.plugins import Op
from llmc.plugins.roles import ByColumns, ByRows

OP = Op(
    name="ScaledGemm",
    version=1,
    inputs=("x", "weight", "scale"),
    outputs=("y",),
    fields={},
    shapes=lambda shapes, fields: [(*shapes["x"][:-1], shapes["weight"][0])],
    shard=(ByColumns(("weight",)), ByRows(("weight", "scale"))),
    body=lambda fields, present: """transposed = Transpose<perm=[1, 0]>(weight)
        product = MatMul(x, transposed)
        y = Mul(product, scale)""",
)
'''}
LIMIT = 0.3
GAIN = np.random.default_rng(5).uniform(0.5, 2.0, 100).astype(np.float32)
SCALES = {name: np.random.default_rng(6).uniform(0.5, 2.0, width).astype(np.float32)
          for name, width in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64))}
TOKENS = [5, 6, 7, 8, 11, 12, 3]


@pytest.fixture
def own_ops(tmp_path, monkeypatch):
    """A folder of op folders on the registry's path."""
    for name, text in OPS.items():
        (tmp_path / "ops" / name).mkdir(parents=True)
        (tmp_path / "ops" / name / "op.py").write_text(text)
    monkeypatch.setattr(plugins, "__path__", [*plugins.__path__, str(tmp_path / "ops")])
    plugins.registry.cache_clear()
    yield
    plugins.registry.cache_clear()
    for name in OPS:
        sys.modules.pop(f"{plugins.__name__}.{name}.op", None)
        sys.modules.pop(f"{plugins.__name__}.{name}", None)


def linear(graph, name):
    """Return the raw node that multiplies by a weight, and the weight."""
    weight = next(t for t in graph.tensors().values() if t.name.endswith(name))
    node = weight.outputs[0]
    while node.op not in ("MatMul", "Gemm"):
        node, = node.outputs[0].outputs
    return node, weight


def constant(name, array):
    return gs.Constant(name, Weight.of(array, name))


def with_own_ops(raw):
    """Insert external ops as an exporter would.

    A ChannelClamp before layer 0's down_proj, and ScaledGemms for layer 1's attention projections.
    """
    graph = raw.graph
    down, _ = linear(graph, "layers.0.mlp.down_proj.weight")
    clamped = gs.Variable("clamped", np.float32, down.inputs[0].shape)
    graph.nodes.append(gs.Node("ChannelClamp", "clamp", {"limit": LIMIT}, domain="llmc",
                               inputs=[down.inputs[0], constant("gain", GAIN)], outputs=[clamped]))
    down.inputs[0] = clamped
    for name, scale in SCALES.items():
        node, weight = linear(graph, f"layers.1.self_attn.{name}.weight")
        result, = node.outputs
        node.outputs.clear()
        graph.nodes.append(gs.Node("ScaledGemm", result.name, domain="llmc", outputs=[result],
                                   inputs=[node.inputs[0], weight,
                                           constant(f"layers.1.{name}.scale", scale)]))
    return raw


def expected_logits(tiny_model):
    """Return transformers' logits with the same changes as hooks."""
    layers = tiny_model.model.layers
    hooks = [layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: (args[0].clamp(-LIMIT, LIMIT) * torch.from_numpy(GAIN),))]
    hooks += [getattr(layers[1].self_attn, name).register_forward_hook(
        lambda module, args, out, scale=scale: out * torch.from_numpy(scale))
        for name, scale in SCALES.items()]
    try:
        return families.reference_logits(tiny_model, TOKENS)
    finally:
        for hook in hooks:
            hook.remove()


def test_ops_of_an_external_folder_are_compiled_sharded_and_run(own_ops, tiny_hf, tiny_model,
                                                                tmp_path, monkeypatch):
    exported = load(tiny_hf)
    expected = expected_logits(tiny_model)
    assert np.abs(expected - families.reference_logits(tiny_model, TOKENS)).max() > 0.1
    for tp_size in (1, 2):
        raw = families.copy_raw(exported)
        monkeypatch.setattr(api, "load", lambda *args, raw=raw, **options: with_own_ops(raw))
        case = tmp_path / f"tp{tp_size}"
        manifest = llmc.compile(tiny_hf, case, tp_size=tp_size)
        assert (manifest.ops["ChannelClamp"], manifest.ops["ScaledGemm"]) == (3, 1)
        with llmc.LLM(case) as llm:
            families.assert_close(llm.logits(TOKENS), expected)
        for rank in range(tp_size):  # everything shardable is sharded
            stored = load_file(case / f"chip{rank}" / "weights.safetensors")
            shapes = {name: array.shape for name, array in stored.items()}
            assert shapes["gain"] == (100 // tp_size,)
            assert shapes["model.layers.1.self_attn.o_proj.weight"] == (64, 64 // tp_size)
            assert shapes["layers.1.o_proj.scale"] == (64,)
            merged = next(shape for name, shape in shapes.items()
                          if name.startswith("model.layers.1.self_attn.qkv_proj"))
            assert merged == (128 // tp_size, 64)
