"""Run a graph between two passes in ONNX Runtime, weights and all: for `diff` and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from llmc import plugins
from llmc.compiler.artifact import Placed, to_onnx
from llmc.compiler.graph.weights import Weight


def run_graph(graph: gs.Graph, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> \
        dict[str, np.ndarray]:
    """The named tensors for these inputs. Reads every weight into memory."""
    weights = {tensor.name: tensor._values.load() for tensor in graph.tensors().values()
               if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight)}
    model = to_onnx(graph, dict.fromkeys(weights, Placed(0, 0)), target="")
    for index, node in enumerate(model.graph.node):
        if node.domain == plugins.DOMAIN and node.op_type == "Sdpa":
            function = _sdpa_function({a.name: onnx.helper.get_attribute_value(a)
                                       for a in node.attribute}, f"sdpa{index}")
            node.overload = function.overload
            model.functions.append(function)
    taken = set(outputs)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(taken))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()])
    session = ort.InferenceSession(model.SerializeToString(), options,
                                   providers=["CPUExecutionProvider"])
    wanted = {tensor.name for tensor in session.get_inputs()}
    results = session.run(sorted(taken), {k: v for k, v in feeds.items() if k in wanted})
    return dict(zip(sorted(taken), results, strict=True))


def _sdpa_function(attrs: Mapping[str, float], overload: str) -> onnx.FunctionProto:
    """Causal attention on q `[batch, heads, seq, dim]`, k and v with their own heads."""
    lines = [
        "c0 = Constant<value_ints=[0]>()", "c2 = Constant<value_ints=[2]>()",
        "hq = Shape<start=1, end=2>(q)", "hk = Shape<start=1, end=2>(k)", "g = Div(hq, hk)",
        "b = Shape<start=0, end=1>(q)", "sd = Shape<start=2, end=4>(q)",
        "five = Concat<axis=0>(b, hk, g, sd)", "q5 = Reshape(q, five)",
        "k5 = Unsqueeze(k, c2)", "v5 = Unsqueeze(v, c2)",
        "kt = Transpose<perm=[0, 1, 2, 4, 3]>(k5)", "p = MatMul(q5, kt)",
        f"scale = Constant<value_float={float(attrs['scale'])!r}>()", "s0 = Mul(p, scale)"]
    scores = "s0"
    if attrs["softcap"]:
        lines += [f"cap = Constant<value_float={float(attrs['softcap'])!r}>()",
                  "s1 = Div(s0, cap)", "s2 = Tanh(s1)", "s3 = Mul(s2, cap)"]
        scores = "s3"
    lines += ["zero = Constant<value_int=0>()", "one = Constant<value_int=1>()",
              "n1 = Shape<start=2, end=3>(q)", "n = Squeeze(n1)", "r = Range(zero, n, one)",
              "c1 = Constant<value_ints=[1]>()", "i = Unsqueeze(r, c1)", "m0 = LessOrEqual(r, i)"]
    mask = "m0"
    if attrs["window"]:
        lines += [f"w = Constant<value_int={int(attrs['window'])}>()", "edge = Sub(i, w)",
                  "recent = Greater(r, edge)", "m1 = And(m0, recent)"]
        mask = "m1"
    lines += ["low = Constant<value_float=-1e30>()", f"s4 = Where({mask}, {scores}, low)",
              "a = Softmax<axis=-1>(s4)", "o5 = MatMul(a, v5)",
              "od = Shape<start=3, end=4>(v)", "four = Concat<axis=0>(b, hq, n1, od)",
              "o = Reshape(o5, four)"]
    return onnx.parser.parse_function(
        f'<domain: "llmc", overload: "{overload}", opset_import: ["": {plugins.OPSET}]>\n'
        f"Sdpa (q, k, v) => (o) {{\n" + "\n".join(lines) + "\n}")
