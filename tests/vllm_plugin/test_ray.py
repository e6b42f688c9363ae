"""`vllm serve CASE_DIR` over Ray: ranks and replicas on other hosts.

The hosts are Ray nodes on this one, each in a folder of its own: a path below HERE leads each of
their processes, and vLLM's, to other files.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import vllm.platforms.interface
from ray.cluster_utils import Cluster
from vllm.engine.arg_utils import EngineArgs
from vllm_cases import assert_own, case
from vllm_server import Server

import llmc
from llmc_vllm.model import CASE_DIR, MANIFEST_SHA256, read_copy
from llmc_vllm.worker import visible_gpu

HERE = "/proc/self/cwd"
MAX_TOKENS = 16


@contextmanager
def serving(tmp_path, case_dir, hosts, *options):
    """`vllm serve` in an empty folder's place, beside Ray nodes.

    Args:
        hosts: folder and number of CPUs of each node. vLLM runs beside the first.
    """
    cluster, cwd = Cluster(), os.getcwd()
    try:
        for folder, num_cpus in hosts:
            os.chdir(folder)
            cluster.add_node(num_cpus=num_cpus, include_dashboard=False)
        os.chdir(cwd)
        (tmp_path / "vllm").mkdir(exist_ok=True)
        server = Server(case_dir, tmp_path / "log", "--max-model-len", "512", *options,
                        cwd=tmp_path / "vllm",
                        env=os.environ | {"RAY_ADDRESS": cluster.address,
                                          "VLLM_CACHE_ROOT": f"{HERE}/cache"})
        try:
            yield server
        finally:
            server.kill()
    finally:
        os.chdir(cwd)
        cluster.shutdown()


def copy_case(tp_size, folder, *ranks):
    """A case directory that has the chips of these ranks alone."""
    absent = [f"chip{rank}" for rank in range(tp_size) if rank not in ranks]
    shutil.copytree(case(tp_size), folder / "case", ignore=shutil.ignore_patterns(*absent))
    return folder


def test_each_of_two_hosts_has_its_own_chip_alone(tmp_path, prompts):
    copy_case(2, tmp_path / "vllm")
    hosts = [(copy_case(2, tmp_path / f"host{rank}", rank), 1) for rank in range(2)]
    with serving(tmp_path, f"{HERE}/case", hosts, "--distributed-executor-backend",
                 "ray") as server:
        made = server.client.completions.create(
            model="smollm2", prompt=prompts, max_tokens=MAX_TOKENS, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True})
        tokens = [choice.token_ids for choice in made.choices]
    assert_own(2, prompts, tokens, MAX_TOKENS)


def test_replicas_share_the_work_and_have_the_tokenizer_on_their_host(tmp_path):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
              "required": ["city"], "additionalProperties": False}
    (tmp_path / "host").mkdir()
    with serving(tmp_path, case(1), [(tmp_path / "host", 4)], "--data-parallel-size", "2",
                 "--data-parallel-backend", "ray") as server, ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda _: server.client.chat.completions.create(
            model="smollm2", max_tokens=40, temperature=0,
            messages=[{"role": "user", "content": "Name a city."}], response_format={
                "type": "json_schema", "json_schema": {"name": "city", "schema": schema}}),
            range(4)))
        counts = server.generated_tokens()
    assert all(set(json.loads(own.choices[0].message.content)) == {"city"} for own in answers)
    assert len(counts) == 2 and min(counts) > 0


def test_a_host_with_another_compilation_is_refused(tmp_path):
    shutil.copy(case(1) / "model_info.json", tmp_path)
    with pytest.raises(llmc.LlmcError, match="model_info.json' on host '.*' differs from the one "
                                             "that vLLM was started with; copy the case"):
        read_copy(SimpleNamespace(**{CASE_DIR: str(tmp_path), MANIFEST_SHA256: "0" * 64}))


def test_the_executor_that_runs_vllm_s_own_workers_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(llmc.LlmcError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0, .* unset it"):
        EngineArgs(str(case(2)), distributed_executor_backend="ray").create_engine_config()


@pytest.mark.parametrize(("parallel", "index"), [
    (dict(), 3), (dict(data_parallel_rank_local=None, data_parallel_index=2), 5),
    (dict(use_ray=True, assigned_physical_gpu_ids=[4, 6]), 6),
    (dict(data_parallel_backend="ray", assigned_physical_gpu_ids=[4, 6]), 6),
    (dict(nnodes_within_dp=2), 1), (dict(distributed_executor_backend="external_launcher"), 1)])
def test_a_rank_has_the_gpu_that_vllm_assigns(monkeypatch, parallel, index):
    monkeypatch.setattr(vllm.platforms.interface, "_assigned_physical_gpu_ids", None)
    config = dict(distributed_executor_backend="mp", data_parallel_backend="mp", use_ray=False,
                  nnodes_within_dp=1, data_parallel_rank_local=1, data_parallel_index=1,
                  world_size=2, assigned_physical_gpu_ids=None)
    assert visible_gpu(SimpleNamespace(**config | parallel), 1) == index
