"""Arbitrary request bodies and disconnecting clients cause no server errors and no leaks.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_load import come_and_go, is_empty, resident
from server_process import serving, until

from llmc.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "required", "user", "json_schema", "function", "a", 0, 1, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "name", "function", "json_schema", "schema",
                         "text", "5", "parameters", "arguments"]) | st.text(max_size=4),
        inner, max_size=3), max_leaves=6)
KINDS = {"/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
         "/v1/completions": (CompletionRequest, {"prompt": [5, 6]}),
         "/v1/responses": (ResponsesRequest, {"input": "a"})}


@st.composite
def requests(draw):
    """Draw a path and a valid body with some fields replaced."""
    path = draw(st.sampled_from([*KINDS]))
    kind, sound = KINDS[path]
    names = st.sampled_from([*kind.model_fields, *kind.REFUSED])
    wrong = draw(st.dictionaries(names, JSON, max_size=3))
    return path, {**sound, "max_tokens": 2, "max_output_tokens": 2, **wrong}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_no_request_body_causes_a_500(server, request_):
    path, body = request_
    if body.get("stream"):
        body["stream"] = "no, thanks"  # streams are tested elsewhere
    status, _, answer = server.post(path, body)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert {*answer["error"]} == {"message", "type", "param", "code"}
        assert "Traceback" not in answer["error"]["message"]


def test_disconnecting_clients_leak_nothing(server):
    became = asyncio.run(come_and_go(server, 2, 1))
    assert {number for number, kind in became if kind == "answered"} == {*range(16)}
    until(lambda: is_empty(server))


def definitions(count):
    """Return a schema of `count` definitions, each a property of the previous one."""
    links = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
             for i in range(count)}
    return {"$defs": {**links, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def properties(count, name):
    return {"type": "object", "properties": {f"{name}{i}": {"maxLength": i % 30 + 1}
                                             for i in range(count)}}


def completion(**fields):
    return "/v1/completions", {"prompt": [5, 6], "max_tokens": 2, **fields}


def chat(**fields):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}],
                                    "max_tokens": 2, **fields}


def body(text):
    return "/v1/completions", text.encode()


WORDS = "the quick brown fox " * 150_000  # 3 MB
# A kind, its concurrent requests, and the response to the first.
ABUSE = {
    "definitions by guided_json": ([completion(guided_json=definitions(3000))] * 2, "too deeply"),
    "definitions by response_format": ([chat(response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": definitions(3000)}})],
        "too deeply"),
    "rules": ([completion(guided_grammar="start: a0\n" + "".join(
        f"a{i}: a{i + 1}\n" for i in range(9000)) + 'a9000: "x"\n')], "too deeply"),
    "properties": ([completion(guided_json=properties(600, name)) for name in "abcd"], ""),
    "a stop string": ([completion(stop=["z" * 1_000_000], max_tokens=50)], "at most 4096"),
    "a long prompt": ([completion(prompt=WORDS)] * 2, "at least"),
    "a long message": ([chat(messages=[{"role": "user", "content": WORDS}])], "at least"),
    "a long text to tokenize": ([("/tokenize", {"prompt": WORDS})] * 2, "at most 262144"),
    "many token ids": ([body('{"prompt": [' + "1," * 600_000 + "1]}")], "JSON values"),
    "many prompts": ([body('{"prompt": [' + '"a",' * 600_000 + '"a"]}')], "JSON values"),
    "many messages": ([body('{"messages": [' + '{"role": "u"},' * 150_000 + "{}]}")],
                      "JSON values"),
    "many unknown values": ([body('{"prompt": "a", "x": [' + "{}," * 500_000 + "1]}")],
                            "JSON values"),
    "values of a wrong type": ([completion(bad_words=[["a"]] * 15_000)], "bad_words"),
    "many long words": ([completion(bad_words=["a b" * 500] * 5000)], ""),
}


@pytest.mark.parametrize("kind", ABUSE)
def test_an_abusive_request_does_not_affect_others(server, kind):
    requests, said = ABUSE[kind]
    before = resident(server.process)
    with ThreadPoolExecutor(len(requests)) as threads:
        asked = [threads.submit(server.post, *own) for own in requests]
        answered = 0
        while answered < 3 or not all(own.done() for own in asked):
            server.get("/health")
            status, _, answer = server.post(*completion(ignore_eos=True))
            assert status == 200 and answer["usage"]["completion_tokens"] == 2
            answered += 1
        status, _, answer = asked[0].result()
        assert status in (400, 413) if said else status in (200, 400), answer
        assert said in answer.get("error", {}).get("message", ""), answer
    assert server.process.poll() is None
    until(lambda: is_empty(server))
    assert resident(server.process) < before + 100e6


@pytest.mark.thorough
def test_memory_is_stable_while_clients_connect_and_disconnect(case_tp1):
    with serving(case_tp1) as server:
        sizes = []
        for turn in range(8):
            assert asyncio.run(come_and_go(server, 10, turn))
            until(lambda: is_empty(server))
            sizes.append(resident(server.process))
        assert sizes[-1] < 1.05 * sizes[3], sizes
        code, log = server.end()
        assert code == 0 and '"status": 5' not in log and "exception" not in log
