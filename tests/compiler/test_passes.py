"""Each pass preserves the graph's outputs, removes the old ops, and returns correct counts.

Graphs that must not match do not.
"""

from collections import Counter

import families
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from llmc.compiler.check.execute import run_graph
from llmc.compiler.frontend import load
from llmc.compiler.graph.rewrite import Report, Settings, tidy
from llmc.compiler.graph.verify import verify
from llmc.compiler.graph.weights import Weight
from llmc.compiler.lower import _FUSE, GraphPass, run_pass
from llmc.compiler.passes.attention import attention
from llmc.compiler.passes.attention_projections import attention_projections
from llmc.compiler.passes.embedding import embedding
from llmc.compiler.passes.experts_residual import experts_residual
from llmc.compiler.passes.fold import fold
from llmc.compiler.passes.gate import gate
from llmc.compiler.passes.gemm import activation, gated_mlp, gemm, residual
from llmc.compiler.passes.norm import add_norm, norm
from llmc.compiler.passes.norm_gate import norm_gate
from llmc.compiler.passes.norm_gemm import norm_gemm
from llmc.compiler.passes.packing import pack, pad_vocabulary, select_tokens
from llmc.compiler.passes.projections import projections
from llmc.compiler.passes.sdpa import sdpa

SETTINGS = Settings(max_seq_len=32, vocab_multiple=64)
TOKENS = np.random.default_rng(0).integers(3, families.VOCAB, 14)
BATCHED = {"input_ids": TOKENS[None], "position_ids": np.arange(14)[None]}
# Passes that keep the batch axis; attention and packing change the graph's inputs.
ROW_WISE = [("fold", fold), ("norm", norm), ("embedding", embedding), ("gemm", gemm),
            ("sdpa", sdpa), ("gated_mlp", gated_mlp), ("activation", activation),
            ("residual", residual), ("add_norm", add_norm)]


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "phi3", "qwen3", "gpt_neox"])
def family(request, tmp_path_factory):
    changes = {"n_layer": 2} if request.param == "gpt2" else {"num_hidden_layers": 2}
    model = families.tiny_model(request.param, **changes)
    directory = families.save(model, tmp_path_factory.mktemp(request.param))
    return request.param, directory, families.reference_logits(model, TOKENS.tolist())


def run(graph, function, settings=SETTINGS):
    report = Report(function.__name__)
    tidy(graph)
    function(graph, settings, report)
    tidy(graph)
    verify(graph, function.__name__)
    return report


def ops(graph):
    return Counter(node.op for node in graph.nodes)


def packed_feeds(graph):
    feeds = {"input_ids": TOKENS, "position_ids": np.arange(14),
             "cu_seqlens": np.array([0, 14], np.int32), "past_lens": np.zeros(1, np.int32),
             "logits_indices": np.arange(14)}
    for tensor in graph.inputs:
        if "_cache_" in tensor.name:
            feeds[tensor.name] = np.zeros((1, *tensor.shape[1:]), np.float32)
    return feeds


def test_every_pass_preserves_the_graph_s_outputs(family):
    _, directory, expected = family
    graph = load(directory).graph
    for _, function in ROW_WISE:
        run(graph, function)
        logits = run_graph(graph, BATCHED, ["logits"])["logits"][0]
        families.assert_close(logits, expected, 2e-5)
    for function in (attention, pack):
        run(graph, function)
    families.assert_close(run_graph(graph, packed_feeds(graph), ["logits"])["logits"], expected,
                          2e-5)
    for function in (select_tokens, pad_vocabulary):
        run(graph, function)
    logits = run_graph(graph, packed_feeds(graph), ["logits"])["logits"]
    assert logits.shape == (14, 128)
    assert not logits[:, families.VOCAB:].any()
    families.assert_close(logits[:, :families.VOCAB], expected, 2e-5)


EXPECTED = {  # fused ops of two layers
    "llama": {"Embedding": 1, "RMSNorm": 5, "CausalAttention": 2, "GatedMLP": 2, "GemmBiasRes": 4,
              "GemmBiasAct": 3},
    "gpt2": {"Embedding": 1, "LayerNorm": 5, "CausalAttention": 2, "GemmBiasAct": 5,
             "GemmBiasRes": 4},
    "gemma2": {"Embedding": 1, "RMSNorm": 5, "AddRMSNorm": 4, "CausalAttention": 2, "GatedMLP": 2,
               "GemmBiasAct": 7, "Div": 1, "Tanh": 1, "Mul": 1},
    "phi3": {"Embedding": 1, "RMSNorm": 5, "CausalAttention": 2, "GatedMLP": 2, "GemmBiasRes": 4,
             "GemmBiasAct": 3},
    "qwen3": {"Embedding": 1, "RMSNorm": 5, "CausalAttention": 2, "GatedMLP": 2, "GemmBiasRes": 4,
              "GemmBiasAct": 3},
    "gpt_neox": {"Embedding": 1, "LayerNorm": 3, "AddLayerNorm": 2, "CausalAttention": 2,
                 "GemmBiasAct": 7, "GemmBiasRes": 2},
}


