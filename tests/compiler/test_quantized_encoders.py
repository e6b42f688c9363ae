"""`--quantize_encoders`: encoders of images and audio with quantized linear layers."""

import audio_models
import image_models
import numpy as np
import onnx_graphsurgeon as gs
import pytest
import torch
from audio_models import clips
from click.testing import CliRunner
from image_models import GREEDY, assert_generates, images, prompts_of
from multimodal_models import encoder_rows
from safetensors.numpy import load_file
from schedule_interpreter import interpreted_image_encoder

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.cli import main
from llmc.compiler.check.diff import diff
from llmc.compiler.check.quantized import round_activations
from llmc.compiler.graph.rewrite import Report, Settings
from llmc.compiler.graph.weights import Weight
from llmc.compiler.options import CompileOptions
from llmc.compiler.passes.quantize import quantize_encoder
from llmc.compiler.quant.nearest import quantize
from llmc.compiler.quant.scheme import Scheme
from llmc.plugins.quantization import dequantized
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.engines.image_encoder import MediaEncoder

# Largest differences from the rows of transformers, relative to their range.
TOLERANCES = {"int8": 0.02, "fp8": 0.1, "uint4": 0.3, "int4": 0.3}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    root = tmp_path_factory.mktemp("llava")
    return image_models.write_model("llava", root / "hf"), root / "hf"


def relative(rows, expected):
    """The largest difference, relative to the range."""
    return float(np.abs(rows - expected).max() / np.ptp(expected))


@pytest.fixture(scope="module")
def in_int8(llava, tmp_path_factory):
    """Its case directory with the encoder in int8."""
    case = tmp_path_factory.mktemp("int8") / "case"
    llmc.compile(llava[1], case, quantize_encoders="int8")
    return case


def items_of(manifest, case):
    processor = InputProcessor(manifest, case, 1).require_processor()
    return processor.process_images(images(3))


class Dequantized:
    """A case's quantized weights in the place of a model's, with activations as on a CPU."""

    def __init__(self, model, manifest, case):
        self._file = load_file(case / "chip0" / "weights.safetensors")
        self._layers = {f"{name}.weight": layer for name, layer in model.named_modules()
                        if isinstance(layer, torch.nn.Linear)}
        self._forms = manifest.image.quantization
        self._kept, self._hooks = {}, []

    def __enter__(self):
        for name, form in self._forms.items():
            layer = self._layers[name]
            parts = [self._file.get(f"{name}{part}") for part in ("", "_scale", "_zero", "_min")]
            fields = {"weight_dtype": form.dtype, "group_size": form.group_size}
            self._kept[name] = layer.weight.data
            layer.weight.data = torch.from_numpy(dequantized(fields, *parts).astype(np.float32))
            if form.dtype != "float8_e4m3fn":
                self._hooks.append(layer.register_forward_pre_hook(
                    lambda layer, given, form=form: torch.from_numpy(
                        round_activations(given[0].numpy(), form).astype(np.float32))))

    def __exit__(self, *error):
        for name, weight in self._kept.items():
            self._layers[name].weight.data = weight
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("scheme", [
    "int8", "int4", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("fp8", "uint4"))])
def test_rows_on_a_cpu_are_those_of_the_dequantized_weights(llava, in_int8, scheme, tmp_path):
    model, hf = llava
    case = in_int8 if scheme == "int8" else tmp_path / "case"
    if case != in_int8:
        llmc.compile(hf, case, quantize_encoders=scheme)
    manifest = read_manifest(case)
    assert manifest.quantization is None and not manifest.chips[0].quantization
    forms = manifest.image.quantization
    # The two layers whose results LLaVA reads, and the projector; not the patch embedding.
    assert len(forms) == 2 * 6 + 2 and not any("patch_embedding" in name for name in forms)
    encoder = MediaEncoder(manifest, case, "image", 1)
    for item in items_of(manifest, case):
        rows, = encoder.encode(item)
        original, = encoder_rows(model, item.arrays)
        with Dequantized(model, manifest, case):
            expected, = encoder_rows(model, item.arrays)
        # A rounded activation may differ by one code; FP8 weights are multiplied in float32.
        assert relative(rows, expected) < (1e-5 if scheme == "fp8" else 0.01)
        assert 1e-4 < relative(rows, original) < TOLERANCES[scheme]


def test_the_language_model_stays_as_it_is(llava, in_int8):
    with llmc.LLM(in_int8) as llm:
        prompt = prompts_of(llm)[0]  # without images
        assert_generates(llava[0], llm, prompt, llm.generate([prompt], GREEDY)[0])
        assert len(llm.generate(prompts_of(llm)[2], GREEDY)[0].token_ids) == 10
    shown = CliRunner().invoke(main, ["inspect", str(in_int8)]).stdout
    assert "image encoder, quantized weights: 2 in int8, groups of 16; 11 in int8, groups of 32; " \
        "1 in int8, groups of 64" in " ".join(shown.split())


