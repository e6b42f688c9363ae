"""Graphs passed to ONNX Runtime: all that llmc writes, and none that harm the host."""

import numpy as np
import onnx
import onnx.parser
import pytest

from llmc.artifacts import onnx_graph
from llmc.artifacts.onnx_graph import check_model
from llmc.plugins import DOMAIN, registry

EACH = "each = body (int64 i, bool c, float[n] s) => (bool c_out, float[n] s_out) {" \
    "c_out = Identity(c) s_out = Add(s, s)}"


def parse(nodes, functions="", header=""):
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 23, "llmc": 1, "com.microsoft": 1]>\n'
        f"g (float[n] x) => (float[m] y) {header} {{\n{nodes}\n}}\n{functions}")


def function(lines, name="F"):
    return f'<domain: "llmc", overload: "0", opset_import: ["": 23]>\n' \
           f"{name} (x) => (y) {{\n{lines}\n}}"


def call(lines):
    """Return a model whose graph calls a function of these lines."""
    model = parse("y = llmc.F(x)", function(lines))
    model.graph.node[0].overload = model.functions[0].overload = "0"
    return model


def check(model, weight_bytes=64):
    check_model(model.SerializeToString(), weight_bytes)


def initializer(**entries):
    """Return a model of one external weight, float32 [4]."""
    model = parse("y = Add(x, w)")
    weight = model.graph.initializer.add(name="w", dims=[4], data_type=onnx.TensorProto.FLOAT)
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "weights.safetensors", "offset": "8", "length": "16",
                       **entries}.items():
        if value is not None:
            weight.external_data.add(key=key, value=value)
    return model


def inline(dims, data):
    model = parse("y = Add(x, w)")
    model.graph.initializer.add(name="w", dims=dims, data_type=onnx.TensorProto.FLOAT,
                                raw_data=data)
    return model


def inside_a_tensor_attribute():
    model = parse("y = Constant<value = float {1.0}>()")
    tensor = model.graph.node[0].attribute[0].t
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.safetensors")
    return model


def recursive():
    model = call("y = Identity(x)")
    model.functions[0].node.add(op_type="F", domain="llmc", overload="0", input=["y"],
                                output=["z"])
    return model


def renamed(domain, name):
    model = call("y = Identity(x)")
    model.functions[0].domain, model.functions[0].name = domain, name
    return model


def with_sparse_initializer():
    model = parse("y = Identity(x)")
    model.graph.sparse_initializer.add().values.name = "w"
    return model


def with_training():
    model = parse("y = Identity(x)")
    model.training_info.add()
    return model


LOOP = "c = Constant<value = bool {1}>()\n" + "y = Loop(m, c, x) <" + EACH + ">"

