"""Calls of tools: found in texts however they are cut, forced by a grammar, told as OpenAI does."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_process import serving

from llmc.server.tools import Arguments, Hermes, Plain, merged, parser_of

NAMES = ["add", "get weather"]
ADD = '{"name": "add", "arguments": {"x": [1, {"y": "}\\"{,:"}], "z": "é<tool_call>"}}'
WEATHER = '{"arguments": {"city": "Oslo"}, "name": "get weather"}'
LLAMA = ADD.replace("arguments", "parameters")
X, CITY = json.loads(ADD)["arguments"], {"city": "Oslo"}
TEXTS = [
    (Hermes, f"<tool_call>\n{ADD}\n</tool_call>", "", [X]),
    (Hermes, f"Let me see. \n\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>",
     "Let me see.", [X, CITY]),
    (Hermes, "a < b <tool", "a < b <tool", []), (Hermes, "nothing", "nothing", []),
    (Hermes, f"<tool_call>\n{ADD}", "", [X]),  # an end that does not come
    (Hermes, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>!',
     '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>!', []),
    (Hermes, "<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
    (Hermes, '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    (Plain, LLAMA, "", [X]), (Plain, f"<|python_tag|>{LLAMA}; {WEATHER}", "", [X, CITY]),
    (Plain, f"[{LLAMA}, {WEATHER}]", "", [X, CITY]), (Plain, "Hello {", "Hello {", []),
    (Plain, '{"answer": 3}', '{"answer": 3}', []), (Plain, '[{"name": 3}]', '[{"name": 3}]', []),
    (Plain, "<|python", "<|python", []), (Plain, "", "", []),
    (Arguments, '{"city": "Oslo"}', "", [CITY])]


@pytest.mark.parametrize(("parser", "text", "content", "arguments"), TEXTS)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 120), max_size=30))
def test_calls_are_found_however_a_text_is_cut(parser, text, content, arguments, cuts):
    tools = parser(["get weather"] if parser is Arguments else NAMES)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    deltas = []
    for start, end in zip([0, *ends], ends, strict=False):
        deltas += tools.push(text[start:end])
    deltas += tools.finish()
    told, calls, _ = merged(deltas)
    assert told == content
    assert [json.loads(call["function"]["arguments"]) for call in calls] == arguments
    assert [call["function"]["name"] for call in calls] == \
        [("add" if own is X else "get weather") for own in arguments]
    assert len({call["id"] for call in calls}) == len(calls) == tools.calls


def test_arguments_are_told_before_a_call_is_whole():
    tools = Hermes(NAMES)
    told = [*tools.push('<tool_call>{"name": "add", "arguments": {"x": 1')]
    assert told[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    assert told[0]["tool_calls"][0]["id"].startswith("call_")
    assert told[1]["tool_calls"][0] == {"index": 0, "function": {"arguments": '{"x": 1'}}


def test_a_template_says_how_its_model_calls_tools():
    assert parser_of("… <tool_call>{{ call }}</tool_call>") == "hermes"
    assert parser_of("… <|python_tag|> …") == "llama3_json" and parser_of("<{{ m }}>") is None


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"], "additionalProperties": False}}}]
ASK = dict(model="tiny", messages=[{"role": "u", "content": ""}], tools=TOOLS, max_tokens=45,
           seed=3)


@pytest.fixture(scope="module")
def caller(case_tp1):
    with serving(case_tp1, "--tool_call_parser", "llama3_json") as own:
        yield own.client


def ask(client, stream, **given):
    """The content, the calls and the reason."""
    answer = client.chat.completions.create(stream=stream, **{**ASK, **given})
    if not stream:
        choice, = answer.choices
        return choice.message.content, [
            (call.function.name, json.loads(call.function.arguments))
            for call in choice.message.tool_calls or ()], choice.finish_reason
    content, calls, reason = "", [], None
    for chunk in answer:
        choice, = chunk.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls) and call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return content or None, [(name, json.loads(own)) for name, own in calls], reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_forced(caller, stream):
    named = {"type": "function", "function": {"name": "f"}}
    for choice in (named, "required"):
        content, calls, reason = ask(caller, stream, tool_choice=choice, parallel_tool_calls=False)
        assert content is None and reason == "tool_calls"
        (name, arguments), = calls
        assert name == "f" and 0 <= arguments["x"] <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_found_in_what_a_model_says(caller, stream):
    def say(text):
        return dict(extra_body={"guided_choice": [text]})

    assert ask(caller, stream, **say('{"name": "f", "parameters": {"x": 3}}')) == \
        (None, [("f", {"x": 3})], "tool_calls")
    assert ask(caller, stream, **say('{"name": "g"}')) == ('{"name": "g"}', [], "stop")
    assert ask(caller, stream, tool_choice="none", **say('{"name": "f"}')) == \
        ('{"name": "f"}', [], "stop")


def test_tools_that_cannot_be_called_are_refused(caller, client):
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'g', which is none of"):
        ask(caller, False, tool_choice={"type": "function", "function": {"name": "g"}})
    with pytest.raises(openai.BadRequestError, match="tool_choice is required, but there are no"):
        ask(caller, False, tool_choice="required", tools=[])
    with pytest.raises(openai.BadRequestError, match="do not go with a tool_choice that forces"):
        ask(caller, False, tool_choice="required", response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="does not know how this model's chat"):
        ask(client, False)


def test_a_conversation_with_calls_reaches_the_template(tiny_hf, tmp_path):
    """Arguments as an object, and the tools."""
    import shutil

    import llmc
    shutil.copytree(tiny_hf, tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text(
        "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x + 1 }}{% endfor %}"
        "{% endfor %}{{ enable_thinking }}")
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 4}'}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "9"}]
    with serving(tmp_path / "case") as server:
        answer = server.client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, max_tokens=1, logprobs=True,
            extra_body={"chat_template_kwargs": {"enable_thinking": "yes"}})
        with llmc.LLM(tmp_path / "case") as llm:
            assert answer.usage.prompt_tokens == len(llm.tokenize("fa<tool_call>59yes"))
        messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError, match="tool call in message 1 are not JSON"):
            server.client.chat.completions.create(model="tiny", messages=messages)
