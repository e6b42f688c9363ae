"""/v1/responses through the `openai` client."""

import json

import openai
import pytest

import llmc

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


def test_what_needs_a_store_is_refused(client):
    for given in (dict(previous_response_id="resp_1"), dict(background=True),
                  dict(tools=[{"type": "web_search"}]), dict(extra_body={"n": 2})):
        with pytest.raises(openai.BadRequestError, match="is not served"):
            client.responses.create(model="tiny", input="a", **given)
    with pytest.raises(openai.BadRequestError, match="your input has 2.. tokens"):
        list(client.responses.create(model="tiny", input="a b c " * 40, stream=True))
