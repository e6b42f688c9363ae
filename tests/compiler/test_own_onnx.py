"""ONNX files of users, in every form of torch's exporter, fuse to the same llmc graph."""

import contextlib
import io
from collections import Counter

import families
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file

import llmc
from llmc.compiler.frontend import load
from llmc.compiler.graph.weights import BLOCK_BYTES, Weight
from llmc.compiler.lower import lower
from llmc.compiler.options import CompileOptions


def export(model, path, attention, opset, optimize=True, mask=False):
    """Export as a user would."""
    model.set_attn_implementation(attention)

    class Stateless(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, position_ids):
            return self.model(input_ids=input_ids, position_ids=position_ids,
                              use_cache=False).logits

    ids = torch.zeros((2, 5), dtype=torch.int64)
    positions = torch.arange(5)[None].expand(2, 5).clone()
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(Stateless().eval(), (ids, positions), path, dynamo=True,
                          opset_version=opset, optimize=optimize, verbose=False,
                          input_names=["input_ids", "position_ids"], output_names=["logits"],
                          dynamic_shapes=(shape, shape), external_data=not optimize)


FORMS = [("eager", 18, True), ("sdpa", 18, True), ("eager", 23, True), ("sdpa", 23, True),
         ("sdpa", 23, False)]


# Each attention and opset once, with families of distinct structure; `make test-all` has all.
@pytest.mark.parametrize(("family", "attention", "opset", "optimize"), [
    pytest.param(family, *form, marks=[pytest.mark.thorough] * (family != once))
    for form, once in zip(FORMS, ("", "gpt2", "llama", "qwen3", ""), strict=True)
    for family in ("llama", "gpt2", "qwen3", "gemma3_text")])
def test_every_onnx_form_fuses_to_the_hugging_face_graph(family, attention, opset, optimize,
                                                         tmp_path):
    changes = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
    if family == "gemma3_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    model = families.tiny_model(family, **changes)
    directory = families.save(model, tmp_path / "hf")
    export(model, tmp_path / "model.onnx", attention, opset, optimize)
    own = lower(load(tmp_path / "model.onnx", hf_dir=directory), CompileOptions()).graphs[0]
    route = lower(load(directory), CompileOptions()).graphs[0]
    assert form(own) == form(route)
    llmc.compile(tmp_path / "model.onnx", tmp_path / "case", hf_dir=directory, tp_size=2)
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 20).tolist()
    model.set_attn_implementation("eager")
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(tokens), families.reference_logits(model, tokens))


def export_without_positions(model, path, opset):
    """Export as a user would, for a model that computes its positions."""
    class Stateless(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids=input_ids, use_cache=False).logits

    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(Stateless().eval(), (torch.zeros((2, 5), dtype=torch.int64),), path,
                          dynamo=True, opset_version=opset, verbose=False,
                          input_names=["input_ids"], output_names=["logits"],
                          dynamic_shapes=(shape,))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    model = families.tiny_model("llama", num_hidden_layers=2)
    return model, families.save(model, tmp_path_factory.mktemp("llama") / "hf")


def test_position_ids_are_optional_in_opset_23(two_layers, tmp_path):
    """torch then emits RotaryEmbedding nodes with one row of cos and sin for all sequences."""
    model, directory = two_layers
    export_without_positions(model, tmp_path / "model.onnx", 23)
    ops = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert "RotaryEmbedding" in ops
    manifest = llmc.compile(tmp_path / "model.onnx", tmp_path / "case", hf_dir=directory)
    names = [file.name for file in manifest.source.files]
    assert {"model.onnx", "config.json"} <= {*names} and "model.safetensors" not in names
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 20).tolist()
    with llmc.LLM(tmp_path / "case") as llm:
        families.assert_close(llm.logits(tokens), families.reference_logits(model, tokens))


@pytest.mark.parametrize(("shape", "found"), [((1, 7), r"\[1, 7\]"), ((1, "seq"), r"\[1, 'seq'\]"),
                                              (("batch", 7), r"\['batch', 7\]"),
                                              (("seq",), r"\['seq'\]")])
def test_fixed_input_shapes_are_refused_before_weights_are_read(shape, found, two_layers, tmp_path):
    """As exported by torch without dynamic_shapes."""
    value = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, shape)
    out = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.INT64, shape)
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["input_ids"], ["logits"])], "g", [value], [out])),
        tmp_path / "model.onnx")
    with pytest.raises(llmc.LlmcError, match=f"has input_ids of shape {found}, expected "
                                             r".batch, seq. .* dynamic_shapes="):
        llmc.compile(tmp_path / "model.onnx", tmp_path / "case", hf_dir=two_layers[1])


def form(graph):
    """Return the ops in order with their attributes, floats rounded."""
    return Counter((node.op, tuple(sorted(
        (key, round(value, 5) if isinstance(value, float) else str(value))
        for key, value in node.attrs.items()))) for node in graph.nodes)


