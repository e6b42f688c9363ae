"""All message forms of OpenAI's API, and the model's sampling defaults, over HTTP."""

import json
import shutil

import pytest
from click.testing import CliRunner
from server_process import serving

import llmc
from llmc.cli import main
from llmc.compiler.output import check_output
from llmc.server.protocol import ChatRequest

# Supports only contents as parts, arguments as text, and calls with null content.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}"
    "{% if 'tool_calls' in m %}{{ raise_exception('content and calls') }}{% endif %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}|"
    "{% endfor %}{% endif %}{% endfor %}")
USER = {"role": "user", "content": "fox"}
DEFAULTS = {"repetition_penalty": 1.7, "suppress_tokens": [168], "do_sample": False}


@pytest.fixture(scope="module")
def case(tiny_hf, tmp_path_factory):
    root = tmp_path_factory.mktemp("forms")
    shutil.copytree(tiny_hf, root / "hf")
    (root / "hf" / "chat_template.jinja").unlink()
    config = json.loads((root / "hf" / "tokenizer_config.json").read_text())
    (root / "hf" / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "{{ tools[0].function.name }}<tool_call>"}]}))
    generation = json.loads((root / "hf" / "generation_config.json").read_text())
    (root / "hf" / "generation_config.json").write_text(json.dumps({**generation, **DEFAULTS}))
    llmc.compile(root / "hf", root / "case")
    return root / "case"


@pytest.fixture(scope="module")
def server(case):
    with serving(case) as own:
        yield own


def rendered(server, *messages):
    status, _, answer = server.post("/tokenize", {"messages": messages})
    assert status == 200, answer
    return server.post("/detokenize", {"tokens": answer["tokens"]})[2]["prompt"]


def test_every_message_form_reaches_the_template(server):
    part = {"type": "text", "text": "fox"}
    assert rendered(server, USER) == rendered(server, {**USER, "content": [part]}) == "<user>fox|"
    assert rendered(server, {**USER, "content": [part, {"type": "input_text", "text": "dog"}]}) == \
        "<user>fox|dog|"
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert rendered(server, USER, refusal, USER) == "<user>fox|<assistant>no|<user>fox|"
    assert rendered(server, {"role": "developer", "content": "a"}, USER) == \
        "<developer>a|<user>fox|"
    for calls in ([], None):
        assert rendered(server, USER, {"role": "assistant", "content": "a", "tool_calls": calls},
                        USER) == "<user>fox|<assistant>a|<user>fox|"
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    for content in ({}, {"content": None}, {"content": ""}):
        assert rendered(server, USER, {"role": "assistant", **content, "tool_calls": [call]}) == \
            '<user>fox|<assistant>f{"x": 1}'
    status, _, answer = server.post("/v1/chat/completions", {"messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]})
    assert status == 400
    assert "message 0 has an image" in answer["error"]["message"]


def test_model_sampling_defaults_apply_to_unset_parameters(server, case):
    with llmc.LLM(case) as llm:
        prompt = llm.chat_prompt("fox")
        own = llmc.SamplingParams(repetition_penalty=1.7, logit_bias={168: float("-inf")},
                                  max_tokens=64)
        assert llm.default_sampling_params == own
        expected, = llm.generate([prompt])
        assert expected.text == llm.generate([prompt], own)[0].text
        plain, = llm.generate([prompt], llmc.SamplingParams(max_tokens=64))
    assert 168 in plain.token_ids and 168 not in expected.token_ids

    def ask(**given):
        return server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 64, **given})[
            2]["choices"][0]["message"]["content"]

    assert ask() == expected.text and json.loads(server.startup)["sampling_defaults"] == {
        "temperature": 0.0, "repetition_penalty": 1.7, "suppress_tokens": [168]}
    assert ask(repetition_penalty=1.0, logit_bias={"168": 0}) == plain.text
    completion = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 64})[2]
    assert completion["choices"][0]["text"] == expected.text


