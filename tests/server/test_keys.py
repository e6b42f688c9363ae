"""Isolation of clients with separate API keys."""

import gc
import json
import urllib.error
import urllib.request
import weakref

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import serving, until
from starlette.requests import Request

import llmc
from llmc.cli import serve_command
from llmc.server.app import _api_key
from llmc.server.errors import ApiError
from llmc.server.limits import AdmissionGate, ServerLimits, read_api_keys
from llmc.server.protocol import ChatRequest, CompletionRequest

PROMPT = [*range(5, 45)]
MANY = {"prompt": [5, 6], "max_tokens": 60, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def shared(case_tp1, tmp_path_factory):
    """A server with two API keys, one from a file."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# of customers\n\nbeta:  key-b\n")
    with serving(case_tp1, "--max_batch_size", 2, "--max_waiting", 22, "--api_key", "key-a",
                 "--api_key_file", path) as own:
        yield own


def ask(server, key, **body):
    """Return a response's status and JSON."""
    status, _, answer = server.post("/v1/completions", {
        "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **body},
        authorization=f"Bearer {key}")
    return status, answer


def cached(server, key, path="/v1/completions", **body):
    status, _, answer = server.post(path, {"max_tokens": 2, "ignore_eos": True, **body},
                                    authorization=f"Bearer {key}")
    assert status == 200, answer
    usage = answer["usage"]
    return usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"]


def begun(server, key, n):
    """Start a stream of n completions and wait for its first event."""
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(
        {**MANY, "n": n, "temperature": 1.0}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"})
    stream = urllib.request.urlopen(request, timeout=60)
    stream.readline()
    return stream


def value(server, name):
    """Return a gauge of /metrics."""
    return next(own.samples[0].value for own in
                text_string_to_metric_families(server.get("/metrics")) if own.name == name)


def test_keys_share_no_prefix(shared):
    prompt = {"prompt": PROMPT}
    assert cached(shared, "key-a", **prompt) == 0 and cached(shared, "key-a", **prompt) > 0
    assert cached(shared, "key-b", **prompt) == 0 and cached(shared, "key-b", **prompt) > 0
    salted = prompt | {"cache_salt": "s"}
    assert cached(shared, "key-a", **salted) == 0 and cached(shared, "key-a", **salted) > 0
    assert cached(shared, "key-b", **salted) == 0
    # A client cannot reach another's blocks by imitating the server's salts.
    assert cached(shared, "key-b", **prompt | {"cache_salt": json.dumps(["1", "s"])}) == 0


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "the quick brown fox jumps over the lazy dog " * 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "over the dog " * 6}]}),
    ("/v1/responses", {"input": "the brown fox over " * 6, "max_output_tokens": 2})])
def test_only_the_same_cache_salt_shares_a_prefix(server, path, body):
    for salt in ("s", "t"):
        own = {"cache_salt": salt, **body}
        assert cached(server, "", path, **own) == 0 and cached(server, "", path, **own) > 0
    status, _, answer = server.post(path, {**body, "cache_salt": ""})
    assert status == 400 and answer["error"]["param"] == "cache_salt"


def test_a_large_request_does_not_delay_another_client(shared):
    """The larger one has all slots, and more completions than the server can hold."""
    with begun(shared, "key-a", 100) as stream:
        assert value(shared, "llmc:requests_inside") == 1
        assert value(shared, "llmc:sequences_inside") == 100
        assert ask(shared, "key-b")[0] == 200
        assert value(shared, "llmc:sequences_inside") == 100  # the larger one continues
        status, answer = ask(shared, "key-a")
        assert status == 429 and "have 100 of at most" in answer["error"]["message"]
        stream.close()
    until(lambda: value(shared, "llmc:sequences_inside") == 0)