@pytest.mark.parametrize(("name", "scheme"), [
    ("llava", "int8"), pytest.param("llava", "int4", marks=pytest.mark.thorough),
    pytest.param("qwen2_5_vl", "int8", marks=pytest.mark.thorough),
    pytest.param("qwen3_vl", "fp8", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", [
    pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_rows_of_a_program_for_gpus(name, scheme, dtype, tmp_path):
    """By the NumPy interpreter: groups of 16 columns, which no kernel reads, stay as they are."""
    model = image_models.write_model(name, tmp_path / "hf")
    manifest = llmc.compile(tmp_path / "hf", tmp_path / "case", target="cuda", dtype=dtype,
                            quantize_encoders=scheme)
    assert len(manifest.image.steps) > 1 and manifest.image.quantization
    assert {form.group_size % 32 for form in manifest.image.quantization.values()} == {0}
    encoder = interpreted_image_encoder(manifest, tmp_path / "case")
    for item in items_of(manifest, tmp_path / "case"):
        for rows, expected in zip(encoder.encode(item), encoder_rows(model, item.arrays),
                                  strict=True):
            assert 1e-4 < relative(rows, expected) < TOLERANCES[scheme]


@pytest.fixture(scope="module")
def both(llava, tmp_path_factory):
    """Its case directory with the language model in int4, too."""
    case = tmp_path_factory.mktemp("both") / "case"
    llmc.compile(llava[1], case, quantize="int4", quantize_encoders="int8")
    return case


def test_a_quantized_language_model_has_weights_of_its_own_names(both):
    manifest = read_manifest(both)
    assert {form.dtype for form in manifest.chips[0].quantization.values()} == {"int4", "int8"}
    assert {form.dtype for form in manifest.image.quantization.values()} == {"int8"}
    names = load_file(both / "chip0" / "weights.safetensors").keys()
    assert {f"{name}_scale" for name in manifest.image.quantization} <= names
    with llmc.LLM(both) as llm:
        assert len(llm.generate(prompts_of(llm)[1], GREEDY)[0].token_ids) == 10


def test_diff_compares_images_of_quantized_models(llava, both, tmp_path):
    images(1)[0].save(tmp_path / "a.png")
    report = diff(both, llava[1], images=[tmp_path / "a.png"], tokens=0)
    assert report.verdict is None
    found = {own.name: own for own in report.layers if own.name.endswith("(images)")}
    assert found["rows of image 0 (images)"].allowed == 0.1
    assert found["logits (images)"].allowed == 0.5
    assert 1e-4 < found["rows of image 0 (images)"].relative < TOLERANCES["int8"]


@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_rows_of_audio(tiny_audio, scheme, tmp_path):
    _, case = tiny_audio
    manifest = llmc.compile(case.parent / "hf", tmp_path / "case", quantize_encoders=scheme)
    forms = manifest.audio.quantization
    assert len(forms) >= 12 and not any("conv" in name for name in forms)
    plain, own = (MediaEncoder(read_manifest(directory), directory, "audio", 1)
                  for directory in (case, tmp_path / "case"))
    with llmc.LLM(tmp_path / "case") as llm:
        items = llm.processor.process_audio(clips(3))
        prompt = f"hear {llm.processor.placeholders['audio']} now"
        completion, = llm.generate({"prompt": prompt, "audio": clips(1)}, GREEDY)
        assert len(completion.token_ids) == 10
    for item in items:
        (rows,), (expected,) = own.encode(item), plain.encode(item)
        assert 1e-4 < relative(rows, expected) < TOLERANCES[scheme]


@pytest.mark.thorough
@pytest.mark.parametrize("name", audio_models.MODELS)
def test_rows_of_other_encoders_of_audio(name, tmp_path):
    audio_models.write_model(name, tmp_path / "hf")
    for scheme in ("none", "int8"):
        llmc.compile(tmp_path / "hf", tmp_path / scheme, quantize_encoders=scheme)
    encoders = [MediaEncoder(read_manifest(tmp_path / scheme), tmp_path / scheme, "audio", 1)
                for scheme in ("none", "int8")]
    with llmc.LLM(tmp_path / "none") as llm:
        items = llm.processor.process_audio(clips(3))
    for item in items:
        (expected,), (rows,) = (own.encode(item) for own in encoders)
        assert 1e-4 < relative(rows, expected) < TOLERANCES["int8"]


def test_weights_that_are_quantized_already_are_kept_and_those_of_inputs_are_not_quantized():
    rng = np.random.default_rng(0)
    weights = [Weight.of(rng.standard_normal((32, 32)).astype(np.float32), f"w{index}")
               for index in range(3)]
    weights[1] = quantize(weights[1], Scheme("int4", 16), "w1").weight("w1")
    tensors = [gs.Variable(f"x{index}", np.float32, ["rows", 32]) for index in range(4)]
    graph = gs.Graph([gs.Node("GemmBiasAct", f"gemm{index}", domain="llmc", inputs=[
        tensors[index], gs.Constant(f"w{index}", weight)], outputs=[tensors[index + 1]])
        for index, weight in enumerate(weights)], inputs=tensors[:1], outputs=tensors[3:])
    quantize_encoder(graph, Settings(8, 8, options=CompileOptions(quantize_encoders="int8")),
                     Report("quantize"))
    assert [node.attrs.get("weight_dtype") for node in graph.nodes] == [None, "int4", "int8"]


@pytest.mark.parametrize(("options", "message"), [
    ({"quantize_encoders": "int8"}, "quantize_encoders is given, but .* is compiled without "
                                    "encoders of images or audio; leave it out"),
    ({"quantize_encoders": "int3"}, "weights cannot be quantized to 'int3'")])
def test_what_cannot_be_quantized_is_named(tiny_hf, tmp_path, options, message):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(tiny_hf, tmp_path / "case", **options)
