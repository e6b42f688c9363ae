"""Chat templates of many families, rendered as transformers renders them.

If a template does not support a message form of OpenAI's API, the expected text is transformers'
rendering of the same message in another form.
"""

import itertools
import json
from pathlib import Path

import pytest
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from llmc.runtime.chat_template import ChatTemplate, _template
from llmc.runtime.sandbox import Sandbox

FOLDER = Path(__file__).parents[1] / "chat_templates"
SANDBOX = Sandbox()
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
TEMPLATES["transformers' smolvlm"] = DEFAULT_CHAT_TEMPLATE
TEMPLATES["transformers' qwen2_audio"] = Qwen2AudioProcessor.default_chat_template.fget(None)
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The wéather <now>", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]
SYSTEM = {"role": "system", "content": "sysword"}
USER = {"role": "user", "content": "userword"}
ANSWER = {"role": "assistant", "content": "answerword"}
LAST = {"role": "user", "content": "lastword"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "resultword"}
ABSENT = object()


def call(content=ABSENT, arguments=None):
    message = {"role": "assistant", "tool_calls": [{
        "id": "call00001", "type": "function",
        "function": {"name": "weather", "arguments": arguments or {"city": "Oslo"}}}]}
    return message if content is ABSENT else {**message, "content": content}


def parts(message):
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


CONVERSATIONS = {
    "a user": [USER], "with system": [SYSTEM, USER], "turns": [USER, ANSWER, LAST],
    "all of them": [SYSTEM, USER, ANSWER, LAST],
    "developer": [{**SYSTEM, "role": "developer"}, USER],
    "parts": [parts(SYSTEM), parts(USER), parts(ANSWER), parts(LAST)],
    "parts of a user": [SYSTEM, parts(USER)],
    "empty tool_calls": [USER, {**ANSWER, "tool_calls": []}, LAST],
    "null tool_calls": [USER, {**ANSWER, "tool_calls": None, "name": None}, LAST],
    "reasoning": [USER, {**ANSWER, "reasoning": "thought"}, LAST],
    "a call": [USER, call(), RESULT], "a call, null content": [USER, call(None), RESULT],
    "a call, empty content": [USER, call(""), RESULT],
    "a call, arguments as text": [USER, call(None, '{"city": "Oslo"}'), RESULT],
    "a call, and a turn": [SYSTEM, USER, call(None, '{"city": "Oslo"}'), RESULT, ANSWER, LAST],
    "parts of a tool": [USER, call(), parts(RESULT)],
}


def transformers_renders(template, messages, tools):
    """Return transformers' rendering; None if the template raises."""
    try:
        (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template,
                                           add_generation_prompt=True, **TOKENS)
    except Exception:  # whatever a template raises
        return None
    return text


def llmc_renders(template, messages, tools):
    own = _template(template, tuple(TOKENS.items()))
    try:
        return own.render({"messages": own.forms.fit(messages, "auto"), "tools": tools,
                           "documents": None, "add_generation_prompt": True})
    except Exception:  # whatever a template raises
        return None


def as_given(messages):
    """Prepare messages as `apply_chat_template` does before rendering."""
    return [{key: value for key, value in message.items() if value is not None}
            for message in messages]


def is_whole(text, messages):
    """Whether a text has the contents of all messages, and no Python literals."""
    words = [word for word in ("sysword", "userword", "answerword", "lastword", "resultword",
                               "Oslo") if word in json.dumps(messages)]
    return text is not None and all(word in text for word in words) and not any(
        own in text for own in ("'type': 'text'", '"type": "text"', "{'city'", '{\\"city'))


def other_forms(messages):
    """Return the same conversation in all combinations of message forms."""
    messages = [{key: value for key, value in message.items() if value is not None and value != []}
                for message in messages]
    found = {}
    contents = itertools.product(("text", "parts"), repeat=3)
    for (own, assistant, tool), arguments, empty, instructions in itertools.product(
            contents, ("object", "text"), (ABSENT, None, ""), ("system", "developer")):
        changed = []
        for message in map(dict, messages):
            form = {"assistant": assistant, "tool": tool}.get(message["role"], own)
            if message["role"] in ("system", "developer"):
                message["role"] = instructions
            content = message.pop("content", "")
            text = content if isinstance(content, str) else content[0]["text"]
            if text or "tool_calls" not in message:
                message["content"] = text if form == "text" else [{"type": "text", "text": text}]
            elif empty is not ABSENT:
                message["content"] = empty
            if "tool_calls" in message:
                given, = message["tool_calls"]
                value = given["function"]["arguments"]
                value = json.loads(value) if isinstance(value, str) else value
                message["tool_calls"] = [{**given, "function": {
                    **given["function"],
                    "arguments": json.dumps(value) if arguments == "text" else value}}]
            changed.append(message)
        found[json.dumps(changed)] = changed
    return list(found.values())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_messages_are_rendered_as_by_transformers(name, tools):
    template = TEMPLATES[name]
    for conversation, messages in CONVERSATIONS.items():
        rendered = llmc_renders(template, messages, tools)
        given = transformers_renders(template, as_given(messages), tools)
        if is_whole(given, messages):
            assert rendered == given, conversation
            continue
        readable = {text for own in other_forms(messages)
                    if is_whole(text := transformers_renders(template, own, tools), messages)}
        assert rendered in readable if readable else not is_whole(rendered, messages), conversation


def test_templates_read_globals_filters_and_tags_of_transformers():
    template = ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, separators=(',', ': '), sort_keys=true)"
                " }}{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}"
                "{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y') | length }}"
                "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
                "{{ dict(a=1) }}{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}")
    assert llmc_renders(template, [USER], None) == transformers_renders(template, [USER], None)
    for refused in ("{{ namespace(_a=1) }}", "{% set ns = namespace() %}{% set ns._a = 1 %}"):
        assert transformers_renders(refused, [USER], None) is None
        assert llmc_renders(refused, [USER], None) is None


def test_a_requested_content_format_is_used(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{{ m.content is string }}{% endfor %}")
    own = ChatTemplate({"default": path}, tmp_path / "none.json", SANDBOX)
    both = [USER, parts(USER)]
    assert own.render(both, content_format="string") == "TrueTrue"
    assert own.render(both, content_format="openai") == "FalseFalse"


def test_a_tool_template_is_used_with_tools(tmp_path):
    for name in ("default", "tool_use"):
        (tmp_path / name).write_text(name)
    paths = {name: tmp_path / name for name in ("default", "tool_use")}
    own = ChatTemplate(paths, tmp_path / "none.json", SANDBOX)
    assert own.render([USER]) == "default" and own.render([USER], TOOLS) == "tool_use"
