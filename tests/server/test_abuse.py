"""Bodies of every kind, and clients that come and go: no answer is a server's error, and nothing
remains.
"""

import asyncio
import random
import re
import time

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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


def resident(process):
    """Bytes of memory that it holds."""
    with open(f"/proc/{process.pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) * 1024


async def come_and_go(server, seconds, seed):
    """16 clients, some of which leave in the middle, and some of which ask for nonsense."""
    end = time.monotonic() + seconds
    answered = []

    async def client(number):
        luck = random.Random(seed * 100 + number)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0,
                                      timeout=30) as own:
            while time.monotonic() < end:
                kind = luck.random()
                given = dict(model="tiny", prompt=[luck.randrange(3, 250) for _ in range(9)],
                             max_tokens=luck.randrange(1, 50), n=luck.choice([1, 1, 3]))
                try:
                    if kind < 0.3:
                        await asyncio.wait_for(own.completions.create(**given),
                                               luck.choice([0.01, 0.05]))
                    elif kind < 0.7:
                        stream = await own.completions.create(stream=True, **given)
                        leaves = luck.randrange(60)
                        async for _ in stream:
                            leaves -= 1
                            if not leaves:
                                await stream.close()
                                break
                    elif kind < 0.8:
                        await own.completions.create(**given | {"prompt": [9999]})
                    else:
                        await own.completions.create(
                            **given, extra_body={"guided_regex": "[a-z]{1,9}"})
                    answered.append(number)
                except (TimeoutError, openai.BadRequestError):
                    pass

    await asyncio.gather(*map(client, range(16)))
    return answered


def is_empty(server):
    found = dict(re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", server.get("/metrics"), re.M))
    return all(float(found[name]) == 0 for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "llmc:requests_inside"))


def test_clients_that_come_and_go_leave_nothing(server):
    answered = asyncio.run(come_and_go(server, 2, 1))
    assert {*answered} == {*range(16)}
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
