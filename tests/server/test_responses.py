"""/v1/responses through the `openai` client."""

import json

import openai
import pytest

import llmc
from llmc.server.errors import ApiError
from llmc.server.protocol import ResponsesRequest
from llmc.server.response_store import ResponseStore

pytestmark = pytest.mark.usefixtures("decisive")
INPUT = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def expected(case_tp1):
    with llmc.LLM(case_tp1) as llm:
        prompt = llm.chat_prompt([{"role": "system", "content": "be brief"}, *INPUT])
        return llm.generate([prompt], llmc.SamplingParams(max_tokens=12))[0]


@pytest.mark.parametrize("given", ["the fox", INPUT, [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the fox"}]}]])
def test_a_response(client, expected, given):
    answer = client.responses.create(model="tiny", input=given, instructions="be brief",
                                     temperature=0, max_output_tokens=12)
    assert answer.output_text == expected.text
    assert answer.status == {"stop": "completed", "length": "incomplete"}[expected.finish_reason]
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)
    assert answer.usage.output_tokens == len(expected.token_ids)


def test_a_response_s_events(client, expected):
    events = list(client.responses.create(
        model="tiny", input="the fox", instructions="be brief", temperature=0, stream=True,
        max_output_tokens=12))
    kinds = [own.type.removeprefix("response.") for own in events]
    middle = kinds.count("output_text.delta")
    assert kinds == ["created", "in_progress", "output_item.added", "content_part.added",
                     *["output_text.delta"] * middle, "output_text.done", "content_part.done",
                     "output_item.done", kinds[-1]]
    assert [own.sequence_number for own in events] == [*range(len(events))]
    assert "".join(own.delta for own in events[4:4 + middle]) == expected.text
    last = events[-1].response
    assert last.output_text == expected.text and last.usage.total_tokens > 12
    assert last.status == kinds[-1] and events[0].response.status == "in_progress"


def test_a_response_follows_a_schema(client):
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
              "additionalProperties": False}
    for stream in (False, True):
        answer = client.responses.create(
            model="tiny", input="a", stream=stream,
            text={"format": {"type": "json_schema", "name": "p", "schema": schema}})
        if stream:
            answer = list(answer)[-1].response
        assert answer.status == "completed"
        assert isinstance(json.loads(answer.output_text)["x"], bool)


def test_unsupported_fields_are_refused(client):
    for given in (dict(background=True), dict(extra_body={"n": 2}),
                  dict(tools=[{"type": "web_search"}])):
        with pytest.raises(openai.BadRequestError, match="not supported"):
            client.responses.create(model="tiny", input="a", **given)
    with pytest.raises(openai.BadRequestError, match="input 0 has type 'computer_call'"):
        client.responses.create(model="tiny", input=[{"type": "computer_call"}])
    with pytest.raises(openai.BadRequestError, match="your input has 2.. tokens"):
        list(client.responses.create(model="tiny", input="a b c " * 40, stream=True))


TOOLS = [{"type": "function", "name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"], "additionalProperties": False}}]


def say(text):
    return dict(extra_body={"guided_choice": [text]}, model="tiny", tools=TOOLS)


