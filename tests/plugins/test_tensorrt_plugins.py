"""TensorRT plugins without a GPU; needs an llmc-cuda built with TENSORRT_ROOT."""

import os
import subprocess
import sys

import numpy as np
import pytest

from llmc import plugins
from llmc.compiler.targets import tensorrt as target
from llmc.compiler.targets.kernel_order import ROW_MULTIPLE
from llmc.runtime.engines import cuda

CASES = [pytest.param(op, sample, id=f"{op.name}-{index}")
         for op in plugins.registry().values() if op.samples and op.has_core
         for index, sample in enumerate(op.samples(np.random.default_rng(7)))
         if all(array.shape[-2] % ROW_MULTIPLE == 0 for array in sample.inputs.values()
                if array.dtype == np.uint8) and not op.lacking(sample.fields, sample.inputs)
         and not sample.fields.get("out_scale") and not op.rounded(sample.fields)]
KINDS = {int: "int", float: "float", str: "str"}
COLLECTIVES = [op for op in plugins.registry().values() if op.body is None]


STEP = (0, "int32", [16])  # llmc_step, the input of every plugin of a plan after its op's inputs


def given(op, sample, dtype, narrow=False, step=True):
    """Return a node's attributes and inputs, (address, dtype, shape) each; optionally a step."""
    inputs = []
    for name in op.input_names:
        if name in sample.inputs:
            array = sample.inputs[name]
            if array.dtype == np.uint8:  # four rows are one of int32
                *stack, height, width = array.shape
                inputs.append((0, "int32", [*stack, height // ROW_MULTIPLE, width]))
                continue
            kind = "int32" if narrow and array.dtype == np.int64 else array.dtype.name
            if name in op.cache_inputs and sample.fields.get("kv_dtype"):
                kind = sample.fields["kv_dtype"]
            elif array.dtype == np.float32 and name not in op.float32_inputs:
                kind = dtype
            inputs.append((0, kind, list(array.shape)))
    present = [name for name in op.input_names if name in sample.inputs]
    if step:
        present.append("llmc_step")
        inputs.append(STEP)
    return {**sample.fields, "present": " ".join(present), "dtype": dtype}, inputs


def test_every_op_has_a_creator(harness):
    creators = {creator.name: creator for creator in harness.creators}
    ops = {name: op for name, op in plugins.registry().items() if op.has_core}
    assert set(creators) == set(ops)
    for name, op in ops.items():
        creator = creators[name]
        assert (creator.version, creator.namespace) == (str(op.version), plugins.DOMAIN)
        assert creator.fields == {field: KINDS[type(value)] for field, value in op.fields.items()} \
            | dict.fromkeys(("present", "dtype", "makes"), "str")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_outputs_are_as_declared(tensorrt, harness, op, sample, dtype):
    """Shapes through an expression builder, dtypes, formats, workspace and serialization.

    For a node with the step input, and for one without it.
    """
    if dtype == "bfloat16" and float(tensorrt.version) < 9:
        pytest.skip("TensorRT 8 has no bfloat16")
    if sample.fields.get("head_dim", 8) % 8:
        pytest.skip("no kernel for this head_dim")
    narrow = float(tensorrt.version) < 9
    answers = harness.ask(op.name, *given(op, sample, dtype, narrow))
    alone = harness.ask(op.name, *given(op, sample, dtype, narrow, step=False))
    assert (answers.outputs, answers.aliased, answers.workspace) \
        == (alone.outputs, alone.aliased, alone.workspace)
    shapes = {name: array.shape for name, array in sample.inputs.items()}
    expected = op.shapes(shapes, op.complete(sample.fields))
    kept = op.cache_inputs if sample.fields.get("kv_dtype") else ()
    own = op.output_dtypes if not narrow else {
        name: "int32" if kind == "int64" else kind for name, kind in op.output_dtypes.items()}
    kinds = [sample.fields["kv_dtype"] if name.removesuffix("_out") in kept
             else own.get(name, dtype) for name in op.outputs]
    assert [(kind, tuple(shape)) for kind, shape in answers.outputs] \
        == [(kind, tuple(shape)) for kind, shape in zip(kinds, expected, strict=True)]
    if tensorrt.plugin_interface == "IPluginV3":
        given_names = [name for name in op.input_names if name in sample.inputs]
        kept = [name.removesuffix("_out") for name in op.outputs]  # caches and states
        assert answers.aliased == [given_names.index(name) if name in given_names else -1
                                   for name in kept]


ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
X, WEIGHT = (0, "float16", [3, 8]), (0, "float32", [8])
EXPERTS = {"top_k": 2, "group_size": 32, "in_features": 32, "inner_features": 32,
           "present": "x experts scores gate_up down gate_up_scale down_scale"}


def experts(scale, rows):
    """Return the inputs of a 4-bit Experts with scales of this dtype."""
    return [(0, kind, shape) for kind, shape in (
        ("float16", [3, 32]), ("int32", [3, 2]), ("float32", [3, 2]), ("int32", [4, 16, 16]),
        ("int32", [4, 8, 16]), (scale, [4, 2 * rows, 1]), (scale, [4, rows, 1]))]


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name)
def test_outputs_of_collectives_are_as_declared(harness, op):
    for more, inputs in (({}, [X]), ({"present": "x llmc_step"}, [X, STEP])):
        answers = harness.ask(op.name, {"tp_size": 2, **more}, inputs)
        assert answers.outputs == [("float16", [3, 16 if op.name == "AllGather" else 8])]


@pytest.mark.parametrize(("op", "fields", "inputs", "match"), [
    ("RMSNorm", {"epsilom": 1.0}, [X, WEIGHT], "has no attribute 'epsilom'"),
    ("RMSNorm", {"epsilon": "small"}, [X, WEIGHT], "'epsilon' is a str, expected a float"),
    ("RMSNorm", {"epsilon": 1}, [X, WEIGHT], "attribute 'epsilon' is an int, expected a float"),
    ("RMSNorm", {"dtype": 1}, [X, WEIGHT], "field 'dtype' is not a str"),
    ("RMSNorm", {"dtype": "float8"}, [X, WEIGHT], "unknown dtype 'float8'"),
    ("RMSNorm", {"dtype": "float32"}, [X, WEIGHT], "does not accept tensor 0 as float16"),
    ("RMSNorm", {"present": "x wait"}, [X, WEIGHT], "no input 'wait'"),
    ("RMSNorm", {"present": "weight x"}, [X, WEIGHT], "in another order"),
    ("RMSNorm", {"present": "x"}, [X], "needs the input 'weight'"),
    ("RMSNorm", {"present": "x weight"}, [X], "has 1 inputs, its field 'present' names 2"),
    ("RMSNorm", {}, [X, WEIGHT, WEIGHT], "takes 2 inputs, not 3"),
    ("RMSNorm", {}, [X, WEIGHT, STEP], "takes 2 inputs, not 3"),
    ("RMSNorm", {"present": "x weight llmc_step"}, [X, WEIGHT, WEIGHT], "tensor 2 as float32"),
    ("RMSNorm", {"present": "llmc_step x weight"}, [STEP, X, WEIGHT], "in another order"),
    ("RMSNorm", {"present": "x llmc_step"}, [X, STEP], "needs the input 'weight'"),
    ("RMSNorm", {}, [X, (0, "float16", [8])], "does not accept tensor 1 as float16"),
    ("RMSNorm", {}, [X, X], "norm's weight is"),
    ("CausalAttention", {"num_heads": 4}, [], "needs the attribute"),
    ("CausalAttention", ATTENTION | {"head_dim": 12}, [], "head_dim 12 is not a multiple of 8"),
    ("CausalAttention", ATTENTION, [X] * 5, "each cache 4, not 2, 2 and 2"),
    ("GatedMLP", {"activation": "swoosh"}, [X, X], "unknown activation 'swoosh'"),
    ("GemmBiasAct", {}, [X, (0, "float16", [8])], "have 2 and 1 dimensions"),
    ("Embedding", {}, [(0, "int32", [3]), (0, "float16", [8])], "has only 1 dimensions"),
    ("Experts", EXPERTS | {"weight_dtype": "mxfp4"}, experts("float32", 32),
     "does not accept tensor 5 as float32"),
    ("Experts", EXPERTS | {"weight_dtype": "int4"}, experts("int32", 8),
     "does not accept tensor 5 as int32"),
    ("Gelu", {}, [X], "unknown plugin 'Gelu'"),
])
def test_invalid_plugins_raise_a_cuda_error(harness, op, fields, inputs, match):
    with pytest.raises(cuda.extension().CudaError, match=match):
        harness.ask(op, fields, inputs)


def test_the_compiler_s_step_input_matches_the_plugins(tensorrt):
    assert tuple(target._STEP.shape) == (tensorrt.step_ints,) == tuple(STEP[2])


def test_registration_without_tensorrt_is_refused(harness):
    with pytest.raises(cuda.extension().CudaError,
                       match=r"TensorRT is not loaded: load libnvinfer.so.\d+ before"):
        harness.init()


def test_a_missing_plugin_library_is_refused(tensorrt, tmp_path):
    with pytest.raises(cuda.extension().CudaError, match=r"plugins cannot be loaded \(.*none.so"):
        tensorrt.Harness(str(tmp_path / "none.so"))


def test_plugins_register_on_load_only_if_requested(tensorrt):
    """In a separate process without TensorRT."""
    def load(wish):
        code = f"from llmc.runtime.engines import cuda\ncuda.extension()\n" \
               f"import ctypes; ctypes.CDLL({tensorrt.library!r})"
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                              text=True, env=os.environ | {"LLMC_LOAD_PLUGINS": wish}).stderr
    assert "LLMC_LOAD_PLUGINS is 1, but TensorRT is not loaded" in load("1")
    assert load("0") == ""


@pytest.fixture(scope="module")
def registry(tensorrt):
    """TensorRT-RTX's real registry with llmc's library loaded."""
    if tensorrt.plugin_interface != "IPluginV3":
        pytest.skip("llmc was built for TensorRT 8, whose plugins TensorRT-RTX does not know")
    trt = pytest.importorskip("tensorrt_rtx")
    found = trt.get_plugin_registry()
    if found.get_creator("RMSNorm", "1", plugins.DOMAIN) is None:
        assert found.load_library(tensorrt.library) is not None
    return found


def create(registry, op, fields, phase="BUILD"):
    import tensorrt_rtx as trt
    made = []
    for name, value in fields.items():
        array, kind = {
            int: lambda v: (np.array([v], np.int32), trt.PluginFieldType.INT32),
            float: lambda v: (np.array([v], np.float32), trt.PluginFieldType.FLOAT32),
            str: lambda v: (np.frombuffer(v.encode() + b"\0", np.int8), trt.PluginFieldType.CHAR),
            list: lambda v: (np.array(v, np.int32), trt.PluginFieldType.INT32),
        }[type(value)](value)
        made.append(trt.PluginField(name, array, kind))
    creator = registry.get_creator(op, str(plugins.registry()[op].version), plugins.DOMAIN)
    return creator.create_plugin("node", trt.PluginFieldCollection(made),
                                 getattr(trt.TensorRTPhase, phase))


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_real_registry_creates_every_plugin(registry, op, sample, phase):
    import tensorrt_rtx as trt
    if sample.fields.get("head_dim", 8) % 8:
        pytest.skip("no kernel for this head_dim")
    fields, _ = given(op, sample, "float16")
    plugin = create(registry, op.name, fields, phase)
    assert plugin.interface_info.kind == "PLUGIN"
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    assert (core.plugin_name, core.plugin_version, core.plugin_namespace) \
        == (op.name, str(op.version), plugins.DOMAIN)
    build = plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    assert build.num_outputs == len(op.outputs)
    kept = dict(line.split("=", 1) for line in build.metadata_string.splitlines())
    assert kept["present"] == "s" + fields["present"]
    for name, value in op.complete(sample.fields).items():
        text = kept[name][1:]
        assert text == value if isinstance(value, str) else \
            int(text) == value if isinstance(value, int) else \
            float.fromhex(text) == np.float32(value) if name in sample.fields else True


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name)
def test_a_real_registry_creates_collectives(registry, op):
    assert create(registry, op.name, {"tp_size": 2}) is not None


@pytest.mark.parametrize(("op", "fields"), [
    ("RMSNorm", {"epsilom": 1.0}),
    ("RMSNorm", {"epsilon": "small"}),
    ("CausalAttention", {"num_heads": 4}),
    ("CausalAttention", ATTENTION | {"head_dim": [16, 16]}),
])
def test_a_real_registry_refuses_invalid_attributes(registry, op, fields):
    assert create(registry, op, fields) is None


def test_the_library_is_loaded_once(registry, tensorrt):
    assert registry.load_library(tensorrt.library) is None
