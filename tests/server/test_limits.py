"""Limits of the server, and its behavior at them."""

import asyncio
import json
import re
import resource
import shutil
import signal
import socket
import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import serving, until

LONG = dict(model="tiny", prompt=[5, 6], max_tokens=60, temperature=1.0, n=128,
            extra_body={"ignore_eos": True})  # some seconds


@pytest.fixture(scope="module")
def strict(case_tp1):
    with serving(case_tp1, "--max_batch_size", 1, "--max_waiting", 0, "--api_key", "key-1",
                 "--max_request_bytes", 20_000, "--request_timeout", 1.5) as own:
        own.client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="key-1", max_retries=0)
        yield own


KEY = {"authorization": "Bearer key-1"}


def value(server, name):
    """Return a value of /metrics, summed over its labels."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", server.get("/metrics"), re.M)
    return sum(map(float, found))


def is_idle(server):
    return value(server, "llmc:requests_inside") == 0 and \
        value(server, "vllm:num_requests_running") == 0 and \
        value(server, "vllm:kv_cache_usage_perc") == 0


def test_only_health_is_served_without_the_key(strict):
    for given in (None, "Bearer key-2", "Bearer kéy", "key-1", "Basic key-1", "Bearer key-1 key-1"):
        headers = {"authorization": given} if given else {}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/nowhere"):
            status, told, body = strict.post(path, {"prompt": "the"}, **headers)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
            assert told["www-authenticate"] == "Bearer"
    for path in ("/health", "/version", "/metrics"):
        strict.get(path)
    assert strict.post("/tokenize", {"prompt": "the"}, **KEY)[0] == 200


def test_requests_beyond_the_queue_get_429_with_retry_after(strict):
    with strict.client.completions.create(stream=True, **LONG) as stream:
        next(iter(stream))
        status, headers, body = strict.post("/v1/completions", {"prompt": [5]}, **KEY)
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert body["error"]["type"] == "rate_limit_error"
    until(lambda: is_idle(strict))
    assert strict.post("/v1/completions", {"prompt": [5]}, **KEY)[0] == 200
    assert value(strict, "llmc:requests_refused_total") >= 1


def test_a_client_that_leaves_frees_its_blocks_at_once(strict):
    done = value(strict, "vllm:generation_tokens_total")
    stream = strict.client.completions.create(stream=True, **LONG)
    next(iter(stream))
    assert not is_idle(strict)
    stream.close()
    until(lambda: is_idle(strict), 1)
    with pytest.raises(openai.APITimeoutError):
        strict.client.completions.create(timeout=0.3, **LONG)
    until(lambda: is_idle(strict), 1)
    assert value(strict, "vllm:generation_tokens_total") - done < 128 * 60


def test_a_request_that_takes_too_long_ends(strict):
    with pytest.raises(openai.APIStatusError, match="took longer than 1.5 s") as caught:
        strict.client.completions.create(**LONG)
    assert caught.value.status_code == 408
    with pytest.raises(openai.APIError, match="took longer than 1.5 s"):
        list(strict.client.completions.create(stream=True, **LONG))
    until(lambda: is_idle(strict), 1)


@pytest.mark.parametrize(("body", "status", "said"), [
    (b"", 400, "Invalid JSON"), (b"{", 400, "Invalid JSON"), (b"[]", 400, "should be an object"),
    (b'{"prompt": "\xff"}', 400, "Invalid JSON"), (b'{"prompt": "\\ud800"}', 400, "Invalid JSON"),
    (b'{"prompt": ' + b"[" * 10_000, 400, "recursion limit"),
    (b'{"prompt": "a", "x": ' + b'{"x":' * 3000 + b"1" + b"}" * 3000 + b"}", 400,
     "recursion limit"),
    (b'{"prompt": "' + b"a" * 30_000 + b'"}', 413, "more than 20000 bytes"),
    (b'{"prompt": {"a": 1}}', 400, "prompt"), (b'{"prompt": null}', 400, "prompt"),
    (b'{"prompt": [5], "max_tokens": 1e400}', 400, "max_tokens"),
    (b'{"prompt": [5], "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": [-5]}', 400, "not in the vocabulary"),
    (b'{"prompt": [' + b"9" * 500 + b"]}", 400, "not in the vocabulary"),
    (b'{"prompt": [5], "max_tokens": "many"}', 400, "max_tokens")])
def test_a_malformed_body_is_refused(strict, body, status, said):
    got, _, answer = strict.post("/v1/completions", body, **KEY)
    assert (got, said in answer["error"]["message"]) == (status, True), answer
    assert "Traceback" not in json.dumps(answer) and ".py" not in json.dumps(answer)


def test_a_wrong_content_type_is_refused(strict):
    assert strict.post("/tokenize", {"prompt": "a"}, **KEY, **{"content-type": "text/plain"})[0] \
        == 415


def test_no_answer_names_a_path_of_this_machine(case_tp1, tmp_path):
    case = tmp_path / "secret" / "case"
    shutil.copytree(case_tp1, case)
    with serving(".", cwd=case) as server:
        (case / "tokenizer" / "chat_template.jinja").unlink()  # named in an error
        for path, body in (("/v1/chat/completions", {"messages": [{"role": "a", "content": ""}]}),
                           ("/v1/completions", {"prompt": [9999]})):
            status, _, answer = server.post(path, body)
            assert status == 400 and "secret" not in json.dumps(answer)
        assert answer["error"]["message"] == "token id 9999 is not in the vocabulary of 300"


def test_the_log_is_json_with_a_request_s_id(case_tp1):
    with serving(case_tp1) as server:
        status, headers, _ = server.post("/v1/completions", {"prompt": [5], "max_tokens": 3,
                                                             "unheard": 1, "ignore_eos": True},
                                         **{"x-request-id": "mine-1"})
        assert status == 200 and headers["x-request-id"] == "mine-1"
        _, headers, _ = server.post("/nowhere", {}, **{"x-request-id": "a b"})
        other = headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", other)
        server.get("/health")  # more than the limit
        code, rest = server.end()
        one, two, last = map(json.loads, rest.splitlines())
        assert code == 0 and last["message"] == "the server has stopped"
        assert (one["request_id"], one["status"], one["path"]) == ("mine-1", 200, "/v1/completions")
        assert (one["prompt_tokens"], one["completion_tokens"]) == (1, 3)
        assert one["ignored"] == ["unheard"] and one["seconds"] > 0
        assert (two["request_id"], two["status"]) == (other, 404)


def test_sigterm_drains_requests(case_tp1):
    with serving(case_tp1, "--max_batch_size", 2) as server:
        stream = iter(server.client.completions.create(stream=True, **LONG | {"n": 20}))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons.count("length") == 20
        assert server.process.wait(10) == 0


def test_requests_that_exceed_the_drain_time_are_ended(case_tp1):
    with serving(case_tp1, "--max_batch_size", 1, "--drain_timeout", 1) as server:
        stream = iter(server.client.completions.create(stream=True, **LONG))
        next(stream)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0 and time.monotonic() - started < 5


def test_1000_idle_connections_do_not_stop_others(server):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    idle = []
    try:
        for _ in range(1000):
            idle.append(socket.create_connection(("127.0.0.1", server.port), 5))
        idle[0].sendall(b"POST /v1/comp")  # without details

        async def main():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
                return await asyncio.gather(*(client.completions.create(
                    model="tiny", prompt=[5, index], max_tokens=5) for index in range(8)))

        started = time.monotonic()
        assert len(asyncio.run(main())) == 8 and time.monotonic() - started < 5
    finally:
        for own in idle:
            own.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_address_in_use_is_a_user_error(server, case_tp1):
    with pytest.raises(AssertionError, match="cannot be used") as caught, \
            serving(case_tp1, "--port", server.port):
        pass
    assert "Traceback" not in str(caught.value)


# As in loggers.py of vLLM 0.32.
VLLM = {"gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                  "cache_config_info"],
        "counter": ["prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
                    "prompt_tokens", "generation_tokens", "request_success",
                    "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
                    "spec_decode_num_accepted_tokens",
                    "spec_decode_num_accepted_tokens_per_pos"],
        "histogram": ["time_to_first_token_seconds", "inter_token_latency_seconds",
                      "e2e_request_latency_seconds", "request_prompt_tokens",
                      "request_generation_tokens"]}


def test_metrics_have_vllm_s_names_types_and_labels(server):
    before = value(server, "vllm:generation_tokens_total")
    server.client.completions.create(model="tiny", prompt=[[5, 6, 7], [8, 9]], max_tokens=4,
                                     extra_body={"ignore_eos": True})
    assert value(server, "vllm:generation_tokens_total") - before == 8
    told = {own.name: own for own in text_string_to_metric_families(server.get("/metrics"))}
    assert {name: own.type for name, own in told.items() if name.startswith("vllm:")
            and not name.endswith("_created")} == \
        {f"vllm:{name}": kind for kind, names in VLLM.items() for name in names}
    for name, own in told.items():  # including prometheus_client's _created series
        ended = {"finished_reason"} if name.startswith("vllm:request_success") else \
            {"position"} if name.endswith("_per_pos") else set()
        for sample in own.samples:
            if name != "vllm:cache_config_info":
                assert {*sample.labels} - {"le"} == {"model_name", "engine"} | ended, sample
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:prefix_cache_queries_total",
                 "vllm:inter_token_latency_seconds_count", "vllm:e2e_request_latency_seconds_count",
                 "vllm:request_success_total", "vllm:prompt_tokens_total"):
        assert value(server, name) > 0, name
    info, = told["vllm:cache_config_info"].samples
    assert info.value == 1 and {**info.labels, "num_gpu_blocks": ""} == {
        "model_name": "tiny", "engine": "0", "block_size": "16", "cache_dtype": "auto",
        "num_gpu_blocks": ""}
    assert int(info.labels["num_gpu_blocks"]) > 0


def test_another_case_directory_takes_over_without_losing_a_request(case_tp1, case_tp2, tmp_path):
    case = tmp_path / "case"
    shutil.copytree(case_tp1, case)
    with serving(case, "--watch", "--max_batch_size", 1) as server:
        client = server.client
        stream = iter(client.completions.create(stream=True, **LONG | {"n": 30}))
        next(stream)
        shutil.copytree(case_tp2, tmp_path / "next")
        case.rename(tmp_path / "before")
        (tmp_path / "next").rename(case)
        while not any("serving the new case directory" in line for line in server.log):
            assert client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices
        assert [chunk.choices[0].finish_reason for chunk in stream].count("length") == 30
        assert client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices
        (case / "model_info.json").write_text("{")  # not a case directory: the served one is kept
        until(lambda: any("cannot be loaded" in line for line in server.log))
        assert client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices
        assert server.end()[0] == 0
