"""`vllm serve CASE_DIR` on several hosts: ranks and replicas, over Ray and without.

The hosts are folders: a path below HERE gives the processes of each host separate files.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.platforms.interface
from ray.cluster_utils import Cluster
from vllm.engine.arg_utils import EngineArgs
from vllm_cases import assert_own, case
from vllm_server import Server, free_port

import llmc
from llmc_vllm import worker
from llmc_vllm.model import CASE_DIR, MANIFEST_SHA256, read_copy

HERE = "/proc/self/cwd"
ENVIRONMENT = os.environ | {"VLLM_CACHE_ROOT": f"{HERE}/cache"}
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Three hosts of a case directory of tp_size 2: with chip 0, with chip 1, with neither."""
    root = tmp_path_factory.mktemp("hosts")
    for name, absent in (("0", ["chip1"]), ("1", ["chip0"]), ("none", ["chip0", "chip1"])):
        shutil.copytree(case(2), root / name / "case", ignore=shutil.ignore_patterns(*absent))
    return root


@contextmanager
def ray_nodes(*nodes):
    """Start a Ray cluster of these nodes, each a host and its number of CPUs; yield its address."""
    cluster, cwd = Cluster(), os.getcwd()
    try:
        for host, num_cpus in nodes:
            os.chdir(host)
            cluster.add_node(num_cpus=num_cpus, include_dashboard=False)
        os.chdir(cwd)
        yield cluster.address
    finally:
        os.chdir(cwd)
        cluster.shutdown()


@contextmanager
def serving(host, case_dir, log, *options, **variables):
    server = Server(case_dir, log, "--max-model-len", "512", *options, cwd=host,
                    env=ENVIRONMENT | variables)
    try:
        yield server
    finally:
        server.kill()


def assert_greedy_tokens_are_llmc_s_own(server, prompts):
    made = server.client.completions.create(
        model="smollm2", prompt=prompts, max_tokens=MAX_TOKENS, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True})
    assert_own(2, prompts, [choice.token_ids for choice in made.choices], MAX_TOKENS)


def test_over_ray_each_of_two_hosts_needs_its_own_chip_alone(hosts, prompts, tmp_path):
    with ray_nodes((hosts / "0", 1), (hosts / "1", 1)) as address, \
            serving(hosts / "none", f"{HERE}/case", tmp_path / "log",
                    "--distributed-executor-backend", "ray", RAY_ADDRESS=address) as server:
        assert_greedy_tokens_are_llmc_s_own(server, prompts)


def test_without_ray_each_of_two_hosts_needs_its_own_chip_alone(hosts, prompts, tmp_path):
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with (tmp_path / "log1").open("w") as log:
        second = subprocess.Popen(
            [Path(sys.executable).with_name("vllm"), "serve", f"{HERE}/case", "--headless",
             "--max-model-len", "512", "--node-rank", "1", *nodes], cwd=hosts / "1",
            env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        with serving(hosts / "0", f"{HERE}/case", tmp_path / "log0", *nodes) as server:
            assert_greedy_tokens_are_llmc_s_own(server, prompts)
    finally:
        os.killpg(second.pid, signal.SIGKILL)
        second.wait()


def test_replicas_over_ray_share_the_work_and_have_the_tokenizer_on_their_host(tmp_path):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
              "required": ["city"], "additionalProperties": False}
    host, engine_host = tmp_path / "host", tmp_path / "engine_host"
    host.mkdir()
    engine_host.mkdir()
    with ray_nodes((engine_host, 4)) as address, \
            serving(host, case(1), tmp_path / "log", "--data-parallel-size", "2",
                    "--data-parallel-backend", "ray", RAY_ADDRESS=address) as server, \
            ThreadPoolExecutor(4) as callers:
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
    with pytest.raises(llmc.LlmcError, match="model_info.json' on host '.*' differs from that "
                                             "of the host where vLLM was started; copy the case"):
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
def test_a_rank_and_its_process_groups_have_the_gpu_that_vllm_assigns(monkeypatch, parallel,
                                                                      index):
    config = dict(distributed_executor_backend="mp", data_parallel_backend="mp", use_ray=False,
                  nnodes_within_dp=1, data_parallel_rank_local=1, data_parallel_index=1,
                  world_size=2, assigned_physical_gpu_ids=None, tensor_parallel_size=2,
                  pipeline_parallel_size=1)
    rank = SimpleNamespace(parallel_config=SimpleNamespace(**config | parallel), rank=1,
                           local_rank=1, distributed_init_method="",
                           model_config=SimpleNamespace(seed=0))

    def visible_gpu(local_rank):
        return worker.current_platform.logical_device_id_to_visible_device_id(local_rank)

    at_init = []
    monkeypatch.setattr(vllm.platforms.interface, "_assigned_physical_gpu_ids", None)
    monkeypatch.setattr(worker, "init_distributed_environment",
                        lambda *given: at_init.append(visible_gpu(given[3])))
    monkeypatch.setattr(worker, "ensure_model_parallel_initialized", lambda *_: None)
    worker.LlmcWorker.init_device(rank)
    assert [*at_init, visible_gpu(rank.local_rank)] == [index, index]
