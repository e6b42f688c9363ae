"""Image encoders: exported and fused graphs give the rows of transformers' for any image."""

import copy
import functools

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
import torch
from image_models import write_model
from multimodal_models import encoder_rows, packed, pixels, run_encoder, session, tiny_model
from schedule_interpreter import run_image_program
from transformers import vision_utils
from transformers.models.qwen3_vl import modeling_qwen3_vl

from llmc import plugins
from llmc.artifacts.program import Program
from llmc.artifacts.vision_input import VisionInput
from llmc.compiler.artifact import WEIGHTS_NAME, to_onnx, write_onnx, write_weights
from llmc.compiler.frontend import image, trace
from llmc.compiler.frontend.image_export import export_image
from llmc.compiler.frontend.image_masks import ImageMasks
from llmc.compiler.graph.image_samples import ImageSample
from llmc.compiler.graph.rewrite import Report, Settings, replace, tidy, values_of
from llmc.compiler.graph.weights import Weight
from llmc.compiler.lower import fuse_image, lower_image_device
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.image_attention import image_attention
from llmc.compiler.passes.image_patches import image_patches
from llmc.compiler.passes.image_pools import image_pools
from llmc.compiler.passes.image_program import divide_image
from llmc.compiler.passes.image_rows import image_rows
from llmc.compiler.passes.image_softmax import image_softmax
from llmc.compiler.passes.pad_heads import pad_heads
from llmc.compiler.targets.cuda import program_of
from llmc.errors import LlmcError
from llmc.plugins.bidirectional_attention.op import OP as ATTENTION
from llmc.plugins.gemm_bias_act.op import OP as GEMM
from llmc.plugins.rms_norm.op import OP as RMS_NORM
from llmc.runtime.engines.image_encoder import with_equal_segments
from llmc.runtime.multimodal import vision_inputs
from llmc.runtime.multimodal.description import describe_processor
from llmc.runtime.tokenizer import read_tokenizer

GRIDS = ((4, 6), (10, 8), (2, 2), (18, 10))
# By family: what the processor gives for images of several sizes.
SAMPLES = {
    "llava": [{"pixel_values": pixels(1, 3, 28, 28)}] * 2,
    "internvl": [{"pixel_values": pixels(tiles, 3, 28, 28)} for tiles in (2, 5, 1)],
    "gemma3": [{"pixel_values": pixels(tiles, 3, 28, 28)} for tiles in (2, 3, 1)],
    "mistral3": [{"pixel_values": pixels(1, 3, 14 * rows, 14 * columns),
                  "image_sizes": np.array([[14 * rows, 14 * columns]])}
                 for rows, columns in ((4, 6), (10, 8), (2, 4), (12, 10))],
    "qwen3_vl": packed(*GRIDS), "qwen2_5_vl": packed(*GRIDS),
    "glm_ocr": packed(*GRIDS),  # with norms of heads
    # A class token after the patches: tables of one tile rotate all tiles.
    "llama4": [{"pixel_values": pixels(tiles, 3, 28, 28)} for tiles in (2, 5, 1)],
    # A canvas with rows of a learned newline.
    "llava_next": [{"pixel_values": pixels(1, tiles, 3, 28, 28), "image_sizes": np.array([size])}
                   for tiles, size in ((3, (25, 60)), (5, (97, 101)), (2, (20, 9)))]}
# What the passes match, of three layers: attention with a rotary embedding is made of rows.
FUSED = {
    "llava": {"patches": 1, "norm-op": 5, "linear": 14, "identity": 9, "residual": 4},
    "internvl": {"patches": 1, "norm-op": 7, "layer-scale": 6, "identity": 13, "residual": 6},
    "gemma3": {"patches": 1, "norm-op": 7, "norm-decomposed": 1, "residual": 6},
    "mistral3": {"patches": 1, "image-attention": 3, "norm-decomposed": 8, "gated-mlp": 3,
                 "residual": 6},
    "qwen3_vl": {"patches": 1, "image-attention": 3, "norm-op": 8, "activation": 5, "residual": 7},
    "qwen2_5_vl": {"patches": 1, "image-attention": 3, "norm-decomposed": 7, "gated-mlp": 3,
                   "residual": 6},
    "glm_ocr": {"patches": 2, "image-attention": 3, "norm-decomposed": 13, "gated-mlp": 4,
                "residual": 6},
    "llama4": {"image-attention": 3, "norm-op": 8, "activation": 5, "residual": 6},
    "llava_next": {"patches": 1, "norm-op": 5, "linear": 14, "residual": 4}}
