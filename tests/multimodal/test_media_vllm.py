"""A case directory with an image encoder inside vLLM: its worker runs text, vLLM sees text only."""

import json
from pathlib import Path

import media_case
import pytest
import torch.distributed

from llmc import LLM, SamplingParams
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.core.step import SamplingState, Step
from llmc.runtime.replica import EngineConfig
from llmc.runtime.sampling.sampler import Sampler

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return media_case.write_case(tmp_path_factory.mktemp("media"))


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "vllm_plugin")


@pytest.fixture
def group():
    """The gloo group of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_vllm_sees_a_model_of_text(case, plugin, tmp_path):
    """vLLM refuses images by what the model directory says."""
    from llmc_vllm.model import view

    directory = view(case, read_manifest(case), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlmcForCausalLM"]
    assert not [key for key in config if "vision" in key or "image" in key]
    assert not [*directory.glob("*processor*")]


def test_a_worker_generates_from_text_as_llmc_does(case, plugin, group):
    from llmc_vllm.ranks import load_rank

    manifest = read_manifest(case)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(case) as llm:
        expected, = llm.generate([PROMPT], params)
    rank = load_rank(manifest, case, 0, 0, EngineConfig(2, 64), group)
    rank.allocate(rank.measure())
    tokens, past, admit = PROMPT, 0, {0: SamplingState(Sampler(params, 0, PROMPT, (), (), {}))}
    generated = []
    for _ in range(params.max_tokens):
        step = Step.of([tokens], [past], [[*range(rank.limits.num_blocks)][:4]], [0], admit=admit)
        generated += rank.collect(rank.submit(step)).tokens.tolist()
        past, tokens, admit = past + len(tokens), generated[-1:], {}
    rank.close()
    assert generated == list(expected.token_ids)
