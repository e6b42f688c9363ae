"""Tool parsers: the texts of each family, in chunks of every size, give the expected calls."""

import json

import pytest

from llmc.server.tool_parsers import TOOL_PARSERS, NamedCall, RequiredCalls, merged
from llmc.server.tool_parsers.xml import argument_types, typed

TOOLS = {
    "add": {"type": "object", "properties": {
        "x": {"type": "array", "items": {"type": "integer"}}, "z": {"type": "string"}}},
    "get weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "get_weather": {"$defs": {"City": {"enum": ["Oslo", "Rome"]}}, "type": "object", "properties": {
        "city": {"$ref": "#/$defs/City"}, "exact": {"type": "boolean"}, "any": {},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "code": {"type": "string"}}},
    "now": None}
ADD = '{"name": "add", "arguments": {"x": [1, {"y": "}\\"{,:"}], "z": "é<tool_call>"}}'
WEATHER = '{"arguments": {"city": "Oslo"}, "name": "get weather"}'
X = ("add", {"x": [1, {"y": '}"{,:'}], "z": "é<tool_call>"})
CITY, NOW = ("get weather", {"city": "Oslo"}), ("now", {})
OSLO = ("get_weather", {"city": "Oslo"})
ALL = ("get_weather", {"city": "Oslo", "days": 3, "exact": True, "code": "if a < b:\n  \"é\"\\n",
                       "any": {"k": [1.5, None]}})
CODE, ANY = ALL[1]["code"], '{"k": [1.5, null]}'


def qwen(name, **arguments):
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n"
                    for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def glm(name, line="\n", **arguments):
    parts = "".join(f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
                    for key, value in arguments.items())
    return f"<tool_call>{name}{line}{parts}</tool_call>"


def minimax(*calls):
    return "<minimax:tool_call>\n" + "".join(f'<invoke name="{name}">\n' + "".join(
        f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()
    ) + "</invoke>\n" for name, arguments in calls) + "</minimax:tool_call>"


def seed(name, **arguments):
    parts = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{parts}</function>\n</seed:tool_call>"


def dsml(*calls, section="function_calls"):
    """Encode calls (name, arguments) as DeepSeek does."""
    def parameter(key, value):
        text = value if (own := isinstance(value, str)) else json.dumps(value)
        return (f'<｜DSML｜parameter name="{key}" string="{json.dumps(own)}">{text}'
                f"</｜DSML｜parameter>\n")

    return f"<｜DSML｜{section}>\n" + "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(*own) for own in arguments.items()) + "</｜DSML｜invoke>\n"
        for name, arguments in calls) + f"</｜DSML｜{section}>"


def dsml_body(body):
    """Return a call of `get_weather` with the given argument text."""
    return (f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{body}\n'
            f"</｜DSML｜invoke>\n</｜DSML｜function_calls>")


def dsml_wrapped(name, text):
    return dsml_body(f'<｜DSML｜parameter name="{name}" string="false">{text}</｜DSML｜parameter>')


def deepseek(*calls, old=False):
    return "<｜tool▁calls▁begin｜>" + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        f"<｜tool▁call▁end｜>" if old else
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in calls) + "<｜tool▁calls▁end｜>"


def kimi(*calls):
    return "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        f"<|tool_call_end|>" for index, (name, arguments) in enumerate(calls)) + \
        "<|tool_calls_section_end|>"


FULL = dict(city="Oslo", days=3, exact="true", code=CODE, any=ANY)
HARMONY_CALL = ('<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>'
                '{"city": "Oslo"}<|call|>')
