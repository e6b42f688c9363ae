"""/v1/messages, Anthropic's API, through plain HTTP with checked event order."""

import json
import urllib.request

import pytest
from server_process import serving

import llmc

ASK = {"model": "tiny", "max_tokens": 60, "messages": [{"role": "user", "content": "a"}]}
TOOLS = [{"name": "f", "description": "d", "input_schema": {
    "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"], "additionalProperties": False}}]
CALL = '{"name": "f", "parameters": {"x": 3}} Done'


def ask(server, path="/v1/messages", **given):
    status, _, answer = server.post(path, {**ASK, **given})
    return status, answer


def events(server, **given):
    """Return a stream's events: names, and data of the same type."""
    request = urllib.request.Request(
        server.url + "/v1/messages", json.dumps({**ASK, "stream": True, **given}).encode(),
        {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        blocks = response.read().decode().rstrip("\n").split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    told = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [own["type"] for own in told]
    return told


def gathered(told):
    """Return the content of events after checking their order."""
    content, is_open = [], False
    assert told[0]["type"] == "message_start" and told[0]["message"]["content"] == []
    for own in told[1:-2]:
        if own["type"] == "content_block_start":
            assert not is_open and own["index"] == len(content)
            content.append({**own["content_block"], "json": ""})
            is_open = True
        elif own["type"] == "content_block_delta":
            assert is_open and own["index"] == len(content) - 1
            delta = own["delta"]
            if delta["type"] == "text_delta":
                content[-1]["text"] += delta["text"]
            else:
                assert delta["type"] == "input_json_delta"
                content[-1]["json"] += delta["partial_json"]
        else:
            assert own["type"] == "content_block_stop" and is_open
            is_open = False
    assert not is_open and told[-1] == {"type": "message_stop"}
    return content


def test_a_message(tool_case, tool_server):
    with llmc.LLM(tool_case) as llm:
        expected = llm.generate(["Ta"], llmc.SamplingParams(max_tokens=5))[0]
    given = dict(max_tokens=5, temperature=0)
    status, answer = ask(tool_server, **given)
    assert status == 200 and answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    assert answer["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[
        expected.finish_reason]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 2
    assert usage["output_tokens"] == len(expected.token_ids)
    told = events(tool_server, **given)
    block, = gathered(told)
    assert block["text"] == expected.text
    assert told[-2]["delta"]["stop_reason"] == answer["stop_reason"]
    assert told[-2]["usage"]["output_tokens"] == usage["output_tokens"]


def test_tools_are_called_and_their_results_read(tool_case, tool_server):
    given = dict(tools=TOOLS, guided_choice=[CALL])
    _, answer = ask(tool_server, **given)
    call, text = answer["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"x": 3})
    assert text["text"] == "Done" and answer["stop_reason"] == "tool_use"
    told = events(tool_server, **given)
    call, text = gathered(told)
    assert call["input"] == {} and json.loads(call["json"]) == {"x": 3} and text["text"] == "Done"
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    for choice in ({"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "f"}):
        _, answer = ask(tool_server, tools=TOOLS, tool_choice=choice)
        (call,) = answer["content"]
        assert 0 <= call["input"]["x"] <= 9
    _, answer = ask(tool_server, tool_choice={"type": "none"}, **given)
    assert answer["content"] == [{"type": "text", "text": CALL}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": ""},
            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 4}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "9"}]},
            {"type": "text", "text": "c"}]}]
    with llmc.LLM(tool_case) as llm:
        expected = len(llm.tokenize("Tfsarb<tool_call>59cTrue"))
    status, answer = ask(
        tool_server, "/v1/messages/count_tokens", messages=messages, tools=TOOLS,
        system=[{"type": "text", "text": "s"}], thinking={"type": "enabled", "budget_tokens": 9})
    assert (status, answer) == (200, {"input_tokens": expected})


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_is_returned(tool_server, stream):
    given = dict(stop_sequences=["no", "c"], guided_choice=["abcd"])
    if stream:
        told = events(tool_server, **given)
        block, = gathered(told)
        text, end = block["text"], told[-2]["delta"]
    else:
        _, end = ask(tool_server, **given)
        text = end["content"][0]["text"]
    assert (text, end["stop_reason"], end["stop_sequence"]) == ("ab", "stop_sequence", "c")


@pytest.mark.parametrize(("given", "status", "said"), [
    (dict(model="other"), 404, "unknown model 'other'"),
    (dict(max_tokens=None), 400, "max_tokens"),
    (dict(messages=[{"role": "assistant", "content": "a"}]), 400, "end with a user's message"),
    (dict(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]), 400,
     "neither base64 with media_type and data, nor a url"),
    (dict(messages=[{"role": "user", "content": [{"type": "image", "source": {
        "type": "url", "url": "data:"}}]}]), 400, "has an image, and this model takes text only"),
    (dict(tools=[{"type": "bash_2025", "name": "bash"}]), 400, "'bash_2025' are not supported"),
    (dict(tools=TOOLS, tool_choice={"type": "tool", "name": "g"}), 400, "which is not in tools"),
    (dict(n=2), 400, "n 2 is not supported"),
    (dict(mcp_servers=[{}]), 400, "mcp_servers is not supported")])
def test_errors_have_anthropic_s_format(tool_server, given, status, said):
    found, answer = ask(tool_server, **given)
    assert found == status and answer["type"] == "error"
    assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert said in answer["error"]["message"]


def test_x_api_key_is_accepted(case_tp1):
    with serving(case_tp1, "--api_key", "key-1", "--response_store_mb", 0) as own:
        for key, expected in (("key-1", 200), ("key-2", 401), ("", 401)):
            status, _, _ = own.post("/v1/messages/count_tokens", ASK, **{"x-api-key": key})
            assert status == expected
        status, _, answer = own.post("/v1/responses", {
            "input": "a", "previous_response_id": "resp_1"}, authorization="Bearer key-1")
        assert status == 400 and "this server stores no responses" in answer["error"]["message"]


@pytest.mark.parametrize(("path", "instead"), [
    ("/api/chat", "/v1/chat/completions"), ("/api/generate", "/v1/completions"),
    ("/api/tags", "/v1/models"), ("/api/embed", "/v1/embeddings")])
def test_ollama_s_endpoints_are_refused_by_name(server, path, instead):
    status, _, answer = server.post(path, {})
    assert status == 404 and answer["error"]["message"] == \
        f"unknown path {path}; Ollama's API is not supported, use {instead}"


def test_anthropic_s_own_client_is_served(tool_server):
    anthropic = pytest.importorskip("anthropic", reason="needs the extra test-serve")
    client = anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0)
    given = dict(model="tiny", messages=ASK["messages"], tools=TOOLS)
    assert client.messages.count_tokens(**given).input_tokens == 3
    extra = {"guided_choice": [CALL]}
    whole = client.messages.create(max_tokens=60, extra_body=extra, **given)
    with client.messages.stream(max_tokens=60, extra_body=extra, **given) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        call, text = message.content
        assert call.input == {"x": 3} and text.text == "Done"
        assert message.stop_reason == "tool_use"
    with pytest.raises(anthropic.NotFoundError, match="unknown model 'other'"):
        client.messages.create(max_tokens=1, **{**given, "model": "other"})
