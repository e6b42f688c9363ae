"""Prompts with images on a GPU: tokens and log-probabilities of target cpu."""

from dataclasses import replace

import numpy as np
import pytest
from image_models import assert_image_diff, images, prompts_of, write_model

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.engines import cuda_image_encoder
from llmc.runtime.engines.image_encoder import DividedImageEncoder, ImageEncoder
from llmc.runtime.gpus import GpuReplica

# Tokens that do not repeat.
GREEDY = llmc.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0,
                             presence_penalty=2)
OPTIONS = [
    {},
    # Chunks end within images, some of one row; sequences are preempted.
    {"max_num_batched_tokens": 13, "max_batch_size": 4, "block_size": 4, "kv_cache_tokens": 600},
    {"prefix_reuse": False, "check_step": 6},
    # Drafts, verified before the host has read those of the step before.
    {"speculate": "ngram", "num_speculative_tokens": 3}]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def cases(request, extension, tmp_path_factory):
    """Embeddings alone; positions by axis; with deep rows; with recurrent layers."""
    root = tmp_path_factory.mktemp(request.param)
    write_model(request.param, root / "hf")
    llmc.compile(root / "hf", root / "cpu")
    for dtype in ("float32", "bfloat16"):
        llmc.compile(root / "hf", root / dtype, target="cuda", dtype=dtype)
    with llmc.LLM(root / "cpu") as llm:
        prompts = prompts_of(llm)
        return root, prompts, llm.generate(prompts, GREEDY)


@pytest.fixture(scope="module", params=["glm_ocr", "llama4", "llava_onevision", "gemma4_large",
                                        "mllama"])
def encoders(request, extension, tmp_path_factory):
    """Norms of heads; a table of one tile; a canvas; means and bounds; patches of padding."""
    root = tmp_path_factory.mktemp(request.param)
    write_model(request.param, root / "hf")
    llmc.compile(root / "hf", root / "cpu")
    for dtype in ("float32", "bfloat16"):
        llmc.compile(root / "hf", root / dtype, target="cuda", dtype=dtype)
    with llmc.LLM(root / "cpu") as llm:
        return root, prompts_of(llm)


def assert_like(completions, expected):
    for own, other in zip(completions, expected, strict=True):
        assert own.token_ids == other.token_ids
        np.testing.assert_allclose([each.chosen for each in own.logprobs],
                                   [each.chosen for each in other.logprobs], atol=2e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_and_log_probabilities_are_those_of_the_cpu(cases, options):
    root, prompts, expected = cases
    with llmc.LLM(root / "float32", **options) as llm:
        for count in (1, 3):  # the second time, images are cached
            assert_like(llm.generate(prompts * count, GREEDY), expected * count)


def test_first_tokens_in_16_bits(cases):
    """Later ones follow from rounded logits."""
    root, prompts, expected = cases
    with llmc.LLM(root / "bfloat16") as llm:
        made = llm.generate(prompts, replace(GREEDY, max_tokens=1))
    for own, other in zip(made, expected, strict=True):
        assert abs(own.logprobs[0].chosen - other.logprobs[0].chosen) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_cpu(dtype, cases, monkeypatch):
    assert_rows(*cases[:2], dtype, monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_other_encoders_are_those_of_the_cpu(dtype, encoders, monkeypatch):
    assert_rows(*encoders, dtype, monkeypatch)


def assert_rows(root, prompts, dtype, monkeypatch):
    """Rows of small and large images, for which the program is loaded again."""
    monkeypatch.setattr(cuda_image_encoder, "_PATCHES", 128)
    with llmc.LLM(root / "cpu") as llm:
        items = [own.item for prompt in prompts for own in llm.media_prompt(
            prompt["prompt"], images=prompt["images"]).ranges]
    host = ImageEncoder(read_manifest(root / "cpu"), root / "cpu", 2)
    device = cuda_image_encoder.load_image_encoder(read_manifest(root / dtype), root / dtype, 2, 0)
    assert isinstance(device, DividedImageEncoder)
    for item in (*items, *items[::-1]):
        expected, rows = host.encode(item), device.encode(item)
        assert rows.shape == expected.shape
        tolerance = 1e-4 if dtype == "float32" else 0.05
        assert np.abs(rows - expected).max() < tolerance * max(np.abs(expected).max(), 1)


def test_images_beside_texts_and_other_images(cases):
    """Steps that decode some sequences and read the images of others."""
    root, prompts, expected = cases
    with llmc.LLM(root / "float32", max_num_batched_tokens=32, max_batch_size=8) as llm:
        made = llm.generate([*prompts, *prompts[::-1], *prompts], GREEDY)
        assert_like(made, [*expected, *expected[::-1], *expected])


def test_the_same_text_with_another_image_is_another_prompt(cases):
    root, prompts, _ = cases
    one, other = ({**prompts[1], "images": [image]} for image in images(2))
    with llmc.LLM(root / "cpu") as llm:
        expected = [llm.generate([own], GREEDY)[0] for own in (one, other)]
    with llmc.LLM(root / "float32") as llm:
        assert_like([llm.generate([own], GREEDY)[0] for own in (one, other)], expected)


def test_steps_without_images_are_captured(cases, monkeypatch):
    """Only steps that read images have rows of embeddings."""
    root, prompts, expected = cases
    steps, real = [], GpuReplica.submit
    monkeypatch.setattr(GpuReplica, "submit", lambda self, step: (
        steps.append(step), real(self, step))[1])
    with llmc.LLM(root / "float32") as llm:
        assert_like(llm.generate(prompts, GREEDY), expected)
    assert 0 < sum(len(step.embed_ids) > 0 for step in steps) < len(steps)


def test_diff_compares_images(cases, tmp_path):
    root, *_ = cases
    if root.name.startswith("qwen3_vl"):  # with deep rows
        assert_image_diff(root / "float32", tmp_path)
        assert_image_diff(root / "bfloat16", tmp_path)