# A parser, a text, its content, and its calls.
TEXTS = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [X]),
    ("hermes", f"Let me see. \n\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{WEATHER}\n"
               f"</tool_call>\n", "Let me see.", [X, CITY]),
    ("hermes", "a < b <tool", "a < b <tool", []), ("hermes", "nothing \n", "nothing \n", []),
    ("hermes", f"<tool_call>\n{ADD}", "", [X]), ("hermes", "", "", []),
    ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>!',
     '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>!', []),
    ("hermes", "<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
    ("hermes", 'Hm \n<tool_call>\n{"name": "ad', 'Hm \n<tool_call>\n{"name": "ad', []),
    # No arguments, and arguments as text.
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": "", "name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}'
               '</tool_call>', "", [OSLO]),
    ("hermes", '<tool_call>{"id": [1, "}"], "name": "now", "arguments": "no"}</tool_call>', "",
     [("now", "no")]),
    # Malformed calls.
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "get_weather", '
               '"arguments": {"city": "Oslo"}}</tool_call>', "", [NOW, OSLO]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}} And here is it.', " And here is it.",
     [NOW]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}</tool_call>Done',
     "Done", [OSLO]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "argu', "", [NOW]),
    ("llama3_json", ADD.replace("arguments", "parameters"), "", [X]),
    ("llama3_json", f"<|python_tag|>{ADD}; {WEATHER}", "", [X, CITY]),
    ("llama3_json", f"[{ADD}, {WEATHER}]\n", "", [X, CITY]),
    ("llama3_json", "Hello {", "Hello {", []), ("llama3_json", '{"name": "now"}', "", [NOW]),
    ("llama3_json", '{"name": "now"} is it', "is it", [NOW]),
    ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
    ("llama3_json", '[{"name": 3}]', '[{"name": 3}]', []),
    ("llama3_json", "<|python", "<|python", []), ("llama3_json", "", "", []),
    ("qwen3_coder", f"Well.\n\n{qwen('get_weather', **FULL)}", "Well.", [ALL]),
    ("qwen3_coder", f"{qwen('now')}\n{qwen('get_weather', city='Oslo')}\n\nDone", "\n\nDone",
     [NOW, OSLO]),
    ("qwen3_coder", qwen("now").removeprefix("<tool_call>\n"), "", [NOW]),
    ("qwen3_coder", qwen("get_weather", city="Oslo").replace("</parameter>\n", ""), "", [OSLO]),
    ("qwen3_coder", qwen("other", a=1), qwen("other", a=1), []),
    ("qwen3_coder", "<tool_call>\n{}</tool_call>", "<tool_call>\n{}</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=no", "<tool_call>\n<function=no", []),
    ("glm45", f"Well.\n{glm('get_weather', **FULL)}", "Well.", [ALL]),
    ("glm45", glm("now") + glm("get_weather", "", city="Oslo") + "Done", "Done", [NOW, OSLO]),
    ("glm45", glm("now", ""), "", [NOW]), ("glm45", glm("other", a=1), glm("other", a=1), []),
    ("minimax_m2", f"Well.\n{minimax(('get_weather', FULL))}", "Well.", [ALL]),
    ("minimax_m2", minimax(("now", {}), ("get_weather", {"city": "Oslo"})) + "Done", "Done",
     [NOW, OSLO]),
    ("minimax_m2", minimax(("other", {})), minimax(("other", {})), []),
    ("minimax_m2", "<minimax:tool_call>no", "<minimax:tool_call>no", []),
    ("seed_oss", f"Well.\n\n{seed('get_weather', **FULL)}", "Well.", [ALL]),
    ("seed_oss", f"{seed('now')}\n{seed('get_weather', city='Oslo')}Done", "Done", [NOW, OSLO]),
    ("seed_oss", qwen("get_weather", **FULL).replace("tool_call>", "seed:tool_call>"), "", [ALL]),
    ("seed_oss", seed("other", a=1), seed("other", a=1), []),
    ("seed_oss", "<seed:tool", "<seed:tool", []),
    ("deepseek_v32", "Well.\n\n" + dsml(ALL), "Well.", [ALL]),
    ("deepseek_v32", dsml(("now", {}), OSLO) + "!", "!", [NOW, OSLO]),
    ("deepseek_v32", dsml(("get_weather", {"city": "5", "days": None, "other": [1]})), "",
     [("get_weather", {"city": "5", "days": None, "other": [1]})]),
    ("deepseek_v32", dsml(("other", {})), dsml(("other", {})), []),
    ("deepseek_v32", "<｜DSML｜function_calls>no", "<｜DSML｜function_calls>no", []),
    ("deepseek_v32", dsml_body('{"city": "Oslo"}') + "Done", "Done", [OSLO]),
    ("deepseek_v32", dsml_wrapped("arguments", '{"city": "Oslo"}'), "", [OSLO]),
    ("deepseek_v32", dsml_wrapped("input", "{}"), "", [("get_weather", {})]),
    ("deepseek_v32", dsml_wrapped("arguments", "{no"), "", [("get_weather", {"arguments": "{no"})]),
    ("deepseek_v32", dsml_wrapped("input", '{"other": 1}'), "",
     [("get_weather", {"input": {"other": 1}})]),
    ("deepseek_v4", "Well.\n\n" + dsml(("now", {}), ALL, section="tool_calls"), "Well.",
     [NOW, ALL]),
    ("deepseek_v31", "Well." + deepseek(("now", "{}"), ("get_weather", '{"city": "Oslo"}')) + "!",
     "Well.!", [NOW, OSLO]),
    ("deepseek_v31", deepseek(("now", "")), "", [NOW]),
    ("deepseek_v31", deepseek(("other", "{}")), deepseek(("other", "{}")), []),
    ("deepseek_v3", "Well." + deepseek(("now", "{}"), ("get_weather", '{"city": "Oslo"}'),
                                       old=True), "Well.", [NOW, OSLO]),
    ("kimi_k2", "Well. " + kimi(("now", "{}"), ("get_weather", '{"city": "Oslo"}')) + "!",
     "Well.!", [NOW, OSLO]),
    ("kimi_k2", kimi(("other", "{}")), kimi(("other", "{}")), []),
    ("mistral", f"Well.[TOOL_CALLS] [{ADD}, {WEATHER}]", "Well.", [X, CITY]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', "",
     [NOW, OSLO]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', "", [OSLO]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"}', "", [OSLO]),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
    ("llama4_pythonic", '[now(), get_weather(city="Oslo", days=3, exact=True, '
     f"code={CODE!r}, any={{'k': [1.5, null]}})]", "", [NOW, ALL]),
    ("llama4_pythonic", '<|python_start|>[get_weather(city="Oslo")]<|python_end|>Done', "Done",
     [OSLO]),
    ("llama4_pythonic", 'Well. <|python_start|>{"name": "now", "parameters": {}}<|python_end|>',
     "Well.", [NOW]),
    ("llama4_pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("llama4_pythonic", "[get_weather(1)]", "[get_weather(1)]", []),
    ("llama4_pythonic", "[1, 2]", "[1, 2]", []), ("llama4_pythonic", "[now(", "[now(", []),
    ("harmony", f"<|channel|>final<|message|>Well.<|end|><|start|>assistant{HARMONY_CALL}", "Well.",
     [OSLO]),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [NOW]),
    (NamedCall, '{"city": "Oslo"}', "", [CITY]),
    (RequiredCalls, f"[{ADD}, {WEATHER}]", "", [X, CITY]),
    (RequiredCalls, '[{"name":', "", []), (RequiredCalls, "[", "", [])]


