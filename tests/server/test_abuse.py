"""Bodies of every kind, and clients that come and go: no answer is a server's error, and nothing
remains.
"""

import asyncio

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
    """A path, and a sound body of which some fields are something else."""
    path = draw(st.sampled_from([*KINDS]))
    kind, sound = KINDS[path]
    names = st.sampled_from([*kind.model_fields, *kind.REFUSED])
    wrong = draw(st.dictionaries(names, JSON, max_size=3))
    return path, {**sound, "max_tokens": 2, "max_output_tokens": 2, **wrong}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_no_body_is_the_server_s_fault(server, request_):
    path, body = request_
    if body.get("stream"):
        body["stream"] = "no, thanks"  # what streams is looked at elsewhere
    status, _, answer = server.post(path, body)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert {*answer["error"]} == {"message", "type", "param", "code"}
        assert "Traceback" not in answer["error"]["message"]


def test_clients_that_come_and_go_leave_nothing(server):
    became = asyncio.run(come_and_go(server, 2, 1))
    assert {number for number, kind in became if kind == "answered"} == {*range(16)}
    until(lambda: is_empty(server))


@pytest.mark.thorough
def test_memory_stays_as_it_is_while_clients_come_and_go(case_tp1):
    with serving(case_tp1) as server:
        sizes = []
        for turn in range(8):
            assert asyncio.run(come_and_go(server, 10, turn))
            until(lambda: is_empty(server))
            sizes.append(resident(server.process))
        assert sizes[-1] < 1.05 * sizes[3], sizes
        code, log = server.end()
        assert code == 0 and '"status": 5' not in log and "exception" not in log