@pytest.mark.parametrize(("options", "params"), [
    ([], dict(repetition_penalty=1.7, logit_bias={168: float("-inf")})),
    (["--repetition_penalty", "1.2"], dict(repetition_penalty=1.2,
                                           logit_bias={168: float("-inf")})),
    (["--generation_config", "none"], {})])
def test_the_command_line_has_the_same_defaults(case, options, params):
    result = CliRunner().invoke(main, ["run", str(case), "--chat", "--prompt", "fox", "--json",
                                       *options])
    with llmc.LLM(case) as llm:
        expected, = llm.generate([llm.chat_prompt("fox")], llmc.SamplingParams(**params))
    completion, = json.loads(result.stdout)["completions"]
    assert completion["token_ids"] == [*expected.token_ids]


def test_a_tool_template_is_used_and_selects_the_parser(server, case):
    """Its file, in a separate folder, belongs to the case directory."""
    tools = [{"type": "function", "function": {"name": "fox"}}]
    status, _, answer = server.post("/v1/chat/completions", {
        "messages": [USER], "tools": tools, "max_tokens": 2})
    with llmc.LLM(case) as llm:
        prompt = llm.chat_prompt("fox", tools=tools)
        assert llm.detokenize(prompt) == "fox<tool_call>"
    assert status == 200 and answer["usage"]["prompt_tokens"] == len(prompt)
    check_output(case)  # a compile may replace it


def test_an_older_case_directory_is_read(case, tmp_path):
    copy = shutil.copytree(case, tmp_path / "case")
    data = json.loads((copy / "model_info.json").read_text())
    del data["sampling"], data["tokenizer"]["additional_chat_templates"]
    (copy / "model_info.json").write_text(json.dumps(data))
    with llmc.LLM(copy) as llm:
        assert llm.default_sampling_params == llmc.SamplingParams()
        assert llm.detokenize(llm.chat_prompt("fox")) == "<user>fox|"


def test_invalid_sampling_defaults_are_refused_at_load(case, tmp_path):
    copy = shutil.copytree(case, tmp_path / "case")
    for change, reason in (({"top_p": 7}, "sampling in model_info.json is not valid .top_p 7"),
                           ({"suppress_tokens": [300]}, "suppress_tokens has token id 300")):
        data = json.loads((case / "model_info.json").read_text())
        data["sampling"] = change
        (copy / "model_info.json").write_text(json.dumps(data))
        with pytest.raises(llmc.LlmcError, match=reason):
            llmc.LLM(copy)


def test_server_defaults_apply_with_an_option(case):
    with serving(case, "--generation_config", "none",
                 "--chat_template_content_format", "string") as own, llmc.LLM(case) as llm:
        assert json.loads(own.startup)["sampling_defaults"] == {"temperature": 0.0}
        assert rendered(own, USER) == "<user>"  # as text, which this template does not support
        plain, = llm.generate([llm.chat_prompt("fox")], llmc.SamplingParams(max_tokens=8))
        answer = own.post("/v1/completions", {"prompt": [*plain.prompt_token_ids],
                                              "max_tokens": 8})[2]
        assert answer["choices"][0]["text"] == plain.text


@pytest.mark.parametrize(("given", "defaults", "temperature"), [
    ({}, {}, 0.0), ({"seed": 3}, {}, 0.0), ({"top_p": 1, "n": 1, "top_k": -1}, {}, 0.0),
    ({"top_p": 0.9}, {}, 1.0), ({"n": 2}, {}, 1.0), ({"min_p": 0.1}, {}, 1.0),
    ({}, {"temperature": 0.6}, 0.6), ({"n": 2}, {"temperature": 0.6}, 0.6),
    ({"temperature": 0}, {"temperature": 0.6}, 0.0), ({"temperature": None}, {}, 0.0),
    ({"n": 2, "use_beam_search": True}, {"temperature": 0.6}, 0.0)])
def test_answers_are_greedy_by_default(given, defaults, temperature):
    body = ChatRequest.read(json.dumps({"messages": [USER], **given}).encode())
    assert body.sampling(8, None, defaults).temperature == temperature