def test_stored_responses_belong_to_their_key(shared):
    def respond(key, **body):
        return shared.post("/v1/responses", {"input": "a", "max_output_tokens": 2, **body},
                           authorization=f"Bearer {key}")

    def status(key, method, path):
        request = urllib.request.Request(f"{shared.url}{path}", method=method,
                                         headers={"authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    _, _, made = respond("key-a")
    path, reference = f"/v1/responses/{made['id']}", made["output"][0]["id"]
    for key, expected in (("key-b", 404), ("key-a", 200)):
        assert status(key, "GET", path) == status(key, "GET", f"{path}/input_items") == expected
        assert respond(key, previous_response_id=made["id"])[0] == expected
        assert respond(key, input=[{"type": "item_reference", "id": reference}])[0] == expected
        assert status(key, "DELETE", path) == expected


def test_a_key_is_limited_to_its_share_of_sequences(shared):
    with begun(shared, "key-b", 12) as stream:
        status, answer = ask(shared, "key-b")
        assert (status, answer["error"]["message"]) == (
            429, "the request has 1 sequences, those of this API key have 12 of at most 12; "
                 "retry after Retry-After")
        assert ask(shared, "key-a", n=2, temperature=1.0)[0] == 200
        stream.close()
    until(lambda: value(shared, "llmc:sequences_inside") == 0)


def test_the_log_names_the_key_and_never_shows_it(case_tp1, tmp_path):
    path = tmp_path / "keys"
    path.write_text("beta: key-b\n")
    with serving(case_tp1, "--api_key", "key-a", "--api_key_file", path) as own:
        for key in ("key-a", "key-b", "key-c"):
            ask(own, key)
        lines = [json.loads(line) for line in own.end()[1].splitlines()]
        assert [line.get("api_key") for line in lines[:3]] == ["1", "beta", None]
        assert not any("key-" in json.dumps(line) for line in lines)


def test_a_priority_is_refused_unless_it_is_allowed(shared):
    assert ask(shared, "key-a", priority=0)[0] == 200
    status, answer = ask(shared, "key-a", priority=-100)
    assert status == 400 and answer["error"]["param"] == "priority"
    assert "--allow_priority" in answer["error"]["message"]


def test_keys_are_read_with_their_names(tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n# of customers\n  first:\tsk-1  \nsk:2\n")
    assert read_api_keys(["a", "b"], path) == {"1": "a", "2": "b", "first": "sk-1", "4": "sk:2"}
    for text, said in (("a b c", "line 1 of .* is not an API key; write 'name: key' or 'key'"),
                       ("x: 1\nx: 2", "two API keys have the name 'x'"), ("#", "has no API key")):
        path.write_text(text)
        with pytest.raises(llmc.LlmcError, match=said):
            read_api_keys((), path)
    with pytest.raises(llmc.LlmcError, match="cannot be read .*; give a file"):
        read_api_keys((), tmp_path)
    for keys, said in (({"x": " "}, "API key 'x' is empty"),
                       ({"x": "1", "y": "1"}, "are the same")):
        with pytest.raises(llmc.LlmcError, match=said):
            ServerLimits(api_keys=keys)
    with pytest.raises(llmc.LlmcError, match="max_seqs_per_key is 0, expected at least 1"):
        ServerLimits(max_seqs_per_key=0)


def test_an_environment_variable_has_one_key_per_line():
    option = next(own for own in serve_command.params if own.name == "api_keys")
    with click.Context(serve_command) as context:
        for text, keys in (("my key", ("my key",)), ("a\nb", ("a", "b"))):
            assert option.type_cast_value(context, option.type.split_envvar_value(text)) == keys


def test_all_sequences_of_a_request_count():
    assert CompletionRequest(prompt=["a", "b"], n=3).num_sequences == 6
    assert CompletionRequest(prompt=[5, 6]).num_sequences == 1
    assert ChatRequest(messages=[{"role": "user"}], n=4, use_beam_search=True).num_sequences == 4


def test_every_key_gets_one_request_before_sequences_count():
    gate = AdmissionGate.of(ServerLimits(api_keys={"a": "1", "b": "2"}, max_waiting=16,
                                         max_seqs_per_key=14), 4)
    with gate.entered(12, "a"), gate.entered(2, "a"):
        with pytest.raises(ApiError, match="those of this API key have 14 of at most 14"), \
                gate.entered(1, "a"):
            pass
        with gate.entered(100, "b"):
            with pytest.raises(ApiError, match="those of all clients have 114 of at most 20"), \
                    gate.entered(1, "b"):
                pass
            assert (gate.inside, gate.sequences, gate.refused) == (3, 114, 2)
    assert (gate.inside, gate.sequences) == (0, 0)


def test_a_finished_request_is_not_kept():
    request = Request({"type": "http", "llmc.api_key": "beta"})
    kept = weakref.ref(request)
    assert _api_key(request) == "beta"
    del request
    gc.collect()
    assert kept() is None