VISION = {"qwen2_5_vl": {"window_size": 56}, "mistral3": {"image_size": 196}, "llama4": {
    "intermediate_size": 128, "projector_input_dim": 40, "projector_output_dim": 40,
    "vision_output_dim": 40}}
WHOLE = {"llava_next": {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]}}
# Encoders with tiles that are selected, packed or projected otherwise, and with a grid.
OTHERS = {
    "smolvlm": [{"pixel_values": pixels(1, tiles, 3, 28, 28)} for tiles in (2, 5, 1)],
    "glm4v": packed(*GRIDS)}


def export(model, samples):
    with trace.alone():
        return image.trace_image(copy.deepcopy(model.config), samples)


@functools.cache
def exported(family):
    """A model and its traced encoder."""
    model = tiny_model(family, whole=WHOLE.get(family, {}), **VISION.get(family, {}))
    return model, export(model, SAMPLES[family][:-1])


def fused(traced, model, target="cpu"):
    """The graph after all passes, with the model's parameters; their reports; samples of inputs."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    graph = trace.to_graph(traced.proto, model.state_dict().keys())
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and isinstance(tensor._values, Weight):
            tensor._values = Weight.of(
                parameters[tensor.name.removeprefix("model.")].detach().numpy(), tensor.name)
    samples = tuple(ImageSample.of(arrays, graph.inputs) for arrays in traced.inputs)
    settings = Settings(64, 64, image_samples=samples, options=CompileOptions(target=target))
    return graph, fuse_image(graph, settings), samples


def run_graph(graph, values):
    loaded = ort.InferenceSession(to_onnx(graph, {}, "cpu").SerializeToString(),
                                  providers=["CPUExecutionProvider"])
    return loaded.run(None, values)[0]


def written(graph, directory):
    """Load a graph from a file with its weights."""
    places, _ = write_weights([graph], directory / WEIGHTS_NAME)
    write_onnx(to_onnx(graph, places, "cpu"), directory / "image.onnx")
    return ort.InferenceSession(directory / "image.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("family", SAMPLES)
def test_rows_are_those_of_transformers_for_images_of_any_size(family, tmp_path):
    """Tiles, packed patches, windows, deep rows; also of sizes that were not exported."""
    model, traced = exported(family)
    *known, new = SAMPLES[family]
    graph, reports, _ = fused(traced, model)
    counts = {name: number for report in reports for name, number in report.matches.items()}
    assert {name: counts[name] for name in FUSED[family]} == FUSED[family]
    assert {node.op for node in graph.nodes if node.domain == plugins.DOMAIN} \
        >= {"BidirectionalAttention", "GemmBiasAct", "GemmBiasRes"}
    assert {node.op for node in graph.nodes} & {
        "Conv", "MatMul", "Gemm", "LayerNormalization", "Erf", "Gelu", "Tanh", "Softmax"
    } == ({"Gelu"} if family == "glm_ocr" else set())  # of a norm
    for loaded in (session(traced.proto, model), written(graph, tmp_path)):
        for arrays in (*known, new):
            for rows, expected in zip(run_encoder(loaded, traced.computed, arrays),
                                      encoder_rows(model, arrays), strict=True):
                assert rows.shape == expected.shape
                assert np.abs(rows - expected).max() < 2e-6 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("family", OTHERS)
def test_rows_of_other_encoders_are_those_of_transformers(family, tmp_path):
    model = tiny_model(family, **VISION.get(family, {}))
    *known, new = OTHERS[family]
    traced = export(model, known)
    graph, _, _ = fused(traced, model)
    assert not {node.op for node in graph.nodes} & {"Conv", "Softmax"}
    for loaded in (session(traced.proto, model), written(graph, tmp_path)):
        for arrays in (*known, new):
            rows, = run_encoder(loaded, traced.computed, arrays)
            expected, = encoder_rows(model, arrays)
            assert rows.shape == expected.shape
            assert np.abs(rows - expected).max() < 1e-5 * max(np.abs(expected).max(), 1)


# Programs of GPUs: op types that are not llmc's, and inputs.
MERGES = ("merged_rows", "merged_rows.1", "merged_rows.2", "merged_rows.3")
PROGRAMS = {
    "llava": (["Gather"], ["patches", "position_rows", "cu_seqlens", "merged_rows"]),
    "internvl": (["Gather"] * 4 + ["Concat"], ["patches", "position_rows", "cu_seqlens", *MERGES]),
    "gemma3": (["Gather"] * 4 + ["Concat"], ["patches", "position_rows", "cu_seqlens", *MERGES]),
    "mistral3": (["Gather"] * 4 + ["Concat", "Columns"], [
        "patches", "cu_seqlens", "cos", "sin", *MERGES]),
    "qwen3_vl": ((["Gather"] * 4 + ["Concat"]) * 2, [
        "patches", "position_rows", "cu_seqlens", "cos", "sin", *MERGES]),
    "qwen2_5_vl": (["Gather"] * 4 + ["Concat"], [
        "patches", "cu_seqlens", "cos", "sin", "cu_seqlens.1", *MERGES]),
    "glm_ocr": (["Gather"] * 4 + ["Concat", "Columns", "Gelu"], [
        "patches", "cu_seqlens", "cos", "sin", *MERGES]),
    "llama4": (["Gather"] * 4 + ["Concat"], [
        "patches", "position_rows", "cu_seqlens", "cos", "sin", *MERGES]),
    "llava_next": (["Gather"], ["patches", "position_rows", "cu_seqlens", "merged_rows"])}

# What the host computes after the program.
LAST = {"qwen2_5_vl": ["Gather", "Reshape"], "llava_next": ["Concat", "Gather", "Reshape"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", PROGRAMS)
def test_a_program_for_gpus_gives_the_rows_of_transformers(family, dtype, tmp_path):
    """What the host computes, and the program by the NumPy interpreter, also of new sizes."""
    model, traced = exported(family)
    graph, _, samples = fused(traced, model, "cuda")
    parts, _ = lower_image_device(graph, Settings(64, 64, image_samples=samples, options=(
        CompileOptions(target="cuda", dtype=dtype))))
    program = program_of(parts.device, dtype, of_image=True)
    # Heads of 16 elements are padded for tensor cores.
    assert {node.fields["head_dim"] for node in program.nodes if "head_dim" in node.fields} == {
        16 if dtype == "float32" else 32}
    assert program == Program.model_validate_json(program.model_dump_json())
    ops, inputs = PROGRAMS[family]
    assert [node.op for node in program.nodes if node.op not in plugins.registry()] == ops
    assert [own.name for own in program.tensors if own.kind == "input"] == sorted(
        inputs, key=[own.name for own in program.tensors].index)
    weights = {tensor.name: values_of(tensor).load() for node in parts.device.nodes
               for tensor in node.inputs if isinstance(tensor, gs.Constant)}
    host = written(parts.host, tmp_path)
    assert [node.op for node in parts.rows.nodes] == LAST[family] if parts.rows else \
        family not in LAST
    (tmp_path / "rows").mkdir()
    last = written(parts.rows, tmp_path / "rows") if parts.rows else None
    names = [own.name for own in parts.device.inputs]
    for arrays in SAMPLES[family]:
        feeds = dict(zip((own.name for own in host.get_outputs()),
                         run_encoder(host, traced.computed, arrays), strict=True))
        made = run_image_program(program, weights, with_equal_segments(
            {name: feeds[name] for name in names}))
        if last is not None:
            feeds |= zip((own.name for own in parts.device.outputs), made, strict=True)
            made = last.run(None, {own.name: feeds[own.name] for own in last.get_inputs()})
        for rows, expected in zip(made, encoder_rows(model, arrays), strict=True):
            tolerance = 2e-6 if dtype == "float32" else 0.03
            assert np.abs(rows - expected).max() < tolerance * max(np.abs(expected).max(), 1)


def test_a_checkpoint_with_tiles_has_a_program_for_gpus(tmp_path):
    """Sizes that samples give to the passes have the names of the exported graph.

    Rows of its projector have an axis of tiles and two of a grid, and a gated activation.
    """
    model = write_model("aya_vision", tmp_path)
    processor = describe_processor(tmp_path, read_tokenizer(tmp_path), ("image",))
    tensors = {name: Weight.of(values.numpy(), name) for name, values in model.state_dict().items()}
    raw = export_image(model.config, tensors, "", processor, {}, None, ImageMasks())
    settings = Settings(64, 64, image_samples=raw.samples, options=CompileOptions(target="cuda"))
    fuse_image(raw.graph, settings)
    parts, _ = lower_image_device(raw.graph, settings)
    assert not {node.op for node in parts.host.nodes} & {"Conv", "MatMul", "LayerNormalization"}
    ops = {node.op for node in parts.device.nodes}
    assert ops - plugins.registry().keys() == {"Gather", "Concat"}
    assert ops >= {"BidirectionalAttention", "GemmBiasRes"}


def test_rows_of_several_layers_are_joined_on_the_device():
    """The rows of six layers; the engine joins four tensors at a time."""
    x = gs.Variable("pixel_values", np.float32, [1, 6, 8])
    layers = [gs.Variable(f"layer.{index}", np.float32, [1, 6, 4]) for index in range(6)]
    joined = gs.Variable("joined", np.float32, [1, 6, 24])
    mixed, y = gs.Variable("mixed", np.float32, [1, 6, 3]), gs.Variable("y", np.float32, [6, 3])
    graph = gs.Graph(inputs=[x], outputs=[y], opset=plugins.OPSET)
    for source, result, width in (*((x, own, 8) for own in layers), (joined, mixed, 24)):
        replace(graph, GEMM, {"x": source, "weight": gs.Constant(f"{result.name}.weight", Weight.of(
            pixels(result.shape[-1], width)))}, [result])
    graph.nodes += [gs.Node("Concat", attrs={"axis": 2}, inputs=layers, outputs=[joined]),
                    gs.Node("Reshape", inputs=[mixed, gs.Constant("shape", np.array([6, 3]))],
                            outputs=[y])]
    tidy(graph)
    samples = (ImageSample({"pixel_values": pixels(1, 6, 8)}, {}),)
    image_rows(graph, Settings(8, 8, image_samples=samples), Report("rows"))
    parts = divide_image(graph, samples)
    assert [node.op for node in parts.device.nodes if node.op != "GemmBiasAct"] == ["Concat"] * 2
    assert [tensor.name for tensor in parts.device.inputs] == ["patches"]


def test_rows_that_are_weighted_between_ops_are_refused():
    """Interpolated rows: products with a column are neither selections nor row-wise ops."""
    x = gs.Variable("pixel_values", np.float32, [6, 8])
    index, column = gs.Variable("index", np.int64, [6]), gs.Variable("column", np.float32, [6, 1])
    rows, selected = gs.Variable("rows", np.float32, [6, 4]), gs.Variable("selected", np.float32)
    weighted, y = (gs.Variable(name, np.float32, [6, 4]) for name in ("weighted", "y"))
    graph = gs.Graph(inputs=[x, index, column], outputs=[y], opset=plugins.OPSET)
    replace(graph, GEMM, {"x": x, "weight": gs.Constant("w", Weight.of(
        np.ones((4, 8), np.float32)))}, [rows])
    graph.nodes += [gs.Node("Gather", inputs=[rows, index], outputs=[selected]),
                    gs.Node("Mul", name="weigh", inputs=[selected, column], outputs=[weighted])]
    replace(graph, GEMM, {"x": weighted, "weight": gs.Constant("v", Weight.of(
        np.ones((4, 4), np.float32)))}, [y])
    sample = ImageSample({"pixel_values": pixels(6, 8), "index": np.arange(6)[::-1].copy(),
                          "column": np.ones((6, 1), np.float32)}, {})
    with pytest.raises(LlmcError, match="Mul 'weigh' .* neither a selection of rows nor an op on"):
        divide_image(graph, [sample])


def test_attention_that_is_not_rotated_as_positions_say_is_left(monkeypatch):
    """Rotated only in part: the nodes stay, and the refusal names them."""
    model = tiny_model("qwen3_vl")
    original = modeling_qwen3_vl.apply_rotary_pos_emb_vision

    def own(q, k, cos, sin):
        turned, keys = original(q, k, cos, sin)
        return torch.cat([turned[..., :8], q[..., 8:]], -1), keys

    monkeypatch.setattr(modeling_qwen3_vl, "apply_rotary_pos_emb_vision", own)
    _, reports, _ = fused(export(model, SAMPLES["qwen3_vl"]), model)
    report, = (report for report in reports if report.name == "image.attention")
    assert report.matches == {"image-attention": 0}
    assert "no rotary embedding" in report.refusals[0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_heads_of_queries_keys_and_values_are_normalized(dtype, tmp_path):
    """Also padded heads for 16 bits: their mean is that of 24 elements and 8 zeros."""
    rows, heads, dim = 5, 2, 24
    x = gs.Variable("pixel_values", np.float32, [rows, 8])
    nodes, made = [], []
    graph = gs.Graph(nodes, inputs=[x], opset=plugins.OPSET)

    def value(name, *shape):
        return gs.Variable(name, np.float32, [*shape])

    def known(name, values):
        return gs.Constant(name, Weight.of(values) if values.dtype == np.float32 else values)

    for name in ("query", "key", "value"):
        parts = [value(f"{name}.{index}", *shape) for index, shape in enumerate((
            (rows, heads * dim), (rows * heads, dim), (rows * heads, dim), (rows, heads * dim)))]
        replace(graph, GEMM, {"x": x, "weight": known(f"{name}.w", pixels(heads * dim, 8))},
                parts[:1])
        replace(graph, RMS_NORM, {"x": parts[1], "weight": known(f"{name}.n", pixels(dim))},
                [parts[2]], {"epsilon": 0.1})
        graph.nodes += [gs.Node("Reshape", inputs=[given, known(f"{result.name}.shape", np.array(
            result.shape))], outputs=[result]) for given, result in (parts[:2], parts[2:])]
        made.append(parts[3])
    attended, y = value("attended", rows, heads * dim), value("y", rows, 4)
    replace(graph, ATTENTION, {**dict(zip(("query", "key", "value"), made, strict=True)),
                               "cu_seqlens": known("starts", np.array([0, 2, rows], np.int32))},
            [attended], {"num_heads": heads, "num_kv_heads": heads, "head_dim": dim})
    replace(graph, GEMM, {"x": attended, "weight": known("o", pixels(4, heads * dim))}, [y])
    graph.outputs = [y]
    tidy(graph)
    values = {"pixel_values": pixels(rows, 8)}
    settings = Settings(8, 8, image_samples=(ImageSample(values, {}),),
                        options=CompileOptions(target="cuda", dtype=dtype))
    before, = written(graph, tmp_path).run(None, values)
    image_attention(graph, settings, report := Report("attention"))
    tidy(graph)
    pad_heads(graph, settings, padded := Report("pad_heads"))
    tidy(graph)
    assert report.matches == {"image-attention": 1} and not report.refusals
    assert padded.matches == ({} if dtype == "float32" else {"pad-heads": 1})
    assert {node.op: node.attrs.get("head_dim") for node in graph.nodes} == {
        "GemmBiasAct": None, "GroupRMSNorm": None,
        "BidirectionalAttention": dim if dtype == "float32" else 32}
    after, = written(graph, tmp_path).run(None, values)
    assert np.abs(after - before).max() < 1e-5 * np.abs(before).max()


def test_elements_in_no_patch_are_left_out(tmp_path):
    x = gs.Variable("pixel_values", np.float32, [2, 3, 9, 8])
    y = gs.Variable("y", np.float32, [2, 5, 2, 2])
    weight = gs.Constant("w", Weight.of(pixels(5, 3, 4, 4)))
    graph = gs.Graph([gs.Node("Conv", inputs=[x, weight], outputs=[y], attrs={
        "strides": [4, 4], "kernel_shape": [4, 4]})], inputs=[x], outputs=[y], opset=plugins.OPSET)
    values, report = {"pixel_values": pixels(2, 3, 9, 8)}, Report("patches")
    expected, = written(graph, tmp_path).run(None, values)
    image_patches(graph, Settings(8, 8, image_samples=(ImageSample(values, {}),)), report)
    tidy(graph)
    assert report.matches == {"patches": 1}
    assert np.abs(written(graph, tmp_path).run(None, values)[0] - expected).max() < 1e-5


@pytest.mark.parametrize(("seen", "reason"), [
    (np.ones((4, 4), bool), ""), (np.tri(4, dtype=bool), "do not attend to all patches")])
def test_a_mask_that_hides_nothing_is_no_mask(seen, reason):
    """Of two tiles with two heads and four patches, by the size of the pixels alone."""
    x = gs.Variable("pixel_values", np.float32, [2, 2, 4, 8])
    kind = {"q": (2, 2, 4, 8), "turned": (2, 2, 8, 4), "mask": (2, 1, 4, 4), "y": (2, 2, 4, 8),
            **dict.fromkeys(("scores", "scaled", "masked", "weights"), (2, 2, 4, 4))}
    by_name = {name: gs.Variable(name, np.float32, list(shape)) for name, shape in kind.items()}

    def node(op, inputs, output, **attrs):
        return gs.Node(op, inputs=[by_name.get(own, own) if isinstance(own, str) else
                                   own if isinstance(own, gs.Tensor) else
                                   gs.Constant(f"{output}.{index}", np.asarray(own))
                                   for index, own in enumerate(inputs)],
                       outputs=[by_name[output]], attrs=attrs)

    graph = gs.Graph([
        node("Identity", [x], "q"), node("Transpose", ["q"], "turned", perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "turned"], "scores"),
        node("Mul", ["scores", np.float32(0.3)], "scaled"),
        node("Expand", [seen[None, None], np.array([2, 1, 4, 4])], "mask"),
        node("Where", ["mask", "scaled", np.float32(-1e30)], "masked"),
        node("Softmax", ["masked"], "weights", axis=-1), node("MatMul", ["weights", "q"], "y"),
    ], inputs=[x], outputs=[by_name["y"]], opset=plugins.OPSET)
    by_name["mask"].dtype = bool
    report, values = Report("softmax"), {"pixel_values": pixels(2, 2, 4, 8)}
    before = run_graph(graph, values)
    image_softmax(graph, Settings(8, 8, image_samples=(ImageSample(values, {}),)), report)
    tidy(graph)
    assert report.matches == {"image-softmax": int(not reason)}
    assert not reason or reason in report.refusals[0]
    assert np.abs(run_graph(graph, values) - before).max() < 1e-6


def padded_attention():
    """Two heads of four patches with a mask of the processor, and rows of some patches."""
    kind = {"pixel_values": (4, 8), "rows": (4, 8), "split": (1, 4, 2, 4), "q": (1, 2, 4, 4),
            "turned": (1, 2, 4, 4), **dict.fromkeys(("scores", "masked", "weights"), (1, 2, 4, 4)),
            "y": (1, 2, 4, 4), "back": (1, 4, 2, 4), "attended": (4, 8), "mixed": (4, 8),
            "chosen": ("n", 8), "result": ("n", 3)}
    by_name = {name: gs.Variable(name, np.float32, list(shape)) for name, shape in kind.items()}
    mask, index = gs.Variable("mask", bool, [1, 1, 4, 4]), gs.Variable("index", np.int64, ["n"])

    def node(op, inputs, output, **attrs):
        return gs.Node(op, name=output, outputs=[by_name[output]], attrs=attrs, inputs=[
            by_name[own] if isinstance(own, str) else own if isinstance(own, gs.Tensor) else
            gs.Constant(f"{output}.{place}", np.asarray(own)) for place, own in enumerate(inputs)])

    def linear(x, output, width):
        replace(graph, GEMM, {"x": by_name[x], "weight": gs.Constant(
            f"{output}.w", Weight.of(pixels(width, 8)))}, [by_name[output]])

    graph = gs.Graph([
        node("Reshape", ["rows", np.array([1, 4, 2, 4])], "split"),
        node("Transpose", ["split"], "q", perm=[0, 2, 1, 3]),
        node("Transpose", ["q"], "turned", perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "turned"], "scores"),
        node("Where", [mask, "scores", np.float32(-1e30)], "masked"),
        node("Softmax", ["masked"], "weights", axis=-1), node("MatMul", ["weights", "q"], "y"),
        node("Transpose", ["y"], "back", perm=[0, 2, 1, 3]),
        node("Reshape", ["back", np.array([4, 8])], "attended"),
        node("Gather", ["mixed", index], "chosen", axis=0),
    ], inputs=[by_name["pixel_values"], mask, index], outputs=[by_name["result"]],
        opset=plugins.OPSET)
    linear("pixel_values", "rows", 8)
    linear("attended", "mixed", 8)
    linear("chosen", "result", 3)
    tidy(graph)
    return graph


@pytest.mark.parametrize(("hidden", "index", "target", "reason"), [
    ([3], [2, 0], "cuda", ""), ([], [3, 0], "cuda", ""),
    ([3], [2, 3], "cuda", "rows of the prompt depend on patches of padding"),
    ([1], [2, 0], "cuda", "does not hide the last patches"),
    ([3], [2, 0], "cpu", "depends on values of the processor")])
def test_attention_without_patches_of_padding(hidden, index, target, reason, tmp_path):
    """Its rows are arbitrary, so that a program is refused if rows of the prompt are of them."""
    graph = padded_attention()
    mask = np.ones((1, 1, 4, 4), bool)
    mask[..., hidden] = False
    values = {"pixel_values": pixels(4, 8), "mask": mask, "index": np.array(index)}
    samples = (ImageSample(values, {"n": len(index)}),)
    settings = Settings(8, 8, image_samples=samples, options=CompileOptions(target=target))
    before, = written(graph, tmp_path).run(None, values)
    reports = fuse_image(graph, settings)
    refusals = [own for report in reports if report.name == "image.softmax"
                for own in report.refusals]
    if "rows of the prompt" in reason:
        with pytest.raises(LlmcError, match=reason):
            lower_image_device(graph, settings)
        return
    assert bool(refusals) == bool(reason) and all(reason in own for own in refusals)
    if not reason:
        after, padding = written(graph, tmp_path).run(None, values)
        assert np.abs(after - before).max() < 1e-5
        assert padding.tolist() == [row in hidden for row in range(4)]
        parts, _ = lower_image_device(graph, settings)
        assert [own.name for own in parts.device.inputs] == ["patches", "cu_seqlens", "merged_rows"]


def test_means_of_patches_are_gathered_and_multiplied(tmp_path):
    """Of two patches each, without one of padding; a row without patches is not of the prompt."""
    x = gs.Variable("pixel_values", np.float32, [1, 5, 4])
    matrix, padding = gs.Variable("m", np.float32, [1, 3, 5]), gs.Variable("p", bool, [1, 5, 1])
    shown = gs.Variable("shown", np.float32, [1, 5, 4])
    y = gs.Variable("y", np.float32, [1, 3, 4])
    graph = gs.Graph([
        gs.Node("Where", inputs=[padding, gs.Constant("zero", np.zeros((), np.float32)), x],
                outputs=[shown]),
        gs.Node("MatMul", inputs=[matrix, shown], outputs=[y])], inputs=[x, matrix, padding],
        outputs=[y], opset=plugins.OPSET)
    means = np.zeros((1, 3, 5), np.float32)
    means[0, [0, 0, 0, 1, 1], [0, 2, 4, 1, 3]] = 0.5
    values = {"pixel_values": pixels(1, 5, 4), "m": means,
              "p": np.arange(5).reshape(1, 5, 1) == 4}
    before, = written(graph, tmp_path).run(None, values)
    for taken, expected in ((3, 0), (2, 1)):
        settings = Settings(8, 8, options=CompileOptions(target="cuda"), image_samples=(
            ImageSample(values, {}, taken),))
        image_pools(graph, settings, report := Report("pools"))
        assert report.matches["means"] == expected
    tidy(graph)
    image_rows(graph, settings, Report("rows"))
    assert {node.op for node in graph.nodes} >= {"TopK", "Gather", "GemmBiasAct"}
    after, = written(graph, tmp_path).run(None, values)
    assert np.abs(after - before)[:, :2].max() < 1e-6


def test_overlapping_patches_stay_a_convolution():
    x = gs.Variable("pixel_values", np.float32, [1, 3, 8, 8])
    y = gs.Variable("y", np.float32, [1, 4, 3, 3])
    weight = gs.Constant("w", Weight.of(np.ones((4, 3, 4, 4), np.float32)))
    graph = gs.Graph([gs.Node("Conv", inputs=[x, weight], outputs=[y], attrs={
        "strides": [2, 2], "kernel_shape": [4, 4]})], inputs=[x], outputs=[y])
    report = Report("patches")
    image_patches(graph, Settings(8, 8), report)
    assert report.matches == {"patches": 0} and "overlap" in report.refusals[0]


def test_an_array_that_the_encoder_does_not_take_is_named():
    with pytest.raises(LlmcError, match="the processor gives 'depth', which the image encoder"):
        export(tiny_model("llava"), [{"pixel_values": pixels(1, 3, 28, 28), "depth": pixels(1)}])


@pytest.mark.parametrize(("function", "arguments"), [
    ("get_vision_cu_seqlens", {}), ("get_vision_cu_seqlens", {"merge_temporal": True}),
    ("get_vision_position_ids", {"spatial_merge_size": 2}),
    ("get_vision_position_ids", {"spatial_merge_size": 1, "include_temporal": True}),
    ("get_vision_window_index", {"spatial_merge_size": 2, "window_size": 56, "patch_size": 14}),
    ("get_vision_window_index", {"spatial_merge_size": 2, "window_size": 112, "patch_size": 14}),
    *(("get_vision_interpolation_indices_and_weights", {
        "num_grid_per_side": 7, "mode": mode, "align_corners": align, "padding": padding,
        "spatial_merge_size": merge})
      for mode in ("bilinear", "bicubic") for align in (True, False)
      for padding in ("border", "zeros") for merge in (1, 2))])
def test_inputs_of_the_grid_are_those_of_transformers(function, arguments):
    grid = np.array([[1, 4, 6], [2, 10, 8], [1, 2, 2], [3, 18, 10]])
    expected = getattr(vision_utils, function)(torch.from_numpy(grid), **arguments)
    several = expected if isinstance(expected, tuple) else (expected,)
    names = tuple(f"input_{index}" for index in range(len(several)))
    own = vision_inputs.compute(
        VisionInput(function=function, arguments=arguments, names=names), grid)
    for name, value in zip(names, several, strict=True):
        assert own[name].dtype == value.numpy().dtype
        assert np.abs(own[name] - value.numpy()).max() <= (2e-6 if value.is_floating_point() else 0)
