"""Every op of the registry: its bodies against its NumPy reference, its shape rule, its errors."""

import dataclasses

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from llmc import plugins
from llmc.plugins.quantization import pack

CASES = [(op, sample, f"{op.name}-{index}") for op in plugins.registry().values() if op.samples
         for index, sample in enumerate(op.samples(np.random.default_rng(7)))]
IDS = [name for _, _, name in CASES]


def one_node_model(op, sample, target):
    # float32 outside the node; a plan's are bytes
    narrow = op.cache_inputs if sample.fields.get("kv_dtype") and target != "tensorrt" else ()
    narrow = {*narrow, *op.rounded(sample.fields)}
    kept = [name for name in op.outputs if name.removesuffix("_out") in narrow
            or name in op.made_dtypes(sample.fields).keys() - op.output_dtypes]
    wide = {name: f"{name}_narrow" for name in (*narrow, *kept)}
    names = [name if name in sample.inputs else "" for name in op.input_names]
    while names and not names[-1]:
        names.pop()
    function = op.function(sample.fields, names, target)
    node = onnx.helper.make_node(op.name, [wide.get(name, name) for name in names],
                                 [wide.get(name, name) for name in op.outputs],
                                 domain=plugins.DOMAIN, **sample.fields)
    node.overload = function.overload
    nodes = [onnx.helper.make_node("Cast", [name], [wide[name]],
                                   to=onnx.TensorProto.FLOAT8E4M3FN) for name in narrow]
    nodes += [node, *(onnx.helper.make_node("Cast", [wide[name]], [name],
                                            to=onnx.TensorProto.FLOAT)
                      for name in kept)]
    inputs = [onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in feeds(op, sample, target).items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in op.outputs]
    return onnx.helper.make_model(
        onnx.helper.make_graph(nodes, op.name, inputs, outputs), functions=[function],
        ir_version=10, opset_imports=[onnx.helper.make_opsetid("", plugins.OPSET),
                                      onnx.helper.make_opsetid(plugins.DOMAIN, 1),
                                      onnx.helper.make_opsetid("com.microsoft", 1)])


def feeds(op, sample, target):
    inputs = dict(sample.inputs)
    for name in op.cache_inputs if sample.fields.get("kv_dtype") and target == "tensorrt" else ():
        inputs[name] = inputs[name].astype(ml_dtypes.float8_e4m3fn).view(np.int8)
    return inputs


def load(op, sample, target):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(one_node_model(op, sample, target).SerializeToString(), options,
                                providers=["CPUExecutionProvider"])


def run(op, sample, target):
    results = load(op, sample, target).run(None, feeds(op, sample, target))
    return [result.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if result.dtype == np.int8
            else result for result in results]


def served(op, target, inputs):
    return op.serves.get(target, lambda _: True)(inputs)


def assert_close(op, sample, results, whole_caches=False, tolerance=0.0):
    """Assert equality within the op's tolerance or a larger one.

    Cache contents after a sequence are ignored unless `whole_caches`."""
    expected = op.reference(op.complete(sample.fields), sample.inputs)
    for name, actual, truth in zip(op.outputs, results, expected, strict=True):
        if name.endswith("_cache_out") and not whole_caches \
                and "block_table" not in sample.inputs:
            lengths = sample.inputs["past_lens"] + np.diff(sample.inputs["cu_seqlens"])
            valid = np.arange(truth.shape[2])[:, None] < lengths[:, None, None, None]
            actual, truth = np.where(valid, actual, 0), np.where(valid, truth, 0)
        assert actual.shape == truth.shape
        allowed = max(op.tolerance, tolerance) * max(1.0, np.abs(truth).max())
        if name in op.made_dtypes(sample.fields).keys() - op.output_dtypes:
            # A few may be between two FP8 values.
            allowed = np.maximum(2.0 ** -9, np.abs(truth) / 8)
            few = truth.size * (0.3 if tolerance else 0.05)
            assert (actual != truth).sum() <= max(1, few), name
        assert (np.abs(actual - truth) <= allowed).all(), name


@pytest.mark.parametrize(("op", "sample", "name"), CASES, ids=IDS)
def test_reference_body_equals_numpy(op, sample, name):
    assert_close(op, sample, run(op, sample, ""), whole_caches=True)


TARGET_CASES = [pytest.param(op, sample, target, id=f"{name}-{target}")
                for op, sample, name in CASES for target in op.bodies]


@pytest.mark.parametrize(("op", "sample", "target"), TARGET_CASES)
def test_target_body_equals_numpy_or_refuses_unsupported_inputs(op, sample, target):
    fields, present = op.complete(sample.fields), frozenset(sample.inputs)
    if served(op, target, sample.inputs) or op.bodies[target](fields, present) is None:
        assert_close(op, sample, run(op, sample, target), tolerance=sample.tolerance)
    else:
        with pytest.raises(InvalidArgument if target == "cpu" else (Fail, InvalidArgument)):
            run(op, sample, target)