def one_layer(mask, path, vocab=8, width=8, **saving):
    """Write handwritten attention of two heads with the given mask; return its weights.

    The mask is computed from the number of tokens.
    """
    text = f"""<ir_version: 10, opset_import: ["": 18]>
    tiny (int64[batch, seq] input_ids) => (float[batch, seq, {vocab}] logits) {{
      x = Gather(table, input_ids)
      q = MatMul(x, wq)
      k = MatMul(x, wk)
      v = MatMul(x, wv)
      shape = Constant<value_ints=[0, 0, 2, {width // 2}]>()
      q4 = Reshape(q, shape)
      k4 = Reshape(k, shape)
      v4 = Reshape(v, shape)
      qh = Transpose<perm=[0, 2, 1, 3]>(q4)
      kh = Transpose<perm=[0, 2, 3, 1]>(k4)
      vh = Transpose<perm=[0, 2, 1, 3]>(v4)
      raw = MatMul(qh, kh)
      half = Constant<value_float=0.5>()
      scaled = Mul(raw, half)
      n1 = Shape<start=1, end=2>(input_ids)
      n = Squeeze(n1)
      zero = Constant<value_int=0>()
      one = Constant<value_int=1>()
      j = Range(zero, n, one)
      axis = Constant<value_ints=[1]>()
      i = Unsqueeze(j, axis)
      {mask}
      low = Constant<value_float=-1e9>()
      nothing = Constant<value_float=0.0>()
      bias = Where(visible, nothing, low)
      masked = Add(scaled, bias)
      p = Softmax<axis=-1>(masked)
      o = MatMul(p, vh)
      ot = Transpose<perm=[0, 2, 1, 3]>(o)
      flat = Constant<value_ints=[0, 0, {width}]>()
      o3 = Reshape(ot, flat)
      logits = MatMul(o3, wo)
    }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {"table": (vocab, width), "wq": (width, width), "wk": (width, width),
              "wv": (width, width), "wo": (width, vocab)}
    weights = {name: rng.standard_normal(shape).astype(np.float32)
               for name, shape in shapes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name)
                                   for name, array in weights.items())
    onnx.save(onnx.shape_inference.infer_shapes(model), path, **saving)
    return weights


def compile_mask(mask, tmp_path):
    one_layer(mask, tmp_path / "m.onnx")
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "max_position_embeddings": 32}')
    return llmc.compile(tmp_path / "m.onnx", tmp_path / "case", hf_dir=tmp_path)


@pytest.mark.parametrize(("visible", "window", "chunk"), [
    ("visible = Identity(b)", 0, 0),
    ("d = Sub(i, j)\na = Less(d, w)\nvisible = And(a, b)", 6, 0),
    ("c = Div(i, w)\nd = Div(j, w)\na = Equal(c, d)\nvisible = And(a, b)", 0, 6)])
def test_causal_windowed_and_chunked_masks_are_recognized(visible, window, chunk, tmp_path):
    compile_mask(f"w = Constant<value_int=6>()\nb = LessOrEqual(j, i)\n{visible}", tmp_path)
    model = onnx.load(tmp_path / "case" / "chip0" / "graph.onnx", load_external_data=False)
    node, = [n for n in model.graph.node if n.op_type == "CausalAttention"]
    fields = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (fields.get("window", 0), fields.get("chunk", 0)) == (window, chunk)
    assert fields["scale"] == 0.5


@pytest.mark.parametrize(("mask", "reason"), [
    ("visible = GreaterOrEqual(j, i)", "not causal"),
    ("f = Constant<value_int=3>()\nvisible = Less(j, f)", "not causal"),
    ("v0 = Less(j, i)\nvisible = Identity(v0)", "not causal"),
])
def test_a_mask_that_is_not_causal_is_refused_with_the_node(mask, reason, tmp_path):
    with pytest.raises(llmc.LlmcError, match=f"attention was not recognized.*{reason}"):
        compile_mask(mask, tmp_path)
    assert not (tmp_path / "case").exists()


def test_a_graph_with_a_kv_cache_is_refused(tmp_path):
    one_layer("visible = LessOrEqual(j, i)", tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.input.append(onnx.helper.make_tensor_value_info("past_key_0", 1, [1]))
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    with pytest.raises(llmc.LlmcError, match="has a KV cache as input"):
        llmc.compile(tmp_path / "m.onnx", tmp_path / "case", hf_dir=tmp_path)


@pytest.fixture
def external(tmp_path):
    """A folder with a model whose weights are in `weights.bin`, and an unrelated file."""
    folder = tmp_path / "model"
    folder.mkdir()
    one_layer("visible = LessOrEqual(j, i)", tmp_path / "whole.onnx")
    (folder / "config.json").write_text('{"model_type": "tiny", "max_position_embeddings": 32}')
    model = onnx.load(tmp_path / "whole.onnx")
    for tensor in model.graph.initializer:  # an external scale, small enough to be a constant
        onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    scale = onnx.helper.make_tensor("half", 1, [], [0.5])
    next(node for node in model.graph.node if node.output[0] == "half").op_type = "Identity"
    half = next(node for node in model.graph.node if node.output[0] == "half")
    del half.attribute[:]
    half.input.append("half_value")
    scale = onnx.numpy_helper.from_array(np.array(0.5, np.float32), "half_value")
    onnx.external_data_helper.set_external_data(scale, "weights.bin")
    model.graph.initializer.append(scale)
    onnx.save(model, folder / "m.onnx")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
    return folder


def located(folder, tensor, **entries):
    """Change the location of a tensor's external data."""
    model = onnx.load(folder / "m.onnx", load_external_data=False)
    found = next(t for t in model.graph.initializer if t.name == tensor)
    entries = {entry.key: entry.value for entry in found.external_data} | entries
    del found.external_data[:]
    for key, value in entries.items():
        found.external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(model.SerializeToString())