def test_a_function_is_called(tool_server):
    text = '{"name": "f", "parameters": {"x": 3}}'
    client = tool_server.client
    item, = client.responses.create(input="a", **say(text)).output
    assert (item.type, item.name, item.arguments) == ("function_call", "f", '{"x": 3}')
    for choice in ("required", {"type": "function", "name": "f"}, {
            "type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "name": "f"}]}):
        answer = client.responses.create(input="a", model="tiny", tools=TOOLS, tool_choice=choice,
                                         parallel_tool_calls=False)
        item, = answer.output
        assert item.name == "f" and 0 <= json.loads(item.arguments)["x"] <= 9
        assert answer.status == "completed" and answer.tools[0].name == "f"
    with pytest.raises(openai.BadRequestError, match="tool_choice has 'g', which is not in"):
        client.responses.create(input="a", model="tiny", tools=TOOLS,
                                tool_choice={"type": "function", "name": "g"})


def test_tool_call_events_suit_the_client_s_stream_helper(tool_server):
    text = '{"name": "f", "parameters": {"x": 3}} Done'
    with tool_server.client.responses.stream(input="a", **say(text)) as stream:
        events = [*stream]
        response = stream.get_final_response()
    kinds = [own.type.removeprefix("response.") for own in events]
    calls = kinds.count("function_call_arguments.delta")
    texts = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * calls,
        "function_call_arguments.done", "output_item.done", "output_item.added",
        "content_part.added", *["output_text.delta"] * texts, "output_text.done",
        "content_part.done", "output_item.done", "completed"]
    call, message = response.output
    assert json.loads(call.arguments) == {"x": 3} and call.status == "completed"
    assert message.content[0].text == response.output_text == "Done"


def prompt_tokens(client, **given):
    return client.responses.create(model="tiny", max_output_tokens=1, **given).usage.input_tokens


def test_a_conversation_of_items_reaches_the_template(tool_case, tool_server):
    items = [{"role": "user", "content": "a"},
             {"type": "reasoning", "id": "rs_1", "summary": [],
              "content": [{"type": "reasoning_text", "text": "r"}]},
             {"type": "message", "role": "assistant", "content": [
                 {"type": "output_text", "text": "b", "annotations": []}]},
             {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 4}'},
             {"type": "function_call_output", "call_id": "c1", "output": "9"},
             {"type": "function_call_output", "call_id": "c2", "output": [
                 {"type": "input_text", "text": "8"}]}]
    with llmc.LLM(tool_case) as llm:
        expected = len(llm.tokenize("Tisarb<tool_call>598"))
    assert prompt_tokens(tool_server.client, input=items, instructions="is") == expected
    for item, said in (({"type": "function_call", "call_id": "c"}, "has no name"),
                       ({"type": "function_call_output", "output": "9"}, "has no call_id")):
        with pytest.raises(openai.BadRequestError, match=f"input 0 of type .* {said}"):
            prompt_tokens(tool_server.client, input=[item])


def test_a_response_is_stored_for_the_next_turn(tool_case, tool_server):
    client, text = tool_server.client, '{"name": "f", "parameters": {"x": 4}}'
    with llmc.LLM(tool_case) as llm:
        expected = len(llm.tokenize("Ta<tool_call>59"))
    for stream in (False, True):
        first = client.responses.create(input="a", stream=stream, instructions="is", **say(text))
        first = list(first)[-1].response if stream else first
        assert first.store and client.responses.retrieve(first.id).output == first.output
        output = {"type": "function_call_output", "call_id": first.output[0].call_id,
                  "output": "9"}
        given = dict(previous_response_id=first.id, input=[output])
        assert prompt_tokens(client, **given) == expected
        reference = {"type": "item_reference", "id": first.output[0].id}
        assert prompt_tokens(client, input=[
            {"role": "user", "content": "a"}, reference, output]) == expected
        client.responses.delete(first.id)
        for missing in (given, dict(input=[reference])):
            with pytest.raises(openai.NotFoundError, match="is not stored"):
                prompt_tokens(client, **missing)
    unstored = client.responses.create(model="tiny", input="a", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError, match="response 'resp_.*' is not stored"):
        client.responses.retrieve(unstored.id)


def test_the_input_items_of_a_stored_response_are_listed(tool_server):
    client, text = tool_server.client, '{"name": "f", "parameters": {"x": 4}}'
    first = client.responses.create(input="a", **say(text))
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "9"}
    last = client.responses.create(model="tiny", previous_response_id=first.id, input=[
        output, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])
    page = client.responses.input_items.list(last.id)
    asked, called, said, answered, question = reversed(page.data)
    assert [own.status for own in page.data] == ["completed"] * 5
    assert asked.content[0].to_dict() == {"type": "input_text", "text": "a"}
    assert called.id == first.output[0].id and called.arguments == first.output[0].arguments
    assert (said.type, said.output, said.call_id) == ("function_call_output", "9", called.call_id)
    assert answered.content[0].to_dict() == {
        "type": "output_text", "text": "b", "annotations": []}
    assert question.content[0].text == "c" and not page.has_more
    assert (page.first_id, page.last_id) == (question.id, asked.id)
    # In pages, in either order, with the ids of the first response.
    before = client.responses.input_items.list(first.id)
    assert [own.id for own in before] == [asked.id]
    for order in ("asc", "desc"):
        pages = client.responses.input_items.list(last.id, limit=2, order=order)
        assert len(pages.data) == 2 and pages.has_more
        assert [own.id for own in pages] == [
            own.id for own in (page.data if order == "desc" else page.data[::-1])]
    assert client.responses.retrieve(last.id).id == last.id


def test_invalid_input_item_queries_are_refused(tool_server):
    client = tool_server.client
    stored = client.responses.create(model="tiny", input="a", max_output_tokens=1)
    for given, wrong in ((dict(limit=0), "limit is '0'; give 1 to 100"),
                         (dict(limit=101), "limit is '101'"), (dict(order="up"), "order is 'up'"),
                         (dict(after="msg_1"), "after is 'msg_1', which is not an input item")):
        with pytest.raises(openai.BadRequestError, match=wrong):
            client.responses.input_items.list(stored.id, **given)
    with pytest.raises(openai.NotFoundError, match="response 'resp_1' is not stored"):
        client.responses.input_items.list("resp_1")


def answer_of(number, size=0):
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": "x" * size}]}


def test_a_store_is_bounded_in_bytes_and_time():
    now = [0.0]
    store = ResponseStore(1000, 60, lambda: now[0])
    for number in range(4):
        store.put(answer_of(number, 100), [])
        if number == 2:
            store.response("resp_0")  # recently used, so it is not evicted first
    assert store.bytes <= 1000
    for number, kept in ((0, True), (1, False), (2, True), (3, True)):
        if kept:
            store.response(f"resp_{number}")
        else:
            with pytest.raises(ApiError, match="response 'resp_1' is not stored"):
                store.response(f"resp_{number}")
    store.put(answer_of(5, 900), [])  # larger than the store
    with pytest.raises(ApiError):
        store.response("resp_5")
    now[0] = 60.0
    with pytest.raises(ApiError):
        store.response("resp_3")
    assert store.bytes == 0 and not store._first
    with pytest.raises(ApiError, match="this server stores no responses"):
        ResponseStore(0, 60).conversation(ResponsesRequest.model_validate(
            {"input": "a", "previous_response_id": "resp_1"}))
    for given in ((-1, 60), (1, 0)):
        with pytest.raises(llmc.LlmcError, match="the response store has"):
            ResponseStore(*given)
