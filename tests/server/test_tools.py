"""Tool calls: forced by a grammar, parsed from the output, returned as in OpenAI's API."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from click.testing import CliRunner

import llmc
from llmc.cli import main
from llmc.server.chat import _check_callable
from llmc.server.errors import ApiError
from llmc.server.model import _names_tools
from llmc.server.serve import serve
from llmc.server.tool_parsers import TOOL_PARSERS, recognized_parser


@pytest.mark.parametrize(("template", "parser"), [
    ("… <tool_call>{{ call }}</tool_call>", "hermes"), ("… <|python_tag|> …", "llama3_json"),
    ("<{{ m }}>", None), ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder"),
    ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>", "glm45"),
    ("<tool_call><invoke name='f'>", None),
    ("<seed:tool_call>\n<function=f>\n<parameter=k>", "seed_oss"),
    ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">', "deepseek_v32"),
    ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">', "deepseek_v4"),
    ("<minimax:tool_call><invoke name=", "minimax_m2"), ("[TOOL_CALLS] [", "mistral"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
    ("<|header_start|>{{ m.tool_calls }}", "llama4_pythonic"),
    ("<|python_start|>{{ m }}<|python_end|>", None),  # code, as in nanochat
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "deepseek_v31"),
    ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n", "deepseek_v3"),
    ("<|start|>system<|message|>…<|channel|>analysis", "harmony")])
def test_a_template_selects_the_tool_parser(template, parser):
    assert recognized_parser(template) == parser


TEMPLATES = Path(__file__).parents[1] / "chat_templates"


@pytest.mark.parametrize(("name", "parser"), [
    ("deepseek_v3", "deepseek_v3"), ("deepseek_v3.1", "deepseek_v31"),
    ("deepseek_v3.2", "deepseek_v32"), ("glm4.5", "glm45"), ("gpt_oss", "harmony"),
    ("mixtral_tools", "mistral"), ("qwen2.5", "hermes"), ("seed_oss", "seed_oss"),
    ("zephyr", None)])
def test_a_family_s_template_selects_its_parser(name, parser):
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert recognized_parser(template) == parser


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"], "additionalProperties": False}}}]
ASK = dict(model="tiny", messages=[{"role": "u", "content": ""}], tools=TOOLS, max_tokens=45,
           seed=3)


@pytest.fixture(scope="module")
def caller(tool_server):
    return tool_server.client


def ask(client, stream, **given):
    """Return the content, the tool calls and the finish reason."""
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
def test_a_tool_call_is_parsed_from_the_output(caller, stream):
    def say(text):
        return dict(extra_body={"guided_choice": [text]})

    assert ask(caller, stream, **say('{"name": "f", "parameters": {"x": 3}}')) == \
        (None, [("f", {"x": 3})], "tool_calls")
    assert ask(caller, stream, **say('{"name": "g"}')) == ('{"name": "g"}', [], "stop")
    assert ask(caller, stream, tool_choice="none", **say('{"name": "f"}')) == \
        ('{"name": "f"}', [], "stop")


def test_invalid_tools_are_refused(caller, client):
    with pytest.raises(openai.BadRequestError, match="tool_choice has 'g', which is not in"):
        ask(caller, False, tool_choice={"type": "function", "function": {"name": "g"}})
    with pytest.raises(openai.BadRequestError, match="'required', but tools is empty"):
        ask(caller, False, tool_choice="required", tools=[])
    with pytest.raises(openai.BadRequestError, match="combined with a tool_choice that forces"):
        ask(caller, False, tool_choice="required", response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="format of this model's tool calls"):
        ask(client, False)


def test_a_conversation_with_calls_reaches_the_template(tool_case, caller):
    """Arguments as an object, and the tools."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 4}'}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "9"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "n"}]},
                {"role": "assistant", "content": None, "refusal": "o"}]
    answer = caller.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, max_tokens=1, logprobs=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": "yes"}})
    with llmc.LLM(tool_case) as llm:
        assert answer.usage.prompt_tokens == len(llm.tokenize("Tfa<tool_call>59noyes"))
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="tool call in message 1 are not JSON"):
        caller.chat.completions.create(model="tiny", messages=messages)


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


POINTERS = {
    "type": "object", "required": ["a", "b", "c", "d"], "additionalProperties": False,
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "properties": {
        "a": {"$ref": "#/$defs/X"}, "b": {"$ref": "#/properties/a"}, "d": {"const": {"$ref": "#/"}},
        "c": {"anyOf": [{"$ref": "#/definitions/a~1b%20c"}, {"$ref": "#"}]}},
    "$defs": {"X": {"enum": ["x", "y"]}}, "definitions": {"a/b c": {"const": 3}}}


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_with_pointers_are_followed_by_a_required_call(caller, stream):
    other = {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"],
             "additionalProperties": False, "$defs": {"X": {"const": 1}}}
    for offered in ([tool("f", POINTERS)], [tool("g", other), tool("f", POINTERS)]):
        content, calls, reason = ask(
            caller, stream, tools=offered, tool_choice="required", parallel_tool_calls=False,
            max_tokens=120)
        (name, arguments), = calls
        assert (content, reason) == (None, "tool_calls")
        if name == "f":
            assert arguments["a"] in "xy" and arguments["b"] in "xy"
            assert arguments["d"] == {"$ref": "#/"}
        else:
            assert arguments == {"a": 1}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_are_not_called(caller, mode):
    choice = {"type": "allowed_tools", "allowed_tools": {
        "mode": mode, "tools": [{"type": "function", "function": {"name": "f"}}]}}
    offered = [tool("g", {"type": "object"}), *TOOLS]
    given = {} if mode == "required" else {"extra_body": {"guided_choice": ['{"name": "g"}']}}
    content, calls, _ = ask(caller, False, tools=offered, tool_choice=choice, **given)
    assert {name for name, _ in calls} == ({"f"} if mode == "required" else set())
    assert content == (None if mode == "required" else '{"name": "g"}')
    choice["allowed_tools"]["tools"][0]["function"]["name"] = "h"
    with pytest.raises(openai.BadRequestError, match="tool_choice has 'h', which is not in"):
        ask(caller, False, tools=offered, tool_choice=choice)


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_forced_call_is_not_content(caller, stream):
    assert ask(caller, stream, tool_choice="required", max_tokens=3) == (
        None if stream else "", [], "length")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_is_returned_without_parallel_tool_calls(caller, stream):
    text = '{"name": "f", "parameters": {"x": 3}}; {"name": "f"}'
    for parallel in (False, True):
        _, calls, _ = ask(caller, stream, parallel_tool_calls=parallel, max_tokens=60,
                          extra_body={"guided_choice": [text]})
        assert calls == [("f", {"x": 3}), ("f", {})][:1 + parallel]


def test_tools_that_the_template_does_not_show_are_refused():
    assert _names_tools("{% if tools is not none %}{% endif %}")
    assert not _names_tools("tools {# tools #} {{ 'tools' }} {{ m.tool_calls }}")
    with pytest.raises(ApiError, match="does not render tools"):
        _check_callable(SimpleNamespace(tool_call_parser="hermes", shows_tools=False))


def test_the_help_of_serve_names_all_parsers():
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    assert set(TOOL_PARSERS) <= set(re.split(r"[\s,.]+", shown))


def test_an_unknown_parser_is_refused_before_the_model_is_loaded(tmp_path):
    for option in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(llmc.LlmcError, match=f"--{option} is 'x', which is unknown; "):
            serve(tmp_path / "nothing", port=0, **{option: "x"})