@pytest.mark.parametrize("op", [op for op in plugins.registry().values() if op.samples],
                         ids=lambda op: op.name)
def test_samples_cover_every_attribute_and_optional_input(op):
    samples = [sample for case, sample, _ in CASES if case is op]
    for name, default in op.fields.items():
        if op.choices.get(name) == (default,):
            continue
        assert any(sample.fields.get(name, default) != default for sample in samples), name
    for declared in op.inputs:
        given = {declared.removesuffix("?") in sample.inputs for sample in samples}
        assert given == ({True, False} if declared.endswith("?") else {True}), declared


@pytest.mark.parametrize(("op", "sample", "name"), CASES, ids=IDS)
def test_the_shape_rule_matches_the_output_shapes(op, sample, name):
    shapes = {key: array.shape for key, array in sample.inputs.items()}
    predicted = op.shapes(shapes, op.complete(sample.fields))
    assert [tuple(s) for s in predicted] == [r.shape for r in run(op, sample, "")]


@pytest.mark.parametrize("op", plugins.registry().values(), ids=lambda op: op.name)
def test_unknown_missing_and_mistyped_attributes_are_errors(op):
    with pytest.raises(ValueError, match="no attribute 'nonsense'"):
        op.complete({"nonsense": 1})
    for name in op.required:
        with pytest.raises(ValueError, match="needs the attribute"):
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


@pytest.mark.parametrize("op", plugins.registry().values(), ids=lambda op: op.name)
def test_op_declarations_name_existing_inputs_and_attributes(op):
    roles = [role for role in (*op.shard, op.norm, op.attention) if role is not None]
    names = {name for role in roles for value in dataclasses.asdict(role).values()
             for name in ([value] if isinstance(value, str) else
                          value if isinstance(value, tuple | dict) else ()) if name}
    assert names <= {*op.input_names, *op.fields}
    if op.attention is not None:
        assert {f"{cache}_out" for cache in op.attention.caches} <= set(op.outputs)
    assert bool(op.collective) == (op.body is None)


@pytest.mark.parametrize("name", plugins.registry())
def test_op_names_do_not_collide_with_onnx(name):
    """TensorRT's importer ignores the domain."""
    assert not onnx.defs.has(name)


def test_registering_a_name_twice_is_an_error(monkeypatch):
    real = plugins.importlib.import_module

    def same(name):
        return real(f"{plugins.__name__}.rms_norm.op")

    monkeypatch.setattr(plugins.importlib, "import_module", same)
    with pytest.raises(ValueError, match="registered twice"):
        plugins.registry.__wrapped__()


ROWS = ("x", "residual", "gate", "logits", "experts", "scores", "lora_ids")
ROW_WISE = [case for case in CASES if case[0].input_names[0] in ROWS and not case[0].pools]


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(("op", "sample", "name"), ROW_WISE, ids=[name for _, _, name in ROW_WISE])
def test_reference_bodies_of_row_wise_ops_take_any_leading_dimensions(op, sample, name, rank):
    rows = {key: np.asarray(array[0]) if rank == 1 else np.stack([array, array[::-1]])
            for key, array in sample.inputs.items() if key in ROWS}
    moved = plugins.Sample(sample.fields, {**sample.inputs, **rows})
    assert_close(op, moved, run(op, moved, ""))


def test_an_activation_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="attribute 'activation' is 'gelu_new', expected one of"):
        plugins.registry()["GemmBiasAct"].function({"activation": "gelu_new"}, ["x", "w"])


