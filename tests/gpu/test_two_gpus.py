"""Two ranks on two GPUs give the tokens of one; a dead rank causes no hang."""

import os
import signal
import threading
import time

import families
import numpy as np
import pytest
import torch
from draft_models import assert_drafts_of_prompts
from on_device import TOLERANCE
from stepping import Stepper, load

import llmc
from llmc import SamplingParams
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.core.step import Step
from llmc.runtime.devices import place
from llmc.runtime.gpus import GpuReplica
from llmc.runtime.replica import EngineConfig

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
ROOM = EngineConfig(max_batch_size=4, max_num_batched_tokens=128, gpu_memory_utilization=0.5)
PROMPTS = [[5, 6, 7], [8] * 40, [9, 10], list(range(3, 60)), [11]]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "qwen3_moe by experts"])
def cases(request, extension, tmp_path_factory):
    family, _, by_experts = request.param.partition(" ")
    directory = tmp_path_factory.mktemp("ranks")
    hf = families.save(families.tiny_model(family, max_position_embeddings=128), directory / "hf")
    for size in (1, 2):
        llmc.compile(hf, directory / f"tp{size}", target="cuda", tp_size=size, max_seq_len=128,
                     expert_parallel=bool(by_experts) and size > 1)
    return directory


@pytest.fixture(params=["nccl", "peer", "auto"])
def collectives(request, monkeypatch):
    monkeypatch.setenv("LLMC_COLLECTIVES", request.param)
    return request.param


@pytest.fixture
def replica(cases, collectives):
    manifest = read_manifest(cases / "tp2")
    made = GpuReplica(manifest, cases / "tp2", place(manifest, None, 2)[0], ROOM)
    yield made
    made.close()
    assert all(rank._process.poll() is not None for rank in made._others)


@pytest.mark.parametrize("ahead", [0, 2])
def test_two_ranks_sample_the_tokens_of_one(cases, replica, ahead):
    params = [SamplingParams(max_tokens=20, seed=i, temperature=0.8 * (i % 2),
                             repetition_penalty=1.0 + 0.2 * (i == 3), logprobs=2 * (i == 0))
              for i in range(len(PROMPTS))]
    wanted = Stepper(load(cases / "tp1")).generate(PROMPTS, params, ahead=ahead, chunk=16)
    found = Stepper(replica).generate(PROMPTS, params, ahead=ahead, chunk=16)
    assert [own.tokens for own in found] == [own.tokens for own in wanted]


def test_two_ranks_draft_together(extension, draft_base, eagle3_head, tmp_path, proposed,
                                  collectives):
    eagle3_head.save(tmp_path / "head")
    llmc.compile(draft_base[0], tmp_path / "case", draft=f"eagle3:{tmp_path / 'head'}",
                 target="cuda", dtype="float32", tp_size=2)
    with llmc.LLM(tmp_path / "case", speculate="draft", num_speculative_tokens=4, block_size=4,
                  max_batch_size=4, max_num_batched_tokens=32) as llm:
        assert_drafts_of_prompts(llm, draft_base[1], eagle3_head.drafts, proposed)


def test_every_rank_traces_its_values(replica):
    step = Step.of([[5, 6, 7]], [0], [[3]], [0], logits="all")
    first, second = replica.trace(step)
    assert first["logits"].shape[0] == 3 and len(second) > 10
    assert np.array_equal(first["hidden_states.0"], second["hidden_states.0"])


def test_a_dead_rank_ends_the_replica(replica):
    step = Step.of([[5, 6, 7]], [0], [[3]], [0])
    replica.collect(replica.submit(step))
    os.kill(replica._others[0]._process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(llmc.LlmcError, match="the process of rank 1 has ended"):
        for _ in range(3):
            replica.collect(replica.submit(step))
    assert time.monotonic() - start < 5


def test_ranks_over_peer_memory_compute_what_they_do_over_nccl(cases, monkeypatch):
    manifest, step = read_manifest(cases / "tp2"), Step.of([[5, 6, 7]], [0], [[3]], [0],
                                                           logits="all")
    traces = []
    for kind in ("nccl", "peer"):
        monkeypatch.setenv("LLMC_COLLECTIVES", kind)
        replica = GpuReplica(manifest, cases / "tp2", place(manifest, None, 2)[0], ROOM)
        traces.append(replica.trace(step))
        replica.close()
    for by_nccl, by_peers in zip(*traces, strict=True):
        assert by_nccl.keys() == by_peers.keys()
        for name, wanted in by_nccl.items():
            np.testing.assert_allclose(
                by_peers[name], wanted, err_msg=name, rtol=0,
                atol=TOLERANCE[manifest.dtype] * 3 * np.abs(wanted).max())


def test_a_dead_rank_ends_all_requests(cases, collectives):
    """Running requests, waiting requests, and one without a reader."""
    llm = llmc.LLM(cases / "tp2", max_batch_size=4, gpu_memory_utilization=0.5)
    process = llm._loops[0]._engine._others[0]._process
    wish, ended, running = SamplingParams(max_tokens=120, ignore_eos=True), [], threading.Barrier(6)

    def generate(index):
        stream = llm.stream([PROMPTS[index % len(PROMPTS)]] * 3, wish)
        next(stream)
        running.wait(60)
        with pytest.raises(llmc.LlmcError, match="the process of rank 1 has ended"):
            while True:
                list(stream)
                stream = llm.stream([PROMPTS[index % len(PROMPTS)]], wish)
        ended.append(time.monotonic())

    idle = llm.stream([PROMPTS[0]], wish)
    next(idle)
    threads = [threading.Thread(target=generate, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    running.wait(60)
    start = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert len(ended) == len(threads) and max(ended) - start < 5
    with pytest.raises(llmc.LlmcError, match="has to be loaded again, as a step failed"):
        llm.generate([PROMPTS[0]], wish)
    idle.close()
    llm.close()
    assert process.poll() is not None


def test_errors_of_a_step_are_reported(replica):
    with pytest.raises(llmc.LlmcError, match="expected 0 to"):
        replica.collect(replica.submit(Step.of([[5]], [0], [[10**6]], [0])))