def read(parser, pieces):
    tools = parser({"get weather": None} if parser is NamedCall else TOOLS)
    deltas = [delta for piece in pieces for delta in tools.push(piece)]
    return tools, [*deltas, *tools.finish()]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), TEXTS)
def test_parsing_is_independent_of_chunk_sizes(parser, text, content, calls):
    parser = TOOL_PARSERS.get(parser, parser)
    for size in range(1, len(text) + 2):
        tools, deltas = read(parser, [text[at:at + size] for at in range(0, len(text), size)])
        told, found, _ = merged(deltas)
        assert told == content
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in found] == calls, size
        assert len({call["id"] for call in found}) == len(calls) == tools.calls
        assert all(delta.get("content") != "" for delta in deltas)


STREAMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 1', '{"x": 1'),
    ("llama3_json", '{"name": "add", "parameters": {"x": 1', '{"x": 1'),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=z>\na \"b", '{"z": "a \\"b'),
    ("glm45", "<tool_call>add\n<arg_key>z</arg_key>\n<arg_value>ab", '{"z": "ab'),
    ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="z">ab', '{"z": "ab'),
    ("seed_oss", "<seed:tool_call>\n<function=add>\n<parameter=z>ab", '{"z": "ab'),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="add">'
                     '<｜DSML｜parameter name="x" string="true">ab', '{"x": "ab'),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1',
     '{"x": 1'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
                '<|tool_call_argument_begin|>{"x": 1', '{"x": 1'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"x": 1', '{"x": 1')]


@pytest.mark.parametrize(("parser", "text", "arguments"), STREAMED)
def test_arguments_are_streamed_before_a_call_is_complete(parser, text, arguments):
    tools = TOOL_PARSERS[parser](TOOLS)
    first, *others = tools.push(text)
    call, = first["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": ""} and call["id"]
    assert "".join(own["tool_calls"][0]["function"]["arguments"] for own in others) == arguments
    assert all(own["tool_calls"][0]["index"] == 0 for own in others)


def test_call_ids_match_the_family_s_template():
    def first_id(parser, text):
        return merged(read(TOOL_PARSERS[parser], [text])[1])[1][0]["id"]

    assert first_id("kimi_k2", kimi(("now", "{}"))) == "functions.now:0"
    assert first_id("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}") == "abcdefghi"
    made = first_id("mistral", "[TOOL_CALLS]now[ARGS]{}")
    assert len(made) == 9 and made.isalnum()


@pytest.mark.parametrize(("text", "types", "expected"), [
    ("5", {"integer"}, "5"), ("5.0", {"integer"}, "5"), ("5.5", {"integer"}, '"5.5"'),
    ("5", {"number"}, "5"), ("5", {"string"}, '"5"'), ("5", set(), "5"), ("a", set(), '"a"'),
    ("null", {"string", "null"}, "null"), ("None", {"integer", "null"}, "null"),
    ("True", {"boolean"}, "true"), ("FALSE", {"boolean"}, "false"), ("x", {"boolean"}, '"x"'),
    ("{'a': (1, None)}", {"object"}, '{"a": [1, null]}'), ("[1,2]", {"array"}, "[1,2]"),
    ('"a"', {"string", "null"}, '"\\"a\\""'), ("NaN", {"number"}, '"NaN"'),
    ("123456789012345678901", {"integer"}, "123456789012345678901"),
    ("[" * 10_000, {"array"}, json.dumps("[" * 10_000)), ("{1: {2}}", {"object"}, '"{1: {2}}"')])
def test_argument_text_is_converted_to_the_schema_s_type(text, types, expected):
    assert typed(text, types) == expected


@pytest.mark.parametrize(("schema", "expected"), [
    ({"type": "string"}, {"string"}), ({"type": ["string", "null"]}, {"string", "null"}),
    ({"$ref": "#/$defs/a~1b%20c"}, {"integer"}), ({"$ref": "#/$defs/loop"}, set()),
    ({"$ref": "http://other"}, set()), ({"const": 1.5}, {"number"}), (True, set()),
    ({"oneOf": [{"enum": ["a", None]}, {"type": "array"}]}, {"string", "null", "array"}),
    ({"anyOf": [{}, {"type": "array"}]}, set()),
    ({"allOf": [{"minLength": 1}, {"type": "string"}]}, {"string"})])
def test_the_types_of_an_argument_are_found_in_its_schema(schema, expected):
    root = {"properties": {"own": schema},
            "$defs": {"a/b c": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert argument_types(root, "own") == expected