def test_a_minimum_does_not_increase_the_error_of_quantized_activations():
    """Of weights that are centered, next to weights whose activations alone are rounded."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 96), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.02, (64, 3)).astype(np.float32)
    inputs = {"x": rng.standard_normal((8, 96)).astype(np.float32), "weight": pack(codes, 4),
              "weight_scale": scale, "weight_min": -7.5 * scale}
    fields = {"weight_dtype": "uint4", "group_size": 32, "in_features": 96, "out_features": 64}
    weight = np.repeat(scale, 32, 1) * (codes - 7.5)
    groups = inputs["x"].reshape(8, 3, 32)
    step = np.abs(groups).max(2, keepdims=True) / 127
    rounded = (np.rint(groups / step) * step).reshape(8, 96)
    out, = run(plugins.registry()["GemmBiasAct"], plugins.Sample(fields, inputs), "cpu")
    error, expected = (np.sqrt(np.mean((made - inputs["x"] @ weight.T)**2))
                       for made in (out, rounded @ weight.T))
    assert error < 1.2 * expected


ATTENTION = plugins.registry()["CausalAttention"]


@pytest.mark.parametrize("target", ["", "cpu"])
@pytest.mark.parametrize("fields", [
    {"head_dim": 16, "rotary_dim": 16},
    {"head_dim": 24, "rotary_dim": 12, "window": 4, "softcap": 2.0},
    {"head_dim": 6, "rotary_dim": 4, "interleaved": 1},
], ids=["kernel rotates", "body rotates", "no kernel"])
def test_attention_appends_to_the_given_cache(fields, target):
    """A generation with the caches bound as inputs and outputs.

    It has ragged prompts, decode, ragged chunks, a mixed step with one idle sequence, and decode.
    The fourth row is unused."""
    fields = {"num_heads": 4, "num_kv_heads": 2, **fields}
    rng = np.random.default_rng(5)
    width, dim, batch, length = 8 * fields["head_dim"], fields["head_dim"], 3, 24
    angle = np.outer(np.arange(length), 0.3 ** np.arange(fields["rotary_dim"] // 2))
    table = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    caches = {name: np.full((batch + 1, 2, length, dim), 9, np.float32)
              for name in ("key_cache", "value_cache")}
    truth = {name: cache[:batch].astype(np.float64) for name, cache in caches.items()}
    past = np.zeros(batch, np.int32)
    session = None
    for new in ([5, 2, 3], [1, 1, 1], [2, 4, 3], [1, 6, 0], [1, 1, 1]):
        cu_seqlens = np.cumsum([0, *new]).astype(np.int32)
        qkv = rng.standard_normal((sum(new), width)).astype(np.float32)
        inputs = {"qkv": qkv, "cu_seqlens": cu_seqlens, "past_lens": past, **table}
        session = session or load(ATTENTION, plugins.Sample(fields, {**inputs, **caches}), target)
        expected, truth["key_cache"], truth["value_cache"] = ATTENTION.reference(
            ATTENTION.complete(fields), {**inputs, **truth})
        together = served(ATTENTION, target, inputs)
        for rows in [slice(0, batch)] if together else [slice(b, b + 1) for b in range(batch)]:
            tokens = slice(cu_seqlens[rows.start], cu_seqlens[rows.stop])
            if tokens.start == tokens.stop:
                continue
            own = {**inputs, "qkv": qkv[tokens], "past_lens": past[rows],
                   "cu_seqlens": cu_seqlens[rows.start:rows.stop + 1] - tokens.start}
            out = run_in_place(session, own, {key: c[rows] for key, c in caches.items()})
            assert np.abs(out - expected[tokens]).max() < 1e-5
        past = past + np.array(new, np.int32)
        for name, cache in caches.items():
            for b in range(batch):
                assert np.abs(cache[b, :, :past[b]] - truth[name][b, :, :past[b]]).max() < 1e-5
            assert (cache[batch] == 9).all()


def run_in_place(session, inputs, caches):
    """Return `out`, with each cache bound as an input and as its output."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("out", "cpu")
    for name, cache in caches.items():
        for bind, bound in ((binding.bind_input, name), (binding.bind_output, f"{name}_out")):
            bind(bound, "cpu", 0, np.float32, cache.shape, cache.ctypes.data)
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


@pytest.mark.parametrize("target", ["", "cpu"])
def test_layers_share_the_index_computation(target, tmp_path):
    """Indices that attention derives from the lengths are computed once for all layers."""
    sample = next(s for op, s, _ in CASES if op is ATTENTION and "cos" in s.inputs)
    counts = [nodes_after_optimisation(sample, target, layers, tmp_path) for layers in (1, 2, 3)]
    shared = counts[0] - (counts[1] - counts[0])
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert shared > counts[1] - counts[0]


def nodes_after_optimisation(sample, target, layers, tmp_path):
    model = one_node_model(ATTENTION, sample, target)
    graph, node, (qkv, *rest) = model.graph, model.graph.node[0], model.graph.input
    per_layer = [value for value in rest if value.name.endswith("_cache")]
    for layer in range(1, layers):
        copy = graph.node.add()
        copy.CopyFrom(node)
        for value in (qkv, *per_layer):
            graph.input.add().CopyFrom(value)
            graph.input[-1].name += str(layer)
            copy.input[list(node.input).index(value.name)] += str(layer)
        for index, name in enumerate(node.output):
            copy.output[index] = f"{name}{layer}"
            graph.output.add(name=f"{name}{layer}")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / f"{layers}.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return len(onnx.load(options.optimized_model_filepath).graph.node)


