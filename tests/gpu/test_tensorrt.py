"""Engines built and run by real TensorRT.

LLMC_TENSORRT_PYTHON and LLMC_TENSORRT_LIBRARY may give its location."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pooling
import pytest
import torch
import two_models

import llmc
from llmc.compiler.check.diff import diff
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import tensorrt
from llmc.runtime.core.pooling import Input
from llmc.runtime.engines.tensorrt import TensorRTEngine, plugin_library, tensorrt_library

SHORT = llmc.SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="session")
def found(extension):
    """Return the target as described by the builder."""
    try:
        return tensorrt.describe(CompileOptions(dtype="float16"))
    except llmc.LlmcError as error:
        pytest.skip(str(error))


def compile(hf, case, dtype="float16", **options):
    return llmc.compile(hf, case, target="tensorrt", dtype=dtype, max_batch_size=4, **options)


@pytest.fixture(scope="module")
def compiled(found, tmp_path_factory):
    """A tiny Llama in float16, for TensorRT and for llmc's own engine."""
    directory = tmp_path_factory.mktemp("tensorrt")
    hf = families.save(families.tiny_model("llama", max_position_embeddings=512),
                       directory / "hf")
    compile(hf, directory / "case")
    llmc.compile(hf, directory / "cuda", target="cuda", dtype="float16")
    return directory


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_are_transformers(found, family, tmp_path):
    families.check_logits_on_gpu(family, tmp_path, compile, (
        "float16", *(["float32"] if family in ("llama", "gpt2") else [])))


@pytest.mark.parametrize("sampling", [
    {}, dict(temperature=0.8, top_k=40, top_p=0.9, seed=5),
    dict(temperature=0.9, min_p=0.02, typical_p=0.9, seed=5, repetition_penalty=1.2,
         frequency_penalty=0.3, logit_bias={7: 2.0}, bad_words=[[8, 8], [9]], min_tokens=20)],
    ids=["greedy", "sampled", "processed"])
def test_tokens_are_the_cuda_target_s(compiled, sampling):
    """Decoding in captured graphs, batches of several sizes, a cache row that moves."""
    prompts = [[5, 6, 7], [8] * 40, [9, 10], [11] * 7, [12]]
    params = llmc.SamplingParams(max_tokens=50, ignore_eos=True, **sampling)
    results = []
    for target in ("cuda", "case"):
        with llmc.LLM(compiled / target, max_batch_size=3) as llm:
            results.append(llm.generate(prompts, params))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("name", "task", "kind"), [
    ("bert", "embed", "mean"), ("roberta", "token_classify", ""), ("mpnet", "embed", "cls"),
    ("modernbert", "classify", ""), ("eurobert", "embed", "mean"), ("qwen3", "embed", "last")])
def test_pooled_rows_are_transformers(found, name, task, kind, dtype, tmp_path):
    """Of texts together and alone, in several steps; not yet run on a GPU."""
    fields = {**pooling.ENCODERS, **pooling.DECODERS}[name]
    model = pooling.save(name, fields, tmp_path / "hf", task, kind,
                         **({} if task == "embed" else {"num_labels": 3}))
    compile(tmp_path / "hf", tmp_path / "case", dtype=dtype)
    texts = pooling.texts((5, 1, 17, 40, 9, 60, 1, 33))
    expected = [pooling.reference(model, ids, kind) for ids in texts]
    tolerance = {"float32": 1e-4, "float16": 5e-2}[dtype]
    with llmc.LLM(tmp_path / "case") as llm:
        pooling.assert_rows(llm.pool([Input(ids) for ids in texts]), expected, tolerance)
        pooling.assert_rows(llm.pool([Input(texts[3])]), expected[3:4], tolerance)


def test_float8_caches_give_the_cuda_target_s_tokens(compiled, tmp_path):
    found = []
    for target in ("cuda", "tensorrt"):
        llmc.compile(compiled / "hf", tmp_path / target, target=target, dtype="float32",
                     kv_dtype="float8_e4m3fn", max_batch_size=4)
        with llmc.LLM(tmp_path / target, max_batch_size=4) as llm:
            found.append(llm.generate([[5, 6, 7], [8] * 40, [9, 10]], SHORT))
    assert found[0] == found[1]