def test_only_fused_ops_are_left(family):
    name, directory, _ = family
    graph = load(directory).graph
    for function in [f for _, f in ROW_WISE[:5]] + [attention] + [f for _, f in ROW_WISE[5:]]:
        run(graph, function)
    run(graph, pack)
    assert ops(graph) == EXPECTED[name]


def test_fold_removes_constants_and_no_ops_and_keeps_weights_unread(family):
    graph = load(family[1]).graph
    report = run(graph, fold)
    left = ops(graph)
    assert not {"Constant", "Identity", "CastLike", "SplitToSequence"} & set(left)
    assert report.matches["weight"] > 0 or family[0] == "gpt2"


def small_graph(text, constants):
    """Parse a graph from ONNX text, with lazy weights."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 23, "llmc": 1]> g (int64[batch, seq] input_ids) => '
        f"(float[batch, seq, 6] logits) {{ x = Gather(table, input_ids)\n{text} }}")
    rng = np.random.default_rng(1)
    arrays = {"table": rng.standard_normal((9, 6)).astype(np.float32), **constants}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and tensor.name in arrays and tensor.values.ndim:
            tensor._values = Weight.of(arrays[tensor.name], tensor.name)
    return graph


def before_after(text, constants, *functions):
    feeds = {"input_ids": np.arange(8).reshape(2, 4)}
    graph = small_graph(text, constants)
    expected = run_graph(graph, feeds, ["logits"])["logits"]
    reports = [run(graph, function) for function in functions]
    actual = run_graph(graph, feeds, ["logits"])["logits"]
    families.assert_close(actual, expected, 1e-5)
    return graph, reports


VECTOR = np.linspace(0.5, 1.5, 6, dtype=np.float32)
SQUARE = np.random.default_rng(2).standard_normal((6, 6)).astype(np.float32)
RMS = """two = Constant<value_float=2.0>() eps = Constant<value_float=1e-5>()
axes = Constant<value_ints=[-1]>() p = Pow(x, two) m = ReduceMean(p, axes) a = Add(m, eps)
s = Sqrt(a) """


@pytest.mark.parametrize("text", [
    RMS + "r = Reciprocal(s) n = Mul(x, r) logits = Mul(w, n)",
    RMS + "n = Div(x, s) logits = Mul(n, w)",
    RMS.replace("Pow(x, two)", "Mul(x, x)") + "n = Div(x, s) logits = Mul(n, w)",
    "logits = RMSNormalization<axis=-1, epsilon=1e-5>(x, w)",
])
def test_rms_norm_in_every_form(text):
    graph, _ = before_after(text, {"w": VECTOR}, fold, norm)
    assert ops(graph) == {"Gather": 1, "RMSNorm": 1}


def test_one_plus_w_is_folded_into_the_weight():
    text = RMS + "r = Reciprocal(s) n = Mul(x, r) one = Constant<value_float=1.0>() " \
        "g = Add(w, one) logits = Mul(n, g)"
    graph, _ = before_after(text, {"w": VECTOR}, fold, norm)
    assert ops(graph) == {"Gather": 1, "RMSNorm": 1}


@pytest.mark.parametrize(("text", "normed"), [
    ("y = MatMul(x, square) r = Reciprocal(s) logits = Mul(r, y)", True),
    ("y = MatMul(x, square) logits = Div(y, s)", True),
    ("y = MatMul(x, square) logits = Mul(y, s)", False),
    ("d = Add(x, x) y = MatMul(d, square) r = Reciprocal(s) logits = Mul(y, r)", False),
    ("y = MatMul(x, square) r = Reciprocal(s) z = Mul(r, y) logits = Add(z, y)", False)])
def test_rms_norm_after_a_multiplication(text, normed):
    graph, _ = before_after(RMS + text, {"square": SQUARE}, fold, norm)
    assert ("RMSNorm" in ops(graph)) == normed
    assert not normed or ops(graph) == {"Gather": 1, "RMSNorm": 1, "MatMul": 1}


@pytest.mark.parametrize("parts", [
    "a, b = Split<axis=0>(square, sizes)",
    "a = Slice(square, zero, three) b = Slice(square, three, six, zero, one)"])
def test_gathered_weight_rows_are_folded(parts):
    numbers = " ".join(f"{name} = Constant<value_ints=[{value}]>()" for name, value in (
        ("zero", 0), ("one", 1), ("three", 3), ("six", 6), ("sizes", "3, 3")))
    graph, _ = before_after(f"""{numbers} {parts} l, r = Split<axis=-1>(x, sizes)
        y = MatMul(l, a) z = MatMul(r, b) logits = Add(y, z)""", {"square": SQUARE}, fold)
    assert ops(graph) == {"Gather": 1, "Split": 1, "MatMul": 2, "Add": 1}


def test_exporter_decompositions_are_folded():
    text = """zero = Constant<value_float=0.0>() l = Constant<value_ints=[-1]>()
    t = Exp(x) o = Add(t, zero) e = Exp(o) i = Unsqueeze(input_ids, l) j = Concat<axis=-1>(i)
    g = GatherND(rows, j) p = Transpose<perm=[0, 1, 2]>(g) logits = Add(e, p)"""
    graph, _ = before_after(text, {"rows": np.tile(VECTOR, (9, 1))}, fold)
    assert ops(graph) == {"Gather": 2, "Exp": 2, "Add": 1}


def test_an_expand_before_a_broadcasting_op_is_removed():
    graph = small_graph("e = Exp(x) there = Shape(x) r = Expand(b, there) logits = Add(e, r)",
                        {"b": VECTOR})
    feeds = {"input_ids": np.arange(8).reshape(2, 4)}
    expected = run_graph(graph, feeds, ["logits"])["logits"]
    graph.tensors()["r"].shape = ["batch", "seq", 6]  # as annotated by exporters
    run(graph, fold)
    assert ops(graph) == {"Gather": 1, "Exp": 1, "Add": 1}
    families.assert_close(run_graph(graph, feeds, ["logits"])["logits"], expected, 1e-6)


def test_layer_norm_decomposed():
    text = """axes = Constant<value_ints=[-1]>() m = ReduceMean(x, axes) c = Sub(x, m)
    two = Constant<value_float=2.0>() eps = Constant<value_float=1e-5>() p = Pow(c, two)
    v = ReduceMean(p, axes) a = Add(v, eps) s = Sqrt(a) n = Div(c, s) g = Mul(n, w)
    logits = Add(g, b)"""
    graph, _ = before_after(text, {"w": VECTOR, "b": VECTOR - 1}, fold, norm)
    assert ops(graph) == {"Gather": 1, "LayerNorm": 1}


def test_a_mean_outside_a_norm_is_kept():
    text = RMS + "logits = Mul(x, s)"
    graph, reports = before_after(text, {}, fold, norm)
    assert "RMSNorm" not in ops(graph)
    assert "neither RMSNorm nor LayerNorm" in reports[1].refusals[0]


def test_add_norm_keeps_the_sum_for_other_readers():
    text = "r = Mul(x, x) t = Add(x, r) n = RMSNormalization<axis=-1>(t, w) logits = Add(n, t)"
    graph, _ = before_after(text, {"w": VECTOR}, fold, norm, add_norm)
    assert ops(graph) == {"Gather": 1, "Mul": 1, "AddRMSNorm": 1, "Add": 1}


# Two of four experts for each token, with result `y`.
EXPERTS = """r = MatMul(x, router) e, s = llmc.Route<top_k=2>(r)
y = llmc.Experts<top_k=2>(x, e, s, gate_up, down) """
STACKS = {"router": SQUARE[:, :4].copy(), "w": VECTOR, "b": VECTOR - 1, "square": SQUARE,
          "gate_up": np.stack([np.concatenate([SQUARE, SQUARE.T])[i:i + 6] for i in range(4)]),
          "down": np.stack([SQUARE[:, i:i + 3] for i in range(4)])}


@pytest.mark.parametrize("normed", ["RMSNormalization<axis=-1>(t, w)",
                                    "LayerNormalization<axis=-1>(t, w, b)"])
@pytest.mark.parametrize("added", ["y, x", "x, y"])
def test_experts_fuse_the_residual_of_the_next_norm(normed, added):
    text = f"{EXPERTS} t = Add({added}) n = {normed} g = MatMul(n, square) logits = Add(g, t)"
    graph, _ = before_after(text, STACKS, fold, norm, gemm, add_norm, experts_residual, norm_gemm)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 1, "Route": 1, "Experts": 1, "NormGemm": 1,
                          "Add": 1}


ACTIVATIONS = {
    "silu": "s = Sigmoid(y) z = Mul(y, s)",
    "relu": "z = Relu(y)",
    "relu2": "r = Relu(y) z = Mul(r, r)",
    "gelu": "k = Constant<value_float=1.4142135>() d = Div(y, k) e = Erf(d) "
            "one = Constant<value_float=1.0>() f = Add(e, one) t = Mul(y, f) "
            "h = Constant<value_float=0.5>() z = Mul(t, h)",
    "gelu_tanh": 'z = Gelu<approximate="tanh">(y)',
    "quick_gelu": "k = Constant<value_float=1.702>() d = Mul(y, k) s = Sigmoid(d) z = Mul(y, s)",
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gemm_fuses_its_bias_and_activation(name):
    text = f"m = MatMul(x, w1) y = Add(m, b) {ACTIVATIONS[name]} logits = MatMul(z, w2)"
    graph, _ = before_after(text, {"w1": SQUARE, "b": VECTOR, "w2": SQUARE.T.copy()}, fold, gemm,
                            activation)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 2}
    assert graph.nodes[1].attrs["activation"] == name


def test_an_unknown_activation_is_kept():
    text = "y = MatMul(x, w1) c = Sin(y) logits = Mul(c, y)"
    graph, _ = before_after(text, {"w1": SQUARE}, fold, gemm, activation)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 1, "Sin": 1, "Mul": 1}


@pytest.mark.parametrize("bound", [0.5, 30.0, 5000.0])
@pytest.mark.parametrize(("text", "left"), [
    ("m = MatMul(x, w1) y = Min(m, bound) s = Sigmoid(y) logits = Mul(y, s)",
     {"GemmBiasAct": 1, "Min": 1, "Sigmoid": 1, "Mul": 1}),
    ("g = MatMul(x, w1) y = Min(g, bound) s = Sigmoid(y) a = Mul(y, s) u = MatMul(x, w2) "
     "logits = Mul(a, u)", {"GemmBiasAct": 2, "Min": 1, "Sigmoid": 1, "Mul": 2}),
    ("n = RMSNormalization(x, w) logits = Min(n, bound)", {"RMSNorm": 1, "Min": 1}),
    (RMS + "n = Div(x, s) g = Mul(n, w) logits = Min(g, bound)", {"RMSNorm": 1, "Min": 1})])
def test_a_wide_clamp_is_recognized(text, left, bound):
    graph, _ = before_after(f"bound = Constant<value_float={bound}>() {text}",
                            {"w": VECTOR, "w1": SQUARE, "w2": SQUARE.T.copy()}, fold, norm, gemm,
                            activation, gated_mlp)
    assert ops(graph) == {"Gather": 1, **left}


def test_gemm_fuses_its_residual():
    text = "m = MatMul(x, w1) y = Add(m, b) logits = Add(x, y)"
    graph, _ = before_after(text, {"w1": SQUARE, "b": VECTOR}, fold, gemm, residual)
    assert ops(graph) == {"Gather": 1, "GemmBiasRes": 1}


def test_a_gemm_with_several_readers_does_not_fuse_the_residual():
    text = "m = MatMul(x, w1) y = Add(x, m) logits = Mul(y, m)"
    graph, _ = before_after(text, {"w1": SQUARE}, fold, gemm, residual)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 1, "Add": 1, "Mul": 1}


@pytest.mark.parametrize("text", [
    "g = MatMul(x, w1) u = MatMul(x, w2) s = Sigmoid(g) a = Mul(g, s) logits = Mul(a, u)",
    "g = MatMul(x, w1) u = MatMul(x, w2) s = Sigmoid(g) a = Mul(g, s) logits = Mul(u, a)",
    "b = MatMul(x, both) g, u = Split<axis=-1, num_outputs=2>(b) s = Sigmoid(g) a = Mul(g, s) "
    "logits = Mul(a, u)",
    "b = MatMul(x, both) u, g = Split<axis=-1, num_outputs=2>(b) a = Gelu(g) logits = Mul(a, u)",
])
def test_gated_mlp_in_every_form(text):
    graph, _ = before_after(text, {"w1": SQUARE, "w2": SQUARE.T.copy(),
                                   "both": np.hstack([SQUARE, SQUARE.T])}, fold, gemm, gated_mlp)
    assert ops(graph) == {"Gather": 1, "GatedMLP": 1}


def test_an_ungated_product_is_kept():
    text = "g = MatMul(x, w1) u = MatMul(x, w2) logits = Mul(g, u)"
    graph, _ = before_after(text, {"w1": SQUARE, "w2": SQUARE.T.copy()}, fold, gemm, gated_mlp)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 2, "Mul": 1}


GATES = "g = MatMul(x, square) s = Sigmoid(g) "


@pytest.mark.parametrize(("text", "counts", "gate_first"), [
    (GATES + "n = RMSNormalization(x, w) logits = Mul(n, s)", (0, 1, 0), 0),
    (GATES + "n = RMSNormalization(x, w) m = Mul(n, b) logits = Mul(s, m)", (1, 1, 0), 0),
    (GATES + "p = Mul(s, x) n = RMSNormalization(p, w) logits = Mul(b, n)", (1, 0, 1), 1)])
def test_a_norm_fuses_its_gate_and_weights(text, counts, gate_first):
    graph, reports = before_after(text, {"w": VECTOR, "b": VECTOR - 1, "square": SQUARE},
                                  norm, gemm, activation, norm_gate)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 1, "GroupRMSNorm": 1}
    node = next(node for node in graph.nodes if node.op == "GroupRMSNorm")
    assert node.attrs["gate_first"] == gate_first
    assert tuple(reports[-1].matches[name] for name in
                 ("norm-gain", "norm-gate", "gate-norm")) == counts


@pytest.mark.parametrize("text", [GATES + "logits = Mul(s, x)", GATES + "logits = Mul(x, s)",
                                  GATES + "h = MatMul(x, other) logits = Mul(s, h)"])
def test_a_linear_layer_s_output_may_gate_another_value(text):
    graph, reports = before_after(text, {"square": SQUARE, "other": SQUARE.T.copy()},
                                  gemm, activation, gate)
    assert reports[-1].matches == {"gate": 1}
    node = next(node for node in graph.nodes if node.op == "Gate")
    assert node.inputs[1].inputs[0].attrs["activation"] == "sigmoid"
    run(graph, projections)  # of two of one x, one
    assert ops(graph)["GemmBiasAct"] == 1


def test_linear_layers_with_column_readers_are_merged():
    """Activations are fused into readers; a bias without a place is kept."""
    graph, reports = before_after(
        GATES + "n = RMSNormalization(x, w) left = Mul(n, s) h = MatMul(x, other) d = Add(h, b) "
        "t = Sigmoid(d) f = Mul(d, t) m = RMSNormalization(x, b) right = Mul(m, f) "
        "logits = Add(left, right)",
        {"w": VECTOR, "b": VECTOR - 1, "square": SQUARE, "other": SQUARE.T.copy()},
        norm, gemm, activation, norm_gate, projections)
    assert ops(graph) == {"Gather": 1, "GemmBiasAct": 1, "Slice": 2, "GroupRMSNorm": 2, "Add": 1}
    made = next(node for node in graph.nodes if node.op == "GemmBiasAct")
    assert [tuple(tensor.shape) for tensor in made.inputs[1:]] == [(16, 6), (16,)]
    assert reports[-1].matches == {"projections": 1}
    assert {node.attrs["activation"] for node in graph.nodes if node.op == "GroupRMSNorm"} == \
        {"sigmoid", "silu"}


ATTENTION = """flat = Constant<value_ints=[-1]>() whole = Constant<value_ints=[2, 4, 6]>()
tokens = Reshape(input_ids, flat) rows = Gather(table, tokens)
q = MatMul(rows, square) kp = MatMul(rows, other) k = Add(kp, w) v = MatMul(rows, third)
out = llmc.BidirectionalAttention<num_heads=1, num_kv_heads=1, head_dim=6>(q, k, v, cu) """
PROJECTED = {"w": VECTOR, "square": SQUARE, "other": SQUARE.T.copy(), "third": SQUARE[::-1].copy(),
             "cu": np.array([0, 4, 8], np.int32)}


def test_projections_of_attention_are_merged():
    graph, reports = before_after(ATTENTION + "logits = Reshape(out, whole)", PROJECTED,
                                  fold, gemm, attention_projections)
    assert reports[-1].matches == {"attention-projections": 1}
    assert ops(graph) == {"Gather": 1, "Reshape": 2, "GemmBiasAct": 1, "Split": 1,
                          "BidirectionalAttention": 1}
    made = next(node for node in graph.nodes if node.op == "GemmBiasAct")
    assert [tuple(tensor.shape) for tensor in made.inputs[1:]] == [(18, 6), (18,)]


def test_a_projection_that_others_read_stays():
    graph, reports = before_after(ATTENTION + "sum = Add(out, v) logits = Reshape(sum, whole)",
                                  PROJECTED, fold, gemm, attention_projections)
    assert "has other readers" in reports[-1].refusals[0]
    assert ops(graph)["GemmBiasAct"] == 3


def test_embedding_fuses_scale_and_position_offset():
    graph = small_graph("""k = Constant<value_float=3.0>() e = Mul(x, k)
    n1 = Shape<start=1, end=2>(input_ids) n = Squeeze(n1) z = Constant<value_int=0>()
    o = Constant<value_int=1>() r = Range(z, n, o) two = Constant<value_int=2>() i = Add(r, two)
    p = Gather(positions, i) logits = Add(e, p)""",
                        {"positions": np.random.default_rng(3).standard_normal((40, 6)).astype(
                            np.float32)})
    feeds = {"input_ids": np.arange(8).reshape(2, 4)}
    expected = run_graph(graph, feeds, ["logits"])["logits"]
    run(graph, fold)
    run(graph, embedding)
    assert ops(graph) == {"Embedding": 1}
    assert graph.nodes[0].inputs[3].shape == (38, 6)
    feeds["position_ids"] = np.tile(np.arange(4), (2, 1))
    families.assert_close(run_graph(graph, feeds, ["logits"])["logits"], expected, 1e-6)


REFUSALS = {
    "fold, a sequence": (
        "two = Constant<value_int=2>() s = SplitToSequence<axis=-1>(x, two) "
        "logits = ConcatFromSequence<axis=-1>(s)", [fold], "the sequence is not only indexed"),
    "fold, a weight": (
        "d = Sub(w, b) logits = Mul(x, d)", [fold], "this op on a weight cannot be folded"),
    "norm, an axis": (
        "logits = LayerNormalization<axis=1>(x, w)", [norm],
        "the norm is not over the last axis only"),
    "norm, no norm": (RMS + "logits = Mul(x, s)", [fold, norm], "neither RMSNorm nor LayerNorm"),
    "add_norm, a constant": (
        "t = Add(x, b) logits = RMSNormalization(t, w)", [norm, add_norm],
        "a constant is added before the norm"),
    "add_norm, another norm": (
        "r = Mul(x, x) t = Add(x, r) n = RMSNormalization(t, w) m = RMSNormalization(t, b) "
        "logits = Add(n, m)", [norm, add_norm],
        "the Add is fused with another norm of the same sum: AddRMSNorm"),
    "embedding, an axis": (
        "logits = Gather<axis=1>(square, input_ids)", [embedding],
        "gathered along an axis other than 0"),
    "embedding, other data": (
        "more = Gather(square, input_ids) logits = Add(x, more)", [embedding],
        "the addend of the embedding depends on token ids"),
    "embedding, computed": (
        "more = Gather(square, input_ids) m = MatMul(more, other) logits = Add(x, m)",
        [gemm, embedding], "the addend of the embedding is computed by a layer"),
    "linear, a Gemm": (
        "rows = Constant<value_ints=[-1, 6]>() f = Reshape(x, rows) "
        "g = Gemm<alpha=2.0>(f, square) there = Shape(x) logits = Reshape(g, there)", [gemm],
        "Gemm with alpha, beta or transA"),
    "linear, no matrix": (
        "logits = MatMul(x, w)", [gemm], "the weight is not a matrix: 'w'"),
    "bias, a second one": (
        "m = MatMul(x, square) y = Add(m, b) logits = Add(y, w)", [gemm],
        "the GEMM has a bias already"),
    "bias, read before": (
        "m = MatMul(x, square) y = Add(m, b) logits = Mul(y, m)", [gemm],
        "the GEMM's result is also read without the bias"),
    "activation, unknown": (
        "m = MatMul(x, square) logits = Exp(m)", [gemm, activation],
        "the ops after the GEMM compute no known activation: 'logits'"),
    "activation, cannot be run": (
        "m = MatMul(x, square) k = Constant<value_floats=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]>() "
        "logits = Max(m, k)", [fold, gemm, activation], "it cannot be evaluated"),
    "residual, read before": (
        "m = MatMul(x, square) y = Add(x, m) logits = Mul(y, m)", [gemm, residual],
        "the GEMM's result is also read without the residual"),
    "residual, an activation": (
        "m = MatMul(x, square) a = Relu(m) logits = Add(x, a)", [gemm, activation, residual],
        "the GEMM has an activation before the residual"),
    "gated_mlp, no activation": (
        "g = MatMul(x, square) u = MatMul(x, other) logits = Mul(g, u)", [gemm, gated_mlp],
        "the product is not an activation of one half times the other"),
    "gated_mlp, no GEMM": (
        "g = MatMul(x, square) s = Sigmoid(g) logits = Mul(s, x)", [embedding, gemm, gated_mlp],
        "the product comes from 1 GEMMs and 1 other values"),
    "gated_mlp, what cannot be inside": (
        "g = MatMul(x, square) s = Sin(g) logits = Mul(s, g)", [gemm, gated_mlp],
        "this op is neither a layout op nor part of a rotary embedding: Sin"),
    "sdpa, no mask": (
        "t = Transpose<perm=[0, 2, 1]>(x) p = MatMul(x, t) s = Softmax(p) logits = MatMul(s, x)",
        [sdpa], "attention without a mask is not causal"),
    "sdpa, an axis": (
        "t = Transpose<perm=[0, 2, 1]>(x) p = MatMul(x, t) s = Softmax<axis=1>(p) "
        "logits = MatMul(s, x)", [sdpa], "the softmax is not over the last axis"),
    "sdpa, a clamp": (
        "t = Transpose<perm=[0, 2, 1]>(x) p = MatMul(x, t) low = Constant<value_float=-1000.0>() "
        "c = Max(p, low) s = Softmax(c) logits = MatMul(s, x)", [fold, sdpa],
        "this op on the scores is unsupported: Max"),
    "sdpa, a factor": (
        "t = Transpose<perm=[0, 2, 1]>(x) p = MatMul(x, t) n = Shape<start=1, end=2>(input_ids) "
        "square_shape = Concat<axis=0>(n, n) one = Constant<value_float=1.0>() "
        "ones = Expand(one, square_shape) seen = Trilu<upper=0>(ones) hidden = Sub(one, seen) "
        "far = Constant<value_float=-10000.0>() mask = Mul(hidden, far) two = Add(seen, seen) "
        "f = Mul(p, two) m = Add(f, mask) s = Softmax(m) logits = MatMul(s, x)", [fold, sdpa],
        "the scores of visible keys are multiplied by a value that is not constant"),
    "attention, what cannot be inside": (
        "m = MatMul(x, square) s = Sin(m) one = Constant<value_ints=[1]>() h = Unsqueeze(s, one) "
        "a = llmc.Sdpa<layer=0>(h, h, h) logits = Squeeze(a, one)", [fold, gemm, attention],
        "this op is neither a layout op nor part of a rotary embedding: Sin"),
    "norm_gate, read before": (
        "n = RMSNormalization(x, w) p = Mul(n, x) logits = Add(p, n)", [norm, norm_gate],
        "the norm's result is also read without the factor"),
    "norm_gate, a number": (
        "n = RMSNormalization(x, w) logits = Mul(n, k)", [norm, norm_gate],
        "the norm's result is multiplied by a constant of shape [1]"),
    "norm_gate, two gates": (
        "n = RMSNormalization(x, w) p = Mul(n, x) logits = Mul(p, x)", [norm, norm_gate],
        "the norm has a gate already"),
    "norm_gate, a GEMM": (
        "p = Mul(x, x) n = RMSNormalization(p, w) logits = MatMul(n, square)",
        [norm, gemm, norm_gate], "a GEMM is fused with this norm"),
    "gate, another shape": (
        "g = MatMul(x, square) l = ReduceMean(x, last) logits = Mul(g, l)",
        [gemm, gate], "the factors have different shapes"),
    "projections, an activation": (
        "g = MatMul(x, square) t = Tanh(g) n = RMSNormalization(x, w) l = Mul(n, t) "
        "h = MatMul(x, other) m = RMSNormalization(x, b) r = Mul(m, h) logits = Add(l, r)",
        [norm, gemm, activation, norm_gate, projections],
        "not all of its readers support the activation tanh"),
    "projections, alone": (
        "g = MatMul(x, square) n = RMSNormalization(x, w) l = Mul(n, g) h = MatMul(x, other) "
        "logits = Add(l, h)", [norm, gemm, norm_gate, projections],
        "no other linear layer of its x can be merged with it"),
    "norm_gemm, several readers": (
        "n = RMSNormalization(x, w) g = MatMul(n, square) logits = Add(n, g)",
        [norm, gemm, norm_gemm], "more than one node reads the norm's result"),
    "norm_gemm, no GEMM": (
        "n = RMSNormalization(x, w) logits = Exp(n)", [norm, norm_gemm],
        "the reader of the norm's result is not a GEMM that can apply it: Exp"),
    "experts_residual, no GEMM": (
        EXPERTS + "t = Add(y, x) logits = RMSNormalization(t, w)",
        [norm, gemm, add_norm, experts_residual],
        "the reader of the norm's result is not a GEMM that can apply it"),
    "experts_residual, several readers": (
        EXPERTS + "t = Add(y, x) n = RMSNormalization(t, w) g = MatMul(n, square) "
        "logits = Add(n, g)", [norm, gemm, add_norm, experts_residual],
        "more than one node reads the norm's result"),
    "experts_residual, read before": (
        EXPERTS + "t = Add(y, x) n = RMSNormalization(t, w) g = MatMul(n, square) "
        "logits = Add(y, g)", [norm, gemm, add_norm, experts_residual],
        "the experts' result is also read without the residual"),
    "experts_residual, another": (
        EXPERTS.replace("down)", "down, , , , , , , x)") + "t = Add(y, x) "
        "n = RMSNormalization(t, w) logits = MatMul(n, square)",
        [norm, gemm, add_norm, experts_residual], "the experts have a residual already"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mismatch_is_refused_with_its_reason(name):
    text, functions, reason = REFUSALS[name]
    graph = small_graph(text, {**STACKS, "other": SQUARE.T.copy(), "k": VECTOR[:1],
                               "last": np.array([-1])})
    reports = [run(graph, function) for function in functions]
    assert any(reason in refusal for report in reports for refusal in report.refusals), \
        [report.refusals for report in reports]


@pytest.mark.parametrize(("text", "forgotten", "reason"), [
    ("logits = CastLike(x, x)", "x", "the target dtype of CastLike is unknown: 'x'"),
    ("e = Exp(x) s = Shape(e) logits = Expand(x, s)", "e",
     "the shape of a computed tensor is unknown: 'e'"),
])
def test_a_missing_annotation_is_a_reason(text, forgotten, reason):
    graph = small_graph(text, {})
    tensor = graph.tensors()[forgotten]
    tensor.dtype = tensor.shape = None
    assert reason in run(graph, fold).refusals[0]


def test_a_reason_common_to_all_layers_is_reported_once():
    text = "y0 = Identity(x) " + "".join(
        f"m{i} = MatMul(y{i}, square) y{i + 1} = Exp(m{i}) " for i in range(5)) + "logits = Neg(y5)"
    graph = small_graph(text, {"square": SQUARE})
    run(graph, fold)
    run(graph, gemm)
    report = run(graph, activation)
    refusal, = report.refusals
    assert refusal == "GemmBiasAct 'm0': the ops after the GEMM compute no known activation: " \
        "'y1' (and 4 more)"


def test_a_pass_that_breaks_the_graph_is_named():
    graph = small_graph("logits = MatMul(x, w1)", {"w1": SQUARE})
    graph.nodes[1].inputs[0] = gs.Variable("from nowhere", np.float32)
    with pytest.raises(AssertionError, match="pass 'clumsy' broke the graph.*from nowhere"):
        verify(graph, "clumsy")


def test_a_pass_that_declares_a_wrong_shape_is_named_with_the_node():
    graph = small_graph("m = MatMul(x, w1) logits = MatMul(m, w1)", {"w1": SQUARE})
    run(graph, gemm)

    def clumsy(graph, settings, report):
        next(node for node in graph.nodes if node.outputs[0].name == "m").outputs[0].shape = \
            ["batch", "seq", 7]

    with pytest.raises(AssertionError, match=r"pass 'clumsy' broke the graph: GemmBiasAct 'm': 'm' "
                       r"is declared \['batch', 'seq', 7\], its inputs .* require \['batch', "
                       r"'seq', 6\]"):
        run_pass(GraphPass("clumsy", clumsy), [[graph]], SETTINGS, [])


@pytest.mark.parametrize("wrong", [["batch", 6], ["num_tokens", "seq", 6], [4, "seq", 6],
                                   ["seq", "batch", 6]])
def test_a_dimension_with_another_name_or_size_is_refused(wrong):
    graph = small_graph("logits = RMSNormalization(x, w)", {"w": VECTOR})
    run(graph, norm)
    graph.outputs[0].shape = wrong
    with pytest.raises(AssertionError, match="'logits' is declared"):
        verify(graph, "clumsy")


def test_a_vocabulary_of_hidden_size_is_padded_in_the_right_axis():
    graph = small_graph("n = RMSNormalization(x, w) m = MatMul(n, w1) logits = Exp(m)",
                        {"w": VECTOR, "w1": SQUARE})
    for function in (embedding, norm, gemm, pack):
        run(graph, function)
    graph.inputs[0].shape = ("num_logits",)  # as after the last attention
    for tensor in (tensor for node in graph.nodes for tensor in node.outputs):
        tensor.shape = ("num_logits", 6)
    run(graph, pad_vocabulary)
    assert {tensor.name: tensor.shape[-1] for node in graph.nodes for tensor in node.outputs} \
        == {"x": 6, "n": 6, "m": 64, "logits": 64}


def test_inconsistent_packed_inputs_are_named():
    graph = small_graph("logits = MatMul(x, w1)", {"w1": SQUARE})
    run(graph, embedding)
    run(graph, gemm)
    run(graph, pack)
    graph.nodes[-1].inputs[1].values = SQUARE[:, :5]
    with pytest.raises(AssertionError, match=r"pass 'clumsy' broke the graph: GemmBiasAct "
                       r"'logits': GemmBiasAct's weight is \[6, 5\], expected \[6, 6\]"):
        verify(graph, "clumsy")


@pytest.mark.parametrize("unknown", [None, ["batch", "seq", None], ["batch", "unk__1", 6]])
def test_unknown_shapes_are_inferred(unknown):
    graph = small_graph("logits = RMSNormalization(x, w)", {"w": VECTOR})
    run(graph, norm)
    graph.outputs[0].shape = unknown
    verify(graph, "any")
    assert list(graph.outputs[0].shape) == ["batch", "seq", 6]


def test_position_dependent_query_scales_are_recognized(tmp_path):
    floor, length = 3000, 7000
    model = families.tiny_model("llama4_text", num_hidden_layers=1, no_rope_layers=[0],
                                floor_scale=floor, max_position_embeddings=length)
    graph = load(families.save(model, tmp_path)).graph
    for step in _FUSE:
        run_pass(step, [[graph]], Settings(length, 64), [])
    node, = [node for node in graph.nodes if node.op == "CausalAttention"]
    scale, = [tensor.values for tensor in node.inputs if tensor.name.startswith("query_scale")]
    expected = np.log1p((np.arange(length) + 1) // floor) * 0.1 + 1
    np.testing.assert_allclose(scale, expected, 1e-6)