@pytest.mark.parametrize(("name", "chosen", "scale", "match"), [
    ("CausalAttention", lambda sample: "key_bias" in sample.inputs, 0.1, "may be quantized"),
    ("NormGemm", lambda sample: not sample.fields["gated"], 0.1, "may be quantized"),
    ("GatedMLP", lambda sample: True, -0.1, "an out_scale above 0"),
    ("GatedMLP", lambda sample: len(sample.inputs["weight"]) == 14, 0.1, "multiples of 8"),
])
def test_out_scale_is_refused_for_unquantized_outputs(name, chosen, scale, match):
    op = plugins.registry()[name]
    sample = next(sample for sample in op.samples(np.random.default_rng(0)) if chosen(sample))
    shapes = {key: array.shape for key, array in sample.inputs.items()}
    op.fit(shapes, sample.fields)
    with pytest.raises(ValueError, match=match):
        op.fit(shapes, {**sample.fields, "out_scale": scale})


@pytest.mark.parametrize("target", ["", "cpu"])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP", "NormGemm"])
def test_int8_activations_have_a_scale_per_token(name, target):
    op = plugins.registry()[name]
    plain = next(sample for sample in op.samples(np.random.default_rng(3))
                 if sample.fields.get("weight_dtype") == "int8"
                 and sample.fields["group_size"] == 96)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, 96)).astype(np.float32) * [[1], [100], [1e-3], [0], [5]]
    sample = plugins.Sample({**plain.fields, "activation_dtype": "int8"}, {
        key: x.astype(np.float32) if key == "x" else
        rng.standard_normal((5, array.shape[1])).astype(np.float32) if key == "residual" else array
        for key, array in plain.inputs.items()})
    assert_close(op, sample, run(op, sample, target), tolerance=1e-2)
    if name == "GemmBiasRes":  # by hand
        scale = np.maximum(np.abs(x).max(1, keepdims=True) / 127, 1e-30)
        numbers = (sample.inputs["weight"].astype(float) - 128) * sample.inputs["weight_scale"]
        expected = np.rint(x / scale) * scale @ numbers.T
        found = run(op, plugins.Sample(sample.fields, {
            key: sample.inputs[key] for key in ("x", "weight", "weight_scale")}), target)[0]
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("changes", [
    {"group_size": 48}, {"weight_dtype": "uint8"}, {"activation_scale": 0.1},
    {"activation_group_size": 96}])
def test_int8_activations_need_int8_weights_with_a_scale_per_row(changes):
    op = plugins.registry()["GemmBiasRes"]
    fields = {**op.fields, "weight_dtype": "int8", "group_size": 96, "in_features": 96,
              "out_features": 7, "activation_dtype": "int8"}
    groups = 96 // changes.get("group_size", 96)
    shapes = {"x": (3, 96), "weight": (7, 96), "weight_scale": (7, groups),
              **({"weight_zero": (7, groups)} if "weight_dtype" in changes else {})}
    with pytest.raises(ValueError, match="with weight_dtype int8 and a scale per row"):
        op.fit(shapes, {**fields, **changes})


@pytest.mark.parametrize("target", ["", "cpu"])
@pytest.mark.parametrize("name", ["GemmBiasAct", "GemmBiasRes", "GatedMLP"])
def test_no_loaded_adapter_changes_nothing(name, target):
    op = plugins.registry()[name]
    sample = op.samples(np.random.default_rng(3))[0]
    rows, width = sample.inputs["x"].shape
    none = plugins.Sample(sample.fields, {
        **sample.inputs, "lora_a": np.zeros((0, width), np.float32),
        "lora_b": np.zeros((0, len(sample.inputs["weight"])), np.float32),
        "lora_owner": np.zeros(0, np.int32), "lora_ids": np.full(rows, -1, np.int32)})
    for with_none, without in zip(run(op, none, target), run(op, sample, target), strict=True):
        np.testing.assert_array_equal(with_none, without)


def test_adapter_inputs_are_given_together():
    sample = next(sample for op, sample, _ in CASES
                  if op.name == "GatedMLP" and "lora_a" in sample.inputs)
    shapes = {name: array.shape for name, array in sample.inputs.items() if name != "lora_ids"}
    with pytest.raises(ValueError, match="takes lora_ids with all of lora_a, lora_b, "
                                         "lora_owner, or with all of lora_down"):
        plugins.registry()["GatedMLP"].fit(shapes, sample.fields)
    with pytest.raises(ValueError, match="Embedding takes lora_ids with all of lora_a, lora_b"):
        plugins.registry()["Embedding"].fit({"input_ids": (3,), "table": (5, 4),
                                             "lora_a": (2, 5)}, {})
    sample = next(sample for op, sample, _ in CASES
                  if op.name == "NormGemm" and "lora_gain" in sample.inputs)
    shapes = {name: array.shape for name, array in sample.inputs.items()}
    with pytest.raises(ValueError, match="lora_gain and lora_shift of a folded norm, not with"):
        plugins.registry()["NormGemm"].fit({**shapes, "norm_weight": shapes["lora_gain"]},
                                           sample.fields)