@pytest.mark.parametrize("wish", [
    dict(quantize="int4", group_size=32), dict(quantize="uint4", group_size=32),
    dict(quantize="int8", group_size=64), dict(quantize="fp8"),
    dict(quantize="fp8", quantize_activations=True)],
    ids=lambda wish: "-".join(map(str, wish.values())))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantized_weights_give_the_cuda_target_s_logits(found, family, wish, tmp_path):
    """One sequence, few and many rows use different kernels.

    With FP8 activations the last bit may select the next code, which is a sixteenth away. There the
    program interpreted in float16 and in float32 differs by 0.6 to 1.7 % of the range (0.02 to
    0.04 % without activation quantization), and quantization costs 1.0 to 1.8 %.
    """
    changes = {"llama": {"intermediate_size": 192}, "gpt2": {"n_inner": 192}}[family]
    hf = families.save(families.tiny_model(family, max_position_embeddings=512, **changes),
                       tmp_path / "hf")
    furthest, median = (3e-2, 1e-2) if "quantize_activations" in wish else (4e-3, 4e-3)
    for errors in beside_the_cuda_target(hf, tmp_path, "float16", **wish):
        assert errors.max() <= furthest and np.median(errors) <= median


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scheme", ["int4", "uint4", "int8", "fp8", "mxfp4"])
def test_quantized_experts_give_the_cuda_target_s_logits(found, scheme, dtype, tmp_path):
    """One, few and many tokens. In 16 bits routing may differ, so most positions must be near."""
    changes = {"hidden_size": 128, "intermediate_size": 128} if scheme == "mxfp4" else \
        {"hidden_size": 128, "moe_intermediate_size": 64}
    hf = families.save(families.tiny_model(
        "gpt_oss" if scheme == "mxfp4" else "qwen3_moe", max_position_embeddings=512, **changes),
        tmp_path / "hf")
    wish = {"quantize": scheme}
    if scheme == "mxfp4":
        families.to_mxfp4(hf, tmp_path / "mxfp4", np.random.default_rng(6))
        hf, wish = tmp_path / "mxfp4", {}
    for errors in beside_the_cuda_target(hf, tmp_path, dtype, **wish):
        assert errors.max() <= 1e-4 if dtype == "float32" else np.median(errors) <= 5e-3


def beside_the_cuda_target(hf, tmp_path, dtype, **wish):
    """Return each position's logits error against the cuda target relative to the range."""
    tokens = np.random.default_rng(0).integers(3, families.VOCAB, 300).tolist()
    logits = []
    for target in ("cuda", "tensorrt"):
        llmc.compile(hf, tmp_path / target, target=target, dtype=dtype, max_batch_size=4, **wish)
        with llmc.LLM(tmp_path / target, max_batch_size=4) as llm:
            assert llm.manifest.quantization
            logits.append([llm.logits(tokens[:count]) for count in (1, 7, 40, 300)])
    return [np.abs(ours - theirs).max(-1) / np.ptp(theirs)
            for ours, theirs in zip(*reversed(logits), strict=True)]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_moe_logits_equal_transformers(found, family, tmp_path):
    families.check_logits_on_gpu(family, tmp_path, compile, ("float16",))


def test_beams_are_the_cuda_target_s(compiled, tmp_path):
    """Beams use cache indirection, between steps without it, with the maximum number of rows."""
    prompts = [[5, 6, 7], [8] * 40]
    greedy, searched = (llmc.SamplingParams(max_tokens=30, ignore_eos=True, **more)
                        for more in ({}, {"beam_width": 2}))
    found = []
    for target in ("cuda", "tensorrt"):
        llmc.compile(compiled / "hf", tmp_path / target, target=target, dtype="float32",
                     max_batch_size=4)
        with llmc.LLM(tmp_path / target, max_batch_size=4) as llm:
            before = llm.generate(prompts, greedy)
            pairs = llm.beam_search(prompts, searched)
            four = llm.beam_search(prompts[1:], replace(searched, beam_width=4))
            assert llm.generate(prompts, greedy) == before
            found.append((before, pairs, four))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert np.array_equal(ours.output_ids, theirs.output_ids)
        assert np.array_equal(ours.parent_ids, theirs.parent_ids)
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-4)


@pytest.fixture(scope="module")
def searching(compiled):
    """The same Llama compiled for beam search, whose steps have other facts."""
    compile(compiled / "hf", compiled / "beams")
    return compiled / "beams"


def test_two_concurrent_models_give_the_same_tokens_as_each_alone(compiled, searching):
    two_models.check(compiled / "case", searching)


def test_two_alternating_models_give_the_same_tokens_as_each_alone(compiled, searching):
    two_models.check(compiled / "case", searching, at_once=False)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_an_encoder_decoder_gives_the_cpu_target_s_tokens(found, name, encoder_decoder, tmp_path):
    """Greedy and beams; waiting prompts reuse rows of the encoder output."""
    _, raw, cases = encoder_decoder(name)
    options = CompileOptions(dtype="float32", max_batch_size=4)
    families.write_encoder_decoder(raw, tmp_path / "case", tensorrt.describe(options), options)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 100, length).tolist() for length in (40, 1, 23, 9, 17)]
    greedy = llmc.SamplingParams(max_tokens=20, ignore_eos=True)
    results = []
    for case in (cases["tp1"], tmp_path / "case"):
        with llmc.LLM(case, max_batch_size=4) as llm:
            results.append((llm.generate(prompts, greedy),
                            llm.beam_search(prompts[:2], replace(greedy, beam_width=2))))
    (tokens, beams), (ours, our_beams) = results
    assert [c.token_ids for c in ours] == [c.token_ids for c in tokens]
    assert np.array_equal(our_beams.output_ids, beams.output_ids)
    np.testing.assert_allclose(our_beams.scores, beams.scores, rtol=1e-4)