def test_external_data_is_relative_to_the_model(external, tmp_path, monkeypatch):
    """`tmp_path` has a file of the same name, with other bytes."""
    monkeypatch.chdir(tmp_path)
    graph = lower(load(external / "m.onnx", hf_dir=external), CompileOptions()).graphs[0]
    attention, = [node for node in graph.nodes if node.op == "CausalAttention"]
    assert attention.attrs["scale"] == 0.5
    whole = {t.name: onnx.numpy_helper.to_array(t)
             for t in onnx.load(tmp_path / "whole.onnx").graph.initializer}
    embedding = next(node for node in graph.nodes if node.op == "Embedding").inputs[1]
    np.testing.assert_array_equal(embedding._values.load(), whole["table"])


@pytest.mark.parametrize("tensor", ["wq", "half_value"])
@pytest.mark.parametrize(("entries", "match"), [
    ({"location": "../weights.bin"}, "'../weights.bin', which leads outside of its folder"),
    ({"location": "/etc/passwd"}, "which is an absolute path"),
    ({"location": "..\\weights.bin"}, "contains a backslash or a null byte"),
    ({"location": ""}, "which is empty"),
    ({"location": "gone.bin"}, "lists 'gone.bin', which is missing"),
    ({"offset": "1000000"}, r"is at bytes 1000000 to 1000\d+ of 'weights.bin', which has 1284"),
    ({"offset": "-8"}, "has offset '-8', expected a number of bytes"),
    ({"length": "3"}, r"has length 3 in 'weights.bin', expected \d+ bytes"),
    ({"length": "many"}, "has length 'many'"),
    ({"where": "here"}, r"unknown keys in external_data: \['where'\]"),
])
def test_missing_external_data_is_refused(external, tensor, entries, match):
    located(external, tensor, **entries)
    with pytest.raises(llmc.LlmcError, match=match) as caught:
        load(external / "m.onnx", hf_dir=external)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(external, value):
    model = onnx.load(external / "m.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == "wq")
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    with open(external / "weights.bin", "r+b") as file:
        file.seek(offset)
        file.write(np.float32(value).tobytes())
    with pytest.raises(llmc.LlmcError, match=r"'wq' \[8, 8\] has . NaN and . infinite values"):
        llmc.compile(external / "m.onnx", external / "case", hf_dir=external)


def test_truncated_external_data_is_refused(external):
    data = (external / "weights.bin").read_bytes()
    (external / "weights.bin").write_bytes(data[:600])
    with pytest.raises(llmc.LlmcError, match=r"\[8, 8\] is at bytes 512 to 768 of 'weights.bin', "
                                             r"which has 600 bytes; the file is truncated"):
        load(external / "m.onnx", hf_dir=external)


def test_logits_are_selected_by_output_name(tmp_path):
    one_layer("visible = LessOrEqual(j, i)", tmp_path / "m.onnx")
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("x", 1, None))
    onnx.save(model, tmp_path / "m.onnx")
    raw = load(tmp_path / "m.onnx", hf_dir=tmp_path)
    assert raw.graph.outputs[0].inputs[0].op == "MatMul"
    assert raw.notes == ("the output 'x' is removed",)


def test_a_large_vocabulary_is_processed_in_blocks(tmp_path, monkeypatch):
    """From an ONNX file with a transposed LM head to the case directory."""
    vocab, width = 262144, 32
    weights = one_layer("visible = LessOrEqual(j, i)", tmp_path / "m.onnx", vocab, width,
                        save_as_external_data=True, location="m.bin")
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "max_position_embeddings": 32}')
    real, largest = Weight.rows, [0]

    def rows(self, start, stop):
        block = real(self, start, stop)
        largest[0] = max(largest[0], block.nbytes)
        return block

    monkeypatch.setattr(Weight, "rows", rows)
    llmc.compile(tmp_path / "m.onnx", tmp_path / "case", hf_dir=tmp_path)
    assert vocab * width * 4 >= 2 * BLOCK_BYTES
    assert BLOCK_BYTES // 2 < largest[0] <= BLOCK_BYTES
    written = load_file(tmp_path / "case" / "chip0" / "weights.safetensors")
    np.testing.assert_array_equal(written["table"], weights["table"])
    np.testing.assert_array_equal(written["wo"], weights["wo"].T)