HOSTILE = {
    "an operator that reads a file": (lambda: parse("y = com.microsoft.EPContext(x)"),
                                      "unsupported operator 'com.microsoft.EPContext'"),
    "an operator of Python": (lambda: parse("y = ai.onnx.contrib.PyOp(x)"), "unsupported operator"),
    "an operator in a function": (lambda: call("y = RandomNormalLike(x)"),
                                  "'RandomNormalLike' in the function 'F'"),
    "an operator in a body": (lambda: call(
        "m = Size(x)\n" + LOOP.replace("Add(s, s)", "RandomNormalLike(s)")),
        "'RandomNormalLike' in the function 'F'"),
    "a loop of 2^62 turns": (lambda: call(f"m = Constant<value_int={2**62}>()\n{LOOP}"),
                             "a Loop in the function 'F' is not the Size of a tensor"),
    "a loop without end": (lambda: call(LOOP.replace("Loop(m,", "Loop(,")),
                           "is not the Size of a tensor"),
    "a loop in the graph": (lambda: parse(f"m = Size(x)\n{LOOP}"), "outside a function"),
    "a loop in a loop": (lambda: call("m = Size(x)\n" + LOOP.replace(
        "s_out = Add(s, s)", "s_out = Loop(m, c, s) <" + EACH + ">")), "inside another"),
    "a function that calls itself": (recursive, "'llmc.F' in the function 'F'"),
    "a function in place of an operator": (lambda: renamed("", "Add"),
                                           "function 'Add' of domain ''"),
    "a function of another domain": (lambda: renamed("other", "F"), "of domain 'other'"),
    "an absolute path": (lambda: initializer(location="/etc/passwd"), "the file '/etc/passwd'"),
    "a path that leaves the chip": (lambda: initializer(location="../chip1/weights.safetensors"),
                                    "expected 'weights.safetensors'"),
    "an address in memory": (lambda: initializer(location="*/_ORT_MEM_ADDR_/*"), "ORT_MEM_ADDR"),
    "no file": (lambda: initializer(location=None), "the file ''"),
    "data behind the file's end": (lambda: initializer(offset="56"),
                                   "takes bytes 56 to 72 of 'weights.safetensors', which has 64"),
    "a negative offset": (lambda: initializer(offset="-8"), "expected location, offset and length"),
    "an offset that overflows": (lambda: initializer(offset=str(2**64 - 8)), "offset and length"),
    "another key": (lambda: initializer(checksum="0"), "expected location, offset and length"),
    "external data in a constant": (inside_a_tensor_attribute, "has external data"),
    "a tensor of terabytes": (lambda: inline([2**40], b"\0" * 16), "has 16 bytes of data"),
    "a tensor of no elements": (lambda: inline([2**62, 0], b""), "has 0 bytes of data"),
    "a negative size": (lambda: inline([-1], b"\0" * 16), "has 16 bytes of data"),
    "a sparse tensor": (with_sparse_initializer, "graph has the unknown field 15"),
    "a graph for training": (with_training, "model has the unknown field 20"),
    "no graph": (onnx.ModelProto, "no graph"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_graphs_not_written_by_llmc_are_refused(name):
    make, match = HOSTILE[name]
    with pytest.raises(ValueError, match=match):
        check(make())


@pytest.mark.parametrize("make", [
    initializer, lambda: inline([4], b"\0" * 16), lambda: inline([], b"\0" * 4),
    lambda: inline([0], b""), lambda: call(f"m = Size(x)\n{LOOP}"),
])
def test_graphs_written_by_llmc_are_accepted(make):
    check(make())


@pytest.mark.parametrize("name", [name for name, op in registry().items() if op.body])
def test_the_cpu_body_of_every_op_is_accepted(name):
    op = registry()[name]
    for sample in op.samples(np.random.default_rng(0)):
        inputs = [own if own in sample.inputs else "" for own in op.input_names]
        made = op.function(sample.fields, inputs, "cpu")
        model = parse("y = Identity(x)")
        model.functions.append(made)
        model.graph.node.add(op_type=name, domain=DOMAIN, overload=made.overload, input=inputs,
                             output=op.outputs)
        check(model)


def test_calls_of_a_large_function_are_counted():
    model = call("\n".join(["a0 = Identity(x)", *(f"a{i + 1} = Identity(a{i})" for i in range(8)),
                            "y = Identity(a8)"]))
    check(model)
    for index in range(10):
        model.graph.node.add().CopyFrom(model.graph.node[0])
        model.graph.node[-1].output[0] = f"y{index}"
    with pytest.raises(ValueError, match="more than .* nodes, functions inlined"):
        onnx_graph._Check(64, nodes_left=100).model(memoryview(model.SerializeToString()))


@pytest.mark.parametrize("data", [b"\x0a", b"\xff" * 20, b"\x3a\xff\xff\xff\x7f", b"\x3b\x3c",
                                  b"no graph"])
def test_invalid_model_bytes_are_refused(data):
    with pytest.raises(ValueError, match=r"ends inside|wire type|unknown field"):
        check_model(data, 0)