def test_a_plan_with_wrong_output_sizes_is_refused(compiled):
    manifest = llmc.LLM(compiled / "case").manifest
    dims = manifest.dims.model_copy(update={"padded_vocab_size": 2 * families.VOCAB})
    chip = manifest.chips[0]
    wide = chip.model_copy(update={"outputs": tuple(
        tensor.model_copy(update={"shape": ("num_logits", 2 * families.VOCAB)})
        if tensor.name == "logits" else tensor for tensor in chip.outputs)})
    engine = TensorRTEngine(manifest.model_copy(update={"dims": dims}), wide, compiled / "case", 0,
                            max_batch_size=4, max_tokens=4096)
    with pytest.raises(llmc.LlmcError, match=r"the plan's output logits is \[1, \d+\], the engine "
                                             r"expects \[1, \d+\]; compile the model again"):
        engine.allocate(engine.measure())


def test_more_sequences_than_the_profile_allows_are_refused(compiled):
    manifest = llmc.LLM(compiled / "case").manifest
    engine = TensorRTEngine(manifest, manifest.chips[0], compiled / "case", 0, max_batch_size=8,
                            max_tokens=4096)
    with pytest.raises(llmc.LlmcError, match=r"the step's .* is \[\d+.*\], the plan's profile for "
                                             r"prompts has .*; compile the model again with"):
        engine.allocate(engine.measure())


@pytest.mark.parametrize("damage", ["truncated", "nonsense"])
def test_an_invalid_plan_is_refused(extension, compiled, damage):
    plan = (compiled / "case" / "chip0" / "engine.plan").read_bytes()
    plan = {"truncated": plan[:len(plan) // 2], "nonsense": b"plan" * 100}[damage]
    extension.tensorrt.load(tensorrt_library(extension.tensorrt.version.split(".")[0]))
    program = extension.Program(dtype="float16", max_batch=1, max_tokens=128, max_logits=8,
                                max_seq_len=16, block_size=16, token_bytes=0, logit_bytes=64)
    with pytest.raises(extension.CudaError, match="TensorRT cannot deserialize the plan: "):
        extension.tensorrt.add_plan(program, 0, str(plugin_library()), plan, [], [])


def test_diff_compares_layers_logits_weights_and_tokens(compiled):
    """For the running plan, whose plugins copy out their outputs."""
    report = diff(compiled / "case", compiled / "hf", bisect=True)
    assert report.verdict is None and report.first_op is None and not report.weights
    assert {layer.name for layer in report.layers} == {
        *(f"hidden_states.{i}" for i in range(families.FAMILIES["llama"]["num_hidden_layers"])),
        "logits"}


def test_a_second_build_uses_the_timing_cache(compiled, tmp_path):
    cache = compiled / "case.timing_cache"
    assert cache.stat().st_size > 0
    compile(compiled / "hf", compiled / "case")
    with llmc.LLM(compiled / "case") as llm:
        assert len(llm.generate([1, 2, 3], SHORT)[0].token_ids) == SHORT.max_tokens


@pytest.fixture
def polygraphy(compiled):
    """Run Polygraphy of TensorRT's Python on a file of the compiled chip."""
    python = os.environ.get("LLMC_TENSORRT_PYTHON") or sys.executable
    if subprocess.run([python, "-c", "import onnxruntime"], capture_output=True).returncode:
        pytest.skip(f"{python} has no onnxruntime")
    chip = compiled / "case" / "chip0"
    paths = [str(Path(tensorrt_library("8")).parent), *tensorrt.library_directories(),
             os.environ.get("LD_LIBRARY_PATH", "")]

    def run(name, *arguments):
        done = subprocess.run(
            [python, "-c", "from polygraphy.tools import main; main()", "run", str(chip / name),
             *arguments, "--data-loader-script", str(chip / "polygraphy_inputs.py")],
            capture_output=True, text=True,
            env=os.environ | {"LLMC_LOAD_PLUGINS": "1", "LD_LIBRARY_PATH": os.pathsep.join(paths)})
        assert "PASSED" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]

    return run


def test_polygraphy_runs_the_graph_on_both(polygraphy, compiled):
    polygraphy("graph.onnx", "--onnxrt", "--trt", "--plugins", str(plugin_library()),
               "--trt-config-script", str(compiled / "case" / "chip0" / "polygraphy_inputs.py"),
               "--atol", "0.02")


def test_polygraphy_compares_the_plan_with_onnx_runtime(polygraphy, tmp_path):
    polygraphy("graph.onnx", "--onnxrt", "--save-outputs", str(tmp_path / "outputs.json"))
    polygraphy("engine.plan", "--trt", "--model-type", "engine", "--plugins",
               str(plugin_library()), "--load-outputs", str(tmp_path / "outputs.json"),
               "--atol", "0.02")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_two_ranks_give_the_tokens_of_one(found, compiled, tmp_path):
    compile(compiled / "hf", tmp_path / "tp2", "float32", tp_size=2)
    compile(compiled / "hf", tmp_path / "tp1", "float32")
    results = []
    for case in ("tp1", "tp2"):
        with llmc.LLM(tmp_path / case) as llm:
            results.append(llm.generate([[5, 6, 7], [8] * 40], SHORT))
    assert results[0] == results[1]
