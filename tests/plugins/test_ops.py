"""Every op of the registry: its bodies against its NumPy reference, its shape rule, its errors."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from llmc import plugins

CASES = [(op, sample, f"{op.name}-{index}") for op in plugins.registry().values() if op.samples
         for index, sample in enumerate(op.samples(np.random.default_rng(7)))]
IDS = [name for _, _, name in CASES]


def one_node_model(op, sample, target):
    names = [name if name in sample.inputs else "" for name in op.input_names]
    while names and not names[-1]:
        names.pop()
    function = op.function(sample.fields, names, target)
    node = onnx.helper.make_node(op.name, names, list(op.outputs), domain=plugins.DOMAIN,
                                 **sample.fields)
    node.overload = function.overload
    inputs = [onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in sample.inputs.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in op.outputs]
    return onnx.helper.make_model(
        onnx.helper.make_graph([node], op.name, inputs, outputs), functions=[function],
        ir_version=10, opset_imports=[onnx.helper.make_opsetid("", plugins.OPSET),
                                      onnx.helper.make_opsetid(plugins.DOMAIN, 1),
                                      onnx.helper.make_opsetid("com.microsoft", 1)])


def run(op, sample, target):
    model = one_node_model(op, sample, target)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(sample.inputs))


def assert_close(op, sample, results):
    expected = op.reference(op.complete(sample.fields), sample.inputs)
    for name, actual, truth in zip(op.outputs, results, expected, strict=True):
        if name.endswith("_cache_out"):  # behind a sequence's end the CPU body may leave garbage
            valid = np.zeros(truth.shape, bool)
            news = np.diff(sample.inputs["cu_seqlens"])
            for row, (past, new) in enumerate(zip(sample.inputs["past_lens"], news, strict=True)):
                valid[row, :, :past + new] = True
            actual, truth = np.where(valid, actual, 0), np.where(valid, truth, 0)
        assert actual.shape == truth.shape
        assert np.abs(actual - truth).max() <= op.tolerance * max(1.0, np.abs(truth).max()), name


@pytest.mark.parametrize(("op", "sample", "name"), CASES, ids=IDS)
def test_reference_body_equals_numpy(op, sample, name):
    assert_close(op, sample, run(op, sample, ""))


TARGET_CASES = [(op, sample, target, f"{name}-{target}") for op, sample, name in CASES
                for target in op.bodies if op.serves.get(target, lambda _: True)(sample.inputs)]


@pytest.mark.parametrize(("op", "sample", "target"), [case[:3] for case in TARGET_CASES],
                         ids=[case[3] for case in TARGET_CASES])
def test_target_body_equals_numpy(op, sample, target):
    assert_close(op, sample, run(op, sample, target))


@pytest.mark.parametrize(("op", "sample", "name"), CASES, ids=IDS)
def test_shape_rule_gives_the_shapes_that_come_out(op, sample, name):
    shapes = {key: array.shape for key, array in sample.inputs.items()}
    predicted = op.shapes(shapes, op.complete(sample.fields))
    assert [tuple(s) for s in predicted] == [r.shape for r in run(op, sample, "")]


@pytest.mark.parametrize("op", plugins.registry().values(), ids=lambda op: op.name)
def test_unknown_missing_and_ill_typed_fields_are_errors(op):
    with pytest.raises(ValueError, match="no field 'nonsense'"):
        op.complete({"nonsense": 1})
    for name in op.required:
        with pytest.raises(ValueError, match="needs the field"):
            op.complete({other: op.fields[other] for other in op.required if other != name})
    for name in op.fields:
        with pytest.raises(ValueError, match="expected a"):
            op.complete({name: ["wrong"]})


@pytest.mark.parametrize("op", plugins.registry().values(), ids=lambda op: op.name)
def test_a_missing_or_surplus_input_is_an_error(op):
    with pytest.raises(ValueError, match="needs the input"):
        op.present([""] * len(op.inputs))
    with pytest.raises(ValueError, match="takes"):
        op.present(["x"] * (len(op.inputs) + 1))


def test_registering_a_name_twice_is_an_error(monkeypatch):
    real = plugins.importlib.import_module

    def same(name):
        return real(f"{plugins.__name__}.rms_norm.op")

    monkeypatch.setattr(plugins.importlib, "import_module", same)
    with pytest.raises(ValueError, match="registered twice"):
        plugins.registry.__wrapped__()


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "GemmBiasAct", "GatedMLP"])
def test_reference_bodies_of_row_wise_ops_take_any_leading_dimensions(name, rank):
    op = plugins.registry()[name]
    sample = op.samples(np.random.default_rng(0))[0]
    x = sample.inputs["x"][0] if rank == 1 else np.stack([sample.inputs["x"]] * 2)
    moved = plugins.Sample(sample.fields, {**sample.inputs, "x": x})
    assert_close(op, moved, run(op, moved, ""))


def test_an_activation_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="no activation 'gelu_new'"):
        plugins.registry()["GemmBiasAct"].function({"activation": "gelu_new"}, ["x", "w"])
